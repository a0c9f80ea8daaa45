"""After real torch Functions, whose backward is often not the gradient of their forward."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pylayer_jax import PyLayer
from tests.kit.case import R3, W, X, case, grid, once, ruled, stop

TARGET = jnp.array([2, 0])


@case(
    lambda z: -jnp.take_along_axis(jax.nn.log_softmax(z), TARGET[:, None], 1)[:, 0],
    X,
    call=lambda z: CrossEntropy.apply(z, TARGET, tp_group=None),
)
class CrossEntropy(PyLayer):
    """T11 on one rank, without smoothing."""

    @staticmethod
    def forward(ctx, logits, target, label_smoothing=0.0, tp_group=None):
        shifted = logits - jnp.max(logits, -1, keepdims=True)
        exps = jnp.exp(shifted)
        total = exps.sum(-1)
        index = jnp.where(target >= logits.shape[-1], 0, target)
        predicted = jnp.take_along_axis(shifted, index[:, None], -1)[:, 0]
        ctx.save_for_backward(exps / total[:, None], target >= logits.shape[-1], index)
        return jnp.log(total) - predicted

    @staticmethod
    def backward(ctx, dy):
        softmax, out, index = ctx.saved_tensors
        one_hot = jax.nn.one_hot(index, softmax.shape[-1]) * (1.0 - out.astype(jnp.float32))[:, None]
        return (softmax - one_hot) * dy[..., None], None, None


def _sparsemax(x):
    s = jnp.sort(x)[..., ::-1]
    c = jnp.cumsum(s, -1) - 1
    i = jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    k = (i * s > c).sum(-1, keepdims=True)
    return jnp.maximum(x - jnp.take_along_axis(c, k - 1, -1) / k.astype(x.dtype), 0)


@case(_sparsemax, X)
class Sparsemax(PyLayer):
    """T12."""

    @staticmethod
    def forward(ctx, x):
        y = _sparsemax(x)
        ctx.save_for_backward((y != 0).sum(-1, keepdims=True), y)
        return y

    @staticmethod
    def backward(ctx, dy):
        k, y = ctx.saved_tensors
        support = (y != 0).astype(dy.dtype)
        g = dy * support
        return g - g.sum(-1, keepdims=True) / k.astype(dy.dtype) * support


def _entmax15(x):
    z = (x - stop(x.max(-1, keepdims=True))) / 2
    s = jnp.sort(z)[..., ::-1]
    i = jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    mean, mean_square = jnp.cumsum(s, -1) / i, jnp.cumsum(s * s, -1) / i
    inner = (1 - i * (mean_square - mean**2)) / i
    tau = mean - jnp.sqrt(jnp.where(inner > 1e-9, inner, 1.0)) * (inner > 1e-9).astype(x.dtype)
    k = (tau <= s).sum(-1, keepdims=True)
    return jnp.maximum(z - jnp.take_along_axis(tau, k - 1, -1), 0) ** 2


@case(_entmax15, X * 0.8)
class Entmax15(PyLayer):
    """T14: saves its output alone; the square root has no derivative at zero, so it is masked."""

    @staticmethod
    def forward(ctx, x):
        y = _entmax15(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        q = jnp.where(y > 0, jnp.sqrt(jnp.where(y > 0, y, 1.0)), 0.0)
        d = dy * q
        return d - q * d.sum(-1, keepdims=True) / q.sum(-1, keepdims=True)


def _attention(q, k, v):
    s = q @ k.T / 3**0.5
    s = jnp.where(jnp.tril(jnp.ones(s.shape, bool)), s, -1e9)
    return jax.nn.softmax(s) @ v


@case(_attention, X[:2], X[:2] * 0.7, X[:2] + 0.2, call=lambda q, k, v: FlashAttention.apply(q, k, v, None, True, 1))
class FlashAttention(PyLayer):
    """T20: online softmax over buckets of keys; a tuple of statics and Nones on an attribute."""

    @staticmethod
    def forward(ctx, q, k, v, mask, causal, bucket):
        scale, n = q.shape[-1] ** -0.5, k.shape[0]
        o, total, top = jnp.zeros_like(q), jnp.zeros(q.shape[0]), jnp.full(q.shape[0], -1e9)
        for first in range(0, n, bucket):
            columns = slice(first, first + bucket)
            s = q @ k[columns].T * scale
            if causal:
                s = jnp.where(jnp.arange(q.shape[0])[:, None] >= jnp.arange(n)[columns], s, -1e9)
            new_top = jnp.maximum(top, s.max(-1))
            p, shrink = jnp.exp(s - new_top[:, None]), jnp.exp(top - new_top)
            total, o, top = total * shrink + p.sum(-1), o * shrink[:, None] + p @ v[columns], new_top
        lse = jnp.log(jnp.maximum(total, 1e-6)) + top
        o = o / total[:, None]
        ctx.args = causal, scale, (mask,) * (n // bucket), bucket
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        causal, scale, _, bucket = ctx.args
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
        delta = (do * o).sum(-1, keepdims=True)
        for first in range(0, k.shape[0], bucket):
            columns = slice(first, first + bucket)
            s = q @ k[columns].T * scale
            if causal:
                s = jnp.where(jnp.arange(q.shape[0])[:, None] >= jnp.arange(k.shape[0])[columns], s, -1e9)
            p = jnp.exp(s - lse[:, None])
            dv = dv.at[columns].add(p.T @ do)
            ds = p * (do @ v[columns].T - delta) * scale
            dq, dk = dq + ds @ k[columns], dk.at[columns].add(ds.T @ q)
        return dq, dk, dv, None, None, None


def _reversible(x, wf, wg):
    x1, x2 = jnp.split(x, 2, -1)
    y1 = x1 + jnp.tanh(x2 @ wf)
    return jnp.concatenate([y1, x2 + jnp.sin(y1 @ wg)], -1)


@case(_reversible, grid(2, 4), W[:2, :2], W[1:, 1:])
class Reversible(PyLayer):
    """T26 with explicit parameters: saves its output, and rebuilds its input from it."""

    @staticmethod
    def forward(ctx, x, wf, wg):
        y = _reversible(x, wf, wg)
        ctx.y, ctx.parameters, ctx.blocks = y, (wf, wg), (lambda v, w: jnp.tanh(v @ w), lambda v, w: jnp.sin(v @ w))
        return y

    @staticmethod
    def backward(ctx, dy):
        (f, g), (wf, wg) = ctx.blocks, ctx.parameters
        y1, y2 = jnp.split(ctx.y, 2, -1)
        dy1, dy2 = jnp.split(dy, 2, -1)
        gy1, pull_g = jax.vjp(g, y1, wg)
        d, dwg = pull_g(dy2)
        dx1, x2 = dy1 + d, y2 - gy1
        _, pull_f = jax.vjp(f, x2, wf)
        d, dwf = pull_f(dx1)
        return jnp.concatenate([dx1, dy2 + d], -1), dwf, dwg


class NearestCode(PyLayer):
    """T30: an index; its backward always raises, and must not be called."""

    @staticmethod
    def forward(ctx, inputs, codebook):
        index = jnp.argmin(((inputs[..., None, :] - codebook) ** 2).sum(-1), -1)
        ctx.mark_non_differentiable(index)
        return index

    @staticmethod
    def backward(ctx, dy):
        raise RuntimeError("an index has no gradient")


def _codes(inputs, codebook):
    return codebook[jnp.argmin(((inputs[..., None, :] - codebook) ** 2).sum(-1), -1)]


@case(
    lambda x, c: _codes(stop(x), c) + x - stop(x),
    X,
    grid(4, 3),
    call=lambda x, c: VectorQuantize.apply(x, c)[0],
)
class VectorQuantize(PyLayer):
    """T31: straight through to the inputs, scattered to the codebook, each only if asked for."""

    @staticmethod
    def forward(ctx, inputs, codebook):
        index = NearestCode.apply(inputs, codebook)
        ctx.save_for_backward(index.reshape(-1), codebook)
        ctx.mark_non_differentiable(index)
        return codebook[index], index

    @staticmethod
    def backward(ctx, dy, unused):
        index, codebook = ctx.saved_tensors
        dinputs = dy.copy() if ctx.needs_input_grad[0] else None
        rows = dy.reshape(-1, dy.shape[-1])
        return dinputs, jnp.zeros_like(codebook).at[index].add(rows) if ctx.needs_input_grad[1] else None


def _window(x, size):
    padded = jnp.pad(x, ((0, 0), (size // 2, size // 2)))
    return sum(padded[:, i : i + x.shape[1]] for i in range(size))


def _lrn(x, size, alpha=0.3, beta=0.75, k=1.0):
    return x * (k + alpha / size * _window(x * x, size)) ** -beta


@case(lambda x: _lrn(x, 3), X, call=lambda x: CrossMapLRN.apply(x, 3))
class CrossMapLRN(PyLayer):
    """T33: an input, an output, and an intermediate on an attribute."""

    @staticmethod
    def forward(ctx, x, size, alpha=0.3, beta=0.75, k=1.0):
        ctx.scale = k + alpha / size * _window(x * x, size)
        ctx.size, ctx.alpha, ctx.beta = size, alpha, beta
        y = x * ctx.scale**-beta
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        pulled = _window(dy * y / ctx.scale, ctx.size)
        return dy * ctx.scale**-ctx.beta - 2 * ctx.alpha * ctx.beta / ctx.size * x * pulled, None


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


def _clipped_rule(residuals, g):
    x, c = residuals
    return jnp.where((x > 0) & (x < c), g, 0.0), jnp.sum(jnp.where(x >= c, g, 0.0)).reshape(1)


@case(
    ruled(lambda x, c: jnp.floor(15 / c * jnp.clip(x, 0, c)) / (15 / c), _clipped_rule),
    X,
    R3[:1],
    linear_loss=True,
    call=lambda x, c: LearnedClip.apply(x, c, 4, True, False),
)
class LearnedClip(PyLayer):
    """T36."""

    @staticmethod
    def forward(ctx, x, clip, num_bits, dequantize, inplace):
        ctx.save_for_backward(x, clip)
        scale = (2**num_bits - 1) / clip
        return jnp.floor(scale * jnp.clip(x, 0, clip)) / scale

    @staticmethod
    def backward(ctx, dy):
        x, clip = ctx.saved_tensors
        dx = jnp.where((x > 0) & (x < clip), dy, 0.0)
        return dx, jnp.sum(jnp.where(x >= clip, dy, 0.0)).reshape(clip.shape), None, None, None


@case(lambda x: x * jnp.tanh(jax.nn.softplus(x)), X)
class Mish(PyLayer):
    """T41."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * jnp.tanh(jax.nn.softplus(x))

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0]
        t, s = jnp.tanh(jax.nn.softplus(x)), jax.nn.sigmoid(x)
        return dy * (t + x * s * (1 - t**2))


@case(lambda x: x * jnp.clip(x + 3, 0, 6) / 6, X * 3)
class HardSwish(PyLayer):
    """T43."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * jnp.clip(x + 3, 0, 6) / 6

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0]
        return jnp.where(jnp.abs(x) <= 3, dy * (x / 3 + 0.5), jnp.where(x > 3, dy, 0.0))


@case(
    ruled(lambda x, loss: x, lambda r, g: (g, once(3.0, g))),
    X,
    0.7,
    linear_loss=True,
    forward_over_reverse="does not depend on them",
)
class AutoScaler(PyLayer):
    """T61: the scale is an attribute of the class, changed at run time."""

    scale = 3

    @staticmethod
    def forward(ctx, output, aux_loss):
        ctx.save_for_backward(aux_loss)
        return output

    @classmethod
    def backward(cls, ctx, dy):
        (aux_loss,) = ctx.saved_tensors
        return dy, jnp.ones_like(aux_loss) * cls.scale


def _jump_rule(residuals, g):
    x, theta = residuals
    near = (jnp.abs((x - theta) / 0.8) < 0.5).astype(x.dtype)
    return g * (x > theta).astype(x.dtype), -(theta / 0.8 * near * g).sum(0)


@case(
    ruled(lambda x, theta: x * (x > theta).astype(x.dtype), _jump_rule),
    X,
    R3,
    linear_loss=True,
    call=lambda x, theta: JumpReLU.apply(x, theta, 0.8),
)
class JumpReLU(PyLayer):
    """T68: the gradient of the threshold is larger than it, and is summed down."""

    @staticmethod
    def forward(ctx, x, theta, bandwidth):
        ctx.save_for_backward(x, theta)
        ctx.bandwidth = bandwidth
        return x * (x > theta).astype(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, theta = ctx.saved_tensors
        near = (jnp.abs((x - theta) / ctx.bandwidth) < 0.5).astype(x.dtype)
        return (x > theta).astype(dy.dtype) * dy, -(theta / ctx.bandwidth) * near * dy, None


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
