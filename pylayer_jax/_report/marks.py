"""Marks on the arrays that layers keep for backward, set while a function is traced."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax

from pylayer_jax._autodiff.call import LayerCall
from pylayer_jax._autodiff.saved_state import SavedState
from pylayer_jax._jax import checkpoint_name, is_tracer, typeof

_MARK = "pylayer_jax saved_tensors_report "
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_COMMANDS = os.path.join(_PACKAGE, "_commands") + os.sep  # holds layers, as the code of a user does
# Frames of these files may stand between a user's line and `apply`, as in jax.checkpoint(Layer.apply).
_LIBRARIES = (_PACKAGE + os.sep, os.path.dirname(jax.__file__) + os.sep)


@dataclasses.dataclass
class MarkedArray:
    """One array that an application of a layer keeps, and the tensor that was packed to it."""

    application: int
    layer: str
    name: str
    tensor_type: Any
    array_type: Any  # equals the type of the tensor if nothing was packed
    source: str
    is_left_out: bool  # whether the predicate of the hooks is False for it


class ResidualTracker:
    """Marks the arrays that layers keep; each array is later found by its mark among the residuals of the function."""

    def __init__(self) -> None:
        self.marked: list[MarkedArray] = []  # in the order of the numbers in the marks
        self._calls: list[LayerCall] = []

    def call_site(self) -> str:
        """File and line of the user's call of `apply`, as in `model.py:12`."""
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_library(frame.f_code.co_filename):
            frame = frame.f_back
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"

    def mark(
        self,
        call: LayerCall,
        saved: SavedState,
        tensors: Sequence[Any],
        arrays: Sequence[Any],
        owners: Sequence[int],
    ) -> list[Any]:
        """Return the arrays with their marks.

        Args:
            call: the call of the layer.
            saved: the names of `tensors`.
            tensors: the residuals before packing.
            arrays: the residuals after packing.
            owners: for each array that packing returned, the index of its tensor. These arrays come first; the others
                are the tensors that are never packed.
        """
        names = saved.residual_names(len(tensors), lambda i: _name_of_saved(call, i))
        owners = [*owners, *range(saved.packable, len(tensors))]
        number = self._number(call)
        marked: list[Any] = []
        for array, i in zip(arrays, owners, strict=True):
            if array is tensors[i] and owners.count(i) > 1:
                # The tensor stands beside the arrays that it was packed to only for its tangent: NOTE [packed tensors].
                marked.append(array)
                continue
            mark = f"{_MARK}{len(self.marked)}"
            self.marked.append(
                MarkedArray(
                    number,
                    call.layer.__name__,
                    names[i],
                    typeof(tensors[i]),
                    typeof(array),
                    call.call_site,
                    array is tensors[i] and call.hooks is not None and call.hooks.pair.only is not None,
                )
            )
            marked.append(checkpoint_name(array, mark) if is_tracer(array) else array)
        return marked

    def _number(self, call: LayerCall) -> int:
        # JAX may run the forward rule of one call more than once, as for each branch of a cond.
        if not any(c is call for c in self._calls):
            self._calls.append(call)
        return next(n for n, c in enumerate(self._calls) if c is call)


def _name_of_saved(call: LayerCall, i: int) -> str:
    given = call.layer.saved_names
    name = given[i] if isinstance(given, tuple) and given else None
    return f"saved[{i}]" if name is None else name


def number_of(name: str) -> int | None:
    """The index in `ResidualTracker.marked` if the name of an array is a mark; None for any other name."""
    return int(name.removeprefix(_MARK)) if name.startswith(_MARK) else None


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) and not file.startswith(_COMMANDS)
