"""Traced values within functions and objects, where neither JAX nor a context finds them.

NOTE [one walk]
`_search` goes from object to object as Python's garbage collector does: along all that an object refers to (attributes,
slots, variables of enclosing functions, defaults, the items of any container), to any depth, to each object once. It
runs no code of a user, and calls no Python function. It does not enter

- arrays, numbers, strings and code, which refer to nothing that is traced;
- modules, and a class that its module has under its own name: these are there before the trace. A class that was made
  within a function may have methods that close over traced values;
- the global variables of a function, but for the traced values that its code names;
- frames, generators and tracebacks, which refer to code that is running, and traces, which refer to all their values;
- what is compiled in jaxlib, but for the function that it wraps, as that of `jax.jit`.

A `Place` is where a traced value was found: it has a name for messages, and another value can be put there.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax

from pylayer_jax._jax.imports import Trace, Tracer
from pylayer_jax._jax.tracers import is_differentiated, is_leaked, is_of_current_trace, is_staging, is_tracer
from pylayer_jax._jax.types import is_ref

from .messages import innermost
from .partition import TreeWithoutTensors, split

_PLAIN: Final = (type(None), type(...), bool, int, float, complex, str, bytes, bytearray, range)
_CODE: Final = (types.CodeType, types.FrameType, types.TracebackType)
_RUNNING: Final = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_ATOMS: Final = frozenset([*_PLAIN, *_CODE, *_RUNNING])
_NOT_ENTERED: Final = (types.ModuleType, Trace)
_COMPILED: Final = "jaxlib"
_MISSING: Final = object()


class Place(NamedTuple):
    """An item of a container, or an attribute of an object, where a traced value was found."""

    name: str  # as in `w` for a variable of a function, `.linear.w` for an attribute
    owner: Any  # None if no other value can be put there
    key: Any

    @property
    def _container(self) -> Any:
        return next((kind for kind in (dict, list, deque, tuple) if isinstance(self.owner, kind)), None)

    def read(self) -> Any:
        """The value that stands there now."""
        kind = self._container
        with contextlib.suppress(LookupError, AttributeError, ValueError):
            if kind is not None:
                return kind.__getitem__(self.owner, self.key)
            return getattr(self.owner, self.key)
        return _MISSING

    def write(self, value: Any) -> None:
        kind, owner = self._container, self.owner
        if kind is not None:
            kind.__setitem__(owner, self.key, value)
        elif isinstance(owner, functools.partial):
            owner.__setstate__((owner.func, value, owner.keywords, vars(owner)))  # pyright: ignore
        elif isinstance(owner, type):
            setattr(owner, self.key, value)
        else:
            object.__setattr__(owner, self.key, value)  # also of a frozen dataclass


def tracers_in(roots: Iterable[object], but: Iterable[object] = ()) -> list[Any]:
    """The traced values that functions and objects hold; `but` are not searched."""
    return [tracer for _, tracer in _search([*roots], but)[0]]


def places_of(root: object, predicate: Callable[[object], bool] = is_tracer, but: Iterable[object] = ()) -> list[Place]:
    """The places where a function or an object holds traced values for which `predicate` is true."""
    found, holders = _search([root], but)
    places = [p for holder, tracer in found if predicate(tracer) for p in _places(holders, [holder, tracer])]
    return list({(id(place.owner), place.key): place for place in places}.values())


def traced_names(
    value: object, predicate: Callable[[object], bool] = is_tracer, but: Iterable[object] = ()
) -> list[str]:
    """The names of the places where a function or an object holds traced values, each once."""
    return list(dict.fromkeys(place.name for place in places_of(value, predicate, but)))


def is_within_compiled(root: object, predicate: Callable[[object], bool]) -> bool:
    """Whether a jitted function, anywhere in `root`, closes over a traced value: JAX has made it part of a program."""
    return any(map(predicate, tracers_in(filter(is_compiled, reached_from([root])))))


def is_compiled(value: object) -> bool:
    return str(type(value).__module__).startswith(_COMPILED)


def reached_from(roots: Iterable[object]) -> list[Any]:
    """All that functions and objects hold, but for traced values, numbers and other constants."""
    return [holder[0] for holder in _search([*roots], ())[1].values()]


def hiding_functions(skeleton: TreeWithoutTensors) -> Iterator[tuple[str, str]]:
    """The path of each static that is a function over traced values, and their names, joined by commas."""
    if not tracers_in(filter(callable, skeleton.statics())):  # paths cost more
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


def is_of_current_jaxpr(value: object) -> bool:
    """Whether a value stands in the jaxpr that is being made.

    In eager mode the current trace is one further out, as that of an outer `jax.grad`.
    """
    return is_staging() and is_of_current_trace(value)


def replace_tracers_by_types(place: Place) -> None:
    """Put types in place of the traced values that the current trace has made, which would leak."""
    leaves, rest = split(place.read(), is_of_current_jaxpr)
    if leaves:
        place.write(rest.fill([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]))


@contextlib.contextmanager
def with_values(places: Sequence[Place], values: Sequence[Any]) -> Generator[None]:
    """A block in which other values stand in some places; what the block writes there stays."""
    before = [place.read() for place in places]
    given = [(p, value, old) for p, value, old in zip(places, values, before, strict=True) if old is not _MISSING]
    for place, value, _ in given:
        place.write(value)
    try:
        yield
    finally:
        for place, value, old in given:
            if place.read() is value:
                place.write(old)


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


@functools.cache
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names of global variables, and of attributes, in a piece of code and in the functions that it makes."""
    inner = [name for x in code.co_consts if isinstance(x, types.CodeType) for name in global_names(x)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


# -- the walk -------------------------------------------------------------------------------------

_Holders = dict[int, list[Any]]  # by the identity of an object: itself, and what holds it


def _search(roots: list[Any], but: Iterable[object]) -> tuple[list[tuple[Any, Any]], _Holders]:
    """Each traced value that is found, with what holds it. See NOTE [one walk]."""
    found: list[tuple[Any, Any]] = []
    holders: _Holders = {id(x): [x] for x in (roots, *but)}
    waiting: list[Any] = [roots]
    for holder in waiting:  # which grows
        kind = type(holder)
        if str(kind.__module__).startswith(_COMPILED):
            children: list[Any] = [getattr(holder, "__wrapped__", None)]
        else:
            children = gc.get_referents(holder)
        if kind is types.FunctionType:
            variables = holder.__globals__
            for namespace in (variables, holder.__builtins__):
                holders.setdefault(id(namespace), [namespace])
            for name in global_names(holder.__code__):
                if issubclass(type(variables.get(name)), Tracer):
                    children.append(variables[name])
        for child in children:
            kind = type(child)
            if kind in _ATOMS:
                continue
            if issubclass(kind, Tracer):
                found.append((holder, child))
            elif id(child) in holders:
                if issubclass(kind, tuple):
                    holders[id(child)].append(holder)
            elif not issubclass(kind, _NOT_ENTERED):
                if issubclass(kind, type):
                    module = sys.modules.get(str(child.__module__))
                    if getattr(module, "__dict__", {}).get(child.__qualname__) is child:
                        continue
                holders[id(child)] = [child, holder]
                waiting.append(child)
    return found, holders


def _places(holders: _Holders, chain: list[Any]) -> Iterator[Place]:
    """The places of the value at the end of a chain, of which each holds the next one.

    A tuple cannot change. Its place, where another tuple can be put, counts as that of its items.
    """
    if type(chain[0]) is tuple or (isinstance(chain[0], tuple) and hasattr(chain[0], "_fields")):
        for holder in holders[id(chain[0])][1:]:
            yield from _places(holders, [holder, *chain])
        return
    way, name = chain[:2], ""
    while len(above := holders[id(way[0])]) > 1:
        way.insert(0, above[1])
    del way[0]  # the list of what was to be searched
    members: list[Place] = []
    while len(way) > 1:
        # The variables of a function are in a tuple of cells, the attributes of an object in a dict.
        values = [(place, place.read()) for place in _members(way[0])]
        for steps, reached in enumerate(way[1:4], 1):
            if members := [place for place, value in values if value is reached]:
                label = members[0].name
                name = name + label if label[:1] in ("", ".", "[") else name or label
                del way[:steps]
                break
        else:
            del way[0]
    for place in members or [Place("", None, "")]:
        yield place._replace(name=name or "value", owner=None if isinstance(place.owner, tuple) else place.owner)


def _members(value: Any) -> Iterator[Place]:
    """What a function or an object holds, by its name within."""
    if isinstance(value, types.FunctionType):
        yield from map(Place, value.__code__.co_freevars, value.__closure__ or (), itertools.repeat("cell_contents"))
        yield Place("__defaults__", value, "__defaults__")
        yield from (Place(name, value.__globals__, name) for name in global_names(value.__code__))
        yield from (Place(name, value.__kwdefaults__, name) for name in value.__kwdefaults__ or ())
    if isinstance(value, functools.partial):
        yield Place("partial.args", value, "args")
        yield from (Place(name, value.keywords, name) for name in value.keywords)
    if isinstance(value, (list, tuple, deque)):
        yield from (Place(f"[{i}]", value, i) for i in range(len(value)))
    if isinstance(value, dict):
        yield from (Place(f"[{key!r}]", value, key) for key in value)
    attributes = getattr(value, "__dict__", {})
    for name in attributes:
        # A decorated function is an attribute of its wrapper.
        is_inner = name == "__wrapped__" and isinstance(value, types.FunctionType)
        yield Place("" if is_inner else f".{name}", value if isinstance(value, type) else attributes, name)
    kind: type = type(value)
    for base in kind.__mro__:
        for name, slot in vars(base).items() if "__slots__" in vars(base) else ():
            if isinstance(slot, types.MemberDescriptorType):
                yield Place(f".{name}", value, name)
