"""Formats values, counts and source locations for messages; lists the variables that a function closes over."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import jax

from ._hints import hint
from ._trees import is_tensor


def describe(value: Any) -> str:
    """Return the text that shows a value in a message: the type, and the dtype and shape of a tensor."""
    if is_tensor(value):
        return f"{type(value).__name__} of dtype {value.dtype} and shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}" if len(repr(value)) < 60 else type(value).__name__


def plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def innermost(function: Any) -> Any:
    """Return the function inside decorators, `functools.partial` objects and bound methods."""
    for _ in range(100):  # a limit, since a function may be its own `__wrapped__`
        if hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        else:
            break
    return function


def closed_over(function: Any) -> dict[str, Any]:
    """Return the names and values of the variables that `innermost(function)` closes over."""
    function = innermost(function)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    values: dict[str, Any] = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell has no `cell_contents`
            values[name] = cell.cell_contents
    return values


def source_of(name: str, function: Callable[..., Any]) -> str:
    """Return `name` with the file and line where `function` is defined, as in `Tanh at layers.py:12`."""
    code = getattr(innermost(function), "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def add_note(error: Exception, layer: str, method: str, where: str = "") -> None:
    """Add a note to an error: which method of a layer (or which hook, if `layer` is empty) raised the error."""
    note = f"This happened in {layer and layer + '.'}{method}{where}."
    if isinstance(error, jax.errors.UnexpectedTracerError):
        note += (
            " If it uses a traced value from elsewhere (a closure, a global, an object kept on ctx), pass that value "
            "as an argument of forward, or keep it with ctx.save_for_backward or as ctx.name = array."
        )
    notes = getattr(error, "__notes__", ())
    if note in notes:
        return
    error.add_note(note)
    if not any(other.startswith("This happened in") for other in notes) and (advice := hint(error, layer, method)):
        error.add_note(advice)
