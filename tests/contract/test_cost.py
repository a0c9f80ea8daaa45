"""A layer adds nothing to a compiled program, and little work per call; programs show its name. Nothing is timed."""

import functools
import inspect
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax import Function
from tests.kit.case import ruled
from tests.kit.layers import ForwardTanh, Tanh, layer, loss
from tests.kit.modes import MODES
from tests.tools.benchmarks.contestants import chain
from tests.tools.benchmarks.timing import python_calls

X = jnp.linspace(-1, 1, 64).reshape(8, 8)


tanh = jax.custom_vjp(jnp.tanh)
tanh.defvjp(lambda x: (jnp.tanh(x),) * 2, lambda y, dy: (dy * (1 - y**2),))
forward_tanh = jax.custom_jvp(jnp.tanh)
forward_tanh.defjvps(lambda dx, y, x: dx * (1 - y**2))
OwnBatch = layer(base=Tanh, vmap=lambda info, in_dims, x: (OwnBatch.apply(x), in_dims[0]))


def pushed(f):
    return lambda x: jax.jvp(f, (x,), (x + 1,))


def scanned(layer):
    return lambda x: jax.lax.scan(lambda c, _: (layer(c), None), x, None, length=5)[0].sum()


# A function of a layer, the layer, and the same by hand.
PROGRAMS = {
    "forward": (lambda layer: chain(layer, 50), Tanh, tanh),
    "grad of remat": (lambda layer: jax.grad(jax.checkpoint(chain(layer, 50))), Tanh, tanh),
    "vmap of grad": (lambda layer: jax.vmap(jax.grad(chain(layer, 50))), Tanh, tanh),
    "vmap of grad with a vmap of its own": (lambda layer: jax.vmap(jax.grad(chain(layer, 50))), OwnBatch, tanh),
    "grad of remat with forward mode": (lambda layer: jax.grad(jax.checkpoint(chain(layer, 50))), ForwardTanh, tanh),
    "jvp": (lambda layer: pushed(chain(layer, 50)), ForwardTanh, forward_tanh),
    "jvp of scan": (lambda layer: pushed(scanned(layer)), ForwardTanh, forward_tanh),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled_program_is_that_of_a_hand_written_rule(program):
    function, layer, by_hand = PROGRAMS[program]
    ours, theirs = (jax.jit(function(f)).lower(X).compile() for f in (layer.apply, by_hand))
    assert_same_program(ours, theirs)


def linear_tanh(x, w):
    return jnp.tanh(x @ w)


def gradients_of_linear_tanh(x, w, dy):
    dy = dy * (1 - linear_tanh(x, w) ** 2)
    return dy @ w.T, x.T @ dy


# Saves the scanned weights, which a scan must not stack a second time, and its input twice.
LinearTanh = layer(
    lambda ctx, x, w: ctx.save_for_backward(x, w, x) or linear_tanh(x, w),
    lambda ctx, dy: gradients_of_linear_tanh(*ctx.saved_tensors[:2], dy),
)
ForwardLinearTanh = layer(base=LinearTanh, forward_mode=True)
LinearTanhByHand = ruled(linear_tanh, lambda saved, dy: gradients_of_linear_tanh(*saved, dy))

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
@pytest.mark.parametrize(("layer", "jitted_first"), [(LinearTanh, False), (ForwardLinearTanh, True)])
def test_a_loop_over_layers_is_that_of_a_hand_written_custom_vjp(loop, layer, jitted_first):
    ours, theirs = (loop_program(loop, f, jitted_first) for f in (layer.apply, LinearTanhByHand))
    assert_same_program(ours, theirs)


def assert_same_program(ours, theirs):
    assert _instructions(ours) == _instructions(theirs)
    assert ours.cost_analysis() == theirs.cost_analysis()
    assert ours.memory_analysis().temp_size_in_bytes == theirs.memory_analysis().temp_size_in_bytes


def _instructions(compiled):
    # Opcodes of the optimized HLO, as in `%name = f32[8,8]{1,0} tanh(%x)`.
    return Counter(re.findall(r"= (?:\([^=]*\)|\S+) ([a-z][\w-]*)\(", compiled.as_text()))


def test_eager_apply_uses_no_custom_vjp(monkeypatch):
    own = layer(base=Tanh)
    monkeypatch.setattr(jax.custom_vjp, "__call__", lambda *args: pytest.fail("the rule was used"))
    assert own.apply(X).shape == X.shape
    with pytest.raises(pytest.fail.Exception, match="the rule was used"):
        jax.grad(loss(own))(X)


def test_jax_does_not_derive_the_names_of_arguments_in_each_application(monkeypatch):
    """JAX reads them from `__fun_debug_info__` of the three functions of a custom_vjp; else tracing takes 1.2 times."""
    seen, signature = [], inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda *args, **kwargs: seen.append(0) or signature(*args, **kwargs))
    counts = []
    for depth in (2, 12):
        seen.clear()
        jax.make_jaxpr(jax.grad(chain(Tanh.apply, depth)))(X)
        counts.append(len(seen))
    assert counts[1] - counts[0] <= 10  # one per application, by `jax.custom_vjp` itself


def test_nothing_is_built_per_call(monkeypatch):
    built, original = [], jax.custom_vjp.__init__
    monkeypatch.setattr(jax.custom_vjp, "__init__", lambda *args, **named: built.append(0) or original(*args, **named))
    fresh = layer(base=Tanh)
    for _ in range(3):
        jax.grad(loss(fresh))(X)
        jax.jit(lambda x: fresh.apply(x))(X)
    assert len(built) == 1


@pytest.mark.parametrize("mode", [jax.grad, lambda f: jax.jit(jax.grad(f)).trace], ids=["eager", "trace"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_function_among_the_arguments_is_not_searched_by_python_code(keeps, mode):
    def forward(ctx, x, function):
        ctx.function = function if keeps else None
        return Tanh.forward(ctx, x)

    def calls_of(apply):
        return python_calls(lambda: mode(chain(apply, 10))(X))

    applies = layer(forward, base=Tanh)
    assert calls_of(lambda x: applies.apply(x, jnp.tanh)) <= 1.13 * calls_of(Tanh.apply)


OwnJvp = layer(base=Tanh, name="OwnJvp", jvp=lambda ctx, dx: dx / jnp.cosh(ctx.saved_tensor()[0]))
OwnVmap = layer(base=Tanh, name="OwnVmap", vmap=lambda info, in_dims, x: (jnp.tan(x), in_dims[0]))
setup = {"setup_context": lambda ctx, inputs, output: ctx.save_for_backward(output)}
Split = layer(jnp.tanh, Tanh.backward, Function, "Split", **setup)


def scopes(function, *args):
    """Return each operation with its innermost scope: ("Tanh/forward", "tanh") for `jit(f)/jvp(Tanh/forward)/tanh`."""
    # Before the optimization: a compiled program may come from a cache, with the names of another test.
    text = jax.jit(function).lower(*args).as_text("hlo", debug_info=True)
    found = set()
    for name in re.findall(r'op_name="([^"]*)"', text):
        scope, _, operation = re.sub(r"\w+\(|\)", "", name).rpartition("/")
        found.add(("/".join(scope.split("/")[-2:]), operation))
    return found


def loss_of(layer):
    return lambda x: layer.apply(jnp.sin(x)).sum()


Outer = layer(lambda x: jnp.exp(Tanh.apply(x)), lambda x, dy: Tanh.apply(dy), name="Outer", plain=True)
BOTH = {("Tanh/forward", "tanh"), ("Tanh/backward", "sub")}
# A function, and operations of it with their scopes.
NAMED = {
    "forward": (loss_of(Tanh), {("Tanh/forward", "tanh")}),
    **{name: (MODES[name](loss_of(Tanh)), BOTH) for name in ("jit-grad", "scan", "remat")},
    "forward mode": (pushed(loss_of(ForwardTanh)), {("ForwardTanh/forward", "tanh"), ("ForwardTanh/backward", "sub")}),
    "jvp of its own": (pushed(loss_of(OwnJvp)), {("OwnJvp/forward", "tanh"), ("OwnJvp/jvp", "div")}),
    "vmap of its own": (jax.vmap(jax.grad(loss_of(OwnVmap))), {("OwnVmap/vmap", "tan"), ("OwnVmap/backward", "sub")}),
    "setup_context": (jax.grad(loss_of(Split)), {("Split/forward", "tanh"), ("Split/backward", "sub")}),
    "within a layer": (jax.value_and_grad(loss_of(Outer)), {("Outer/forward", "exp"), ("Tanh/forward", "tanh")}),
}


@pytest.mark.parametrize(("function", "names"), NAMED.values(), ids=NAMED)
def test_methods_bear_the_name_of_their_class(function, names):
    found = scopes(function, X)
    assert names <= found
    around = [scope for scope, operation in found if operation in ("sin", "cos")]
    assert not [scope for scope in around if scope.endswith(("/forward", "/backward"))]
