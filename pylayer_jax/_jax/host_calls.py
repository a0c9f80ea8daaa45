"""host_call: arrays -> an array, by a function of NumPy arrays that runs on the host whenever the program runs.

NOTE [host calls]
`io_callback` hands over arrays that JAX is still copying. On CPU the copy needs a thread of the pool whose threads the
callbacks occupy, so that a program stops for ever if as many of them run at once and the arrays are large. There
`buffer_callback` reads an array in place; other devices have threads of their own for callbacks. Under `jax.vmap`, JAX
refuses a choice between the two by platform. Therefore this is a primitive of its own, lowered to the one or the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .define_primitive import PrimitiveWithObject, register
from .imports import ShapedArray, buffer_callback, io_callback, mlir
from .masks import merge
from .tracers import is_staging
from .types import explicit_sharding

HostFunction = Callable[..., np.ndarray | np.generic]

host_call_p = PrimitiveWithObject("host_call", "function")


def host_call(function: HostFunction, result: jax.ShapeDtypeStruct, *args: Any) -> jax.Array:
    """What a function of NumPy arrays returns on the host, an array of the type of `result`."""
    return host_call_p.bind(*args, function=function, shape=result.shape, dtype=result.dtype)[0]


@functools.cache
def _effects() -> Any:
    # JAX must not leave the call out, repeat it or move it; the effect that says so has no public name.
    return jax.make_jaxpr(lambda: io_callback(lambda: None, None))().effects


def _evaluate(*args: Any, function: HostFunction, shape: tuple[int, ...], dtype: Any) -> list[Any]:
    del shape, dtype
    # JAX hands on some constants as numbers of NumPy, of a dtype that it does not have.
    return [jax.numpy.asarray(function(*(np.asarray(jax.numpy.asarray(x)) for x in args)))]


def _types(*_: Any, function: Any, shape: tuple[int, ...], dtype: Any) -> tuple[list[Any], Any]:
    del function
    return [ShapedArray(shape, dtype)], _effects()


def _jvp(*_: Any, **__: Any) -> Any:
    raise TypeError(
        "a derivative goes through a hook that runs on the host, which JAX cannot differentiate. Pass "
        "differentiable=True only for hooks that are traced (without host=True)."
    )


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    is_mapped = [d is not None for d in dims]
    mapped = [
        _with_whole_first_axis(jax.numpy.moveaxis(x, d, 0)) for x, d in zip(args, dims, strict=True) if d is not None
    ]

    def one(xs: Sequence[Any]) -> Any:
        return host_call_p.bind(*merge(is_mapped, xs, args), **params)

    if is_staging(include_outer=True):
        values = jax.lax.map(one, mapped)
    else:  # a loop would be compiled, which JAX keeps with the function and all that it holds
        results = [one([x[i] for x in mapped]) for i in range(axis.size)]
        values = [jax.numpy.stack(xs) for xs in zip(*results, strict=True)]
    return values, [0] * len(values)


def _with_whole_first_axis(x: Any) -> Any:
    """An array whose first axis is not cut, as `jax.lax.map` demands of explicit axes."""
    sharding = explicit_sharding(x)
    if sharding is None or sharding.spec[0] is None:
        return x
    return jax.sharding.reshard(x, sharding.update(spec=(None, *sharding.spec[1:])))


def _with_io_callback(*args: Any, function: HostFunction, shape: tuple[int, ...], dtype: Any) -> list[Any]:
    return [io_callback(function, jax.ShapeDtypeStruct(shape, dtype), *args)]


def _with_buffers(*args: Any, function: HostFunction, shape: tuple[int, ...], dtype: Any) -> list[Any]:
    dtypes = [x.dtype for x in args]

    def run(_: Any, out: Any, *buffers: Any) -> None:
        # XLA uses the memory again after the call: these are copies.
        arrays = [np.array(np.asarray(buffer), of) for buffer, of in zip(buffers, dtypes, strict=True)]
        np.asarray(out)[...] = function(*arrays)

    call = buffer_callback(run, jax.ShapeDtypeStruct(shape, _in_whole_bytes(dtype)), has_side_effect=True)
    return [call(*(x.astype(_in_whole_bytes(x.dtype)) for x in args)).astype(dtype)]


def _in_whole_bytes(dtype: Any) -> Any:
    """A dtype for the same numbers, of which XLA does not pack several into one byte, as it packs int4 and float4."""
    if jax.dtypes.itemsize_bits(dtype) >= 8:
        return dtype
    return np.float16 if jax.numpy.issubdtype(dtype, jax.numpy.floating) else np.int8


register(
    host_call_p,
    evaluate=_evaluate,
    abstract=_types,
    jvp=_jvp,
    batch=_batch,
    lower=mlir.lower_fun(_with_io_callback, multiple_results=True),
)


def _lower_on_cpu(context: Any, *args: Any, **params: Any) -> Any:
    # Where the compiler divides the program among devices, it has to know that one of them runs the function.
    devices = getattr(context.module_context.axis_context, "num_devices", 1)  # 1 within a shard_map
    call = _with_buffers if devices == 1 else _with_io_callback
    return mlir.lower_fun(call, multiple_results=True)(context, *args, **params)


mlir.register_lowering(host_call_p, host_call_p.with_object(_lower_on_cpu), platform="cpu", cacheable=False)
