"""Mesh axes: their names and sizes, and whether a value varies over them. The errors of all layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.types import manual_axes, typeof, varying_axes
from pylayer_jax._trees.messages import describe
from pylayer_jax._trees.partition import is_tensor

AxisName = str | tuple[str, ...]
Axes = tuple[str, ...]


def mesh_axes(layer: str, axis_name: AxisName) -> Axes:
    """The names as a tuple, each of a mesh axis of the enclosing shard_map (or of an axis that vmap names).

    Raises:
        ValueError: for any other name, and for a name that is given twice.
        TypeError: unless `axis_name` is a string or a tuple of strings.
    """
    names: Any = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"parallel.{layer}: axis_name: expected the name of a mesh axis, or a tuple of names; got {axis_name!r}."
        )
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"parallel.{layer}: axis_name: expected each name once; got {axis_name!r}. Drop {repeated}.")
    for name in names:
        try:
            jax.lax.axis_size(name)
        except NameError:
            known = ", ".join(map(repr, manual_axes()))
            advice = (
                f"Name one of these: {known}."
                if known
                else f"Call the layer in a function that jax.shard_map maps over a mesh with an axis {name!r}."
            )
            raise ValueError(
                f"parallel.{layer}: axis_name: expected a mesh axis of the enclosing jax.shard_map; got {name!r}. "
                f"{advice}"
            ) from None
    return names


def as_input(layer: str, parameter: str, x: Any) -> jax.Array:
    """A tensor or a Python number as a JAX array.

    Raises:
        TypeError: for anything else.
    """
    if not is_tensor(x) and not isinstance(x, (bool, int, float, complex)):
        raise TypeError(f"parallel.{layer}: {parameter}: expected an array; got {describe(x)}.")
    return jnp.asarray(x)


def map_arrays(f: Callable[[str, Any], jax.Array], tree: Any) -> Any:
    """The tree of what `f` makes of each leaf of an argument `x`, and of its name, as in `x['weights'][0]`."""
    return jax.tree_util.tree_map_with_path(lambda path, x: f(f"x{jax.tree_util.keystr(path)}", x), tree)


def accumulated(x: jax.Array) -> jax.Array:
    """x in the dtype of sums over its entries: float32, if its own is narrower."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


# -- kinds of values ------------------------------------------------------------------------------


def varies_over(x: jax.Array, axes: Axes) -> bool:
    """Whether the type of x says that it varies over one of the axes; without check_vma no type does."""
    return not varying_axes(typeof(x)).isdisjoint(axes)


def has_types(axes: Axes) -> bool:
    """Whether types say which values vary over the axes: with check_vma=True."""
    return varies_over(as_varying(np.float32(0), axes), axes)


def as_varying(x: Any, axes: Axes) -> Any:
    """x, typed as varying over the axes. Without check_vma, x as it is."""
    # Not over an axis that vmap names: it has no such types.
    missing = [axis for axis in axes if axis in manual_axes() and axis not in varying_axes(typeof(x))]
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x


def vary_alike(axes: Axes, *arrays: jax.Array) -> list[jax.Array]:
    """The arrays, each typed as varying over all axes over which one of them varies, except for `axes`.

    A layer then returns gradients of the types of its inputs, and JAX adds them up along the axes of the cast.
    """
    union = frozenset[Any]().union(*(varying_axes(typeof(x)) for x in arrays)).difference(axes)
    return [as_varying(x, tuple(union)) for x in arrays]


def check_replicated(layer: str, parameter: str, x: jax.Array, axes: Axes) -> None:
    """Raise ValueError if the type of x says that x varies over one of the axes."""
    found = [axis for axis in axes if varies_over(x, (axis,))]
    if found:
        raise ValueError(
            f"parallel.{layer}: {parameter}: expected a value that is replicated over {axes!r}; got "
            f"{typeof(x).str_short()}, which varies over {found}: each device has a value of its own, where copies of "
            f"one value are needed. If {parameter} is a shard, gather it (parallel.gather_from); if it is a part of a "
            "sum, add it up (parallel.reduce_from); if all copies are equal, leave out the cast (jax.lax.pcast), or "
            "the in_specs, that made it varying."
        )


def as_parts(layer: str, parameter: str, x: Any, axes: Axes, wrong: str, instead: str) -> jax.Array:
    """x as each device's own part of a sum over the axes, typed as varying over them.

    A Python number or a NumPy array is a constant that each device has for itself, such as the size of its own batch:
    N equal parts. An array of JAX that is replicated is one value, which would be counted N times.

    Args:
        wrong: what the result would be, for the message; `{size}` stands for the number of devices.
        instead: what to do with one value.

    Raises:
        ValueError: if the type of x says that x is replicated over one of the axes.
    """
    array = as_input(layer, parameter, x)
    found = [a for a in axes if a in manual_axes() and not varies_over(array, (a,)) and has_types((a,))]
    if found and isinstance(x, jax.Array):
        size = int(jax.lax.axis_size(tuple(found)))
        rest = tuple(axis for axis in axes if axis not in found)
        if rest:
            instead = f"name only the axes over which it varies, {rest!r}"
        raise ValueError(
            f"parallel.{layer}: {parameter}: expected each device's own part, which varies over {axes!r}; got "
            f"{typeof(array).str_short()}, which is replicated over {found}: {size} devices have the same value, "
            f"and {wrong.format(size=size)}. If {parameter} is one value, {instead}. If {size} equal parts are meant, "
            f"pass parallel.copy_to({parameter}, {tuple(found) if len(found) > 1 else found[0]!r})."
        )
    return as_varying(array, axes)


# -- axes of an array -----------------------------------------------------------------------------


def array_axis(layer: str, parameter: str, axis: int, x: jax.Array) -> int:
    """The axis, counted from the front.

    Raises:
        ValueError: if x has no such axis.
        TypeError: unless it is a whole number.
    """
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise TypeError(
            f"parallel.{layer}: {parameter}: expected the number of an axis of x, such as 0 or -1; got {axis!r}. Names "
            "of mesh axes go into axis_name, several of them as a tuple."
        )
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"parallel.{layer}: {parameter}: expected an axis of x, of shape {x.shape}; got {axis}. Give one from "
            f"{-x.ndim} to {x.ndim - 1}."
            if x.ndim
            else f"parallel.{layer}: x: expected an array with an axis to cut or join; got a scalar."
        )
    return axis % x.ndim


def check_divides(layer: str, parameter: str, axis: int, x: jax.Array, axes: Axes) -> None:
    """Raise ValueError unless the devices along the mesh axes can have equal parts of an axis of x."""
    size = int(jax.lax.axis_size(axes))
    if x.shape[axis] % size:
        raise ValueError(
            f"parallel.{layer}: x: expected a multiple of {size} (the devices along {axes!r}) along {parameter}="
            f"{axis}; got shape {x.shape}. Pad x (jnp.pad) to {-(-x.shape[axis] // size) * size} along this axis, or "
            "choose another axis."
        )
