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
    """Return the names and values of the variables that `innermost(function)` closes over.

    The default values of its parameters, and the arguments that a `functools.partial` binds, count as closed over.
    """
    values: dict[str, Any] = {}
    inner: Any = innermost(function)
    code: Any = getattr(inner, "__code__", None)
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount] if code else ()
    for name, cell in zip(code.co_freevars if code else (), getattr(inner, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell has no `cell_contents`
            values[name] = cell.cell_contents
    defaults = getattr(inner, "__defaults__", None) or ()
    values |= dict(zip(names[len(names) - len(defaults) :], defaults, strict=False))
    values |= getattr(inner, "__kwdefaults__", None) or {}
    while isinstance(function, functools.partial):  # a partial of a partial is one partial, unless it has attributes
        bound = [*names, *(f"argument {i}" for i in range(len(names), len(function.args)))]
        values |= dict(zip(bound, function.args, strict=False)) | function.keywords
        function = function.func
    return values


def held_by(value: Any) -> dict[str, Any]:
    """Return the names and values that one look into a function (`scale`) or another object (`.scale`) shows."""
    found = closed_over(value) if callable(value) else {}
    owner: Any = getattr(value, "__self__", value)  # the object of a bound method
    if isinstance(owner, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, functools.partial)):
        return found
    slots: list[str] = [name for kind in type(owner).__mro__ for name in _slots_of(kind)]
    with contextlib.suppress(Exception):  # objects of the user may refuse to be read
        found |= {f".{name}": x for name, x in getattr(owner, "__dict__", {}).items()}
        found |= {f".{name}": getattr(owner, name) for name in slots if hasattr(owner, name)}
    return found


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in a value: the value itself, or tensors in a list, tuple or dict."""
    if type(value) not in (list, tuple, dict):
        return [value] if is_tensor(value) else []
    return [x for x in jax.tree.leaves(list(value.values()) if type(value) is dict else value) if is_tensor(x)]


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
    notes = [*getattr(error, "__notes__", ())]  # a copy: JAX adds notes of its own, and `add_note` appends to that list
    if note in notes:
        return
    error.add_note(note)
    if not any(other.startswith("This happened in") for other in notes) and (advice := hint(error, layer, method)):
        error.add_note(advice)
