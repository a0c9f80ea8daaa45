"""Defines two primitives: a function with a custom derivative rule, and a linear map with a custom transpose.

    { lambda ; a:f32[3]. let b:f32[3] = rule_function[name=Tanh] a in (b,) }      <- a layer that saves its output

    and its derivative, by jax.jvp

    { lambda ; a:f32[3] c:f32[3]. let
        b:f32[3] = rule_function[name=Tanh] a      <- the same function again: the rule holds at the next order too
        d:f32[3] = linear_map[name=Tanh] b c       <- residuals, then tangents
      in (b, d) }

A `RuleFunction` is like a `jax.custom_jvp` function: `run` computes the values, and `rule` also the tangents, by a
`LinearMap`, whose functions JAX calls only when it needs them: `evaluate` in forward mode, and `transpose`, which calls
`backward`, in reverse mode. `jax.custom_jvp` itself will not do: jax 0.10 silently loses its rule in a scan that is
differentiated twice (tests/derivatives/test_orders.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from .jaxprs import NO_DEBUG_INFO, evaluate_jaxpr, lower_jaxpr, operations, outside_effects, stage, uses_own_refs
from .traces import DebugInfo, Jaxpr, Primitive, ad, batch_traces, batching, current_trace, is_named, mlir
from .types import batched_type, full_tangent, has_tangent, tangent_type, typeof, types_of

__tracebackhide__ = True  # pytest hides these frames, as JAX does elsewhere

# -- lists with masks ----------------------------------------------------------------------------------


def select(values: Iterable[Any], mask: Sequence[bool]) -> list[Any]:
    return [x for x, is_set in zip(values, mask, strict=True) if is_set]


def scatter(values: Iterable[Any], mask: Sequence[bool]) -> list[Any]:
    """Return a list that has the values, in order, where the mask is True, and None elsewhere."""
    rest = iter(values)
    return [next(rest) if is_set else None for is_set in mask]


def merge(mask: Sequence[bool], if_set: Iterable[Any], full: Iterable[Any]) -> list[Any]:
    """Return a copy of `full` in which the values of `if_set`, in order, replace the entries where `mask` is True."""
    rest = iter(if_set)
    return [next(rest) if is_set else x for is_set, x in zip(mask, full, strict=True)]


# -- primitives with a Python object -------------------------------------------------------------------


class ObjectPrimitive(Primitive):
    """A primitive with several results, whose equations each keep one Python object alive: their *payload*.

    NOTE [payloads]
    JAX keeps the parameters of thousands of equations in caches that outlive the equations. An ordinary Python object
    as a parameter would live as long, with all that it references, such as the non-array arguments of a layer. But the
    caches hold jaxprs weakly. So the parameter is an empty jaxpr, whose debug info holds the payload. It is nested in
    tuples so that `jaxprs_in_params` skips it. tests: derivatives/test_memory.py

    A table from jaxprs to payloads, with weak references to the jaxprs, would not do: a payload that refers to its own
    equation, such as a hook that stores a tracer, would keep its key alive. tests: hooks/test_identity.py

    A jaxpr of the payload is another parameter, which JAX searches, for example for the devices of a mesh.

    NOTE [call_jaxpr]
    In a `rule_function` equation, `checkify` finds this jaxpr by the name `call_jaxpr`, and checks its operations. Then
    it binds the primitive to error values and operands, with a function in `subfuns` that computes error values and
    results. tests: derivatives/test_checkify.py

    The rules of the primitive are methods of the payload:

        run(*args) -> values                                    jvp_rule(primals, tangents) -> values, tangents
        lower_rule(context, *args) -> values of MLIR            transpose_rule(args, cotangents) -> cotangents
        abstract_rule() -> types of the values, effects         batch_rule(axis, args, dims) -> values, dims

    A None tangent or cotangent means zero, and a None in `args` is an operand whose cotangent JAX needs. `batch_rule`
    is called only if an operand is batched or the axis has a name.
    """

    # Evaluates the jaxpr of a payload with the checks of `checkify`: see NOTE [call_jaxpr].
    evaluate_checked: Callable[..., list[Any]]

    def __init__(self, name: str, jaxpr_name: str = "jaxpr") -> None:
        super().__init__(name)
        self.multiple_results = True
        self.jaxpr_name = jaxpr_name  # the parameter for the jaxpr of the payload

        def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, payload: Any, **_: Any) -> Any:
            is_zero = [type(t) is ad.Zero or getattr(t, "dtype", None) == jax.dtypes.float0 for t in tangents]
            given = [None if zero else t for zero, t in zip(is_zero, tangents, strict=True)]
            values, found = payload_at(payload).jvp_rule(primals, given)
            pairs = zip(values, found, strict=True)
            return values, [ad.Zero(tangent_type(typeof(v))) if t is None else t for v, t in pairs]

        def transpose(cotangents: Sequence[Any], *args: Any, payload: Any, **_: Any) -> list[Any]:
            given = [None if type(c) is ad.Zero else c for c in cotangents]
            wanted = list(map(ad.is_undefined_primal, args))  # the operands that need a cotangent
            known = [None if is_wanted else x for x, is_wanted in zip(args, wanted, strict=True)]
            found = payload_at(payload).transpose_rule(known, given)
            return [
                (ad.Zero(x.aval) if c is None else c) if is_wanted else None
                for c, x, is_wanted in zip(found, args, wanted, strict=True)
            ]

        def batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, payload: Any, **params: Any) -> Any:
            if all(d is None for d in dims) and not is_named(axis):
                values = self.bind(*args, payload=payload, **params)
                return values, [None] * len(values)
            return payload_at(payload).batch_rule(axis, args, dims)

        evaluate = lambda *args, payload, **_: payload_at(payload).run(*args)
        lower = lambda context, *args, payload, **_: payload_at(payload).lower_rule(context, *args)
        named_rule: Any = jvp
        named_rule.__fun_debug_info__ = NO_DEBUG_INFO  # see NOTE [names made once] in `_layer_rule.py`
        self.def_impl(evaluate)
        # JAX 0.12 and later call `to_lojax` to lower a jaxpr with hijax primitives, such as that of `jnp.nonzero`.
        self.to_lojax = evaluate
        self.def_effectful_abstract_eval(lambda *_, payload, **__: payload_at(payload).abstract_rule())
        ad.primitive_jvps[self] = jvp
        ad.primitive_transposes[self] = transpose
        # Only rules in this table get the name of the batch axis, which collectives inside a layer need.
        batching.fancy_primitive_batchers[self] = batch
        # Each equation has another payload, so JAX cannot reuse a lowering.
        mlir.register_lowering(self, lower, cacheable=False)

    def bind(self, *args: Any, payload: Any, subfuns: Sequence[Any] = (), **params: Any) -> Any:
        if subfuns:
            return self.evaluate_checked(payload_at(payload), *subfuns, *args)
        if type(payload) is tuple:  # the parameter of an equation, which JAX binds again
            return super().bind(*args, payload=payload, **params)
        return super().bind(*args, **self.params_of(payload))

    def params_of(self, payload: Any) -> dict[str, Any]:
        holder = _PayloadHolder("pylayer_jax", "payload", None, None)
        holder.payload = payload
        key = Jaxpr((), (), (), (), debug_info=holder)
        jaxpr = getattr(payload, "searched_jaxpr", getattr(payload, "jaxpr", None))
        return {"payload": ((key,),), "name": payload.name} | ({} if jaxpr is None else {self.jaxpr_name: jaxpr})


class _PayloadHolder(DebugInfo):
    payload: Any


def payload_at(key: Any) -> Any:
    return key[0][0].debug_info.payload


def payload_of(equation: Any) -> Any:
    return payload_at(equation.params["payload"]) if isinstance(equation.primitive, ObjectPrimitive) else None


rule_function_p = ObjectPrimitive("rule_function", "call_jaxpr")
linear_map_p = ObjectPrimitive("linear_map")


# -- batch axes --------------------------------------------------------------------------------------


def vmap_over(axis: Any, function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    return jax.vmap(function, in_axes, out_axes, axis.name, axis.size, axis.spmd_name)


def batch_axis_to_front(axis: Any, value: Any, dim: int | None) -> Any:
    """Move the batch axis of `value` from `dim` to the front, or repeat `value` if `dim` is None."""
    return vmap_over(axis, lambda x: x, (dim,), 0)(value)


Values = list[Any]


class RuleFunction:
    """A function of arrays with a rule for its derivative. An instance holds no array, and is equal only to itself."""

    name: str  # the name in jaxprs and errors
    jaxpr: Any = None  # None if `run` is not staged: in eager mode, `run` then gets concrete values
    n_consts: int = 0  # the first `n_consts` operands are the values that the function closes over

    @property
    def is_divisible(self) -> bool:
        """Whether JAX may split the jaxpr, as `jax.checkpoint` and dead code elimination do."""
        return not uses_own_refs(self.jaxpr)

    def run(self, *args: Any) -> Values:
        return evaluate_jaxpr(self.jaxpr, *args)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        """Compute the values and their tangents. At least one tangent is not None."""
        raise NotImplementedError

    def transpose(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        """Return the cotangents of the operands that are None in `args`. `jaxpr` may be batched code, or a part."""
        raise TypeError(f"{self.name} cannot be transposed.")

    def batch(self, axis: Any, dims: Sequence[Any], types: Sequence[Any]) -> tuple[BatchedFunction, Values]:
        """Return the batched function, and the values that it closes over, which are its first operands."""
        batched = BatchedFunction(self, axis, dims)
        if self.jaxpr is None:  # JAX can call the Python function of such an operation only once
            return batched, []
        batched.jaxpr, consts, batched.out_dims = stage(self.run_batch(axis, dims), types, self.name)
        batched.n_consts = len(consts)
        return batched, consts

    def run_batch(self, axis: Any, dims: Sequence[Any]) -> Callable[..., tuple[Values, list[Any]]]:
        """Return the batched `run`: it returns the values for a batch, and the batch axis (0 or None) of each value.

        NOTE [all outputs are batched]
        If any operand or result has a batch axis, every result that can have a tangent gets one. Otherwise the gradient
        of a shared value would count once for each example. tests: contract/test_vmap.py
        """
        any_batched = any(d is not None for d in dims)

        def one(*args: Any) -> tuple[Values, Values]:
            values, trace = self.run(*args), current_trace()
            differs = [trace in batch_traces(x) for x in values]
            all_batched = any_batched or any(differs)
            mask = [d or (all_batched and has_tangent(x)) for d, x in zip(differs, values, strict=True)]
            batched = [x if m else None for m, x in zip(mask, values, strict=True)]
            shared = [None if m else x for m, x in zip(mask, values, strict=True)]
            return batched, shared

        def run(*args: Any) -> tuple[Values, list[Any]]:
            batched, shared = vmap_over(axis, one, tuple(dims), (0, None))(*args)
            out_dims = [None if x is None else 0 for x in batched]
            return [s if b is None else b for b, s in zip(batched, shared, strict=True)], out_dims

        return run

    def lower_rule(self, context: Any, *args: Any) -> Any:
        return lower_jaxpr(context, self.jaxpr, *args)

    def abstract_rule(self) -> tuple[list[Any], Any]:
        return [v.aval for v in self.jaxpr.outvars], outside_effects(self.jaxpr)

    def jvp_rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        if any(t is not None for t in tangents):
            return self.rule(primals, tangents)
        values = apply(self, primals)
        return values, [None] * len(values)

    def transpose_rule(self, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return self.transpose(self.jaxpr, args, cotangents)

    def batch_rule(self, axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> tuple[Values, list[Any]]:
        batched, consts = self.batch(axis, dims, types_of(args))
        out_dims = batched.out_dims
        if batched.jaxpr is not None and all(d is None for d in (*dims, *out_dims)) and not batched.uses_axis():
            return apply(self, args), out_dims
        values = apply(batched, [*consts, *args])
        return values, [0] * len(values) if batched.jaxpr is None else out_dims


class BatchedFunction(RuleFunction):
    out_dims: Any = 0  # of all values; a list if it is staged, with None for a value that all examples share

    def __init__(self, inner: RuleFunction, axis: Any, dims: Sequence[Any]) -> None:
        self.inner, self.axis, self.name = inner, axis, inner.name
        self.dims = list(dims)  # batch axes of the operands of the inner function

    def run(self, *args: Any) -> Values:
        if self.jaxpr is None:
            return vmap_over(self.axis, self.inner.run, tuple(self.dims), 0)(*args)
        return super().run(*args)

    def uses_axis(self) -> bool:
        # An axis may be used although no operand or value is batched, as in `jax.lax.psum` of a shared number. But
        # batching removes the effect of a collective, or its equation if it has no effect (`jax.lax.ppermute`).
        inner, batched = self.inner.jaxpr, self.jaxpr  # before and after batching
        return outside_effects(inner) != outside_effects(batched) or operations(inner) != operations(batched)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        n, dims = self.n_consts, self.dims
        if any(t is not None for t in tangents[:n]):
            raise TypeError(f"{self.name}: its code for a batch closes over a value that is differentiated.")
        tangent_dims, given = dims, list(tangents[n:])
        if any(d is not None for d in dims):  # else the function only uses the axis by its name
            # Repeat the tangent of a shared primal, so that each example applies its own linear map. The transpose of a
            # shared map would get the sum of the cotangents of all examples, and would give a wrong result if it is not
            # linear (a layer's `backward` need not be). tests: contract/test_vmap.py
            pairs = zip(given, dims, strict=True)
            given = [t if t is None or d is not None else batch_axis_to_front(self.axis, t, None) for t, d in pairs]
            tangent_dims = [0 if d is None else d for d in dims]
        batched_rule = vmap_over(self.axis, self.inner.rule, (dims, tangent_dims), (self.out_dims, 0))
        values, found = batched_rule(list(primals[n:]), given)
        if self.jaxpr is None:
            return values, found
        # All examples share the tangent of a value that is not batched, such as a sum over the batch axis.
        pairs = zip(found, self.out_dims, strict=True)
        return values, [t if t is None or d is not None else t[0] for t, d in pairs]

    def transpose(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return self.inner.transpose(jaxpr, args, cotangents)


def apply(function: RuleFunction, operands: Sequence[Any]) -> Values:
    return rule_function_p.bind(*operands, payload=function)


# -- linear_map: residuals, tangents -> tangents of the results ----------------------------------------


class LinearMap:
    """A map that is linear in tangents for fixed residuals. `types` are those of its results. It holds no array."""

    def __init__(self, name: str, n_residuals: int, types: Sequence[Any]) -> None:
        self.name, self.n_residuals, self.types = name, n_residuals, types
        self.has_x64 = jax.enable_x64.value  # perhaps around the function alone

    def evaluate(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        raise NotImplementedError

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        """Map cotangents of the results of `evaluate` to cotangents of `tangents`."""
        raise NotImplementedError

    def run(self, *args: Any) -> Values:
        with jax.enable_x64(self.has_x64):
            return self.evaluate(args[: self.n_residuals], args[self.n_residuals :])

    def lower_rule(self, context: Any, *args: Any) -> Any:
        return mlir.lower_fun(self.run, multiple_results=True)(context, *args)

    def abstract_rule(self) -> tuple[list[Any], Any]:
        return list(self.types), frozenset()

    def jvp_rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        n = self.n_residuals
        nonzero = [t is not None for t in tangents]
        if any(nonzero[:n]):
            run = lambda *moving: self.run(*merge(nonzero, moving, primals))
            return jax.jvp(run, select(primals, nonzero), select(tangents, nonzero))
        # The derivative in the tangents is the same map, in a second equation, which reverse mode can transpose.
        full = [full_tangent(t, typeof(p)) for p, t in zip(primals[n:], tangents[n:], strict=True)]
        return apply_linear(self, primals[:n], primals[n:]), apply_linear(self, primals[:n], full)

    def transpose_rule(self, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        n = self.n_residuals
        if all(c is None for c in cotangents):
            return [None] * len(args)
        with jax.enable_x64(self.has_x64):
            return [*[None] * n, *self.transpose(args[:n], cotangents)]

    def batch_rule(self, axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> tuple[Values, list[Any]]:
        n = self.n_residuals
        # Repeat a tangent that all examples share: the transpose of the repetition sums the cotangents of the examples.
        # Do so even if the axis only has a name, over which `backward` may call `jax.lax.psum`.
        tangents = [batch_axis_to_front(axis, x, d) for x, d in zip(args[n:], dims[n:], strict=True)]
        values = apply_linear(BatchedMap(self, axis, dims[:n]), args[:n], tangents)
        return values, [0] * len(values)


class BatchedMap(LinearMap):
    """A batched linear map, whose tangents and results have the batch axis in front."""

    def __init__(self, inner: LinearMap, axis: Any, dims: Sequence[Any]) -> None:
        super().__init__(inner.name, inner.n_residuals, [batched_type(axis, t) for t in inner.types])
        self.inner, self.axis, self.has_x64 = inner, axis, inner.has_x64
        self.dims = list(dims)  # batch axes of the residuals

    def evaluate(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        return vmap_over(self.axis, self.inner.evaluate, (self.dims, 0), 0)(list(residuals), list(tangents))

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return vmap_over(self.axis, self.inner.transpose, (self.dims, 0), 0)(list(residuals), list(cotangents))


def apply_linear(linear: LinearMap, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
    return linear_map_p.bind(*residuals, *tangents, payload=linear)


# -- a value with the tangent of another, and an identity that batches --------------------------------


class _ValueWithTangent(RuleFunction):
    def __init__(self, types: Sequence[Any]) -> None:
        self.name = "with_tangent"
        self.jaxpr, _, _ = stage(lambda _, value: ([value], None), types, self.name)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        return apply(self, primals), [tangents[0]]


def value_with_tangent_of(tensor: Any, value: Any) -> Any:
    return apply(_ValueWithTangent([typeof(tensor), typeof(value)]), (tensor, value))[0]


class Rebatch(RuleFunction):
    """`(*operands, *outputs) -> outputs`, which batches, once per `jax.vmap`: see NOTE [all outputs are batched]."""

    name = "outputs"

    def __init__(self, n_operands: int, types: tuple[Any, ...]) -> None:
        self.n_operands = n_operands
        self.jaxpr, _, _ = stage(lambda *xs: (xs[n_operands:], None), types, self.name)

    def without_unused(self, used: Sequence[bool]) -> tuple[RuleFunction, list[bool]]:
        is_read = [True] * self.n_operands + list(used)  # the operands decide whether the outputs are batched
        types = select([v.aval for v in self.jaxpr.invars], is_read)
        return Rebatch(self.n_operands, tuple(types)), is_read

    def lower_rule(self, context: Any, *args: Any) -> Any:
        return args[self.n_operands :]

    def batch_rule(self, axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> tuple[Values, list[Any]]:
        """Batch without a trace of this function: each layer of a program that is not differentiated has one."""
        n, any_batched = self.n_operands, any([d is not None for d in dims])  # noqa: C419 - a list is faster
        values, out_dims = list[Any](), list[Any]()
        for x, d, v in zip(args[n:], dims[n:], self.jaxpr.outvars, strict=True):
            is_batch = d is not None or (any_batched and has_tangent(v.aval))
            values.append(batch_axis_to_front(axis, x, d) if is_batch and d != 0 else x)
            out_dims.append(0 if is_batch else None)
        return as_batched_as(args[:n], values), out_dims


@functools.lru_cache(maxsize=1024)  # with equal parameters, JAX reuses the types of the results
def _params_of_rebatch(n_operands: int, types: tuple[Any, ...]) -> dict[str, Any]:
    return rule_function_p.params_of(Rebatch(n_operands, types))


def as_batched_as(operands: Sequence[Any], outputs: Sequence[Any]) -> Values:
    """Return `outputs`. Under `jax.vmap`, batch them as a `RuleFunction` of `operands` batches its outputs."""
    values = [*operands, *outputs]
    return rule_function_p.bind(*values, **_params_of_rebatch(len(operands), tuple(types_of(values))))
