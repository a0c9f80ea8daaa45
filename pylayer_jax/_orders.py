"""The primitives that make a custom rule hold at every order of differentiation.

NOTE [orders]
A fwd rule of `jax.custom_vjp` is ordinary code: an outer differentiation goes through its body, so the
custom rule is lost at the second order. Here the fwd rule binds one opaque equation instead,

    record:      consts, inputs  ->  outputs, saved intermediates

whose own derivative is the custom rule again. With a pullback B (the layer's `backward`, linear in the
cotangents c) and residuals r, the tangent map of the outputs is its transpose,

    c . (B^T(r) t)  =  B(r)(c) . t        for all tangents t and cotangents c,

which is the second primitive,

    apply_rule:  residuals, input tangents  ->  output tangents.

Reverse mode transposes apply_rule, which gives B back: `backward` is simply called, so it may be anything.
Only forward mode over reverse evaluates apply_rule, and then B itself is transposed and has to be linear.

Residuals are told apart by where they come from, as they differ under an outer differentiation: an input
is handed on by the caller and keeps its own derivative, an output carries the rule of `record`, and an
intermediate is differentiated through `forward`, whose jaxpr `record` holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ._compat import (
    Primitive,
    Zero,
    differentiable,
    eval_jaxpr,
    instantiate,
    is_literal,
    is_missing_forward_mode,
    is_undefined,
    lower_jaxpr,
    mapped_type,
    prune,
    register,
    stage,
    tangent_type,
    typeof,
    vmap_like,
)
from ._linearity import transpose

Source = tuple[Literal["input", "output", "intermediate"], int]

# Cotangents of all outputs, and gradients of all inputs; None is zero.
Pullback = Callable[[Sequence[bool], Sequence[Any], Sequence[Any]], list[Any]]


@dataclasses.dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Rule:
    """One application of a layer: its forward as a jaxpr, and its backward as a pullback.

    Compared by identity, since it is a parameter of equations.
    """

    name: str
    jaxpr: Any  # consts, inputs -> outputs, intermediates
    consts: int
    output_types: list[Any]
    has_tangent: tuple[bool, ...]  # per output: neither marked non-differentiable nor of an integer type
    sources: tuple[Source, ...]  # per residual
    pullback: Pullback  # (needed inputs, residuals, cotangents) -> gradients
    closed_over: Callable[[], Exception]
    # The rule, and values for its consts, where more inputs are perturbed than `forward` was told.
    widen: Callable[[Sequence[bool]], tuple[Rule, list[Any]] | None] | None = None
    traceable: bool = True  # whether the jaxpr computes, or only holds what a concrete run gave

    def __repr__(self) -> str:
        return self.name  # as jaxprs show it

    @property
    def outputs(self) -> int:
        return len(self.output_types)

    @property
    def tangent_types(self) -> list[Any]:
        return [tangent_type(a) for a, has in zip(self.output_types, self.has_tangent, strict=True) if has]

    def residuals(self, inputs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The residuals, from the inputs and what `record` returned."""
        places = {"input": inputs, "output": values, "intermediate": values[self.outputs :]}
        return [places[kind][i] for kind, i in self.sources]


# -- record ---------------------------------------------------------------------------------------

record_p = Primitive("pylayer")


def _record(*args: Any, rule: Rule) -> list[Any]:
    return eval_jaxpr(rule.jaxpr, (), *args)


def _record_types(*_: Any, rule: Rule) -> tuple[list[Any], Any]:
    return [v.aval for v in rule.jaxpr.outvars], rule.jaxpr.effects


def _record_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, rule: Rule) -> tuple[list[Any], list[Any]]:
    moving = [type(t) is not Zero and differentiable(typeof(p)) for p, t in zip(primals, tangents, strict=True)]
    if any(moving[: rule.consts]):
        raise rule.closed_over()
    values = record_p.bind(*primals, rule=rule)
    inputs, needed = primals[rule.consts :], tuple(moving[rule.consts :])
    if not any(needed):
        return values, [Zero(tangent_type(typeof(v))) for v in values]

    ruling, residuals = rule, rule.residuals(inputs, values)
    if rule.widen is not None and (wider := rule.widen(needed)) is not None:
        ruling, consts = wider
        residuals = ruling.residuals(inputs, record_p.bind(*consts, *inputs, rule=ruling))
    pushed = apply_rule_p.bind(
        *residuals, *(t for t, n in zip(tangents[rule.consts :], needed, strict=True) if n), rule=ruling, needed=needed
    )
    rest = iter(pushed)
    out_tangents = [
        next(rest) if has else Zero(tangent_type(typeof(v)))
        for v, has in zip(values[: rule.outputs], rule.has_tangent, strict=True)
    ]
    return values, out_tangents + _intermediate_tangents(rule, primals, tangents, moving, values)


def _intermediate_tangents(
    rule: Rule, primals: Sequence[Any], tangents: Sequence[Any], moving: list[bool], values: Sequence[Any]
) -> list[Any]:
    zeros: list[Any] = [Zero(tangent_type(typeof(v))) for v in values[rule.outputs :]]
    # What a concrete run computed is not in the jaxpr, so that any of it may depend on any input.
    reached = [not rule.traceable or r for r in _reached(rule.jaxpr, moving)[rule.outputs :]]
    wanted = [r and differentiable(typeof(v)) for r, v in zip(reached, values[rule.outputs :], strict=True)]
    if not any(wanted):
        return zeros
    if not rule.traceable:
        raise TypeError(
            f"{rule.name}: a second derivative goes through a tensor that forward saved and that is neither an input "
            "nor an output, but forward needs concrete values and cannot be traced. Save inputs and outputs instead, "
            "or write forward with jax.numpy."
        )
    jaxpr, read = prune(rule.jaxpr, [False] * rule.outputs + wanted)

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
            "needs a forward-mode rule of that layer. Save inputs and outputs, or use reverse over reverse: "
            "jax.jacrev(jax.grad(f))."
        ) from error
    rest = iter(derived)
    return [next(rest) if w else zero for zero, w in zip(zeros, wanted, strict=True)]


def _record_batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, rule: Rule) -> tuple[list[Any], list[Any]]:
    if all(d is None for d in dims):  # JAX asks in this case too
        values = record_p.bind(*args, rule=rule)
        return values, [None] * len(values)
    batched, consts, out_dims = _batched(rule, axis, [typeof(x) for x in args], list(dims))
    return record_p.bind(*consts, *args, rule=batched), out_dims


# -- apply_rule -----------------------------------------------------------------------------------

apply_rule_p = Primitive("pylayer_rule")


def _apply_rule(*args: Any, rule: Rule, needed: tuple[bool, ...]) -> list[Any]:
    residuals, tangents = args[: len(rule.sources)], args[len(rule.sources) :]

    def pull(*cotangents: Any) -> list[Any]:
        gradients = rule.pullback(needed, residuals, _spread(cotangents, rule.has_tangent))
        return [g for g, n in zip(gradients, needed, strict=True) if n]

    return transpose(rule.name, pull, rule.tangent_types, tangents)


def _apply_rule_types(*_: Any, rule: Rule, needed: tuple[bool, ...]) -> tuple[list[Any], Any]:
    del needed
    return rule.tangent_types, frozenset()


def _apply_rule_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, rule: Rule, needed: tuple[bool, ...]
) -> tuple[list[Any], list[Any]]:
    count = len(rule.sources)
    if all(type(t) is Zero for t in tangents[:count]):
        # Linear in the rest; left as it is, so that reverse mode can still transpose it.
        moved = [instantiate(t.aval) if type(t) is Zero else t for t in tangents[count:]]
        return (
            apply_rule_p.bind(*primals, rule=rule, needed=needed),
            apply_rule_p.bind(*primals[:count], *moved, rule=rule, needed=needed),
        )
    moving = [type(t) is not Zero for t in tangents]

    def expanded(*perturbed: Any) -> list[Any]:
        rest = iter(perturbed)
        full = [next(rest) if m else p for p, m in zip(primals, moving, strict=True)]
        return _apply_rule(*full, rule=rule, needed=needed)

    chosen = [(p, t) for p, t, m in zip(primals, tangents, moving, strict=True) if m]
    out, moved = jax.jvp(expanded, [p for p, _ in chosen], [t for _, t in chosen])
    return out, moved


def _apply_rule_transpose(cotangents: Sequence[Any], *args: Any, rule: Rule, needed: tuple[bool, ...]) -> list[Any]:
    count = len(rule.sources)
    given = [None if type(c) is Zero else c for c in cotangents]
    gradients = rule.pullback(needed, args[:count], _spread(given, rule.has_tangent))
    picked = [g for g, n in zip(gradients, needed, strict=True) if n]
    return [None] * count + [
        (Zero(x.aval) if g is None else g) if is_undefined(x) else None
        for g, x in zip(picked, args[count:], strict=True)
    ]


def _apply_rule_batch(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, rule: Rule, needed: tuple[bool, ...]
) -> tuple[list[Any], list[Any]]:
    if all(d is None for d in dims):
        out = apply_rule_p.bind(*args, rule=rule, needed=needed)
        return out, [None] * len(out)
    count = len(rule.sources)
    rest = iter(dims[count:])
    batched = dataclasses.replace(
        rule,
        output_types=[mapped_type(axis, t) for t in rule.output_types],
        pullback=_batched_pullback(rule, axis, dims[:count], [next(rest) if n else None for n in needed]),
        widen=None,
    )
    out = apply_rule_p.bind(*args, rule=batched, needed=needed)
    return out, [0] * len(out)


# -- joined ---------------------------------------------------------------------------------------

# inputs, outputs -> outputs. NOTE [shared outputs]: under vmap, JAX lets an output that no mapped input
# reaches be shared by all examples. Its one cotangent would then be handed to `backward` once per
# example, and be counted as often (JAX 0.12 refuses such a custom_vjp, 0.10 gives the wrong number). So
# all outputs of a layer are mapped as soon as one input is. It lowers to nothing.
joined_p = Primitive("pylayer_outputs")


def joined(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The outputs, mapped under vmap wherever an input is."""
    return joined_p.bind(*inputs, *outputs, count=len(outputs))


def _joined(*args: Any, count: int) -> list[Any]:
    return list(args[-count:])


def _joined_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, count: int) -> tuple[list[Any], list[Any]]:
    return joined_p.bind(*primals, count=count), list(tangents[-count:])


def _joined_transpose(cotangents: Sequence[Any], *args: Any, count: int) -> list[Any]:
    inputs = [Zero(x.aval) if is_undefined(x) else None for x in args[:-count]]
    return inputs + [c if is_undefined(x) else None for x, c in zip(args[-count:], cotangents, strict=True)]


def _joined_batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, count: int) -> tuple[list[Any], list[Any]]:
    outputs, out_dims = args[-count:], dims[-count:]
    if all(d is None for d in dims):
        return list(outputs), list(out_dims)
    mapped = [
        x if d is not None else vmap_like(lambda x=x: x, axis, (), 0)() for x, d in zip(outputs, out_dims, strict=True)
    ]
    return mapped, [d or 0 for d in out_dims]


register(
    record_p,
    evaluate=_record,
    abstract=_record_types,
    jvp=_record_jvp,
    batch=_record_batch,
    lower=lambda context, *args, rule: lower_jaxpr(context, rule.jaxpr, *args),
)
register(
    apply_rule_p,
    evaluate=_apply_rule,
    abstract=_apply_rule_types,
    jvp=_apply_rule_jvp,
    batch=_apply_rule_batch,
    transpose=_apply_rule_transpose,
)
register(
    joined_p,
    evaluate=_joined,
    abstract=lambda *types, count: (list(types[-count:]), frozenset()),
    jvp=_joined_jvp,
    batch=_joined_batch,
    transpose=_joined_transpose,
)


# -- batching -------------------------------------------------------------------------------------


def _batched(rule: Rule, axis: Any, types: Sequence[Any], dims: list[Any]) -> tuple[Rule, list[Any], list[Any]]:
    # Every output gets the mapped axis, see NOTE [shared outputs]. An intermediate has no cotangent and
    # stays as it is.
    reached = _reached(rule.jaxpr, [d is not None for d in dims])
    out_dims = [0 if i < rule.outputs or r else None for i, r in enumerate(reached)]
    mapped = vmap_like(lambda *xs: eval_jaxpr(rule.jaxpr, (), *xs), axis, tuple(dims), out_dims)
    jaxpr, new = stage(mapped, types, rule.name)
    places = {"input": dims[rule.consts :], "output": out_dims, "intermediate": out_dims[rule.outputs :]}

    def widen(needed: Sequence[bool]) -> tuple[Rule, list[Any]] | None:
        wider = None if rule.widen is None else rule.widen(needed)
        if wider is None:
            return None
        inner, consts = wider
        all_types = [*map(typeof, consts), *types[rule.consts :]]
        again, fresh, _ = _batched(inner, axis, all_types, [None] * len(consts) + dims[rule.consts :])
        return again, [*fresh, *consts]

    batched = dataclasses.replace(
        rule,
        jaxpr=jaxpr,
        consts=len(new) + rule.consts,
        output_types=[v.aval for v in jaxpr.outvars[: rule.outputs]],
        pullback=_batched_pullback(rule, axis, [places[kind][i] for kind, i in rule.sources], dims[rule.consts :]),
        widen=widen,
    )
    return batched, new, out_dims


def _batched_pullback(rule: Rule, axis: Any, residual_dims: Sequence[Any], input_dims: Sequence[Any]) -> Pullback:
    def pullback(needed: Sequence[bool], residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        present = [c is not None for c in cotangents]
        given: list[bool] = []

        def one(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            gradients = rule.pullback(needed, residuals, _spread(cotangents, present))
            given[:] = [g is not None for g in gradients]
            return [g for g in gradients if g is not None]

        if not any(present):
            return [None] * len(input_dims)
        mapped = vmap_like(one, axis, (list(residual_dims), 0), 0)
        out = iter(mapped(list(residuals), [c for c in cotangents if c is not None]))
        return [_undo(next(out), dim) if g else None for g, dim in zip(given, input_dims, strict=True)]

    return pullback


def _undo(gradient: Any, dim: int | None) -> Any:
    # An input that all examples share gets the sum of their gradients.
    return jnp.sum(gradient, axis=0) if dim is None else jnp.moveaxis(gradient, 0, dim)


def _spread(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    rest = iter(values)
    return [next(rest) if m else None for m in mask]


def _reached(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Which outputs of a jaxpr depend on the inputs that are set."""
    live = {v for v, is_set in zip(jaxpr.invars, inputs, strict=True) if is_set}
    for equation in jaxpr.eqns:
        if any(not is_literal(v) and v in live for v in equation.invars):
            live.update(equation.outvars)
    return [not is_literal(v) and v in live for v in jaxpr.outvars]
