"""Second derivatives in the README's table and picture: of layers and of hand-written `jax.custom_vjp` functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pylayer_jax import PyLayer


class Round(PyLayer):
    """Rounding that passes the gradient straight through."""

    @staticmethod
    def forward(ctx, x):
        return jnp.round(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


class SteepTanh(PyLayer):
    """tanh with twice its gradient."""

    @staticmethod
    def forward(ctx, x):
        y = jnp.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensor()
        return 2 * dy * (1 - y**2)


@jax.custom_vjp
def plain_round(x):
    return jnp.round(x)


@jax.custom_vjp
def plain_steep_tanh(x):
    return jnp.tanh(x)


plain_round.defvjp(lambda x: (jnp.round(x), None), lambda _, dy: (dy,))
plain_steep_tanh.defvjp(lambda x: (y := jnp.tanh(x), y), lambda y, dy: (2 * dy * (1 - y**2),))


class Example(NamedTuple):
    title: str
    x: float
    by_hand: float  # the second derivative: 6 * round(x), and -8 * y * (1 - y**2) of y = tanh(x)
    layer: Callable[[Any], Any]
    plain: Callable[[Any], Any]


EXAMPLES = (
    Example("round(x)³, straight-through", 1.3, 6.0, lambda x: Round.apply(x) ** 3, lambda x: plain_round(x) ** 3),
    Example("tanh(x), its gradient doubled", 0.3, -2.132724, SteepTanh.apply, plain_steep_tanh),
)


def second(function):
    return jax.grad(jax.grad(function))
