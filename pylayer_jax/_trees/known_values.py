"""What was there before a function ran, so that what it computed can be told from it."""

from __future__ import annotations

import enum
import functools
import gc
import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from .closures import content, global_names, is_compiled, reached_from, values_in_reach
from .messages import innermost

# What cannot change with the inputs of a function, or only in steps.
_PIECEWISE: Final = (
    *(int, str, type, enum.Enum, np.dtype, types.ModuleType, types.BuiltinFunctionType, types.CodeType),
    *(type(None), type(...)),
)
_NUMBERS: Final = (float, complex, np.ndarray, np.generic)
# A new one is what it holds.
_HOLDERS: Final = (
    *(dict, list, tuple, set, frozenset, deque),
    *(functools.partial, types.CellType, types.FunctionType, types.MethodType),
)


class KnownValues:
    """All that functions and objects reach at one time: each object by its identity, with what it holds.

    A number is known if this very object was there: as an argument, in an object, or as a constant, a default, a global
    or a captured variable of one of the functions. To compare numbers would not do: a computed one may equal another.
    """

    __slots__ = ("_arrays", "_known")

    def __init__(self, functions: Iterable[Callable[..., Any] | None], objects: Iterable[object]) -> None:
        roots = [*objects, *(x for function in functions for x in _read_by(function))]
        inner = [x for x in reached_from(roots) if isinstance(x, types.FunctionType)]
        held = _all_of([*roots, *(x for function in inner for x in _read_by(function))])
        self._known = {id(x): x for x in held}  # which keeps the identities from other objects
        self._arrays = {id(x): hash(x.tobytes()) for x in held if type(x) is np.ndarray}

    def has(self, value: object) -> bool:
        """Whether a value was there, and holds nothing now that was not. What is piecewise constant always counts."""
        return self._is_old(value) and all(map(self._is_old, _all_of([value])))

    def has_numbers_of(self, static_data: object) -> bool:
        """The same of what stands in a treedef, where objects are made anew for each flattening."""
        return all(self._is_old(x) for x in _all_of([static_data]) if isinstance(x, _NUMBERS))

    def names_of_new(self, function: Any) -> list[str]:
        """The variables, and members of modules and classes, that a function reads and that hold something new."""
        roots = _read_by(function)
        inner = [x for x in reached_from(roots) if isinstance(x, types.FunctionType)]
        named = [pair for f in (innermost(function), *inner) for pair in _named_by(f)]
        # What a function reads is in the list itself; with it, all of its module would be looked at.
        values = [(name, value) for name, value in named if not isinstance(value, types.FunctionType)]
        return list(dict.fromkeys(name for name, value in values if not self.has(value)))

    def _is_old(self, value: Any) -> bool:
        if id(value) not in self._known:
            return isinstance(value, _PIECEWISE) or type(value) in _HOLDERS
        return type(value) is not np.ndarray or self._arrays[id(value)] == hash(value.tobytes())


def _all_of(roots: Sequence[Any]) -> list[Any]:
    """All that objects reach, numbers included. What is compiled changes as it runs, and holds no numbers."""
    found = [*roots]
    for holder in reached_from(roots)[1:]:
        if not is_compiled(holder):
            found += [holder, *gc.get_referents(holder)]
        if isinstance(holder, types.FunctionType):
            found += [value for _, value in _named_by(holder)]
    return found


def _read_by(function: Any) -> list[Any]:
    if getattr(innermost(function), "__code__", None) is None:
        return []
    return [*values_in_reach(function), *(value for _, value in _named_by(innermost(function)))]


def _named_by(function: Any) -> list[tuple[str, Any]]:
    """The variables that a function reads, captured or global, and the members of modules and classes, as `math.pi`."""
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    cells = zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False)
    names, variables = global_names(code), getattr(function, "__globals__", {})
    values = [(name, content(cell)) for name, cell in cells]
    values += [(name, variables[name]) for name in names if name in variables]
    spaces = [(name, vars(x)) for name, x in values if isinstance(x, (type, types.ModuleType))]
    return values + [(f"{space}.{name}", held[name]) for space, held in spaces for name in names if name in held]
