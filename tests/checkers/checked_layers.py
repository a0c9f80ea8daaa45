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
NUMBER = 3


class Inside:
    Scale = Scale


def straight_through(x, *_):
    return x + jax.lax.stop_gradient(jnp.round(x) - x)


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
