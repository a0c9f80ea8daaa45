"""Hooks that run on the host whenever a program runs, and stores that hold their results for compiled programs.

A pack hook with `host=True` gets a NumPy array. The host holds the result, and the program keeps its number:

    token:uint32[] = host_call[name=pack_hook] x:f32[8,3]
    x:f32[8,3]     = host_call[name=unpack_hook] token

NOTE [host packs]
XLA passes the number to `unpack` once, several times if JAX moved the packing of an unchanging tensor out of a loop, or
never if `backward` does not run. The host cannot know which use is the last. Therefore the host drops a packed value
that was used at least once when the same device packs at the same place again: then a new forward pass has begun. A
value that was never used stays until the hooks are closed or the program is collected. If a compiled `backward` never
reads a tensor (the maximum that softmax subtracts), each step would leave one more value on the host. To avoid this on
CPU, XLA may remove a `pack` whose number is never read. tests: test_host.py

NOTE [host calls]
`io_callback` passes arrays that JAX is still copying. On CPU, the copy needs a thread of the pool in which the
callbacks run, so a program deadlocks if many callbacks with large arrays run at once. Therefore hooks on CPU run in a
`buffer_callback`, which reads an array in place. Other devices have separate threads for callbacks. `buffer_callback`
does not support several devices, so a shard_map calls it on the first device and sends the result to the others.
tests: devices/test_sharded_hooks.py
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._hints import hint
from pylayer_jax._jax.imports import ShapedArray, buffer_callback, io_callback, mlir
from pylayer_jax._jax.masks import merge
from pylayer_jax._jax.primitives import ObjectPrimitive
from pylayer_jax._jax.tracers import is_staging
from pylayer_jax._jax.types import is_set, manual_axes, typeof, with_varying_axes

from .pair import WeakTable

# Python may collect an object at any line, and the finalizer of a packed object may close a pair of hooks. Therefore
# all stores share one reentrant lock, so that no deadlock is possible.
_lock = threading.RLock()


class HostStore:
    """A store of packed values for compiled programs. Equal pairs of hooks share one store."""

    def __init__(self) -> None:
        self.sites: weakref.WeakSet[PackSite] = weakref.WeakSet()
        self._owners = WeakTable()  # equal pairs are different owners

    def add_owner(self, hooks: Any) -> None:
        """Keep all packed values until `hooks` is closed."""
        with _lock:
            self._owners.put(hooks, None)

    def close(self, hooks: Any) -> None:
        """Remove the owner `hooks`. Drop all packed values if no other owner is left."""
        dropped: list[Any] = []
        with _lock:
            self._owners.drop(hooks)
            for site in [] if len(self._owners) else list(self.sites):
                dropped.append(site.held)
                site.held, site.used = {}, {}
        del dropped  # release the values outside the lock, since their finalizers may run any code


_stores: weakref.WeakValueDictionary[Any, HostStore] = weakref.WeakValueDictionary()


def store_of(key: Any) -> HostStore:
    with _lock:
        return _stores.get(key) or _stores.setdefault(key, HostStore())


class PackSite:
    """A place in a program where one tensor is packed, once per execution or once per iteration of a loop."""

    def __init__(
        self, store: HostStore, pack: Callable[[Any], Any], unpack: Callable[[Any], Any], tensor: Any, where: str
    ) -> None:
        self._pack, self._unpack, self._where = pack, unpack, where
        self._type = typeof(tensor)
        self._n_packed = 0
        self.held: dict[int, Any] = {}  # number -> result of the pack hook
        self.used: dict[int, set[int]] = {}  # device -> the numbers that the device has unpacked
        self._store = store  # the site keeps its store alive, so that a later equal pair can close the store
        with _lock:
            store.sites.add(self)

    def token(self, tensor: Any) -> jax.Array:
        """Pack a traced tensor on the host, and return the number of the packed value."""
        return self._call("pack_hook", self._put, jax.ShapeDtypeStruct((), np.uint32), tensor)

    def restored(self, token: Any) -> jax.Array:
        """Unpack the packed value with a traced number on the host, and return the tensor."""
        return self._call("unpack_hook", self._get, self._type, token)

    def _call(self, hook: str, run: Callable[..., Any], result: Any, operand: Any) -> jax.Array:
        axes = manual_axes()  # the axes of the enclosing shard_maps, within which each device packs
        device: Any = jax.lax.axis_index(axes) if axes else np.int32(0)
        aval = ShapedArray(result.shape, result.dtype)
        function = _HostFunction(f"{hook} for {self._where}", run, aval, is_set("enable_x64"))
        (value,) = _host_call_p.bind(operand, device, held=function)
        return with_varying_axes(value, typeof(device))

    def _put(self, tensor: Any, device: Any) -> np.uint32:
        with self._naming("pack_hook", int(device)):
            packed = self._pack(np.require(tensor, requirements="W"))  # a copy, if JAX holds the memory
        with _lock:
            dropped = [self.held.pop(number, None) for number in self.used.pop(int(device), ())]
            number, self._n_packed = self._n_packed, (self._n_packed + 1) % 2**32
            self.held[number] = packed
        del dropped  # release the values outside the lock, since their finalizers may run any code
        return np.uint32(number)

    def _get(self, token: Any, device: Any) -> np.ndarray:
        number = int(token)
        with _lock:
            is_held, packed = number in self.held, self.held.get(number)
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
        """Name the hook and the tensor in an exception. Mark all packed values as used, since the execution failed."""
        try:
            yield
        except Exception as error:
            with _lock:
                self.used.setdefault(device, set()).update(self.held)
            # XLA passes on the text and the traceback of an exception, but not its notes and causes.
            advice = hint(error, "", hook)
            message = f"{hook} raised {type(error).__name__} for {self._where}: {error}{advice and '. '}{advice}"
            raise RuntimeError(message).with_traceback(error.__traceback__) from error


# -- host_call: arrays -> an array, by a function of NumPy arrays --------------------------------------

_host_call_p = ObjectPrimitive("host_call")


class _HostFunction(NamedTuple):
    name: str
    run: Callable[..., Any]
    result: Any  # the type of the result
    has_x64: bool  # whether JAX has numbers of 64 bits where the hook is traced; it may be lowered elsewhere


@functools.cache
def _effects(name: str) -> Any:
    # JAX must not remove, repeat or move the call. The effect that forbids this has no public name.
    effects = jax.make_jaxpr(lambda: io_callback(lambda: None, None))().effects
    kind: Any = type(next(iter(effects)))

    class HostHook(kind):
        def __repr__(self) -> str:  # shown in the error of jax.checkpoint, which allows no effects
            return (
                f"{name}, of a pair with host=True. Put the hooks block around jax.checkpoint and not inside, or use "
                "hooks without host=True"
            )

    return effects | {HostHook()}


def _jvp(*_: Any) -> Any:
    raise TypeError(
        "a derivative goes through a hook that runs on the host, which JAX cannot differentiate. Pass "
        "differentiable=True only for hooks that are traced (without host=True)."
    )


def _batch(function: _HostFunction, axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    is_batched = [d is not None for d in dims]
    batches = [jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True) if d is not None]

    if not batches:  # if the axis has a name, perhaps no operand is batched
        values = _host_call_p.bind(*args, held=function)
        return values, [None] * len(values)

    def one(xs: Sequence[Any]) -> Any:
        return _host_call_p.bind(*merge(is_batched, xs, args), held=function)

    if is_staging():
        values = jax.lax.map(one, batches)
    else:  # JAX would compile a loop, and keep this loop, its function and all objects of the function
        results = [one([x[i] for x in batches]) for i in range(axis.size)]
        values = [jnp.stack(xs) for xs in zip(*results, strict=True)]
    return values, [0] * len(values)


def _by_io_callback(function: _HostFunction, *args: Any) -> list[Any]:
    return [io_callback(function.run, jax.ShapeDtypeStruct(function.result.shape, function.result.dtype), *args)]


def _by_buffer_callback(function: _HostFunction, *args: Any) -> list[Any]:
    result, dtypes = function.result, [x.dtype for x in args]

    def run(_: Any, out: Any, *buffers: Any) -> None:
        # Copy the buffers, since XLA reuses their memory after the call.
        arrays = [np.array(np.asarray(buffer), of) for buffer, of in zip(buffers, dtypes, strict=True)]
        np.asarray(out)[...] = function.run(*arrays)

    # XLA may remove a call without a side effect, which is intended: see NOTE [host packs].
    call = buffer_callback(run, jax.ShapeDtypeStruct(result.shape, _in_bytes(result.dtype)), has_side_effect=False)
    return [call(*(x.astype(_in_bytes(x.dtype)) for x in args)).astype(result.dtype)]


def _in_bytes(dtype: Any) -> Any:
    """Return a dtype of at least one byte for the same numbers. XLA would pack several int4 numbers into one byte."""
    if jax.dtypes.itemsize_bits(dtype) >= 8:
        return dtype
    return np.float16 if jnp.issubdtype(dtype, jnp.floating) else np.int8


def _on_first_device(n_devices: int, function: _HostFunction, *args: Any) -> list[Any]:
    """Run the function on the first of several devices, and send its result to all devices."""
    mesh, result = jax.sharding.get_abstract_mesh(), function.result
    mesh = jax.sharding.AbstractMesh((n_devices,), ("device",)) if mesh.empty else mesh

    def on_each(*args: Any) -> Any:
        zeros = jnp.zeros(result.shape, _in_bytes(result.dtype))
        value = jax.lax.cond(
            jax.lax.axis_index(mesh.axis_names) == 0,
            lambda: _by_buffer_callback(function, *args)[0].astype(zeros.dtype),
            lambda: zeros,
        )
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return jax.lax.psum(value, mesh.axis_names).astype(result.dtype)
        # Sum the bits: a sum of floats would lose the sign of -0.0. tests: devices/test_sharded_hooks.py
        bits = jax.lax.bitcast_convert_type(value, f"uint{8 * value.dtype.itemsize}")
        bits = jax.lax.psum(bits, mesh.axis_names)
        return jax.lax.bitcast_convert_type(bits, value.dtype).astype(result.dtype)

    whole = jax.sharding.PartitionSpec()
    return [jax.shard_map(on_each, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)(*args)]


def _evaluate(function: _HostFunction, *args: Any) -> list[Any]:
    with jax.enable_x64(function.has_x64):
        # Convert arguments to JAX arrays: JAX passes some constants as NumPy numbers of a dtype that JAX arrays lack.
        return [jnp.asarray(function.run(*(np.asarray(jnp.asarray(x)) for x in args)))]


def _lower(function: _HostFunction, context: Any, *args: Any) -> Any:
    module = context.module_context
    n_devices = getattr(module.axis_context, "num_devices", 1)  # the number is 1 within a shard_map
    on_cpu = tuple(context.platforms or module.platforms) == ("cpu",)
    call = _by_buffer_callback if on_cpu else _by_io_callback
    if n_devices > 1 and on_cpu:
        call = functools.partial(_on_first_device, n_devices)
        context = context.replace(avals_in=[ShapedArray(x.shape, x.dtype) for x in context.avals_in])
    with jax.enable_x64(function.has_x64):
        return mlir.lower_fun(functools.partial(call, function), multiple_results=True)(context, *args)


_host_call_p.register(
    evaluate=_evaluate,
    abstract=lambda function, *_: ([function.result], _effects(function.name)),
    jvp=_jvp,
    batch=_batch,
    transpose=_jvp,
    lower=_lower,
)
