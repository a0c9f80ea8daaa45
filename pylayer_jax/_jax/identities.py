"""Functions that compute nothing. Each returns some operands, and changes how a transformation treats these."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .imports import partial_eval, set_current_trace
from .jaxprs import stage
from .masks import merge, select
from .primitives import object_of_params
from .rule_function import RuleFunction, Values, apply, rule_function_p
from .types import typeof


class _Identity(RuleFunction):
    def __init__(self, name: str, types: Sequence[Any]) -> None:
        self.name = name
        self.jaxpr, _, _ = stage(lambda *xs: (self.values(xs), None), types, name)

    def values(self, operands: Sequence[Any]) -> Values:
        raise NotImplementedError


class _Positional(_Identity):
    """An identity: each result is the operand at its position. JAX may transpose some results without the others."""

    def values(self, operands: Sequence[Any]) -> Values:
        return list(operands)

    def of(self, types: tuple[Any, ...]) -> _Positional:
        """Return the same function of operands of other types."""
        raise NotImplementedError

    def batch(self, axis: Any, dims: Sequence[Any], types: Sequence[Any]) -> tuple[RuleFunction, Values, list[Any]]:
        return self.of(tuple(types)), [], list(dims)

    def transpose(self, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return list(cotangents)


def _partial_eval(trace: Any, *tracers: Any, **params: Any) -> Any:
    """Bind only the unknown values, for which JAX transposes: a function that mixes in known ones is not linear."""
    __tracebackhide__ = True
    unknown = [not tracer.is_known() for tracer in tracers]
    function = object_of_params(params)
    if not isinstance(function, _Positional) or all(unknown) or not any(unknown):
        return trace.default_process_primitive(rule_function_p, tracers, params)
    known = [x.pval.get_known() for x in tracers if x.is_known()]
    apart = select(tracers, unknown)
    with set_current_trace(trace):
        bound = apply(function.of(tuple([x.aval for x in apart])), apart)
    return merge(unknown, bound, merge([not u for u in unknown], known, tracers))


partial_eval.custom_partial_eval_rules[rule_function_p] = _partial_eval


class _Barrier(_Positional):
    def values(self, operands: Sequence[Any]) -> Values:
        return list(jax.lax.optimization_barrier(tuple(operands)))

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        return apply(self, primals), list(tangents)

    def of(self, types: tuple[Any, ...]) -> _Barrier:
        return _barrier_of(types)


def barrier(values: Sequence[Any]) -> Values:
    """Return the values behind a barrier: XLA uses none of them before it has all, and does not optimize across.

    `jax.lax.optimization_barrier` binds another barrier to the tangents, and jax 0.10 makes zeros for this barrier.
    """
    return apply(_barrier_of(tuple([typeof(x) for x in values])), values)


@functools.lru_cache(maxsize=1024)
def _barrier_of(types: tuple[Any, ...]) -> _Barrier:
    return _Barrier("barrier", types)


class _Forbidden(_Positional):
    """The identity, whose derivative is an error."""

    def __init__(self, types: tuple[Any, ...], error: Callable[[], Exception]) -> None:
        self.name, self.error, self.jaxpr = "forbid_derivative", error, _identity(types)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        raise self.error()

    def of(self, types: tuple[Any, ...]) -> _Forbidden:
        return _Forbidden(types, self.error)

    def lower(self, context: Any, args: Sequence[Any]) -> Any:
        return args


@functools.lru_cache(maxsize=256)
def _identity(types: tuple[Any, ...]) -> Any:
    return stage(lambda *xs: (list(xs), None), types, "forbid_derivative")[0]


def forbid_derivative(values: Sequence[Any], error: Callable[[], Exception]) -> Values:
    """Return the values; a derivative through any of them raises the exception that `error` makes."""
    return apply(_Forbidden(tuple([typeof(x) for x in values]), error), values) if values else []


class _WithTangent(_Identity):
    def values(self, operands: Sequence[Any]) -> Values:
        return [operands[1]]

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        return apply(self, primals), [tangents[0]]


def with_tangent(tensor: Any, value: Any) -> Any:
    """Return `value`, with the tangent of `tensor`."""
    return apply(_WithTangent("with_tangent", [typeof(tensor), typeof(value)]), (tensor, value))[0]


class _Mark(_Identity):
    def values(self, operands: Sequence[Any]) -> Values:
        return list(operands)


def leave_mark(name: str) -> None:
    """Leave an equation without operands in the jaxpr that is being traced; `is_mark` recognizes it."""
    apply(_Mark(name, ()), ())


def is_mark(function: object, name: str) -> bool:
    return isinstance(function, _Mark) and function.name == name
