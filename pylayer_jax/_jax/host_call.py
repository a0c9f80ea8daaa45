"""Defines the primitive `host_call`, which calls a Python function on NumPy arrays each time a program runs.

    x:f32[8,3]        = host_call[name=unpack_hook] device token
    y:f32[3] n:u32[2] = host_call[name=Erf.forward] device x

NOTE [host calls]
`io_callback` and `pure_callback` call a function with arrays that JAX is still copying. On CPU, the copies and the
callbacks share a pool of threads, so a program deadlocks if many callbacks with large arrays run at once, as in jax
0.10 with arrays of 16 MiB on 4 devices. So on CPU, functions run in a `buffer_callback`, which reads an array in place.
It does not support several devices: a shard_map calls it on the first one and sends the results to the others.
tests: devices/test_sharded_hooks.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .rule_function import ObjectPrimitive, batch_axis_to_front, merge, payload_of
from .traces import ShapedArray, buffer_callback, io_callback, is_staging, mlir, partial_eval
from .types import as_arrays

host_call_p = ObjectPrimitive("host_call")


class HostFunction(NamedTuple):
    """A function of NumPy arrays that returns a list of NumPy arrays."""

    name: str
    on_host: Callable[..., Sequence[Any]]
    results: Sequence[Any]  # the types of the results
    no_derivative: str  # the message of the error that a derivative raises
    has_x64: bool  # `jax_enable_x64` where the call is traced; where JAX lowers it, the flag may differ
    effects: Any = frozenset()  # of a hook; a layer's methods have none, so JAX may drop or repeat their calls
    takes_batches: bool = False  # whether `on_host` takes arrays with batch axes in front, as `jax.vmap` makes them
    without_last: Callable[..., Sequence[Any]] | None = None  # an `on_host` for code that does not read the last result

    def run(self, *args: Any) -> list[Any]:
        with jax.enable_x64(self.has_x64):
            # JAX passes some constants as NumPy numbers whose dtype no JAX array has.
            return as_arrays(self.on_host(*(np.array(jnp.asarray(x)) for x in args)))

    def lower_rule(self, context: Any, *args: Any) -> Any:
        module = context.module_context
        n_devices = getattr(module.axis_context, "num_devices", 1)  # 1 within a shard_map
        on_cpu = tuple(context.platforms or module.platforms) == ("cpu",)
        call = _by_buffer_callback if on_cpu else _by_jax_callback
        if n_devices > 1 and on_cpu:
            call = functools.partial(_on_first_device, n_devices)
            context = context.replace(avals_in=[ShapedArray(x.shape, x.dtype) for x in context.avals_in])
        with jax.enable_x64(self.has_x64):
            return mlir.lower_fun(functools.partial(call, self), multiple_results=True)(context, *args)

    def abstract_rule(self) -> tuple[Sequence[Any], Any]:
        return self.results, self.effects

    def jvp_rule(self, *_: Any) -> Any:
        raise TypeError(self.no_derivative)

    transpose_rule = jvp_rule

    def batch_rule(self, axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
        is_batched = [d is not None for d in dims]
        batches = [jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True) if d is not None]

        if not batches:  # if the axis has a name, perhaps no operand is batched
            values = host_call_p.bind(*args, payload=self)
            return values, [None] * len(values)
        if self.takes_batches:
            results = [ShapedArray((axis.size, *t.shape), t.dtype) for t in self.results]
            whole = [batch_axis_to_front(axis, x, d) for x, d in zip(args, dims, strict=True)]
            values = host_call_p.bind(*whole, payload=self._replace(results=results))
            return values, [0] * len(values)
        one = lambda xs: host_call_p.bind(*merge(is_batched, xs, args), payload=self)
        # JAX keeps the compiled program of an eager `jax.lax.map` forever, with all objects that the function holds. It
        # deletes the program of a jitted function together with the function.
        if axis.size and not is_staging():
            results = [one([x[i] for x in batches]) for i in range(axis.size)]
            values = [jnp.stack(column) for column in zip(*results, strict=True)]
        else:
            values = jax.jit(lambda xs: jax.lax.map(one, xs))(batches)
        return values, [0] * len(values)


def _by_jax_callback(function: HostFunction, *args: Any) -> list[Any]:
    results = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in function.results]
    return (io_callback if function.effects else jax.pure_callback)(function.on_host, results, *args)


def _by_buffer_callback(function: HostFunction, *args: Any) -> list[Any]:
    dtypes = [x.dtype for x in args]

    def run(_: Any, outs: Any, *buffers: Any) -> None:
        # A hook, which has effects, may keep its arrays, but XLA reuses the buffers after the call. A layer copies.
        own = np.array if function.effects else np.asarray
        arrays = [own(np.asarray(buffer), of) for buffer, of in zip(buffers, dtypes, strict=True)]
        for out, value in zip(outs, function.on_host(*arrays), strict=True):
            np.asarray(out)[...] = value

    # XLA may remove an unused call of a pack hook, as it should: see NOTE [held objects] in `_hooks/host.py`.
    results = [jax.ShapeDtypeStruct(t.shape, _in_bytes(t.dtype)) for t in function.results]
    values = buffer_callback(run, results, has_side_effect=False)(*(x.astype(_in_bytes(x.dtype)) for x in args))
    return [x.astype(t.dtype) for x, t in zip(values, function.results, strict=True)]


def _in_bytes(dtype: Any) -> Any:
    """Return a dtype of at least one byte for the same numbers: XLA would pack several int4 numbers into one byte."""
    if jax.dtypes.itemsize_bits(dtype) >= 8:
        return dtype
    return np.float16 if jnp.issubdtype(dtype, jnp.floating) else np.int8


def _on_first_device(n_devices: int, function: HostFunction, *args: Any) -> list[Any]:
    mesh = jax.sharding.get_abstract_mesh()
    mesh = jax.sharding.AbstractMesh((n_devices,), ("device",)) if mesh.empty else mesh

    def on_each(*args: Any) -> Any:
        zeros = [jnp.zeros(t.shape, _in_bytes(t.dtype)) for t in function.results]
        values = jax.lax.cond(
            jax.lax.axis_index(mesh.axis_names) == 0,
            lambda: [x.astype(z.dtype) for x, z in zip(_by_buffer_callback(function, *args), zeros, strict=True)],
            lambda: zeros,
        )
        return [sent(x).astype(t.dtype) for x, t in zip(values, function.results, strict=True)]

    def sent(value: Any) -> Any:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return jax.lax.psum(value, mesh.axis_names)
        # Sum the bits: a sum of floats would lose the sign of -0.0. tests: devices/test_sharded_hooks.py
        bits = jax.lax.bitcast_convert_type(value, f"uint{8 * value.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(jax.lax.psum(bits, mesh.axis_names), value.dtype)

    whole = jax.sharding.PartitionSpec()
    return jax.shard_map(on_each, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)(*args)


def _drop_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Remove an equation that no code reads, or its last result: a rule of `partial_eval.dce_rules`."""
    equation = rest[-1]  # since jax 0.12, JAX passes a mask of the operands before the equation
    function = payload_of(equation)
    is_read = any(used) or bool(function.effects)
    if is_read and function.without_last is not None and not used[-1]:
        shorter = function._replace(on_host=function.without_last, results=function.results[:-1], without_last=None)
        equation = equation.replace(params=host_call_p.params_of(shorter), outvars=equation.outvars[:-1])
    return [is_read] * len(equation.invars), equation if is_read else None


partial_eval.dce_rules[host_call_p] = _drop_unused
