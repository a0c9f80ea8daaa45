"""Defines two primitives: a function with a custom derivative rule, and a linear map with a custom transpose.

A `RuleFunction` is like a `jax.custom_jvp` function: `run` computes the values, and `rule` computes values and
tangents. A `rule` may apply its own `RuleFunction` to the primals. When JAX differentiates the results of such a rule,
for example for a second derivative, JAX uses the rule again. A rule computes tangents by a `LinearMap`. A `LinearMap`
has two Python functions, which JAX calls only when it needs them: `evaluate` in forward mode, and `transpose` in
reverse mode. This is the jaxpr of a layer that saves its output:

    { lambda ; a:f32[3]. let b:f32[3] = rule_function[name=Tanh] a in (b,) }

    and its derivative (by jax.jvp, before JAX transposes or evaluates the linear map)

    { lambda ; a:f32[3] c:f32[3]. let
        b:f32[3] = rule_function[name=Tanh] a      <- the same function again: the rule holds at the next order too
        d:f32[3] = linear_map[name=Tanh] b c       <- residuals, then tangents
      in (b, d) }

The `transpose` of this linear map calls `backward`. `jax.custom_jvp` cannot replace `RuleFunction`: jax 0.10 silently
loses a custom_jvp rule in a scan that is differentiated twice. tests/derivatives/test_orders.py has an example in plain
JAX.

The module also defines identity functions, which affect only how JAX or XLA transforms code. The module also defines
the rules by which `jax.checkpoint`, dead code elimination and `checkify` treat a `rule_function`. This module does not
import the modules about layers.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from .jaxprs import (
    evaluate_jaxpr,
    is_literal,
    jaxpr_and_consts,
    lower_jaxpr,
    operations,
    outside_effects,
    stage,
    uses_own_refs,
)
from .traces import (
    DebugInfo,
    Jaxpr,
    Primitive,
    ad,
    batching,
    current_trace,
    eval_jaxpr,
    ir,
    is_batched,
    is_named,
    lower_with_sharding_in_types,
    mlir,
    partial_eval,
    set_current_trace,
    stablehlo,
)
from .types import batched_type, has_tangent, tangent_type, typeof, types_of, with_varying_axes, zeros_of

# -- lists with masks ----------------------------------------------------------------------------------


def select(values: Iterable[Any], mask: Sequence[bool]) -> list[Any]:
    """Return the values at the positions where the mask is True."""
    return [x for x, is_set in zip(values, mask, strict=True) if is_set]


def scatter(values: Iterable[Any], mask: Sequence[bool]) -> list[Any]:
    """Return a list that has the values, in order, where the mask is True, and None elsewhere."""
    return merge(mask, values, [None] * len(mask))


def merge(mask: Sequence[bool], if_set: Iterable[Any], full: Iterable[Any]) -> list[Any]:
    """Return a copy of `full` in which values of `if_set` replace the entries where `mask` is True.

    The values of `if_set` fill the True positions of `mask` in order.
    """
    rest = iter(if_set)
    return [next(rest) if is_set else x for is_set, x in zip(mask, full, strict=True)]


# -- primitives with a Python object -------------------------------------------------------------------


is_undefined = ad.is_undefined_primal  # marks the operands for which a transpose rule must produce cotangents


class ObjectPrimitive(Primitive):
    """A primitive with several results. Each equation holds one Python object, its *payload*.

    The payload lives as long as the equation.

    NOTE [payloads]
    JAX keeps the parameters of thousands of equations in caches that outlive the equations. If a parameter were an
    ordinary Python object, the caches would keep this object alive. The caches would also keep alive everything that
    this object references, such as the non-array arguments of a layer. But JAX's caches hold jaxprs weakly. Therefore a
    parameter of the equation is an empty jaxpr, and the debug info of this empty jaxpr holds the Python object. The
    empty jaxpr is nested in tuples so that `jaxprs_in_params` skips it. tests: derivatives/test_memory.py

    A table that maps jaxprs to Python objects, with weak references to the jaxprs, could also keep objects alive
    forever. If an object refers to its own equation, as a hook that stores a tracer does, the table would keep the
    object, and with it its own key, alive forever. tests: hooks/test_identity.py

    If the payload has a jaxpr, another parameter of the equation holds this jaxpr. JAX searches the jaxprs in the
    parameters of an equation, for example to find the devices of a mesh.

    NOTE [call_jaxpr]
    The parameter of a `rule_function` equation that holds the jaxpr is named `call_jaxpr`. `checkify` finds the jaxpr
    by the parameter name `call_jaxpr`, and checks the operations in this jaxpr. For an equation with this parameter,
    `checkify` binds the primitive to error values and operands, with a function in `subfuns` that computes error values
    and results. tests: derivatives/test_checkify.py
    """

    # If `checkify` adds error checks to the jaxpr of a payload, this function evaluates the jaxpr with these checks:
    # see NOTE [call_jaxpr].
    evaluate_checked: Callable[..., list[Any]]

    def __init__(self, name: str, jaxpr_name: str = "jaxpr") -> None:
        super().__init__(name)
        self.multiple_results = True
        self.jaxpr_name = jaxpr_name  # the parameter for the jaxpr of the payload

    def bind(self, *args: Any, payload: Any, subfuns: Sequence[Any] = (), **params: Any) -> Any:
        __tracebackhide__ = True
        if subfuns:
            return self.evaluate_checked(_payload(payload), *subfuns, *args)
        if type(payload) is tuple:  # the parameter of an equation, which JAX binds again
            return super().bind(*args, payload=payload, **params)
        return super().bind(*args, **self.params_of(payload))

    def params_of(self, payload: Any) -> dict[str, Any]:
        """Return the parameters of a new equation that holds the Python object `payload`."""
        holder = _PayloadHolder("pylayer_jax", "payload", None, None)
        holder.payload = payload
        key = Jaxpr((), (), (), (), debug_info=holder)
        jaxpr = None if getattr(payload, "is_opaque", False) else getattr(payload, "jaxpr", None)
        return {"payload": ((key,),), "name": payload.name} | ({} if jaxpr is None else {self.jaxpr_name: jaxpr})

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
        """Register the rules of this primitive in the tables of `jax.interpreters`.

        The first argument of each rule is the payload, which is the Python object that the equation holds.

        In the rules, a None tangent or cotangent means zero. The JVP rule is `jvp(payload, primals, tangents) ->
        values, tangents`. The transpose rule is `transpose(payload, args, cotangents) -> cotangents`. In `args`, None
        takes the place of each operand whose cotangent JAX needs. The batching rule is `batch(payload, axis, args,
        dims) -> values, dims`. `batch` is called only if an operand is batched or the batch axis has a name.
        """

        def jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], *, payload: Any, **_: Any) -> Any:
            __tracebackhide__ = True
            given = [None if type(t) is ad.Zero else t for t in tangents]
            values, found = jvp(_payload(payload), primals, given)
            return values, [
                ad.Zero(tangent_type(typeof(v))) if t is None else t for v, t in zip(values, found, strict=True)
            ]

        def transpose_rule(cotangents: Sequence[Any], *args: Any, payload: Any, **_: Any) -> list[Any]:
            __tracebackhide__ = True
            given = [None if type(c) is ad.Zero else c for c in cotangents]
            found = transpose(_payload(payload), [None if is_undefined(x) else x for x in args], given)
            return [
                (ad.Zero(x.aval) if c is None else c) if is_undefined(x) else None
                for c, x in zip(found, args, strict=True)
            ]

        def batch_rule(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, payload: Any, **params: Any) -> Any:
            __tracebackhide__ = True
            if all(d is None for d in dims) and not is_named(axis):
                values = self.bind(*args, payload=payload, **params)
                return values, [None] * len(values)
            return batch(_payload(payload), axis, args, dims)

        def evaluate_rule(*args: Any, payload: Any, **_: Any) -> Any:
            __tracebackhide__ = True
            return evaluate(_payload(payload), *args)

        def lower_rule(context: Any, *args: Any, payload: Any, **_: Any) -> Any:
            __tracebackhide__ = True
            return lower(_payload(payload), context, *args)

        named_rule: Any = jvp_rule
        named_rule.__fun_debug_info__ = _NO_DEBUG_INFO  # see NOTE [names made once] in `_custom_vjp.py`
        self.def_impl(evaluate_rule)
        # Some jaxprs contain hijax primitives. For example, the jaxpr of `jnp.nonzero` contains such a primitive. To
        # lower a jaxpr with hijax primitives, JAX 0.12 and later call the method `to_lojax` of a primitive.
        self.to_lojax = evaluate_rule
        self.def_effectful_abstract_eval(lambda *types, payload, **_: abstract(_payload(payload), *types))
        ad.primitive_jvps[self] = jvp_rule
        ad.primitive_transposes[self] = transpose_rule
        # JAX passes the name of the batch axis to a batching rule in the table `fancy_primitive_batchers`. Collectives
        # inside a layer need this name.
        batching.fancy_primitive_batchers[self] = batch_rule
        # The parameters of each equation hold a different object, so JAX cannot reuse the lowering of one equation for
        # another equation.
        mlir.register_lowering(self, lower_rule, cacheable=False)


_NO_DEBUG_INFO = DebugInfo("pylayer_jax", "a rule of a primitive", None, None)


class _PayloadHolder(DebugInfo):
    payload: Any


def _payload(key: Any) -> Any:
    return key[0][0].debug_info.payload


def payload_of(equation: Any) -> Any:
    """Return the Python object that is stored in the parameters of an equation with an `ObjectPrimitive`."""
    return payload_of_params(equation.params)


def payload_of_params(params: dict[str, Any]) -> Any:
    return _payload(params["payload"])


# -- batch axes --------------------------------------------------------------------------------------


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
    # A value that all examples share does not vary over the mesh axes of `spmd_axis_name`. The batch has to vary over
    # these axes.
    return moved if dim is not None else with_varying_axes(moved, batched_type(axis, typeof(value)))


Values = list[Any]

# The batch axis of each value, None for a value that all examples share. `OutDims` is None if every value has its batch
# axis in front.
OutDims = list[Any] | None


class RuleFunction:
    """A function of arrays with a rule for its derivative. An instance holds no array, and is equal only to itself."""

    name: str  # the name in jaxprs and errors
    jaxpr: Any = None  # None if `run` is not staged: in eager mode, `run` then gets concrete values
    n_consts: int = 0  # the first `n_consts` operands are the values that the function closes over

    @property
    def is_divisible(self) -> bool:
        """Whether JAX may split the jaxpr, as `jax.checkpoint` and dead code elimination do."""
        return not uses_own_refs(self.jaxpr)

    def mask_of_kept_operands(self) -> list[bool]:
        """Return a mask of the operands that dead code elimination has to keep.

        The derivative rule differentiates the whole function. So dead code elimination has to keep all operands of the
        function.
        """
        return [True] * len(self.jaxpr.invars)

    def without_unused(self, used: Sequence[bool]) -> tuple[RuleFunction, list[bool]]:
        """Return a function that computes only those results whose entry in the mask `used` is True.

        Also return a mask of the operands that the new function reads.

        If JAX may not evaluate only a part of this function, return this function unchanged.
        """
        if not self.is_divisible:
            return self, [True] * len(self.jaxpr.invars)
        code, is_read = partial_eval.dce_jaxpr(self.jaxpr, list(used), self.mask_of_kept_operands())
        return self.part(code, [i for i, is_used in enumerate(used) if is_used], is_read), list(is_read)

    def part(self, code: Any, positions: Sequence[int], is_read: Sequence[bool]) -> RuleFunction:
        """Return a `RuleFunction` for a part of this function.

        The jaxpr `code` computes the results of this function whose indices are in `positions`.

        `is_read` is a mask of the operands of this function. The inputs of the jaxpr `code` are the operands whose
        entry in this mask is True.
        """
        return PartialFunction(self, code, 0, positions)

    def run(self, *args: Any) -> Values:
        """Compute the values of the function."""
        __tracebackhide__ = True
        return evaluate_jaxpr(self.jaxpr, *args)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        """Compute the values and their tangents. A None tangent means zero; at least one tangent is not None."""
        raise NotImplementedError

    def transpose(self, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        """Return one entry per operand: its cotangent if `args` has None for the operand, and None otherwise.

        The function has to be linear in these operands.
        """
        raise TypeError(f"{self.name} cannot be transposed.")

    def transpose_code(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        """Transpose `jaxpr`: the batched code of this function, or the part that computes some of its results.

        The method `transpose` of a subclass reads `self.jaxpr`. Therefore this method sets the attribute `jaxpr` of a
        copy of the function, and transposes the copy.
        """
        function = copy.copy(self)
        function.jaxpr = jaxpr
        return function.transpose(args, cotangents)

    def lower(self, context: Any, args: Sequence[Any]) -> Any:
        return lower_jaxpr(context, self.jaxpr, *args)

    def batch(self, axis: Any, dims: Sequence[Any], types: Sequence[Any]) -> tuple[RuleFunction, Values, OutDims]:
        """Return the batched function, the values that it closes over (its first operands), and its out axes."""
        __tracebackhide__ = True
        jaxpr, consts, out_dims = stage(self.run_batch(axis, dims), types, self.name)
        return BatchedFunction(self, axis, dims, out_dims, jaxpr, len(consts)), consts, out_dims

    def bind_batch(self, axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> tuple[Values, list[Any]]:
        """Apply the batched function to batches. Return its values, and the batch axis (0 or None) of each."""
        __tracebackhide__ = True
        types = [typeof(x) for x in args]
        batched, consts, out_dims = self.batch(axis, dims, types)
        if out_dims is not None and all(d is None for d in (*dims, *out_dims)) and not batched.uses_axis(types):
            return apply(self, args), out_dims
        values = apply(batched, [*consts, *args])
        return values, [0] * len(values) if out_dims is None else out_dims

    def uses_axis(self, types: Sequence[Any]) -> bool:
        """Return whether this function uses the name of its batch axis. `types` are the types of its operands."""
        return False

    def run_batch(self, axis: Any, dims: Sequence[Any]) -> Callable[..., tuple[Values, list[Any]]]:
        """Return the batched version of `run`.

        It returns the values for a batch, and the batch axis (0 or None) of each value.

        NOTE [all outputs are batched]
        If any operand or result has a batch axis, then every result that can have a tangent gets a batch axis.
        Otherwise every example would get the cotangent of the shared value, and its gradient would count once for each
        example. tests: contract/test_vmap.py
        """
        any_batched = any(d is not None for d in dims)

        def one(*args: Any) -> tuple[Values, Values]:
            __tracebackhide__ = True
            values, trace = self.run(*args), current_trace()
            differs = [is_batched(x) and x._trace is trace for x in values]
            all_batched = any_batched or any(differs)
            mask = [d or (all_batched and has_tangent(x)) for d, x in zip(differs, values, strict=True)]
            batched = [x if m else None for m, x in zip(mask, values, strict=True)]
            shared = [None if m else x for m, x in zip(mask, values, strict=True)]
            return batched, shared

        def run(*args: Any) -> tuple[Values, list[Any]]:
            __tracebackhide__ = True
            # In `batched`, None takes the place of each value without a batch axis. In `shared`, None takes the place
            # of each value with a batch axis.
            batched, shared = vmap_over(axis, one, tuple(dims), (0, None))(*args)
            out_dims = [None if x is None else 0 for x in batched]
            return [s if b is None else b for b, s in zip(batched, shared, strict=True)], out_dims

        return run


class BatchedFunction(RuleFunction):
    """A `RuleFunction` for a batch of examples. Under nested `jax.vmap`, one `BatchedFunction` contains another."""

    def __init__(
        self,
        inner: RuleFunction,
        axis: Any,
        dims: Sequence[Any],
        out_dims: OutDims = None,
        jaxpr: Any = None,
        n_consts: int = 0,
    ) -> None:
        self.inner, self.axis, self.name, self.jaxpr, self.n_consts = inner, axis, inner.name, jaxpr, n_consts
        self.dims = list(dims)  # batch axes of the operands of the inner function
        self.out_dims = out_dims

    def uses_axis(self, types: Sequence[Any]) -> bool:
        """Return whether this function uses the name of its batch axis. `types` are the types of its operands.

        A function may use the name of its batch axis although neither its operands nor its values are batched. For
        example, `jax.lax.psum` of a number that all examples share returns a number that all examples share. Therefore
        this method compares the jaxpr before batching with the jaxpr after batching. Batching removes the effect of a
        collective. Batching `jax.lax.ppermute`, which has no effect, removes its equation.
        """
        inner, batched = self.inner.jaxpr, self.jaxpr  # before and after batching
        if inner is None:
            inner = stage(lambda *args: (self.inner.run(*args), None), types, self.name)[0]
        return outside_effects(inner) != outside_effects(batched) or operations(inner) != operations(batched)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        """Batch the rule of the inner function.

        A tangent has the same batch axis as its primal. If all examples share a primal, but not all primals, its
        tangent is repeated. So each example applies its own linear map. Otherwise the transpose of the linear map would
        get the sum of the cotangents of all examples. If it is not linear (a layer's `backward` need not be), its
        result would be wrong. tests: contract/test_vmap.py
        """
        __tracebackhide__ = True
        n, dims = self.n_consts, self.dims
        if any(t is not None for t in tangents[:n]):
            raise TypeError(f"{self.name}: its code for a batch closes over a value that is differentiated.")
        tangent_dims, given = self._with_repeated_tangents(tangents[n:])
        out_dims = 0 if self.out_dims is None else self.out_dims
        values, found = vmap_over(self.axis, self.inner.rule, (dims, tangent_dims), (out_dims, 0))(
            list(primals[n:]), given
        )
        if self.out_dims is None:
            return values, found
        # All examples share the tangent of a value that is not batched, such as a sum over the batch axis.
        pairs = zip(found, self.out_dims, strict=True)
        return values, [t if t is None or d is not None else t[0] for t, d in pairs]

    def _with_repeated_tangents(self, tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the batch axes of tangents, and the tangents.

        If an operand is batched, a tangent that all examples share is repeated.
        """
        if all(d is None for d in self.dims):  # the function only uses the axis by its name
            return self.dims, list(tangents)
        repeated = [
            t if t is None or d is not None else batch_axis_to_front(self.axis, t, None)
            for t, d in zip(tangents, self.dims, strict=True)
        ]
        return [0 if d is None else d for d in self.dims], repeated

    def transpose(self, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return self.inner.transpose_code(self.jaxpr, args, cotangents)


class UnstagedBatch(BatchedFunction):
    """A batched function that is not staged.

    The method `run` of this class applies `jax.vmap` to the method `run` of the unbatched function.

    Every value has batch axis 0.
    """

    def run(self, *args: Any) -> Values:
        __tracebackhide__ = True
        return vmap_over(self.axis, self.inner.run, tuple(self.dims), 0)(*args)

    def batch(self, axis: Any, dims: Sequence[Any], types: Sequence[Any]) -> tuple[RuleFunction, Values, OutDims]:
        return UnstagedBatch(self, axis, dims), [], None


def apply(function: RuleFunction, operands: Sequence[Any]) -> Values:
    """Apply a function to its operands, under all active transformations."""
    __tracebackhide__ = True
    return rule_function_p.bind(*operands, payload=function)


# -- rule_function: operands -> values ----------------------------------------------------------------

rule_function_p = ObjectPrimitive("rule_function", "call_jaxpr")


def _jvp(function: RuleFunction, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
    __tracebackhide__ = True
    given = [t if t is not None and has_tangent(typeof(p)) else None for p, t in zip(primals, tangents, strict=True)]
    if any(t is not None for t in given):
        return function.rule(primals, given)
    values = apply(function, primals)
    return values, [None] * len(values)


def _batch(function: RuleFunction, axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> tuple[Values, list[Any]]:
    __tracebackhide__ = True
    return function.bind_batch(axis, args, dims)


def _run(function: RuleFunction, *args: Any) -> Values:
    __tracebackhide__ = True
    return function.run(*args)


rule_function_p.register(
    evaluate=_run,
    abstract=lambda function, *_: ([v.aval for v in function.jaxpr.outvars], outside_effects(function.jaxpr)),
    jvp=_jvp,
    batch=_batch,
    transpose=lambda function, args, cotangents: function.transpose(args, cotangents),
    lower=lambda function, context, *args: function.lower(context, args),
)


# -- linear_map: residuals, tangents -> tangents of the results ----------------------------------------

linear_map_p = ObjectPrimitive("linear_map")


class LinearMap:
    """A map of tangents, which is linear in the tangents for fixed residuals.

    An instance holds no array, and is equal only to itself.
    """

    name: str
    n_residuals: int
    types: Sequence[Any]  # types of the results
    nonlinearity = "a linear map whose residuals depend on them"  # after "it has the operation", in `linearity.py`

    def evaluate(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        """Compute the tangents of the results."""
        raise NotImplementedError

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        """Map cotangents of `evaluate`'s results to cotangents of its argument `tangents`. None means zero."""
        raise NotImplementedError

    def check_derivative(self) -> None:
        """Raise an error if a derivative of this linear map with respect to its residuals is forbidden."""


class BatchedMap(LinearMap):
    """A batched linear map, whose tangents and results have the batch axis in front."""

    def __init__(self, inner: LinearMap, axis: Any, dims: Sequence[Any]) -> None:
        self.inner, self.axis, self.name, self.nonlinearity = inner, axis, inner.name, inner.nonlinearity
        self.dims = list(dims)  # batch axes of the residuals
        self.n_residuals = inner.n_residuals
        self.types = [batched_type(axis, t) for t in inner.types]

    def evaluate(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        return vmap_over(self.axis, self.inner.evaluate, (self.dims, 0), 0)(list(residuals), list(tangents))

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        return vmap_over(self.axis, self.inner.transpose, (self.dims, 0), 0)(list(residuals), list(cotangents))

    def check_derivative(self) -> None:
        self.inner.check_derivative()


def apply_linear(linear: LinearMap, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
    """Apply a linear map to residuals and tangents, under all active transformations."""
    __tracebackhide__ = True
    return linear_map_p.bind(*residuals, *tangents, payload=linear)


def _evaluate_linear(linear: LinearMap, *args: Any) -> Values:
    __tracebackhide__ = True
    return linear.evaluate(args[: linear.n_residuals], args[linear.n_residuals :])


def _jvp_linear(linear: LinearMap, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
    __tracebackhide__ = True
    n = linear.n_residuals
    nonzero = [t is not None for t in tangents]
    if any(nonzero[:n]):
        linear.check_derivative()

        def evaluate(*moving: Any) -> Values:
            __tracebackhide__ = True
            return _evaluate_linear(linear, *merge(nonzero, moving, primals))

        return jax.jvp(evaluate, select(primals, nonzero), select(tangents, nonzero))
    # The map is linear in its tangents. The derivative of a linear map with respect to its tangents is the same linear
    # map. So apply the same linear map a second time, in a second equation, to compute the tangents of the results.
    # Reverse mode can then transpose the new equation.
    pairs = zip(primals[n:], tangents[n:], strict=True)
    full = [zeros_of(tangent_type(typeof(p))) if t is None else t for p, t in pairs]
    return apply_linear(linear, primals[:n], primals[n:]), apply_linear(linear, primals[:n], full)


def _transpose_linear(linear: LinearMap, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
    __tracebackhide__ = True
    n = linear.n_residuals
    if all(c is None for c in cotangents):
        return [None] * len(args)
    return [*[None] * n, *linear.transpose(args[:n], cotangents)]


def _batch_linear(linear: LinearMap, axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> tuple[Values, list[Any]]:
    __tracebackhide__ = True
    n = linear.n_residuals
    # Repeat a tangent that all examples share: the transpose of the repetition sums the cotangents of the examples. If
    # the batch axis has a name, the tangents are repeated even when no operand is batched. This repetition is necessary
    # because the method `evaluate` of the linear map may use the name of the batch axis. For example, `backward` may
    # call `jax.lax.psum` over the named axis.
    tangents = [batch_axis_to_front(axis, x, d) for x, d in zip(args[n:], dims[n:], strict=True)]
    values = apply_linear(BatchedMap(linear, axis, dims[:n]), args[:n], tangents)
    return values, [0] * len(values)


def _lower_linear(linear: LinearMap, context: Any, *args: Any) -> Any:
    __tracebackhide__ = True
    return mlir.lower_fun(functools.partial(_evaluate_linear, linear), multiple_results=True)(context, *args)


linear_map_p.register(
    evaluate=_evaluate_linear,
    abstract=lambda linear, *_: (list(linear.types), frozenset()),
    jvp=_jvp_linear,
    batch=_batch_linear,
    transpose=_transpose_linear,
    lower=_lower_linear,
)


# -- identities ----------------------------------------------------------------------------------------


_BARRIER = "barrier"
_WAIT = "wait"  # a barrier that keeps all operands as long as one result is used


class Identity(RuleFunction):
    """A function that returns its operands unchanged, and affects only how JAX or XLA transforms code.

    In a partial evaluation, `_partial_eval` applies an `Identity` to the unknown operands only. Therefore JAX never
    transposes an `Identity` with respect to only some of its operands. If `error` is given, the derivative of the
    function raises the exception that `error` makes.
    """

    # JAX looks into the jaxprs among the parameters of an equation several times while it lowers a program. To save
    # time, the equation of an `Identity` does not have the jaxpr of the `Identity` as a parameter.
    is_opaque = True

    def __init__(self, name: str, types: tuple[Any, ...], error: Callable[[], Exception] | None = None) -> None:
        self.name, self.error, self.jaxpr = name, error, _jaxpr(name, types)

    def without_unused(self, used: Sequence[bool]) -> tuple[RuleFunction, list[bool]]:
        if self.name == _WAIT:  # XLA waits for all operands
            return self, [True] * len(used)
        return self.of(select([v.aval for v in self.jaxpr.outvars], used)), list(used)

    def of(self, types: Sequence[Any]) -> Identity:
        """Return the same identity function for operands of the types `types`."""
        return Identity(self.name, tuple(types), self.error)

    @property
    def is_divisible(self) -> bool:
        return False  # a part would have more operands than results, so it would be no identity

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
        # Lowering the jaxpr, which has this one equation, would take ten times as many Python calls as this code.
        values = stablehlo.OptimizationBarrierOp(args).results
        if jax.sharding.get_abstract_mesh().empty and context.avals_out[0].sharding.mesh.empty:
            return values
        return [lower_with_sharding_in_types(context, x, t) for x, t in zip(values, context.avals_out, strict=True)]


@functools.lru_cache(maxsize=1024)
def _jaxpr(name: str, types: tuple[Any, ...]) -> Any:
    values = jax.lax.optimization_barrier if name in (_BARRIER, _WAIT) else list
    return stage(lambda *xs: (values(xs), None), types, name)[0]


def _partial_eval(trace: Any, *tracers: Any, **params: Any) -> Any:
    """Evaluate a `rule_function` with known and unknown operands. Bind an `Identity` for the unknown operands only.

    Therefore JAX never transposes an `Identity` with respect to only some of its operands.
    """
    __tracebackhide__ = True
    unknown = [not tracer.is_known() for tracer in tracers]
    function = payload_of_params(params)
    if not isinstance(function, Identity) or all(unknown) or not any(unknown):
        return trace.default_process_primitive(rule_function_p, tracers, params)
    operands = select(tracers, unknown)
    with set_current_trace(trace):
        bound = iter(apply(function.of([x.aval for x in operands]), operands))
    return [next(bound) if is_one else x.pval.get_known() for is_one, x in zip(unknown, tracers, strict=True)]


partial_eval.custom_partial_eval_rules[rule_function_p] = _partial_eval


def barrier(values: Sequence[Any], waits: bool = False) -> Values:
    """Return the values behind a barrier. XLA computes all of these values before it uses any of them.

    It optimizes no code across the barrier.

    If `waits` is True, the barrier also waits for values that the program does not use after the barrier. Otherwise JAX
    may drop these values. tests: `test_memory_of_a_compiled_step` in hooks/test_packers.py

    In jax 0.10, the JVP rule of `jax.lax.optimization_barrier` puts all tangents behind a second barrier, and makes
    arrays of zeros for the tangents that are zero. In contrast, the derivative rule of an `Identity` returns the
    tangents unchanged.
    """
    return apply(Identity(_WAIT if waits else _BARRIER, tuple([typeof(x) for x in values])), values)


def forbid_derivative(values: Sequence[Any], error: Callable[[], Exception]) -> Values:
    """Return the values unchanged.

    If JAX differentiates any of these values, the exception that `error` returns is raised.
    """
    types = tuple([typeof(x) for x in values])
    return apply(Identity("forbid_derivative", types, error), values) if values else []


def leave_mark(name: str) -> None:
    """Add an equation without operands to the jaxpr that JAX is tracing. `is_mark` recognizes its payload."""
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
    """The function `(*operands, *outputs) -> outputs`, which computes nothing.

    Under `jax.vmap`, each output of this function that can have a tangent has a batch axis: see NOTE [all outputs are
    batched]. It has no rule for a derivative, since JAX does not differentiate the primal function of a custom_vjp
    function.
    """

    name = "outputs"

    def __init__(self, n_operands: int, types: tuple[Any, ...]) -> None:
        self.n_operands = n_operands
        self.jaxpr, _, _ = stage(lambda *xs: (xs[n_operands:], None), types, self.name)

    def mask_of_kept_operands(self) -> list[bool]:
        return [i < self.n_operands for i in range(len(self.jaxpr.invars))]  # they decide whether outputs are batched

    def lower(self, context: Any, args: Sequence[Any]) -> Any:
        return args[self.n_operands :]

    def bind_batch(self, axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> tuple[Values, list[Any]]:
        """Batch without a trace of this function: each layer of a program that is not differentiated has one."""
        n, any_batched = self.n_operands, any([d is not None for d in dims])  # noqa: C419 - a list is faster
        values, out_dims = list[Any](), list[Any]()
        for x, d, v in zip(args[n:], dims[n:], self.jaxpr.outvars, strict=True):
            is_batch = d is not None or (any_batched and has_tangent(v.aval))
            values.append(batch_axis_to_front(axis, x, d) if is_batch and d != 0 else x)
            out_dims.append(0 if is_batch else None)
        return as_batched_as(args[:n], values), out_dims


@functools.lru_cache(maxsize=1024)  # with equal parameters, JAX reuses the types of the results
def _params_of_outputs(n_operands: int, types: tuple[Any, ...]) -> dict[str, Any]:
    return rule_function_p.params_of(_Outputs(n_operands, types))


def as_batched_as(operands: Sequence[Any], outputs: Sequence[Any]) -> Values:
    """Return `outputs` unchanged. Under `jax.vmap`, batch `outputs` as a `RuleFunction` batches its outputs."""
    values = [*operands, *outputs]
    return rule_function_p.bind(*values, **_params_of_outputs(len(operands), tuple(types_of(values))))


# -- parts of a function -------------------------------------------------------------------------------------
#
# `jax.checkpoint` saves some values of a function and computes the others again for the backward pass. Its policy
# decides which results of operations are saved. `_divide` divides a `rule_function` into two by this policy, as JAX
# divides a jitted function. With a policy that saves matrix products,
#
#     c = rule_function[call_jaxpr={ d = dot_general a b; c = tanh d }] a b
#
# becomes an equation of the forward pass and one of the backward pass:
#
#     c, d = rule_function[call_jaxpr={ d = dot_general a b; c = tanh d }] a b
#     c    = rule_function[call_jaxpr={ c = tanh d }] d a b
#
# Each part has the derivative of the whole function with respect to `a` and `b`. Therefore `a` and `b` are operands of
# both parts, although the code of the second reads only `d`. Its rule ignores the tangent of the residual `d`, since
# the tangents of `a` and `b` account for it. tests: derivatives/test_checkpoint.py


class PartialFunction(RuleFunction):
    """A function that computes some results of the `RuleFunction` `whole`, with the derivative of `whole`.

    The first `n_residuals` operands are residuals. Another `PartialFunction` of `whole` computes these residuals. The
    remaining operands are the operands of `whole`. `positions` holds indices of results of `whole`. The first
    `len(positions)` results of this function are the results of `whole` at these indices. The other results of this
    function are residuals, which another `PartialFunction` of `whole` reads.
    """

    def __init__(self, whole: RuleFunction, jaxpr: Any, n_residuals: int, positions: Sequence[int]) -> None:
        debug = DebugInfo("pylayer_jax", f"part of {whole.name}", None, None)
        self.whole, self.name, self.jaxpr = whole, whole.name, jaxpr.replace(debug_info=debug)
        self.n_residuals, self.positions = n_residuals, list(positions)

    def mask_of_kept_operands(self) -> list[bool]:
        return [i >= self.n_residuals for i in range(len(self.jaxpr.invars))]

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        __tracebackhide__ = True
        n = self.n_residuals
        values = apply(self, primals)
        if all(t is None for t in tangents[n:]):
            return values, [None] * len(values)
        _, found = self.whole.rule(primals[n:], tangents[n:])
        return values, [*[found[i] for i in self.positions], *[None] * (len(values) - len(self.positions))]

    def part(self, code: Any, positions: Sequence[int], is_read: Sequence[bool]) -> RuleFunction:
        of_whole = [self.positions[i] for i in positions if i < len(self.positions)]
        return PartialFunction(self.whole, code, sum(is_read[: self.n_residuals]), of_whole)

    def transpose(self, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return self.whole.transpose_code(self.jaxpr, args, cotangents)


def _with_function(equation: Any, function: RuleFunction, **changes: Any) -> Any:
    """Return a copy of `equation` in which `function` replaces the `RuleFunction` of `equation`."""
    return equation.replace(params=rule_function_p.params_of(function), effects=function.jaxpr.effects, **changes)


# -- jax.checkpoint ------------------------------------------------------------------------------------


def _divide(saveable: Callable[..., Any], unknown: Sequence[bool], instantiated: Sequence[bool], equation: Any) -> Any:
    """Split an equation into one equation for the forward pass and one for the backward pass.

    This is a rule of `partial_eval_jaxpr_custom_rules`.

    Returns:
        The equation of the forward pass, the equation of the backward pass, two masks of the results (known only in the
        backward pass; computed in the backward pass), and the variables that the backward pass needs from the forward
        pass.
    """
    function = payload_of(equation)
    if any(unknown) or not function.is_divisible:
        return _keep_whole(saveable, any(unknown), instantiated, equation)
    known, staged, unknown_out, instantiated_out, residuals = _divide_jitted(
        saveable, unknown, instantiated, equation, function.jaxpr
    )
    code, _ = jaxpr_and_consts(known.params["jaxpr"])
    first = PartialFunction(function, code, 0, range(len(equation.outvars)))
    forward = _with_function(equation, first, invars=known.invars, outvars=known.outvars)
    if not any(instantiated_out):
        return forward, None, unknown_out, instantiated_out, []
    # JAX's rule may leave an unused equation in the backward part. The unused equation computes a value that the
    # checkpoint policy saves. All other equations read the saved value, not the result of this equation. Remove unused
    # equations, so that backward does not compute a saved value again.
    code, _ = jaxpr_and_consts(staged.params["jaxpr"])
    code, is_read = partial_eval.dce_jaxpr(code, [True] * len(code.outvars))
    read = select(staged.invars, is_read)
    code = code.replace(invars=[*code.invars, *function.jaxpr.invars])
    positions = [i for i, is_set in enumerate(instantiated_out) if is_set]
    second = PartialFunction(function, code, len(read), positions)
    backward = _with_function(equation, second, invars=[*read, *equation.invars], outvars=staged.outvars)
    return forward, backward, unknown_out, instantiated_out, [v for v in residuals if v in backward.invars]


def _divide_jitted(saveable: Any, unknown: Any, instantiated: Any, equation: Any, jaxpr: Any) -> Any:
    """Apply the partial-evaluation rule of `jax.jit` to an equation, as if its code were a jitted function."""
    with equation.ctx.manager, jax.disable_jit(False):
        jitted = jax.jit(lambda *args: eval_jaxpr(jaxpr, (), *args))
        outer, _, _ = stage(lambda *args: (jitted(*args), None), [v.aval for v in equation.invars], "jit")
    (call,) = outer.eqns
    call = call.replace(invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info)
    return partial_eval.partial_eval_jaxpr_custom_rules[call.primitive](saveable, unknown, instantiated, call)


def _keep_whole(saveable: Callable[..., Any], is_unknown: bool, instantiated: Sequence[bool], equation: Any) -> Any:
    """Choose whether to evaluate a whole equation in the forward pass, in the backward pass, or in both.

    If an operand is known only in the backward pass, evaluate the equation there. Otherwise, evaluate the equation in
    the forward pass in two cases: if the policy saves the results of the equation, or if the equation has effects.
    Otherwise evaluate it in both.
    """
    n = len(equation.outvars)
    operands = _variables(equation.invars, [not i for i in instantiated])
    if is_unknown:
        return None, equation, [True] * n, [True] * n, operands
    is_saved = saveable(equation.primitive, *[v.aval for v in equation.invars], **equation.params) is True
    if is_saved or equation.effects:
        return equation, None, [False] * n, [False] * n, []
    return equation, equation, [False] * n, [True] * n, operands


def _variables(atoms: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return [a for a in select(atoms, mask) if not is_literal(a)]


partial_eval.partial_eval_jaxpr_custom_rules[rule_function_p] = _divide


# -- dead code -----------------------------------------------------------------------------------------


def _drop_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Remove from an equation the results for which the mask `used` is False.

    This is a rule of `partial_eval.dce_rules`.

    Returns:
        A mask of the operands that the smaller equation uses, and this equation, or None if no code is left.
    """
    equation = rest[-1]  # since jax 0.12, JAX passes a mask of the operands before the equation
    all_operands = [True] * len(equation.invars)
    if used and all(used):
        return all_operands, equation
    function = payload_of(equation)
    if not any(used) and not partial_eval.dce_jaxpr(function.jaxpr, list(used))[0].eqns:
        return [False] * len(equation.invars), None
    part, is_read = function.without_unused(used)
    if part is function:
        return all_operands, equation
    invars, outvars = select(equation.invars, is_read), select(equation.outvars, used)
    return is_read, _with_function(equation, part, invars=invars, outvars=outvars)


partial_eval.dce_rules[rule_function_p] = _drop_unused


# -- checkify ------------------------------------------------------------------------------------------


def _evaluate_checked(function: RuleFunction, checked: Any, *args: Any) -> Values:
    __tracebackhide__ = True

    # `checkify` has replaced the equation by the operations of its jaxpr, and has dropped the derivative rule of the
    # equation. Therefore JAX would differentiate these operations, and would not apply the derivative rule.
    def error() -> Exception:
        return TypeError(
            f"{function.name}: jax.grad(checkify(jax.grad(f))) would ignore backward, and differentiate the operations "
            "of forward. Differentiate first, as in checkify(jax.grad(jax.grad(f)))."
        )

    return forbid_derivative(checked.call_wrapped(*args), error)


rule_function_p.evaluate_checked = _evaluate_checked
