"""Forward mode through a block of hooks: as if the block was not there; what is packed, when, and how often."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit.layers import ForwardTanh, Multiply, Tanh, bits, layer
from tests.kit.modes import EAGER_AND_JIT, STAGED

from .spy import GRADIENTS, Spy, in_block, noting

X = jnp.array([[0.3, -0.5, 1.2], [0.8, 0.1, -0.7]])
W = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)


PushedTanh = layer(base=Tanh, jvp=lambda ctx, dx: dx * (1 - ctx.saved_tensor()[0] ** 2))


def everything(x):
    x = jnp.sin(x @ W) * jnp.exp(x) + jnp.where(jnp.argsort(x) > 0, x, x * x)
    x = PushedTanh.apply(ForwardTanh.apply(x @ W) * x)
    x = jax.lax.scan(lambda c, w: (jnp.tanh(c * w), c), x, W)[0]
    return jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: ForwardTanh.apply(x) ** 2, x)


AROUND = {
    "eager": lambda f: f,
    **STAGED,
    "jit of vmap": lambda f: jax.jit(jax.vmap(lambda x: f(x[None])[0])),
    "vmap of checkpoint": lambda f: jax.vmap(jax.checkpoint(lambda x: f(x[None])[0])),
}
DERIVATIVES = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "jacfwd of jacfwd": lambda f: jax.jacfwd(jax.jacfwd(lambda x: f(x)[0])),
}


def blocked(f):
    """`f` in a block, and what was packed."""
    packed = []
    return in_block(noting(packed, differentiable=True), f), packed


@pytest.mark.parametrize("derivative", ["jvp", pytest.param("jacfwd of jacfwd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("around", AROUND)
def test_it_passes_through_a_block(around, derivative):
    hooked, packed = blocked(everything)
    expected = jax.jit(DERIVATIVES[derivative](AROUND[around](everything)))(X)
    got = DERIVATIVES[derivative](AROUND[around](hooked))(X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), got, expected)
    assert around != "eager" or not packed


def test_reverse_over_forward():
    def slope(f):
        return jax.grad(jax.jit(lambda x: jax.jvp(f, (x,), (x,))[1].sum()))(X)

    plain = lambda x: jnp.sin(x @ W) * x  # noqa: E731
    np.testing.assert_allclose(slope(blocked(plain)[0]), slope(plain), rtol=1e-5)


@EAGER_AND_JIT
def test_linear_transpose(mode):
    def linear(x):
        return jnp.sin(W) @ (3.0 * x) + jnp.where(W > 0, x, 0.0)

    hooked, _ = blocked(linear)
    (expected,) = jax.vjp(linear, W)[1](W)
    (got,) = jax.linear_transpose(mode(hooked), W)(W)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


# -- what is packed of layers with forward mode ----------------------------------------------------


TWO = jnp.array([0.3, 0.7])
ForwardMultiply = layer(base=Multiply, forward_mode=True)


def test_jacobian_under_hooks():
    jacobian = jax.jacfwd(ForwardMultiply.apply, (0, 1))
    with bits():  # the tangents are mapped, and what was packed is not
        for run in (jacobian, jax.jit(jacobian)):
            np.testing.assert_allclose(run(TWO, TWO + 1), [jnp.diag(TWO + 1), jnp.diag(TWO)], rtol=1e-6)


def test_hooks_pack_once_what_forward_mode_keeps():
    def loss(x):
        return ForwardMultiply.apply(x, x + 1).sum()

    for differentiate in GRADIENTS:
        spy = Spy()
        with spy.hooks:
            np.testing.assert_allclose(differentiate(loss)(TWO), 2 * TWO + 1, rtol=1e-6)
        assert spy.log == ["pack", "pack", "unpack", "unpack"]
    for run in (lambda f: f, jax.jit):
        with bits():
            np.testing.assert_allclose(run(jax.grad(lambda x: jax.grad(loss)(x).sum()))(TWO), [2, 2], rtol=1e-6)
