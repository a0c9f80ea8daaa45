"""Two layers whose second derivative tells a rule that holds at every order from one that is used once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pylayer_jax._layer import PyLayer


class Round(PyLayer):
    """Rounds, and lets the gradient straight through."""

    @staticmethod
    def forward(ctx: Any, x: jax.Array) -> jax.Array:
        return jnp.round(x)

    @staticmethod
    def backward(ctx: Any, dy: jax.Array) -> jax.Array:
        return dy


@jax.custom_vjp
def plain_round(x: jax.Array) -> jax.Array:
    return jnp.round(x)


plain_round.defvjp(lambda x: (jnp.round(x), None), lambda _, dy: (dy,))


class SteepTanh(PyLayer):
    """tanh, with twice its gradient."""

    @staticmethod
    def forward(ctx: Any, x: jax.Array) -> jax.Array:
        y = jnp.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: jax.Array) -> jax.Array:
        (y,) = ctx.saved_tensor()
        return 2 * dy * (1 - y**2)


@jax.custom_vjp
def plain_steep_tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


def _steep_tanh_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = jnp.tanh(x)
    return y, y


plain_steep_tanh.defvjp(_steep_tanh_forward, lambda y, dy: (2 * dy * (1 - y**2),))


class Example(NamedTuple):
    """One function in two ways, and a point."""

    title: str
    x: float
    by_rule: Callable[[Any], Any]  # the second derivative, worked out by hand from the rule
    layer: Callable[[Any], Any]
    plain: Callable[[Any], Any]


EXAMPLES = (
    Example(
        "round(x)³, straight-through",
        1.3,
        lambda x: 6 * jnp.round(x),
        lambda x: Round.apply(x) ** 3,
        lambda x: plain_round(x) ** 3,
    ),
    Example(
        "tanh(x), its gradient doubled",
        0.3,
        lambda x: -8 * jnp.tanh(x) * (1 - jnp.tanh(x) ** 2),
        SteepTanh.apply,
        plain_steep_tanh,
    ),
)


def second(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.grad(jax.grad(function))


class Measured(NamedTuple):
    """The second derivative of an example at its point."""

    title: str
    by_rule: float
    layer: float
    plain: float  # by a hand-written jax.custom_vjp

    @property
    def is_right(self) -> bool:
        return abs(self.layer - self.by_rule) <= 1e-4


def measure() -> list[Measured]:
    return [
        Measured(f"{title} at {x}", float(by_rule(x)), float(second(layer)(x)), float(second(plain)(x)))
        for title, x, by_rule, layer, plain in EXAMPLES
    ]
