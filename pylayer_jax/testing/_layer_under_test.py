"""A layer with its results in eager mode. The results under every transform have to equal these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._comparison import Comparison, MismatchError, type_of
from ._flat_function import FlatFunction


@dataclasses.dataclass
class LayerUnderTest:
    """A layer at its arguments. `run` fills in its outputs, random cotangents and its gradients in eager mode."""

    flat: FlatFunction
    reference: FlatFunction | None
    rtol: float | None
    atol: float | None
    seed: int
    float64: bool
    outputs: list[Any] = dataclasses.field(default_factory=list[Any])
    cotangents: dict[int, Any] = dataclasses.field(default_factory=dict[int, Any])
    gradients: list[Any] = dataclasses.field(default_factory=list[Any])

    def run(self) -> str:
        flat = self.flat
        self.outputs = flat.outputs(flat.values)
        self.cotangents = flat.random_cotangents(self.outputs, self.random)
        if not self.cotangents:
            raise MismatchError("none of the outputs is of floating-point or complex numbers")
        self.gradients = flat.grads(self.cotangents)
        returned = ", ".join(map(type_of, self.outputs))
        return f"returns {returned}; gradients of {', '.join(flat.names)}"

    @property
    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @property
    def comparison(self) -> Comparison:
        return Comparison(self.rtol, self.atol)

    @property
    def output_names(self) -> list[str]:
        return [f"output {i}" for i in range(len(self.outputs))]

    @property
    def gradient_names(self) -> list[str]:
        return [f"the gradient of {name}" for name in self.flat.names]

    def compare_with_eager(self, outputs: Callable[[list[Any]], list[Any]], label: str) -> None:
        """Compare the results of a transformed function, and their gradients, with those of eager mode."""
        self.comparison.of_all(outputs(self.flat.values), self.outputs, self.output_names, label)
        _, gradients = outputs_and_grads(outputs, self.flat.values, self.cotangents)
        self.comparison.of_all(gradients, self.gradients, self.gradient_names, label)


def outputs_and_grads(
    outputs: Callable[[list[Any]], list[Any]], values: list[Any], cotangents: dict[int, Any]
) -> tuple[list[Any], list[Any]]:
    """The outputs of a function of the differentiated values, and the gradients, from one run."""

    def run(values: list[Any]) -> tuple[dict[int, Any], list[Any]]:
        returned = outputs(values)
        return {k: returned[k] for k in cotangents}, returned

    _, pull, returned = jax.vjp(run, values, has_aux=True)
    return returned, pull(cotangents)[0]
