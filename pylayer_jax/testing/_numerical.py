"""Gradients against numerical ones.

A numerical derivative is a central difference `(f(x + h) - f(x - h)) / 2h` with `h` the cube root of the machine
epsilon, at which the errors of rounding and of truncation are of one size (Press et al., Numerical Recipes, 5.7).
Outputs are summed with fixed random weights, so that errors at two of them do not cancel. For complex arguments the
gradient is that of `jax.grad`: `dL/d(re) - i dL/d(im)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._comparison import MismatchError, exact
from ._flat_function import FlatFunction
from ._variants import Gradients, gradient_variants


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of `gradcheck`; None stands for the default of the dtype."""

    rtol: float | None
    atol: float | None
    step: float | None
    limit: int
    seed: int
    float64: bool


def compare_numerically(flat: FlatFunction, order: int, settings: Settings, all_variants: bool = True) -> str:
    """Compare gradients with numerical ones, and return a sentence about the comparison.

    Raises:
        MismatchError: if a gradient differs from the numerical one.
    """
    if settings.float64:
        with jax.enable_x64(True):
            try:
                wide = flat.in_double_precision()
                epsilon = wide.epsilon(wide.outputs(wide.values))
                measured = _measure(wide, order, settings, epsilon, all_variants) if epsilon < 1e-15 else None
            except Exception:  # the layer refuses these dtypes, or has another error, which the code below meets again
                measured = None
        if measured is not None:
            return _judge(measured, settings)
    epsilon = flat.epsilon(flat.outputs(flat.values))
    return _judge(_measure(flat, order, settings, epsilon, all_variants), settings)


@dataclasses.dataclass(frozen=True)
class _Probe:
    """The change of the outputs between two points that differ in one argument."""

    argument: int
    where: str  # the entry or the direction in which the points differ, as messages name it
    step: np.ndarray  # from the lower to the upper point
    changes: dict[
        int, tuple[float, float]
    ]  # per output: the change of its weighted sum, and the rounding error of that


@dataclasses.dataclass(frozen=True)
class _Measurement:
    """Gradients, and the probes that give the numerical ones."""

    names: list[str]
    probes: list[_Probe]
    gradients: list[Gradients]
    epsilon: float


def _measure(flat: FlatFunction, order: int, settings: Settings, epsilon: float, all_variants: bool) -> _Measurement:
    rng = np.random.default_rng(settings.seed)
    differentiable = flat.differentiable_outputs()
    if not differentiable:
        raise ValueError(
            "none of the outputs carries a gradient: each is an integer, is marked as not differentiable, or does not "
            "depend on a differentiated argument."
        )
    weights = flat.random_cotangents(flat.outputs(flat.values), rng)
    weights = {k: weights[k] for k in differentiable}
    for _ in range(1, order):
        flat = flat.grad_function(weights)
        weights = flat.random_cotangents(flat.outputs(flat.values), rng)
    variants = gradient_variants(flat, weights) if all_variants else [next(gradient_variants(flat, weights))]
    gradients = [dataclasses.replace(v, by_argument={j: exact(g) for j, g in v.by_argument.items()}) for v in variants]
    step = epsilon ** (1 / 3) if settings.step is None else settings.step
    probes = list(_probes(flat, weights, step, settings.limit, rng, epsilon))
    return _Measurement(flat.names, probes, gradients, epsilon)


def _probes(
    flat: FlatFunction, weights: dict[int, Any], step: float, limit: int, rng: np.random.Generator, epsilon: float
) -> Iterator[_Probe]:
    values = [np.asarray(x) for x in flat.values]
    exact_weights = {k: exact(w) for k, w in weights.items()}
    for j, value in enumerate(values):
        for where, direction in _directions(value, limit, rng):
            size = step * max(1.0, float(np.max(np.abs(exact(value)[direction != 0]))))
            ends = [(exact(value) + s * size * direction).astype(value.dtype) for s in (-1, 1)]
            low, high = (flat.outputs([*flat.values[:j], jnp.asarray(end), *flat.values[j + 1 :]]) for end in ends)
            changes: dict[int, tuple[float, float]] = {}
            for k, weight in exact_weights.items():
                lower, upper = exact(low[k]), exact(high[k])
                rounding = 4 * epsilon * np.sum(np.abs(weight * upper), where=lower != upper)
                changes[k] = float(np.sum(weight * (upper - lower)).real), float(rounding)
            yield _Probe(j, where, exact(ends[1]) - exact(ends[0]), changes)


def _directions(value: np.ndarray, limit: int, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """One unit vector per entry; if there are more than `limit`, per random entry, and one over all entries."""
    complex_valued = np.iscomplexobj(value)
    kind = np.complex128 if complex_valued else np.float64
    entries: Any = range(value.size)
    if value.size > limit:
        entries = np.sort(rng.choice(value.size, limit, replace=False))
    for entry in entries:
        index = tuple(int(i) for i in np.unravel_index(entry, value.shape))
        for unit, part in ((1, ", real part"), (1j, ", imaginary part")) if complex_valued else ((1, ""),):
            direction = np.zeros(value.shape, kind)
            direction[index] = unit
            yield f"at index {index}{part}", direction
    if value.size > limit:
        direction = rng.normal(size=value.shape) + (1j * rng.normal(size=value.shape) if complex_valued else 0)
        yield f"along a random direction over all {value.size} entries", direction / np.linalg.norm(direction)


def _judge(measured: _Measurement, settings: Settings) -> str:
    rtol = measured.epsilon ** (1 / 3) if settings.rtol is None else settings.rtol
    atol = measured.epsilon ** (1 / 2) if settings.atol is None else settings.atol
    for gradients in measured.gradients:
        if message := gradients.leak or _worst_mismatch(gradients, measured, rtol, atol):
            raise MismatchError(message)
    return f"as numerically, at {len(measured.probes)} places, relative tolerance {rtol:.0e}"


def _worst_mismatch(gradients: Gradients, measured: _Measurement, rtol: float, atol: float) -> str:
    """The message about the probe with the largest error; empty if gradients and numerical ones agree."""
    worst, message, wrong, count = 0.0, "", 0, 0
    for probe in measured.probes:
        if probe.argument not in gradients.by_argument:
            continue
        gradient, length = exact(gradients.by_argument[probe.argument]), float(np.linalg.norm(probe.step))
        analytical = float(np.sum(gradient * probe.step).real) / length
        numerical = sum(probe.changes[k][0] for k in gradients.outputs) / length
        tolerance = atol + rtol * abs(numerical) + sum(probe.changes[k][1] for k in gradients.outputs) / length
        error, count = abs(analytical - numerical), count + 1
        if error <= tolerance:
            continue
        wrong += 1
        ratio = error / tolerance if np.isfinite(error) and tolerance else np.inf
        if ratio > worst:
            worst = ratio
            message = (
                f"the gradient of {measured.names[probe.argument]} {probe.where} is {analytical:.6g} by backward, but "
                f"{numerical:.6g} numerically (tolerance {tolerance:.1g}){gradients.label}"
            )
    return message and f"{message}; wrong at {wrong} of {count} places."
