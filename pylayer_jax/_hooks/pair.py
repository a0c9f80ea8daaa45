"""A pair of saved-tensor hooks, or several of them one after another."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .derived_residuals import Errors
from .function_keys import function_key
from .host_store import HostStore, host_store_of
from .pack_cache import PackCache

Hook = Callable[[Any], Any]


class Step(NamedTuple):
    """A pack hook and an unpack hook, and what is known of them."""

    pack: Hook
    unpack: Hook
    host: bool = False
    differentiable: bool = False  # whether pack, then unpack, has the derivative of the identity
    only: Hook | None = None  # a predicate: arrays for which it is False are not packed
    errors: Errors = Errors()
    is_last: bool = False  # whether no other step may follow in a chain, since what is packed is on the host
    pack_part: Hook | None = None  # of an array that the step before made, if that differs from `pack`
    name: str = ""  # in a chain, for messages

    def key(self) -> Any:
        functions = (self.pack, self.unpack, self.only, self.pack_part)
        return *map(function_key, functions), self.host, self.differentiable, self.errors


class Pair:
    """The steps that pack a tensor, one after another. Equal pairs are one entry in jit's caches."""

    __slots__ = (
        "__weakref__", "_hash", "cache", "differentiable", "errors", "host", "key", "only", "packed", "steps", "store",
    )  # fmt: skip

    def __init__(self, steps: Sequence[Step], only: Hook | None, packed: Counter[bool]) -> None:
        self.steps = tuple(steps)
        self.only = only  # a predicate: tensors for which it is False are not packed
        self.packed = packed  # how many tensors it has packed: staged ones under True
        self.host = self.steps[-1].host
        self.differentiable = all(step.differentiable for step in self.steps)
        self.errors = functools.reduce(Errors.and_then, (step.errors for step in self.steps))
        self.key = self._present_key()
        self._hash = hash(self.key)
        self.store: HostStore = host_store_of(self.key)
        self.cache = PackCache()

    def _present_key(self) -> Any:
        return *(step.key() for step in self.steps), function_key(self.only)

    def globals_changed(self) -> bool:
        """Whether a variable that a hook reads was bound anew."""
        return self.key != self._present_key()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash
