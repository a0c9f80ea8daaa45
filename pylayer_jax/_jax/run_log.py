"""The runs of a forward rule, where one call of a `jax.custom_vjp` function is differentiated several times."""

from __future__ import annotations

import functools
import threading
from typing import Any, Generic, TypeVar

import numpy as np

_Run = TypeVar("_Run")


class RunLog(Generic[_Run]):
    """What each run of a forward rule left for the backward rule, of one call of a `custom_vjp` function.

    NOTE [several runs]
    A function that is staged once may be differentiated many times: for different arguments, by several threads, as a
    part of several programs. Each differentiation runs the forward rule, but JAX keeps one structure of the residuals
    for all of them. Therefore this structure holds nothing of a run. Each run adds an empty array to its residuals,
    whose shape is the number of the run.
    """

    __slots__ = ("_lock", "_runs")

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._lock = threading.Lock()

    def add(self, run: _Run) -> np.ndarray:
        """Enter a run. Returns the residual by which `find` finds it again."""
        with self._lock:
            self._runs.append(run)
            number = len(self._runs) - 1
        return _empty_array(number)

    def find(self, number: Any) -> _Run:
        return self._runs[number.shape[-1]]


@functools.cache
def _empty_array(number: int) -> np.ndarray:
    # One object for the same number, so that a program holds it once.
    return np.zeros((0, number), bool)


NO_RESIDUAL = _empty_array(0)  # fills a place among the residuals


def is_run_number(residual: Any) -> bool:
    """Whether a residual is the number of a run, or none: NOTE [several runs]; or many, from a loop or a batch."""
    return residual.dtype == bool and residual.size == 0
