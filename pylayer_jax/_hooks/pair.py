"""A pair of hooks, or several pairs one after another, and tables of tensors that do not hold the tensors."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from .host import store_of

Hook = Callable[[Any], Any]

# Which code keeps the packing error of a pair in proportion, so that a tensor may be computed again from a packed one.
MOVES: Final = 0  # only code that moves values, with any pair
SCALES: Final = 1  # also code that multiplies by a number, or each row along the last axis by its own number
OFFSETS: Final = 2  # also code that adds a number: the error, if any, does not depend on the size of a value


class TensorInfo(NamedTuple):
    """The origin of a tensor, which a predicate `only` gets; an empty string means unknown."""

    layer: str = ""  # the class that saved it
    operation: str = ""  # the JAX operation that keeps it
    name: str = ""  # from `saved_names` or `jax.ad_checkpoint.checkpoint_name`


class Step(NamedTuple):
    """A pack hook and an unpack hook."""

    pack: Hook
    unpack: Hook
    host: bool = False
    differentiable: bool = False  # whether pack, then unpack, has the derivative of the identity
    only: Callable[[Any, TensorInfo], Any] | None = None  # arrays for which it is False are not packed
    floats_only: bool = False  # whether it packs floating-point numbers, and all arrays that a previous step made
    is_last: bool = False  # whether no step can follow: JAX computes on the device only. A step on the host is last
    name: str = ""  # in a chain, for messages


def reference(value: Any) -> Callable[[], Any]:
    """Return a weak reference to an array, or a strong one to a number of JAX that allows no weak references."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


class WeakTable:
    """A table whose keys are objects, compared by identity. It keeps no key alive."""

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
        except TypeError:  # JAX has numbers without weak references
            return


@dataclasses.dataclass(eq=False)
class Pair:
    """The steps that pack a tensor, one after another."""

    steps: Sequence[Step]
    key: Any  # equal for equal pairs, which are one entry in jit's caches
    only: Callable[[Any, TensorInfo], Any] | None  # the predicate of the whole chain
    keeps: int  # MOVES, SCALES or OFFSETS
    packs_arguments: bool  # whether values from outside the block are packed
    by_name: Mapping[Any, Sequence[Step]] | None = None  # in place of `steps`: the steps for each name

    def __post_init__(self) -> None:
        self.n_packed: Counter[bool] = Counter()  # traced tensors under True
        self.residuals = WeakTable()  # how each tensor is kept: a tensor that several operations keep is packed once
        self.store = store_of(self.key)

    def steps_for(self, info: TensorInfo) -> Sequence[Step]:
        """Return the steps for a tensor; by name, for the most specific of its names that is a key."""
        if self.by_name is None:
            return self.steps
        names = (info.name, info.layer, info.operation, ...)
        return next((self.by_name[name] for name in names if name in self.by_name), ())


class Identity:
    """Compares an object that cannot be hashed by its identity."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key_of(value: Any) -> Any:
    """Return the key by which arguments are compared: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(value, (bool, int, float, complex)):
        return type(value), repr(value)
    if isinstance(value, tuple):
        return type(value), tuple(map(key_of, value))
    try:
        hash(value)
    except TypeError:
        return Identity(value)
    return type(value), value
