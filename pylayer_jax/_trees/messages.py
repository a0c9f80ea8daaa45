"""How error messages show values and counts, and where a user's exception happened."""

from __future__ import annotations

from typing import Any

import jax

from .partition import is_tensor


def describe(value: Any) -> str:
    """A value as an error message shows it: the type, and dtype and shape of a tensor."""
    if is_tensor(value):
        return f"{type(value).__name__} of dtype {value.dtype} and shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}" if len(repr(value)) < 60 else type(value).__name__


def plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def add_note(error: Exception, layer: str, method: str) -> None:
    """Add the class and the method to a user's exception, which keeps its type."""
    note = f"This happened in {layer}.{method}."
    if isinstance(error, jax.errors.UnexpectedTracerError):
        note += (
            " If it uses a traced value from elsewhere (a closure, a global, an object kept on ctx), pass that value "
            "as an argument of forward, or keep it with ctx.save_for_backward or as ctx.name = array."
        )
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
