"""Draws notebooks/second_derivative.svg (with matplotlib): python -m tests.documents.draw_second_derivatives"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

from pylayer_jax._commands.demo import EXAMPLES, second


def main() -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.fonttype"] = "none"  # text as text
    mpl.rcParams["svg.hashsalt"] = "pylayer_jax"  # the same file each time
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    xs = jnp.linspace(-2.4, 2.4, 121)
    for axes, example in zip(figure.subplots(1, 2), EXAMPLES, strict=True):
        axes.plot(xs, jax.vmap(second(example.layer))(xs), label="PyLayer, Paddle, torch")
        axes.plot(xs, jax.vmap(second(example.plain))(xs), "--", label="plain jax.custom_vjp")
        axes.plot([example.x] * 2, [second(f)(example.x) for f in (example.layer, example.plain)], "k.", markersize=5)
        axes.set_title(f"Second derivative of {example.title}", fontsize=9)
        axes.set_xlabel("x", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(Path(__file__).parents[2] / "notebooks" / "second_derivative.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
