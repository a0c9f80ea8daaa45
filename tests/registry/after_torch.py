"""After real torch Functions, whose backward is often not the gradient of their forward."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pylayer_jax import PyLayer
from tests.frameworks.torch import without_original
from tests.frameworks.torch.layers import ported
from tests.kit.case import R3, W, X, after, case, grid, ruled, stop

TARGET = jnp.array([2, 0])


CrossEntropy = case(
    lambda z: -jnp.take_along_axis(jax.nn.log_softmax(z), TARGET[:, None], 1)[:, 0],
    X,
    call=lambda z: CrossEntropy.apply(z, TARGET, 0.0, None),
)(after(ported.VocabParallelCrossEntropy, __name__, "CrossEntropy"))


def sparsemax(x):
    s = jnp.sort(x)[..., ::-1]
    c = jnp.cumsum(s, -1) - 1
    i = jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    k = (i * s > c).sum(-1, keepdims=True)
    return jnp.maximum(x - jnp.take_along_axis(c, k - 1, -1) / k.astype(x.dtype), 0)


Sparsemax = case(sparsemax, X, call=lambda x: Sparsemax.apply(x, -1))(after(ported.Sparsemax, __name__))


def entmax15(x):
    z = (x - stop(x.max(-1, keepdims=True))) / 2
    s = jnp.sort(z)[..., ::-1]
    i = jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    mean, mean_square = jnp.cumsum(s, -1) / i, jnp.cumsum(s * s, -1) / i
    inner = (1 - i * (mean_square - mean**2)) / i
    tau = mean - jnp.sqrt(jnp.where(inner > 1e-9, inner, 1.0)) * (inner > 1e-9).astype(x.dtype)
    k = (tau <= s).sum(-1, keepdims=True)
    return jnp.maximum(z - jnp.take_along_axis(tau, k - 1, -1), 0) ** 2


Entmax15 = case(entmax15, X * 0.8, call=lambda x: Entmax15.apply(x, -1))(after(without_original.Entmax15, __name__))


def _attention(q, k, v):
    s = q @ k.T / 3**0.5
    s = jnp.where(jnp.tril(jnp.ones(s.shape, bool)), s, -1e9)
    return jax.nn.softmax(s) @ v


FlashAttention = case(
    _attention, X[:2], X[:2] * 0.7, X[:2] + 0.2, call=lambda q, k, v: FlashAttention.apply(q, k, v, None, True, 2, 1)
)(after(ported.FlashAttention, __name__))


def _reversible(x, wf, wg):
    x1, x2 = jnp.split(x, 2, -1)
    y1 = x1 + jnp.tanh(x2 @ wf)
    return jnp.concatenate([y1, x2 + jnp.sin(y1 @ wg)], -1)


Reversible = case(
    _reversible,
    grid(2, 4),
    W[:2, :2],
    W[1:, 1:],
    call=lambda x, *w: Reversible.apply(x, ported.BLOCKS[:1], {"gain": 1.0}, *w),
)(after(ported.Reversible, __name__))


def _codes(inputs, codebook):
    return codebook[jnp.argmin(((inputs[..., None, :] - codebook) ** 2).sum(-1), -1)]


VectorQuantize = case(
    lambda x, c: _codes(stop(x), c) + x - stop(x),
    X,
    grid(4, 3),
    call=lambda x, c: VectorQuantize.apply(x, c)[0],
)(after(ported.StraightThroughCode, __name__, "VectorQuantize"))


@case(lambda x, y: (x, y), X, R3)
class Identity(PyLayer):
    """T34: returns the tuple of its arguments as it is, and marks those that need no gradient."""

    @staticmethod
    def forward(ctx, *args):
        asked = ctx.needs_input_grad
        ctx.mark_non_differentiable(*[a for a, wanted in zip(args, asked, strict=True) if not wanted])
        return args

    @staticmethod
    def backward(ctx, *grads):
        return grads


Mish = case(lambda x: x * jnp.tanh(jax.nn.softplus(x)), X)(after(ported.Mish, __name__))


def _jump_rule(residuals, g):
    x, theta = residuals
    near = (jnp.abs((x - theta) / 0.8) < 0.5).astype(x.dtype)
    return g * (x > theta).astype(x.dtype), -(theta / 0.8 * near * g).sum(0)


JumpReLU = case(
    ruled(lambda x, theta: x * (x > theta).astype(x.dtype), _jump_rule),
    X,
    R3,
    linear_loss=True,
    call=lambda x, theta: JumpReLU.apply(x, theta, 0.8),
)(after(ported.JumpReLU, __name__))


class Steps(NamedTuple):
    quantized: jax.Array
    passed: jax.Array
    unused: Any


@case(
    ruled(
        lambda x, s: jnp.clip(jnp.round(x / s), -2, 2) * s,
        lambda r, g: (
            jnp.where(jnp.abs(r[0] / r[1]) <= 2, g, 0.0),
            jnp.sum(
                g * (jnp.clip(jnp.round(r[0] / r[1]), -2, 2) - jnp.where(jnp.abs(r[0] / r[1]) <= 2, r[0] / r[1], 0.0)),
                (0,),
                keepdims=True,
            ),
        ),
    ),
    X,
    jnp.full((1, 3), 0.45),
    linear_loss=True,
    call=lambda x, s: LearnedSteps.apply(x, s).quantized,
)
class LearnedSteps(PyLayer):
    """T67, mended: a named tuple of outputs with a None, and None for missing cotangents."""

    @staticmethod
    def forward(ctx, x, step, neg=-2, pos=2):
        passed = jnp.abs(x / step) <= pos
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, step)
        return Steps(jnp.clip(jnp.round(x / step), neg, pos) * step, passed, None)

    @staticmethod
    def backward(ctx, dy, dpassed):
        assert dpassed is None
        x, step = ctx.saved_tensors
        inside = jnp.abs(x / step) <= 2
        mult = jnp.clip(jnp.round(x / step), -2, 2) - jnp.where(inside, x / step, 0.0)
        return jnp.where(inside, dy, 0.0), mult * dy
