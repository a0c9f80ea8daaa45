"""Holds objects on the host for compiled programs: results of host hooks, and contexts of layers of NumPy.

The host holds the result of a pack hook with `host=True`, and the program keeps a number to find it, the token:

    token:uint32[] = host_call[name=pack_hook] x:f32[8,3]
    x:f32[8,3]     = host_call[name=unpack_hook] token

The token 0 comes from the gradient of a batched `cond`: JAX hands zeros to the branch that an example did not take.

NOTE [held objects]
A program reads an object once; several times if JAX moved the packing of a loop-invariant tensor out of the loop; or
never, if `backward` does not run. So the host drops an object only in a new forward pass: when the same device puts an
object at the same slot again, those that it has read there go. One that was never read stays until the hooks are
closed, or Python deletes the program; the slot of a layer drops the oldest beyond its limit. After an exception in a
hook, the program reads nothing more of this run, so all objects of the store count as read. A tensor that `backward`
never reads, such as the maximum that softmax subtracts, would leave one more object in each run. So on CPU, XLA may
remove a call of the pack hook whose token no code reads.
tests: hooks/test_host.py
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np

from pylayer_jax._jax.host_call import HostFunction, host_call_p
from pylayer_jax._jax.traces import ShapedArray, io_callback
from pylayer_jax._jax.types import manual_axes, typeof, varying_axes, varying_over
from pylayer_jax._messages import hint
from pylayer_jax._trees import WeakTable

# Python may collect an object at any line, and the finalizer of a held object may close a pair of hooks. One reentrant
# lock for all stores rules out a deadlock.
_lock = threading.RLock()
_counter = itertools.count()  # of all slots, so that no slot finds the object of another


def new_number() -> int:
    """Return a new number from 1 to 2**32 - 1, which fits into a token."""
    return next(_counter) % (2**32 - 1) + 1


class HostStore:
    """The slots of equal pairs of hooks, or of all layers of NumPy."""

    def __init__(self) -> None:
        self.slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._owners = WeakTable()  # the hooks that are not closed yet; equal pairs are different owners

    def add_owner(self, hooks: Any) -> None:
        with _lock:
            self._owners.put(hooks, None)

    def close(self, hooks: Any) -> None:
        dropped: list[Any] = []
        with _lock:
            self._owners.drop(hooks)
            slots = () if len(self._owners) else list(self.slots)
            for slot in slots:
                dropped.append(slot.objects)
                slot.objects = {}
        del dropped  # release the objects outside the lock, since their finalizers may run any code

    def mark_as_read(self, device: int) -> None:
        """Let each slot drop its objects when `device` puts an object there again."""
        with _lock:
            for slot in list(self.slots):
                slot.may_drop.setdefault(device, set()).update(slot.objects)


_stores: weakref.WeakValueDictionary[Any, HostStore] = weakref.WeakValueDictionary()


def store_of(key: Any) -> HostStore:
    with _lock:
        return _stores.get(key) or _stores.setdefault(key, HostStore())


class Slot:
    """A place in a program with its last object, and others up to `limit` bytes in all: see NOTE [held objects]."""

    def __init__(self, store: HostStore, limit: float = math.inf) -> None:
        self.objects: dict[int, tuple[Any, int]] = {}  # number -> (object, its size), the oldest first
        self.may_drop: dict[int, set[int]] = {}  # device -> the numbers of objects that it will not read again
        self.store = store  # kept alive, so that a later equal pair can close the store
        self._limit = limit
        with _lock:
            store.slots.add(self)

    def put(self, number: int, value: Any, device: int, size: int = 0) -> None:
        with _lock:
            dropped = [self.objects.pop(number, None) for number in self.may_drop.pop(device, ())]
            self.objects[number] = value, size
            excess = sum(size for _, size in self.objects.values()) - self._limit
            while excess > 0 and len(self.objects) > 1:
                oldest = self.objects.pop(next(iter(self.objects)))
                excess -= oldest[1]
                dropped.append(oldest)
        del dropped  # release the objects outside the lock, since their finalizers may run any code

    def get(self, number: int, device: int) -> Any:
        with _lock:
            self.may_drop.setdefault(device, set()).add(number)
            return self.objects[number][0]


def call_on_host(
    store: HostStore,
    name: str,
    run: Callable[..., Sequence[Any]],
    results: Sequence[Any],
    operands: Sequence[Any],
    without_last: Callable[..., Sequence[Any]] | None = None,
    **options: Any,
) -> tuple[list[Any], Any]:
    """Bind a `host_call` of `run(device, *operands)`. Return its results, and the index of the device."""

    def named(run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        def run_or_explain(*operands: Any) -> Sequence[Any]:
            device, *arrays = map(np.asarray, operands)  # `pure_callback` passes JAX arrays
            try:
                return run(device, *arrays)
            except Exception as error:
                store.mark_as_read(int(np.max(device, initial=0)))
                # From an exception in a callback, XLA keeps the text and the traceback, but not the notes and causes.
                advice = hint(error, *name.split(" ")[0].rpartition(".")[::2])
                message = f"{name} raised {type(error).__name__}: {error}{advice and '. '}{advice}"
                raise RuntimeError(message).with_traceback(error.__traceback__) from error

        return run_or_explain

    axes = manual_axes()
    device: Any = jax.lax.axis_index(axes) if axes else np.int32(0)
    types = [ShapedArray(t.shape, t.dtype) for t in results]
    options["without_last"] = without_last and named(without_last)
    function = HostFunction(name, named(run), types, has_x64=jax.enable_x64.value, **options)
    return host_call_p.bind(device, *operands, payload=function), device


def pack_on_host(
    store: HostStore, pack: Callable[[Any], Any], unpack: Callable[[Any], Any], tensor: Any, where: str
) -> tuple[jax.Array, Callable[[Any], jax.Array]]:
    """Pack a tensor of a compiled program on the host. Return a token, and a function that unpacks the tensor of it."""
    expected, slot = typeof(tensor), Slot(store)

    def call(hook: str, run: Callable[..., Any], result: Any, operand: Any) -> jax.Array:
        name = f"{hook} for {where}"
        (value,), device = call_on_host(
            store, name, run, [result], [operand], effects=_effects(name), no_derivative=_NO_DERIVATIVE
        )
        return varying_over(varying_axes(typeof(device)), value)

    def put(device: Any, array: Any) -> list[Any]:
        token = new_number()
        slot.put(token, pack(np.require(array, requirements="W")), int(device))  # a copy, if JAX holds the memory
        return [np.uint32(token)]

    def get(device: Any, token: Any) -> list[Any]:
        if not token:
            return [np.zeros(expected.shape, expected.dtype)]
        try:
            found = slot.get(int(token), int(device))
        except KeyError:
            raise RuntimeError(
                "the result of pack_hook is no longer held: the forward of this program ran again after it was used, "
                "or the hooks were closed. Run backward before the next forward of the same jitted function."
            ) from None
        return [np.asarray(unpack(found))]

    token = call("pack_hook", put, jax.ShapeDtypeStruct((), np.uint32), tensor)
    return token, lambda token: call("unpack_hook", get, expected, token)


_NO_DERIVATIVE: Final = (
    "a derivative goes through a hook that runs on the host, which JAX cannot differentiate. Pass differentiable=True "
    "only for hooks that are traced (without host=True)."
)


@functools.cache
def _effects(name: str) -> Any:
    # Without an effect, JAX could remove or repeat the call in a jaxpr. The effect of `io_callback` forbids this, but
    # has no public name. (On CPU, XLA may still remove the call: see NOTE [held objects].)
    effects = jax.make_jaxpr(lambda: io_callback(lambda: None, None))().effects
    kind: Any = type(next(iter(effects)))

    class HostHook(kind):
        def __repr__(self) -> str:  # shown in the error of jax.checkpoint, which allows no effects
            return (
                f"{name}, of a pair with host=True. Put the hooks block around jax.checkpoint and not inside, or use "
                "hooks without host=True"
            )

    return effects | {HostHook()}
