"""Marks on the arrays that layers keep for backward, set while a function is traced."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from pylayer_jax._jax.names import is_tracer, typeof
from pylayer_jax._methods.outputs import Kept, Recording

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


class ResidualTracker:
    """Marks the arrays that layers keep; each array is later found by its mark among the residuals of the function."""

    def __init__(self) -> None:
        self.marked: list[MarkedArray] = []  # in the order of the numbers in the marks
        self._applications: list[Any] = []

    def call_site(self) -> str:
        """File and line of the user's call of `apply`, as in `model.py:12`."""
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_library(frame.f_code.co_filename):
            frame = frame.f_back
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"

    def mark(
        self,
        application: Any,
        recording: Recording,
        tensors: Sequence[Any],
        arrays: Sequence[Any],
        owners: Sequence[int],
    ) -> list[Any]:
        """Return the arrays with their marks.

        Args:
            application: the call of the layer.
            recording: the names of `tensors`.
            tensors: the residuals before packing.
            arrays: the residuals after packing.
            owners: for each array that packing returned, the index of its tensor. These arrays come first; the others
                are the tensors that are never packed.
        """
        names = saved_names(recording, len(tensors))
        owners = [*owners, *range(recording.saved_residuals, len(tensors))]
        number = self._number(application)
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
                    application.layer.__name__,
                    names[i],
                    typeof(tensors[i]),
                    typeof(array),
                    application.source,
                )
            )
            marked.append(checkpoint_name(array, mark) if is_tracer(array) else array)
        return marked

    def _number(self, application: Any) -> int:
        # JAX may run the forward rule of one application more than once, as for each branch of a cond.
        if not any(a is application for a in self._applications):
            self._applications.append(application)
        return next(n for n, a in enumerate(self._applications) if a is application)


def number_of(name: str) -> int | None:
    """The index in `ResidualTracker.marked` if the name of an array is a mark; None for any other name."""
    return int(name.removeprefix(_MARK)) if name.startswith(_MARK) else None


def saved_names(recording: Recording, count: int) -> list[str]:
    """The name of each of `count` residuals: `saved[0]['w']` if `save_for_backward` saved it, `ctx.scale`."""
    names = [""] * count
    saved = {"saved": recording.saved, "saved_for_forward": recording.saved_for_jvp}
    attributes = {f"ctx.{name}": value for name, value in recording.attributes.items()}
    for start, tree in (saved | attributes).items():
        if isinstance(tree, Kept):
            for path, i in zip(tree.skeleton.tensor_paths(), tree.residuals, strict=True):
                names[i] = names[i] or start + path
    return names


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) and not file.startswith(_COMMANDS)
