"""Layers that people really write in Paddle: texts, references in plain JAX, and calls beside real Paddle.

A text is a function of `xp`, which has the names of JAX or of Paddle, and runs under both. P and a number name the
layer in the list of layers that they are taken from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.kit import names
from tests.kit.case import CASES, R3, Case, W, X, after, case, grid, once, ruled, stop
from tests.kit.oracle import Table


def layers(xp):
    class Recompute(xp.PyLayer):
        """P8, short: nested differentiation; one tuple of tensors, saved as one entry, takes one tuple of gradients."""

        @staticmethod
        def forward(ctx, run_function, preserve_rng_state, inputs):
            ctx.run_function = run_function
            ctx.save_for_backward(inputs)
            return run_function(*inputs)

        @staticmethod
        def backward(ctx, dy):
            (inputs,) = ctx.saved_tensor()
            return (xp.pull(ctx.run_function, inputs, dy)[1],)

    class MoEScatter(xp.PyLayer):
        """P9, one rank. Its backward overwrites rows, so that one contribution of repeated rows is left."""

        @staticmethod
        def forward(ctx, inp, pos, local_count, global_count, fwd_batch, world_size, group=None):
            ctx.moe_args = inp.shape[0], world_size, group
            ctx.save_for_backward(pos, local_count, global_count)
            return inp[pos]

        @staticmethod
        def backward(ctx, dy):
            pos, _, _ = ctx.saved_tensor()
            rows, _, _ = ctx.moe_args
            zeros = xp.zeros([rows, *dy.shape[1:]], dtype=dy.dtype)
            return xp.put(zeros, pos, dy), None, None, None

    def half_away(x):
        return xp.sign(x) * xp.floor(xp.abs(x) + 0.5)

    def _sides(q, qn, qp):
        low, up = (q < qn).astype(q.dtype), (q > qp).astype(q.dtype)
        return low, up, 1 - low - up

    class LSQ(xp.PyLayer):
        """P14, one step per channel or for all: the scale of the gradient is a tensor on an attribute."""

        @staticmethod
        def forward(ctx, weight, alpha, g, qn, qp, per_channel=False, quant_axis=0):
            ctx.save_for_backward(weight, alpha)
            ctx.other = g, qn, qp, per_channel, quant_axis
            alpha = LSQ._spread(alpha, weight, per_channel, quant_axis)
            return xp.clip(half_away(weight / alpha), qn, qp) * alpha

        @staticmethod
        def backward(ctx, dy):
            weight, alpha = ctx.saved_tensor()
            g, qn, qp, per_channel, axis = ctx.other
            q = weight / LSQ._spread(alpha, weight, per_channel, axis)
            low, up, mid = _sides(q, qn, qp)
            slope = dy * (low * qn + up * qp + mid * (half_away(q) - q))
            return mid * dy, slope.sum(tuple(i for i in range(weight.ndim) if not per_channel or i != axis)) * g

        @staticmethod
        def _spread(alpha, weight, per_channel, axis):
            return alpha.reshape([-1 if i == axis else 1 for i in range(weight.ndim)]) if per_channel else alpha

    class RouterLoss(xp.PyLayer):
        """P19: the gradient of the loss does not depend on the cotangent."""

        @staticmethod
        def forward(ctx, x, router_loss, num_acc_steps, enable_delay_scale_loss):
            ctx.shape, ctx.dtype, ctx.steps = router_loss.shape, router_loss.dtype, num_acc_steps
            ctx.delay = enable_delay_scale_loss
            return x

        @staticmethod
        def backward(ctx, dy):
            return dy, xp.full(ctx.shape, 1.0 if ctx.delay else 1 / ctx.steps, ctx.dtype)

    class LayerNorm2d(xp.PyLayer):
        """P26: saves two intermediates and an input."""

        @staticmethod
        def forward(ctx, x, weight, bias, eps):
            ctx.eps = eps
            mu, var = xp.mean(x, 1, keepdims=True), xp.var(x, 1, keepdims=True)
            y = (x - mu) / xp.sqrt(var + eps)
            ctx.save_for_backward(y, var, weight)
            return weight.reshape([-1, 1, 1]) * y + bias.reshape([-1, 1, 1])

        @staticmethod
        def backward(ctx, dy):
            y, var, weight = ctx.saved_tensor()
            g = dy * weight.reshape([-1, 1, 1])
            dx = (g - y * xp.mean(g * y, 1, keepdims=True) - xp.mean(g, 1, keepdims=True)) / xp.sqrt(var + ctx.eps)
            return dx, (dy * y).sum((0, 2, 3)), dy.sum((0, 2, 3))

    class ClippedReversal(xp.PyLayer):
        """P28: saves a plain int, and clips the cotangent."""

        @staticmethod
        def forward(ctx, x, lambda_=1):
            ctx.save_for_backward(lambda_)
            return xp.copy(x)

        @staticmethod
        def backward(ctx, dy):
            (lambda_,) = ctx.saved_tensor()
            return xp.clip(-lambda_ * dy, -0.5, 0.5)

    class Reversal(xp.PyLayer):
        """P29: a float made a tensor to save it, and torch's slots in the result, one too many for Paddle."""

        @staticmethod
        def forward(ctx, x, lambda_):
            ctx.save_for_backward(xp.asarray(lambda_, x.dtype))
            return xp.copy(x)

        @staticmethod
        def backward(ctx, dy):
            return -ctx.saved_tensor()[0] * dy, None

    return SimpleNamespace(**locals())


ported = names.text(layers, names.JAX)


# -- references: each is a case of the registry ---------------------------------------------------------

POSITIONS = jnp.array([3, 0, 2])
COUNTS = jnp.array([3])


MoEScatter = after(ported.MoEScatter, __name__)


def _scatter(pos: jax.Array) -> Callable[..., Any]:
    return lambda x: MoEScatter.apply(x, pos, COUNTS, COUNTS, fwd_batch=3, world_size=1)


UNTRANSPOSABLE = r"MoEScatter\.backward"
CASES.append(
    Case(
        "MoEScatter-unique",
        _scatter(POSITIONS),
        lambda x: x[POSITIONS],
        (grid(4, 2),),
        forward_over_reverse=UNTRANSPOSABLE,
        kind=MoEScatter,
    )
)
CASES.append(
    Case(
        "MoEScatter-repeated",
        _scatter(jnp.array([1, 1, 2])),
        ruled(lambda x: x[jnp.array([1, 1, 2])], lambda x, g: (jnp.zeros_like(x[0]).at[jnp.array([1, 2])].set(g[1:]),)),
        (grid(4, 2),),
        linear_loss=True,
        forward_over_reverse=UNTRANSPOSABLE,
        kind=MoEScatter,
    )
)


def _lsq_rule(residuals, g):
    w, alpha = residuals
    q = w / alpha
    low, up = q < -2, q > 3
    mid = ~(low | up)
    change = jnp.where(mid, ported.half_away(q) - q, jnp.where(low, -2.0, 3.0))
    return jnp.where(mid, g, 0.0), 0.25 * jnp.sum(g * change)


LSQ = case(
    ruled(lambda w, a: jnp.clip(ported.half_away(w / a), -2, 3) * a, _lsq_rule),
    X * 2,
    0.6,
    linear_loss=True,
    call=lambda w, a: LSQ.apply(w, a, jnp.float32(0.25), -2, 3, per_channel=False),
)(after(ported.LSQ, __name__))


RouterLoss = case(
    ruled(lambda x, loss: x, lambda r, g: (g, once(0.25, g))),
    X,
    0.7,
    linear_loss=True,
    call=lambda x, loss: RouterLoss.apply(x, loss, 4, False),
    forward_over_reverse=r"RouterLoss\.backward",
)(after(ported.RouterLoss, __name__))


def layer_norm(x, weight, bias, eps=1e-5):
    mu, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    y = (x - mu) / jnp.sqrt(var + eps)
    return weight[:, None, None] * y + bias[:, None, None]


LayerNorm2d = case(layer_norm, grid(2, 3, 1, 2), R3, R3 * 0.2, call=lambda x, w, b: LayerNorm2d.apply(x, w, b, 1e-5))(
    after(ported.LayerNorm2d, __name__)
)


ClippedReversal = case(
    ruled(lambda x: x, lambda r, g: (jnp.clip(-2.0 * g, -0.5, 0.5),)),
    X,
    linear_loss=True,
    call=lambda x: ClippedReversal.apply(x, lambda_=2),
    forward_over_reverse=r"(?s)ClippedReversal\.backward.*(max|min|clamp)",
)(after(ported.ClippedReversal, __name__))


Reversal = case(lambda x: -0.3 * x + stop(1.3 * x), X, call=lambda x: Reversal.apply(x, 0.3))(
    after(ported.Reversal, __name__)
)


def _block(x, w):
    return jnp.tanh(x @ w) * x


Recompute = case(_block, X, W, call=lambda x, w: Recompute.apply(_block, True, (x, w)))(
    after(ported.Recompute, __name__)
)


# -- calls beside real Paddle ---------------------------------------------------------------------------

PORTS = Table()
port = functools.partial(PORTS.port, layers)
WEIGHT = grid(3, 4, low=-2.3, high=2.6)
STEP, LOSS, THREE = np.array(0.25, np.float32), np.array(0.7, np.float32), np.array([3], np.int32)


def f32(*values):
    return np.array(values, np.float32)


# Paddle has no second derivative, since what backward differentiates is detached.
port("Recompute", X, W, call=lambda m, x, w: m.Recompute.apply(lambda x, w: (x @ w) ** 3 * x, True, (x, w)), plain=True)
for name, rows, positions, size in (
    ("MoEScatter", grid(4, 2), [3, 0, 2], 3),
    ("MoEScatter", grid(4, 2), [1, 1, 2], 3),  # the last of the rows overwrites the others
    ("MoEScatter", grid(4, 2), [], 0),
):
    call = lambda m, *args, name=name: getattr(m, name).apply(*args, world_size=1)  # noqa: E731
    port(name, rows, np.array(positions, np.int32), THREE, THREE, size, call=call, label=str(positions))
by_name = {"call": lambda m, w, alpha, g, axis: m.LSQ.apply(w, alpha, g, -2, 3, quant_axis=axis, per_channel=True)}
port("LSQ", WEIGHT, np.array(0.6, np.float32), STEP, -2, 3, False, wrt=(0, 1))
port("LSQ", WEIGHT, f32(0.5, 0.6, 0.9), STEP, -2, 3, True, wrt=(0, 1), label="rows")
port("LSQ", WEIGHT, f32(0.5, 0.6, 0.9, 0.3), STEP, 1, **by_name, wrt=(0, 1), label="columns")
for delayed in (False, True):
    call = lambda m, x, loss, delayed: m.RouterLoss.apply(x * 2, loss, 4, delayed)  # noqa: E731
    port("RouterLoss", X, LOSS, delayed, call=call, label=str(delayed))
port("LayerNorm2d", grid(2, 3, 1, 2), grid(3), grid(3) * 2, 1e-5, plain=True)
port("ClippedReversal", X, call=lambda m, x: m.ClippedReversal.apply(x, lambda_=2))
port("ClippedReversal", X, label="default")
port("ClippedReversal", X, np.array(0.3, np.float32), wrt=(0,), label="tensor")

# Backward has the slots of torch, one too many for Paddle.
differ = {"orders": 1, "summed": True}
port("Reversal", X, 0.3, theirs=ValueError, ours=[-0.3], **differ)
