"""A layer adds nothing to a compiled program, and little work per call; its name appears in programs. No timing."""

from __future__ import annotations

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from pylayer_jax import Function, PyLayer
from tests.kit.layers import ForwardTanh, Tanh, layer
from tests.tools.benchmarks.timing import python_calls

# -- programs -------------------------------------------------------------------------------------


X = jnp.linspace(-1, 1, 64).reshape(8, 8)


@jax.custom_vjp
def tanh(x):
    return jnp.tanh(x)


def _tanh_forward(x):
    y = jnp.tanh(x)
    return y, y


tanh.defvjp(_tanh_forward, lambda y, dy: (dy * (1 - y**2),))


OwnBatch = layer(base=Tanh, vmap=lambda info, in_dims, x: (OwnBatch.apply(x), in_dims[0]))


@jax.custom_jvp
def forward_tanh(x):
    return jnp.tanh(x)


@forward_tanh.defjvp
def _forward_tanh_jvp(primals, tangents):
    y = jnp.tanh(primals[0])
    return y, tangents[0] * (1 - y**2)


def pushed(f):
    return lambda x: jax.jvp(f, (x,), (x + 1,))


def deep(layer, depth=50):
    def loss(x):
        for _ in range(depth):
            x = layer(x)
        return x.sum()

    return loss


def scanned(layer):
    return lambda x: jax.lax.scan(lambda c, _: (layer(c), None), x, None, length=5)[0].sum()


# A function of a layer, the layer, and the same by hand.
PROGRAMS = {
    "forward": (deep, Tanh, tanh),
    "grad": (lambda layer: jax.grad(deep(layer)), Tanh, tanh),
    "value and grad": (lambda layer: jax.value_and_grad(deep(layer)), Tanh, tanh),
    "grad of jit": (lambda layer: jax.grad(jax.jit(deep(layer))), Tanh, tanh),
    "grad of scan": (lambda layer: jax.grad(scanned(layer)), Tanh, tanh),
    "grad of remat": (lambda layer: jax.grad(jax.checkpoint(deep(layer))), Tanh, tanh),
    "vmap of grad": (lambda layer: jax.vmap(jax.grad(deep(layer))), Tanh, tanh),
    "vmap of grad with a vmap of its own": (lambda layer: jax.vmap(jax.grad(deep(layer))), OwnBatch, tanh),
    "grad with forward mode": (lambda layer: jax.grad(deep(layer)), ForwardTanh, tanh),
    "grad of remat with forward mode": (lambda layer: jax.grad(jax.checkpoint(deep(layer))), ForwardTanh, tanh),
    "jvp": (lambda layer: pushed(deep(layer)), ForwardTanh, forward_tanh),
    "jvp of scan": (lambda layer: pushed(scanned(layer)), ForwardTanh, forward_tanh),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled_program_is_that_of_a_hand_written_rule(program):
    function, layer, by_hand = PROGRAMS[program]
    ours, theirs = (jax.jit(function(f)).lower(X).compile() for f in (layer.apply, by_hand))
    assert_same_program(ours, theirs)


class LinearTanh(PyLayer):
    """Saves the scanned weights, which a scan must not stack a second time, and its input twice."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w, x)
        return jnp.tanh(x @ w)

    @staticmethod
    def backward(ctx, dy):
        x, w, _ = ctx.saved_tensor()
        dy = dy * (1 - jnp.tanh(x @ w) ** 2)
        return dy @ w.T, x.T @ dy


class ForwardLinearTanh(LinearTanh):
    forward_mode = True


@jax.custom_vjp
def linear_tanh(x, w):
    return jnp.tanh(x @ w)


def _linear_tanh_backward(residuals, dy):
    x, w = residuals
    dy = dy * (1 - jnp.tanh(x @ w) ** 2)
    return dy @ w.T, x.T @ dy


linear_tanh.defvjp(lambda x, w: (linear_tanh(x, w), (x, w)), _linear_tanh_backward)

LOOPS = {
    "no loop": lambda f: lambda x, ws: f(f(x, ws[0]), ws[0]),
    "scan": lambda f: lambda x, ws: jax.lax.scan(lambda c, w: (f(c, w), None), x, ws)[0],
    "scan of three that share their arguments": lambda f: (
        lambda x, ws: jax.lax.scan(lambda c, w: (f(c, w) + 2 * f(c, w) + 3 * f(c, w), None), x, ws)[0]
    ),
    "fori_loop": lambda f: lambda x, ws: jax.lax.fori_loop(0, 8, lambda i, c: f(c, ws[i]), x),
    "remat of scan": lambda f: jax.checkpoint(LOOPS["scan"](f)),
    "scan of remat": lambda f: LOOPS["scan"](jax.checkpoint(f)),
    "scan of jit": lambda f: LOOPS["scan"](jax.jit(f)),
}


@functools.cache
def loop_program(loop, f, jitted_first):
    def loss(x, ws):
        return LOOPS[loop](f)(x, ws).sum()

    return jax.jit(jax.grad(jax.jit(loss) if jitted_first else loss, (0, 1))).lower(X, jnp.ones((8, 8, 8))).compile()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("layer", [LinearTanh, ForwardLinearTanh])
@pytest.mark.parametrize("jitted_first", [False, True])
def test_a_loop_over_layers_is_that_of_a_hand_written_custom_vjp(loop, layer, jitted_first):
    ours, theirs = (loop_program(loop, f, jitted_first) for f in (layer.apply, linear_tanh))
    assert_same_program(ours, theirs)


def assert_same_program(ours, theirs):
    assert _instructions(ours) == _instructions(theirs)
    assert ours.cost_analysis() == theirs.cost_analysis()
    assert ours.memory_analysis().temp_size_in_bytes == theirs.memory_analysis().temp_size_in_bytes


def _instructions(compiled):
    # Opcodes of the optimized HLO, as in `%name = f32[8,8]{1,0} tanh(%x)`.
    return Counter(re.findall(r"= (?:\([^=]*\)|\S+) ([a-z][\w-]*)\(", compiled.as_text()))


def test_the_comparison_sees_one_more_operation():
    more = jax.jit(jax.grad(lambda x: deep(tanh)(jnp.sin(x)))).lower(X).compile()
    assert _instructions(more) != _instructions(jax.jit(jax.grad(deep(tanh))).lower(X).compile())


def test_eager_apply_uses_no_custom_vjp(monkeypatch):
    class Own(Tanh):
        pass

    def refuse(*args):
        raise AssertionError("the rule was used")

    monkeypatch.setattr(jax.custom_vjp, "__call__", refuse)
    assert Own.apply(X).shape == X.shape
    with pytest.raises(AssertionError, match="the rule was used"):
        jax.grad(lambda x: Own.apply(x).sum())(X)


def test_nothing_is_built_per_call(monkeypatch):
    built = []
    original = jax.custom_vjp.__init__

    def counting(self, *args, **kwargs):
        built.append(args)
        original(self, *args, **kwargs)

    monkeypatch.setattr(jax.custom_vjp, "__init__", counting)

    class Fresh(Tanh):
        pass

    for _ in range(3):
        jax.grad(lambda x: Fresh.apply(x).sum())(X)
        jax.jit(lambda x: Fresh.apply(x))(X)
    assert len(built) == 1


# -- outputs that nobody uses ---------------------------------------------------------------------


def scan_with_output(f):
    return lambda x: jax.lax.scan(lambda c, _: (c + 1, f(c)), x, None, length=3)[1]


class Both(PyLayer):
    @staticmethod
    def forward(ctx, x):
        wave = jnp.sin(x)
        ctx.save_for_backward(x, jnp.exp(x))
        return jnp.tanh(x), wave

    @staticmethod
    def backward(ctx, dy, dw):
        x, e = ctx.saved_tensor()
        return dy * (1 - jnp.tanh(x) ** 2) + dw * jnp.cos(x) + 0 * e


class ForwardBoth(Both):
    forward_mode = True


def without_unused(function, *args):
    """The function, as JAX leaves it when it has dropped what no output needs, and that as text."""
    closed = jax.make_jaxpr(function)(*args)
    jaxpr, _ = partial_eval.dce_jaxpr(getattr(closed, "jaxpr", closed), [True], instantiate=True)
    return lambda *args: jax.core.eval_jaxpr(jaxpr, closed.consts, *args)[0], str(jaxpr)


AROUND = pytest.mark.parametrize(
    "around", [lambda f: f, jax.jit, jax.vmap, scan_with_output], ids=["plain", "jit", "vmap", "scan"]
)


@pytest.mark.parametrize(("layer", "output"), [(Both, 1), (ForwardBoth, 0)])
@AROUND
def test_what_is_left_has_the_same_derivatives(layer, output, around):
    def loss(x):
        return jnp.sum(around(layer.apply)(x)[output] ** 2)

    def derivatives(loss):
        """The first, and the second in two ways."""
        first = jax.grad(loss)
        return first, jax.grad(lambda x: jnp.sum(first(x) ** 2)), lambda x: jax.jvp(first, (x,), (x,))[1]

    # Compiled in one program, as is what is expected.
    left, _ = without_unused(loss, X)
    again = [without_unused(derivative, X)[0] for derivative in derivatives(loss)[:2]]
    first, second, forward = jax.jit(lambda x: [f(x) for f in derivatives(loss)])(X)
    found = jax.jit(lambda x: [f(x) for f in (*again, *derivatives(left)[::2])])(X)
    for got, expected in zip(found, (first, second, first, forward), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


# -- a function among the arguments ---------------------------------------------------------------


@pytest.mark.parametrize("mode", [jax.grad, lambda f: jax.jit(jax.grad(f)).trace], ids=["eager", "trace"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_function_among_the_arguments_is_not_searched_by_python_code(keeps, mode):
    class Applies(Tanh):
        @staticmethod
        def forward(ctx, x, function):
            y = function(x)
            if keeps:
                ctx.function = function
            ctx.save_for_backward(y)
            return y

    found = {}
    for name, apply in {"plain": Tanh.apply, "with a function": lambda x: Applies.apply(x, jnp.tanh)}.items():
        found[name] = python_calls(lambda: mode(lambda x: deep(apply, 10)(x))(X))  # noqa: B023
    assert found["with a function"] <= 1.12 * found["plain"]


# -- the names of layers in programs, as a profiler shows them -------------------------------------


OwnJvp = layer(base=Tanh, name="OwnJvp", jvp=lambda ctx, dx: dx / jnp.cosh(ctx.saved_tensor()[0]))
OwnVmap = layer(base=Tanh, name="OwnVmap", vmap=lambda info, in_dims, x: (jnp.tan(x), in_dims[0]))
Split = layer(
    jnp.tanh,
    Tanh.backward,
    Function,
    "Split",
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def scopes(function, *args):
    """Each operation with its innermost scope: ("Tanh/forward", "tanh") for `jit(f)/jvp(Tanh/forward)/tanh`."""
    # Before the optimization: a compiled program may come from a cache, with the names of another test.
    text = jax.jit(function).lower(*args).as_text("hlo", debug_info=True)
    found = set()
    for name in re.findall(r'op_name="([^"]*)"', text):
        scope, _, operation = re.sub(r"\w+\(|\)", "", name).rpartition("/")
        found.add(("/".join(scope.split("/")[-2:]), operation))
    return found


def loss_of(layer):
    return lambda x: layer.apply(jnp.sin(x)).sum()


def pushed_loss(layer):
    return lambda x: jax.jvp(loss_of(layer), (x,), (x,))


SCOPED = {
    "jit of grad": lambda f: jax.grad(f),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
    "scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, r: (c + f(r), None), 0.0, x)[0]),
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("around", SCOPED)
@pytest.mark.parametrize("layer", [Tanh, ForwardTanh, OwnJvp, Split])
def test_forward_and_backward_bear_the_name_of_their_class(layer, around):
    found = scopes(SCOPED[around](loss_of(layer)), X)
    assert (f"{layer.__name__}/forward", "tanh") in found
    assert (f"{layer.__name__}/backward", "sub") in found
    assert not any(scope.startswith(layer.__name__) for scope, operation in found if operation in ("sin", "cos"))


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (loss_of(Tanh), {("Tanh/forward", "tanh")}),
        (pushed_loss(ForwardTanh), {("ForwardTanh/forward", "tanh"), ("ForwardTanh/backward", "sub")}),
        (pushed_loss(OwnJvp), {("OwnJvp/forward", "tanh"), ("OwnJvp/jvp", "div")}),
        (jax.vmap(OwnVmap.apply), {("OwnVmap/vmap", "tan")}),
        (jax.vmap(jax.grad(loss_of(OwnVmap))), {("OwnVmap/vmap", "tan"), ("OwnVmap/backward", "sub")}),
    ],
    ids=["forward", "jvp", "jvp of its own", "vmap of its own", "vmap of its own and grad"],
)
def test_other_methods_bear_the_name_too(function, names):
    assert names <= scopes(function, X)


def test_a_layer_within_a_layer():
    class Outer(Tanh):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return jnp.exp(Tanh.apply(x))

        @staticmethod
        def backward(ctx, dy):
            return Tanh.apply(dy)

    text = jax.jit(jax.value_and_grad(loss_of(Outer))).lower(X).as_text("hlo", debug_info=True)
    assert re.search(r"\(Outer/forward\)/exp", text)
    assert re.search(r"\(Outer/forward\)/(eval_jaxpr/)?Tanh/forward/tanh", text)
    assert re.search(r"\(Outer/backward\)\)/Tanh/forward/tanh", text)
