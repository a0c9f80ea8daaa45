"""Defining primitives: their rules in the tables of `jax.interpreters`."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .imports import DebugInfo, Jaxpr, Primitive, ad, batching, eval_jaxpr, jet_rules, mlir, partial_eval
from .jaxprs import effects_of_own_refs
from .mapped_axes import differs_between_examples, shared_axes, shared_by_examples
from .masks import merge, select
from .types import has_tangent, mapped_type, tangent_type, typeof, with_varying_axes

is_undefined = ad.is_undefined_primal  # marks the arguments for which a transpose rule must produce cotangents


class PrimitiveWithObject(Primitive):
    """A primitive with one parameter that is a Python object, which lives as long as the equation does.

    NOTE [held objects]
    JAX remembers the parameters of thousands of equations, in caches that outlive the equations; the object would live
    there with all that it holds, such as the static arguments of a user. These caches hold jaxprs weakly. Therefore the
    parameter of the equation is an empty jaxpr, made for this purpose, and a table leads from it to the object. It is
    nested in tuples, so that `jaxprs_in_params` skips it. The jaxpr of the object, if it has one, is a parameter beside
    it: JAX looks there for what it has to know of a program, as the devices of a mesh.
    """

    def __init__(self, name: str, parameter: str) -> None:
        super().__init__(name)
        self.parameter = parameter

    def bind(self, *args: Any, **params: Any) -> Any:
        __tracebackhide__ = True
        held = params[self.parameter]
        if type(held) is not tuple:  # an equation that JAX binds again has the jaxpr already
            params |= self.holding(held)
        return super().bind(*args, **params)

    def holding(self, held: Any) -> dict[str, Any]:
        """The parameters of an equation that holds an object."""
        key = Jaxpr((), (), (), (), debug_info=_NO_DEBUG_INFO)
        _held_objects[key] = held
        jaxpr = getattr(held, "jaxpr", None)
        if getattr(jaxpr, "is_high", False):  # with jax_custom_vjp3; JAX would lower the equation by rules of its own
            jaxpr = None
        return {self.parameter: ((key,),), "name": repr(held), "jaxpr": jaxpr}

    def with_object(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """A rule of the primitive, for a function that takes the object as the parameter."""

        def with_key(*args: Any, name: str, jaxpr: Any, **params: Any) -> Any:
            __tracebackhide__ = True
            del name, jaxpr  # for those who read a jaxpr
            return rule(*args, **{**params, self.parameter: _held_objects[params[self.parameter][0][0]]})

        return with_key


_held_objects: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_NO_DEBUG_INFO = DebugInfo("pylayer_jax", "held object", None, None)


def held_object(equation: Any) -> Any:
    """The object that an equation of a `PrimitiveWithObject` holds."""
    return _held_objects[equation.params[equation.primitive.parameter][0][0]]


def register(
    primitive: Primitive,
    *,
    evaluate: Callable[..., Any],
    abstract: Callable[..., Any],
    jvp: Callable[..., Any],
    batch: Callable[..., Any],
    transpose: Callable[..., Any] | None = None,
    lower: Callable[..., Any] | None = None,
    bind: Callable[..., Any] | None = None,
    uses_axis: Callable[..., bool] | None = None,
    drop_unused: Callable[..., tuple[list[bool], Any]] | None = None,
) -> None:
    """Enter a primitive with several results into the rule tables of `jax.interpreters`.

    Rules write None for a zero: `jvp(primals, tangents, **params) -> values, tangents` and
    `transpose(cotangents, *args, **params) -> cotangents`, whose arguments and results may be None.

    `batch(axis, args, dims, **params)` is only called if an argument is mapped, or if `uses_axis(axis, **params)` says
    that the operation uses the mapped axis itself. Otherwise `bind(*args, **params)` applies the operation again.

    `drop_unused(used, equation)`, of which some outputs are not used, returns a mask of the inputs that are still read,
    and the equation without these outputs. Otherwise all inputs of an equation count as read if an output is used.
    """
    bind = bind or primitive.bind
    opened = primitive.with_object if isinstance(primitive, PrimitiveWithObject) else lambda rule: rule

    def jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
        __tracebackhide__ = True
        values, out_tangents = jvp(primals, [None if type(t) is ad.Zero else t for t in tangents], **params)
        return values, [
            ad.Zero(tangent_type(typeof(v))) if t is None else t for v, t in zip(values, out_tangents, strict=True)
        ]

    def batch_rule(axis: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
        __tracebackhide__ = True
        # JAX calls a batching rule even if nothing is mapped, when the axis is named.
        uses = uses_axis is not None and axis.name not in shared_axes.value and uses_axis(axis, **params)
        if all(d is None for d in dims) and not uses:
            values = bind(*args, **params)
            return values, [None] * len(values)
        return batch(axis, args, dims, **params)

    primitive.multiple_results = True
    primitive.def_impl(opened(evaluate))
    primitive.def_effectful_abstract_eval(opened(abstract))
    ad.primitive_jvps[primitive] = opened(jvp_rule)
    if isinstance(primitive, PrimitiveWithObject):  # other primitives stay errors of jet, such as those in a custom_vjp
        jet_rules[primitive] = functools.partial(_taylor_series, primitive)
    if transpose is not None:
        ad.primitive_transposes[primitive] = opened(_with_zeros(transpose))
    # The "fancy" table hands over the axis name, which collectives inside a layer need.
    batching.fancy_primitive_batchers[primitive] = opened(batch_rule)
    if drop_unused is not None:

        def dce_rule(used: Sequence[bool], *args: Any) -> tuple[list[bool], Any]:
            equation = args[-1]  # jax 0.12 tells before it which inputs are alive
            if not any(used) and not equation.effects:
                return [False] * len(equation.invars), None
            return ([True] * len(equation.invars), equation) if all(used) else drop_unused(used, equation)

        partial_eval.dce_rules[primitive] = dce_rule
    # Every application has parameters of its own, so that a cached lowering could never be hit.
    lower = lower or mlir.lower_fun(evaluate, multiple_results=True)
    mlir.register_lowering(primitive, opened(lower), cacheable=False)


def _with_zeros(transpose: Callable[..., Any]) -> Callable[..., list[Any]]:
    def transpose_rule(cotangents: Sequence[Any], *args: Any, **params: Any) -> list[Any]:
        __tracebackhide__ = True
        found = transpose([None if type(c) is ad.Zero else c for c in cotangents], *args, **params)
        return [
            (ad.Zero(x.aval) if c is None else c) if is_undefined(x) else None for c, x in zip(found, args, strict=True)
        ]

    return transpose_rule


# -- Taylor series -----------------------------------------------------------------------------------


def _taylor_series(
    primitive: Primitive, primals: Sequence[Any], series: Sequence[Sequence[Any]], **params: Any
) -> tuple[list[Any], list[list[Any]]]:
    """The rule for `jax.experimental.jet`: forward mode along a curve, once per order.

    `series` has, for each operand, the coefficients of t, t**2, ... The results are of the same form.
    """

    def curve(t: Any) -> list[Any]:
        points = [
            functools.reduce(lambda rest, c: rest * t + c, reversed([x, *terms])) if has_tangent(typeof(x)) else x
            for x, terms in zip(primals, series, strict=True)
        ]
        return select(primitive.bind(*points, **params), differentiable)

    values = primitive.bind(*primals, **params)
    differentiable = [has_tangent(typeof(v)) for v in values]
    results = [[jnp.zeros_like(v)] * len(series[0]) for v in values]
    for order in range(len(series[0])):
        curve = functools.partial(_derivative, curve)
        for terms, x in zip(select(results, differentiable), curve(0.0), strict=True):
            terms[order] = x / math.factorial(order + 1)
    return values, results


def _derivative(function: Callable[[Any], list[Any]], t: Any) -> list[Any]:
    return jax.jvp(function, (t,), (1.0,))[1]


# -- batching -------------------------------------------------------------------------------------


def vmap_over(axis: Any, function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """`jax.vmap` over the mapped axis that a batching rule was given."""
    return jax.vmap(
        function,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_name=axis.name,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
    )


def vmap_as_needed(
    axis: Any,
    function: Callable[..., Sequence[Any]],
    in_axes: Sequence[Any],
    also_mapped: Callable[[list[bool]], Sequence[bool]],
) -> Callable[..., tuple[list[Any], list[Any]]]:
    """`jax.vmap` of a function, without the results that are the same for all examples: those stay as they are.

    It returns the results, and where each has the mapped axis: 0 or None. From the mask of the results that differ
    between examples, `also_mapped` makes that of results that are mapped as well.
    """

    def mapped(*args: Any) -> tuple[list[Any], list[Any]]:
        __tracebackhide__ = True
        shared: list[Any] = []
        is_mapped: list[bool] = []

        def one(*args: Any) -> list[Any]:
            __tracebackhide__ = True
            results = function(*args)
            # Each value tells whether it is mapped. The operands do not: axis_index has none, and its result is mapped.
            differ = [differs_between_examples(x) for x in results]
            is_mapped[:] = [d or also for d, also in zip(differ, also_mapped(differ), strict=True)]
            shared[:] = [
                None if is_one else shared_by_examples(x) for is_one, x in zip(is_mapped, results, strict=True)
            ]
            return select(results, is_mapped)

        found = vmap_over(axis, one, tuple(in_axes), 0)(*args)
        return merge(is_mapped, found, shared), [0 if is_one else None for is_one in is_mapped]

    return mapped


def vmap_to(
    axis: Any,
    function: Callable[..., Sequence[Any]],
    in_axes: Sequence[Any],
    is_mapped: Callable[[], Sequence[bool]],
) -> Callable[..., list[Any]]:
    """`jax.vmap` of a function, whose results have the mapped axis in front where a mask of them is set.

    `is_mapped` gives the mask when the function has run. The other results have to be the same for all examples.
    """

    def mapped(*args: Any) -> list[Any]:
        __tracebackhide__ = True
        found, dims = vmap_as_needed(axis, function, in_axes, lambda _: is_mapped())(*args)
        return [x if d is None or is_one else x[0] for x, d, is_one in zip(found, dims, is_mapped(), strict=True)]

    return mapped


def batch_axis_to_front(axis: Any, value: Any, dim: int | None) -> Any:
    """`value` with the mapped axis in front; it has that axis at `dim`, or not at all (None)."""
    moved = vmap_over(axis, lambda x: x, (dim,), 0)(value)
    # What all examples share does not vary over the axes of `spmd_axis_name`, along which the devices have other ones.
    return moved if dim is not None else with_varying_axes(moved, mapped_type(axis, typeof(value)))


# -- lowering -------------------------------------------------------------------------------------


def lower_jaxpr(context: Any, jaxpr: Any, *args: Any) -> Any:
    """Lower a jaxpr in place, at half the cost of `mlir.lower_fun`, which traces it again."""
    # Refs, and functions of jax_custom_vjp3, have to be rewritten first.
    if getattr(jaxpr, "is_high", False) or jaxpr.effects & effects_of_own_refs():
        traced = mlir.lower_fun(lambda *xs: eval_jaxpr(jaxpr, (), *xs), multiple_results=True)
        return traced(context.replace(avals_in=[v.aval for v in jaxpr.invars]), *args)
    module = context.module_context
    if context.platforms is not None:
        module = module.replace(platforms=context.platforms)
    out, tokens = mlir.jaxpr_subcomp(
        module,
        jaxpr,
        context.name_stack,
        context.tokens_in,
        (),
        *args,
        dim_var_values=context.dim_var_values,
        const_lowering=context.const_lowering,
        outer_traceback=None,
    )
    context.set_tokens_out(tokens)
    return out
