"""Other values of the arguments, within the domain that the given ones show.

People try a layer at ones, at equal arguments, or at a symmetric matrix. There a product with a forgotten transpose, or
with the gradients of its factors swapped, has the right gradients. Each entry of each argument is therefore multiplied
by a random number of its own. Values that are positive, in [-1, 1], or sorted along the last axis remain so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.types import has_tangent

from ._comparison import MismatchError, exact, first_line
from ._flat_function import FlatFunction

__tracebackhide__ = True  # pytest hides the frames of this module

# From the boldest to the most careful: the factors, and whether entries change sign where both signs occur.
_WAYS = {
    "random sizes and signs": (0.5, 1.5, True),
    "random sizes": (0.5, 1.5, False),
    "larger sizes": (1.0, 1.5, False),
    "smaller sizes": (0.5, 1.0, False),
}
# The last ways keep what else the values have in common, as that a matrix is positive definite. Numbers without a
# meaning: a layer rarely has a kink at these multiples of the values that a user chose.
_SCALES = (0.7391, 1.1834)


class OtherValuesError(MismatchError):
    """A layer is right for the values given, and wrong for others."""


def compare_at_other_values(
    flat: FlatFunction, order: int, seed: int, compare: Callable[[FlatFunction], object]
) -> tuple[str, str]:
    """Run a comparison at the first other values where the function and its derivatives can be computed.

    Returns:
        How these values differ from the given ones, and why none could be used; one of the two is empty.

    Raises:
        MismatchError: by the comparison.
    """
    finite = _where_finite(flat, order, seed)
    refusal = ""
    for how, values in _ways(flat.values, np.random.default_rng((seed, 1))):
        point = flat.with_values(values)
        try:
            found = _where_finite(point, order, seed)
            if len(found) == len(finite) and all(map(jnp.array_equal, found, finite)):
                compare(point)
                return f"for other values ({how})", ""
            refusal = refusal or "it has results that are not finite"
        except MismatchError as error:
            raise OtherValuesError(f"for other values ({how}): {error}") from None
        except Exception as error:  # a layer may take only some values
            refusal = refusal or f"{type(error).__name__}: {first_line(error)}"
    return "", f"it takes no other values that were tried ({refusal})"


def sentence_of(done: str, too: Sequence[str], refusal: str) -> str:
    """What was compared, for which values and dtypes too, and why not for others."""
    too = list(filter(None, too))
    return "; ".join(filter(None, [done, f"{' and '.join(too)} too" if too else "", refusal]))


def _where_finite(flat: FlatFunction, order: int, seed: int) -> list[Any]:
    """Where the outputs and all derivatives up to an order are finite."""
    found, rng = flat.run(), np.random.default_rng(seed)
    finite = [jnp.isfinite(y) for y in found if has_tangent(y)]
    for _ in range(order):
        flat = flat.grad_function(flat.random_cotangents(found, rng))
        found = flat.run()
        finite += map(jnp.isfinite, found)
    return finite


def _ways(values: Sequence[Any], rng: np.random.Generator) -> Iterator[tuple[str, list[Any]]]:
    for how, (low, high, signs) in _WAYS.items():
        if not signs or any(_has_both_signs(exact(x)) for x in values):
            yield how, [jnp.asarray(_other(exact(x), low, high, signs, rng), x.dtype) for x in values]
    for scale in _SCALES:
        yield f"{scale} times the given ones", [x * jnp.asarray(scale, x.dtype) for x in values]


def _has_both_signs(x: np.ndarray) -> bool:
    return bool(np.iscomplexobj(x) or np.min(x, initial=0.0) < 0 < np.max(x, initial=0.0) or not np.any(x))


def _other(x: np.ndarray, low: float, high: float, signs: bool, rng: np.random.Generator) -> np.ndarray:
    size = np.abs(x)
    nonzero = size[np.isfinite(size) & (size > 0)]
    # A zero may be one of the values that hide an error, as those of a unit matrix do.
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
