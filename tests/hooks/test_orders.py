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


DERIVATIVES = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "jacfwd": jax.jacfwd,
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum()),
    "reverse twice": lambda f: jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum()),
    "reverse over forward": lambda f: jax.jacrev(lambda x: jax.jvp(f, (x,), (x,))[1]),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_block_in_a_backward_that_is_transposed(derivative, jitted):
    class Twice(PyLayer):
        forward_mode = True

        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    class Squared(PyLayer):
        forward_mode = True

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, dy):
            with bits():
                return 2 * ctx.saved_tensor()[0] * Twice.apply(dy) / 2

    around = jax.jit if jitted else lambda f: f
    np.testing.assert_allclose(
        around(DERIVATIVES[derivative](Squared.apply))(X), DERIVATIVES[derivative](lambda x: x * x)(X), rtol=1e-6
    )


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_forward_mode_directly_around_a_block(jitted):
    def tangent(w):
        return jax.jvp(bits()(lambda x: jnp.sin(x) * w), (X,), (X,))[1]

    np.testing.assert_allclose((jax.jit if jitted else lambda f: f)(tangent)(X), jnp.cos(X) * X * X, rtol=1e-6)
