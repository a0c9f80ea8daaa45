"""Primitives that compute nothing: each returns some of its inputs, and changes how a transformation treats them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .define_primitive import batch_axis_to_front, register
from .imports import Primitive, partial_eval, stablehlo
from .jaxprs import has_equation
from .masks import merge, scatter, select


def drop_operands(used: Sequence[bool], equation: Any) -> tuple[list[bool], Any]:
    """Drop unused outputs, and the operands that they are: the last ones."""
    is_read = [True] * (len(equation.invars) - len(used)) + list(used)
    params = equation.params | ({"count": sum(used)} if "count" in equation.params else {})
    invars, outvars = select(equation.invars, is_read), select(equation.outvars, used)
    return is_read, equation.replace(invars=invars, outvars=outvars, params=params)


# -- map_all_outputs: inputs, outputs -> outputs ----------------------------------------------------
#
# NOTE [shared outputs]
# Under vmap, JAX lets an output that no mapped input reaches be shared by all examples. Its one cotangent would then be
# handed to `backward` once per example, and be counted as often (JAX 0.12 refuses such a custom_vjp, 0.10 gives the
# wrong number). Therefore all outputs of a layer are mapped as soon as one input is. They have the mapped axis in
# front, in the primal function as in the forward rule: where both are staged, JAX takes the place from one for both.

map_all_outputs_p = Primitive("map_all_outputs")


def map_all_outputs(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The outputs; under vmap all are mapped, with the axis in front, as soon as one of the inputs or outputs is."""
    return map_all_outputs_p.bind(*inputs, *outputs, count=len(outputs)) if outputs else []


def _map_all_outputs_batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, count: int) -> Any:
    moved = [batch_axis_to_front(axis, x, d) for x, d in zip(args[-count:], dims[-count:], strict=True)]
    # The primitive is bound again, so that a `jax.vmap` around this one moves its own axis to the front too.
    return map_all_outputs_p.bind(*args[:-count], *moved, count=count), [0] * count


register(
    map_all_outputs_p,
    evaluate=lambda *args, count: list(args[-count:]),
    abstract=lambda *types, count: (list(types[-count:]), frozenset()),
    jvp=lambda primals, tangents, *, count: (map_all_outputs_p.bind(*primals, count=count), list(tangents[-count:])),
    transpose=lambda cotangents, *args, count: [None] * (len(args) - count) + list(cotangents),
    batch=_map_all_outputs_batch,
    lower=lambda _, *args, count: list(args[-count:]),
    drop_unused=drop_operands,
)


# -- barrier: values -> values ------------------------------------------------------------
#
# `jax.lax.optimization_barrier`, whose derivative leaves values without a tangent as they are (not so in jax 0.10).

barrier_p = Primitive("barrier")


def barrier(values: Sequence[Any]) -> list[Any]:
    """The values; XLA computes each of them only where it has all of them that change in a loop."""
    return barrier_p.bind(*values)


register(
    barrier_p,
    evaluate=lambda *values: list(jax.lax.optimization_barrier(values)),
    abstract=lambda *types: (list(types), frozenset()),
    jvp=lambda primals, tangents: (barrier_p.bind(*primals), list(tangents)),
    batch=lambda _, args, dims: (barrier_p.bind(*args), list(dims)),
    lower=lambda _, *args: list(stablehlo.OptimizationBarrierOp(args).results),
    # A value that nobody uses stays: the others wait for it.
)


def _barrier_partial_eval(trace: Any, *tracers: Any) -> list[Any]:
    # JAX moves out of a scan what is the same in each iteration, and stacks the rest. There, such values are known.
    unknown = [not tracer.is_known() for tracer in tracers]
    return merge(unknown, trace.default_process_primitive(barrier_p, select(tracers, unknown), {}), tracers)


partial_eval.custom_partial_eval_rules[barrier_p] = _barrier_partial_eval


# -- with_tangent: tensor, value -> value ----------------------------------------------------------
#
# A `jax.custom_jvp` would do, but jax 0.10 forgets its rule within a scan.

with_tangent_p = Primitive("with_tangent")


def with_tangent(tensor: Any, value: Any) -> Any:
    """`value`, with the tangent of `tensor`."""
    return with_tangent_p.bind(tensor, value)[0]


def _with_tangent_batch(axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return with_tangent_p.bind(*(batch_axis_to_front(axis, x, d) for x, d in zip(args, dims, strict=True))), [0]


register(
    with_tangent_p,
    evaluate=lambda *args: [args[-1]],
    abstract=lambda *types: ([types[-1]], frozenset()),
    jvp=lambda primals, tangents: (with_tangent_p.bind(*primals), [tangents[0]]),
    batch=_with_tangent_batch,
    lower=lambda _, *args: [args[-1]],
)


# -- forbid_derivative: tensors -> tensors ---------------------------------------------------------

forbid_derivative_p = Primitive("forbid_derivative")


def forbid_derivative(tensors: Sequence[Any], error: Callable[[], Exception]) -> list[Any]:
    """The tensors; a derivative that goes through one of them raises the exception that `error` returns."""
    return forbid_derivative_p.bind(*tensors, error=error)


def _forbid_derivative_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, error: Callable[[], Exception]) -> Any:
    if any(t is not None for t in tangents):
        raise error()
    return forbid_derivative_p.bind(*primals, error=error), list(tangents)


register(
    forbid_derivative_p,
    evaluate=lambda *tensors, **_: list(tensors),
    abstract=lambda *types, **_: (list(types), frozenset()),
    jvp=_forbid_derivative_jvp,
    transpose=lambda cotangents, *_, **__: list(cotangents),
    batch=lambda _, args, dims, *, error: (forbid_derivative_p.bind(*args, error=error), list(dims)),
    lower=lambda _, *args, **__: list(args),
    drop_unused=drop_operands,
)


def _forbid_derivative_partial_eval(trace: Any, *tracers: Any, error: Callable[[], Exception]) -> list[Any]:
    # Where JAX transposes a function, values that do not depend on its arguments are known, and the others linear.
    def forbidden(mask: Sequence[bool]) -> Any:
        operands = select(tracers, mask)
        return trace.default_process_primitive(forbid_derivative_p, operands, {"error": error}) if operands else ()

    unknown = [not tracer.is_known() for tracer in tracers]
    known = [not is_unknown for is_unknown in unknown]
    return merge(unknown, forbidden(unknown), scatter(forbidden(known), known))


partial_eval.custom_partial_eval_rules[forbid_derivative_p] = _forbid_derivative_partial_eval


# -- hooks_block: nothing -> nothing ---------------------------------------------------------------
#
# Tells that staged code holds a hooks block of its own within a hooks block around it. Only the innermost pair applies,
# so that such code is not packed as a whole from outside.

hooks_block_p = Primitive("hooks_block")


def mark_hooks_block() -> None:
    """Leave a mark in the code that is being staged."""
    hooks_block_p.bind()


def holds_hooks_block(jaxpr: Any) -> bool:
    return has_equation(jaxpr, hooks_block_p.name)


register(
    hooks_block_p,
    evaluate=list,
    abstract=lambda: ([], frozenset()),
    jvp=lambda *_: ([], []),
    batch=lambda *_: ([], []),
)
