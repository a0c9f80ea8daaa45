"""Traced values hidden inside functions and objects, where neither JAX nor a context finds them."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from pylayer_jax._jax.tracers import is_differentiated, is_leaked, is_of_current_trace, is_staging, is_tracer
from pylayer_jax._jax.types import is_ref

from .messages import innermost
from .partition import TreeWithoutTensors, is_tensor

_DEPTH = (
    4  # a lambda in a partial in a closure, or an array in a layer of a model, is as deep as real code was seen to go
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.BuiltinFunctionType)


class Place(NamedTuple):
    """An attribute of an object, or a variable of a function: its name, its value, and a way to set it."""

    name: str  # as in `w` for a variable, `.linear.w` for an attribute
    value: Any
    put: Callable[[Any], None]

    def traced(self) -> list[Any]:
        return [x for x in _leaves(self.value) if is_tracer(x)]


def hidden(root: object, predicate: Callable[[object], bool] = is_tracer) -> list[Place]:
    """The places where a function or an object holds arrays for which `predicate` is true, other than as a pytree.

    An attribute may be a pytree, and an object may hold others.
    """
    found: list[Place] = []
    seen: dict[int, object] = {}
    waiting = deque([("", value, _DEPTH) for value in _objects(_leaves(root))])
    while waiting:
        start, value, depth = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        for place in _places(value, start):
            leaves = _leaves(place.value)
            if any(map(predicate, leaves)):
                found.append(place)
            if depth > 1:
                waiting += [(place.name, value, depth - 1) for value in _objects(leaves)]
    return found


def hiding_functions(skeleton: TreeWithoutTensors) -> Iterator[tuple[str, str]]:
    """The path of each static that is a function over traced values, and their names, joined by commas."""
    if not any(map(callable, skeleton.statics())):  # paths cost more than a look at the leaves
        return
    for path, leaf in skeleton.static_paths():
        if callable(leaf) and (names := traced_names(leaf)):
            yield path, ", ".join(names)


def is_live(value: object) -> bool:
    """Whether a value is traced, by a transformation that still runs. A `jax.Ref` does not count."""
    return is_tracer(value) and not is_ref(value) and not is_leaked(value)


def is_live_constant(value: object) -> bool:
    """The same of a value that is not differentiated, as far as is known before the code around it is."""
    return is_live(value) and not is_differentiated(value)


def traced_names(function: object, predicate: Callable[[object], bool] = is_tracer) -> list[str]:
    """The names of the places where a function or an object holds traced arrays, each once."""
    if _holds_nothing(function):  # nearly every method, at each call of a layer
        return []
    return list(dict.fromkeys(place.name for place in hidden(function, predicate)))


def is_made_here(value: object) -> bool:
    """Whether a value stands in the jaxpr that is being made.

    In eager mode the current trace is one further out, as that of an outer `jax.grad`.
    """
    return is_staging() and is_of_current_trace(value)


def vacate(place: Place) -> Place:
    """The place with the types of the traced values that the current trace has made, which would leak from it."""

    def type_of(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_made_here(leaf) else leaf

    if not any(map(is_made_here, _leaves(place.value))):
        return place
    place = place._replace(value=jax.tree_util.tree_map(type_of, place.value))
    place.put(place.value)
    return place


@contextlib.contextmanager
def filled(places: Sequence[Place], values: Sequence[Any]) -> Generator[None]:
    """A block in which other values stand in some places."""
    try:
        for place, value in zip(places, values, strict=True):
            place.put(value)
        yield
    finally:
        for place in places:
            place.put(place.value)


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


def _leaves(value: object) -> list[Any]:
    if isinstance(value, _PLAIN):
        return []
    try:
        return jax.tree_util.tree_leaves(value)
    except Exception:  # keys that cannot be sorted; a node that may be read only once
        return []


def _objects(leaves: Sequence[Any]) -> list[Any]:
    return [x for x in leaves if not (isinstance(x, _PLAIN) or is_tensor(x) or is_ref(x))]


def _places(value: Any, start: str) -> Iterator[Place]:
    if isinstance(value, functools.partial):
        yield from _places_of_partial(value, start)
    elif isinstance(value, types.MethodType):
        yield from _places(value.__func__, start)
        yield from _places(value.__self__, start)
    elif isinstance(value, types.FunctionType):
        yield from _places_of_function(value, start)
    elif not isinstance(value, _PLAIN):
        yield from _attributes(value, start)
        for base in type(value).__mro__:
            for name, slot in vars(base).items() if "__slots__" in vars(base) else ():
                if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                    yield Place(f"{start}.{name}", slot.__get__(value), functools.partial(slot.__set__, value))


def _places_of_partial(value: functools.partial[Any], start: str) -> Iterator[Place]:
    def put(args: tuple[Any, ...]) -> None:
        value.__setstate__((value.func, args, value.keywords, vars(value)))  # pyright: ignore[reportAttributeAccessIssue]

    yield Place(start or "partial.args", value.args, put)
    for name, held in value.keywords.items():
        yield Place(start or name, held, functools.partial(value.keywords.__setitem__, name))
    yield from _places(value.func, start)


def _holds_nothing(function: object) -> bool:
    """Whether a value is a function without a place for other values, none of whose globals is traced."""
    if not isinstance(function, types.FunctionType):
        return False
    if function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__:
        return False
    variables = function.__globals__
    return not any(is_tracer(variables.get(name)) for name in function.__code__.co_names)


def _places_of_function(value: types.FunctionType, start: str) -> Iterator[Place]:
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        yield Place(start or name, content(cell), functools.partial(setattr, cell, "cell_contents"))
    variables = value.__globals__
    for name in value.__code__.co_names:
        if is_tracer(held := variables.get(name)):
            yield Place(start or name, held, functools.partial(variables.__setitem__, name))
    if value.__defaults__:
        yield Place(start or "__defaults__", value.__defaults__, functools.partial(setattr, value, "__defaults__"))
    keywords = value.__kwdefaults__ or {}
    for name, held in keywords.items():
        yield Place(start or name, held, functools.partial(keywords.__setitem__, name))
    yield from _attributes(value, start)


def _attributes(value: object, start: str) -> Iterator[Place]:
    attributes: Any = getattr(value, "__dict__", None)
    for name, held in [*attributes.items()] if type(attributes) is dict else ():
        # A decorated function is an attribute of its wrapper; only that of a jitted function is named.
        path = start if name == "__wrapped__" and isinstance(value, types.FunctionType) else f"{start}.{name}"
        yield Place(path, held, functools.partial(attributes.__setitem__, name))
