"""Pairs of hooks (a chain of pairs is one pair with several steps), and tables that do not keep their keys alive."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pylayer_jax._jax.source import frames_between, scopes_between

if TYPE_CHECKING:
    from .host import HostStore

Hook = Callable[[Any], Any]


class ErrorModel(enum.IntEnum):
    """What a pair does to the values of a tensor x: how large the error e = unpack(pack(x)) - x may be.

    The model says which operations on `x + e` give a result whose error is no larger than if the result were packed.
    """

    ANY = 0  # nothing is known: only operations that move values
    RELATIVE = 1  # e is proportional to x, as for a cast: also a product with a number
    ABSOLUTE = 2  # e depends on the other values of the row, or is 0: also a sum with a number


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a tensor comes from, for the predicate `only` and for `by_name`. A field is empty if it is not known.

    The block records the origin where it binds an operation. A reshape, transpose, slice or cast of a tensor has the
    origin of the tensor.
    """

    operation: str = ""  # the jitted function of jax.numpy, or the primitive, that computed the tensor
    layer: str = ""  # the class of the layer that computed the tensor, or that saved it first
    name: str = ""  # the name from `saved_names` or `jax.ad_checkpoint.checkpoint_name`
    source: Any = dataclasses.field(default=None, repr=False, compare=False)  # JAX's source information
    block: Any = dataclasses.field(default=None, repr=False, compare=False)  # the same, where the block was entered

    @functools.cached_property
    def inside(self) -> tuple[str, ...]:
        """The functions, with their classes, between the block and the operation, outermost first; then the scopes."""
        if self.source is None:
            return ()
        return (*frames_between(self.block, self.source), *scopes_between(self.block, self.source))

    @property
    def keys(self) -> tuple[str, ...]:
        """The names by which `by_name` finds the tensor, the most specific name first."""
        return tuple(dict.fromkeys(key for key in (self.name, self.layer, self.operation, *self.inside[::-1]) if key))


class Step(NamedTuple):
    """A pack hook and an unpack hook, with their options."""

    pack: Hook
    unpack: Hook
    host: bool = False
    differentiable: bool = False  # whether `unpack(pack(x))` has the derivative of the identity
    only: Callable[[Any, Origin], Any] | None = None  # an array for which `only` returns False is not packed
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
    keeps: ErrorModel
    packs_arguments: bool  # whether values from outside the block are packed
    only: Callable[[Any, Origin], Any] | None = None  # the predicate that applies before all steps
    by_name: Mapping[Any, Sequence[Step]] | None = None  # name -> steps; if given, it replaces `steps`

    def __post_init__(self) -> None:
        self.n_packed: Counter[bool] = Counter()  # the key is True for traced tensors
        self.residuals = WeakTable()  # tensor -> residual: a tensor that several operations keep is packed once
        self.unmatched = {key for key in self.by_name or () if key is not ...}  # the keys that named no tensor so far
        self.seen: dict[str, None] = {}  # the names of the tensors that code in blocks kept, while keys are unmatched

    @property
    def is_selective(self) -> bool:
        """Whether the origin of a tensor may decide how the tensor is kept."""
        return self.by_name is not None or self.only is not None or any(step.only for step in self.steps)

    @property
    def packs_nothing(self) -> bool:
        """Whether the pair leaves each tensor as it is, as that of a report does."""
        return self.by_name is None and not self.steps

    def predicates(self) -> list[Any]:
        """Return the predicates that decide about tensors, each once."""
        steps = [step for steps in (self.by_name or {None: self.steps}).values() for step in steps]
        return list(dict.fromkeys(only for only in (self.only, *[step.only for step in steps]) if only is not None))

    def steps_for(self, origin: Origin) -> Sequence[Step]:
        """Return the steps for a tensor. In `by_name`, the most specific name of the tensor applies."""
        if self.by_name is None:
            return self.steps
        return next((self.by_name[key] for key in (*origin.keys, ...) if key in self.by_name), ())

    def note(self, origin: Origin) -> None:
        """Record that code in a block keeps a tensor with this origin, to warn of keys that name no tensor."""
        if self.unmatched:
            self.unmatched.difference_update(origin.keys)
            self.seen.update(dict.fromkeys(origin.keys))


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
