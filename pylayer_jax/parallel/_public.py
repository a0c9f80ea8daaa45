"""The collectives as functions of an array and the name of a mesh axis, which they check."""

from __future__ import annotations

from typing import Any

import jax

from ._axes import (
    AxisName,
    array_axis,
    as_input,
    as_parts,
    as_varying,
    check_divides,
    check_replicated,
    map_arrays,
    mesh_axes,
)
from ._collectives import AllGather, AllToAll, CopyTo, GatherFrom, ReduceFrom, ReduceScatter, ScatterTo

SUM_OF_COPIES = "the sum is {size} times as large"


def copy_to(x: Any, axis_name: AxisName) -> Any:
    """From a replicated value to one that varies: x itself, which enters a computation that differs between devices.

    Megatron: `copy_to_tensor_model_parallel_region`. Paddle's fleet: `_c_identity`.

    Communicates nothing forward, and all-reduces the cotangent backward.

    Args:
        x: an array, or a pytree of arrays, replicated over `axis_name`: equal on all devices along it.
        axis_name: a mesh axis, or a tuple of them.

    Returns:
        x, typed as varying over `axis_name` with check_vma=True.

    Raises:
        ValueError: if `axis_name` is no mesh axis; with check_vma=True, if x varies over it.
    """
    axes = mesh_axes("copy_to", axis_name)

    def one(name: str, x: Any) -> jax.Array:
        x = as_input("copy_to", name, x)
        check_replicated("copy_to", name, x, axes)
        return CopyTo.apply(x, axes)

    return map_arrays(one, x)


def reduce_from(x: Any, axis_name: AxisName) -> Any:
    """From each device's own part of a sum to the sum, which is replicated.

    Megatron: `reduce_from_tensor_model_parallel_region`. Paddle's fleet: `_mp_allreduce`.

    All-reduces x forward, and communicates nothing backward: each device's part gets the cotangent of the sum.

    Args:
        x: an array, or a pytree of arrays: the part of each device. A Python number or a NumPy array is a constant of
            each device's own, so that the sum is N times as large.
        axis_name: a mesh axis, or a tuple of them.

    Returns:
        The sum over the devices along `axis_name`; typed as replicated with check_vma=True.

    Raises:
        ValueError: if `axis_name` is no mesh axis; with check_vma=True, if x is an array of JAX that is replicated over
            it: the sum of N copies. (That may be the gradient of replicated weights, which JAX itself adds up.) With
            check_vma=False nothing tells; `pylayer_jax.testing.check_parallel` finds it.
    """
    axes = mesh_axes("reduce_from", axis_name)

    def one(name: str, x: Any) -> jax.Array:
        instead = "such as a sum already, or a gradient that JAX added up, leave out reduce_from"
        return ReduceFrom.apply(as_parts("reduce_from", name, x, axes, SUM_OF_COPIES, instead), axes)

    return map_arrays(one, x)


def scatter_to(x: jax.Array, axis_name: AxisName, axis: int = -1) -> jax.Array:
    """From a replicated value to each device's own part of it, along an axis of the array.

    Megatron: `scatter_to_tensor_model_parallel_region` (axis=-1), `scatter_to_sequence_parallel_region` (axis=0).
    Paddle's fleet: `_c_split` (axis=-1), `ScatterOp` (axis=0).

    Communicates nothing forward, and all-gathers the cotangent backward.

    Args:
        x: an array, replicated over `axis_name`: equal on all devices along it.
        axis_name: a mesh axis, or a tuple of them; N devices.
        axis: the axis of x that is cut into N parts.

    Returns:
        Part i on device i, of 1/N of the length along `axis`; typed as varying with check_vma=True.

    Raises:
        ValueError: if `axis_name` is no mesh axis, x has no such axis, or N does not divide its length; with
            check_vma=True, if x varies over `axis_name`.
    """
    axes, x = mesh_axes("scatter_to", axis_name), as_input("scatter_to", "x", x)
    axis = array_axis("scatter_to", "axis", axis, x)
    check_divides("scatter_to", "axis", axis, x, axes)
    check_replicated("scatter_to", "x", x, axes)
    return ScatterTo.apply(x, axes, axis)


def gather_from(x: jax.Array, axis_name: AxisName, axis: int = -1) -> jax.Array:
    """From each device's own part to the whole array, which is replicated: every device then computes the same with it.

    Megatron: `gather_from_tensor_model_parallel_region` (axis=-1), `gather_from_sequence_parallel_region` with
    `tensor_parallel_output_grad=False` (axis=0). Paddle's fleet: `_c_concat` (axis=-1), `GatherOp` (axis=0).

    All-gathers x forward, and communicates nothing backward: each part gets its own part of the cotangent. If the
    devices go on to compute different things with the result, `all_gather` is the layer to use.

    Args:
        x: an array: the part of each device.
        axis_name: a mesh axis, or a tuple of them; N devices.
        axis: the axis along which the parts are joined.

    Returns:
        The parts in the order of the devices, N times as long along `axis`; typed as replicated with check_vma=True.

    Raises:
        ValueError: if `axis_name` is no mesh axis, or x has no such axis.
    """
    axes, x = mesh_axes("gather_from", axis_name), as_input("gather_from", "x", x)
    return GatherFrom.apply(as_varying(x, axes), axes, array_axis("gather_from", "axis", axis, x))


def all_gather(x: jax.Array, axis_name: AxisName, axis: int = 0) -> jax.Array:
    """From each device's own part to a copy of the whole array for each device, with which each computes its own thing.

    Megatron: `gather_from_sequence_parallel_region` (axis=0), `all_gather_last_dim_from_tensor_parallel_region`
    (axis=-1). Paddle's fleet: `AllGatherOp` (axis=0).

    All-gathers x forward, and reduce-scatters the cotangents of the copies backward.

    Args:
        x: an array: the part of each device.
        axis_name: a mesh axis, or a tuple of them; N devices.
        axis: the axis along which the parts are joined.

    Returns:
        The parts in the order of the devices, N times as long along `axis`; typed as varying with check_vma=True.

    Raises:
        ValueError: if `axis_name` is no mesh axis, or x has no such axis.
    """
    axes, x = mesh_axes("all_gather", axis_name), as_input("all_gather", "x", x)
    return AllGather.apply(as_varying(x, axes), axes, array_axis("all_gather", "axis", axis, x))


def reduce_scatter(x: jax.Array, axis_name: AxisName, axis: int = 0) -> jax.Array:
    """From each device's own part of a sum to a piece of the sum, another piece on each device.

    Megatron: `reduce_scatter_to_sequence_parallel_region` (axis=0), `reduce_scatter_last_dim_to_tensor_parallel_region`
    (axis=-1). Paddle's fleet: `ReduceScatterOp` (axis=0).

    Reduce-scatters x forward, and all-gathers the cotangents of the pieces backward.

    Args:
        x: an array: the part of each device.
        axis_name: a mesh axis, or a tuple of them; N devices.
        axis: the axis along which the sum is cut into N pieces.

    Returns:
        Piece i of the sum on device i, of 1/N of the length along `axis`; typed as varying with check_vma=True.

    Raises:
        ValueError: if `axis_name` is no mesh axis, x has no such axis, or N does not divide its length; with
            check_vma=True, if x is an array of JAX that is replicated over `axis_name`, as in reduce_from.
    """
    axes, x = mesh_axes("reduce_scatter", axis_name), as_input("reduce_scatter", "x", x)
    axis = array_axis("reduce_scatter", "axis", axis, x)
    check_divides("reduce_scatter", "axis", axis, x, axes)
    instead = "such as a sum already, cut it with scatter_to"
    return ReduceScatter.apply(as_parts("reduce_scatter", "x", x, axes, SUM_OF_COPIES, instead), axes, axis)


def all_to_all(x: jax.Array, axis_name: AxisName, split_axis: int = 0, concat_axis: int = 0) -> jax.Array:
    """Each device sends piece i of its array to device i, and joins the pieces that it gets.

    Megatron: `all_to_all` with equal split sizes, `all_to_all_sp2hp` (split_axis=-1, concat_axis=0), `all_to_all_hp2sp`
    (split_axis=0, concat_axis=-1). Paddle: `paddle.distributed.alltoall` with equal sizes.

    An all-to-all forward, and an all-to-all of the cotangents with the axes exchanged backward.

    Args:
        x: an array: that of each device. A replicated x is N equal arrays.
        axis_name: a mesh axis, or a tuple of them; N devices.
        split_axis: the axis along which x is cut into N pieces.
        concat_axis: the axis along which the pieces of all devices are joined, in their order.

    Returns:
        An array of 1/N of the length along `split_axis` and N times the length along `concat_axis` (of the same shape,
        if these are one axis); typed as varying with check_vma=True.

    Raises:
        ValueError: if `axis_name` is no mesh axis, x has no such axes, or N does not divide the length of `split_axis`.
    """
    axes, x = mesh_axes("all_to_all", axis_name), as_input("all_to_all", "x", x)
    split_axis = array_axis("all_to_all", "split_axis", split_axis, x)
    concat_axis = array_axis("all_to_all", "concat_axis", concat_axis, x)
    check_divides("all_to_all", "split_axis", split_axis, x, axes)
    return AllToAll.apply(as_varying(x, axes), axes, split_axis, concat_axis)
