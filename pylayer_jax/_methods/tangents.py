"""The tangents that a layer's `jvp` gets, and those that it returns, matched to the outputs of `forward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pylayer_jax._jax.types import as_array, has_tangent, tangent_type, zeros_of
from pylayer_jax._trees.matching import collect_like
from pylayer_jax._trees.partition import LEAF

from .arguments import Arguments
from .fitting import entries_of, fit
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
    for group, entry in zip(outputs.groups, _one_per_output(result, outputs, layer), strict=True):
        if group is LEAF:
            found.append(entry)
        elif group.size:
            found += collect_like(entry, group, f"{layer}.jvp, tangent of output {len(found)}")
    return [
        fit(tangent, tangent_type(aval), f"{layer}.jvp, tangent of output{path}")
        for tangent, aval, path, can_have_one in zip(
            found, outputs.types, outputs.skeleton.tensor_paths(), outputs.has_tangent, strict=True
        )
        if can_have_one
    ]


def _one_per_output(result: Any, outputs: Outputs, layer: str) -> list[Any]:
    groups, entries = outputs.groups, entries_of(result, unpack_list=outputs.is_sequence)
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
