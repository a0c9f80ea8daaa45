"""Defines layers and functions for `python -m pylayer_jax check`, which finds them by name."""

import jax
import jax.numpy as jnp

from tests.kit.layers import layer

Scale = layer(
    lambda ctx, x, factor, how=None: (setattr(ctx, "factor", factor), x * factor)[1],
    lambda ctx, dy: dy * ctx.factor,
    name="Scale",
)
Wrong = layer(base=Scale, name="Wrong", backward=lambda ctx, dy: -dy * ctx.factor)
Round = layer(lambda ctx, x: jnp.round(x), name="Round")
Quantized = layer(
    lambda ctx, x: (ctx.save_for_backward(x), jnp.round(jnp.clip(x, -2, 2)))[1],
    lambda ctx, dy: jnp.where(jnp.abs(ctx.saved_tensors[0]) <= 2, dy, 0),
)
Saturated = layer(base=Quantized, backward=lambda ctx, dy: dy)  # the gradient of clipped values is not zero
NUMBER = 3


class Inside:
    Scale = Scale


def straight_through(x):
    return x + jax.lax.stop_gradient(jnp.round(x) - x)


def quantized(x):
    clipped = jnp.clip(x, -2, 2)
    return clipped + jax.lax.stop_gradient(jnp.round(clipped) - clipped)


def narrow(x):
    return Scale.apply(x.astype(jnp.bfloat16), 2.0).astype(x.dtype)


def statics(x, *values):
    assert values == (-1, "sum", None, (2, [3]), jnp.tanh), values
    return Scale.apply(x, 2.0)


def integers(x, index, mask, key):
    assert index.dtype == jnp.int32
    assert mask.dtype == bool
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return jnp.where(mask, Scale.apply(x, 2.0)[index], 0)


def refuse(x):
    raise RuntimeError(f"it is {x}")
