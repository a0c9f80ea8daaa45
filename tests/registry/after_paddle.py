"""After real Paddle PyLayers, whose backward is often not the gradient of their forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.frameworks.paddle.layers import ported
from tests.kit.case import CASES, R3, Case, W, X, after, case, grid, once, ruled, stop

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
