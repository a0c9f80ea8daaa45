"""The derivative of an operation in a jaxpr of which nobody knows yet whether forward or reverse mode asks for it.

NOTE [undecided mode]
A function may have a rule for each mode: an operation of a hooks block keeps nothing in forward mode, and packs what it
keeps in reverse mode. In eager mode, and for a jitted function, the tangents tell which rule is asked for. But of a
loop, a branch or a checkpointed function JAX first makes the jaxpr of values and tangents; if it transposes it, it then
takes it apart into what is known and what is linear. There, one equation stands for both rules:

    undecided:  primals, those tangents that are not zero  ->  values, tangents

- evaluated, or differentiated again, it is the rule of forward mode;
- mapped, it is the same of vmap(forward) and vmap(reverse);
- taken apart, it is the rule of reverse mode: values, and a linear map with what was packed.

This module knows nothing of hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from .define_primitive import PrimitiveWithObject, held_object, register, vmap_to
from .imports import partial_eval, set_current_trace
from .jaxprs import is_literal
from .masks import merge, scatter, select
from .rule_function import RuleFunction, Values, effects_of, rule_function_p
from .tracers import is_staged, is_unknown
from .types import has_tangent, mapped_type, tangent_type, typeof, zeros_of


class TwoModeFunction(RuleFunction):
    """A function with a rule for each mode; with that of reverse mode for both, if it `has_one_rule`."""

    has_one_rule: bool = False

    def forward_rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        """The values, and their tangents, as in `rule`."""
        raise NotImplementedError

    def reverse_rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        """The same, for tangents that JAX will transpose."""
        raise NotImplementedError

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        __tracebackhide__ = True
        moving = [t is not None for t in tangents]
        given = select(tangents, moving)
        if self.has_one_rule or any(map(is_unknown, given)):
            return self.reverse_rule(primals, tangents)
        if self.jaxpr is None or not any(map(is_staged, given)):
            return self.forward_rule(primals, tangents)
        undecided = UndecidedRule(self, moving)
        results = undecided_p.bind(*primals, *given, undecided=undecided)
        values, found = results[: len(undecided.types)], results[len(undecided.types) :]
        return values, scatter(found, [has_tangent(t) for t in undecided.types])


class UndecidedRule:
    """The derivative of a staged function at operands of which those in a mask have a tangent. Compared by identity.

    Its operands are primals and tangents, its results values and the tangents of those that can have one.
    """

    def __init__(self, function: Any, moving: Sequence[bool]) -> None:
        self.function = function
        self.moving = list(moving)
        self.types = [v.aval for v in function.jaxpr.outvars]  # of the values
        self.tangent_types = [tangent_type(t) for t in self.types if has_tangent(t)]

    def __repr__(self) -> str:
        return self.function.name

    @property
    def jaxpr(self) -> Any:
        return self.function.jaxpr

    def results(self, is_reverse: bool, *operands: Any) -> Values:
        """The results by the rule of one mode."""
        __tracebackhide__ = True
        count, rule = len(self.moving), self.function.reverse_rule if is_reverse else self.function.forward_rule
        values, tangents = rule(operands[:count], scatter(operands[count:], self.moving))
        found = select(tangents, [has_tangent(t) for t in self.types])
        return [*values, *(zeros_of(a) if t is None else t for t, a in zip(found, self.tangent_types, strict=True))]


class BatchedUndecidedRule(UndecidedRule):
    """The derivative for a batch of examples. Its tangents are mapped; its values are as those of the function."""

    def __init__(
        self, inner: UndecidedRule, axis: Any, dims: Sequence[Any], function: Any, out_dims: Sequence[Any]
    ) -> None:
        self.inner = inner
        self.axis = axis
        self.dims = list(dims)  # of the operands of `inner`, which stand behind what the batch closes over
        self.function = function
        closed_over = len(function.jaxpr.invars) - len(inner.moving)
        self.moving = [False] * closed_over + inner.moving
        self.types = [v.aval for v in function.jaxpr.outvars]
        self.tangent_types = [mapped_type(axis, t) for t in inner.tangent_types]
        self.is_mapped = [d is not None for d in out_dims] + [True] * len(self.tangent_types)

    def results(self, is_reverse: bool, *operands: Any) -> Values:
        __tracebackhide__ = True
        own = operands[len(self.moving) - len(self.inner.moving) :]
        one_example = functools.partial(self.inner.results, is_reverse)
        return vmap_to(self.axis, one_example, self.dims, lambda: self.is_mapped)(*own)


undecided_p = PrimitiveWithObject("undecided", "undecided")


def _types(*_: Any, undecided: UndecidedRule) -> tuple[list[Any], Any]:
    return [*undecided.types, *undecided.tangent_types], effects_of(undecided.function.jaxpr)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, undecided: UndecidedRule) -> tuple[Values, Values]:
    __tracebackhide__ = True
    moving = [t is not None for t in tangents]

    def forward(*args: Any) -> Values:
        __tracebackhide__ = True
        return undecided.results(False, *merge(moving, args, primals))

    return jax.jvp(forward, select(primals, moving), select(tangents, moving))


def _batch(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, undecided: UndecidedRule
) -> tuple[Values, list[Any]]:
    __tracebackhide__ = True
    function, count = undecided.function, len(undecided.moving)
    consts, out_dims = list[Any](), [None] * len(undecided.types)
    if any(d is not None for d in dims[:count]) or function.uses_axis(axis):  # `jax.jacfwd` maps tangents alone
        function, consts, out_dims = function.batched(axis, dims[:count], [typeof(x) for x in args[:count]])
    batched = BatchedUndecidedRule(undecided, axis, dims, function, out_dims)
    return undecided_p.bind(*consts, *args, undecided=batched), [*out_dims, *[0] * len(batched.tangent_types)]


register(
    undecided_p,
    evaluate=lambda *args, undecided: undecided.results(False, *args),
    abstract=_types,
    jvp=_jvp,
    batch=_batch,
    uses_axis=lambda axis, *, undecided: undecided.function.uses_axis(axis),
)


# -- where JAX takes a jaxpr apart -----------------------------------------------------------------


def _partial_eval(trace: Any, *tracers: Any, **params: Any) -> Any:
    """Tangents that are unknown, of known values, are those of reverse mode."""

    def taken_apart(*tracers: Any, undecided: UndecidedRule) -> Any:
        primals, tangents = tracers[: len(undecided.moving)], tracers[len(undecided.moving) :]
        if all(t.is_known() for t in tangents) or not all(p.is_known() for p in primals):
            return trace.default_process_primitive(undecided_p, tracers, params)
        with set_current_trace(trace):
            return undecided.results(True, *(p.pval.get_known() for p in primals), *tangents)

    return undecided_p.with_object(taken_apart)(*tracers, **params)


def _partial_eval_equation(_: Any, unknown: Sequence[bool], available: Sequence[bool], equation: Any) -> Any:
    """The same for `jax.checkpoint`, which computes the known part again, and takes that apart as above."""
    undecided: UndecidedRule = held_object(equation)
    primals, values = len(undecided.moving), len(undecided.types)
    is_known = not any(unknown[:primals])
    missing = [x for x, is_there in zip(equation.invars, available, strict=True) if not is_there and not is_literal(x)]
    of_values = equation.replace(
        primitive=rule_function_p,
        invars=equation.invars[:primals],
        outvars=equation.outvars[:values],
        params=rule_function_p.holding(undecided.function),
    )
    results = len(equation.outvars)
    unknown_results = [not is_known] * values + [True] * (results - values)
    return of_values if is_known else None, equation, unknown_results, [True] * results, missing


partial_eval.custom_partial_eval_rules[undecided_p] = _partial_eval
partial_eval.partial_eval_jaxpr_custom_rules[undecided_p] = _partial_eval_equation
