"""A layer's own batching: its static `vmap(info, in_dims, *args) -> (outputs, out_dims)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pylayer_jax._jax.identities import in_front
from pylayer_jax._trees.partition import is_tensor

from .context import add_note, describe
from .outputs import Outputs


class VmapInfo(NamedTuple):
    """What a layer's `vmap` is told of the batch."""

    batch_size: int  # examples
    randomness: str  # "error", as torch calls it: JAX draws from keys, which are arguments like others


def map_outputs(application: Any, axis: Any, dims: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """The output tensors of a batch by the layer's `vmap`, each with the mapped axis in front.

    `dims` says where each tensor has the mapped axis; None: it is shared by all examples.

    Raises:
        ValueError: where `vmap` does not return a pair, or its out_dims do not fit the outputs.
    """
    layer, arguments = application.layer, application.arguments
    in_dims = tuple(arguments.spread(dims))

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return layer.vmap(VmapInfo(axis.size, "error"), in_dims, *args, **kwargs)

    try:
        result = arguments.call(call, None, tensors)
    except Exception as error:
        add_note(error, application.name, "vmap")
        raise
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"{application.name}.vmap returned {describe(result)}; expected a pair (outputs, out_dims): what forward "
            "returns for the whole batch, and where each output has the mapped axis."
        )
    outputs, out_dims = result
    found = Outputs(application.name, outputs)
    arrays = found.arrays(outputs)
    application.outputs = found
    chosen = _dims(application.name, outputs, out_dims)
    for i, (array, dim) in enumerate(zip(arrays, chosen, strict=True)):
        if dim is not None and (not -array.ndim <= dim < array.ndim or array.shape[dim] != axis.size):
            raise ValueError(
                f"{application.name}.vmap: out_dims says that output {i}, of shape {tuple(array.shape)}, has the "
                f"mapped axis of size {axis.size} at {dim}."
            )
    return [
        jnp.moveaxis(x, d, 0) if d is not None else in_front(x, None, axis) for x, d in zip(arrays, chosen, strict=True)
    ]


def _dims(layer: str, outputs: Any, out_dims: Any) -> list[int | None]:
    """One entry of out_dims per output tensor; an int or None stands for a whole subtree."""

    def is_none(x: Any) -> bool:
        return x is None

    try:
        spread = jax.tree.broadcast(out_dims, outputs, is_leaf=is_none)
        leaves = jax.tree.leaves(outputs, is_leaf=is_none)
        dims = jax.tree.leaves(spread, is_leaf=is_none)
        if len(leaves) != len(dims) or not all(d is None or isinstance(d, int) for d in dims):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{layer}.vmap: expected out_dims of the structure of the outputs, {jax.tree.structure(outputs)}, with an "
            f"int or None for each; got {out_dims!r}."
        ) from None
    return [d for x, d in zip(leaves, dims, strict=True) if is_tensor(x)]
