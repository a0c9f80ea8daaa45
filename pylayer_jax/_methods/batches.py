"""A layer's own batching: its static `vmap(info, in_dims, *args) -> (outputs, out_dims)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pylayer_jax._jax.define_primitive import batch_axis_to_front
from pylayer_jax._trees.messages import add_note, describe
from pylayer_jax._trees.partition import is_tensor

from .arguments import Arguments
from .outputs import Outputs

__tracebackhide__ = True  # for pytest: errors raised here are about values of the user


class VmapInfo(NamedTuple):
    """The batch, as a layer's `vmap` gets it."""

    batch_size: int  # examples
    randomness: str  # "error", as torch calls it: JAX draws from keys, which are arguments like others


def map_outputs(
    vmap: Callable[..., Any], arguments: Arguments, axis: Any, dims: Sequence[Any], tensors: Sequence[Any]
) -> tuple[Outputs, list[Any]]:
    """The outputs of a batch by the layer's `vmap`: their structure, and the tensors with the mapped axis in front.

    `dims` says where each tensor has the mapped axis; None if all examples share the tensor.

    Raises:
        ValueError: if `vmap` does not return a pair, or its out_dims do not fit the outputs.
    """
    __tracebackhide__ = True
    layer, in_dims = arguments.layer, tuple(arguments.per_argument(dims))

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return vmap(VmapInfo(axis.size, "error"), in_dims, *args, **kwargs)

    try:
        result = arguments.call("vmap", call, None, tensors)
    except Exception as error:
        add_note(error, layer, "vmap")
        raise
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"{layer}.vmap returned {describe(result)}; expected a pair (outputs, out_dims): what forward "
            "returns for the whole batch, and where each output has the mapped axis."
        )
    returned, out_dims = result
    outputs, _, arrays = Outputs.of(layer, returned, tensors)
    array_dims = _dims(layer, returned, out_dims)
    for i, (array, dim) in enumerate(zip(arrays, array_dims, strict=True)):
        if dim is not None and (not -array.ndim <= dim < array.ndim or array.shape[dim] != axis.size):
            raise ValueError(
                f"{layer}.vmap: out_dims says that output {i}, of shape {tuple(array.shape)}, has the "
                f"mapped axis of size {axis.size} at {dim}."
            )
    return outputs, [
        jnp.moveaxis(x, d, 0) if d is not None else batch_axis_to_front(axis, x, None)
        for x, d in zip(arrays, array_dims, strict=True)
    ]


def check_mapped(layer: str, axis: Any, outputs: Sequence[Any], expected: Sequence[Any]) -> None:
    """Refuse outputs of a layer's `vmap` that do not have the types of `forward`, with the mapped axis in front."""
    if len(outputs) != len(expected):
        raise ValueError(
            f"{layer}.vmap returned {len(outputs)} tensors, but forward returns {len(expected)}. Return the outputs "
            "of forward, each with the mapped axis that out_dims tells."
        )
    for i, (output, aval) in enumerate(zip(outputs, expected, strict=True)):
        wanted = (axis.size, *aval.shape)
        if output.shape != wanted or output.dtype != aval.dtype:
            raise ValueError(
                f"{layer}.vmap, output {i}: expected dtype {aval.dtype} and shape {wanted} (with the mapped axis "
                f"moved to the front), as forward gives {tuple(aval.shape)}; got dtype {output.dtype} and shape "
                f"{tuple(output.shape)}."
            )


def _dims(layer: str, outputs: Any, out_dims: Any) -> list[int | None]:
    """One entry of out_dims per output tensor. In out_dims, an int or None stands for a whole subtree."""

    def is_none(x: Any) -> bool:
        return x is None

    try:
        per_leaf = jax.tree.broadcast(out_dims, outputs, is_leaf=is_none)
        leaves = jax.tree.leaves(outputs, is_leaf=is_none)
        dims = jax.tree.leaves(per_leaf, is_leaf=is_none)
        if len(leaves) != len(dims) or not all(d is None or isinstance(d, int) for d in dims):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{layer}.vmap: expected out_dims of the structure of the outputs, {jax.tree.structure(outputs)}, with an "
            f"int or None for each; got {out_dims!r}."
        ) from None
    return [d for x, d in zip(leaves, dims, strict=True) if is_tensor(x)]
