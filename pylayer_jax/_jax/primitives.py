"""How a primitive with a Python object as its parameter is registered."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .imports import DebugInfo, Jaxpr, Primitive, ad, batching, mlir
from .types import mapped_type, tangent_type, typeof, with_varying_axes

is_undefined = ad.is_undefined_primal  # marks the operands for which a transpose rule must produce cotangents


class ObjectPrimitive(Primitive):
    """A primitive with several results and one Python object, which lives as long as the equation does.

    NOTE [held objects]
    JAX keeps the parameters of thousands of equations in caches that outlive the equations. The object would stay alive
    there, with everything that it holds, such as static arguments of a user. But these caches hold jaxprs weakly.
    Therefore the parameter of an equation is an empty jaxpr that serves as a weakly held key into `_held_objects`. It
    is nested in tuples so that `jaxprs_in_params` skips it. The jaxpr of the object, if it has one, is another
    parameter, in which JAX finds properties of a program such as the devices of a mesh. tests: test_memory.py
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.multiple_results = True

    def bind(self, *args: Any, **params: Any) -> Any:
        __tracebackhide__ = True
        held = params.pop("held")
        if type(held) is not tuple:  # JAX binds an equation again with the key that it has
            key = Jaxpr((), (), (), (), debug_info=_NO_DEBUG_INFO)
            _held_objects[key] = held
            params |= {"name": held.name, "jaxpr": getattr(held, "jaxpr", None)}
            held = ((key,),)
        return super().bind(*args, held=held, **params)

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
        """Enter the rules into the tables of `jax.interpreters`; each gets the object as its first argument.

        Rules write None for a zero: `jvp(held, primals, tangents) -> values, tangents` and
        `transpose(held, args, cotangents) -> cotangents`, where `args` are None at the operands to transpose for.
        `batch(held, axis, args, dims) -> values, dims` is called if an operand is batched, or if the axis has a name.
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

        self.def_impl(evaluate_rule)
        # Since jax 0.12, for a jaxpr with hijax primitives, as that of jnp.nonzero: JAX replaces them before it lowers.
        self.to_lojax = evaluate_rule
        self.def_effectful_abstract_eval(lambda *types, held, **_: abstract(_object(held), *types))
        ad.primitive_jvps[self] = jvp_rule
        ad.primitive_transposes[self] = transpose_rule
        # The "fancy" table passes the name of the axis, which collectives inside a layer need.
        batching.fancy_primitive_batchers[self] = batch_rule
        # Every application has an object of its own, so that JAX would never reuse a cached lowering.
        mlir.register_lowering(self, lower_rule, cacheable=False)


_held_objects: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_NO_DEBUG_INFO = DebugInfo("pylayer_jax", "held object", None, None)


def _object(key: Any) -> Any:
    return _held_objects[key[0][0]]


def object_of(equation: Any) -> Any:
    """Return the object that an equation of an `ObjectPrimitive` holds."""
    return object_of_params(equation.params)


def object_of_params(params: dict[str, Any]) -> Any:
    return _object(params["held"])


# -- batch axes --------------------------------------------------------------------------------------


def is_named(axis: Any) -> bool:
    """Return whether a batch axis, as a batching rule gets it, has a name that collectives may use."""
    return type(axis.name) is not object


def vmap_over(axis: Any, function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """Return `function` under a `jax.vmap` over the batch axis that a batching rule was given."""
    return jax.vmap(
        function,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_name=axis.name,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
    )


def batch_axis_to_front(axis: Any, value: Any, dim: int | None) -> Any:
    """Move the batch axis of `value` from `dim` to the front; repeat a value without a batch axis (None)."""
    moved = vmap_over(axis, lambda x: x, (dim,), 0)(value)
    # A shared value does not vary over the mesh axes of `spmd_axis_name`, along which the devices have other examples.
    return moved if dim is not None else with_varying_axes(moved, mapped_type(axis, typeof(value)))
