"""Two primitives: a function with its own rule for derivatives, and a linear map with its own transpose.

A `RuleFunction` is like a `jax.custom_jvp` function: `run` computes the values, and `rule` computes values and
tangents. A rule that applies the same function to its primals is used at every order. A `LinearMap` computes the
tangents. A `LinearMap` has two Python functions, which JAX calls only when it needs them: `push` in forward mode, and
`pull` in reverse mode. This is the jaxpr of a layer that saves its output, and whose `backward` is `pull`:

    { lambda ; a:f32[3]. let b:f32[3] = rule_function[name=Tanh] a in (b,) }

    and its derivative (by jax.jvp, before JAX transposes or evaluates the linear map)

    { lambda ; a:f32[3] c:f32[3]. let
        b:f32[3] = rule_function[name=Tanh] a      <- the same function again: the rule holds at the next order too
        d:f32[3] = linear_map[name=Tanh] b c       <- residuals, then tangents
      in (b, d) }

`jax.custom_jvp` cannot replace `RuleFunction`: jax 0.10 silently loses a custom_jvp rule in a scan that is
differentiated twice. tests/derivatives/test_orders.py has an example in plain JAX.

This module does not depend on layers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .imports import eval_jaxpr, mlir
from .jaxprs import has_equation, lower_jaxpr, operations, outside_effects, stage
from .masks import merge, scatter, select
from .primitives import ObjectPrimitive, batch_axis_to_front, vmap_over
from .tracers import current_trace, is_batched
from .types import has_tangent, mapped_type, tangent_type, typeof, zeros_of

Values = list[Any]


class RuleFunction:
    """A function of arrays with a rule for its derivative. It holds no array, and equations compare it by identity."""

    name: str  # the name in jaxprs and errors
    jaxpr: Any = None  # None if `run` is not staged: in eager mode, `run` then gets concrete values
    n_consts: int = 0  # the first `n_consts` operands are the values that the function closes over

    @property
    def is_divisible(self) -> bool:
        """Whether `jax.checkpoint` and dead code elimination may evaluate a part of the jaxpr."""
        return True

    def mask_of_kept_operands(self) -> list[bool]:
        """Return a mask of the operands that a part without some results keeps: the derivative needs all of them."""
        return [True] * len(self.jaxpr.invars)

    def run(self, *args: Any) -> Values:
        """Compute the values of the function."""
        __tracebackhide__ = True
        try:
            return eval_jaxpr(self.jaxpr, (), *args)
        except NotImplementedError:
            # JAX cannot evaluate a custom_vjp function with symbolic zeros within an eager shard_map.
            if not has_equation(self.jaxpr, "shard_map"):
                raise
            return jax.jit(lambda *args: eval_jaxpr(self.jaxpr, (), *args))(*args)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        """Compute the values and their tangents. A None tangent means zero; at least one tangent is not None."""
        raise NotImplementedError

    def transpose(self, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        """Return cotangents of the operands that are None; the function has to be linear in these operands."""
        raise TypeError(f"{self.name} cannot be transposed.")

    def transpose_code(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        """Transpose `jaxpr`, which computes a batch or a part of this function, as `transpose` does."""
        function = copy.copy(self)
        function.jaxpr = jaxpr
        return function.transpose(args, cotangents)

    def lower(self, context: Any, args: Sequence[Any]) -> Any:
        return lower_jaxpr(context, self.jaxpr, *args)

    def batch(self, axis: Any, dims: Sequence[Any], types: Sequence[Any]) -> tuple[RuleFunction, Values, Any]:
        """Return the batched function, the values that it closes over (its first operands), and its out axes.

        If the out axes are None, every value has its batch axis in front.
        """
        __tracebackhide__ = True
        batched = BatchedFunction(self, axis, dims)
        consts = batched.stage(types)
        return batched, consts, batched.out_dims

    def run_batch(self, axis: Any, dims: Sequence[Any]) -> Callable[..., tuple[Values, list[Any]]]:
        """Return a function that computes the values of a batch, and the batch axis (0 or None) of each value.

        NOTE [all outputs are batched]
        If an operand is batched, each value that can have a tangent is batched too. Otherwise all examples would get
        the cotangent of a shared value, which JAX would then add once for each example. tests: contract/test_vmap.py
        """
        any_batched = any(d is not None for d in dims)

        def one(*args: Any) -> tuple[Values, Values]:
            __tracebackhide__ = True
            values, trace = self.run(*args), current_trace()
            differs = [is_batched(x) and x._trace is trace for x in values]
            all_batched = any_batched or any(differs)
            mask = [d or (all_batched and has_tangent(x)) for d, x in zip(differs, values, strict=True)]
            return scatter(select(values, mask), mask), merge(mask, [None] * sum(mask), values)

        def run(*args: Any) -> tuple[Values, list[Any]]:
            __tracebackhide__ = True
            # Each list has None, which is no leaf, in place of the values of the other list.
            batched, shared = vmap_over(axis, one, tuple(dims), (0, None))(*args)
            mask = [x is not None for x in batched]
            return merge(mask, select(batched, mask), shared), [0 if is_one else None for is_one in mask]

        return run


class BatchedFunction(RuleFunction):
    """A `RuleFunction` for a batch of examples. Under nested `jax.vmap`, one `BatchedFunction` contains another."""

    def __init__(self, inner: RuleFunction, axis: Any, dims: Sequence[Any]) -> None:
        self.inner, self.axis, self.name = inner, axis, inner.name
        self.dims = list(dims)  # batch axes of the operands of the inner function
        self.out_dims: Any = 0  # batch axes of the values

    def uses_axis(self, types: Sequence[Any]) -> bool:
        """Return whether the inner function, for operands of these types, uses the name of the axis.

        A function may use the axis although no operand is batched, and its values may depend on the axis without being
        batched: `jax.lax.psum` of a shared value is one number. Batching a collective removes its effect.
        `jax.lax.ppermute` has no effect, but batching removes its equation.
        """
        inner, batched = self.inner.jaxpr, self.jaxpr
        if inner is None:
            inner = stage(lambda *args: (self.inner.run(*args), None), types, self.name)[0]
        return outside_effects(inner) != outside_effects(batched) or operations(inner) != operations(batched)

    def stage(self, types: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        run = self.inner.run_batch(self.axis, self.dims)
        self.jaxpr, consts, self.out_dims = stage(run, types, self.name)
        self.n_consts = len(consts)
        return consts

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        """Batch the rule of the inner function.

        A tangent has the same batch axis as its primal. The tangent of a primal that all examples share is repeated, so
        that each example applies its own linear map. Otherwise `backward` would get the sum of the cotangents, for
        which a `backward` that is not linear returns a different gradient. tests: contract/test_vmap.py
        """
        __tracebackhide__ = True
        n, dims, tangent_dims = self.n_consts, self.dims, self.dims
        if any(t is not None for t in tangents[:n]):
            raise TypeError(f"{self.name}: its code for a batch closes over a value that is differentiated.")
        moving = list(tangents[n:])
        if any(d is not None for d in dims):
            tangent_dims = [0 if d is None else d for d in dims]
            moving = [
                t if t is None or d is not None else batch_axis_to_front(self.axis, t, None)
                for t, d in zip(moving, dims, strict=True)
            ]
        rule = vmap_over(self.axis, self.inner.rule, (dims, tangent_dims), (self.out_dims, 0))
        values, found = rule(list(primals[n:]), moving)
        if self.out_dims == 0:
            return values, found
        # A value that all examples share, such as a sum over the axis, is that of the first example.
        pairs = zip(found, self.out_dims, strict=True)
        return values, [t if t is None or d is not None else t[0] for t, d in pairs]

    def transpose(self, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return self.inner.transpose_code(self.jaxpr, args, cotangents)


class UnstagedBatch(BatchedFunction):
    """A batched function that is not staged: `jax.vmap` calls the inner `run`. Every value has batch axis 0."""

    def run(self, *args: Any) -> Values:
        __tracebackhide__ = True
        return vmap_over(self.axis, self.inner.run, tuple(self.dims), 0)(*args)

    def batch(self, axis: Any, dims: Sequence[Any], types: Sequence[Any]) -> tuple[RuleFunction, Values, Any]:
        return UnstagedBatch(self, axis, dims), [], None


def apply(function: RuleFunction, operands: Sequence[Any]) -> Values:
    """Apply a function to its operands, under all active transformations."""
    __tracebackhide__ = True
    return rule_function_p.bind(*operands, held=function)


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
    types = [typeof(x) for x in args]
    batched, consts, out_dims = function.batch(axis, dims, types)
    if out_dims is not None and all(d is None for d in (*dims, *out_dims)):
        uses_axis = isinstance(batched, BatchedFunction) and batched.uses_axis(types)
        if not uses_axis:  # an identity, or the axis has a name that the function does not use
            return apply(function, args), out_dims
    values = apply(batched, [*consts, *args])
    return values, [0] * len(values) if out_dims is None else out_dims


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
    """A linear map of tangents that depends on residuals. It holds no array, and equations compare it by identity."""

    name: str
    n_residuals: int
    types: Sequence[Any]  # types of the results
    nonlinearity = "it is not linear in its residuals"  # follows "as" in the error of a failed proof

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        """Compute the tangents of the results."""
        raise NotImplementedError

    def pull(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        """Compute cotangents of the tangents from cotangents of the results. A None cotangent means zero."""
        raise NotImplementedError

    def check_derivative(self) -> None:
        """Raise an error if a derivative with respect to the residuals is forbidden."""


class BatchedMap(LinearMap):
    """A batched linear map, whose tangents and results have the batch axis in front."""

    def __init__(self, inner: LinearMap, axis: Any, dims: Sequence[Any]) -> None:
        self.inner, self.axis, self.name, self.nonlinearity = inner, axis, inner.name, inner.nonlinearity
        self.dims = list(dims)  # batch axes of the residuals
        self.n_residuals = inner.n_residuals
        self.types = [mapped_type(axis, t) for t in inner.types]

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        return vmap_over(self.axis, self.inner.push, (self.dims, 0), 0)(list(residuals), list(tangents))

    def pull(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        return vmap_over(self.axis, self.inner.pull, (self.dims, 0), 0)(list(residuals), list(cotangents))

    def check_derivative(self) -> None:
        self.inner.check_derivative()


def apply_linear(linear: LinearMap, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
    """Apply a linear map to residuals and tangents, under all active transformations."""
    __tracebackhide__ = True
    return linear_map_p.bind(*residuals, *tangents, held=linear)


def _push(linear: LinearMap, *args: Any) -> Values:
    __tracebackhide__ = True
    return linear.push(args[: linear.n_residuals], args[linear.n_residuals :])


def _jvp_linear(linear: LinearMap, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
    __tracebackhide__ = True
    n = linear.n_residuals
    nonzero = [t is not None for t in tangents]
    if any(nonzero[:n]):
        linear.check_derivative()

        def push(*moving: Any) -> Values:
            __tracebackhide__ = True
            return _push(linear, *merge(nonzero, moving, primals))

        return jax.jvp(push, select(primals, nonzero), select(tangents, nonzero))
    # The map is linear in its tangents. Bind the map again for their tangents, so that reverse mode can transpose it.
    pairs = zip(primals[n:], tangents[n:], strict=True)
    full = [zeros_of(tangent_type(typeof(p))) if t is None else t for p, t in pairs]
    return apply_linear(linear, primals[:n], primals[n:]), apply_linear(linear, primals[:n], full)


def _transpose_linear(linear: LinearMap, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
    __tracebackhide__ = True
    n = linear.n_residuals
    if all(c is None for c in cotangents):
        return [None] * len(args)
    return [*[None] * n, *linear.pull(args[:n], cotangents)]


def _batch_linear(linear: LinearMap, axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> tuple[Values, list[Any]]:
    __tracebackhide__ = True
    n = linear.n_residuals
    # Repeat a tangent that all examples share: the transpose of the repetition sums the cotangents of the examples. If
    # the axis has a name, repeat every tangent: `push` may use the axis, for example if `backward` sums over it.
    tangents = [batch_axis_to_front(axis, x, d) for x, d in zip(args[n:], dims[n:], strict=True)]
    values = apply_linear(BatchedMap(linear, axis, dims[:n]), args[:n], tangents)
    return values, [0] * len(values)


def _lower_linear(linear: LinearMap, context: Any, *args: Any) -> Any:
    __tracebackhide__ = True
    return mlir.lower_fun(functools.partial(_push, linear), multiple_results=True)(context, *args)


linear_map_p.register(
    evaluate=_push,
    abstract=lambda linear, *_: (list(linear.types), frozenset()),
    jvp=_jvp_linear,
    batch=_batch_linear,
    transpose=_transpose_linear,
    lower=_lower_linear,
)
