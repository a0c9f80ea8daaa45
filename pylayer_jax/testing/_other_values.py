"""Other values of the arguments, within the domain that the given values suggest.

People try a layer at ones, at equal arguments, or at a symmetric matrix. At such values, a product with a forgotten
transpose, or with the gradients of its factors swapped, has the right gradients. Each entry of each argument is
therefore multiplied by a random number of its own. Values that are positive, in [-1, 1], or sorted along the last axis
remain so:

    [0.2, -0.9]  ->  [-0.16, 0.74]      random sizes and signs
    [1.0, 2.0, 5.0]  ->  [0.7, 2.9, 5.5]      random sizes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ._compare import exact
from ._tensor_function import placed, scaled

__tracebackhide__ = True  # pytest hides the frames of this module

# From the boldest to the most careful: the range of the factors, and whether entries may change sign.
_WAYS = {
    "random sizes and signs": (0.5, 1.5, True),
    "random sizes": (0.5, 1.5, False),
    "larger sizes": (1.0, 1.5, False),
    "smaller sizes": (0.5, 1.0, False),
}
# The last ways multiply all values by one number, which keeps other properties: a matrix stays positive definite. A
# layer rarely has a kink at these multiples of the values that a user chose.
_SCALES = (0.7391, 1.1834)


def ways(values: Sequence[Any], rng: np.random.Generator) -> Iterator[tuple[str, list[Any]]]:
    """Yield other values, each with a word about how they differ from the given ones."""
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
    # Zeros are replaced, since they may hide an error, as those of a unit matrix do.
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
