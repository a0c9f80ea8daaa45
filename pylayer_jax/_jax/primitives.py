"""Primitives whose equations hold a Python object, and functions for batch axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .imports import DebugInfo, Jaxpr, Primitive, ad, batching, mlir
from .types import mapped_type, tangent_type, typeof, with_varying_axes

is_undefined = ad.is_undefined_primal  # marks the operands for which a transpose rule must produce cotangents


class ObjectPrimitive(Primitive):
    """A primitive with several results. Each equation holds one Python object, which lives as long as the equation.

    NOTE [held objects]
    JAX keeps the parameters of thousands of equations in caches that outlive the equations. A Python object among these
    parameters would stay alive, with everything that the object holds, such as static arguments of a user. But JAX's
    caches hold jaxprs weakly. Therefore the parameter of an equation is an empty jaxpr whose debug info has the Python
    object. (A table from jaxprs to objects would keep an object that refers to its own equation, as a hook does that
    stores a tracer: hooks/test_identity.py.) The empty jaxpr is nested in tuples so that `jaxprs_in_params` skips it.
    tests: test_memory.py

    The jaxpr of the Python object, if it has one, is another parameter, in which JAX finds properties such as the
    devices of a mesh.

    NOTE [call_jaxpr]
    The jaxpr of a `rule_function` is named `call_jaxpr`, so that `checkify` checks its operations. For an equation with
    this parameter, `checkify` binds the primitive to error values and operands, with a function in `subfuns` that
    computes error values and results. tests: derivatives/test_checkify.py
    """

    # Evaluates code that `checkify` made from the jaxpr of a held object: see NOTE [call_jaxpr].
    evaluate_checked: Callable[..., list[Any]]

    def __init__(self, name: str, jaxpr_name: str = "jaxpr") -> None:
        super().__init__(name)
        self.multiple_results = True
        self.jaxpr_name = jaxpr_name  # the parameter for the jaxpr of the held object

    def bind(self, *args: Any, held: Any, subfuns: Sequence[Any] = (), **params: Any) -> Any:
        __tracebackhide__ = True
        if subfuns:
            return self.evaluate_checked(_object(held), *subfuns, *args)
        if type(held) is not tuple:  # a tuple is the key of an equation that JAX binds again
            return super().bind(*args, **self.params_of(held))
        return super().bind(*args, held=held, **params)

    def params_of(self, held: Any) -> dict[str, Any]:
        """Return the parameters of a new equation that holds an object."""
        holder = _Holder("pylayer_jax", "held object", None, None)
        holder.held = held
        key = Jaxpr((), (), (), (), debug_info=holder)
        jaxpr = None if getattr(held, "is_opaque", False) else getattr(held, "jaxpr", None)
        return {"held": ((key,),), "name": held.name} | ({} if jaxpr is None else {self.jaxpr_name: jaxpr})

    def register(
        self,
        *,
        evaluate: Callable[..., Any],
        abstract: Callable[..., Any],
        jvp: Callable[..., Any],
        batch: Callable[..., Any],
        transpose: Callable[..., Any],
        lower: Callable[..., Any],
    ) -> None:
        """Enter the rules into the tables of `jax.interpreters`. Each rule gets the held object as its first argument.

        In the rules, a None tangent or cotangent means zero. The JVP rule is `jvp(held, primals, tangents) -> values,
        tangents`. In `transpose(held, args, cotangents) -> cotangents`, each argument that needs a cotangent is None.
        JAX calls `batch(held, axis, args, dims) -> values, dims` if an operand is batched or the axis has a name.
        """

        def jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], *, held: Any, **_: Any) -> Any:
            __tracebackhide__ = True
            given = [None if type(t) is ad.Zero else t for t in tangents]
            values, found = jvp(_object(held), primals, given)
            return values, [
                ad.Zero(tangent_type(typeof(v))) if t is None else t for v, t in zip(values, found, strict=True)
            ]

        def transpose_rule(cotangents: Sequence[Any], *args: Any, held: Any, **_: Any) -> list[Any]:
            __tracebackhide__ = True
            given = [None if type(c) is ad.Zero else c for c in cotangents]
            found = transpose(_object(held), [None if is_undefined(x) else x for x in args], given)
            return [
                (ad.Zero(x.aval) if c is None else c) if is_undefined(x) else None
                for c, x in zip(found, args, strict=True)
            ]

        def batch_rule(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, held: Any, **params: Any) -> Any:
            __tracebackhide__ = True
            if all(d is None for d in dims) and not is_named(axis):
                values = self.bind(*args, held=held, **params)
                return values, [None] * len(values)
            return batch(_object(held), axis, args, dims)

        def evaluate_rule(*args: Any, held: Any, **_: Any) -> Any:
            __tracebackhide__ = True
            return evaluate(_object(held), *args)

        def lower_rule(context: Any, *args: Any, held: Any, **_: Any) -> Any:
            __tracebackhide__ = True
            return lower(_object(held), context, *args)

        named_rule: Any = jvp_rule
        named_rule.__fun_debug_info__ = _NO_DEBUG_INFO  # see NOTE [names made once] in `_front.py`
        self.def_impl(evaluate_rule)
        # Some jaxprs have hijax primitives (that of jnp.nonzero). Since jax 0.12, JAX calls `to_lojax` to lower these.
        self.to_lojax = evaluate_rule
        self.def_effectful_abstract_eval(lambda *types, held, **_: abstract(_object(held), *types))
        ad.primitive_jvps[self] = jvp_rule
        ad.primitive_transposes[self] = transpose_rule
        # The "fancy" table passes the axis name to batching rules; collectives inside a layer need this name.
        batching.fancy_primitive_batchers[self] = batch_rule
        # Each equation holds a different object, so JAX could never reuse a cached lowering.
        mlir.register_lowering(self, lower_rule, cacheable=False)


_NO_DEBUG_INFO = DebugInfo("pylayer_jax", "a rule of a primitive", None, None)


class _Holder(DebugInfo):
    held: Any


def _object(key: Any) -> Any:
    return key[0][0].debug_info.held


def object_of(equation: Any) -> Any:
    """Return the object that an equation of an `ObjectPrimitive` holds."""
    return object_of_params(equation.params)


def object_of_params(params: dict[str, Any]) -> Any:
    return _object(params["held"])


# -- batch axes --------------------------------------------------------------------------------------


def is_named(axis: Any) -> bool:
    """Return whether the batch axis of a batching rule has a name, which collectives may use."""
    return type(axis.name) is not object


def vmap_over(axis: Any, function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """Apply `jax.vmap` to `function`, over the batch axis that a batching rule got."""
    return jax.vmap(
        function,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_name=axis.name,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
    )


def batch_axis_to_front(axis: Any, value: Any, dim: int | None) -> Any:
    """Move the batch axis of `value` from `dim` to the front. If `dim` is None, repeat `value` there."""
    moved = vmap_over(axis, lambda x: x, (dim,), 0)(value)
    # A value that all examples share does not vary over the mesh axes of `spmd_axis_name`, but the batch has to vary.
    return moved if dim is not None else with_varying_axes(moved, mapped_type(axis, typeof(value)))
