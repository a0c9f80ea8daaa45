"""A function with its rule: what JAX differentiates by a Python function that stands beside it.

NOTE [function with its rule]
A `RuleFunction` is what `jax.custom_jvp` makes: `run` computes, `rule` gives values and tangents, and a rule that
applies the same function to its primals holds at the next order too. It stands here because jax 0.10 loses the rule of
a `jax.custom_jvp` in a scan that is differentiated twice, without a word; `tests/autodiff/test_rule_function.py` has
the case in plain JAX, and tells when JAX's own may take its place. This module knows nothing of layers.

What a transformation sees is one equation:

- evaluated, it is `run`; in staged code `run` is traced once, where it is applied, and the equation holds the jaxpr;
  what `run` closes over becomes an operand;
- differentiated, it is `rule`, in forward mode and in reverse mode, which transposes the tangents that `rule` returns;
- mapped, it is the function of `vmap(run)` and `vmap(rule)`;
- lowered, and where results are not used, it is its jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .define_primitive import (
    PrimitiveWithObject,
    held_object,
    is_undefined,
    lower_jaxpr,
    register,
    vmap_as_needed,
    vmap_over,
    vmap_to,
)
from .imports import eval_jaxpr, mlir, partial_eval
from .jaxprs import effects_of_own_refs, has_equation, stage
from .mapped_axes import is_named
from .masks import merge, scatter, select
from .tracers import applied_to
from .types import full_cotangent, has_tangent, typeof

Values = list[Any]
# From the operands to the values, and where each value has the mapped axis: 0, or None if all examples share it.
BatchRun = Callable[..., tuple[Values, list[Any]]]


class RuleFunction:
    """A function of arrays, and the rule of its derivative. Holds no array; equations compare it by identity."""

    name: str  # as jaxprs and JAX's errors show it
    jaxpr: Any  # None: `run` is called wherever a value is needed, and sees concrete values in eager mode
    kind = "function"  # what it is to users, for messages

    def __repr__(self) -> str:
        return self.name

    def run(self, *args: Any) -> Values:
        __tracebackhide__ = True
        try:
            return eval_jaxpr(self.jaxpr, (), *args)
        except NotImplementedError:
            # JAX runs no custom_vjp function with symbolic zeros in a shard_map in eager mode.
            if not has_equation(self.jaxpr, "shard_map"):
                raise
            return jax.jit(lambda *args: eval_jaxpr(self.jaxpr, (), *args))(*args)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        """The values, and their tangents. None is a zero tangent; not all of those given are."""
        raise NotImplementedError

    def transpose(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        """The cotangents of the operands that are None, from those of the values, by a jaxpr of the function."""
        return scatter(transpose_jaxpr(jaxpr, args, cotangents), [x is None for x in args])

    def call_staged(self, *args: Any) -> Values:
        """The values of a function without a jaxpr, by the same function with one."""
        raise NotImplementedError

    def batch_run(self, axis: Any, dims: Sequence[Any]) -> BatchRun:
        """`run` for a batch of examples, whose operands have the mapped axis at `dims`."""
        is_any = any(d is not None for d in dims)
        return vmap_as_needed(axis, self.run, dims, lambda differ: self.also_mapped(differ, is_any))

    def batched(self, axis: Any, dims: Sequence[Any], types: Sequence[Any]) -> tuple[RuleFunction, Values, Values]:
        """A staged function for a batch; what it closes over, its first operands; where its values are mapped."""
        __tracebackhide__ = True
        batched = BatchedFunction(self, axis, dims)
        consts = batched.with_jaxpr(types)
        return batched, consts, batched.out_dims

    def also_mapped(self, differ: list[bool], is_any: bool) -> list[bool]:
        """A mask of the values that a batch maps; those in the mask `differ` are mapped anyway.

        `is_any`: whether an operand is mapped; else the axis has a name, by which `run` or `rule` may use it.
        """
        del is_any
        return [True] * len(differ)

    def uses_axis(self, axis: Any) -> bool:
        """Whether `run` or `rule` may use a mapped axis that no operand has."""
        return is_named(axis)


class BatchedFunction(RuleFunction):
    """A function for a batch of examples. Of those that were mapped several times, each map has one of these."""

    def __init__(self, inner: RuleFunction, axis: Any, dims: Sequence[Any]) -> None:
        self.inner = inner
        self.axis = axis
        self.name, self.kind, self.jaxpr = inner.name, inner.kind, None
        self.dims = list(dims)  # of the operands of the inner function, which stand behind those of the batch alone
        self.out_dims: list[Any] = []  # of the values, if it is staged
        self.closed_over = 0  # the number of operands of the batch alone

    def run(self, *args: Any) -> Values:
        __tracebackhide__ = True
        if self.jaxpr is not None:
            return super().run(*args)
        values, _ = self.inner.batch_run(self.axis, self.dims)(*args)
        return values

    def with_jaxpr(self, types: Sequence[Any]) -> list[Any]:
        """Stage the batch, for operands of these types. Returns what it closes over: its first operands."""
        __tracebackhide__ = True
        self.jaxpr, consts, self.out_dims = stage(self.inner.batch_run(self.axis, self.dims), types, self.name)
        self.closed_over = len(consts)
        return consts

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        __tracebackhide__ = True
        if any(t is not None for t in tangents[: self.closed_over]):
            raise TypeError(f"{self.name}: its code for a batch closes over a value that is differentiated.")
        primals, tangents = primals[self.closed_over :], tangents[self.closed_over :]
        moving, moves = [t is not None for t in tangents], list[bool]()

        def rule(*args: Any) -> Values:
            __tracebackhide__ = True
            values, out_tangents = self.inner.rule(args[: len(primals)], scatter(args[len(primals) :], moving))
            moves[:] = [t is not None for t in out_tangents]
            return [*values, *select(out_tangents, moves)]

        def is_mapped() -> list[bool]:
            # A tangent as its value, and a value as in the batch that is not differentiated.
            of_values = [True] * len(moves) if self.jaxpr is None else [d is not None for d in self.out_dims]
            return [*of_values, *select(of_values, moves)]

        run = vmap_to(self.axis, rule, self.dims + select(self.dims, moving), is_mapped)
        found = run(*primals, *select(tangents, moving))
        return found[: len(moves)], scatter(found[len(moves) :], moves)

    def transpose(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return self.inner.transpose(jaxpr, args, cotangents)

    def call_staged(self, *args: Any) -> Values:
        __tracebackhide__ = True
        return vmap_over(self.axis, self.inner.call_staged, tuple(self.dims), 0)(*args)

    def also_mapped(self, differ: list[bool], is_any: bool) -> list[bool]:
        return self.inner.also_mapped(differ, is_any)

    def uses_axis(self, axis: Any) -> bool:
        return self.inner.uses_axis(axis)


class UsedPart(RuleFunction):
    """A staged function without the results that nobody uses. Operands stay, since the rule needs them."""

    def __init__(self, whole: RuleFunction, used: Sequence[bool]) -> None:
        self.whole = whole
        self.used = list(used)
        self.name, self.kind = whole.name, whole.kind
        self.jaxpr, _ = partial_eval.dce_jaxpr(whole.jaxpr, self.used, instantiate=True)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        __tracebackhide__ = True
        values, out_tangents = self.whole.rule(primals, tangents)
        return select(values, self.used), select(out_tangents, self.used)

    def transpose(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return self.whole.transpose(jaxpr, args, cotangents)

    def batched(self, axis: Any, dims: Sequence[Any], types: Sequence[Any]) -> tuple[RuleFunction, Values, Values]:
        __tracebackhide__ = True
        whole, consts, out_dims = self.whole.batched(axis, dims, types)
        return UsedPart(whole, self.used), consts, select(out_dims, self.used)

    def uses_axis(self, axis: Any) -> bool:
        return self.whole.uses_axis(axis)


rule_function_p = PrimitiveWithObject("rule_function", "function")


def call(function: RuleFunction, args: Sequence[Any]) -> Values:
    """The values of a function, under all transformations that are active."""
    __tracebackhide__ = True
    # JAX hands an operation on values that it does not differentiate to the trace below, and asks no rule.
    if function.jaxpr is None and applied_to(args).is_deferred:
        return function.call_staged(*args)
    return rule_function_p.bind(*args, function=function)


def transpose_jaxpr(jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
    """The transpose of a jaxpr that is linear in the arguments that are None: one value for each of these."""
    __tracebackhide__ = True
    unknown = [x is None for x in args]

    def linear(*values: Any) -> Values:
        __tracebackhide__ = True
        return eval_jaxpr(jaxpr, (), *merge(unknown, values, args))

    given = [full_cotangent(c, v.aval) for v, c in zip(jaxpr.outvars, cotangents, strict=True)]
    return list(jax.linear_transpose(linear, *select([v.aval for v in jaxpr.invars], unknown))(given))


def nonzero_tangents(primals: Sequence[Any], tangents: Sequence[Any]) -> list[bool]:
    """A mask of the primals whose tangent is not zero."""
    return [t is not None and has_tangent(typeof(p)) for p, t in zip(primals, tangents, strict=True)]


def effects_of(jaxpr: Any) -> frozenset[Any]:
    return frozenset(jaxpr.effects) - effects_of_own_refs()  # a Ref that it makes ends with it


def _evaluate(*args: Any, function: RuleFunction) -> Values:
    __tracebackhide__ = True
    return function.run(*args)


def jaxpr_of(function: RuleFunction, types: Sequence[Any]) -> Any:
    """The jaxpr of a function; of one without, that of `run`, with what it closes over as its first inputs."""
    # Such a function stands in a jaxpr where a hooks block or JAX stages an operation that was applied in eager mode.
    if function.jaxpr is not None:
        return function.jaxpr
    return stage(lambda *args: (function.run(*args), None), types, function.name)[0]


def _types(*types: Any, function: RuleFunction) -> tuple[list[Any], Any]:
    jaxpr = jaxpr_of(function, types)
    return [v.aval for v in jaxpr.outvars], effects_of(jaxpr)


def _lower(context: Any, *args: Any, function: RuleFunction) -> Any:
    if function.jaxpr is None:
        return mlir.lower_fun(function.run, multiple_results=True)(context, *args)
    return lower_jaxpr(context, function.jaxpr, *args)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, function: RuleFunction) -> tuple[Values, Values]:
    __tracebackhide__ = True
    nonzero = nonzero_tangents(primals, tangents)
    if not any(nonzero):
        values = call(function, primals)
        return values, [None] * len(values)
    return function.rule(primals, [t if moves else None for t, moves in zip(tangents, nonzero, strict=True)])


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, function: RuleFunction) -> tuple[Values, list[Any]]:
    __tracebackhide__ = True
    if function.jaxpr is None:
        values = call(BatchedFunction(function, axis, dims), args)
        return values, [0] * len(values)
    batched, consts, out_dims = function.batched(axis, dims, [typeof(x) for x in args])
    if all(d is None for d in (*dims, *out_dims)):  # the axis has a name, and is not used
        return call(function, args), out_dims
    return call(batched, [*consts, *args]), out_dims


def _transpose(cotangents: Sequence[Any], *args: Any, function: RuleFunction) -> Values:
    return function.transpose(function.jaxpr, [None if is_undefined(x) else x for x in args], cotangents)


def _drop_unused(used: Sequence[bool], equation: Any) -> tuple[list[bool], Any]:
    function: RuleFunction = held_object(equation)
    if function.jaxpr is None:
        return [True] * len(equation.invars), equation
    part = UsedPart(function, used)
    left = equation.replace(
        outvars=select(equation.outvars, used),
        params=equation.params | rule_function_p.holding(part),
        effects=effects_of(part.jaxpr),
    )
    return [True] * len(equation.invars), left


register(
    rule_function_p,
    evaluate=_evaluate,
    abstract=_types,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    bind=lambda *args, function: call(function, args),
    uses_axis=lambda axis, *, function: function.uses_axis(axis),
    lower=_lower,
    drop_unused=_drop_unused,
)
