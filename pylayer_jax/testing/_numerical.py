"""Gradients against numerical ones.

A numerical derivative is a central difference `(f(x + h) - f(x - h)) / 2h` with `h` the cube root of the machine
epsilon, at which the errors of rounding and of truncation are of one size (Press et al., Numerical Recipes, 5.7).
Outputs are summed with fixed random weights, so that errors at two of them do not cancel. For complex arguments the
gradient is that of `jax.grad`: `dL/d(re) - i dL/d(im)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._comparison import MismatchError, exact
from ._flat_function import FlatFunction
from ._variants import Gradients, gradient_variants


@dataclasses.dataclass(frozen=True)
class Probe:
    """What the outputs do when one argument moves."""

    argument: int
    where: str
    step: np.ndarray  # from the lower to the upper point
    changes: dict[int, tuple[float, float]]  # per output: of its weighted sum, and what of it may be rounding


def probes(
    flat: FlatFunction, weights: dict[int, Any], step: float, limit: int, rng: np.random.Generator, epsilon: float
) -> Iterator[Probe]:
    """The outputs beside the values: at each entry, or at `limit` chosen ones and along a random direction."""
    values = [np.asarray(x) for x in flat.values]
    scales = {k: exact(w) for k, w in weights.items()}
    for j, value in enumerate(values):
        for where, direction in _directions(value, limit, rng):
            size = step * max(1.0, float(np.max(np.abs(exact(value)[direction != 0]))))
            ends = [(exact(value) + s * size * direction).astype(value.dtype) for s in (-1, 1)]
            low, high = (flat.outputs([*flat.values[:j], jnp.asarray(end), *flat.values[j + 1 :]]) for end in ends)
            changes: dict[int, tuple[float, float]] = {}
            for k, weight in scales.items():
                lower, upper = exact(low[k]), exact(high[k])
                moved = lower != upper
                rounding = 4 * epsilon * np.sum(np.abs(weight * upper), where=moved)
                changes[k] = float(np.sum(weight * (upper - lower)).real), float(rounding)
            yield Probe(j, where, exact(ends[1]) - exact(ends[0]), changes)


def _directions(value: np.ndarray, limit: int, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
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


def mismatch(found: Gradients, table: Sequence[Probe], names: Sequence[str], rtol: float, atol: float) -> str:
    """How gradients differ from the numerical ones, at the worst place; empty where they do not."""
    worst, message, wrong, count = 0.0, "", 0, 0
    for probe in table:
        if probe.argument not in found.by_argument:
            continue
        gradient, length = exact(found.by_argument[probe.argument]), float(np.linalg.norm(probe.step))
        analytical = float(np.sum(gradient * probe.step).real) / length
        numerical = sum(probe.changes[k][0] for k in found.outputs) / length
        tolerance = atol + rtol * abs(numerical) + sum(probe.changes[k][1] for k in found.outputs) / length
        error, count = abs(analytical - numerical), count + 1
        if error <= tolerance:
            continue
        wrong += 1
        ratio = error / tolerance if np.isfinite(error) and tolerance else np.inf
        if ratio > worst:
            worst = ratio
            message = (
                f"the gradient of {names[probe.argument]} {probe.where} is {analytical:.6g} by backward, but "
                f"{numerical:.6g} numerically (tolerance {tolerance:.1g}){found.label}"
            )
    return message and f"{message}; wrong at {wrong} of {count} places."


@dataclasses.dataclass(frozen=True)
class Settings:
    """How gradients are compared with numerical ones; None stands for what fits the dtype."""

    rtol: float | None
    atol: float | None
    step: float | None
    limit: int
    seed: int
    float64: bool


def compare_numerically(flat: FlatFunction, order: int, settings: Settings, all_variants: bool = True) -> str:
    """Raise MismatchError where a gradient differs from the numerical one; otherwise say what was compared."""
    if settings.float64:
        with jax.enable_x64(True):
            try:
                wide = flat.in_double_precision()
                epsilon = wide.epsilon(wide.outputs(wide.values))
                found = _measured(wide, order, settings, epsilon, all_variants) if epsilon < 1e-15 else None
            except Exception:  # a layer for other dtypes; whatever else is wrong with it shows again below
                found = None
        if found is not None:
            return _judged(found, settings)
    epsilon = flat.epsilon(flat.outputs(flat.values))
    return _judged(_measured(flat, order, settings, epsilon, all_variants), settings)


@dataclasses.dataclass(frozen=True)
class _Measured:
    names: list[str]
    table: list[Probe]
    gradients: list[Gradients]
    epsilon: float


def _measured(flat: FlatFunction, order: int, settings: Settings, epsilon: float, all_variants: bool) -> _Measured:
    rng = np.random.default_rng(settings.seed)
    carrying = flat.differentiable_outputs()
    if not carrying:
        raise ValueError(
            "none of the outputs carries a gradient: each is an integer, is marked as not differentiable, or does not "
            "depend on a differentiated argument."
        )
    weights = flat.random_cotangents(flat.outputs(flat.values), rng)
    weights = {k: weights[k] for k in carrying}
    for _ in range(1, order):
        flat = flat.grad_function(weights)
        weights = flat.random_cotangents(flat.outputs(flat.values), rng)
    variants = gradient_variants(flat, weights) if all_variants else [next(gradient_variants(flat, weights))]
    gradients = [dataclasses.replace(w, by_argument={j: exact(g) for j, g in w.by_argument.items()}) for w in variants]
    step = epsilon ** (1 / 3) if settings.step is None else settings.step
    table = list(probes(flat, weights, step, settings.limit, rng, epsilon))
    return _Measured(flat.names, table, gradients, epsilon)


def _judged(found: _Measured, settings: Settings) -> str:
    rtol = found.epsilon ** (1 / 3) if settings.rtol is None else settings.rtol
    atol = found.epsilon ** (1 / 2) if settings.atol is None else settings.atol
    for gradients in found.gradients:
        if message := gradients.leak or mismatch(gradients, found.table, found.names, rtol, atol):
            raise MismatchError(message)
    return f"as numerically, at {len(found.table)} places, relative tolerance {rtol:.0e}"
