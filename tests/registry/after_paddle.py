"""After real Paddle PyLayers, whose backward is often not the gradient of their forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax import PyLayer
from tests.kit.case import CASES, R3, Case, W, X, case, grid, once, ruled, stop

POSITIONS = jnp.array([3, 0, 2])
COUNTS = jnp.array([3])


class MoEScatter(PyLayer):
    """P9, one rank. Its backward overwrites rows, so that one contribution of repeated rows is left."""

    @staticmethod
    def forward(ctx, inp, pos, local_count, global_count, fwd_batch, world_size, group=None):
        ctx.moe_args = (inp.shape[0], world_size, group)
        ctx.save_for_backward(pos, local_count, global_count)
        return inp[pos]

    @staticmethod
    def backward(ctx, dy):
        pos, _, _ = ctx.saved_tensor()
        rows, _, _ = ctx.moe_args
        return jnp.zeros((rows, *dy.shape[1:]), dy.dtype).at[pos].set(dy), None, None, None


def _scatter(pos: jax.Array) -> Callable[..., Any]:
    return lambda x: MoEScatter.apply(x, pos, COUNTS, COUNTS, fwd_batch=3, world_size=1)


UNTRANSPOSABLE = "scatter transpose is only implemented where unique_indices=True"
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


def half_away(x: jax.Array) -> jax.Array:
    return jnp.sign(x) * jnp.floor(jnp.abs(x) + 0.5)


def sides(q: jax.Array, qn: int, qp: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One where q is below the range, above it, within it; zero elsewhere."""
    low, up = (q < qn).astype(q.dtype), (q > qp).astype(q.dtype)
    return low, up, 1 - low - up


def _lsq_rule(residuals, g):
    w, alpha = residuals
    q = w / alpha
    low, up = q < -2, q > 3
    mid = ~(low | up)
    change = jnp.where(mid, half_away(q) - q, jnp.where(low, -2.0, 3.0))
    return jnp.where(mid, g, 0.0), 0.25 * jnp.sum(g * change)


@case(
    ruled(lambda w, a: jnp.clip(half_away(w / a), -2, 3) * a, _lsq_rule),
    X * 2,
    0.6,
    linear_loss=True,
    call=lambda w, a: LSQ.apply(w, a, jnp.float32(0.25), -2, 3, per_channel=False),
)
class LSQ(PyLayer):
    """P14, with one step per channel or one for all: the gradient scale is a tensor on an attribute, and its slot is
    left out of the result.
    """

    @staticmethod
    def forward(ctx, weight, alpha, g, qn, qp, per_channel=False, quant_axis=0):
        ctx.save_for_backward(weight, alpha)
        ctx.other = g, qn, qp, per_channel, quant_axis
        alpha = LSQ._spread(alpha, weight, per_channel, quant_axis)
        return jnp.clip(half_away(weight / alpha), qn, qp) * alpha

    @staticmethod
    def backward(ctx, dy):
        weight, alpha = ctx.saved_tensor()
        g, qn, qp, per_channel, axis = ctx.other
        q = weight / LSQ._spread(alpha, weight, per_channel, axis)
        low, up, mid = sides(q, qn, qp)
        slope = dy * (low * qn + up * qp + mid * (half_away(q) - q))
        others = tuple(i for i in range(weight.ndim) if not per_channel or i != axis)
        return mid * dy, slope.sum(others) * g

    @staticmethod
    def _spread(alpha, weight, per_channel, axis):
        return alpha.reshape([-1 if i == axis else 1 for i in range(weight.ndim)]) if per_channel else alpha


@case(
    ruled(lambda x, loss: x, lambda r, g: (g, once(0.25, g))),
    X,
    0.7,
    linear_loss=True,
    call=lambda x, loss: RouterLoss.apply(x, loss, 4, False),
    forward_over_reverse="does not depend on them",
)
class RouterLoss(PyLayer):
    """P19: the gradient of the loss does not depend on the cotangent."""

    @staticmethod
    def forward(ctx, x, router_loss, num_acc_steps, enable_delay_scale_loss):
        ctx.shape, ctx.dtype, ctx.steps = router_loss.shape, router_loss.dtype, num_acc_steps
        ctx.delay = enable_delay_scale_loss
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy, jnp.full(ctx.shape, 1.0 if ctx.delay else 1 / ctx.steps, ctx.dtype)


@case(
    ruled(lambda x, loss: x, lambda r, g: (g, once(1.0, g))),
    X,
    0.7,
    linear_loss=True,
    forward_over_reverse="does not depend on them",
)
class AuxiliaryLoss(PyLayer):
    """P24, variant A: ones of shape [1] for a loss without dimensions."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.dtype = loss.dtype
        ctx.required_aux_loss = ctx.needs_input_grad[1]
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy, jnp.ones(1, ctx.dtype) if ctx.required_aux_loss else None


def layer_norm(x, weight, bias, eps=1e-5):
    mu, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    y = (x - mu) / jnp.sqrt(var + eps)
    return weight[:, None, None] * y + bias[:, None, None]


@case(layer_norm, grid(2, 3, 1, 2), R3, R3 * 0.2, call=lambda x, w, b: LayerNorm2d.apply(x, w, b, 1e-5))
class LayerNorm2d(PyLayer):
    """P26: saves two intermediates and an input."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        ctx.eps = eps
        mu, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
        y = (x - mu) / jnp.sqrt(var + eps)
        ctx.save_for_backward(y, var, weight)
        return weight[:, None, None] * y + bias[:, None, None]

    @staticmethod
    def backward(ctx, dy):
        y, var, weight = ctx.saved_tensor()
        g = dy * weight[:, None, None]
        dx = (g - y * (g * y).mean(1, keepdims=True) - g.mean(1, keepdims=True)) / jnp.sqrt(var + ctx.eps)
        return dx, (dy * y).sum((0, 2, 3)), dy.sum((0, 2, 3))


@case(
    ruled(lambda x: x, lambda r, g: (jnp.clip(-2.0 * g, -0.5, 0.5),)),
    X,
    linear_loss=True,
    call=lambda x: ClippedReversal.apply(x, lambda_=2),
    forward_over_reverse="is not linear in its cotangents",
)
class ClippedReversal(PyLayer):
    """P28: saves a plain int, and clips the cotangent."""

    @staticmethod
    def forward(ctx, x, lambda_=1):
        ctx.save_for_backward(lambda_)
        return x.copy()

    @staticmethod
    def backward(ctx, dy):
        (lambda_,) = ctx.saved_tensor()
        return jnp.clip(-lambda_ * dy, -0.5, 0.5)


@case(lambda x: -0.3 * x + stop(1.3 * x), X, call=lambda x: Reversal.apply(x, 0.3))
class Reversal(PyLayer):
    """P29: a float made an array to save it, and torch's slots in the result."""

    @staticmethod
    def forward(ctx, x, lambda_):
        ctx.save_for_backward(jnp.asarray(lambda_, x.dtype))
        return x.copy()

    @staticmethod
    def backward(ctx, dy):
        return -ctx.saved_tensors[0] * dy, None


def _block(x, w):
    return jnp.tanh(x @ w) * x


@case(_block, X, W, call=lambda x, w: Recompute.apply(_block, True, (x, w)))
class Recompute(PyLayer):
    """P8, short: nested differentiation in backward; one tuple argument takes one tuple of gradients."""

    @staticmethod
    def forward(ctx, run_function, preserve_rng_state, inputs):
        ctx.run_function = run_function
        ctx.save_for_backward(inputs)
        return run_function(*inputs)

    @staticmethod
    def backward(ctx, dy):
        (inputs,) = ctx.saved_tensor()
        return (jax.vjp(ctx.run_function, *inputs)[1](dy),)
