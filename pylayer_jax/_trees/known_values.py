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

from .closures import global_names, is_compiled, reached_from, values_in_reach
from .messages import innermost

# What cannot change with the inputs of a function, or only in steps.
_PIECEWISE: Final = (
    *(int, str, type, enum.Enum, np.dtype, types.ModuleType, types.BuiltinFunctionType, types.CodeType),
    *(type(None), type(...)),
)
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
            found += _globals_of(holder, holder.__code__)
    return found


def _read_by(function: Any) -> list[Any]:
    code = getattr(innermost(function), "__code__", None)
    return [] if code is None else [*values_in_reach(function), *_globals_of(innermost(function), code)]


def _globals_of(function: Any, code: types.CodeType) -> list[Any]:
    """The global variables that a function names, and the members of modules and classes, as `math.pi`."""
    names, variables = global_names(code), getattr(function, "__globals__", {})
    values = [variables[name] for name in names if name in variables]
    spaces = [vars(x) for x in values if isinstance(x, (type, types.ModuleType))]
    return values + [space[name] for space in spaces for name in names if name in space]
