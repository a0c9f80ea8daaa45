"""Forward mode through a block of hooks: as if the block was not there; in eager mode nothing is packed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from tests.kit.layers import ForwardTanh, Tanh

from .spy import in_block

X = jnp.array([[0.3, -0.5, 1.2], [0.8, 0.1, -0.7]])
W = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)


class PushedTanh(Tanh):
    @staticmethod
    def jvp(ctx, dx):
        (y,) = ctx.saved_tensor()
        return dx * (1 - y * y)


def everything(x):
    x = jnp.sin(x @ W) * jnp.exp(x) + jnp.where(jnp.argsort(x) > 0, x, x * x)
    x = PushedTanh.apply(ForwardTanh.apply(x @ W) * x)
    x = jax.lax.scan(lambda c, w: (jnp.tanh(c * w), c), x, W)[0]
    return jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: ForwardTanh.apply(x) ** 2, x)


AROUND = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "fori_loop": lambda f: lambda x: jax.lax.fori_loop(0, 2, lambda _, c: f(c), x),
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] > -9, f, jnp.sin, x),
    "jit of vmap": lambda f: jax.jit(jax.vmap(lambda x: f(x[None])[0])),
    "vmap of checkpoint": lambda f: jax.vmap(jax.checkpoint(lambda x: f(x[None])[0])),
}
DERIVATIVES = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "jacfwd of jacfwd": lambda f: jax.jacfwd(jax.jacfwd(lambda x: f(x)[0])),
}


def noting(f):
    """`f` in a block, and what was packed."""
    packed = []
    pack = lambda x: packed.append(x) or (x,)  # noqa: E731
    return in_block(saved_tensors_hooks(pack, lambda kept: kept[0], differentiable=True), f), packed


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("around", AROUND)
def test_it_passes_through_a_block(around, derivative):
    hooked, packed = noting(everything)
    expected = jax.jit(DERIVATIVES[derivative](AROUND[around](everything)))(X)
    got = DERIVATIVES[derivative](AROUND[around](hooked))(X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), got, expected)
    assert around != "eager" or not packed


def test_reverse_over_forward():
    hooked, _ = noting(lambda x: jnp.sin(x @ W) * x)
    slope = jax.jit(lambda x: jax.jvp(hooked, (x,), (x,))[1].sum())
    expected = jax.grad(lambda x: jax.jvp(lambda x: jnp.sin(x @ W) * x, (x,), (x,))[1].sum())(X)
    np.testing.assert_allclose(jax.grad(slope)(X), expected, rtol=1e-5)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_linear_transpose(jit):
    def linear(x):
        return jnp.sin(W) @ (3.0 * x) + jnp.where(W > 0, x, 0.0)

    hooked, _ = noting(linear)
    (expected,) = jax.vjp(linear, W)[1](W)
    (got,) = jax.linear_transpose(jit(hooked), W)(W)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
