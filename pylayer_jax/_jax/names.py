"""Every name of JAX that may move between versions, with the reason it is needed.

The rest of the package uses `jax`, `jax.numpy`, `jax.tree_util`, `jax.errors` and this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Trace, Tracer, eval_context, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.experimental import io_callback
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    Literal,
    Primitive,
    concrete_or_error,
    get_opaque_trace_state,
    primal_dtype_to_tangent_dtype,
    set_current_trace,
    take_current_trace,
    unmapped_aval,
)
from jax.extend.linear_util import wrap_init
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

__all__ = [
    "NEEDS_VALUES",
    "Primitive",
    "ShapedArray",
    "Trace",
    "Tracer",
    "Zero",
    "call_with_symbolic_zeros",
    "closed",
    "concrete_value",
    "current_trace",
    "differentiable",
    "eval_jaxpr",
    "has_equation",
    "has_transpose",
    "inner_jaxprs",
    "instantiate",
    "io_callback",
    "is_differentiated",
    "is_for_any_gradient",
    "is_forward_mode_tracer",
    "is_key",
    "is_literal",
    "is_mapped",
    "is_missing_forward_mode",
    "is_refused_effect",
    "is_rematerialized",
    "is_reverse_mode_tracer",
    "is_sharded_explicitly",
    "is_staged",
    "is_staged_beneath",
    "is_staging",
    "is_symbolic_zero",
    "is_tracer",
    "is_undefined",
    "keep_one_result",
    "layer_of",
    "lower_jaxpr",
    "manual_axes",
    "mapped_type",
    "nothing_is_traced",
    "opened",
    "prune",
    "register",
    "runs_custom_vjp_functions_once",
    "set_current_trace",
    "stage",
    "tangent_type",
    "typeof",
    "varying_axes",
    "vmap_like",
    "with_type",
    "with_varying_axes",
    "without_equations_of",
]

typeof = jax.typeof

# Raised where traced code asks for a number.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

# Symbolic zeros as the rules of a primitive meet them (`custom_vjp` rules meet `SymbolicZero`).
Zero = ad.Zero

# Marks the arguments of a transpose rule that it must produce cotangents for.
is_undefined = ad.is_undefined_primal

with eval_context():
    # `eval_context` guarantees the plain state here, also when the import happens inside a trace.
    _PLAIN = get_opaque_trace_state(convention="nnx")


def is_symbolic_zero(cotangent: Any) -> bool:
    # What the bwd rule of a custom_vjp gets for an output that has no gradient; float0 is that of an integer.
    # A Python number, which a vjp function takes too, has no dtype.
    return isinstance(cotangent, SymbolicZero) or getattr(cotangent, "dtype", None) == jax.dtypes.float0


def nothing_is_traced() -> bool:
    # The only public way to ask whether any transformation is active; a third of a microsecond.
    return get_opaque_trace_state(convention="nnx") == _PLAIN


def is_tracer(value: object) -> bool:
    return isinstance(value, Tracer)


def _unmapped(value: object) -> object:
    # What `jax.vmap` maps.
    while is_mapped(value):
        value = getattr(value, "val", None)
    return value


def is_mapped(value: object) -> bool:
    return type(value).__name__ == "BatchTracer"


def is_for_any_gradient(value: object) -> bool:
    # With JAX_REMAT3 a fwd rule runs before anything is differentiated, and is told that every argument is.
    return type(value).__name__ == "RematTracer"


def is_differentiated(value: object) -> bool:
    # The tracers of `jax.grad`, `jax.vjp`, `jax.linearize` and of `jax.vmap` have no public names.
    value = _unmapped(value)
    return type(value).__name__ == "LinearizeTracer" or isinstance(value, ad.JVPTracer)


def is_forward_mode_tracer(value: object) -> bool:
    return isinstance(value, ad.JVPTracer)


def is_reverse_mode_tracer(value: object) -> bool:
    return type(_unmapped(value)).__name__ == "LinearizeTracer"


def is_staged(value: object) -> bool:
    # Whether a value, or what `jax.vmap` maps, stands in a jaxpr that is being made.
    return type(_unmapped(value)).__name__ == "DynamicJaxprTracer"


def current_trace() -> Any:
    with take_current_trace() as trace:
        return trace


_EAGER_TRACES = frozenset({"EvalTrace", "JVPTrace", "LinearizeTrace", "BatchTrace"})


def is_staging(beneath: bool = False) -> bool:
    """Whether what runs now becomes a jaxpr: in jit, scan, shard_map and the like; not in eager grad, jvp or vmap.

    With `beneath`, also where that is so further out, as in grad or vmap within jit.
    """
    trace = current_trace()
    while trace is not None:
        name = type(trace).__name__
        # A JaxprTrace runs the jvp rule of what jax.linearize takes apart.
        if name != "JaxprTrace":
            if name not in _EAGER_TRACES:
                return True
            if not beneath:
                return False
        trace = getattr(trace, "parent_trace", None)
    return False


def is_staged_beneath(value: object) -> bool:
    # Whether what one reverse-mode differentiation (and `jax.vmap`) carries stands in a jaxpr that is being made.
    value = _unmapped(value)
    return is_staged(getattr(value, "primal", None) if is_reverse_mode_tracer(value) else value)


def is_rematerialized() -> bool:
    """Whether the code that runs now is being staged for `jax.checkpoint`, on any level."""
    trace = current_trace()
    while trace is not None:
        frame = getattr(trace, "frame", None)
        if "remat" in str(getattr(getattr(frame, "debug_info", None), "traced_for", "")):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def is_missing_forward_mode(error: TypeError) -> bool:
    # What JAX says of a custom_vjp function under jax.jvp; it has no type of its own.
    return "forward-mode" in str(error) and "custom_vjp" in str(error)


def is_refused_effect(error: NotImplementedError) -> bool:
    # What JAX says of a custom_vjp function with an effect that it cannot move.
    return "Effects not supported" in str(error)


def concrete_value(value: Any) -> Any:
    # The number under any stack of differentiation; raises ConcretizationTypeError under jit and vmap.
    return concrete_or_error(None, value, "pylayer_jax needs the value")


def tangent_type(aval: Any) -> Any:
    return aval.to_tangent_aval()


def with_type(value: jax.Array, aval: Any) -> jax.Array:
    """`value` with the weak type, the varying axes and the explicit sharding of a type of its shape and dtype."""
    found = typeof(value)
    value = with_varying_axes(value, aval)
    if is_staged(value) and found.sharding != aval.sharding and not aval.sharding.mesh.empty:
        value = jax.sharding.reshard(value, aval.sharding)
    if found.weak_type != aval.weak_type:  # which no public function can set on an array
        value = jax.lax.convert_element_type_p.bind(
            value, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None
        )
    return value


def with_varying_axes(value: jax.Array, aval: Any) -> jax.Array:
    missing = varying_axes(aval) - varying_axes(typeof(value))
    return jax.lax.pcast(value, tuple(missing), to="varying") if missing else value


def manual_axes() -> tuple[Any, ...]:
    # The mesh axes of the enclosing shard_maps: over which devices the same code runs on their own shards.
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def is_sharded_explicitly(value: Any) -> bool:
    # Whether the sharding is part of the type (AxisType.Explicit), so that a reshape may have to be told about it.
    return any(axis is not None for axis in typeof(value).sharding.spec)


def varying_axes(aval: Any) -> frozenset[Any]:
    # The mesh axes of an enclosing shard_map over which a value differs from device to device.
    return aval.manual_axis_type.varying


def differentiable(aval: Any) -> bool:
    return _has_tangent(aval.dtype)


@functools.cache
def _has_tangent(dtype: Any) -> bool:
    # float0 is the tangent dtype of integers, bools and PRNG keys.
    return primal_dtype_to_tangent_dtype(dtype) != jax.dtypes.float0


def is_key(value: Any) -> bool:
    # PRNG keys, and whatever other element types JAX gets.
    return jnp.issubdtype(value.dtype, jax.dtypes.extended)


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


def call_with_symbolic_zeros(rule: Callable[..., Any], carried: Any, tensors: Sequence[Any]) -> Any:
    """Call a `custom_vjp` function that was defined with `symbolic_zeros=True`."""
    try:
        return rule(carried, *tensors)
    except NotImplementedError as error:
        if "symbolic_zeros support with shard_map" not in str(error):
            raise
        # Eager shard_map alone cannot run such a rule; staged, it can.
        return jax.jit(lambda *tensors: rule(carried, *tensors))(*tensors)


def runs_custom_vjp_functions_once() -> bool:
    # JAX's coming implementation traces the primal function beside the fwd rule.
    return not getattr(jax.config, "jax_custom_vjp3", False)


def keep_one_result(function: Any, rule: Any) -> None:
    # JAX expects to find the output tree of a custom_jvp function in one of its two functions alone. Where an
    # operation is staged and differentiated at once, both have run.
    if any(store for store in function.stores if store is not None):
        for store in rule.stores:
            if store is not None:
                store.reset()


def opened(closed: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr in the parameters of an equation, and its constants."""
    return getattr(closed, "jaxpr", closed), closed.consts  # one and the same since jax 0.12


def closed(jaxpr: Any) -> Any:
    """A jaxpr without constants as the parameter of an equation."""
    return jaxpr if ClosedJaxpr is type(jaxpr) else ClosedJaxpr(jaxpr, ())


def has_equation(jaxpr: Any, name: str) -> bool:
    """Whether a jaxpr, or one in the parameters of its equations, applies a primitive."""
    return any(
        e.primitive.name == name or any(has_equation(j, name) for j in inner_jaxprs(e.params)) for e in jaxpr.eqns
    )


def inner_jaxprs(params: dict[str, Any]) -> list[Any]:
    """The jaxprs in the parameters of an equation: of a jitted function, a loop, the branches of a cond."""
    values = [v for x in params.values() for v in (x if isinstance(x, (tuple, list)) else (x,))]
    return [j for j in (getattr(v, "jaxpr", v) for v in values) if hasattr(j, "eqns")]


def is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


def has_transpose(primitive: Any) -> bool:
    # Products, loops and calls have theirs in a table without a public name.
    return primitive in ad.primitive_transposes or primitive.name in _KNOWN_TRANSPOSES


_KNOWN_TRANSPOSES = frozenset(
    (
        "cond", "conv_general_dilated", "dot_general", "dynamic_slice", "gather", "mul", "optimization_barrier",
        "remat2", "reshard", "scan", "shard_map", "slice",
    )
)  # fmt: skip


def layer_of(equation: Any) -> str | None:
    """The name of the function with a custom gradient that an equation applies, if it is one."""
    if equation.primitive.name == "custom_vjp_call":
        return equation.params["call_jaxpr"].debug_info.func_name
    if equation.primitive.name == "call_hi_primitive":  # the same under jax_custom_vjp3
        traced = getattr(equation.params["_prim"], "traced", None)
        return getattr(traced, "fun_name", None)
    return None


def mapped_type(axis: Any, aval: Any, dim: int = 0) -> Any:
    """The type of an array of `aval` with the mapped axis at `dim`."""
    return unmapped_aval(axis.size, dim, aval, axis.explicit_mesh_axis)


def prune(jaxpr: Any, used: Sequence[bool]) -> tuple[Any, list[bool]]:
    """The jaxpr without the equations that only unused outputs need, and which inputs it still reads."""
    return pe.dce_jaxpr(jaxpr, list(used))


def without_equations_of(jaxpr: Any, count: int) -> tuple[Any, list[bool]]:
    """The jaxpr of all outputs but the first `count`, which become inputs after the present ones instead.

    Also says which of them do: constants do not.
    """
    is_input = [not is_literal(v) for v in jaxpr.outvars[:count]]
    outputs = [v for v in jaxpr.outvars[:count] if not is_literal(v)]
    known = set(outputs)
    needed = {v for v in jaxpr.outvars[count:] if not is_literal(v)} - known
    kept: list[Any] = []
    for equation in reversed(jaxpr.eqns):
        if any(v in needed for v in equation.outvars):
            kept.append(equation)
            needed |= {v for v in equation.invars if not is_literal(v)} - known
    debug = DebugInfo("pylayer_jax", "intermediates", None, None)
    rest = jaxpr.replace(
        invars=[*jaxpr.invars, *outputs], eqns=kept[::-1], outvars=jaxpr.outvars[count:], debug_info=debug
    )
    return rest, is_input


def without_stopped_selections(jaxpr: Any) -> Any:
    """The jaxpr without selections between a value and the same value behind `stop_gradient`.

    A batched `jax.lax.cond` has them, to stop the gradients of branches that are not taken. They are the value, but
    JAX cannot transpose them.
    """
    stopped: dict[Any, Any] = {}
    same: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "stop_gradient" and not is_literal(equation.invars[0]):
            stopped[equation.outvars[0]] = equation.invars[0]
        elif equation.primitive.name == "select_n" and not any(map(is_literal, equation.invars[1:])):
            values = {stopped.get(v, v) for v in equation.invars[1:]}
            if len(values) == 1:
                (value,) = values
                same[equation.outvars[0]] = same.get(value, value)
    if not same:
        return jaxpr

    def put(atoms: Sequence[Any]) -> list[Any]:
        return [a if is_literal(a) else same.get(a, a) for a in atoms]

    kept = [e.replace(invars=put(e.invars)) for e in jaxpr.eqns if not any(v in same for v in e.outvars)]
    changed = jaxpr.replace(eqns=kept, outvars=put(jaxpr.outvars))
    return pe.dce_jaxpr(changed, [True] * len(changed.outvars), instantiate=True)[0]


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


def is_named(axis: Any) -> bool:
    """Whether the mapped axis that a batching rule was given has a name, so that collectives may reach it."""
    return type(axis.name) is not object


def names_axis(equation: Any, axis: Any) -> bool:
    """Whether an equation asks for the index along the mapped axis, or communicates over it."""
    # The effect has no public name.
    return any(type(e).__name__ == "NamedAxisEffect" and e.name == axis.name for e in equation.effects)


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
