"""Which pair of saved-tensor hooks is active."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import jax

from pylayer_jax._jax.names import (
    Primitive,
    Trace,
    current_trace,
    has_equation,
    is_differentiated,
    is_rematerialized,
    register,
    set_current_trace,
)
from pylayer_jax._trees.closures import content
from pylayer_jax._trees.partition import ById

from .host import Store, store_of

Hook = Callable[[Any], Any]


class Pair:
    """A pack hook and an unpack hook. Equal pairs are one entry in jit's caches."""

    __slots__ = (
        "__weakref__",
        "_derived",
        "_hash",
        "differentiable",
        "host",
        "key",
        "memory",
        "pack",
        "store",
        "unpack",
    )

    def __init__(self, pack: Hook, unpack: Hook, host: bool, differentiable: bool = False) -> None:
        self.pack = pack
        self.unpack = unpack
        self.host = host
        self.differentiable = differentiable  # one after the other, with the derivative of the identity
        self.key = self._derive()
        self._hash = hash(self.key)
        self.store: Store = store_of(self.key)
        self.memory = Memory()

    def _derive(self) -> Any:
        return function_key(self.pack), function_key(self.unpack), self.host, self.differentiable

    def is_outdated(self) -> bool:
        return self.key != self._derive()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash


def function_key(function: Any) -> Any:
    """Equal for functions that do the same: a lambda is a new object wherever its line runs."""
    if not isinstance(function, types.FunctionType):
        try:
            hash(function)
        except TypeError:
            return ById(function)
        return function
    cells = map(content, function.__closure__ or ())
    held = [function.__globals__, *cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    plain = (bool, int, float, str, type(None))
    return function.__code__, *((repr(x) if type(x) in plain else ById(x)) for x in held)


class Refusal:
    """In place of a pair: entering one is an error."""

    __slots__ = ("message",)

    def __init__(self, message: str) -> None:
        self.message = message

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refusal) and self.message == other.message

    def __hash__(self) -> int:
        return hash(self.message)


# In place of a pair, where everything that is saved is packed by somebody further out.
COVERED: Final = "covered"

# Part of the key of every cache of JAX, so that a function compiled without hooks, or with others, is
# traced again. Local to the thread.
active: Final = jax.make_user_context(None)


def active_pair() -> Pair | None:
    return active.value if isinstance(active.value, Pair) else None


class Interceptor(Trace):
    """The base of a trace that stands before another one, and makes no tracers of its own."""

    __slots__ = ("parent_trace",)

    parent_trace: Any


@contextlib.contextmanager
def covered() -> Generator[None]:
    """Nothing in here is packed: the caller sees to it, or runs a hook."""
    with active(COVERED):
        yield


@contextlib.contextmanager
def beneath_blocks() -> Generator[None]:
    """Run on the trace beneath the innermost hooks block."""
    with set_current_trace(beneath(current_trace())):
        yield


def beneath(trace: Any) -> Any:
    return trace.parent_trace if isinstance(trace, Interceptor) else trace


# Binds nothing, and tells that staged code holds a block of its own within a block around it. The innermost
# pair alone applies, so that such code is not packed as a whole from outside.
nested_p = Primitive("pylayer_hooks_block")
register(
    nested_p,
    evaluate=list,
    abstract=lambda: ([], frozenset()),
    jvp=lambda *_: ([], []),
    batch=lambda *_: ([], []),
)


def mark_nested(pair: Pair) -> None:
    """Leave a mark in staged code where `pair` is entered within the block of another pair that surrounds it."""
    outer = active_pair()
    if outer is not None and outer != pair and not isinstance(current_trace(), Interceptor):
        nested_p.bind()


def holds_block(jaxpr: Any) -> bool:
    return has_equation(jaxpr, nested_p.name)


class Hooks:
    """The pair that was active where a layer, or an operation, was applied."""

    __slots__ = ("deferred", "pair", "rematerialized")

    def __init__(self, pair: Pair, tensors: Sequence[Any]) -> None:
        self.pair = pair
        self.deferred = not any(map(is_differentiated, tensors))  # see NOTE [packed tensors]
        self.rematerialized = pair.host and is_rematerialized()

    @staticmethod
    def captured(tensors: Sequence[Any]) -> Hooks | None:
        pair = active_pair()
        return None if pair is None else Hooks(pair, tensors)


class Memory:
    """What tensors were packed to, while both are alive: what several operations keep is packed once."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Callable[[], Any], ...]] = {}

    def recall(self, tensor: Any) -> tuple[Any, list[Any]] | None:
        entry = self._entries.get(id(tensor))
        if entry is None:
            return None
        source, trace, sealed, *arrays = (ref() for ref in entry)
        # A traced value belongs to the one jaxpr in which it was made.
        if source is not tensor or trace is not current_trace() or sealed is None or any(x is None for x in arrays):
            return None
        return sealed, arrays

    def remember(self, tensor: Any, sealed: Any, arrays: Sequence[Any]) -> None:
        key, entries = id(tensor), self._entries

        def forget(_: Any) -> None:
            entries.pop(key, None)

        refs = [weakref.ref(x) for x in (current_trace(), sealed, *arrays)]
        entries[key] = (weakref.ref(tensor, forget), *refs)
