"""Tensors in objects that are no pytrees, and in variables of enclosing functions, where JAX does not find them."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pylayer_jax._jax.types import has_tangent
from pylayer_jax._trees.closures import content
from pylayer_jax._trees.partition import TreeWithoutTensors

from ._flat_function import FlatFunction

__tracebackhide__ = True  # pytest hides the frames of this module

_DEPTH = 8  # of objects in objects


def hidden_tensors(flat: FlatFunction) -> list[Any]:
    """The floating-point and complex tensors that a static argument holds, or that the function closes over."""
    found: list[Any] = []

    def note(x: Any) -> Any:
        found.append(x)
        return x

    _replaced(flat, note)
    return found


def with_hidden_tensors(flat: FlatFunction, tensors: Sequence[Any]) -> FlatFunction:
    """The same function with other hidden tensors, in copies of the objects that hold them."""
    rest = iter(tensors)
    return _replaced(flat, lambda _: next(rest))


def _replaced(flat: FlatFunction, replace: Callable[[Any], Any]) -> FlatFunction:
    walk, skeleton = _Walk(replace), flat.skeleton
    other = flat.with_tensors(flat.tensors)
    other.function = walk.visit(flat.function)
    other.skeleton = TreeWithoutTensors(skeleton.treedef, [walk.visit(leaf) for leaf in skeleton.leaves], skeleton.size)
    return other


class _Walk:
    """Replaces the tensors in Python objects. An object without any is returned as it is."""

    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self.replace = replace
        self.depth = 0
        self.seen: dict[int, tuple[Any, Any]] = {}  # the object, which keeps its id from another one, and its copy

    def visit(self, value: Any) -> Any:
        if isinstance(value, jax.Array):
            return self.replace(value) if has_tangent(value) else value
        if id(value) not in self.seen:
            self.seen[id(value)] = value, value  # what refers to itself keeps the reference
            self.depth += 1
            self.seen[id(value)] = value, self._visit(value) if self.depth <= _DEPTH else value
            self.depth -= 1
        return self.seen[id(value)][1]

    def _visit(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            items = self._all(value)
            return value if items is None else type(value)(items)
        if type(value) is dict:
            items = self._all(value.values())
            return value if items is None else dict(zip(value, items, strict=True))
        if isinstance(value, types.MethodType):
            owner = self.visit(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            items = self._all([value.func, value.args, value.keywords])
            return value if items is None else functools.partial(items[0], *items[1], **items[2])
        if isinstance(value, types.FunctionType):
            items = self._all([value.__defaults__, *map(content, value.__closure__ or ())])
            return value if items is None else _with_closure(value, *items)
        if isinstance(value, (type, types.ModuleType)) or type(value).__module__.split(".")[0] in ("jax", "numpy"):
            return value
        attributes = getattr(value, "__dict__", {})
        items = self._all(attributes.values())
        if items is None:
            return value
        try:
            other = copy.copy(value)
        except Exception:  # such as of an object that holds a lock
            return value
        other.__dict__.update(zip(attributes, items, strict=True))  # also of a frozen dataclass
        return other

    def _all(self, values: Any) -> list[Any] | None:
        """The values with other tensors; None if they hold none."""
        values = list(values)
        others = [self.visit(value) for value in values]
        return None if all(a is b for a, b in zip(values, others, strict=True)) else others


def _with_closure(function: types.FunctionType, defaults: Any, *contents: Any) -> types.FunctionType:
    cells = tuple(map(types.CellType, contents)) if function.__closure__ else None
    other = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
    other.__kwdefaults__ = function.__kwdefaults__
    return other
