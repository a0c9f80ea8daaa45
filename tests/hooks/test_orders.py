"""saved_tensors_hooks under several derivatives of one function."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer, once_differentiable
from tests.kit.layers import Tanh, bits

from .spy import Spy, X


def test_once_differentiable_under_hooks():
    class Cube(PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @once_differentiable
        def backward(ctx, dy):
            (x,) = ctx.saved_tensor()
            return 3 * x**2 * dy

    with bits():
        np.testing.assert_allclose(jax.grad(lambda x: Cube.apply(x).sum())(X), 3 * X**2, rtol=1e-6)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            jax.grad(lambda x: jax.grad(lambda x: Cube.apply(x).sum())(x).sum())(X)


def test_a_second_derivative_of_staged_hooks_is_refused_unless_they_are_differentiable():
    def loss(hooks):
        def body(c, _):
            with hooks:
                return jnp.sin(Tanh.apply(c)), None

        return lambda x: jax.lax.scan(body, x, None, length=2)[0].sum()

    def second(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)))(X)

    with pytest.raises(TypeError, match=r"second derivative goes through Tanh, saved tensor 0.*differentiable=True"):
        second(loss(bits()))
    np.testing.assert_allclose(
        second(loss(Spy(differentiable=True).hooks)), second(loss(contextlib.nullcontext())), rtol=1e-5
    )


def test_one_jitted_function_differentiated_for_different_arguments_in_turn():
    def plain(x, w):
        return jax.lax.scan(lambda c, _: (jnp.sin(c * w), None), x, None, length=3)[0].sum()

    @jax.jit
    def f(x, w):
        with bits():
            return plain(x, w)

    w = X + 2
    value, by_x = jax.vjp(lambda x: f(x, w), X)
    _, by_w = jax.vjp(lambda w: f(X, w), w)
    np.testing.assert_allclose(by_x(jnp.ones_like(value))[0], jax.grad(plain)(X, w), rtol=1e-5)
    np.testing.assert_allclose(by_w(jnp.ones_like(value))[0], jax.grad(plain, 1)(X, w), rtol=1e-5)
