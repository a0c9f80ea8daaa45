"""Warns where a `backward` adds up over devices what JAX has added up already.

Within a `jax.shard_map` that checks replication (`check_vma`), the cotangent of a value that is the same on all devices
of a mesh axis is the sum over these devices, before a layer sees it. A `psum` of it multiplies it by their number: the
identity whose backward is an all-reduce, of Megatron and fleet, gives a gradient that is too large. A jaxpr shows it:
the operand of the `psum` is a `pvary` of a value that does not vary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pylayer_jax._jax.imports import eval_jaxpr
from pylayer_jax._jax.jaxprs import is_literal, stage
from pylayer_jax._jax.types import manual_axes, typeof
from pylayer_jax._methods.mistakes import warn_of_summed_cotangents
from pylayer_jax._trees.partition import split

from .layer_call import LayerCall

# What hands a sum on as a sum. A product or a quotient may turn it into a mean (`pmean` divides), which is right.
_HAND_ON = frozenset(
    (
        "add", "add_any", "broadcast_in_dim", "convert_element_type", "copy", "neg", "pvary", "reshape", "squeeze",
        "sub", "transpose",
    )
)  # fmt: skip


def watching_sums(call: LayerCall, backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward`, within a `shard_map` as one that warns of a cotangent that it adds up once more."""
    if not manual_axes():
        return backward

    def watched(ctx: Any, *given: Any) -> Any:
        __tracebackhide__ = True
        cotangents, skeleton = split(given)

        def run(*cotangents: Any) -> tuple[list[Any], Any]:
            __tracebackhide__ = True
            return split(backward(ctx, *skeleton.fill(cotangents)))

        jaxpr, consts, result = stage(run, [typeof(x) for x in cotangents], f"{call.name}.backward")
        if axes := _summed_axes(jaxpr, len(consts)):
            warn_of_summed_cotangents(call.layer, call.name, axes)
        return result.fill(eval_jaxpr(jaxpr, (), *consts, *cotangents))

    return watched


def _summed_axes(jaxpr: Any, consts: int) -> list[str]:
    """The axes over which a result is the sum of what depends on the inputs behind `consts` and does not vary."""
    depends = set(jaxpr.invars[consts:])
    shared: dict[Any, set[str]] = {}  # the axes over which a value is the same, though its type varies
    summed: dict[Any, set[str]] = {}
    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, [v for v in equation.invars if not is_literal(v)]
        if depends.isdisjoint(operands):
            continue
        depends.update(equation.outvars)
        if name == "pvary":
            shared[equation.outvars[0]] = set(equation.params["axes"])
        if name == "psum_invariant":
            over = {axis for axis in equation.params["axes"] if isinstance(axis, str)}
            summed[equation.outvars[0]] = over & shared.get(operands[0], set())
        if name in _HAND_ON:
            axes = set().union(*(summed.get(v, ()) for v in operands))
            summed.update((v, axes) for v in equation.outvars)
    return sorted(set().union(*(summed.get(v, ()) for v in jaxpr.outvars if not is_literal(v))))
