"""Arrays against expected ones, and the errors of the checkers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax import has_tangent, is_key


class MismatchError(AssertionError):
    """The layer is wrong; any other AssertionError comes from the code of the user."""


@contextlib.contextmanager
def mismatch_of(name: str, order: int) -> Generator[None, None, None]:
    """Add the name of the checked function and the order of differentiation to the message of a mismatch."""
    try:
        yield
    except MismatchError as error:
        raise AssertionError(f"{name}, {_ORDERS[order]}: {error}") from error


_ORDERS = ("values", "first order", "second order", "third order")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Arrays against expected ones. By default the tolerances fit the dtype."""

    rtol: float | None = None
    atol: float | None = None
    right: str = "eager mode"  # the source of the expected arrays, as messages name it

    def of_arrays(self, got: Any, expected: Any, name: str) -> None:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise MismatchError(f"{name} is {type_of(got)}, but {type_of(expected)} by {self.right}.")
        if is_key(got):
            got, expected = jax.random.key_data(got), jax.random.key_data(expected)
        a, b = exact(got), exact(expected)
        size = float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b)))
        epsilon = float(jnp.finfo(got.dtype).eps) if has_tangent(got) else 0.0
        rtol = epsilon**0.5 if self.rtol is None else self.rtol
        # Sums that cancel to zero leave rounding errors.
        atol = epsilon**0.5 * size + 16 * epsilon if self.atol is None else self.atol
        with np.errstate(invalid="ignore"):
            excess = np.where(a == b, 0.0, np.abs(a - b) - (atol + rtol * np.abs(b)))
        excess = np.where(np.isnan(a) & np.isnan(b), 0.0, np.where(np.isnan(excess), np.inf, excess))
        if np.all(excess <= 0):
            return
        index = tuple(int(i) for i in np.unravel_index(np.argmax(excess), excess.shape))
        raise MismatchError(
            f"{name} at index {index} is {a[index]:.6g}, but {b[index]:.6g} by {self.right} (tolerance "
            f"{atol + rtol * abs(b[index]):.1g}); wrong at {np.sum(excess > 0)} of {excess.size} places."
        )

    def of_all(self, got: Sequence[Any], expected: Sequence[Any], names: Sequence[str], label: str) -> None:
        for a, b, name in zip(got, expected, names, strict=True):
            self.of_arrays(a, b, f"{name} {label}")


def type_of(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def exact(x: Any) -> np.ndarray:
    """A NumPy array in double precision."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
