"""Corrects cotangents where check_vma=False: JAX sums or divides them at the inputs and outputs of the shard_map."""

from __future__ import annotations

from typing import Any

import jax

from ._axes import AxisName, as_input, check_replicated, has_types, map_arrays, mesh_axes
from ._collectives import Collective, CopyTo, ReplicatedInput


def replicated_input(x: Any, axis_name: AxisName) -> Any:
    """An input of the mapped function whose in_specs leave out `axis_name`, for `jax.grad` around the shard_map.

    With check_vma=False JAX adds up the cotangents of all copies of such an input. This layer turns the cotangent of a
    replicated value, of which each device has all, into N equal parts. With check_vma=True it returns x.

    With check_vma=False, nothing tells where it is missing: the gradient of x is N times too large. Nor where
    `jax.grad` is inside of the mapped function, which needs none: the gradient is 1/N of the right one.
    `pylayer_jax.testing.check_parallel` finds both.

    Communicates nothing.

    Args:
        x: an array, or a pytree of arrays, equal on all devices along `axis_name`.
        axis_name: a mesh axis, or a tuple of them.

    Returns:
        x.

    Raises:
        ValueError: if `axis_name` is no mesh axis; with check_vma=True, if x varies over it.
    """
    return _at_border("replicated_input", ReplicatedInput, x, axis_name)


def replicated_output(x: Any, axis_name: AxisName) -> Any:
    """An output of the mapped function whose out_specs leave out `axis_name`, for `jax.grad` around the shard_map.

    With check_vma=False JAX hands each device 1/N of the cotangent of such an output. This layer adds up these parts,
    so that each device has all of it. With check_vma=True it returns x.

    With check_vma=False, nothing tells where it is missing: gradients of what x is computed from are 1/N of the right
    ones. Nor where `jax.grad` is inside of the mapped function, which needs none: they are N times too large.
    `pylayer_jax.testing.check_parallel` finds both.

    Communicates nothing forward, and all-reduces the cotangent backward (with check_vma=False). Apply it to the loss,
    which is a scalar, where you can.

    Args:
        x: an array, or a pytree of arrays, replicated over `axis_name`: equal on all devices along it.
        axis_name: a mesh axis, or a tuple of them.

    Returns:
        x.

    Raises:
        ValueError: if `axis_name` is no mesh axis; with check_vma=True, if x varies over it.
    """
    return _at_border("replicated_output", CopyTo, x, axis_name)


def _at_border(layer: str, collective: type[Collective], x: Any, axis_name: AxisName) -> Any:
    axes = mesh_axes(layer, axis_name)
    typed = has_types(axes)

    def one(name: str, x: Any) -> jax.Array:
        x = as_input(layer, name, x)
        check_replicated(layer, name, x, axes)
        return x if typed else collective.apply(x, axes)

    return map_arrays(one, x)
