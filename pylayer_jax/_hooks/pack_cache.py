"""The packed form of a tensor that several operations keep."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pylayer_jax._jax.tracers import current_trace


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
