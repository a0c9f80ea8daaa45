"""The pair of saved-tensor hooks that is active, and the facts that a layer or an operation takes from it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import jax

from pylayer_jax._jax import (
    current_trace,
    is_deferred,
    is_rematerialized,
    mark_hooks_block,
    set_current_trace,
    trace_below,
)

from .derived import Errors
from .function_keys import function_key
from .host import HostStore, host_store_of

Hook = Callable[[Any], Any]


class Pair:
    """A pack hook and an unpack hook. Equal pairs are one entry in jit's caches."""

    __slots__ = (
        "__weakref__",
        "_hash",
        "cache",
        "differentiable",
        "errors",
        "host",
        "key",
        "only",
        "pack",
        "store",
        "unpack",
    )

    def __init__(
        self,
        pack: Hook,
        unpack: Hook,
        host: bool,
        differentiable: bool = False,
        only: Hook | None = None,
        errors: Errors = Errors(),  # noqa: B008 - immutable
    ) -> None:
        self.pack = pack
        self.unpack = unpack
        self.host = host
        self.differentiable = differentiable  # whether pack, then unpack, has the derivative of the identity
        self.only = only  # a predicate: tensors for which it is False are not packed
        self.errors = errors
        self.key = self._present_key()
        self._hash = hash(self.key)
        self.store: HostStore = host_store_of(self.key)
        self.cache = PackCache()

    def _present_key(self) -> Any:
        functions = (self.pack, self.unpack, *(() if self.only is None else (self.only,)))
        return *map(function_key, functions), self.host, self.differentiable, self.errors

    def is_outdated(self) -> bool:
        """Whether a variable that a hook reads was bound anew."""
        return self.key != self._present_key()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash


class Disabled:
    """Stands for a pair while hooks are disabled: it is an error to enter a pair."""

    __slots__ = ("message",)

    def __init__(self, message: str) -> None:
        self.message = message

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Disabled) and self.message == other.message

    def __hash__(self) -> int:
        return hash(self.message)


# Stands for a pair while hooks are suspended: the code further out packs everything that is saved.
SUSPENDED: Final = "suspended"

# Stands for a pair while code is traced to be transposed. Nothing is saved there, and a block has no effect: JAX cannot
# transpose an operation that packs.
TRANSPOSING: Final = "transposing"

# Part of the key of every cache of JAX, so that a function is traced again if it was compiled without hooks, or with
# other hooks. Local to the thread.
active: Final = jax.make_user_context(None)


def active_pair() -> Pair | None:
    return active.value if isinstance(active.value, Pair) else None


@contextlib.contextmanager
def hooks_suspended() -> Generator[None]:
    """Pack nothing in here: the caller packs, or runs a hook."""
    with active(SUSPENDED):
        yield


@contextlib.contextmanager
def outside_hooks_trace() -> Generator[None]:
    """Run on the trace below the innermost hooks block."""
    with set_current_trace(trace_below(current_trace())):
        yield


def mark_nested(pair: Pair) -> None:
    """Mark the staged code if it enters `pair` within the block of another pair that surrounds the code."""
    outer = active_pair()
    if outer is not None and outer != pair and not getattr(current_trace(), "is_hooks_block", False):
        mark_hooks_block()


class Hooks:
    """The pair that was active when a layer, or an operation, was applied."""

    __slots__ = ("deferred", "pair", "rematerialized")

    def __init__(self, pair: Pair, tensors: Sequence[Any]) -> None:
        self.pair = pair
        self.deferred = is_deferred(tensors)  # see NOTE [packed tensors]
        self.rematerialized = pair.host and is_rematerialized()

    @staticmethod
    def captured(tensors: Sequence[Any]) -> Hooks | None:
        pair = active_pair()
        return None if pair is None else Hooks(pair, tensors)


class PackCache:
    """The packed form of tensors, while both are alive: a tensor that several operations keep is packed once."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Callable[[], Any], ...]] = {}

    def get(self, tensor: Any) -> tuple[Any, list[Any]] | None:
        entry = self._entries.get(id(tensor))
        if entry is None:
            return None
        source, trace, packed, *arrays = (ref() for ref in entry)
        # A traced value belongs to the one jaxpr in which it was made.
        if source is not tensor or trace is not current_trace() or packed is None or any(x is None for x in arrays):
            return None
        return packed, arrays

    def put(self, tensor: Any, packed: Callable[[], Any], arrays: Sequence[Any]) -> None:
        """`packed` is a weak reference to the packed tensor, or finds it in another way that holds nothing."""
        key, entries = id(tensor), self._entries

        def forget(_: Any) -> None:
            entries.pop(key, None)

        trace, *refs = (weakref.ref(x) for x in (current_trace(), *arrays))
        entries[key] = (weakref.ref(tensor, forget), trace, packed, *refs)

    def forget(self, packed: Any) -> None:
        for key in [key for key, (_, _, ref, *_) in list(self._entries.items()) if ref() is packed]:
            self._entries.pop(key, None)
