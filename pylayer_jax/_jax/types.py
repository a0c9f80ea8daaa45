"""Functions for types of arrays: shape, dtype, weak type, sharding, and whether an array can have a tangent."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from .traces import ShapedArray, Tracer, ad, convert_element_type_p, primal_dtype_to_tangent_dtype, unmapped_aval

typeof = jax.typeof


def types_of(values: Sequence[Any]) -> list[Any]:
    """Return `[typeof(x) for x in values]`, at a third of the Python calls: a tracer has its type at hand."""
    return [x.aval if isinstance(x, Tracer) else typeof(x) for x in values]


_NUMERIC_KINDS: Final = frozenset("biufcV")  # "V" is the kind of bfloat16, float8 and int4 in ml_dtypes
_NOT_IN_JAX: Final = frozenset((np.void, np.record, np.longdouble, np.clongdouble))  # np.void: structured arrays


def tangent_type(aval: Any) -> Any:
    return aval.to_tangent_aval()


def has_tangent(value: Any) -> bool:
    """Return whether a value or type can have a nonzero tangent, as floating-point and complex numbers can."""
    return _dtype_has_tangent(getattr(value, "dtype", jax.dtypes.float0))  # a token has none


@functools.cache
def _dtype_has_tangent(dtype: Any) -> bool:
    # JAX gives tangents of integers, bools and PRNG keys the dtype float0.
    return primal_dtype_to_tangent_dtype(dtype) != jax.dtypes.float0


def is_nan_reported() -> bool:
    return jax.debug_nans.value or jax.debug_infs.value


def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that runs `function`, which is not user code, without JAX's checks for NaN and infinity."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        if not is_nan_reported():
            return function(*args)
        with jax.debug_nans(False), jax.debug_infs(False):
            return function(*args)

    return run


def is_array(value: object) -> bool:
    # The cheap tests come first: `isinstance(value, jax.Array)` takes six times as long for a tracer.
    return (isinstance(value, Tracer) and type(value.aval) is ShapedArray) or isinstance(value, jax.Array)


def is_ref(value: object) -> bool:
    if value is None or callable(value) or isinstance(value, (int, float, str)) or is_array(value):
        return False
    return isinstance(value, jax.Ref)  # slow


def is_tensor(leaf: object) -> bool:
    """Return whether a leaf is a `jax.Array`, or a NumPy array or scalar with a dtype that JAX has."""
    if is_array(leaf):
        return True
    is_numpy = isinstance(leaf, (np.ndarray, np.generic))
    return is_numpy and leaf.dtype.kind in _NUMERIC_KINDS and leaf.dtype.type not in _NOT_IN_JAX


def is_tensor_or_ref(leaf: object) -> bool:
    return is_tensor(leaf) or is_ref(leaf)


def unboxed(value: Any) -> Any:
    """Return the array in a box such as `flax.nnx.Param`, or `value` itself."""
    is_box = not is_array(value) and hasattr(type(value), "__jax_array__")
    return value.__jax_array__() if is_box else value


def is_key(value: Any) -> bool:
    # This is also True for an extended dtype that a later JAX may add.
    return not isinstance(value.dtype, np.dtype) and jnp.issubdtype(value.dtype, jax.dtypes.extended)


def zeros_of(aval: Any) -> jax.Array:
    """Return zeros with the sharding, varying axes and memory space of `aval`, which `jnp.zeros` would lose."""
    zeros = ad.instantiate_zeros(ad.Zero(aval))  # on the device
    return zeros if typeof(zeros).memory_space == aval.memory_space else jax.device_put(zeros, aval.memory_space)


def full_tangent(tangent: Any, aval: Any) -> Any:
    """Return the tangent or cotangent that JAX's functions expect for a value of type `aval`."""
    if not has_tangent(aval):
        return np.zeros(aval.shape, jax.dtypes.float0)
    return zeros_of(tangent_type(aval)) if tangent is None else tangent


def number_as(value: Any, aval: Any) -> Any:
    """Convert a Python number, which a vjp function passes to the bwd rule as it is, to the dtype of `aval`."""
    return jnp.asarray(value, aval.dtype) if isinstance(value, (bool, int, float, complex)) else value


def as_arrays(tensors: Sequence[Any]) -> list[Any]:
    return [x if isinstance(x, (Tracer, jax.Array, jax.Ref)) else _as_jax_array(x) for x in tensors]


def _as_jax_array(value: Any) -> jax.Array:
    # Copy: JAX may still read the array when the caller already changes it. It reads only the native byte order.
    native = np.asarray(value).dtype.newbyteorder("=")
    array = jnp.asarray(np.array(value, native))
    # `jax.grad(f)(2.0)` passes a number, whose type is weak. tests: test_a_number_stays_weakly_typed
    return with_type(array, typeof(value)) if isinstance(value, (int, float, complex)) else array


def batched_type(axis: Any, aval: Any) -> Any:
    mapped = unmapped_aval(axis.size, 0, aval, axis.explicit_mesh_axis)
    # Within a shard_map, the devices along each mesh axis in `spmd_axis_name` hold different examples, so the batch
    # varies over these axes. The scalar only serves to read the `manual_axis_type`.
    own = [name for name in axis.spmd_name or () if name in manual_axes() and name not in varying_axes(aval)]
    if not own:
        return mapped
    varying = jax.lax.pcast(np.float32(0), (*own, *varying_axes(aval)), to="varying")
    return mapped.update(manual_axis_type=typeof(varying).manual_axis_type)  # unchanged without check_vma


# -- meshes ----------------------------------------------------------------------------------------


def varying_axes(aval: Any) -> frozenset[Any]:
    """Return the mesh axes of an enclosing shard_map over which a value varies between devices."""
    return aval.manual_axis_type.varying


def varying_over(axes: frozenset[Any], value: jax.Array) -> jax.Array:
    missing = axes - varying_axes(typeof(value))
    return jax.lax.pcast(value, tuple(missing), to="varying") if missing else value


def manual_axes() -> tuple[Any, ...]:
    """Return the mesh axes of the enclosing shard_maps, along which each device has its own shard."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def explicit_sharding(value: Any) -> Any:
    """Return the sharding of a value if its type contains it (AxisType.Explicit), else None."""
    sharding = typeof(value).sharding
    return sharding if any(axis is not None for axis in sharding.spec) else None


def shard_counts(value: Any) -> list[int]:
    if not isinstance(value, Tracer):
        return [n // max(1, m) for n, m in zip(value.shape, value.sharding.shard_shape(value.shape), strict=True)]
    sharding = typeof(value).sharding
    mesh = sharding.mesh
    sizes = zip(mesh.shape.values(), mesh.axis_types, strict=True)
    automatic = [size for size, kind in sizes if kind == jax.sharding.AxisType.Auto]

    def count(length: Any, axes: Any) -> int:  # `axes` is a mesh axis, a tuple of them, or None
        if axes:
            return math.prod(mesh.shape[name] for name in ((axes,) if isinstance(axes, str) else axes))
        # The compiler may shard an automatic axis over several mesh axes. `jax.export` makes symbolic lengths.
        return math.gcd(length, math.prod(automatic)) if isinstance(length, int) else 1

    axes_of = (*sharding.spec, *[None] * (value.ndim - len(sharding.spec)))
    return [count(n, axes) for n, axes in zip(value.shape, axes_of, strict=True)]


def with_type(value: jax.Array, aval: Any) -> jax.Array:
    """Return `value` with the weak type, the varying axes and the explicit sharding of the type `aval`."""
    if typeof(value) == aval:
        return value
    value = varying_over(varying_axes(aval), value)
    if isinstance(value, Tracer) and typeof(value).sharding != aval.sharding and not aval.sharding.mesh.empty:
        value = jax.sharding.reshard(value, aval.sharding)
    if typeof(value).weak_type != aval.weak_type:  # no public function sets the weak type of an array
        value = convert_element_type_p.bind(value, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None)
    return value
