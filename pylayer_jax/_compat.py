"""Every name of JAX that may move between versions, with the reason it is needed.

The rest of the package uses `jax`, `jax.numpy`, `jax.tree_util`, `jax.errors` and this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer, eval_context, eval_jaxpr
from jax.extend.core import (
    DebugInfo,
    Literal,
    Primitive,
    concrete_or_error,
    get_opaque_trace_state,
    primal_dtype_to_tangent_dtype,
    unmapped_aval,
)
from jax.extend.linear_util import wrap_init
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

__all__ = [
    "Primitive",
    "Tracer",
    "Zero",
    "concrete_value",
    "differentiable",
    "eval_jaxpr",
    "instantiate",
    "is_differentiated",
    "is_forward_mode_tracer",
    "is_literal",
    "is_missing_forward_mode",
    "is_tracer",
    "is_undefined",
    "layer_of",
    "lower_jaxpr",
    "mapped_type",
    "nothing_is_traced",
    "prune",
    "register",
    "stage",
    "tangent_type",
    "typeof",
    "varying_axes",
    "vmap_like",
]

typeof = jax.typeof

# Symbolic zeros as the rules of a primitive meet them (`custom_vjp` rules meet `SymbolicZero`).
Zero = ad.Zero

# Marks the arguments of a transpose rule that it must produce cotangents for.
is_undefined = ad.is_undefined_primal

with eval_context():
    # `eval_context` guarantees the plain state here, also when the import happens inside a trace.
    _PLAIN = get_opaque_trace_state(convention="nnx")


def nothing_is_traced() -> bool:
    # The only public way to ask whether any transformation is active; a third of a microsecond.
    return get_opaque_trace_state(convention="nnx") == _PLAIN


def is_tracer(value: object) -> bool:
    return isinstance(value, Tracer)


def is_differentiated(value: object) -> bool:
    # The tracers of `jax.grad`, `jax.vjp`, `jax.linearize` and of `jax.vmap` have no public names.
    if type(value).__name__ == "BatchTracer":
        return is_differentiated(getattr(value, "val", None))
    return type(value).__name__ == "LinearizeTracer" or isinstance(value, ad.JVPTracer)


def is_forward_mode_tracer(value: object) -> bool:
    return isinstance(value, ad.JVPTracer)


def is_missing_forward_mode(error: TypeError) -> bool:
    # What JAX says of a custom_vjp function under jax.jvp; it has no type of its own.
    return "forward-mode" in str(error) and "custom_vjp" in str(error)


def concrete_value(value: Any) -> Any:
    # The number under any stack of differentiation; raises ConcretizationTypeError under jit and vmap.
    return concrete_or_error(None, value, "pylayer_jax needs the value")


def tangent_type(aval: Any) -> Any:
    return aval.to_tangent_aval()


def varying_axes(aval: Any) -> frozenset[Any]:
    # The mesh axes of an enclosing shard_map over which a value differs from device to device.
    return aval.manual_axis_type.varying


def differentiable(aval: Any) -> bool:
    return _has_tangent(aval.dtype)


@functools.cache
def _has_tangent(dtype: Any) -> bool:
    # float0 is the tangent dtype of integers, bools and PRNG keys.
    return primal_dtype_to_tangent_dtype(dtype) != jax.dtypes.float0


def instantiate(aval: Any) -> jax.Array:
    # Zeros that keep the sharding and the varying axes of `aval`, which `jnp.zeros` would lose.
    return ad.instantiate_zeros(Zero(aval))


def stage(function: Callable[..., Sequence[Any]], avals: Sequence[Any], name: str) -> tuple[Any, list[Any]]:
    """The jaxpr of a flat function, and the values it closes over, which are its leading inputs.

    `jax.make_jaxpr` does the same at five times the cost, which every traced layer would pay.
    """
    debug = DebugInfo("pylayer_jax", name, None, None)
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrap_init(function, debug_info=debug), list(avals))
    if jaxpr.constvars:  # jax 0.10 keeps them apart, 0.12 does not
        jaxpr = jaxpr.replace(constvars=(), invars=[*jaxpr.constvars, *jaxpr.invars])
    return jaxpr, list(consts)


def is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


def layer_of(equation: Any) -> str | None:
    """The name of the function with a custom gradient that an equation applies, if it is one."""
    if equation.primitive.name == "custom_vjp_call":
        return equation.params["call_jaxpr"].debug_info.func_name
    if equation.primitive.name == "call_hi_primitive":  # the same under jax_custom_vjp3
        traced = getattr(equation.params["_prim"], "traced", None)
        return getattr(traced, "fun_name", None)
    return None


def mapped_type(axis: Any, aval: Any) -> Any:
    """The type of an array of `aval` with the mapped axis in front."""
    return unmapped_aval(axis.size, 0, aval, axis.explicit_mesh_axis)


def prune(jaxpr: Any, used: Sequence[bool]) -> tuple[Any, list[bool]]:
    """The jaxpr without the equations that only unused outputs need, and which inputs it still reads."""
    return pe.dce_jaxpr(jaxpr, list(used))


def vmap_like(function: Callable[..., Any], axis: Any, in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """`jax.vmap` over the mapped axis that a batching rule was given."""
    return jax.vmap(
        function,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_name=axis.name,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
    )


def register(
    primitive: Any,
    *,
    evaluate: Callable[..., Any],
    abstract: Callable[..., Any],
    jvp: Callable[..., Any],
    batch: Callable[..., Any],
    transpose: Callable[..., Any] | None = None,
    lower: Callable[..., Any] | None = None,
) -> None:
    """Enter a primitive with several results into the rule tables of `jax.interpreters`."""
    primitive.multiple_results = True
    primitive.def_impl(evaluate)
    primitive.def_effectful_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    # The "fancy" table hands over the axis name, which collectives inside a layer need.
    batching.fancy_primitive_batchers[primitive] = batch
    # Every application has parameters of its own, so a cached lowering could never be hit.
    lower = lower or mlir.lower_fun(evaluate, multiple_results=True)
    mlir.register_lowering(primitive, lower, cacheable=False)


def lower_jaxpr(context: Any, jaxpr: Any, *args: Any) -> Any:
    """Lower a jaxpr in place, at half the cost of `mlir.lower_fun`, which traces it again."""
    if getattr(jaxpr, "is_high", False):  # under jax_custom_vjp3 it has to be rewritten first
        traced = mlir.lower_fun(lambda *xs: eval_jaxpr(jaxpr, (), *xs), multiple_results=True)
        return traced(context, *args)
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
