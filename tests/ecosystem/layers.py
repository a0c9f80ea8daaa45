"""Layers whose rule is twice the derivative of their forward, so that a lost rule shows, and the same in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tests.kit.layers import Tanh


class Steep(Tanh):
    """Saves its output, and has reverse mode only."""

    @staticmethod
    def backward(ctx, dy):
        return 2 * Tanh.backward(ctx, dy)


class SteepBothWays(Steep):
    """Has forward mode too."""

    forward_mode = True


def steep(x):
    """`Steep` without the library."""
    value = jax.lax.stop_gradient(x)
    return jnp.tanh(value + 2 * (x - value))


def doubled(model, x):
    """What a module returns for `x`, with twice its gradient."""
    y = jax.lax.stop_gradient(model(x))
    return y + 2 * (model(x) - y)
