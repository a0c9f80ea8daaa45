"""Outputs and gradients of every order against those of a function that is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax import has_tangent, is_key

from ._flat_function import Flat, MismatchError, in_every_way


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Arrays against those that are right, within tolerances that fit their dtype."""

    rtol: float | None = None
    atol: float | None = None
    right: str = "eager mode"

    def of_order(self, order: int, flat: Flat, plain: Flat, rng: np.random.Generator) -> None:
        """Values for order 0, or gradients of gradients, in every way in which they may be asked for."""
        outputs = self._outputs(flat, plain, "")
        for _ in range(1, order):
            weights = flat.weights(outputs, rng)
            flat, plain = flat.derivative(weights), plain.derivative(weights)
            outputs = self._outputs(flat, plain, "gradient ")
        if not order:
            return
        weights = flat.weights(outputs, rng)
        expected: dict[tuple[int, ...], list[Any]] = {}
        for found in in_every_way(flat, weights):
            if found.leak:
                raise MismatchError(found.leak)
            if found.outputs not in expected:
                expected[found.outputs] = plain.gradient({k: weights[k] for k in found.outputs})
            for j, gradient in found.by_argument.items():
                what = f"the gradient of {flat.names[j]}{found.way}"
                self.of_arrays(gradient, expected[found.outputs][j], what)

    def _outputs(self, flat: Flat, plain: Flat, kind: str) -> list[Any]:
        outputs, expected = flat.outputs(flat.values), plain.outputs(plain.values)
        if len(outputs) != len(expected):
            raise MismatchError(f"{len(outputs)} tensors are returned, but {len(expected)} by {self.right}.")
        for i, pair in enumerate(zip(outputs, expected, strict=True)):
            self.of_arrays(*pair, f"{kind}output {i}")
        return outputs

    def of_arrays(self, got: Any, expected: Any, what: str) -> None:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise MismatchError(f"{what} is {type_of(got)}, but {type_of(expected)} by {self.right}.")
        if is_key(got):
            got, expected = jax.random.key_data(got), jax.random.key_data(expected)
        a, b = exact(got), exact(expected)
        size = float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b)))
        epsilon = float(jnp.finfo(got.dtype).eps) if has_tangent(got) else 0.0
        rtol = epsilon**0.5 if self.rtol is None else self.rtol
        # Sums that cancel to zero leave rounding behind.
        atol = epsilon**0.5 * size + 16 * epsilon if self.atol is None else self.atol
        with np.errstate(invalid="ignore"):
            excess = np.where(a == b, 0.0, np.abs(a - b) - (atol + rtol * np.abs(b)))
        excess = np.where(np.isnan(a) & np.isnan(b), 0.0, np.where(np.isnan(excess), np.inf, excess))
        if np.all(excess <= 0):
            return
        index = tuple(int(i) for i in np.unravel_index(np.argmax(excess), excess.shape))
        raise MismatchError(
            f"{what} at index {index} is {a[index]:.6g}, but {b[index]:.6g} by {self.right} (tolerance "
            f"{atol + rtol * abs(b[index]):.1g}); wrong at {np.sum(excess > 0)} of {excess.size} places."
        )

    def of_all(self, got: Sequence[Any], expected: Sequence[Any], what: Sequence[str], way: str) -> None:
        for a, b, name in zip(got, expected, what, strict=True):
            self.of_arrays(a, b, f"{name} {way}")


def type_of(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def exact(x: Any) -> np.ndarray:
    """In double precision, whatever the dtype."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
