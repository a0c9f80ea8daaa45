"""How error messages show values and counts, and where a user's exception happened."""

from __future__ import annotations

from collections.abc import Iterable
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


def name_meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs from `name` by one letter: wrong, missing, too many, or two that changed places."""

    def is_near(other: str) -> bool:
        same = [x == y for x, y in zip(name, other, strict=False)]
        begin = [*same, False].index(False)
        a, b = name[begin:], other[begin:]
        return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])

    return next((other for other in known if other != name and is_near(other)), None)


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
