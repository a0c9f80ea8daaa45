"""Keys of functions: equal for hooks with equal code and equal captured values.

A lambda that is made anew at each call is therefore traced once.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from pylayer_jax._trees.closures import content, global_names
from pylayer_jax._trees.opaque import IdentityKey

# Two of these are interchangeable where type and repr agree; `==` would take 0.0 for -0.0, and 1 for True.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def function_key(function: Any) -> Any:
    """Equal for functions of the same code that read the same values.

    A function reads its closure, its defaults, its attributes, and the global variables that it names. Numbers and
    strings are compared; tuples, `functools.partial`, functions in a closure and global functions of the same module
    are compared by what they hold in turn; everything else, as a dict, an object or an array, is compared by identity.
    """
    return _key(function, {})


def _key(value: Any, seen: dict[int, int]) -> Any:
    if type(value) in _PLAIN:
        return type(value), repr(value)
    if id(value) in seen:  # a function that closes over itself
        return "seen", seen[id(value)]
    if type(value) is tuple:
        return tuple, tuple(_key(x, seen) for x in value)
    if type(value) is functools.partial:
        seen[id(value)] = len(seen)
        keywords = tuple((name, _key(x, seen)) for name, x in value.keywords.items())
        return functools.partial, _key(value.func, seen), _key(value.args, seen), keywords, _items(vars(value), seen)
    if isinstance(value, types.MethodType):
        return types.MethodType, _key(value.__func__, seen), IdentityKey(value.__self__)
    if isinstance(value, types.FunctionType):
        seen[id(value)] = len(seen)
        return _key_of_function(value, seen)
    return IdentityKey(value)


def _key_of_function(function: types.FunctionType, seen: dict[int, int]) -> Any:
    variables = function.__globals__
    named = {name: variables[name] for name in global_names(function.__code__) if name in variables}
    read = {name: _key(x, seen) if _is_followed(x, variables) else IdentityKey(x) for name, x in named.items()}
    return (
        function.__code__,
        IdentityKey(variables),
        tuple(_key(content(cell), seen) for cell in function.__closure__ or ()),
        _key(function.__defaults__, seen),
        _items(function.__kwdefaults__ or {}, seen),
        _items(vars(function), seen),
        tuple(read.items()),
    )


def _is_followed(value: Any, variables: dict[str, Any]) -> bool:
    """Whether a global variable counts by what it holds. Functions of other modules, as of jax, lead too far."""
    return type(value) in (*_PLAIN, tuple) or getattr(value, "__globals__", None) is variables


def _items(held: dict[str, Any], seen: dict[int, int]) -> tuple[Any, ...]:
    return tuple((name, _key(value, seen)) for name, value in held.items())
