"""`saved_tensors_report`: trace `jax.vjp` of a function, and tell of each residual where it comes from."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._jax.imports import ShapedArray
from pylayer_jax._jax.run_log import is_run_number
from pylayer_jax._jax.types import is_key, is_ref, mesh_axes_of
from pylayer_jax._trees.messages import describe
from pylayer_jax._trees.partition import is_tensor, split

from .provenance import Value, Values, source_of
from .table import SavedTensor, SavedTensorsReport


def saved_tensors_report(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> SavedTensorsReport:
    """List everything that `jax.vjp` of `fun(*args, **kwargs)` would hold for backward.

    `fun` is a function or a layer. The report traces `jax.vjp` of it and does not run it; arguments may therefore be
    `jax.ShapeDtypeStruct`s. All float arguments are differentiated. Active hooks count, and so do the blocks of hooks
    inside `fun`, each as in a compiled program.

    A row is a tensor that is kept, or several that differ only in their values: what a layer saves, by its class and
    name (the one in `saved_names` of the class, if it has one); what a plain operation computes and a derivative keeps,
    by the name of the operation; an input of `fun`, which exists anyway. What `jax.checkpoint` computes again is not
    kept, and has no row. If several layers keep the same tensor, it has one row.

    Bytes are those of the whole array, and those on each device as far as the sharding is known while `fun` is traced:
    from the type of an array (explicit axes), from an argument that is kept as it is, and inside `jax.shard_map`, where
    the type in a row is that of one device. With automatic axes, the compiler chooses the shardings of intermediates
    after the trace: their bytes per device, and the total of them, are None. Of what hooks keep on the host
    (`host=True`), only the number by which a program finds it counts.

    Raises:
        TypeError: if `fun` is no function, or if no argument holds a float array.
    """
    if not callable(fun):
        raise TypeError(
            f"saved_tensors_report: expected a function or a layer, got {describe(fun)}. Pass the function and its "
            "arguments, as in saved_tensors_report(Tanh.apply, x) for Tanh.apply(x)."
        )

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
        return [x for x in jax.tree_util.tree_leaves(pullback) if not is_ref(x)]  # its state is kept anyway

    jaxpr = jax.make_jaxpr(residuals)(*tensors).jaxpr
    values = Values()
    names = [_name_of_input(path) for path in skeleton.tensor_paths()]
    inputs = [values.new(v, "input", name) for v, name in zip(jaxpr.invars, names, strict=True)]
    kept = [v for v in dict.fromkeys(values.outputs(jaxpr, inputs)) if not is_run_number(v.aval)]
    packed: dict[Value, list[Value]] = {}  # by tensor, the arrays that it was packed to, or the tensor itself
    for array in kept:
        packed.setdefault(array.unpacked(), []).append(array)
    arguments = dict(zip(inputs, tensors, strict=True))
    rows = [_row(tensor, packed[tensor], arguments) for tensor in sorted(packed, key=lambda v: v.number)]
    return SavedTensorsReport([row.multiplied(count) for row, count in collections.Counter(rows).items()])


def _name_of_input(path: str) -> str:
    return path.replace("[0]", "args", 1) if path.startswith("[0]") else path.replace("[1]", "kwargs", 1)


def _row(tensor: Value, arrays: list[Value], arguments: dict[Value, Any]) -> SavedTensor:
    """The row of one tensor, from the arrays that it was packed to. The sharding of an argument is known."""
    one, times_of_one = tensor.innermost()
    times, shards = 1, 1
    for array in arrays:
        each, iterations = array.innermost()
        times = max(times, iterations)
        shards = max(shards, array.aval.size // max(1, iterations * each.aval.size))
    on_device = _sum_on_device((i, _bytes_on_device(arguments.get(v, v.aval))) for v, i in map(Value.innermost, arrays))
    kept, is_packed = sum(_bytes(array.aval) for array in arrays), arrays != [tensor]
    steps = range(2, max(v.pack_step() for v in arrays) + 1)
    between = [{v for array in arrays for v in array.sources(step) if v.kind != "constant"} for step in steps]
    origin, layers = list(tensor.chain())[-1], [found for value in tensor.chain() for found in value.layers]
    layer, name, equations = layers[0] if layers else ("", origin.name, origin.equations)
    is_input, is_from_input = not is_packed and tensor.kind == "input", origin.kind == "input"
    is_on_host = any(v.aval.memory_space == jax.memory.Space.Host for v in arrays)
    notes = {
        f"the input {origin.name}": bool(layers) and is_from_input,
        **{f"also {other}, {saved}": (other, saved) != (layer, name) for other, saved, _ in layers},
        "in host memory": is_on_host,
        "packed on the host": any(v.innermost()[0].name == "host_call" for v in arrays),
    }
    return SavedTensor(
        kind="input" if is_input else "layer" if layers else "copy" if is_from_input else origin.kind,
        layer=layer,
        name=name,
        shape=tuple(one.aval.shape),
        dtype=str(one.aval.dtype),
        times=times * times_of_one if is_packed else times,
        bytes=times * shards * _bytes(tensor.aval) if is_packed else kept,
        bytes_per_device=_sum_on_device([(times, _bytes_on_device(arguments.get(tensor, tensor.aval)))])
        if is_packed
        else on_device,
        packed_bytes=kept,
        packed_bytes_per_device=on_device,
        memory="host" if is_on_host else "device",
        source=source_of(equations),
        note="; ".join(note for note, applies in notes.items() if applies),
        bytes_after=(*(times * shards * sum(_bytes(v.aval) for v in values) for values in between), kept)
        if steps
        else (),
    )


def _bytes(array: Any, shape: tuple[int, ...] | None = None) -> int:
    """The bytes of an array or type, or of a part of this shape."""
    shape = tuple(array.shape) if shape is None else shape
    if is_key(array):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, array.dtype)).size * 4
    return math.prod(shape) * array.dtype.itemsize


def _sum_on_device(sizes: Iterable[tuple[int, int | None]]) -> int | None:
    """The sum of numbers times bytes, if all of them are known."""
    found = [None if size is None else times * size for times, size in sizes]
    return None if None in found else sum(size or 0 for size in found)


def _has_automatic_axes(mesh: Any) -> bool:
    axes = zip(mesh.shape.values(), mesh.axis_types, strict=True)
    return any(kind == jax.sharding.AxisType.Auto and size > 1 for size, kind in axes)


def _bytes_on_device(array: Any) -> int | None:
    """The bytes of the part on one device, by the sharding of an array or of a type; None: only the compiler knows."""
    shape, sharding = tuple(array.shape), getattr(array, "sharding", None)
    if isinstance(array, ShapedArray) and math.prod(shape) > 1 and _has_automatic_axes(array.sharding.mesh):
        return None
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return _bytes(array, shape if sharding is None else sharding.shard_shape(shape))
    # `shard_shape` refuses the type of an array inside of a shard_map.
    cuts = [math.prod(sharding.mesh.shape[name] for name in axes) for axes in mesh_axes_of(sharding, len(shape))]
    return _bytes(array, tuple(-(-length // cut) for length, cut in zip(shape, cuts, strict=True)))
