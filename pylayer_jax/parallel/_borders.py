"""The border of a shard_map without check_vma: cotangents as JAX hands them over there, and as the layers read them."""

from __future__ import annotations

from typing import Any

import jax

from ._axes import AxisName, as_input, check_replicated, has_types, mesh_axes
from ._collectives import Collective, CopyTo, ReplicatedInput


def replicated_input(x: Any, axis_name: AxisName) -> Any:
    """An input of the mapped function whose in_specs leave out `axis_name`, for `jax.grad` around the shard_map.

    With check_vma=False JAX adds up the cotangents of all copies of such an input. This layer turns the cotangent of a
    replicated value, of which each device has all, into N equal parts. With check_vma=True it returns x.

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

    def one(x: Any) -> jax.Array:
        x = as_input(layer, "x", x)
        check_replicated(layer, "x", x, axes)
        return x if typed else collective.apply(x, axes)

    return jax.tree.map(one, x)
