"""Prints the README's table of second derivatives, and draws notebooks/second_derivative.svg (with matplotlib).

python notebooks/second_derivative.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pylayer_jax import PyLayer


class Round(PyLayer):
    @staticmethod
    def forward(ctx, x):
        return jnp.round(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


@jax.custom_vjp
def plain_round(x):
    return jnp.round(x)


plain_round.defvjp(lambda x: (jnp.round(x), None), lambda _, dy: (dy,))


class SteepTanh(PyLayer):
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
def plain_steep_tanh(x):
    return jnp.tanh(x)


def steep_tanh_forward(x):
    y = jnp.tanh(x)
    return y, y


plain_steep_tanh.defvjp(steep_tanh_forward, lambda y, dy: (2 * dy * (1 - y**2),))


class Example(NamedTuple):
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


def draw(file: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.fonttype"] = "none"  # text as text
    mpl.rcParams["svg.hashsalt"] = "pylayer_jax"  # the same file each time
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    xs = jnp.linspace(-2.4, 2.4, 121)
    for axes, example in zip(figure.subplots(1, 2), EXAMPLES, strict=True):
        axes.plot(xs, jax.vmap(second(example.layer))(xs), label="PyLayer, Paddle, torch")
        axes.plot(xs, jax.vmap(second(example.plain))(xs), "--", label="plain jax.custom_vjp")
        axes.plot([example.x] * 2, [second(f)(example.x) for f in example[3:]], "k.", markersize=5)
        axes.set_title(f"Second derivative of {example.title}", fontsize=9)
        axes.set_xlabel("x", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    for title, x, *functions in EXAMPLES:
        by_rule, layer, plain = functions[0](x), second(functions[1])(x), second(functions[2])(x)
        print(f"{title:30} at {x}: by the rule {by_rule:.4f}, PyLayer {layer:.4f}, plain custom_vjp {plain:.4f}")
    draw(Path(__file__).with_name("second_derivative.svg"))


if __name__ == "__main__":
    main()
