"""Pairs of hooks (a chain of pairs is one pair with several steps), and tables that do not keep their keys alive."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from .host import HostStore

Hook = Callable[[Any], Any]

# Each constant says through which code a tensor may be recomputed from a packed tensor, without a larger error.
MOVES: Final = 0  # only code that moves values; this holds for every pair
SCALES: Final = 1  # also code that multiplies by a number, or by one number for each row along the last axis
OFFSETS: Final = 2  # also code that adds a number: the packing error does not depend on the size of a value


class TensorInfo(NamedTuple):
    """Origin of a tensor, for the predicate `only`. A field is empty if it is not known."""

    layer: str = ""  # the class of the layer that saved the tensor
    operation: str = ""  # the JAX operation that has the tensor as a residual
    name: str = ""  # the name from `saved_names` or `jax.ad_checkpoint.checkpoint_name`


class Step(NamedTuple):
    """A pack hook and an unpack hook, with their options."""

    pack: Hook
    unpack: Hook
    host: bool = False
    differentiable: bool = False  # whether `unpack(pack(x))` has the derivative of the identity
    only: Callable[[Any, TensorInfo], Any] | None = None  # an array for which `only` returns False is not packed
    floats_only: bool = False  # whether the step packs only floats and arrays that a previous step made
    is_last: bool = False  # whether no step can follow. A step with `host` is always last
    name: str = ""  # the name of a step of a chain, for messages


def reference(value: Any) -> Callable[[], Any]:
    """Return a weak reference to an array, or a strong reference to a number of JAX that allows no weak references."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


class WeakTable:
    """A table whose keys are objects. The table compares keys by identity, and keeps no key alive."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Callable[[], Any], Any]] = {}

    def get(self, key: Any, default: Any = None) -> Any:
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else default

    def put(self, key: Any, value: Any) -> None:
        number, entries = id(key), self._entries
        try:
            entries[number] = weakref.ref(key, lambda _: entries.pop(number, None)), value
        except TypeError:  # some numbers of JAX allow no weak references
            return

    def drop(self, key: Any) -> None:
        self._entries.pop(id(key), None)

    def __len__(self) -> int:
        return len(self._entries)


@dataclasses.dataclass(eq=False)
class Pair:
    """A sequence of steps that pack a tensor one after another."""

    steps: Sequence[Step]
    key: Any  # equal for equal pairs; it holds numbers and values, and no function
    store: HostStore  # what hooks on the host returned in compiled programs; equal pairs share it
    keeps: int  # one of MOVES, SCALES and OFFSETS
    packs_arguments: bool  # whether values from outside the block are packed
    only: Callable[[Any, TensorInfo], Any] | None = None  # the predicate that applies before all steps
    by_name: Mapping[Any, Sequence[Step]] | None = None  # name -> steps; if given, it replaces `steps`

    def __post_init__(self) -> None:
        self.n_packed: Counter[bool] = Counter()  # the key is True for traced tensors
        self.residuals = WeakTable()  # tensor -> residual: a tensor that several operations keep is packed once

    def steps_for(self, info: TensorInfo) -> Sequence[Step]:
        """Return the steps for a tensor. In `by_name`, the most specific name of the tensor applies."""
        if self.by_name is None:
            return self.steps
        names = (info.name, info.layer, info.operation, ...)
        return next((self.by_name[name] for name in names if name in self.by_name), ())


_numbers = WeakTable()  # object -> its number
_new_numbers = itertools.count()
_lock = threading.Lock()


def key_of(value: Any) -> Any:
    """Return a key that only the same function, class or object has, and that does not keep this object alive.

    A number is never given twice, so an object that gets the address of a deleted one has another key. An object that
    allows no weak reference gets a new number each time.
    """
    if isinstance(value, types.MethodType):  # Python makes a new object each time that a method is read
        return key_of(value.__self__), key_of(value.__func__)
    if value is None:
        return None
    with _lock:
        number = _numbers.get(value)
        if number is None:
            number = next(_new_numbers)
            _numbers.put(value, number)
    return number
