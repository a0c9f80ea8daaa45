"""The tangents that a layer's `jvp` gets, and those that it returns, matched to the outputs of `forward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pylayer_jax._jax import as_array, as_arrays, has_tangent, tangent_type, zeros_of
from pylayer_jax._trees import LEAF, collect_like, describe, is_tensor

from .arguments import Arguments
from .outputs import Outputs

__tracebackhide__ = True  # for pytest: errors raised here are about values of the user


def argument_tangents(arguments: Arguments, tangents: Sequence[Any], materialize: bool) -> list[Any]:
    """The tangents for `jvp`: one entry per argument of the call, None if the argument holds no tensor.

    A missing tangent is zeros, or None after `ctx.set_materialize_grads(False)`.
    """

    def zeros(aval: Any) -> Any:
        return zeros_of(tangent_type(aval) if has_tangent(aval) else aval)

    full = [
        zeros(a) if t is None and materialize else as_array(t, a)
        for t, a in zip(tangents, arguments.avals, strict=True)
    ]
    return arguments.per_argument(full)


def match_tangents(result: Any, outputs: Outputs, layer: str) -> list[Any]:
    """One tangent (or None for zero) per output that can have one, of the shape and in the dtype of that output.

    Raises:
        ValueError: for a wrong count, structure, type or shape; it names the layer and the output.
    """
    found: list[Any] = []
    for group, entry in zip(outputs.groups, _entries(result, outputs, layer), strict=True):
        if group is LEAF:
            found.append(entry)
        elif group.size:
            found += collect_like(entry, group, f"{layer}.jvp, tangent of output {len(found)}")
    return [
        _fit(tangent, tangent_type(aval), f"{layer}.jvp, tangent of output{path}")
        for tangent, aval, path, can_have_one in zip(
            found, outputs.types, outputs.skeleton.tensor_paths(), outputs.has_tangent, strict=True
        )
        if can_have_one
    ]


def _entries(result: Any, outputs: Outputs, layer: str) -> list[Any]:
    groups = outputs.groups
    if outputs.is_sequence or isinstance(result, tuple):
        entries = list(result) if isinstance(result, (tuple, list)) else [result]
    else:
        entries = [result]
    if len(entries) == len(groups):
        return entries
    with_tensors = sum(bool(g.size) for g in groups)
    if len(entries) == with_tensors:
        rest = iter(entries)
        return [next(rest) if g.size else None for g in groups]
    raise ValueError(
        f"{layer}.jvp returned {len(entries)} tangents; expected {len(groups)}, one per output of forward. Return None "
        "for an output that has none."
    )


def _fit(tangent: Any, aval: Any, where: str) -> Any:
    if tangent is None:
        return None
    if not is_tensor(tangent) or tangent.shape != aval.shape:
        raise ValueError(
            f"{where}: expected an array of dtype {aval.dtype} and shape {tuple(aval.shape)}, or None for zero; got "
            f"{describe(tangent)}."
        )
    if jnp.iscomplexobj(tangent) and not jnp.issubdtype(aval.dtype, jnp.complexfloating):
        raise ValueError(f"{where}: expected a real array of dtype {aval.dtype}, got dtype {tangent.dtype}.")
    (tangent,) = as_arrays([tangent])
    return tangent if tangent.dtype == aval.dtype else tangent.astype(aval.dtype)
