"""A layer with its results in eager mode. The results under every transform have to equal these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._comparison import Comparison, MismatchError, rounded_otherwise, rounding_noise, type_of
from ._flat_function import FlatFunction
from ._runs import Run

__tracebackhide__ = True  # pytest hides the frames of this module

# Runs that are compared, and a sentence about them in the end.
Runs = Generator[Run, None, str]
_Function = Callable[[list[Any]], list[Any]]  # of the differentiated values


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
    noise_of_outputs: list[float] = dataclasses.field(default_factory=list[float])
    noise_of_gradients: list[float] = dataclasses.field(default_factory=list[float])

    def run(self) -> str:
        flat = self.flat
        self.outputs = flat.outputs(flat.values)
        self.cotangents = flat.random_cotangents(self.outputs, self.random)
        if not self.cotangents:
            raise MismatchError("none of the outputs is of floating-point or complex numbers")
        self.gradients = flat.grads(self.cotangents)
        rounded = flat.with_values(rounded_otherwise(flat.values))
        self.noise_of_outputs = rounding_noise(self.outputs, rounded.run())
        self.noise_of_gradients = rounding_noise(self.gradients, rounded.grads(self.cotangents))
        returned = ", ".join(map(type_of, self.outputs))
        return f"returns {returned}; gradients of {', '.join(flat.names)}"

    def saved(self) -> list[jax.Array]:
        """The arrays that are kept for backward."""
        leaves = jax.tree_util.tree_leaves(self.flat.vjp(self.cotangents))
        return list({id(x): x for x in leaves if isinstance(x, jax.Array) and x.size}.values())

    def narrower_dtypes(self) -> tuple[str, ...]:
        """The dtypes of saved arrays to which the arguments may have been rounded."""
        epsilon = self.flat.epsilon(self.outputs)
        given = {x.dtype for x in self.flat.tensors}
        dtypes = [x.dtype for x in self.saved() if x.dtype not in given]
        return tuple(dict.fromkeys(str(d) for d in dtypes if _is_narrower(d, epsilon)))

    @property
    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def other_cotangents(self) -> dict[int, Any]:
        return self.flat.random_cotangents(self.outputs, self.random.spawn(1)[0])

    def comparison(self, right: str = "eager mode") -> Comparison:
        return Comparison(self.rtol, self.atol, self.flat.epsilon(self.outputs), right)

    def compare(self, run: Run) -> None:
        """Compare outputs and gradients with those of eager mode, unless others are expected."""
        outputs, gradients = run.expected or (self.outputs, self.gradients)
        comparison, names = self.comparison(run.right), self.flat.names
        for i, y in enumerate(run.outputs):
            comparison.of_arrays(y, outputs[i], f"output {i}{run.label}", self.noise_of_outputs[i])
        for j, g in run.gradients.items():
            noise = self.noise_of_gradients[j]
            comparison.of_arrays(g, gradients[j], f"the gradient of {names[j]}{run.label}", noise)

    def sentence_of(self, found: Runs | str) -> str:
        """Compare the runs, if it is these, and return the sentence."""
        while not isinstance(found, str):
            try:
                run = next(found)
            except StopIteration as end:
                return end.value
            self.compare(run)
        return found

    def run_of(self, outputs: _Function, label: str) -> Run:
        """The results of a transformed layer."""
        gradients = outputs_and_grads(outputs, self.flat.values, self.cotangents)[1]
        return Run(label, self.cotangents, dict(enumerate(gradients)), outputs=outputs(self.flat.values))


def _is_narrower(dtype: Any, epsilon: float) -> bool:
    if jnp.issubdtype(dtype, jnp.inexact):
        return float(jnp.finfo(dtype).eps) > epsilon
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits <= 8


def outputs_and_grads(
    outputs: _Function, values: list[Any], cotangents: dict[int, Any], wanted: Sequence[int] | None = None
) -> tuple[list[Any], list[Any]]:
    """The outputs of a function, and the gradients of the values at the positions `wanted`, from one run."""
    wanted = range(len(values)) if wanted is None else wanted

    def run(perturbed: list[Any]) -> tuple[dict[int, Any], list[Any]]:
        given = dict(enumerate(values)) | dict(zip(wanted, perturbed, strict=True))
        returned = outputs(list(given.values()))
        return {k: returned[k] for k in cotangents}, returned

    _, pull, returned = jax.vjp(run, [values[j] for j in wanted], has_aux=True)
    return returned, pull(cotangents)[0]
