"""staged_call: consts, inputs -> outputs, saved intermediates. The rules of this primitive; see NOTE [orders]."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from pylayer_jax._jax.identities import forbid_derivative
from pylayer_jax._jax.imports import eval_jaxpr
from pylayer_jax._jax.jaxprs import (
    dependence,
    effects_of_own_refs,
    names_axis,
    prune,
    reads_refs,
    stage,
    without_checks,
    without_refs,
)
from pylayer_jax._jax.masks import merge, scatter, select
from pylayer_jax._jax.primitives import PrimitiveWithObject, held_object, is_named, is_undefined, lower_jaxpr, register
from pylayer_jax._jax.tracers import is_differentiated
from pylayer_jax._jax.types import has_tangent, is_ref, tangent_type, typeof, zeros_of

from . import refs
from .intermediate_tangents import intermediate_tangents, nonzero_tangents
from .linearity import ZeroInfo, add_rule, call_of
from .staged_call import StagedCall, second_derivative_error
from .staged_call_batching import batch_staged_call
from .tangent_map import output_tangents
from .transpose import transpose_forward

staged_call_p = PrimitiveWithObject("staged_call", "staged")


def bind_staged_call(staged: StagedCall, consts: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """The outputs and intermediates of a call that was staged."""
    __tracebackhide__ = True
    has_refs = reads_refs(staged.jaxpr)
    if has_refs and not staged.keeps_refs(tensors) and (pure := without_refs(staged.jaxpr)) is not None:
        # What nobody writes in between is a value, which can be differentiated around.
        staged, has_refs = dataclasses.replace(staged, jaxpr=pure), False
        consts, tensors = ([x[...] if is_ref(x) else x for x in values] for values in (consts, tensors))
    # `checkify` does not look into an operation that it does not know.
    jaxpr, checks = without_checks(staged.jaxpr)
    if checks is not None:
        eval_jaxpr(checks, (), *consts, *tensors)
        staged = dataclasses.replace(staged, jaxpr=jaxpr)
    if has_refs:
        # An equation of ours cannot write to a Ref. The operations themselves can, but do not know the rule.
        error = functools.partial(refs.second_derivative_error, staged.call)
        try:
            values = eval_jaxpr(staged.jaxpr, (), *consts, *tensors)
        except Exception as refused:
            if any(map(is_differentiated, tensors)):  # JAX refuses to write a value that is differentiated
                raise error() from refused
            raise
        return forbid_derivative(values, error)
    return staged_call_p.bind(*consts, *tensors, staged=staged)


# Of an equation whose results are not all used, `used` is a mask of those that are left; it is None for all. The other
# rules then treat the whole call.


def _evaluate(*args: Any, staged: StagedCall, used: tuple[bool, ...] | None = None) -> list[Any]:
    jaxpr, is_read = staged.dce(used)
    return eval_jaxpr(jaxpr, (), *select(args, is_read))


def _types(*_: Any, staged: StagedCall, used: tuple[bool, ...] | None = None) -> tuple[list[Any], Any]:
    jaxpr, _is_read = staged.dce(used)
    return [v.aval for v in jaxpr.outvars], _effects(jaxpr)


def _effects(jaxpr: Any) -> frozenset[Any]:
    return frozenset(jaxpr.effects) - effects_of_own_refs()  # a Ref that `forward` makes ends with it


def _lower(context: Any, *args: Any, staged: StagedCall, used: tuple[bool, ...] | None = None) -> Any:
    jaxpr, is_read = staged.dce(used)
    return lower_jaxpr(context, jaxpr, *select(args, is_read))


def _drop_unused(used: Sequence[bool], equation: Any) -> tuple[list[bool], Any]:
    before = equation.params.get("used")
    mask = tuple(used) if before is None else tuple(merge(before, used, [False] * len(before)))
    jaxpr, _ = held_object(equation).dce(mask)
    # Inputs stay, since a derivative may need them.
    left = equation.replace(
        outvars=select(equation.outvars, used), params=equation.params | {"used": mask}, effects=_effects(jaxpr)
    )
    return [True] * len(equation.invars), left


def _of_used(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule of the whole call that returns values, and something for each, as a rule of the call that is left."""

    def of_used(*args: Any, staged: StagedCall, used: tuple[bool, ...] | None = None) -> Any:
        __tracebackhide__ = True
        values, others = rule(*args, staged=staged)
        return (values, others) if used is None else (select(values, used), select(others, used))

    return of_used


# -- jvp ------------------------------------------------------------------------------------------


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, staged: StagedCall) -> tuple[list[Any], list[Any]]:
    __tracebackhide__ = True
    nonzero = nonzero_tangents(primals, tangents)
    if staged.loses_tangents(nonzero[: staged.consts]):
        raise staged.call.closed_over_error()
    values = staged_call_p.bind(*primals, staged=staged.without_packing())
    inputs, perturbed = primals[staged.consts :], nonzero[staged.consts :]
    if not any(nonzero):
        return values, [None] * len(values)
    # If `forward` ran on concrete values, the jaxpr holds its results as constants.
    if not staged.is_traceable and (
        error := second_derivative_error(staged.call, staged.saved, values[staged.outputs :])
    ):
        raise error
    if not any(perturbed):  # only values that are kept for `backward`
        none = [None] * staged.outputs
        return values, none + _intermediate_tangents(staged, primals, tangents, values, none)

    run, residuals = staged, staged.residuals(inputs, values)
    if (restaged := staged.restage_for(perturbed)) is not None:
        run, consts = restaged
        residuals = run.residuals(inputs, staged_call_p.bind(*consts, *inputs, staged=run))
    derivative = run.derivative
    if staged.packs:
        derivative, residuals, outputs = run.pack_residuals(residuals, values[: staged.outputs])
        values = [*outputs, *values[staged.outputs :]]
    out_tangents = output_tangents(derivative, perturbed, residuals, select(tangents[staged.consts :], perturbed))
    return values, out_tangents + _intermediate_tangents(staged, primals, tangents, values, out_tangents)


def _intermediate_tangents(
    staged: StagedCall,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    values: Sequence[Any],
    out_tangents: Sequence[Any],
) -> list[Any]:
    intermediates = values[staged.outputs :]
    if not intermediates:
        return []
    primals = [*primals, *(values[i] for i in staged.carriers)]
    tangents = [*tangents, *(out_tangents[i] for i in staged.carriers)]
    jaxpr, consts, _ = stage(
        lambda *args: (staged.intermediates(*args), None), [typeof(x) for x in primals], staged.name
    )
    primals, tangents = [*consts, *primals], [*(None for _ in consts), *tangents]
    nonzero = nonzero_tangents(primals, tangents)
    depends = dependence(jaxpr, nonzero)
    wanted = [d and has_tangent(typeof(v)) for d, v in zip(depends, intermediates, strict=True)]
    if not any(wanted):
        return [None] * len(intermediates)
    derived = intermediate_tangents(staged.name, jaxpr, wanted, nonzero, primals, select(tangents, nonzero))
    return scatter(derived, wanted)


# -- transpose, batching --------------------------------------------------------------------------


def _transpose(
    cotangents: Sequence[Any], *args: Any, staged: StagedCall, used: tuple[bool, ...] | None = None
) -> list[Any]:
    cotangents = cotangents if used is None else scatter(cotangents, used)
    # A layer within the backward of another layer, which forward mode transposes: it counts as the linear map that its
    # `forward` is, whatever its own rule says.
    is_used = [*staged.derivative.has_tangent, *[False] * (len(cotangents) - staged.outputs)]
    jaxpr, is_read = prune(staged.jaxpr, is_used)
    given = [
        zeros_of(tangent_type(v.aval)) if c is None else c
        for c, v in zip(select(cotangents, is_used), jaxpr.outvars, strict=True)
    ]
    read = select([None if is_undefined(x) else x for x in args], is_read)
    found = scatter(transpose_forward(staged.name, jaxpr, read, given), [x is None for x in read])
    return scatter(found, is_read)


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, staged: StagedCall) -> tuple[list[Any], list[Any]]:
    batched, consts, out_dims = batch_staged_call(staged, axis, [typeof(x) for x in args], list(dims))
    return staged_call_p.bind(*consts, *args, staged=batched), out_dims


def _uses_axis(axis: Any, *, staged: StagedCall, **_: Any) -> bool:
    # Before the first differentiation nobody knows which axes `backward` uses.
    return is_named(axis) and (staged.packs or any(names_axis(e, axis) for e in staged.jaxpr.eqns))


register(
    staged_call_p,
    evaluate=_evaluate,
    abstract=_types,
    jvp=_of_used(_jvp),
    transpose=_transpose,
    batch=_of_used(_batch),
    uses_axis=_uses_axis,
    lower=_lower,
    drop_unused=_drop_unused,
)


def _facts(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    staged: StagedCall = held_object(equation)
    jaxpr, is_read = staged.dce(equation.params.get("used"))
    facts = call_of(jaxpr, equation, select(operands, is_read))
    return [
        f._replace(problem=f"it applies the layer {staged.name}, whose forward is not, as {f.problem}")
        if f.problem and not any(o.problem for o in operands)
        else f
        for f in facts
    ]


add_rule(staged_call_p.name, _facts)
