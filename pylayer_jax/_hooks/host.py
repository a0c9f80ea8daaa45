"""Runs saved-tensor hooks on the host each time a program runs, and stores the packed values of compiled programs.

A pack hook with `host=True` gets a NumPy array. The host holds its result, and the program keeps a number, the token,
by which the host finds the result:

    token:uint32[] = host_call[name=pack_hook] x:f32[8,3]
    x:f32[8,3]     = host_call[name=unpack_hook] token

NOTE [host packs]
A program usually calls the unpack hook once for each token. JAX may move the packing of a loop-invariant tensor out of
the loop. Then the program calls the unpack hook several times with the same token. The program never calls the unpack
hook if `backward` does not run. The host cannot know whether the program will call the unpack hook with the same token
again. When the same device packs at the same `PackSite` again, a new forward pass has begun. Therefore the host then
drops each older value that this device packed at this `PackSite` and has unpacked at least once. If backward never
unpacks a packed value, the host keeps this value until the hooks are closed or Python deletes the program. Suppose that
a compiled `backward` never reads a packed tensor, such as the maximum that softmax subtracts. Then each run of the
program would leave one more value on the host. To avoid this on CPU, XLA may remove a call of the pack hook whose token
no code reads. tests: hooks/test_host.py
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, Final

import jax
import numpy as np

from pylayer_jax._jax.host_call import HostFunction, host_call_p
from pylayer_jax._jax.traces import ShapedArray, io_callback
from pylayer_jax._jax.types import is_set, manual_axes, typeof, with_varying_axes
from pylayer_jax._messages import hint
from pylayer_jax._trees import WeakTable

# Python may collect an object at any line, and the finalizer of a packed object may close a pair of hooks. Therefore
# all stores share one reentrant lock, so that no deadlock is possible.
_lock = threading.RLock()


class HostStore:
    """A store of packed values for compiled programs. Equal pairs of hooks share one store."""

    def __init__(self) -> None:
        self.sites: weakref.WeakSet[PackSite] = weakref.WeakSet()
        self._owners = WeakTable()  # the hooks that are not closed yet; equal pairs are different owners

    def add_owner(self, hooks: Any) -> None:
        """Keep all packed values until `hooks` is closed."""
        with _lock:
            self._owners.put(hooks, None)

    def close(self, hooks: Any) -> None:
        """Remove the owner `hooks`.

        Drop all packed values of this store if no pair of hooks that uses the store is still open.
        """
        dropped: list[Any] = []
        with _lock:
            self._owners.drop(hooks)
            for site in [] if len(self._owners) else list(self.sites):
                dropped.append(site.payload)
                site.payload, site.used = {}, {}
        del dropped  # release the values outside the lock, since their finalizers may run any code


_stores: weakref.WeakValueDictionary[Any, HostStore] = weakref.WeakValueDictionary()


def store_of(key: Any) -> HostStore:
    """Return the store that all pairs with this key share."""
    with _lock:
        return _stores.get(key) or _stores.setdefault(key, HostStore())


class PackSite:
    """One call of a pack hook on the host, at one place in a compiled program.

    The call runs once per execution of the program, or once per iteration of a loop.
    """

    def __init__(
        self, store: HostStore, pack: Callable[[Any], Any], unpack: Callable[[Any], Any], tensor: Any, where: str
    ) -> None:
        self._pack, self._unpack, self._where = pack, unpack, where
        self._type = typeof(tensor)
        self._n_packed = 0
        self.payload: dict[int, Any] = {}  # token -> result of the pack hook
        self.used: dict[int, set[int]] = {}  # device -> the tokens that the device has unpacked
        self._store = store  # the site keeps its store alive, so that a later equal pair can close the store
        with _lock:
            store.sites.add(self)

    def token(self, tensor: Any) -> jax.Array:
        """Pack a traced tensor on the host, and return the token of the packed value."""
        return self._call("pack_hook", self._put, jax.ShapeDtypeStruct((), np.uint32), tensor)

    def restored(self, token: Any) -> jax.Array:
        """Unpack a packed value on the host, and return the tensor. A traced token says which value."""
        return self._call("unpack_hook", self._get, self._type, token)

    def _call(self, hook: str, run: Callable[..., Any], result: Any, operand: Any) -> jax.Array:
        axes = manual_axes()  # the axes of the enclosing shard_maps, within which each device packs
        device: Any = jax.lax.axis_index(axes) if axes else np.int32(0)
        function = HostFunction(
            f"{hook} for {self._where}", lambda *args: [run(*args)], [ShapedArray(result.shape, result.dtype)],
            _effects(f"{hook} for {self._where}"), _NO_DERIVATIVE, is_set("enable_x64"),
        )  # fmt: skip
        (value,) = host_call_p.bind(operand, device, payload=function)
        return with_varying_axes(value, typeof(device))

    def _put(self, tensor: Any, device: Any) -> np.uint32:
        with self._naming("pack_hook", int(device)):
            packed = self._pack(np.require(tensor, requirements="W"))  # a copy, if JAX holds the memory
        with _lock:
            dropped = [self.payload.pop(number, None) for number in self.used.pop(int(device), ())]
            number, self._n_packed = self._n_packed, (self._n_packed + 1) % 2**32
            self.payload[number] = packed
        del dropped  # release the values outside the lock, since their finalizers may run any code
        return np.uint32(number)

    def _get(self, token: Any, device: Any) -> np.ndarray:
        number = int(token)
        with _lock:
            is_held, packed = number in self.payload, self.payload.get(number)
            self.used.setdefault(int(device), set()).add(number)
        if not is_held:
            raise RuntimeError(
                f"the result of pack_hook for {self._where} is no longer held: the forward of this program ran again "
                "after it was used, or the hooks were closed. Run backward before the next forward of the same jitted "
                "function."
            )
        with self._naming("unpack_hook", int(device)):
            return np.asarray(self._unpack(packed))

    @contextlib.contextmanager
    def _naming(self, hook: str, device: int) -> Generator[None]:
        """Add the names of the hook and of the tensor to an exception.

        If a hook raises an exception, all values that are packed at this place of the program are marked as used. The
        host drops these values when the same device packs a tensor at this place again.
        """
        try:
            yield
        except Exception as error:
            with _lock:
                self.used.setdefault(device, set()).update(self.payload)
            # From an exception in a callback, XLA keeps the text and the traceback, but not the notes and the causes.
            advice = hint(error, "", hook)
            message = f"{hook} raised {type(error).__name__} for {self._where}: {error}{advice and '. '}{advice}"
            raise RuntimeError(message).with_traceback(error.__traceback__) from error


_NO_DERIVATIVE: Final = (
    "a derivative goes through a hook that runs on the host, which JAX cannot differentiate. Pass differentiable=True "
    "only for hooks that are traced (without host=True)."
)


@functools.cache
def _effects(name: str) -> Any:
    # Without an effect, JAX could remove, repeat or move the call in a jaxpr. The effect of `io_callback` forbids this,
    # but has no public name. (On CPU, XLA may still remove the call: see NOTE [host packs].)
    effects = jax.make_jaxpr(lambda: io_callback(lambda: None, None))().effects
    kind: Any = type(next(iter(effects)))

    class HostHook(kind):
        def __repr__(self) -> str:  # shown in the error of jax.checkpoint, which allows no effects
            return (
                f"{name}, of a pair with host=True. Put the hooks block around jax.checkpoint and not inside, or use "
                "hooks without host=True"
            )

    return effects | {HostHook()}
