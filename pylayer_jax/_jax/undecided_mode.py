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

from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import linear_map
from .define_primitive import PrimitiveWithObject, held_object, register, vmap_to
from .imports import partial_eval, set_current_trace
from .jaxprs import is_literal
from .linear_map import LinearMap
from .masks import merge, scatter, select
from .rule_function import RuleFunction, Values, effects_of, rule_function_p
from .tracers import is_staged, is_unknown, trace_of_known_values
from .types import has_tangent, mapped_type, tangent_type, typeof

Pair = tuple[Values, Values]  # values, and the tangents of those that can have one


class TwoModeFunction(RuleFunction):
    """A function with a rule for each mode. Each value that can have a tangent has one, if an operand has one."""

    def reverse_rule(self, primals: Sequence[Any], moving: Sequence[bool]) -> tuple[Values, LinearMap, Values]:
        """The values; a map from the tangents of the operands in a mask; and its constants. Its `pull` is asked for."""
        raise NotImplementedError

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Pair:
        __tracebackhide__ = True
        moving = [t is not None for t in tangents]
        derivative, given = Derivative(self, moving), select(tangents, moving)
        if any(map(is_unknown, given)):
            values, found = derivative.reverse(primals, given)
        elif self.jaxpr is not None and any(map(is_staged, given)):
            values, found = derivative.split(undecided_p.bind(*primals, *given, derivative=derivative))
        else:
            values, found = derivative.forward(primals, given)
        return values, scatter(found, [has_tangent(typeof(v)) for v in values])


class Derivative:
    """Values and tangents of a function, for operands of which those in a mask have a tangent. Compared by identity."""

    def __init__(self, function: Any, moving: Sequence[bool]) -> None:
        self.function = function
        self.moving = list(moving)

    def __repr__(self) -> str:
        return self.function.name

    def forward(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Pair:
        __tracebackhide__ = True

        def run(*args: Any) -> Values:
            __tracebackhide__ = True
            return self.function.run(*merge(self.moving, args, primals))

        values, found = jax.jvp(run, select(primals, self.moving), list(tangents))
        return values, select(found, [has_tangent(typeof(v)) for v in values])

    def reverse(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Pair:
        __tracebackhide__ = True
        with set_current_trace(trace_of_known_values(primals)):
            values, linear, constants = self.function.reverse_rule(primals, self.moving)
        return values, linear_map.call(linear, constants, tangents)

    # -- of a function with a jaxpr: lists that have primals and tangents, or values and tangents ------

    @property
    def types(self) -> list[Any]:
        """The types of the values."""
        return [v.aval for v in self.function.jaxpr.outvars]

    @property
    def tangent_types(self) -> list[Any]:
        return [tangent_type(t) for t in self.types if has_tangent(t)]

    def split(self, results: Sequence[Any]) -> Pair:
        return list(results[: len(self.types)]), list(results[len(self.types) :])

    def flat(self, mode: Callable[..., Pair], operands: Sequence[Any]) -> Values:
        values, tangents = mode(operands[: len(self.moving)], operands[len(self.moving) :])
        return [*values, *tangents]


class BatchedDerivative(Derivative):
    """The derivative of a function for a batch of examples: tangents are mapped, values as those of the function."""

    def __init__(
        self, inner: Derivative, function: RuleFunction, axis: Any, dims: Sequence[Any], out_dims: Sequence[Any]
    ) -> None:
        super().__init__(function, inner.moving)
        self.inner = inner
        self.axis = axis
        self.dims = list(dims)  # of primals and tangents
        self.is_mapped = [d is not None for d in out_dims]  # of the values

    @property
    def tangent_types(self) -> list[Any]:
        return [mapped_type(self.axis, t) for t in self.inner.tangent_types]

    def forward(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Pair:
        __tracebackhide__ = True
        return self._mapped(self.inner.forward, [*primals, *tangents])

    def reverse(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Pair:
        __tracebackhide__ = True
        return self._mapped(self.inner.reverse, [*primals, *tangents])

    def _mapped(self, mode: Callable[..., Pair], operands: Sequence[Any]) -> Pair:
        __tracebackhide__ = True

        def flat(*operands: Any) -> Values:
            __tracebackhide__ = True
            return self.inner.flat(mode, operands)

        def mask(count: int) -> list[bool]:
            return self.is_mapped + [True] * (count - len(self.is_mapped))

        return self.split(vmap_to(self.axis, flat, self.dims, mask)(*operands))


undecided_p = PrimitiveWithObject("undecided", "derivative")


def _evaluate(*operands: Any, derivative: Derivative) -> Values:
    __tracebackhide__ = True
    return derivative.flat(derivative.forward, operands)


def _types(*_: Any, derivative: Derivative) -> tuple[list[Any], Any]:
    return [*derivative.types, *derivative.tangent_types], effects_of(derivative.function.jaxpr)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, derivative: Derivative) -> tuple[Values, Values]:
    __tracebackhide__ = True
    moving = [t is not None for t in tangents]

    def forward(*args: Any) -> Values:
        __tracebackhide__ = True
        return derivative.flat(derivative.forward, merge(moving, args, primals))

    return jax.jvp(forward, select(primals, moving), select(tangents, moving))


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, derivative: Derivative) -> tuple[Values, list[Any]]:
    __tracebackhide__ = True
    primals = len(derivative.moving)
    function, _, out_dims = derivative.function.batched(axis, dims[:primals], [typeof(x) for x in args[:primals]])
    batched = BatchedDerivative(derivative, function, axis, dims, out_dims)
    values = undecided_p.bind(*args, derivative=batched)
    return values, [*out_dims, *[0] * (len(values) - len(out_dims))]


register(undecided_p, evaluate=_evaluate, abstract=_types, jvp=_jvp, batch=_batch)


# -- where JAX takes a jaxpr apart -----------------------------------------------------------------


def _partial_eval(trace: Any, *tracers: Any, **params: Any) -> Any:
    """Tangents that are unknown, of known values, are those of reverse mode."""

    def taken_apart(*tracers: Any, derivative: Derivative) -> Any:
        primals, tangents = tracers[: len(derivative.moving)], tracers[len(derivative.moving) :]
        if all(t.is_known() for t in tangents) or not all(p.is_known() for p in primals):
            return trace.default_process_primitive(undecided_p, tracers, params)
        with set_current_trace(trace):
            return derivative.flat(derivative.reverse, [*(p.pval.get_known() for p in primals), *tangents])

    return undecided_p.with_object(taken_apart)(*tracers, **params)


def _partial_eval_equation(_: Any, unknown: Sequence[bool], available: Sequence[bool], equation: Any) -> Any:
    """The same for `jax.checkpoint`, which computes the known part again, and takes that apart as above."""
    derivative: Derivative = held_object(equation)
    primals, values = len(derivative.moving), len(derivative.types)
    is_known = not any(unknown[:primals])
    missing = [x for x, is_there in zip(equation.invars, available, strict=True) if not is_there and not is_literal(x)]
    of_values = equation.replace(
        primitive=rule_function_p,
        invars=equation.invars[:primals],
        outvars=equation.outvars[:values],
        params=rule_function_p.holding(derivative.function),
    )
    results = len(equation.outvars)
    unknown_results = [not is_known] * values + [True] * (results - values)
    return of_values if is_known else None, equation, unknown_results, [True] * results, missing


partial_eval.custom_partial_eval_rules[undecided_p] = _partial_eval
partial_eval.partial_eval_jaxpr_custom_rules[undecided_p] = _partial_eval_equation
