"""saved_tensors_hooks under several derivatives of one function."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer, once_differentiable
from tests.kit.layers import Square, Tanh, bits
from tests.kit.modes import EAGER_AND_JIT

from .spy import Spy, X, in_block


def test_once_differentiable_under_hooks():
    class Once(Square):
        backward = staticmethod(once_differentiable(Square.backward))

    first = jax.grad(lambda x: Once.apply(x).sum())
    with bits():
        np.testing.assert_allclose(first(X), 2 * X, rtol=1e-6)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            jax.grad(lambda x: first(x).sum())(X)


def test_a_second_derivative_of_staged_hooks_is_refused_unless_they_are_differentiable():
    def second(hooks):
        step = in_block(hooks, lambda c, _: (jnp.sin(Tanh.apply(c)), None))
        first = jax.grad(lambda x: jax.lax.scan(step, x, None, length=2)[0].sum())
        return jax.jit(jax.grad(lambda x: jnp.sum(first(x) ** 2)))(X)

    with pytest.raises(TypeError, match=r"second derivative goes through Tanh, saved tensor 0.*differentiable=True"):
        second(bits())
    np.testing.assert_allclose(second(Spy(differentiable=True).hooks), second(contextlib.nullcontext()), rtol=1e-5)


def test_one_jitted_function_differentiated_for_different_arguments_in_turn():
    def plain(x, w):
        return jax.lax.scan(lambda c, _: (jnp.sin(c * w), None), x, None, length=3)[0].sum()

    w, f = X + 2, jax.jit(in_block(bits(), plain))
    value, by_x = jax.vjp(lambda x: f(x, w), X)
    _, by_w = jax.vjp(lambda w: f(X, w), w)
    expected = jax.grad(plain, (0, 1))(X, w)
    for pullback, slope in zip((by_x, by_w), expected, strict=True):
        np.testing.assert_allclose(pullback(jnp.ones_like(value))[0], slope, rtol=1e-5)


DERIVATIVES = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "jacfwd": jax.jacfwd,
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum()),
    "reverse twice": lambda f: jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum()),
    "reverse over forward": lambda f: jax.jacrev(lambda x: jax.jvp(f, (x,), (x,))[1]),
}


class Twice(PyLayer):
    forward_mode = True

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


@EAGER_AND_JIT
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_block_in_a_backward_that_is_transposed(derivative, mode):
    class Squared(Square):
        @staticmethod
        def backward(ctx, dy):
            with bits():
                return ctx.saved_tensor()[0] * Twice.apply(dy)

    of = DERIVATIVES[derivative]
    np.testing.assert_allclose(mode(of(Squared.apply))(X), of(lambda x: x * x)(X), rtol=1e-6)


@EAGER_AND_JIT
def test_forward_mode_directly_around_a_block(mode):
    def tangent(w):
        return jax.jvp(bits()(lambda x: jnp.sin(x) * w), (X,), (X,))[1]

    np.testing.assert_allclose(mode(tangent)(X), jnp.cos(X) * X * X, rtol=1e-6)
