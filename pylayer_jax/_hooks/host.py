"""What pack hooks returned on the host, for as long as a compiled program may ask for it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pylayer_jax._jax.names import io_callback, manual_axes, typeof, with_varying_axes


class Store:
    """All that equal pairs of hooks hold for compiled programs."""

    def __init__(self) -> None:
        self._places: weakref.WeakSet[Place] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, place: Place) -> None:
        with self._lock:
            self._places.add(place)

    def release(self, used_only: bool = False) -> None:
        """Drop what is held; with `used_only`, only what `backward` has already asked for."""
        with self._lock:
            places = list(self._places)
        for place in places:
            place.release(used_only)


_stores: weakref.WeakValueDictionary[Any, Store] = weakref.WeakValueDictionary()
_stores_lock = threading.Lock()


def store_of(key: Any) -> Store:
    with _stores_lock:
        store = _stores.get(key)
        if store is None:
            store = _stores[key] = Store()
        return store


class Place:
    """Where a program packs one tensor: called once per execution, or once per iteration of a loop.

    NOTE [host packs]
    XLA hands the tensor to `pack` and keeps a number for it, which it later hands to `unpack`, any number of
    times: once, or more often where JAX moved the packing of an unchanging tensor out of a loop, or not at all,
    where `backward` never runs. Nothing tells that the last one has come. So everything that was unpacked at
    least once is dropped when the place packs again, since then a new forward pass has begun; what was never
    unpacked is kept, up to a limit that no loop should reach. A program that is collected takes its
    places with it. Devices that run the same program (shard_map) each have a lane of their own.
    """

    limit = 10_000  # tensors packed and not asked for yet

    def __init__(self, store: Store, pack: Callable[[Any], Any], unpack: Callable[[Any], Any], where: str) -> None:
        self._pack = pack
        self._unpack = unpack
        self._where = where
        self._lock = threading.Lock()
        self._next = 0
        self._waiting: dict[int, dict[int, Any]] = {}  # by lane
        self._used: dict[int, dict[int, Any]] = {}
        store.add(self)

    # -- in traced code -------------------------------------------------------------------------

    def token(self, tensor: Any) -> jax.Array:
        """The number under which the host keeps a traced tensor."""
        lane = _lane()
        token = io_callback(self._put, jax.ShapeDtypeStruct((), np.uint32), tensor, lane)
        return with_varying_axes(token, typeof(lane))

    def restored(self, token: Any, aval: Any) -> jax.Array:
        """The tensor of a traced number."""
        return io_callback(self._get, jax.ShapeDtypeStruct(aval.shape, aval.dtype), token, _lane())

    # -- on the host ----------------------------------------------------------------------------

    def _put(self, tensor: Any, lane: Any) -> np.uint32:
        packed = self._pack(np.asarray(tensor))
        with self._lock:
            dropped = self._used.pop(int(lane), None)
            waiting = self._waiting.setdefault(int(lane), {})
            token, self._next = self._next, (self._next + 1) % 2**32
            waiting[token] = packed
            oldest = waiting.pop(next(iter(waiting))) if len(waiting) > self.limit else None
        del dropped, oldest  # outside of the lock, as their finalizers may do anything
        return np.uint32(token)

    def _get(self, token: Any, lane: Any) -> np.ndarray:
        number = int(token)
        with self._lock:
            used = self._used.setdefault(int(lane), {})
            waiting = self._waiting.get(int(lane), {})
            if number in waiting:
                used[number] = waiting.pop(number)
            held = number in used
            packed = used.get(number)
        if not held:
            raise RuntimeError(
                f"what pack_hook returned for {self._where} is no longer held: the same program packed again after "
                f"it was used, or packed more than {self.limit} times without a backward, or the hooks were closed. "
                "Run backward before the next forward of the same jitted function."
            )
        return np.asarray(self._unpack(packed))

    def release(self, used_only: bool) -> None:
        kept: Any = None
        with self._lock:
            dropped, self._used = self._used, {}
            if not used_only:
                kept, self._waiting = self._waiting, {}
        del dropped, kept


def _lane() -> Any:
    """Which of the devices of an enclosing shard_map this is."""
    axes = manual_axes()
    return jax.lax.axis_index(axes) if axes else np.int32(0)
