"""The results of pack hooks on the host, held for as long as a compiled program may ask for them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pylayer_jax._jax import io_callback, manual_axes, typeof, with_varying_axes


class HostStore:
    """Everything that equal pairs of hooks hold for compiled programs."""

    def __init__(self) -> None:
        self._sites: weakref.WeakSet[PackSite] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, site: PackSite) -> None:
        with self._lock:
            self._sites.add(site)

    def release(self, used_only: bool = False) -> None:
        """Drop everything; with `used_only`, only the tensors that a `backward` has already asked for."""
        with self._lock:
            sites = list(self._sites)
        for site in sites:
            site.release(used_only)


_stores: weakref.WeakValueDictionary[Any, HostStore] = weakref.WeakValueDictionary()
_stores_lock = threading.Lock()


def host_store_of(key: Any) -> HostStore:
    with _stores_lock:
        store = _stores.get(key)
        if store is None:
            store = _stores[key] = HostStore()
        return store


class PackSite:
    """The site in a program where one tensor is packed: once per execution, or once per iteration of a loop.

    NOTE [host packs]
    XLA hands the tensor to `pack` and keeps a number for it, which it later hands to `unpack`, any number of
    times: once, or more often where JAX moved the packing of an unchanging tensor out of a loop, or not at all,
    where `backward` never runs. Nothing tells that the last one has come. So everything that was unpacked at
    least once is dropped when the site packs again, since then a new forward pass has begun; what was never
    unpacked is kept, up to a limit that no loop should reach. A program that is collected takes its
    sites with it. Devices that run the same program (shard_map) are told apart by their index.
    """

    max_pending = 10_000  # tensors that are packed and that no backward has asked for yet

    def __init__(self, store: HostStore, pack: Callable[[Any], Any], unpack: Callable[[Any], Any], where: str) -> None:
        self._pack = pack
        self._unpack = unpack
        self._where = where
        self._lock = threading.Lock()
        self._next = 0
        self._waiting: dict[int, dict[int, Any]] = {}  # by device index
        self._used: dict[int, dict[int, Any]] = {}
        store.add(self)

    # -- in traced code -------------------------------------------------------------------------

    def token(self, tensor: Any) -> jax.Array:
        """The number under which the host keeps a traced tensor."""
        device = _device_index()
        token = io_callback(self._put, jax.ShapeDtypeStruct((), np.uint32), tensor, device)
        return with_varying_axes(token, typeof(device))

    def restored(self, token: Any, aval: Any) -> jax.Array:
        """The tensor of a traced number."""
        return io_callback(self._get, jax.ShapeDtypeStruct(aval.shape, aval.dtype), token, _device_index())

    # -- on the host ----------------------------------------------------------------------------

    def _put(self, tensor: Any, device: Any) -> np.uint32:
        packed = self._pack(np.asarray(tensor))
        with self._lock:
            dropped = self._used.pop(int(device), None)
            waiting = self._waiting.setdefault(int(device), {})
            token, self._next = self._next, (self._next + 1) % 2**32
            waiting[token] = packed
            oldest = waiting.pop(next(iter(waiting))) if len(waiting) > self.max_pending else None
        del dropped, oldest  # outside the lock, since their finalizers may run any code
        return np.uint32(token)

    def _get(self, token: Any, device: Any) -> np.ndarray:
        number = int(token)
        with self._lock:
            used = self._used.setdefault(int(device), {})
            waiting = self._waiting.get(int(device), {})
            if number in waiting:
                used[number] = waiting.pop(number)
            held = number in used
            packed = used.get(number)
        if not held:
            raise RuntimeError(
                f"what pack_hook returned for {self._where} is no longer held: the same program packed again after "
                f"it was used, or packed more than {self.max_pending} times without a backward, or the hooks were "
                "closed. Run backward before the next forward of the same jitted function."
            )
        return np.asarray(self._unpack(packed))

    def release(self, used_only: bool) -> None:
        kept: Any = None
        with self._lock:
            dropped, self._used = self._used, {}
            if not used_only:
                kept, self._waiting = self._waiting, {}
        del dropped, kept


def _device_index() -> Any:
    """The index of this device among those of the enclosing shard_maps."""
    axes = manual_axes()
    return jax.lax.axis_index(axes) if axes else np.int32(0)
