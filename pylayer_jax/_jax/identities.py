"""Functions that return operands unchanged, but change how a JAX transformation treats these operands."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .imports import ir, lower_with_sharding_in_types, partial_eval, set_current_trace, stablehlo
from .jaxprs import stage
from .masks import merge, select
from .primitives import object_of_params
from .rule_function import RuleFunction, Values, apply, rule_function_p
from .types import typeof

_BARRIER = "barrier"
_WAIT = "wait"  # a barrier that keeps operands whose results are not used


class Identity(RuleFunction):
    """A function whose results are its operands. JAX may transpose some of the results without the others.

    If `error` is given, the derivative of the function raises the exception that `error` makes.
    """

    is_opaque = True  # JAX would look into the jaxpr of each equation several times while it lowers a program

    def __init__(self, name: str, types: tuple[Any, ...], error: Callable[[], Exception] | None = None) -> None:
        self.name, self.error, self.jaxpr = name, error, _jaxpr(name, types)

    @property
    def may_drop_operands(self) -> bool:
        """Whether JAX may drop an operand whose result no code uses."""
        return self.name != _WAIT

    def of(self, types: Sequence[Any]) -> Identity:
        """Return the same function for operands of the given types."""
        return Identity(self.name, tuple(types), self.error)

    @property
    def is_divisible(self) -> bool:
        return False  # the results of a part would not be its operands

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        if self.error is not None:
            raise self.error()
        return apply(self, primals), list(tangents)

    def batch(self, axis: Any, dims: Sequence[Any], types: Sequence[Any]) -> tuple[RuleFunction, Values, list[Any]]:
        return self.of(types), [], list(dims)

    def transpose(self, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return list(cotangents)

    def lower(self, context: Any, args: Sequence[Any]) -> Any:
        if not self.jaxpr.eqns:  # lowering an empty jaxpr is slower
            return args
        if not all(map(isinstance, args, itertools.repeat(ir.Value))):  # JAX lowers some types to several values
            return super().lower(context, args)
        # JAX's lowering of a jaxpr with this one equation takes ten times as many calls.
        values = stablehlo.OptimizationBarrierOp(args).results
        if jax.sharding.get_abstract_mesh().empty and context.avals_out[0].sharding.mesh.empty:
            return values
        return [lower_with_sharding_in_types(context, x, t) for x, t in zip(values, context.avals_out, strict=True)]


@functools.lru_cache(maxsize=1024)
def _jaxpr(name: str, types: tuple[Any, ...]) -> Any:
    values = jax.lax.optimization_barrier if name in (_BARRIER, _WAIT) else list
    return stage(lambda *xs: (values(xs), None), types, name)[0]


def _partial_eval(trace: Any, *tracers: Any, **params: Any) -> Any:
    """Bind an identity of the unknown operands only: JAX transposes it, and known operands would not be linear."""
    __tracebackhide__ = True
    unknown = [not tracer.is_known() for tracer in tracers]
    function = object_of_params(params)
    if not isinstance(function, Identity) or all(unknown) or not any(unknown):
        return trace.default_process_primitive(rule_function_p, tracers, params)
    known = [x.pval.get_known() for x in tracers if x.is_known()]
    apart = select(tracers, unknown)
    with set_current_trace(trace):
        bound = apply(function.of([x.aval for x in apart]), apart)
    return merge(unknown, bound, merge([not u for u in unknown], known, tracers))


partial_eval.custom_partial_eval_rules[rule_function_p] = _partial_eval


def barrier(values: Sequence[Any], waits: bool = False) -> Values:
    """Return the values behind a barrier. XLA uses no value before all are computed, and optimizes nothing across it.

    If `waits`, XLA waits also for values whose results are not used. Else JAX may drop these values.
    tests: test_memory_of_a_compiled_step

    The derivative of `jax.lax.optimization_barrier` has a second barrier, for which jax 0.10 makes zero tangents.
    """
    return apply(Identity(_WAIT if waits else _BARRIER, tuple([typeof(x) for x in values])), values)


def forbid_derivative(values: Sequence[Any], error: Callable[[], Exception]) -> Values:
    """Return the values unchanged. A derivative through any value raises the exception that `error` makes."""
    types = tuple([typeof(x) for x in values])
    return apply(Identity("forbid_derivative", types, error), values) if values else []


def leave_mark(name: str) -> None:
    """Add an equation without operands to the jaxpr that JAX is tracing; `is_mark` recognizes this equation."""
    apply(Identity(name, ()), ())


def is_mark(function: object, name: str) -> bool:
    return isinstance(function, Identity) and function.name == name


class _WithTangent(RuleFunction):
    def __init__(self, types: Sequence[Any]) -> None:
        self.name = "with_tangent"
        self.jaxpr, _, _ = stage(lambda _, value: ([value], None), types, self.name)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        return apply(self, primals), [tangents[0]]


def with_tangent(tensor: Any, value: Any) -> Any:
    """Return `value` with the tangent of `tensor` as its tangent."""
    return apply(_WithTangent([typeof(tensor), typeof(value)]), (tensor, value))[0]


class _Outputs(RuleFunction):
    """A function of operands and outputs that returns the outputs. Its batch axes are those of a `RuleFunction`."""

    name = "outputs"

    def __init__(self, n_operands: int, types: tuple[Any, ...]) -> None:
        self.n_operands, self.jaxpr = n_operands, _jaxpr_of_outputs(n_operands, types)

    def mask_of_kept_operands(self) -> list[bool]:
        return [i < self.n_operands for i in range(len(self.jaxpr.invars))]  # the operands decide about batch axes


@functools.lru_cache(maxsize=1024)
def _jaxpr_of_outputs(n_operands: int, types: tuple[Any, ...]) -> Any:
    return stage(lambda *xs: (xs[n_operands:], None), types, _Outputs.name)[0]


def as_batched_as(operands: Sequence[Any], outputs: Sequence[Any]) -> Values:
    """Return the outputs of a function with the batch axes that they have if the function is a `RuleFunction`."""
    values = [*operands, *outputs]
    return apply(_Outputs(len(operands), tuple([typeof(x) for x in values])), values)
