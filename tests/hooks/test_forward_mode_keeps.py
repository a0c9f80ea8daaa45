"""Forward mode and saved-tensor hooks: what is packed, when, and how often."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, saved_tensors_hooks
from tests.kit.layers import Multiply, bits, layer

X = jnp.array([0.3, 0.7])


ForwardMultiply = type("ForwardMultiply", (Multiply,), {"forward_mode": True})


def test_jacobian_under_hooks():
    jacobian = jax.jacfwd(lambda a, b: ForwardMultiply.apply(a, b), (0, 1))
    with bits():  # the tangents are mapped, and what was packed is not
        for run in (jacobian, jax.jit(jacobian)):
            np.testing.assert_allclose(run(X, X + 1), [jnp.diag(X + 1), jnp.diag(X)], rtol=1e-6)


class SetUpMultiply(Function):
    forward_mode = True

    @staticmethod
    def forward(a, b):
        return a * b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return dy * b, dy * a


def noting():
    log = []

    def note(what):
        return lambda x: log.append(what) or x

    return log, saved_tensors_hooks(note("pack"), note("unpack"))


@pytest.mark.parametrize("layer", [ForwardMultiply, SetUpMultiply])
def test_hooks_pack_once_what_forward_mode_keeps(layer):
    def loss(x):
        return layer.apply(x, x + 1).sum()

    for run in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        log, hooks = noting()
        with hooks:
            np.testing.assert_allclose(run(X), 2 * X + 1, rtol=1e-6)
        assert log == ["pack", "pack", "unpack", "unpack"]
    for run in (lambda f: f, jax.jit):
        log, hooks = noting()
        with hooks:
            np.testing.assert_allclose(run(jax.grad(lambda x: jax.grad(loss)(x).sum()))(X), [2, 2], rtol=1e-6)


def test_hooks_unpack_what_is_asked_for():
    asks_for_nothing = type("Asks", (ForwardMultiply,), {"backward": staticmethod(lambda ctx, dy: (dy, dy))})
    log, hooks = noting()
    with hooks:
        jax.grad(lambda x: asks_for_nothing.apply(x, x).sum())(X)
        ForwardMultiply.apply(X, X)
    assert log == ["pack"]  # one tensor in two places


@pytest.mark.parametrize("flag", [False, True], ids=["plain", "forward_mode"])
def test_a_block_within_backward(flag):
    log, hooks = noting()

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
            np.testing.assert_allclose(run(ours)(X), jax.jit(plain)(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jacrev(jax.grad(lambda x: apply(x).sum()))(X), -jnp.diag(jnp.sin(X)))
    assert "pack" in log
