"""A layer with its results in eager mode. The results under every transform have to equal these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._comparison import Comparison, MismatchError, rounded_otherwise, rounding_noise, type_of
from ._flat_function import FlatFunction

__tracebackhide__ = True  # pytest hides the frames of this module


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
        if not self.cotangents:
            return ()
        epsilon = self.flat.epsilon(self.outputs)
        given = {x.dtype for x in self.flat.tensors}
        dtypes = [x.dtype for x in self.saved() if x.dtype not in given]
        return tuple(dict.fromkeys(str(d) for d in dtypes if _is_narrower(d, epsilon)))

    @property
    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def other_cotangents(self) -> dict[int, Any]:
        return self.flat.random_cotangents(self.outputs, self.random.spawn(1)[0])

    @property
    def comparison(self) -> Comparison:
        return Comparison(self.rtol, self.atol, self.flat.epsilon(self.outputs))

    def compare_outputs(self, got: Sequence[Any], label: str, expected: Sequence[Any] | None = None) -> None:
        """Compare outputs with those of eager mode, unless others are expected."""
        names = [f"output {i}" for i in range(len(self.outputs))]
        expected = self.outputs if expected is None else expected
        self.comparison.of_all(got, expected, names, label, self.noise_of_outputs)

    def compare_gradients(
        self,
        got: Sequence[Any] | Mapping[int, Any],
        label: str,
        expected: Sequence[Any] | None = None,
        right: str = "eager mode",
    ) -> None:
        """Compare gradients, of all values or by position, with those of eager mode unless others are expected."""
        comparison = dataclasses.replace(self.comparison, right=right)
        expected = self.gradients if expected is None else expected
        for j, gradient in got.items() if isinstance(got, Mapping) else enumerate(got):
            name = f"the gradient of {self.flat.names[j]}{label}"
            comparison.of_arrays(gradient, expected[j], name, self.noise_of_gradients[j])

    def compare_with_eager(self, outputs: Callable[[list[Any]], list[Any]], label: str) -> None:
        """Compare the results of a transformed function, and their gradients, with those of eager mode."""
        self.compare_outputs(outputs(self.flat.values), label)
        self.compare_gradients(outputs_and_grads(outputs, self.flat.values, self.cotangents)[1], label)


def _is_narrower(dtype: Any, epsilon: float) -> bool:
    if jnp.issubdtype(dtype, jnp.inexact):
        return float(jnp.finfo(dtype).eps) > epsilon
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits <= 8


def outputs_and_grads(
    outputs: Callable[[list[Any]], list[Any]], values: list[Any], cotangents: dict[int, Any]
) -> tuple[list[Any], list[Any]]:
    """The outputs of a function of the differentiated values, and the gradients, from one run."""

    def run(values: list[Any]) -> tuple[dict[int, Any], list[Any]]:
        returned = outputs(values)
        return {k: returned[k] for k in cotangents}, returned

    _, pull, returned = jax.vjp(run, values, has_aux=True)
    return returned, pull(cotangents)[0]
