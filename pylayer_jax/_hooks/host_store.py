"""The results of pack hooks on the host, held for as long as a compiled program may ask for them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np

from pylayer_jax._jax.host_calls import host_call
from pylayer_jax._jax.types import manual_axes, typeof, with_varying_axes
from pylayer_jax._trees.hints import hint

from .host_shards import ShardLayout


class HostStore:
    """Everything that equal pairs of hooks hold for compiled programs.

    Equal pairs share their programs, so that nothing tells for which of them a program packed. What it packed is
    therefore kept until the last one that is still there is closed.
    """

    def __init__(self) -> None:
        self._sites: weakref.WeakSet[PackSite] = weakref.WeakSet()
        self._places: weakref.WeakValueDictionary[Any, Place] = weakref.WeakValueDictionary()
        self._owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by identity

    def add_owner(self, hooks: Any) -> None:
        """Keep everything until `hooks` is closed."""
        with _lock:
            self._owners[id(hooks)] = hooks

    def close(self, hooks: Any) -> None:
        """Drop everything if no other owner is left."""
        with _lock:
            self._owners.pop(id(hooks), None)
            dropped = [] if self._owners else [site.release() for site in self._present_sites()]
        del dropped  # outside the lock, since their finalizers may run any code

    def add(self, site: PackSite) -> None:
        with _lock:
            self._sites.add(site)

    def place(self, key: Any) -> Place:
        """A place that sites of programs share which were compiled one after another from the same line."""
        with _lock:
            # Those of one program differ: none of them packs before the program is compiled.
            places = (self._places.setdefault((key, i), Place()) for i in itertools.count())
            place = next(place for place in places if place.has_packed)
            place.has_packed = False
        return place

    def mark_failed(self, worker: _Worker) -> None:
        """Drop what `worker` has packed when it packs again: an exception has ended its execution."""
        for site in self._present_sites():
            site.mark_failed(worker)

    def _present_sites(self) -> list[PackSite]:
        with _lock:
            return list(self._sites)


# NOTE [collection while a lock is held]
# Python may collect any object at any line, and the finalizer of what a hook packed may run any code, also code that
# closes a pair of hooks. One lock for all stores, which its thread may take again, can wait neither for itself nor for
# another one in turn. What runs while it is held bears that a site is released meanwhile.
_lock = threading.RLock()

_stores: weakref.WeakValueDictionary[Any, HostStore] = weakref.WeakValueDictionary()


def host_store_of(key: Any) -> HostStore:
    with _lock:
        store = _stores.get(key)
        if store is None:
            store = _stores[key] = HostStore()
        return store


class Place:
    """A place in the user's code where programs pack a tensor."""

    def __init__(self) -> None:
        # What was unpacked, by the worker that packed it; the worker that packed last is the last.
        self.used: dict[_Worker, list[tuple[weakref.ref[PackSite], int]]] = {}
        self.has_packed = True  # since it was given to the last site

    def drop_used(self, worker: _Worker) -> list[Any]:
        """What was unpacked, and is held no longer."""
        used = [(site(), number) for site, number in self.used.pop(worker, ())]
        return [site.drop(number) for site, number in used if site is not None]


class PackSite:
    """The site in a program where one tensor is packed: once per execution, or once per iteration of a loop.

    NOTE [host packs]
    XLA hands the tensor to `pack` and keeps a number for it, which it later hands to `unpack`, any number of times:
    once, or more often where JAX moved the packing of an unchanging tensor out of a loop, or not at all, where
    `backward` never runs. Nothing tells that the last one has come, or that an execution is over. What was unpacked at
    least once is therefore dropped when the site packs again, since a new forward pass has begun then.

    Several threads may execute one program at once, and the new forward pass of one of them says nothing about the
    others: on one device, what a thread has packed is dropped only when that thread packs again. XLA may also run
    each execution in a new thread. Therefore tensors that were unpacked are kept only for the `max_workers` threads
    that packed last. On several devices XLA always chooses the threads, but a device runs one execution after
    another: there a device drops what it has packed when it packs again. All of them have to do so alike. If some still
    held what others have dropped, they would wait for the others within a collective, until XLA ends the process.

    A loop in eager mode may compile its body anew each time, and JAX keeps thousands of such programs, none of which
    runs again. There a site also drops what was unpacked in programs that were compiled before from the same place.

    What was never unpacked is kept, up to a limit that is beyond any loop. A program that is collected takes its sites
    with it. That the hooks are collected says nothing: JAX returns from a call before the program has run, so that an
    execution may outlive the last reference to them.
    """

    max_waiting = 2**20  # tensors that are packed and that no backward has asked for yet
    max_workers = 8

    def __init__(
        self,
        store: HostStore,
        place: Place,
        pack: Callable[[Any], Any],
        unpack: Callable[[Any], Any],
        layout: ShardLayout,
        where: str,
    ) -> None:
        self._pack = pack
        self._unpack = unpack
        self._where = where
        self._layout = layout
        self._store = store
        self._next = 0
        self._waiting: dict[int, tuple[_Worker, Any]] = {}  # by number, the oldest first
        self._used: dict[int, tuple[_Worker, Any]] = {}
        self._place = place
        store.add(self)

    # -- in traced code -------------------------------------------------------------------------

    def token(self, tensor: Any) -> jax.Array:
        """The number under which the host keeps a traced tensor; of several devices, one for each of them."""
        return self._layout.number_pieces(self._token, tensor)

    def restored(self, token: Any) -> jax.Array:
        """The tensor of a traced number, or of several."""
        return self._layout.join_pieces(self._piece, token)

    def _token(self, tensor: Any) -> jax.Array:
        device = _device_index()
        token = host_call(self._put, jax.ShapeDtypeStruct((), np.uint32), tensor, device)
        return with_varying_axes(token, typeof(device))

    def _piece(self, token: Any) -> jax.Array:
        return host_call(self._get, self._layout.piece, token)

    # -- on the host ----------------------------------------------------------------------------

    def _put(self, tensor: Any, device: Any) -> np.uint32:
        worker = (threading.get_ident(), _ONE_DEVICE) if device == _ONE_DEVICE else (0, int(device))
        with self._naming("pack_hook", worker):
            packed = self._pack(np.asarray(tensor))
        place = self._place
        with _lock:
            place.has_packed = True
            dropped = place.drop_used(worker)
            place.used[worker] = []
            on_device = [other for other in place.used if other[1] == worker[1]]
            dropped += map(place.drop_used, on_device[: -self.max_workers])
            token, self._next = self._next, (self._next + 1) % 2**32
            self._waiting[token] = worker, packed
            oldest = self._waiting.pop(next(iter(self._waiting))) if len(self._waiting) > self.max_waiting else None
        del dropped, oldest  # outside the lock, since their finalizers may run any code
        return np.uint32(token)

    def _get(self, token: Any) -> np.ndarray:
        number = int(token)
        with _lock:
            self._use(number)
            worker, packed = self._used.get(number, (None, None))
        if worker is None:
            raise RuntimeError(
                f"what pack_hook returned for {self._where} is no longer held: the same thread (on several devices, "
                "any thread) ran the forward of this program, or another loop of this line in eager mode, after it was "
                f"used, more than {self.max_workers} threads share the program, {self.max_waiting} tensors were packed "
                "since without a backward, or the hooks were closed. Run backward before the next forward of the same "
                "jitted function."
            )
        with self._naming("unpack_hook", worker):
            return np.asarray(self._unpack(packed))

    @contextlib.contextmanager
    def _naming(self, hook: str, worker: _Worker) -> Generator[None]:
        """Name the hook and the tensor in an exception. The execution is lost; its packed tensors count as used."""
        try:
            yield
        except Exception as error:
            self._store.mark_failed(worker)
            # XLA hands on the text of one exception, without notes and causes, but with its traceback.
            advice = hint(error, "", hook)
            message = f"{hook} raised {type(error).__name__} for {self._where}: {error}{advice and '. '}{advice}"
            raise RuntimeError(message).with_traceback(error.__traceback__) from error

    def mark_failed(self, worker: _Worker) -> None:
        """Let what `worker` has packed go when it packs again, although no backward asked for it."""
        with _lock:
            for number in [number for number, (owner, _) in self._waiting.items() if owner == worker]:
                self._use(number)

    def _use(self, number: int) -> None:
        if (held := self._waiting.pop(number, None)) is not None:
            self._used[number] = held
            self._place.used.setdefault(held[0], []).append((weakref.ref(self), number))

    def drop(self, number: int) -> Any:
        return self._used.pop(number, None)

    def release(self) -> Any:
        """What is held no longer."""
        with _lock:
            dropped = self._used, self._waiting
            self._used, self._waiting = {}, {}
        return dropped


_Worker = tuple[int, int]  # a thread of the only device; or 0, and one of several devices
_ONE_DEVICE = -1


def _device_index() -> Any:
    """The index of this device among those of the enclosing shard_maps, if there are any."""
    axes = manual_axes()
    return jax.lax.axis_index(axes) if axes else np.int32(_ONE_DEVICE)
