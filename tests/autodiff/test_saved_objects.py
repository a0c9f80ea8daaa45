"""What a saved object counts as: an input, an output that carries the rule, or an intermediate; in every transform."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer
from tests.kit.layers import layer_of
from tests.kit.modes import SECOND, STAGED

grad = jax.grad
X, S, C = 0.7, np.sin(0.7), np.cos(0.7)
ways = pytest.mark.parametrize("second", SECOND.values(), ids=list(SECOND))


def layer(forward, save, marks_last=False, kind="PyLayer", **attributes):
    """A layer of one input, which saves save(inputs, outputs); its second derivative is the one of `save`."""

    def set_up(ctx, inputs, output):
        ctx.save_for_backward(save(*inputs, output))
        if marks_last:
            ctx.mark_non_differentiable(output[-1])

    def forward_with_ctx(ctx, x):
        output = forward(x)
        set_up(ctx, (x,), output)
        return output

    methods = {"backward": staticmethod(lambda ctx, *dys: sum(dys) * ctx.saved_tensors[0])}
    if kind == "PyLayer":
        return type("Saves", (PyLayer,), methods | {"forward": staticmethod(forward_with_ctx)} | attributes)
    methods |= {"forward": staticmethod(forward), "setup_context": staticmethod(set_up)}
    return type("Saves", (Function,), methods | attributes)


TWO = jnp.float32(2.0)
two_results = jax.jit(lambda x: (jnp.sin(x), x**3))

# name: forward, what is saved (x, output), the second derivative of the sum of the outputs at X. As backward is dy * m,
# the derivative of m is: the own one for an input, m for an output (the rule), through forward for an intermediate.
CASES = {
    "an input that is returned": (lambda x: x, lambda x, y: x * x, 2 * X),
    "a no-op by astype": (lambda x: x.astype(x.dtype), lambda x, y: x * x, 2 * X),
    "a no-op by reshape": (lambda x: x.reshape(x.shape), lambda x, y: x * x, 2 * X),
    "a no-op by real": (lambda x: jnp.real(x), lambda x, y: x * x, 2 * X),
    "a new value": (lambda x: x + 0, lambda x, y: x * x, 2 * X),
    "an input in a list": (lambda x: [x], lambda x, y: x * x, 2 * X),
    "the input as the output": (lambda x: x, lambda x, y: y, 1.0),
    "an output": (jnp.sin, lambda x, y: y, S),
    "computed from the output": (jnp.sin, lambda x, y: y * y, 2 * S * S**2),
    "computed from the output and the input": (jnp.sin, lambda x, y: y * x, S * X * X + S),
    "one object twice": (lambda x: (lambda y: (y, y))(jnp.sin(x)), lambda x, y: y[0] * y[0], 2 * 2 * S * S**2),
    "one object twice, the first": (lambda x: (lambda y: (y, y))(jnp.sin(x)), lambda x, y: y[0], 2 * S),
    "of a constant that is returned": (lambda x: TWO, lambda x, y: x * TWO, 2.0),
    "a constant that is returned": (lambda x: (x * 1, TWO), lambda x, y: TWO, 2 * 2.0),
    "one of two results of an operation": (
        lambda x: two_results(x)[0],
        lambda x, y: two_results(x)[1] * y,
        S * X**3 * X**3 + S * 3 * X**2,
    ),
}


# The same, where the last output is marked: saved, it is a constant; for what is computed from it, it is plain code.
MARKED = {
    "a marked output": (lambda x: (x * 1, x**3), lambda x, ys: ys[1], 0.0),
    "computed from a marked output": (lambda x: (x * 1, x**3), lambda x, ys: ys[1] * 2 * ys[1], 12 * X**5),
    "computed from a marked input": (lambda x: (jnp.cos(x), x), lambda x, ys: -jnp.sin(x), -C),
}


@ways
@pytest.mark.parametrize("kind", ["PyLayer", "setup_context"])
def test_second_derivative_by_what_is_saved(kind, second):
    for forward_mode in (False, True) if kind == "PyLayer" else (True,):
        for name, (forward, save, expected) in (CASES | MARKED).items():
            apply = layer(forward, save, name in MARKED, kind, forward_mode=forward_mode).apply
            found = second(lambda x: sum(jax.tree.leaves(apply(x))))(jnp.float32(X))  # noqa: B023
            np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=f"{name}, {forward_mode=}")


def test_setup_context_may_mark_an_input_that_is_returned():
    class MarkedInSetup(Function):
        @staticmethod
        def forward(x):
            return x, 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.mark_non_differentiable(inputs[0])

        @staticmethod
        def backward(ctx, _, dy):
            return 5 * dy

        @staticmethod
        def vmap(info, in_dims, x):
            return (x, 2 * x), (0, 0)

    loss = lambda x: sum(MarkedInSetup.apply(x))  # noqa: E731
    assert grad(loss)(1.0) == 5
    assert jax.vmap(grad(loss))(jnp.ones(2)).tolist() == [5, 5]
    assert grad(lambda x: jax.vmap(loss)(x).sum())(jnp.ones(2)).tolist() == [5, 5]


def test_one_array_in_two_arguments_of_which_one_is_marked():
    class FirstMarked(PyLayer):
        @staticmethod
        def forward(ctx, a, b):
            ctx.mark_non_differentiable(a)
            return a, b

        @staticmethod
        def backward(ctx, da, db):
            return da, db

    loss = lambda x: sum(FirstMarked.apply(x, x))  # noqa: E731
    for derivative in (grad(loss), jax.jit(grad(loss)), grad(jax.jit(loss))):
        assert derivative(jnp.float32(1)) == 1  # one object, which a Python number would not be


def test_an_output_that_no_mapped_argument_reaches():
    class SinOfTheSecond(PyLayer):
        @staticmethod
        def forward(ctx, a, b):
            y = jnp.sin(b)
            ctx.save_for_backward(y * y)
            return y

        @staticmethod
        def backward(ctx, dy):
            return (dy * ctx.saved_tensors[0],) * 2

    def around(b):
        return jax.vmap(grad(SinOfTheSecond.apply), (0, None))(jnp.ones(2), b).sum()

    for derivative in (grad(around), jax.jit(grad(around)), lambda b: jax.jvp(around, (b,), (1.0,))[1]):
        np.testing.assert_allclose(derivative(X), 2 * 2 * S * S**2, rtol=1e-5)


# -- Refs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forward_mode", [False, True])
def test_a_ref_that_forward_makes_is_right_at_every_order(forward_mode):
    def saved(x, _):
        ref = jax.new_ref(jnp.zeros_like(x))
        ref[...] = x**3
        return ref[...]

    apply = layer(lambda x: x * 1, saved, forward_mode=forward_mode).apply
    for within in (lambda f: f, STAGED["jit"], STAGED["checkpoint"], STAGED["cond"]):
        f = within(apply)
        np.testing.assert_allclose(grad(f)(X), X**3, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(grad(f))(X), X**3, rtol=1e-5)
    for name, second in SECOND.items():
        if "of vmap" not in name:
            np.testing.assert_allclose(second(apply)(jnp.float32(X)), 3 * X**2, rtol=1e-5, err_msg=name)


def test_a_ref_that_forward_closes_over_has_a_first_derivative():
    def run(derivative):
        ref = jax.new_ref(jnp.zeros(()))

        class Counts(PyLayer):
            @staticmethod
            def forward(ctx, x):
                ref[...] += x
                return x * ref[...]

            @staticmethod
            def backward(ctx, dy):
                return 3 * dy

        return derivative(Counts.apply)(jnp.float32(2.0)), ref[...]

    scanned = lambda f: grad(lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=2)[0])  # noqa: E731
    for derivative, expected in ((grad, 3), (lambda f: grad(jax.jit(f)), 3), (scanned, 6)):
        assert run(derivative)[0] == expected
    assert jax.jit(lambda: run(grad))() == (3, 2)
    for second in (lambda f: grad(grad(f)), lambda f: jax.jit(grad(grad(f)))):
        with pytest.raises(TypeError, match=r"Counts\.forward writes a jax\.Ref that it closes over"):
            run(second)


# -- host code ----------------------------------------------------------------------------------------


class Box:
    def __init__(self, value):
        self.value = value


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["scale"])
@dataclasses.dataclass
class Scaled:
    value: object
    scale: float


SCALE = 0.5
KEPT = {  # what forward keeps of x and a static argument; whether it may depend on x
    "a float": (lambda x, fn: float(x), True),
    "a list of floats": (lambda x, fn: [float(x)], True),
    "a closure": (lambda x, fn: (lambda value: lambda: value)(float(x)), True),
    "an object": (lambda x, fn: Box(np.asarray(x)), True),
    "a key": (lambda x, fn: {float(x): None}, True),
    "a key of a dict of tensors": (lambda x, fn: [{(1, float(x)): x}], True),
    "a static field": (lambda x, fn: Scaled(x, float(x)), True),
    "bytes": (lambda x, fn: np.asarray(x).tobytes(), True),
    "a NumPy array": (lambda x, fn: np.asarray(x), True),
    "a known key": (lambda x, fn: {"a": {SCALE: x}}, False),
    "an integer": (lambda x, fn: int(x), False),
    "an argument": (lambda x, fn: fn, False),
    "a constant": (None, False),
    "a global": (None, False),
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("forward_mode", [False, True])
def test_what_host_code_keeps_has_no_second_derivative(kept, forward_mode):
    if jax.config.jax_custom_vjp3 and not forward_mode:
        pytest.skip("under jax_custom_vjp3 forward must be traceable")
    keep, may_depend = KEPT[kept]

    def on_host(ctx, x, fn):
        ctx.kept = 0.25 if kept == "a constant" else SCALE if kept == "a global" else keep(x, fn)
        ctx.save_for_backward(x)
        return jnp.asarray(np.sin(np.asarray(x)))

    layer = layer_of(
        None, lambda x, dy: (dy * x**2, None), "Keeps", forward=staticmethod(on_host), forward_mode=forward_mode
    )
    apply = lambda x: layer.apply(x, jnp.sin)  # noqa: E731
    np.testing.assert_allclose(grad(apply)(X), X**2, rtol=1e-5)
    for second in (SECOND["grad of grad"](apply), SECOND["jvp of grad"](apply)):
        if may_depend:
            with pytest.raises(TypeError, match="Keeps: a second derivative goes through forward"):
                second(X)
        else:
            np.testing.assert_allclose(second(X), 2 * X, rtol=1e-5)


def cube(ctx, x):
    ctx.save_for_backward(x)
    return jnp.asarray(np.asarray(x) ** 3)


def to_global(ctx, x, held):
    global last
    last = float(x)
    ctx.kept = last
    return cube(ctx, x)


def to_nonlocal():
    last = 0.0

    def keep(ctx, x, held):
        nonlocal last
        last = float(x)
        ctx.kept = last
        return cube(ctx, x)

    return keep


def to_object(ctx, x, held):
    held.value = float(x)
    ctx.kept = held
    return cube(ctx, x)


def to_set(ctx, x, held):
    NUMBERS.add(float(x))
    ctx.kept = NUMBERS
    return cube(ctx, x)


def to_global_object(ctx, x, held):
    HOLDER.value["last"] = float(x)
    ctx.kept = HOLDER
    return cube(ctx, x)


def to_array(ctx, x, held):
    BUFFER[0] = float(x)
    ctx.kept = HOLDER
    return cube(ctx, x)


def constants(ctx, x, held):
    held.value = len(np.shape(float(x)))
    ctx.kept = [held, math.pi, Scales.half, (0.25, 4.0), jnp.sin, held.method, {1, 2}]
    return cube(ctx, x)


class Scales:
    half = 0.5


class Held(Box):
    def method(self):
        return 2.5


last, NUMBERS, BUFFER = 0.0, set(), np.zeros(2)
HOLDER = Box({"last": 0.0, "buffer": BUFFER})
WRITES = [to_global, to_nonlocal(), to_object, to_set, to_global_object, to_array]


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("write", [*WRITES, constants], ids=lambda f: f.__qualname__.partition(".")[0])
def test_what_host_code_writes_to_what_was_there_has_no_second_derivative(write, forward_mode):
    if jax.config.jax_custom_vjp3 and not forward_mode:
        pytest.skip("under jax_custom_vjp3 forward must be traceable")

    backward = lambda x, dy: (3 * dy * x**2, None)  # noqa: E731
    writes = layer_of(None, backward, "Writes", forward=staticmethod(write), forward_mode=forward_mode)
    NUMBERS.clear()
    BUFFER[:] = 0
    second = grad(grad(lambda x: writes.apply(x, Held(0.0))))
    if write is constants:
        assert second(2.0) == 12
    else:
        with pytest.raises(
            TypeError, match=r"Writes: a second derivative goes through forward.* kept ctx\.kept, which"
        ):
            second(2.0)


def leaves(where):
    """A layer that leaves x where its `backward` reads it."""
    held, numbers = Box(None), []

    class Leaves(PyLayer):
        x = None

        @staticmethod
        def forward(ctx, x):
            global last
            last = Leaves.x = held.value = x
            numbers.append(np.asarray(x))
            return jnp.asarray(np.exp(np.asarray(x)))

        @staticmethod
        def backward(ctx, dy):
            raise NotImplementedError

    reads = {
        "a global": lambda ctx, dy: dy * jnp.exp(last),
        "a member of a class": lambda ctx, dy: dy * jnp.exp(Leaves.x),
        "an object": lambda ctx, dy: dy * jnp.exp(held.value),
        "a list": lambda ctx, dy: dy * jnp.exp(numbers[-1]),
        "nothing": lambda ctx, dy: dy * jnp.exp(HOLDER.value["last"]),
    }
    Leaves.backward = staticmethod(reads[where])
    return Leaves


@pytest.mark.parametrize(
    ("where", "named"),
    [("a global", "last"), ("a member of a class", r"Leaves\.x"), ("an object", "held"), ("a list", "numbers")],
)
def test_what_host_code_leaves_for_backward_has_no_second_derivative(where, named):
    if jax.config.jax_custom_vjp3:
        pytest.skip("under jax_custom_vjp3 forward must be traceable")
    first = grad(leaves(where).apply)
    np.testing.assert_allclose(first(0.5), math.exp(0.5), rtol=1e-6)
    with pytest.raises(TypeError, match=rf"Leaves: a second derivative goes .* {named} \(which backward reads\)"):
        grad(first)(0.5)
    HOLDER.value["last"] = 0.0
    assert grad(grad(leaves("nothing").apply))(0.5) == 0  # what was there before is a constant


# -- needs_input_grad ---------------------------------------------------------------------------------


def test_needs_input_grad_is_false_where_nothing_is_differentiated():
    seen = []

    class Asks(PyLayer):
        @staticmethod
        def forward(ctx, x, w):
            seen.append(ctx.needs_input_grad)
            return x * w

        @staticmethod
        def backward(ctx, dy):
            return dy, dy

    jax.jit(Asks.apply)(1.0, jnp.float32(2.0))
    jax.vmap(Asks.apply, (0, None))(jnp.ones(2), jnp.float32(2.0))
    assert set(seen) == {(False, False)}
    x, w = jnp.float32(1.0), jnp.float32(2.0)
    for derivative in (grad(jax.jit(Asks.apply)), jax.jit(grad(Asks.apply)), grad(jax.checkpoint(Asks.apply))):
        derivative(x, w)
        assert seen[-1] == (True, False)


def test_other_outputs_where_something_is_differentiated_are_an_error_under_jit():
    class Grows(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return (x, 2 * x) if any(ctx.needs_input_grad) else (x,)

        @staticmethod
        def backward(ctx, *dys):
            return dys[0]

    if jax.config.jax_custom_vjp3:
        pytest.skip("jax_custom_vjp3 always runs forward undifferentiated too")
    first = lambda x: Grows.apply(x)[0]  # noqa: E731
    assert grad(first)(1.0) == 1
    with pytest.raises(ValueError, match=r"Grows\.forward returned 1 tensor where nothing is differentiated"):
        grad(jax.jit(first))(1.0)
