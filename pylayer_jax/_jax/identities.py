"""Outputs that are mapped under vmap as soon as one input is.

NOTE [shared outputs]
Under vmap, JAX lets an output that no mapped input reaches be shared by all examples. Its one cotangent would
then be handed to `backward` once per example, and be counted as often (JAX 0.12 refuses such a custom_vjp,
0.10 gives the wrong number). So all outputs of a layer are mapped as soon as one input is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .names import Primitive, Zero, is_undefined, register, vmap_like

joined_p = Primitive("pylayer_outputs")  # inputs, outputs -> outputs; lowers to nothing


def joined(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The outputs, mapped under vmap wherever an input is."""
    return joined_p.bind(*inputs, *outputs, count=len(outputs))


def in_front(value: Any, dim: int | None, axis: Any) -> Any:
    """`value` with the mapped axis in front, which it has at `dim` or not at all."""
    return vmap_like(lambda x: x, axis, (dim,), 0)(value)


def _joined(*args: Any, count: int) -> list[Any]:
    return list(args[-count:])


def _joined_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, count: int) -> tuple[list[Any], list[Any]]:
    return joined_p.bind(*primals, count=count), list(tangents[-count:])


def _joined_transpose(cotangents: Sequence[Any], *args: Any, count: int) -> list[Any]:
    inputs = [Zero(x.aval) if is_undefined(x) else None for x in args[:-count]]
    return inputs + [c if is_undefined(x) else None for x, c in zip(args[-count:], cotangents, strict=True)]


def _joined_batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, count: int) -> tuple[list[Any], list[Any]]:
    outputs, out_dims = args[-count:], dims[-count:]
    if all(d is None for d in dims):  # JAX asks in this case too
        return list(outputs), list(out_dims)
    return [x if d is not None else in_front(x, d, axis) for x, d in zip(outputs, out_dims, strict=True)], [
        d or 0 for d in out_dims
    ]


register(
    joined_p,
    evaluate=_joined,
    abstract=lambda *types, count: (list(types[-count:]), frozenset()),
    jvp=_joined_jvp,
    batch=_joined_batch,
    transpose=_joined_transpose,
)
