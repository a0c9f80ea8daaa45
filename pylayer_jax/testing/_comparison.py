"""Arrays against expected ones, and the errors of the checkers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.types import has_tangent, is_key

__tracebackhide__ = True  # pytest hides the frames of this module


class MismatchError(AssertionError):
    """Raised only by our comparisons: an AssertionError of the user's own code is not one."""


def error_of(name: str, order: int, mismatch: MismatchError) -> AssertionError:
    """The error that a checker raises: with the name of the checked function and the order of differentiation."""
    return AssertionError(f"{name}, {_ORDERS[order]}: {mismatch}")


_ORDERS = ("values", "first order", "second order", "third order")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Arrays against expected ones. By default the tolerances fit the dtype."""

    rtol: float | None = None
    atol: float | None = None
    epsilon: float = 0.0  # of the narrowest dtype through which the arrays may have gone
    right: str = "eager mode"  # the source of the expected arrays, as messages name it
    per_entry: bool = False  # whether a small entry beside large ones is compared by its own size

    def of_arrays(self, got: Any, expected: Any, name: str, noise: Any = 0.0) -> None:
        """Compare two arrays; `noise` is how far rounding may move the expected one, or each of its entries."""
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise MismatchError(f"{name} is {type_of(got)}, but {type_of(expected)} by {self.right}.")
        if is_key(got):
            got, expected = jax.random.key_data(got), jax.random.key_data(expected)
        a, b = exact(got), exact(expected)
        size = largest_entry(b)
        epsilon = max(float(jnp.finfo(got.dtype).eps), self.epsilon) if has_tangent(got) else 0.0
        rtol = epsilon**0.5 if self.rtol is None else self.rtol
        # Sums that cancel to zero leave rounding errors. They are small beside 1, unless the array itself is large.
        noise = np.minimum(noise, epsilon**0.5 * max(size, 1.0))
        atol = (2 * epsilon if self.per_entry else epsilon**0.5) * size + noise if self.atol is None else self.atol
        with np.errstate(invalid="ignore"):
            tolerance = atol + rtol * np.abs(b)
            excess = np.where(a == b, 0.0, np.abs(a - b) - tolerance)
        excess = np.where(np.isnan(a) & np.isnan(b), 0.0, np.where(np.isnan(excess), np.inf, excess))
        if np.all(excess <= 0):
            return
        index = tuple(int(i) for i in np.unravel_index(np.argmax(excess), excess.shape))
        raise MismatchError(
            f"{name} at index {index} is {a[index]:.6g}, but {b[index]:.6g} by {self.right} (tolerance "
            f"{tolerance[index]:.1g}); wrong at {np.sum(excess > 0)} of {excess.size} places."
        )

    def of_all(
        self, got: Sequence[Any], expected: Sequence[Any], names: Sequence[str], label: str, noise: Sequence[float]
    ) -> None:
        for a, b, name, noise_of_one in zip(got, expected, names, noise, strict=True):
            self.of_arrays(a, b, f"{name}{label}", noise_of_one)


def rounded_otherwise(values: Sequence[Any], seed: int = 0) -> list[Any]:
    """Values that differ by a few units in the last place, as other rounding errors might leave them."""
    rng = np.random.default_rng(seed)
    steps = [4 * float(jnp.finfo(x.dtype).eps) * rng.choice([-1.0, 1.0], x.shape) for x in values]
    return [x * jnp.asarray(1 + step, x.dtype) for x, step in zip(values, steps, strict=True)]


def rounding_noise(found: Sequence[Any], otherwise: Sequence[Any]) -> list[float]:
    """How far rounding may move each array, from the arrays that were found and those of `rounded_otherwise`.

    The size of an array does not tell this where large terms cancel, and a fixed number would hide every error of a
    layer with small units.
    """
    pairs = zip(found, otherwise, strict=True)
    return [4 * largest_entry(exact(a) - exact(b)) if has_tangent(a) else 0.0 for a, b in pairs]


def type_of(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def exact(x: Any) -> np.ndarray:
    """A NumPy array in double precision."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def largest_entry(x: Any) -> float:
    """The size of the largest finite entry."""
    x = exact(x)
    return float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
