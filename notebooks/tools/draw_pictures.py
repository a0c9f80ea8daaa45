"""Draw the pictures of the pages (with matplotlib; the GPT with jax 0.12): python -m notebooks.tools.draw_pictures"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tests.documents.ways import COLUMNS, EXAMPLES

NOTEBOOKS = Path(__file__).parents[1]


def main(arguments: list[str]) -> None:
    if arguments != ["second_derivative"]:
        # First, as its notebook sets the number of devices, before JAX has any.
        save(gpt_memory(), NOTEBOOKS / "gpt_memory.svg")
    save(second_derivative(), NOTEBOOKS / "second_derivative.svg")


def save(figure: Any, file: Path) -> None:
    """Write a figure as SVG, the same file each time, with text as text."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pylayer_jax"}):
        figure.savefig(file, format="svg", metadata={"Date": None})


def second_derivative() -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.6), layout="constrained")
    xs = jnp.linspace(-2.4, 2.4, 121)
    curves = {
        "PyLayer": ("`PyLayer`", "-"),
        "custom_vjp as documented": ("`custom_vjp`, fwd calls f", ":"),
        "custom_vjp, fwd rule computes again": ("`custom_vjp`, fwd inlines f", "--"),
    }
    for axes, example in zip(figure.subplots(1, 2), EXAMPLES, strict=True):
        for label, (column, style) in curves.items():
            second = example.second(COLUMNS[column]())
            width = 3 if style == ":" else 1.5
            axes.plot(xs, jax.vmap(second)(xs), style, label=label, linewidth=width)
            axes.plot([example.x], [second(example.x)], "k.", markersize=5)
        axes.set_title(f"Second derivative of {example.title}", fontsize=9)
        axes.set_xlabel("x", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7, frameon=False)
    return figure


def gpt_memory() -> Any:
    """The picture of notebook 07, by its cells."""
    names: dict[str, Any] = {}
    for cell in json.loads((NOTEBOOKS / "07_gpt_in_flax_nnx.ipynb").read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            exec(text.removesuffix("plt.show()"), names)
        if "figure" in names:
            break
    return names["figure"]


if __name__ == "__main__":
    main(sys.argv[1:])
