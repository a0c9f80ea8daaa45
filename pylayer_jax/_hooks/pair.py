"""Pairs of hooks (a chain of pairs is one pair with several steps), and tables that do not keep their keys alive."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from .host import store_of

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


@dataclasses.dataclass(eq=False)
class Pair:
    """A sequence of steps that pack a tensor one after another."""

    steps: Sequence[Step]
    key: Any  # equal for equal pairs, which share an entry in jit's caches
    only: Callable[[Any, TensorInfo], Any] | None  # the predicate that applies before all steps
    keeps: int  # one of MOVES, SCALES and OFFSETS
    packs_arguments: bool  # whether values from outside the block are packed
    by_name: Mapping[Any, Sequence[Step]] | None = None  # name -> steps; if given, it replaces `steps`

    def __post_init__(self) -> None:
        self.n_packed: Counter[bool] = Counter()  # the key is True for traced tensors
        self.residuals = WeakTable()  # tensor -> residual: a tensor that several operations keep is packed once
        self.store = store_of(self.key)

    def steps_for(self, info: TensorInfo) -> Sequence[Step]:
        """Return the steps for a tensor. In `by_name`, the most specific name of the tensor applies."""
        if self.by_name is None:
            return self.steps
        names = (info.name, info.layer, info.operation, ...)
        return next((self.by_name[name] for name in names if name in self.by_name), ())


class Identity:
    """A hashable wrapper that compares an unhashable object by its identity."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key_of(value: Any) -> Any:
    """Return a hashable key of an argument. The keys of 1, 1.0 and True differ, and so do the keys of 0.0 and -0.0."""
    if isinstance(value, (bool, int, float, complex)):
        return type(value), repr(value)
    if isinstance(value, tuple):
        return type(value), tuple(map(key_of, value))
    try:
        hash(value)
    except TypeError:
        return Identity(value)
    return type(value), value
