"""Traced values hidden inside functions and objects, where neither JAX nor a context can follow them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax

from pylayer_jax._jax.names import Tracer, is_tracer

_DEPTH = 4  # a lambda in a partial in a closure is as deep as real code was seen to go


def traced_names(function: object, counts: Callable[[object], bool] = is_tracer, depth: int = _DEPTH) -> list[str]:
    """The names under which `function` reaches traced arrays that count, other than by its arguments."""
    if depth == 0:
        return []
    if isinstance(function, functools.partial):
        held = {f"argument {i} of the partial": value for i, value in enumerate(function.args)}
        held |= function.keywords
        return traced_names(function.func, counts, depth - 1) + _traced(held, counts, depth)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    held = dict(zip(code.co_freevars, map(content, getattr(function, "__closure__", None) or ()), strict=True))
    spread = getattr(function, "__globals__", {})
    held |= {name: spread[name] for name in code.co_names if isinstance(spread.get(name), Tracer)}
    held |= {f"default {i}": value for i, value in enumerate(getattr(function, "__defaults__", None) or ())}
    return _traced(held, counts, depth)


def traced_attributes(value: object, counts: Callable[[object], bool] = is_tracer) -> list[str]:
    """The attributes of an object that are traced arrays that count, as in `.w`."""
    if isinstance(value, types.ModuleType):
        return []
    return [f".{name}" for name, held in getattr(value, "__dict__", {}).items() if counts(held)]


def content(cell: Any) -> Any:
    """What a variable of an enclosing function holds; None before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _traced(held: dict[str, Any], counts: Callable[[object], bool], depth: int) -> list[str]:
    names: list[str] = []
    for name, value in held.items():
        for leaf in jax.tree_util.tree_leaves(value):
            if counts(leaf) or (callable(leaf) and traced_names(leaf, counts, depth - 1)):
                names.append(name)
                break
    return names
