"""What a saved object counts as: an input, an output that carries the rule, or an intermediate; in every transform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer
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
NUMPY_TWO = np.array(2.0, np.float32)
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
    "a NumPy constant that is returned": (lambda x: (x * 1, NUMPY_TWO), lambda x, y: y[1], 2 * 2.0),
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

    loss = lambda x: sum(MarkedInSetup.apply(x))  # noqa: E731
    assert grad(loss)(1.0) == 5


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


def test_a_ref_that_forward_closes_over_is_refused_where_it_is_traced():
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

    assert run(grad) == (3, 2)  # on concrete values
    scanned = lambda f: grad(lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=2)[0])  # noqa: E731
    for traced in (lambda f: grad(jax.jit(f)), scanned, lambda f: jax.jit(grad(f)), lambda f: grad(grad(f))):
        with pytest.raises(TypeError, match=r"Counts.*as an argument"):
            run(traced)
