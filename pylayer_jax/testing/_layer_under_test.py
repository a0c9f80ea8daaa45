"""What the properties of a layer are tested on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._comparison import Comparison, MismatchError, type_of
from ._flat_function import Flat


@dataclasses.dataclass
class Subject:
    """A layer at its arguments, with what eager mode makes of it."""

    flat: Flat
    plain: Flat | None
    rtol: float | None
    atol: float | None
    seed: int
    float64: bool
    outputs: list[Any] = dataclasses.field(default_factory=list[Any])
    weights: dict[int, Any] = dataclasses.field(default_factory=dict[int, Any])
    gradients: list[Any] = dataclasses.field(default_factory=list[Any])

    def run(self) -> str:
        flat = self.flat
        self.outputs = flat.outputs(flat.values)
        self.weights = flat.weights(self.outputs, self.random)
        if not self.weights:
            raise MismatchError("none of the outputs is of floating-point or complex numbers")
        self.gradients = flat.gradient(self.weights)
        returned = ", ".join(map(type_of, self.outputs))
        return f"returns {returned}; gradients of {', '.join(flat.names)}"

    @property
    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @property
    def same(self) -> Comparison:
        return Comparison(self.rtol, self.atol)

    @property
    def output_names(self) -> list[str]:
        return [f"output {i}" for i in range(len(self.outputs))]

    @property
    def gradient_names(self) -> list[str]:
        return [f"the gradient of {name}" for name in self.flat.names]

    def both(self, outputs: Callable[[list[Any]], list[Any]], way: str) -> None:
        """`outputs`, and their gradients, against those of eager mode."""
        self.same.of_all(outputs(self.flat.values), self.outputs, self.output_names, way)
        gradients = pulled(outputs, self.flat.values, self.weights)
        self.same.of_all(gradients, self.gradients, self.gradient_names, way)


def pulled(outputs: Callable[[list[Any]], list[Any]], values: list[Any], weights: dict[int, Any]) -> list[Any]:
    """The gradients of the values, for outputs with weights."""

    def weighted(values: list[Any]) -> list[Any]:
        returned = outputs(values)
        return [returned[k] for k in weights]

    _, pull = jax.vjp(weighted, values)
    return pull(list(weights.values()))[0]


def both_of(
    outputs: Callable[[list[Any]], list[Any]], values: list[Any], weights: dict[int, Any]
) -> tuple[list[Any], list[Any]]:
    """The outputs and the gradients of one run."""

    def weighted(values: list[Any]) -> tuple[list[Any], list[Any]]:
        returned = outputs(values)
        return [returned[k] for k in weights], returned

    _, pull, returned = jax.vjp(weighted, values, has_aux=True)
    return returned, pull(list(weights.values()))[0]
