"""The entries that `backward` and `jvp` returned, each tensor in the shape and dtype that it must have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._jax.types import as_arrays, is_key, typeof, varying_axes
from pylayer_jax._trees.messages import describe
from pylayer_jax._trees.partition import is_tensor, unboxed

__tracebackhide__ = True  # for pytest: errors raised here are about values of the user


def entries_of(result: Any, unpack_list: bool) -> list[Any]:
    """A tuple is several entries, and a list if `unpack_list`; anything else is one entry."""
    return list(result) if isinstance(result, tuple) or (unpack_list and isinstance(result, list)) else [result]


def fit(value: Any, aval: Any, where: str, is_gradient: bool = False) -> Any:
    """The value in the dtype and shape of `aval`, as an array that varies over the same mesh axes; None stays None.

    A gradient may have other axes of length 1, or a shape to which that of `aval` broadcasts.

    Raises:
        ValueError: if it is no array, of another shape, complex in place of real, or if it differs on devices where
            `aval` does not. The message begins with `where`.
    """
    value = unboxed(value)
    if value is None:
        return None
    if not is_tensor(value) or is_key(value):
        raise ValueError(
            f"{where}: expected an array of dtype {aval.dtype} and shape {tuple(aval.shape)}, or None for zero; got "
            f"{describe(value)}."
        )
    (value,) = as_arrays([value])
    if value.shape != aval.shape:
        if is_gradient and [n for n in value.shape if n != 1] == [n for n in aval.shape if n != 1]:
            value = value.reshape(aval.shape)
        elif is_gradient and _broadcasts(aval.shape, value.shape):
            value = _sum_to(value, aval.shape)
        else:
            summed = " (or one that it broadcasts to, which is summed)" if is_gradient else ""
            raise ValueError(f"{where}: expected shape {tuple(aval.shape)}{summed}, got {tuple(value.shape)}.")
    if jnp.iscomplexobj(value) and not jnp.issubdtype(aval.dtype, jnp.complexfloating):
        raise ValueError(
            f"{where}: expected a real array of dtype {aval.dtype}, got dtype {value.dtype}. Return its real part: "
            "jnp.real(...)."
        )
    value = value if value.dtype == aval.dtype else value.astype(aval.dtype)
    wanted, got = varying_axes(aval), varying_axes(typeof(value))
    return value if wanted == got else _match_axes(value, wanted, got, where)


def _match_axes(value: jax.Array, wanted: frozenset[Any], got: frozenset[Any], where: str) -> jax.Array:
    if extra := sorted(map(str, got - wanted)):
        axes = repr(extra[0]) if len(extra) == 1 else repr(tuple(extra))
        raise ValueError(
            f"{where}: expected a value that is the same on all devices of the mesh axis {', '.join(extra)}, but it "
            f"differs from device to device. Sum it before it is returned, with jax.lax.psum(value, {axes}); or keep "
            f"the layer free of the mesh: apply it to pylayer_jax.parallel.copy_to(argument, {axes})."
        )
    return jax.lax.pcast(value, tuple(wanted - got), to="varying")


def _broadcasts(shape: Sequence[Any], target: Sequence[Any]) -> bool:
    # np.broadcast_shapes refuses the symbolic dimensions of jax.export.
    if len(shape) > len(target):
        return False
    return all(a == b or a == 1 for a, b in zip(reversed(shape), reversed(target), strict=False))


def _sum_to(value: jax.Array, shape: Sequence[Any]) -> jax.Array:
    extra = value.ndim - len(shape)
    stretched = [extra + i for i, n in enumerate(shape) if n == 1 and value.shape[extra + i] != 1]
    return jnp.sum(value, axis=(*range(extra), *stretched)).reshape(shape)
