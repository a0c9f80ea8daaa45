"""Forward mode through a block of hooks: as if the block was not there; what is packed, when, and how often."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, saved_tensors_hooks
from tests.kit.layers import ForwardTanh, Multiply, Tanh, bits, layer

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


# -- what is packed of layers with forward mode ----------------------------------------------------


TWO = jnp.array([0.3, 0.7])


ForwardMultiply = type("ForwardMultiply", (Multiply,), {"forward_mode": True})


def test_jacobian_under_hooks():
    jacobian = jax.jacfwd(lambda a, b: ForwardMultiply.apply(a, b), (0, 1))
    with bits():  # the tangents are mapped, and what was packed is not
        for run in (jacobian, jax.jit(jacobian)):
            np.testing.assert_allclose(run(TWO, TWO + 1), [jnp.diag(TWO + 1), jnp.diag(TWO)], rtol=1e-6)


SetUpMultiply = layer(
    lambda a, b: a * b,
    Multiply.backward,
    Function,
    forward_mode=True,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def logged():
    log = []

    def note(what):
        return lambda x: log.append(what) or x

    return log, saved_tensors_hooks(note("pack"), note("unpack"))


@pytest.mark.parametrize("layer", [ForwardMultiply, SetUpMultiply])
def test_hooks_pack_once_what_forward_mode_keeps(layer):
    def loss(x):
        return layer.apply(x, x + 1).sum()

    for run in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        log, hooks = logged()
        with hooks:
            np.testing.assert_allclose(run(TWO), 2 * TWO + 1, rtol=1e-6)
        assert log == ["pack", "pack", "unpack", "unpack"]
    for run in (lambda f: f, jax.jit):
        log, hooks = logged()
        with hooks:
            np.testing.assert_allclose(run(jax.grad(lambda x: jax.grad(loss)(x).sum()))(TWO), [2, 2], rtol=1e-6)


def test_hooks_unpack_what_is_asked_for():
    asks_for_nothing = type("Asks", (ForwardMultiply,), {"backward": staticmethod(lambda ctx, dy: (dy, dy))})
    log, hooks = logged()
    with hooks:
        jax.grad(lambda x: asks_for_nothing.apply(x, x).sum())(TWO)
        ForwardMultiply.apply(TWO, TWO)
    assert log == ["pack"]  # one tensor in two places


@pytest.mark.parametrize("flag", [False, True], ids=["plain", "forward_mode"])
def test_a_block_within_backward(flag):
    log, hooks = logged()

    def within_a_block(x, dy):
        with hooks:
            return hooks(lambda dy: dy * jnp.cos(x))(dy) * 1.0

    apply = layer(jnp.sin, within_a_block, plain=True, forward_mode=flag).apply

    def derivatives(f):
        yield jax.hessian(lambda x: f(x).sum())
        if flag:
            yield jax.jacfwd(f)
            yield jax.jacrev(jax.jacfwd(f))

    for run in (lambda f: f, jax.jit):
        for ours, plain in zip(derivatives(apply), derivatives(jnp.sin), strict=True):
            np.testing.assert_allclose(run(ours)(TWO), jax.jit(plain)(TWO), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jacrev(jax.grad(lambda x: apply(x).sum()))(TWO), -jnp.diag(jnp.sin(TWO)))
    assert "pack" in log
