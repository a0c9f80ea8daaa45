"""Numerical derivatives of a function at a point.

A numerical derivative is a central difference `(f(x + h) - f(x - h)) / 2h` with `h` the cube root of the machine
epsilon, at which the errors of rounding and of truncation are of one size (Press et al., Numerical Recipes, 5.7).
Outputs are summed with fixed random weights, so that errors at two of them do not cancel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._comparison import exact, largest_entry
from ._flat_function import FlatFunction

__tracebackhide__ = True  # pytest hides the frames of this module


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of `gradcheck`; None stands for the default of the dtype."""

    rtol: float | None
    atol: float | None
    step: float | None
    limit: int
    seed: int
    float64: bool


@dataclasses.dataclass(frozen=True)
class Probe:
    """The change of the outputs between two points that differ in one argument."""

    argument: int
    where: str  # the entry or the direction in which the points differ, as messages name it
    step: np.ndarray  # from the lower to the upper point
    changes: dict[int, tuple[float, float]]  # per output: the change of its weighted sum, and the error of that

    @property
    def length(self) -> float:
        return float(np.linalg.norm(self.step))

    def derivative(self, outputs: Collection[int]) -> float:
        return sum(self.changes[k][0] for k in outputs) / self.length

    def error(self, outputs: Collection[int]) -> float:
        return sum(self.changes[k][1] for k in outputs) / self.length


def measure(
    flat: FlatFunction, weights: dict[int, Any], sizes: list[float], settings: Settings, near_kinks: bool
) -> Iterator[Probe]:
    """Measure the derivatives of the weighted outputs.

    `sizes` are those of the numbers of which each output is computed, where these may cancel. With `near_kinks`, the
    error of a probe covers that its points may lie on both sides of a kink.
    """
    outputs = flat.run()
    exact_weights = {k: exact(w) for k, w in weights.items()}
    points = _Points(flat, exact_weights, outputs, sizes, flat.epsilon(outputs), near_kinks)
    rng = np.random.default_rng(settings.seed)
    step = points.epsilon ** (1 / 3) if settings.step is None else settings.step
    for j, value in enumerate(map(exact, flat.values)):
        whole = largest_entry(value)
        own = np.where(np.isfinite(value) & (value != 0), np.abs(value), whole)
        for where, direction in _directions(value, settings.limit, rng):
            moved = direction != 0
            half_steps = [max(1.0, largest_entry(value[moved])) * direction]
            if settings.step is None and whole:
                # The function may change on the scale of 1, of the array, or of each entry.
                half_steps += [whole * direction] if whole < 0.1 else []
                half_steps += [own * direction] if np.min(own, where=moved, initial=whole) < min(0.1, whole) else []
            yield min((points.probe(j, where, step * h) for h in half_steps), key=_relative_error)[0]


def _relative_error(found: tuple[Probe, float]) -> tuple[float, float]:
    """How much of a derivative may be an error; if it may be nothing else, the size of the error."""
    probe, estimate = found
    derivative = abs(probe.derivative(probe.changes))
    if not np.isfinite(estimate):
        return np.inf, np.inf
    return estimate / max(derivative, estimate) if estimate else 0.0, estimate


@dataclasses.dataclass(frozen=True)
class _Points:
    """What the outputs are at the points of a probe."""

    flat: FlatFunction
    weights: dict[int, np.ndarray]
    outputs: list[Any]
    sizes: list[float]
    epsilon: float
    near_kinks: bool

    def probe(self, j: int, where: str, half_step: np.ndarray) -> tuple[Probe, float]:
        """A probe from a half step below to a half step above, and an estimate of its error."""
        values = self.flat.values
        ends = [(exact(values[j]) + s * half_step).astype(values[j].dtype) for s in (-1, 1)]
        low, high = (self.flat.outputs([*values[:j], jnp.asarray(end), *values[j + 1 :]]) for end in ends)
        changes: dict[int, tuple[float, float]] = {}
        estimate = 0.0
        for k, weight in self.weights.items():
            lower, middle, upper = exact(low[k]), exact(self.outputs[k]), exact(high[k])
            size = np.abs(weight) * np.maximum(np.abs(upper), self.sizes[k])
            rounding = float(4 * self.epsilon * np.sum(size, where=lower != upper))
            # Half of the difference between the slopes on both sides of the middle, which a kink makes.
            bend = abs(float(np.sum(weight * (upper - 2 * middle + lower)).real))
            changes[k] = float(np.sum(weight * (upper - lower)).real), rounding + (bend if self.near_kinks else 0.0)
            estimate += rounding + bend
        probe = Probe(j, where, exact(ends[1]) - exact(ends[0]), changes)
        return probe, estimate / probe.length


def _directions(value: np.ndarray, limit: int, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """One unit vector per entry; if there are more than `limit`, per random entry, and one over all entries."""
    complex_valued = np.iscomplexobj(value)
    entries: Any = range(value.size)
    if value.size > limit:
        entries = np.sort(rng.choice(value.size, limit, replace=False))
    for entry in entries:
        index = tuple(int(i) for i in np.unravel_index(entry, value.shape))
        for unit, part in ((1, ", real part"), (1j, ", imaginary part")) if complex_valued else ((1, ""),):
            direction = np.zeros_like(value)
            direction[index] = unit
            yield f"at index {index}{part}", direction
    if value.size > limit:
        direction = rng.normal(size=value.shape) + (1j * rng.normal(size=value.shape) if complex_valued else 0)
        yield f"along a random direction over all {value.size} entries", direction / np.linalg.norm(direction)
