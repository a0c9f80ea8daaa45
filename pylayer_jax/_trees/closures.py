"""Traced values hidden inside functions and objects, where neither JAX nor a context finds them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pylayer_jax._jax import is_tracer

from .messages import innermost
from .partition import Skeleton

_DEPTH = 4  # a lambda in a partial in a closure is as deep as real code was seen to go


def traced_names(function: object, predicate: Callable[[object], bool] = is_tracer, depth: int = _DEPTH) -> list[str]:
    """The names under which `function` reaches traced arrays, other than by its arguments.

    `predicate` says which of them count.
    """
    if depth == 0:
        return []
    if isinstance(function, functools.partial):
        held = {f"argument {i} of the partial": value for i, value in enumerate(function.args)}
        held |= function.keywords
        return traced_names(function.func, predicate, depth - 1) + _traced(held, predicate, depth)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    variables = getattr(function, "__globals__", {})
    held = {name: variables[name] for name in code.co_names if is_tracer(variables.get(name))}
    if code.co_freevars:
        held |= zip(code.co_freevars, map(content, getattr(function, "__closure__", None) or ()), strict=True)
    if defaults := getattr(function, "__defaults__", None):
        held |= {f"default {i}": value for i, value in enumerate(defaults)}
    return _traced(held, predicate, depth) if held else []


def hiding_functions(skeleton: Skeleton) -> Iterator[tuple[str, str]]:
    """The path of each static that is a function over traced values, and their names, joined by commas."""
    if not any(map(callable, skeleton.statics())):  # paths cost more than a look at the leaves
        return
    for path, leaf in skeleton.static_paths():
        if callable(leaf) and (names := traced_names(leaf)):
            yield path, ", ".join(names)


def traced_attributes(value: object, predicate: Callable[[object], bool] = is_tracer) -> list[str]:
    """The attributes of an object that are traced arrays, as in `.w`; `predicate` says which of them count."""
    if isinstance(value, types.ModuleType):
        return []
    return [f".{name}" for name, held in getattr(value, "__dict__", {}).items() if predicate(held)]


def values_in_reach(function: Any) -> list[Any]:
    """The constants, globals, captured values and defaults that a function reads: they are there before it runs."""
    function = innermost(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    variables = getattr(function, "__globals__", {})
    found = [*code.co_consts, *(variables[name] for name in code.co_names if name in variables)]
    found += map(content, getattr(function, "__closure__", None) or ())
    return [*found, *(getattr(function, "__defaults__", None) or ())]


def content(cell: Any) -> Any:
    """The value of a variable of an enclosing function; None before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _traced(held: dict[str, Any], predicate: Callable[[object], bool], depth: int) -> list[str]:
    names: list[str] = []
    for name, value in held.items():
        for leaf in jax.tree_util.tree_leaves(value):
            if predicate(leaf) or (callable(leaf) and traced_names(leaf, predicate, depth - 1)):
                names.append(name)
                break
    return names
