"""Checks gradients against a reference or numerical derivatives, for the values of the user and for random values.

Numerical derivatives are central differences `(f(x + h) - f(x - h)) / 2h`. The step `h` is the cube root of the machine
epsilon, for which rounding and truncation errors have similar sizes (Press et al., Numerical Recipes, 5.7). `f` is the
sum of the outputs with random weights, so that errors at two outputs do not cancel. Gradients in float64 are compared
with central differences, and gradients in the dtypes of the arguments are compared with the gradients in float64:

    backward in float32  =  backward in float64  =  central differences in float64

For complex arguments the gradient is that of `jax.grad`: `dL/d(re) - i dL/d(im)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._errors import HostBackwardError
from pylayer_jax._jax.types import has_tangent
from pylayer_jax._messages import plural

from ._compare import Arrays, Case, MismatchError, compare, exact, first_line, largest
from ._subject import Cases, Subject, named_outputs, on_one_device
from ._tensor_function import in_double_precision, placed, random_like, scaled

__tracebackhide__ = True  # pytest hides the frames of this module

_WIDE = 1e-15  # larger than the machine epsilon of float64


def gradients(subject: Subject) -> Cases:
    return (yield from _also_for_other_values(subject, _beside_reference if subject.reference else _beside_numbers))


def second_order(subject: Subject) -> Cases:
    try:
        return (yield from gradients(subject.derivative))
    except HostBackwardError as error:
        return f"there is none: {first_line(error).split('. ')[0]}"


def outputs(subject: Subject) -> Cases:
    return (yield from _also_for_other_values(subject, _outputs_beside_reference))


def _also_for_other_values(subject: Subject, beside: Callable[[Subject], Cases]) -> Cases:
    """Yield the cases at the values of the user, and at the first random values where all derivatives are computed."""
    sentence = yield from beside(subject)
    derivatives = beside is not _outputs_beside_reference
    finite, refusal = _where_finite(subject, derivatives), ""
    options = dataclasses.replace(subject.options, limit=1)  # check one entry, and one random direction
    for how, values in _ways(subject.root.function.values, subject.random(0)):
        try:
            other = subject.at(values, options)
            found = _where_finite(other, derivatives)
            if len(found) != len(finite) or not all(map(np.array_equal, found, finite)):
                refusal = refusal or "it has results that are not finite"
                continue
            cases = list(beside(other))
        except Exception as error:  # a layer may raise an error for some values
            refusal = refusal or f"{type(error).__name__}: {first_line(error)}"
            continue
        for case in cases:
            yield dataclasses.replace(case, label=f"{case.label} for other values ({how})")
        return f"{sentence}, and for other values ({how})"
    return f"{sentence}; it takes no other values that were tried ({refusal})"


def _where_finite(subject: Subject, derivatives: bool) -> list[np.ndarray]:
    arrays = [*subject.root.outputs, *subject.outputs, *(subject.grads if derivatives else ())]
    return [np.isfinite(exact(x)) for x in arrays if has_tangent(x)]


# -- other values ---------------------------------------------------------------------------------

# Users often check a layer at ones, at equal arguments, or at a symmetric matrix. At such values, the gradients of a
# product are right even if backward forgets a transpose or swaps two gradients. The checks therefore multiply each
# entry by a different random number: [0.2, -0.9] may become [-0.16, 0.74]. Positive values remain positive, values in
# [-1, 1] remain in [-1, 1], and values that are sorted along the last axis remain sorted.

# How values change: the range of the random factors, and whether signs may change. The largest changes come first.
_WAYS = {
    "random sizes and signs": (0.5, 1.5, True),
    "random sizes": (0.5, 1.5, False),
    "larger sizes": (1.0, 1.5, False),
    "smaller sizes": (0.5, 1.0, False),
}
# If all ways above fail, all values are multiplied by one number: a positive definite matrix stays positive definite.
# The numbers are not round, because layers rarely have a kink at such multiples of the values of the user.
_SCALES = (0.7391, 1.1834)


def _ways(values: Sequence[Any], rng: np.random.Generator) -> Iterator[tuple[str, list[Any]]]:
    """Yield pairs of a description and a list of other values, such as ("larger sizes", [...])."""
    for how, (low, high, signs) in _WAYS.items():
        if not signs or any(_has_both_signs(exact(x)) for x in values):
            yield how, [placed(x, _other(exact(x), low, high, signs, rng)) for x in values]
    for scale in _SCALES:
        yield f"{scale} times the given ones", [scaled(scale, x) for x in values]


def _has_both_signs(x: np.ndarray) -> bool:
    return bool(np.iscomplexobj(x) or np.min(x, initial=0.0) < 0 < np.max(x, initial=0.0) or not np.any(x))


def _other(x: np.ndarray, low: float, high: float, signs: bool, rng: np.random.Generator) -> np.ndarray:
    size = np.abs(x)
    nonzero = size[np.isfinite(size) & (size > 0)]
    # Zeros are replaced, because zeros such as those of a unit matrix may hide a wrong gradient.
    size = np.where(size == 0, np.median(nonzero) if nonzero.size else 1.0, size) * rng.uniform(low, high, x.shape)
    if np.max(nonzero, initial=0.0) <= 1 and low < 1 < high:
        size = np.where(size > 1, 1 / size, size)
    if np.iscomplexobj(x):
        angle = rng.uniform(0, 2 * np.pi, x.shape) if signs else np.angle(x)
        other = size * np.exp(1j * angle)
    else:
        sign = -1.0 if np.max(x, initial=0.0) <= 0 > np.min(x, initial=0.0) else 1.0
        if _has_both_signs(x):
            sign = rng.choice([-1.0, 1.0], x.shape) if signs else np.where(x < 0, -1.0, 1.0)
        other = _sorted_as(x, sign * size)
    return np.where(np.isfinite(x), other, x)


def _sorted_as(x: np.ndarray, other: np.ndarray) -> np.ndarray:
    for direction in (1, -1):
        if x.ndim and x.shape[-1] > 1 and np.all(np.diff(direction * x) > 0):
            return direction * np.sort(direction * other)
    return other


# -- cases with a reference -----------------------------------------------------------------------


def _beside_reference(subject: Subject) -> Cases:
    if subject.base is None:
        yield from _outputs_beside_reference(subject)
    assert subject.reference is not None
    expected = subject.reference.gradients(on_one_device(subject.cotangents))
    yield subject.case("", subject.gradients, expected, "by the reference")
    return "match those of the reference"


def _outputs_beside_reference(subject: Subject) -> Cases:
    """Compare the tensors and the statics (objects that are not tensors) that the function and the reference return."""
    assert subject.reference is not None
    (got, statics), (expected, right) = subject.function.run_with_statics(), subject.reference.run_with_statics()
    if len(got) != len(expected):
        returned = plural(len(got), "tensor is", "tensors are")
        raise MismatchError(f"{returned} returned, but {len(expected)} by the reference.")
    if right and not (len(statics) == len(right) and all(map(_is_same_static, statics, right))):
        raise MismatchError(f"the statics {statics!r} are returned, but {right!r} by the reference.")
    yield subject.case("", named_outputs(got), named_outputs(expected), "by the reference")
    return "match those of the reference"


def _is_same_static(a: Any, b: Any) -> bool:
    # Only Python literals are compared, as other objects may differ between runs. `repr` is equal for two NaNs.
    is_literal = isinstance(a, (str, bytes, int, float, complex, type(None)))
    return type(a) is type(b) and (not is_literal or repr(a) == repr(b))


# -- cases with numerical derivatives -------------------------------------------------------------


def _beside_numbers(subject: Subject) -> Cases:
    places = sum(min(x.size, subject.options.limit) for x in subject.grads)
    found = _in_float64(subject) if subject.options.float64 else None
    sentence = f"match finite differences at {places} entries"
    if found is None:
        yield from _numerical_cases(subject)
        return sentence
    wide, cases = found
    yield from cases
    try:
        outputs = named_outputs(subject.outputs)
        compare(subject.case("", outputs, _cast(named_outputs(wide.outputs), outputs)))
    except MismatchError:  # the function computes other outputs in float64, as a function with random numbers does
        yield from _numerical_cases(subject)
        return sentence
    dtypes = dict.fromkeys(str(x.dtype) for x in subject.function.values if jnp.finfo(x.dtype).eps > _WIDE)
    if not dtypes:
        return sentence
    label = f" in {', '.join(dtypes)}"
    yield subject.case(label, subject.gradients, _cast(wide.gradients, subject.gradients), "in float64")
    return f"{sentence},{label} too"


def _in_float64(subject: Subject) -> tuple[Subject, list[Case]] | None:
    """Return the subject with values in float64 and complex128, and the cases of this subject.

    Return None if the function returns a narrower dtype, or raises an error. Other errors occur again in the caller.
    """
    cotangents, _ = subject.cotangents, subject.terms  # read here, so that both are computed outside of enable_x64
    with jax.enable_x64(True):
        try:
            values = [in_double_precision(x) for x in subject.function.values]
            wide = Subject(subject.function.with_values(values), None, subject.options, subject.base)
            wide.cotangents = {k: in_double_precision(w) for k, w in cotangents.items()}
            return (wide, list(_numerical_cases(wide))) if wide.epsilon < _WIDE else None
        except Exception:
            return None


def _cast(arrays: Arrays, like: Arrays) -> dict[str, Any]:
    return {name: np.asarray(x).astype(like[name].dtype) if has_tangent(x) else x for name, x in arrays.items()}


def _numerical_cases(subject: Subject) -> Iterator[Case]:
    """Yield cases with the gradients, and central differences of the weighted sum of the outputs as expected arrays."""
    function, epsilon, terms, options = subject.function, subject.epsilon, subject.terms_of_outputs, subject.options
    values, middle = list(map(exact, function.values)), list(map(exact, subject.outputs))
    relative_step = epsilon ** (1 / 3) if options.step is None else options.step

    def from_a_step(j: int, half_step: np.ndarray) -> tuple[float, float, np.ndarray]:
        ends = [placed(function.values[j], values[j] + sign * half_step) for sign in (-1, 1)]
        low, high = (function.only(j).outputs([end]) for end in ends)
        step, change, error = exact(ends[1]) - exact(ends[0]), 0.0, 0.0
        for k, w in subject.cotangents.items():
            weight, lower, upper = exact(w), exact(low[k]), exact(high[k])
            change += float(np.sum(weight * (upper - lower)).real)
            rounding = 4 * epsilon * np.abs(weight) * np.maximum(np.abs(upper), terms[k])
            # If no entry changes, because rounding removed the change, the error is that of one entry.
            error += float(max(np.sum(rounding, where=lower != upper), np.max(rounding, initial=0.0)))
            # At a kink, the slopes on both sides of the middle differ. The error includes half of this difference.
            error += abs(float(np.sum(weight * (upper - 2 * middle[k] + lower)).real))
        length = float(np.linalg.norm(step))
        return change / length, error / length, step / length

    def along(j: int, direction: np.ndarray) -> tuple[float, float, np.ndarray]:
        value, moved, whole = values[j], direction != 0, largest(values[j])
        half_steps = [max(1.0, largest(value[moved])) * direction]
        if options.step is None and whole:
            # The function may change on a scale of 1, of the largest entry, or of each entry: try all three.
            own = np.where(np.isfinite(value) & (value != 0), np.abs(value), whole)
            half_steps += [whole * direction] if whole < 0.1 else []
            half_steps += [own * direction] if np.min(own, where=moved, initial=whole) < min(0.1, whole) else []
        return min((from_a_step(j, relative_step * half_step) for half_step in half_steps), key=_relative_error)

    return directional_cases(subject, along, options.limit, "numerically", epsilon ** (1 / 3))


def _relative_error(found: tuple[float, float, np.ndarray]) -> tuple[float, float]:
    """Return a sort key: the error of a derivative relative to the derivative, at most 1, and then the error itself."""
    derivative, error, _ = found
    if not np.isfinite(error):
        return np.inf, np.inf
    return error / max(abs(derivative), error) if error else 0.0, error


# Maps the position of an array and a direction to the derivative, its largest error, and the direction after rounding.
Derivative = Callable[[int, np.ndarray], tuple[float, float, np.ndarray]]


def directional_cases(
    subject: Subject, derivative: Derivative, limit: int, source: str, rtol: float | None = None
) -> Iterator[Case]:
    """Yield cases with the gradient of each array at up to `limit` entries; for larger arrays, also a random direction.

    `rtol` is the default of the relative tolerance; None means the square root of the machine epsilon.
    """
    rng = subject.random(9)
    default = subject.epsilon**0.5 if rtol is None else rtol
    relative = default if subject.options.rtol is None else subject.options.rtol

    def case(name: str, got: Any, expected: Any, noise: Any) -> Case:
        tolerance = dataclasses.replace(subject.tolerance, rtol=relative, noise={name: noise})
        return Case("", {name: np.asarray(got)}, {name: np.asarray(expected)}, source, tolerance)

    for j, (name, gradient) in enumerate(subject.gradients.items()):
        right, noise = exact(gradient), subject.tolerance.noise.get(name, 0.0)
        # Entries that are not checked are NaN in both arrays.
        got, expected = np.full_like(right, np.nan), np.full_like(right, np.nan)
        errors = np.full(right.shape, noise)
        for entry in range(right.size) if right.size <= limit else rng.choice(right.size, limit, replace=False):
            index = np.unravel_index(entry, right.shape)
            got[index], expected[index] = right[index], 0
            for unit in (1, 1j) if np.iscomplexobj(right) else (1,):
                direction = np.zeros_like(right)
                direction[index] = unit
                found, error, _ = derivative(j, direction)
                expected[index] += found * np.conj(unit)
                errors[index] += error
        yield case(name, got, expected, errors)
        if right.size > limit:
            direction = exact(random_like(gradient, rng))
            found, error, taken = derivative(j, direction / np.linalg.norm(direction))
            terms = np.real(right * taken)
            # The terms of the sum may cancel, but the errors of the terms do not cancel.
            error += relative * float(np.linalg.norm(terms[np.isfinite(terms)])) + noise * right.size**0.5
            yield case(f"{name} along a random direction over all {right.size} entries", np.sum(terms), found, error)
