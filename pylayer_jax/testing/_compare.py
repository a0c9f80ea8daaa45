"""Compares the arrays of a case with expected arrays, within a tolerance; every checker uses this comparison.

    compare(Case(" under jit", {"output 0": got}, {"output 0": expected}, "in eager mode", Tolerance()))
    # AssertionError: output 0 under jit at index (1, 2) is 0.3, but 0.2 in eager mode (tolerance 7e-05); wrong at ...

The default tolerances depend on the machine epsilon of the dtype, on the size of the expected array, and on the *noise*
of this array: how far rounding errors may move its entries. The noise does not follow from the size of an array, since
large terms may cancel; and a fixed tolerance would hide every error of a layer whose values are small. Therefore
`Subject.tolerance` measures the noise, with arguments that differ in their last digits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.types import is_key

Arrays = Mapping[str, Any]  # arrays by name, such as "output 0" or "the gradient of args[0]"


class MismatchError(AssertionError):
    """An error about arrays that differ. Only checkers raise this error; user code raises a plain AssertionError."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The allowed difference between arrays and expected arrays. None means a default that fits the dtype."""

    rtol: float | None = None
    atol: float | None = None
    epsilon: float = 0.0  # machine epsilon of the narrowest dtype in the computation
    noise: Arrays = dataclasses.field(default_factory=dict[str, Any])  # for each array, one number or one per entry

    def of(self, name: str, dtype: Any, expected: np.ndarray) -> np.ndarray:
        """Return the tolerance of each entry of the array that is called `name`."""
        epsilon = self.epsilon if jnp.issubdtype(dtype, jnp.inexact) else 0.0
        rtol = epsilon**0.5 if self.rtol is None else self.rtol
        atol = epsilon**0.5 * largest(expected) if self.atol is None else self.atol
        return atol + rtol * np.abs(expected) + self.noise.get(name, 0.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """Arrays that one way to run a function returns, and the arrays that are expected."""

    label: str  # the way to run the function, in words that follow "output 0": " under jit"
    got: Arrays
    expected: Arrays
    source: str  # the source of the expected arrays, in words that end a message: "in eager mode"
    tolerance: Tolerance


@np.errstate(all="ignore")
def compare(case: Case) -> None:
    """Compare the arrays of a case with the expected arrays.

    Raises:
        MismatchError: about the first array that differs. The message names the entry with the largest error beyond
            its tolerance.
    """
    for name, got in case.got.items():
        expected, label = case.expected[name], f"{name}{case.label}"
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise MismatchError(f"{label} is {type_of(got)}, but {type_of(expected)} {case.source}.")
        found, right = exact(got), exact(expected)
        allowed = case.tolerance.of(name, np.dtype(int) if is_key(got) else got.dtype, right)
        error = np.where(found == right, 0.0, np.abs(found - right))
        excess = np.where(np.isnan(found) & np.isnan(right), -np.inf, error - allowed)
        wrong = ~(excess <= 0)
        if np.any(wrong):
            worst = np.argmax(np.where(np.isnan(excess), np.inf, excess))
            index = tuple(map(int, np.unravel_index(worst, wrong.shape)))
            raise MismatchError(
                f"{label}{f' at index {index}' if index else ''} is {found[index]:.6g}, but {right[index]:.6g} "
                f"{case.source} (tolerance {allowed[index]:.1g}); wrong at {np.sum(wrong)} of "
                f"{np.sum(~np.isnan(right))} places.{_about_ratio(found, right)}"
            )
        # Under `shard_map` with check_vma=False, devices may hold different copies of a replicated array.
        is_spread = isinstance(got, jax.Array) and not is_key(got) and len(got.sharding.device_set) > 1
        for shard in got.addressable_shards if is_spread else ():
            if np.any(np.abs(exact(shard.data) - found[shard.index]) > 2 * allowed[shard.index]):
                raise MismatchError(f"{label} is another one on {shard.device}, where a copy should be.")


def _about_ratio(got: np.ndarray, expected: np.ndarray) -> str:
    """Return a sentence if all entries are wrong by the same factor, such as the number of devices; otherwise ''."""
    size = float(np.sum(np.abs(expected) ** 2))
    if not (size and np.isfinite(size) and np.all(np.isfinite(got))):
        return ""
    ratio = np.real(np.sum(got * np.conj(expected))) / size
    is_constant = np.max(np.abs(got - ratio * expected)) <= 1e-3 * np.max(np.abs(ratio * expected))
    return f" It is {ratio:.3g} times the right value everywhere." if is_constant else ""


def type_of(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def exact(x: Any) -> np.ndarray:
    """Return `x` as a NumPy array in double precision; PRNG keys are replaced by their key data."""
    if is_key(x):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def largest(x: Any) -> float:
    """Return the largest absolute value among the finite entries of `x`; 0 if there are none."""
    x = exact(x)
    return float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))


def first_line(error: BaseException) -> str:
    """Return the first line of an error message; or the last line, if the message is the traceback of a callback."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if lines[0].endswith("Traceback (most recent call last):") else lines[0]
