"""Gradients against numerical ones: in float64 for precision, and in the dtypes of the arguments.

For complex arguments the gradient is that of `jax.grad`: `dL/d(re) - i dL/d(im)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._central_differences import Probe, Settings, measure
from ._comparison import Comparison, MismatchError, exact, largest_entry, rounded_otherwise, rounding_noise
from ._flat_function import FlatFunction, in_double_precision
from ._other_values import compare_at_other_values, sentence_of
from ._runs import Run, at_once

__tracebackhide__ = True  # pytest hides the frames of this module

_Runs = Callable[[FlatFunction, dict[int, Any]], Iterator[Run]]
_ENTRIES_OF_OTHER_VALUES = 1  # and a random direction over all entries


def compare_numerically(flat: FlatFunction, order: int, settings: Settings, runs: _Runs) -> str:
    """Compare gradients with numerical ones, also for other values, and return a sentence about the comparison.

    `runs` are the ways in which the gradients are computed for the values given.

    Raises:
        MismatchError: if a gradient differs from the numerical one.
    """
    sentence, dtypes = _compare_at(flat, order, settings, runs, near_kinks=False)
    less = dataclasses.replace(settings, limit=min(settings.limit, _ENTRIES_OF_OTHER_VALUES))
    too, refusal = compare_at_other_values(
        flat, order, settings.seed, lambda other: _compare_at(other, order, less, at_once, near_kinks=True)
    )
    return sentence_of(sentence, [dtypes, too], refusal)


def _compare_at(flat: FlatFunction, order: int, settings: Settings, runs: _Runs, near_kinks: bool) -> tuple[str, str]:
    """Compare for one set of values; with `near_kinks`, these may be near a kink.

    Returns:
        A sentence about the comparison, and in which other dtypes the gradients were compared.
    """
    flat, weights, scales = _derivative(flat, order, settings.seed)
    found = _judges_in_float64(flat, weights, scales, settings, near_kinks) if settings.float64 else None
    first = judge = None
    if found is not None:
        first, gradients, judge = found
        first.compare(gradients)
    judge = judge or _judge(flat, weights, scales, settings, near_kinks)
    for run in runs(flat, weights):
        judge.compare(run)
    first = first or judge
    places = f"{len(first.probes)} places, relative tolerance {first.rtol:.0e}"
    return f"as numerically, at {places}", judge.where


def _derivative(flat: FlatFunction, order: int, seed: int) -> tuple[FlatFunction, dict[int, Any], _Scales]:
    """The function of which the gradients are compared, with random cotangents."""
    differentiable = flat.differentiable_outputs()
    if not differentiable:
        raise ValueError(
            "none of the outputs carries a gradient: each is an integer, is marked as not differentiable, or does not "
            "depend on a differentiated argument."
        )
    rng = np.random.default_rng(seed)
    outputs = flat.run()
    weights = flat.random_cotangents(outputs, rng)
    weights = {k: weights[k] for k in differentiable}
    scales = _scales(flat, weights, outputs, [0.0] * len(outputs))
    for _ in range(1, order):
        flat = flat.grad_function(weights)
        outputs = flat.run()
        weights = flat.random_cotangents(outputs, rng)
        scales = _scales(flat, weights, outputs, scales.gradients)
    return flat, weights, scales


class _Scales(NamedTuple):
    """How large the numbers are of which results are computed; the results may be smaller, if the numbers cancel."""

    outputs: list[float]
    gradients: list[float]  # per argument: the largest weighted output over the largest entry


def _scales(flat: FlatFunction, weights: dict[int, Any], outputs: list[Any], sizes: list[float]) -> _Scales:
    largest = max(largest_entry(w) * max(largest_entry(outputs[k]), sizes[k]) for k, w in weights.items())
    return _Scales(sizes, [largest / (largest_entry(x) or 1.0) for x in flat.values])


@dataclasses.dataclass(frozen=True)
class _Judge:
    """Compares gradients with numerical ones."""

    names: list[str]
    probes: list[Probe]
    scales: _Scales
    settings: Settings
    rtol: float
    epsilon: float  # of the gradients that are compared
    noise: tuple[float, ...] = ()  # per argument: how far rounding may move its gradient, as `rounding_noise` finds
    where: str = ""  # the dtypes of the gradients, if the numerical ones are of others

    def compare(self, run: Run) -> None:
        """Raise a MismatchError about the probe with the largest error, if there are errors."""
        outputs = run.cotangents
        absolute = {j: self._absolute_tolerance(j, outputs) for j in run.gradients}
        gradients = {j: exact(gradient) for j, gradient in run.gradients.items()}
        worst, message, wrong, count = 0.0, "", 0, 0
        for probe in self.probes:
            j = probe.argument
            if j not in gradients:
                continue
            terms = np.real(gradients[j] * probe.step) / probe.length
            analytical, numerical = float(np.sum(terms)), probe.derivative(outputs)
            tolerance = absolute[j] + self.rtol * max(abs(numerical), _spread(terms)) + probe.error(outputs)
            error, count = abs(analytical - numerical), count + 1
            if error <= tolerance:
                continue
            wrong += 1
            ratio = error / tolerance if np.isfinite(error) and tolerance else np.inf
            if ratio > worst:
                worst = ratio
                message = (
                    f"the gradient of {self.names[j]} {probe.where} is {analytical:.6g} by backward"
                    f"{self.where and f' {self.where}'}, but {numerical:.6g} numerically (tolerance {tolerance:.1g})"
                    f"{run.label}"
                )
        if message:
            raise MismatchError(f"{message}; wrong at {wrong} of {count} places.")

    def _absolute_tolerance(self, argument: int, outputs: Collection[int]) -> float:
        if self.settings.atol is not None:
            return self.settings.atol
        # A gradient that cancels to zero is as large as rounding errors are beside the outputs.
        found = [abs(p.derivative(outputs)) for p in self.probes if p.argument == argument]
        size, slope = max(filter(np.isfinite, found), default=0.0), self.scales.gradients[argument]
        noise = self.noise[argument] if self.noise else 0.0
        return self.epsilon ** (1 / 2) * size + self.epsilon ** (3 / 4) * slope + noise


def _spread(terms: np.ndarray) -> float:
    """The size of a sum of terms with errors of their own, if there are several; they may cancel."""
    size = float(np.linalg.norm(terms)) if np.count_nonzero(terms) > 1 else 0.0
    return size if np.isfinite(size) else 0.0


def _judge(
    flat: FlatFunction, weights: dict[int, Any], scales: _Scales, settings: Settings, near_kinks: bool
) -> _Judge:
    probes = list(measure(flat, weights, scales.outputs, settings, near_kinks))
    epsilon = flat.epsilon(flat.run())
    rtol = epsilon ** (1 / 3) if settings.rtol is None else settings.rtol
    return _Judge(flat.names, probes, scales, settings, rtol, epsilon)


# -- float64 --------------------------------------------------------------------------------------


def _judges_in_float64(
    own: FlatFunction, weights: dict[int, Any], scales: _Scales, settings: Settings, near_kinks: bool
) -> tuple[_Judge, Run, _Judge | None] | None:
    """A judge in float64 with the gradients there, and one of the gradients in the dtypes of the arguments.

    The second is None if the function is another one in these dtypes, as one is that draws random numbers.

    Returns:
        None if the function refuses float64, or has another error, which the caller meets again.
    """
    with jax.enable_x64(True):
        try:
            wide, weights = own.in_double_precision(), {k: in_double_precision(w) for k, w in weights.items()}
            outputs = wide.run()
            if wide.epsilon(outputs) > 1e-15:
                return None
            gradients = next(at_once(wide, weights))
            judge = _judge(wide, weights, scales, settings, near_kinks)
            rounded = own.with_values(rounded_otherwise(own.values)).in_double_precision()
            noise = rounding_noise(list(gradients.gradients.values()), rounded.grads(weights))
            noise_of_outputs = rounding_noise(outputs, rounded.run())
        except Exception:
            return None
    found = own.run()
    epsilon = own.epsilon(found)
    try:
        for i, (a, b) in enumerate(zip(found, outputs, strict=True)):
            Comparison().of_arrays(a, jnp.asarray(np.asarray(b), a.dtype), f"output {i}", noise_of_outputs[i])
    except MismatchError:
        return judge, gradients, None
    dtypes = ", ".join(dict.fromkeys(str(x.dtype) for x in own.values if float(jnp.finfo(x.dtype).eps) > 1e-15))
    rtol = max(epsilon ** (1 / 2), judge.rtol) if settings.rtol is None else settings.rtol
    where = dtypes and f"in {dtypes}"
    return judge, gradients, dataclasses.replace(judge, rtol=rtol, epsilon=epsilon, noise=tuple(noise), where=where)
