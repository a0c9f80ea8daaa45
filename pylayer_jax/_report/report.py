"""`saved_tensors_report`: trace a function, and find the marks of its layers among its residuals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._autodiff.call import residual_tracker
from pylayer_jax._jax import compute_together_p, inner_jaxprs, is_key, is_literal, is_tracer, mesh_axes_of, typeof
from pylayer_jax._trees import is_tensor, split

from .marks import MarkedArray, ResidualTracker, number_of
from .table import SavedTensor, SavedTensorsReport


def saved_tensors_report(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> SavedTensorsReport:
    """List the tensors that the layers in `fun(*args, **kwargs)` save for backward.

    `fun` is a function or a layer. The report traces it and does not run it; arguments may therefore be
    `jax.ShapeDtypeStruct`s. All float arguments are differentiated. Active hooks count, and so do the
    blocks of hooks inside `fun`.

    One row is one tensor that `save_for_backward` or an attribute of ctx keeps: its name (the one in `saved_names` of
    the class, if it has one), its type, its bytes before and after packing, the number of scan iterations that each
    keep one, and the line that applies the layer. If several applications keep the same tensor, it counts once. If
    `jax.checkpoint` computes a tensor again, it counts 0 bytes.

    Bytes are those of the whole array, and those on each device as far as the sharding is known while `fun` is traced:
    from the type of an array (explicit axes), from an argument that is saved as it is, and inside `jax.shard_map`,
    where the type in a row is that of one device. With automatic axes, the compiler chooses the shardings of
    intermediates after the trace: such a tensor counts in full on each device, so that the bytes per device are an
    upper bound.

    Raises:
        TypeError: if no argument holds a float array.
    """

    def is_argument(leaf: object) -> bool:
        return is_tensor(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)

    fun = getattr(fun, "apply", fun) if isinstance(fun, type) else fun
    tensors, skeleton = split((args, kwargs), is_argument)
    differentiated = [i for i, t in enumerate(tensors) if jnp.issubdtype(t.dtype, jnp.inexact)]
    if not differentiated:
        raise TypeError("saved_tensors_report: none of the arguments holds a float array, so that nothing is saved.")

    def residuals(*tensors: Any) -> list[Any]:
        def run(*values: Any) -> list[Any]:
            filled = list(tensors)
            for i, value in zip(differentiated, values, strict=True):
                filled[i] = value
            args, kwargs = skeleton.fill(filled)
            return split(fun(*args, **kwargs))[0]

        _, pullback = jax.vjp(run, *(tensors[i] for i in differentiated))
        return jax.tree_util.tree_leaves(pullback)

    tracker = ResidualTracker()
    with residual_tracker(tracker):
        jaxpr = jax.make_jaxpr(residuals)(*tensors).jaxpr
    by_mark: dict[int, list[_Residual]] = {}
    producers: dict[int, Any] = {}
    for atom in jaxpr.outvars:
        residual = _resolve(jaxpr, atom, producers)
        if residual.mark is not None:
            by_mark.setdefault(residual.mark, []).append(residual)
    arguments = dict(zip(jaxpr.invars, tensors, strict=True))
    for residual in (r for found in by_mark.values() for r in found if r.root in arguments):
        residual.shape_on_device = _shape_on_device(arguments[residual.root])
    return SavedTensorsReport(_rows(tracker.marked, by_mark, set(arguments)))


# -- marks in the jaxpr ---------------------------------------------------------------------------


@dataclasses.dataclass
class _Residual:
    """A residual of the function, followed back to its mark."""

    mark: int | None
    aval: Any  # of the marked array
    shape_on_device: tuple[int, ...]  # of the part of the marked array on one device
    times: int
    shards: int  # the devices of a shard_map that each keep another one
    root: Any  # the variable that was copied or named, with the calls around it; the same array has the same root


# The output of these primitives is their input, and needs no memory of its own.
_PASS_ON = frozenset({"copy", "name", "optimization_barrier", compute_together_p.name, "reduce_precision"})


def _resolve(jaxpr: Any, atom: Any, producers: dict[int, Any]) -> _Residual:
    """Follow a value back to its mark, also into loops and calls. `producers` caches the equations of each jaxpr."""
    here = producers.get(id(jaxpr))
    if here is None:
        here = producers[id(jaxpr)] = {v: (e, i) for e in jaxpr.eqns for i, v in enumerate(e.outvars)}
    mark, aval = None, atom.aval
    while not is_literal(atom) and atom in here:
        equation, i = here[atom]
        name = _checkpoint_name(equation)
        if mark is None and (mark := number_of(name)) is not None:
            aval = atom.aval
        # A scalar leaves a shard_map as an array with one entry per device.
        from_scalar = mark is None and equation.primitive.name == "broadcast_in_dim" and atom.aval.size == 1
        if name or equation.primitive.name in _PASS_ON or from_scalar:
            atom = equation.invars[i]
            continue
        inner = inner_jaxprs(equation.params)
        if mark is None and inner:
            for body in inner:
                if i < len(body.outvars):
                    found = _resolve(body, body.outvars[i], producers)
                    # A scan stacks the residuals of its iterations; its carry has the same shape as in its body.
                    stacked = len(atom.aval.shape) > len(body.outvars[i].aval.shape)
                    if found.mark is not None:
                        times, shards, inside = found.times, found.shards, body.outvars[i].aval
                        if equation.primitive.name == "shard_map":
                            shards *= atom.aval.size // max(inside.size, 1)
                        elif stacked:
                            times *= atom.aval.shape[0]
                        # A jitted function that is called twice has one jaxpr: the equation tells the calls apart.
                        root = (id(equation), found.root)
                        return dataclasses.replace(found, times=times, shards=shards, root=root)
        break
    return _Residual(mark, aval, _shape_on_device(aval), 1, 1, None if is_literal(atom) else atom)


def _checkpoint_name(equation: Any) -> str:
    # With JAX_REMAT3, `checkpoint_name` is a primitive of another kind, which holds its name in `_prim`.
    name = equation.params.get("name", "") if equation.primitive.name == "name" else ""
    params = getattr(equation.params.get("_prim"), "params", {})
    return name or (params.get("name", "") if isinstance(params, dict) else "")


# -- rows -----------------------------------------------------------------------------------------


def _rows(marked: list[MarkedArray], by_mark: dict[int, list[_Residual]], arguments: set[Any]) -> list[SavedTensor]:
    seen: dict[Any, str] = {}
    groups: dict[tuple[int, str], list[int]] = {}
    for i, array in enumerate(marked):
        groups.setdefault((array.application, array.name), []).append(i)
    return [_row([(marked[i], by_mark.get(i, [])) for i in group], seen, arguments) for group in groups.values()]


def _row(arrays: list[tuple[MarkedArray, list[_Residual]]], seen: dict[Any, str], arguments: set[Any]) -> SavedTensor:
    """The row of one tensor, from the arrays that it was packed to. `seen` has a name for each root counted so far."""
    first = arrays[0][0]
    shape, shape_on_device = first.tensor_type.shape, _shape_on_device(first.tensor_type)
    times, examples, examples_on_device, shards, packed, packed_on_device = 0, 1, 1, 1, 0, 0
    note = "" if any(residuals for _, residuals in arrays) else "computed again, or not needed"
    for array, residuals in arrays:
        new = [residual for residual in residuals if residual.root not in seen]
        if residuals and not new:
            note = f"the same as {seen[residuals[0].root]}"
        for residual in new:
            seen[residual.root] = f"{first.layer} {first.application}, {first.name}"
            is_argument, is_left_out = residual.root in arguments, array.is_left_out
            notes = ("an argument of the function", is_argument), ("not packed, by `only`", is_left_out)
            note = ", ".join(text for text, applies in notes if applies)
            packed += residual.times * residual.shards * _bytes(residual.aval, residual.aval.shape)
            packed_on_device += residual.times * _bytes(residual.aval, residual.shape_on_device)
            shards = max(shards, residual.shards)
            if _same_type(array.array_type, first.tensor_type):
                # Not packed: the shape includes the examples of a vmap.
                shape, shape_on_device = residual.aval.shape, residual.shape_on_device
            else:
                each, each_on_device = array.array_type.size, math.prod(_shape_on_device(array.array_type))
                examples = residual.aval.size // max(each, 1)
                examples_on_device = math.prod(residual.shape_on_device) // max(each_on_device, 1)
        times = max(times, sum(residual.times for residual in new))
    return SavedTensor(
        layer=first.layer,
        application=first.application,
        name=first.name,
        shape=tuple(shape),
        dtype=str(first.tensor_type.dtype),
        times=max(times, 1) * examples,
        bytes=times * examples * shards * _bytes(first.tensor_type, shape),
        bytes_per_device=times * examples_on_device * _bytes(first.tensor_type, shape_on_device),
        packed_bytes=packed,
        packed_bytes_per_device=packed_on_device,
        source=first.source,
        note=note,
    )


def _same_type(array: Any, tensor: Any) -> bool:
    return array.shape == tensor.shape and array.dtype == tensor.dtype


def _bytes(aval: Any, shape: tuple[int, ...]) -> int:
    """The bytes of an array of this shape, with the dtype of `aval`."""
    if is_key(aval):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, aval.dtype)).size * 4
    return math.prod(shape) * aval.dtype.itemsize


def _shape_on_device(array: Any) -> tuple[int, ...]:
    """The shape of the part on one device, by the sharding of an array or of a type."""
    shape, sharding = tuple(array.shape), getattr(typeof(array) if is_tracer(array) else array, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return shape if sharding is None else sharding.shard_shape(shape)
    # `shard_shape` refuses the type of an array inside of a shard_map.
    cuts = [math.prod(sharding.mesh.shape[name] for name in axes) for axes in mesh_axes_of(sharding, len(shape))]
    return tuple(-(-length // cut) for length, cut in zip(shape, cuts, strict=True))
