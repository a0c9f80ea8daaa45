"""How error messages show values and counts, and where a user's exception happened."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax

from .hints import hint
from .partition import is_tensor


def describe(value: Any) -> str:
    """A value as an error message shows it: the type, and dtype and shape of a tensor."""
    if is_tensor(value):
        return f"{type(value).__name__} of dtype {value.dtype} and shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}" if len(repr(value)) < 60 else type(value).__name__


def plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def name_meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs from `name` by one letter: wrong, missing, too many, or two that changed places."""

    def is_near(other: str) -> bool:
        same = [x == y for x, y in zip(name, other, strict=False)]
        begin = [*same, False].index(False)
        a, b = name[begin:], other[begin:]
        return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])

    return next((other for other in known if other != name and is_near(other)), None)


def innermost(function: Any) -> Any:
    """The function inside of decorators, partials and methods, as far as they tell it."""
    for _ in range(100):  # a wrapper may name itself
        if hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif isinstance(function, types.FunctionType):
            break
        elif isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif not isinstance(function, type) and hasattr(type(function).__call__, "__code__"):  # an object
            function = type(function).__call__
        else:
            break
    return function


def source_of(name: str, function: Callable[..., Any]) -> str:
    """A name, and the place where a function is defined if that is known, as in `Tanh at layers.py:12`."""
    code = getattr(innermost(function), "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


class _Hint(str):
    """A note of an exception that is a hint."""


def add_note(error: Exception, layer: str, method: str, where: str = "") -> None:
    """Say in which method (of no layer: in which hook) a user's exception happened, and add the first hint there is."""
    note = f"This happened in {layer and layer + '.'}{method}{where}."
    if isinstance(error, jax.errors.UnexpectedTracerError):
        note += (
            " If it uses a traced value from elsewhere (a closure, a global, an object kept on ctx), pass that value "
            "as an argument of forward, or keep it with ctx.save_for_backward or as ctx.name = array."
        )
    notes = getattr(error, "__notes__", ())
    if note not in notes:
        error.add_note(note)
        if not any(isinstance(other, _Hint) for other in notes) and (advice := hint(error, layer, method)):
            error.add_note(_Hint(advice))
