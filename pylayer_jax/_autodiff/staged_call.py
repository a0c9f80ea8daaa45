"""The primitive that makes a custom rule hold at every order of differentiation.

NOTE [orders]
A fwd rule of `jax.custom_vjp` is ordinary code: an outer differentiation goes through its body, so the
custom rule is lost at the second order. Here the fwd rule binds one opaque equation instead,

    record:      consts, inputs  ->  outputs, saved intermediates

whose own derivative is the custom rule again (`_derivative.py`). A class with forward mode binds *record* itself,
without a `jax.custom_vjp` around.

Residuals are told apart by where they come from, as they differ under an outer differentiation: an input
is handed on by the caller and keeps its own derivative, an output carries the rule of `record`, and an
intermediate is differentiated through `forward`, whose jaxpr `record` holds, as a function of inputs and outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from pylayer_jax._jax.names import (
    Primitive,
    Zero,
    differentiable,
    eval_jaxpr,
    instantiate,
    is_literal,
    is_missing_forward_mode,
    is_named,
    is_undefined,
    lower_jaxpr,
    names_axis,
    prune,
    register,
    stage,
    tangent_type,
    typeof,
    vmap_like,
    without_equations_of,
)

from .derivative import Derivative
from .transpose import check_linear

Source = tuple[Literal["input", "output", "intermediate"], int]


@dataclasses.dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Rule:
    """One application of a layer: its forward as a jaxpr, and its derivative.

    Compared by identity, since it is a parameter of equations.
    """

    derivative: Derivative
    jaxpr: Any  # consts, inputs -> outputs, intermediates
    consts: int
    sources: tuple[Source, ...]  # per residual
    closed_over: Callable[[], Exception]
    # What JAX keeps of the residuals, where `first` is set: hooks pack for the first differentiation alone.
    # (derivative, residuals, outputs) -> a derivative that takes what is kept, that, and the outputs bound to it.
    keep: Callable[[Derivative, list[Any], list[Any]], tuple[Derivative, list[Any], list[Any]]]
    first: bool = False
    # The rule, and values for its consts, where more inputs are perturbed than `forward` was told.
    widen: Callable[[Sequence[bool]], tuple[Rule, list[Any]] | None] | None = None
    traceable: bool = True  # whether the jaxpr computes, or only holds what a concrete run gave
    # The layer's own batching: (axis, dims of the inputs, inputs) -> outputs with the mapped axis in front.
    mapped: Callable[[Any, Sequence[Any], Sequence[Any]], list[Any]] | None = None

    def __repr__(self) -> str:
        return self.name  # as jaxprs show it

    @property
    def name(self) -> str:
        return self.derivative.name

    @property
    def outputs(self) -> int:
        return len(self.derivative.output_types)

    def residuals(self, inputs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The residuals, from the inputs and what `record` returned."""
        places = {"input": inputs, "output": values, "intermediate": values[self.outputs :]}
        return [places[kind][i] for kind, i in self.sources]


record_p = Primitive("pylayer")


def _record(*args: Any, rule: Rule) -> list[Any]:
    return eval_jaxpr(rule.jaxpr, (), *args)


def _record_types(*_: Any, rule: Rule) -> tuple[list[Any], Any]:
    return [v.aval for v in rule.jaxpr.outvars], rule.jaxpr.effects


def _record_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, rule: Rule) -> tuple[list[Any], list[Any]]:
    moving = moves(primals, tangents)
    if any(moving[: rule.consts]):
        raise rule.closed_over()
    values = record_p.bind(*primals, rule=dataclasses.replace(rule, first=False) if rule.first else rule)
    inputs, needed = primals[rule.consts :], tuple(moving[rule.consts :])
    if not any(needed):
        return values, [Zero(tangent_type(typeof(v))) for v in values]

    ruling, residuals = rule, rule.residuals(inputs, values)
    if rule.widen is not None and (wider := rule.widen(needed)) is not None:
        ruling, consts = wider
        residuals = ruling.residuals(inputs, record_p.bind(*consts, *inputs, rule=ruling))
    derivative = ruling.derivative
    if rule.first:
        derivative, residuals, outputs = ruling.keep(derivative, residuals, values[: rule.outputs])
        values = [*outputs, *values[rule.outputs :]]
    moved = [t for t, n in zip(tangents[rule.consts :], needed, strict=True) if n]
    out_tangents = derivative.tangents(needed, residuals, moved)
    return values, out_tangents + _intermediate_tangents(rule, primals, tangents, values, out_tangents)


def moves(primals: Sequence[Any], tangents: Sequence[Any]) -> list[bool]:
    """Which primals have a tangent that is not zero."""
    return [type(t) is not Zero and differentiable(typeof(p)) for p, t in zip(primals, tangents, strict=True)]


def _intermediate_tangents(
    rule: Rule, primals: Sequence[Any], tangents: Sequence[Any], values: Sequence[Any], out_tangents: Sequence[Any]
) -> list[Any]:
    zeros: list[Any] = [Zero(tangent_type(typeof(v))) for v in values[rule.outputs :]]
    if not zeros:
        return zeros
    # What is computed from an output carries the rule of that output.
    jaxpr, is_input = without_equations_of(rule.jaxpr, rule.outputs)
    chosen = [(v, t) for v, t, i in zip(values[: rule.outputs], out_tangents, is_input, strict=True) if i]
    primals, tangents = [*primals, *(v for v, _ in chosen)], [*tangents, *(t for _, t in chosen)]
    moving = moves(primals, tangents)
    # What a concrete run computed is not in the jaxpr, so that any of it may depend on any input.
    reached = [not rule.traceable or r for r in _reached(jaxpr, moving)]
    wanted = [r and differentiable(typeof(v)) for r, v in zip(reached, values[rule.outputs :], strict=True)]
    if not any(wanted):
        return zeros
    if not rule.traceable:
        raise TypeError(
            f"{rule.name}: a second derivative goes through a tensor that forward saved and that is neither an input "
            "nor an output, but forward needs concrete values and cannot be traced. Save inputs and outputs instead, "
            "or write forward with jax.numpy."
        )
    jaxpr, read = prune(jaxpr, wanted)

    def intermediates(*perturbed: Any) -> list[Any]:
        rest = iter(perturbed)
        full = [next(rest) if m else p for p, m in zip(primals, moving, strict=True)]
        return eval_jaxpr(jaxpr, (), *(x for x, r in zip(full, read, strict=True) if r))

    moved = [(p, t) for p, t, m in zip(primals, tangents, moving, strict=True) if m]
    try:
        _, derived = jax.jvp(intermediates, [p for p, _ in moved], [t for _, t in moved])
    except TypeError as error:
        if not is_missing_forward_mode(error):
            raise
        raise TypeError(
            f"{rule.name}.forward saved a tensor that another layer computed within it, and that is neither an input "
            "nor an output. Its second derivative by forward-mode over reverse (jax.hessian, jax.jvp of jax.grad) "
            "needs forward mode of that layer: give it forward_mode = True. Or save inputs and outputs, or use reverse "
            "over reverse: jax.jacrev(jax.grad(f))."
        ) from error
    rest = iter(derived)
    return [next(rest) if w else zero for zero, w in zip(zeros, wanted, strict=True)]


def _record_transpose(cotangents: Sequence[Any], *args: Any, rule: Rule) -> list[Any]:
    # A layer within the backward of another, which forward mode transposes. Where it is linear its derivative is
    # the same at every input, so that zeros stand for those that are not known.
    unknown = [is_undefined(x) for x in args]
    jaxpr, read = prune(rule.jaxpr, [*rule.derivative.has_tangent, *[False] * (len(cotangents) - rule.outputs)])
    check_linear(rule.name, jaxpr, [u for u, r in zip(unknown, read, strict=True) if r])
    known = [instantiate(x.aval) if u else x for x, u in zip(args, unknown, strict=True)]
    values = record_p.bind(*known, rule=rule)
    inputs, needed = known[rule.consts :], tuple(unknown[rule.consts :])
    given = [None if type(c) is Zero else c for c in cotangents[: rule.outputs]]
    gradients = rule.derivative.gradients(needed, rule.residuals(inputs, values), given)
    return [None] * rule.consts + [
        (Zero(x.aval) if g is None else g) if u else None
        for g, x, u in zip(gradients, args[rule.consts :], needed, strict=True)
    ]


def _record_batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, rule: Rule) -> tuple[list[Any], list[Any]]:
    # JAX asks in this case too. What a backward does that is differentiated first nobody knows yet.
    named = is_named(axis) and (rule.first or any(names_axis(e, axis) for e in rule.jaxpr.eqns))
    if all(d is None for d in dims) and not named:
        values = record_p.bind(*args, rule=rule)
        return values, [None] * len(values)
    batched, consts, out_dims = batch_rule(rule, axis, [typeof(x) for x in args], list(dims))
    return record_p.bind(*consts, *args, rule=batched), out_dims


register(
    record_p,
    evaluate=_record,
    abstract=_record_types,
    jvp=_record_jvp,
    batch=_record_batch,
    transpose=_record_transpose,
    lower=lambda context, *args, rule: lower_jaxpr(context, rule.jaxpr, *args),
)


# -- batching -------------------------------------------------------------------------------------


def batch_rule(rule: Rule, axis: Any, types: Sequence[Any], dims: list[Any]) -> tuple[Rule, list[Any], list[Any]]:
    """The rule for a batch of examples, values for its new consts, and where its values have the mapped axis.

    `types` and `dims` are those of all consts and inputs.
    """
    # Every output gets the mapped axis, see NOTE [shared outputs]. An intermediate has no cotangent and
    # stays as it is.
    reached = _reached(rule.jaxpr, [d is not None for d in dims], axis)
    out_dims = [0 if i < rule.outputs or r else None for i, r in enumerate(reached)]
    if rule.mapped is None:
        mapped = vmap_like(lambda *xs: eval_jaxpr(rule.jaxpr, (), *xs), axis, tuple(dims), out_dims)
    else:
        mapped = _own_batching(rule, rule.mapped, axis, dims, out_dims)
    jaxpr, new = stage(mapped, types, rule.name)
    places = {"input": dims[rule.consts :], "output": out_dims, "intermediate": out_dims[rule.outputs :]}

    def widen(needed: Sequence[bool]) -> tuple[Rule, list[Any]] | None:
        wider = None if rule.widen is None else rule.widen(needed)
        if wider is None:
            return None
        inner, consts = wider
        all_types = [*map(typeof, consts), *types[rule.consts :]]
        again, fresh, _ = batch_rule(inner, axis, all_types, [None] * len(consts) + dims[rule.consts :])
        return again, [*fresh, *consts]

    residual_dims = [places[kind][i] for kind, i in rule.sources]
    output_types = [v.aval for v in jaxpr.outvars[: rule.outputs]]
    batched = dataclasses.replace(
        rule,
        derivative=rule.derivative.batched(axis, output_types, residual_dims, dims[rule.consts :]),
        jaxpr=jaxpr,
        consts=len(new) + rule.consts,
        widen=widen,
        mapped=None,
    )
    return batched, new, out_dims


def _own_batching(
    rule: Rule, mapped: Callable[..., list[Any]], axis: Any, dims: list[Any], out_dims: list[Any]
) -> Callable[..., list[Any]]:
    """Outputs by the layer's own batching; intermediates by JAX's, from inputs and outputs."""
    rest, is_input = without_equations_of(rule.jaxpr, rule.outputs)

    def run(*args: Any) -> list[Any]:
        outputs = mapped(axis, dims[rule.consts :], args[rule.consts :])
        expected = [v.aval for v in rule.jaxpr.outvars[: rule.outputs]]
        check_mapped(rule.name, axis, outputs, expected)
        if len(out_dims) == rule.outputs:
            return outputs
        given = [x for x, i in zip(outputs, is_input, strict=True) if i]
        in_dims = (*dims, *[0] * len(given))
        intermediates = vmap_like(lambda *xs: eval_jaxpr(rest, (), *xs), axis, in_dims, out_dims[rule.outputs :])
        return [*outputs, *intermediates(*args, *given)]

    return run


def check_mapped(layer: str, axis: Any, outputs: Sequence[Any], expected: Sequence[Any]) -> None:
    """Refuse outputs of a layer's own batching that do not have the types of `forward`, with the mapped axis."""
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


def _reached(jaxpr: Any, inputs: Sequence[bool], axis: Any = None) -> list[bool]:
    """Which outputs of a jaxpr depend on the inputs that are set, or on the index along a mapped axis."""
    live = {v for v, is_set in zip(jaxpr.invars, inputs, strict=True) if is_set}
    for equation in jaxpr.eqns:
        is_live = any(not is_literal(v) and v in live for v in equation.invars)
        if is_live or (axis is not None and names_axis(equation, axis)):
            live.update(equation.outvars)
    return [not is_literal(v) and v in live for v in jaxpr.outvars]
