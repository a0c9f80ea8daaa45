"""The derivative of one application of a layer, as one linear operation.

With a pullback B (the layer's `backward`, linear in the cotangents c) and residuals r, the tangent map of the outputs
is the transpose of B,

    c . (B^T(r) t)  =  B(r)(c) . t        for all tangents t and cotangents c,

unless the layer gives that map itself, as its `jvp`. Either is the primitive

    tangent_map:  residuals, input tangents  ->  output tangents.

Reverse mode transposes tangent_map, which gives B back: `backward` is simply called, so it may be anything.
Only forward mode evaluates tangent_map, and then B itself is transposed and has to be linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pylayer_jax._jax.masks import merge, scatter, select
from pylayer_jax._jax.primitives import PrimitiveWithObject, held_object, is_named, register
from pylayer_jax._jax.tracers import NEEDS_VALUES
from pylayer_jax._jax.types import mapped_type, tangent_type, typeof, zeros_of

from .derivative import Batch, Derivative
from .errors import NotDerivableError
from .linearity import ZeroInfo, add_rule, linear_in_tangents
from .transpose import transpose

tangent_map_p = PrimitiveWithObject("tangent_map", "derivative")


def output_tangents(
    derivative: Derivative, needs_grad: Sequence[bool], arrays: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    """Tangents of all outputs from the arrays that are kept and the tangents of the inputs that are set."""
    __tracebackhide__ = True
    pushed = tangent_map_p.bind(*arrays, *tangents, derivative=derivative, needs_grad=tuple(needs_grad))
    return scatter(pushed, derivative.has_tangent)


def _evaluate(*args: Any, derivative: Derivative, needs_grad: tuple[bool, ...]) -> list[Any]:
    __tracebackhide__ = True
    residuals, tangents = derivative.unpack(args[: derivative.residuals], ()), args[derivative.residuals :]
    if derivative.run.has_pushforward:
        pushed = derivative.push(needs_grad, residuals, scatter(tangents, needs_grad))
        return [zeros_of(a) if t is None else t for a, t in zip(derivative.tangent_types, pushed, strict=True)]

    def pull(*cotangents: Any) -> list[Any]:
        __tracebackhide__ = True
        gradients = derivative.pull(needs_grad, residuals, scatter(cotangents, derivative.has_tangent))
        return select(gradients, needs_grad)

    try:
        return transpose(derivative.run.name, pull, derivative.tangent_types, tangents, derivative.run.forward_mode)
    except (*NEEDS_VALUES, NotDerivableError):
        # A backward that must not be differentiated. Without forward mode this is a second derivative.
        if not derivative.run.forward_mode and (error := derivative.run.second_derivative_error()) is not None:
            raise error from None
        raise


def _types(*_: Any, derivative: Derivative, needs_grad: tuple[bool, ...]) -> tuple[list[Any], Any]:
    del needs_grad
    return derivative.tangent_types, frozenset()


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, derivative: Derivative, needs_grad: tuple[bool, ...]
) -> tuple[list[Any], list[Any]]:
    def bind(*args: Any) -> list[Any]:
        return tangent_map_p.bind(*args, derivative=derivative, needs_grad=needs_grad)

    count = derivative.residuals
    if all(t is None for t in tangents[:count]):
        # Linear in the other arguments; still an equation, so that reverse mode can transpose it.
        full = [
            zeros_of(tangent_type(typeof(p))) if t is None else t
            for p, t in zip(primals[count:], tangents[count:], strict=True)
        ]
        return bind(*primals), bind(*primals[:count], *full)
    if not derivative.run.has_pushforward and (error := derivative.run.second_derivative_error()) is not None:
        raise error  # a transposed pullback does not run as it was written, and cannot raise this itself
    nonzero = [t is not None for t in tangents]

    def evaluate(*perturbed: Any) -> list[Any]:
        return _evaluate(*merge(nonzero, perturbed, primals), derivative=derivative, needs_grad=needs_grad)

    return jax.jvp(evaluate, select(primals, nonzero), select(tangents, nonzero))


def _transpose(
    cotangents: Sequence[Any], *args: Any, derivative: Derivative, needs_grad: tuple[bool, ...]
) -> list[Any]:
    __tracebackhide__ = True
    arrays = args[: derivative.residuals]
    gradients = derivative.gradients(needs_grad, arrays, scatter(cotangents, derivative.has_tangent))
    return [*(None for _ in arrays), *select(gradients, needs_grad)]


def _batch(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, derivative: Derivative, needs_grad: tuple[bool, ...]
) -> tuple[list[Any], list[Any]]:
    __tracebackhide__ = True
    count = derivative.residuals
    batch = Batch(axis, dims[:count], scatter(dims[count:], needs_grad))
    batched = derivative.batched(batch, [mapped_type(axis, t) for t in derivative.output_types])
    values = tangent_map_p.bind(*args, derivative=batched, needs_grad=needs_grad)
    return values, [0] * len(values)


register(
    tangent_map_p,
    evaluate=_evaluate,
    abstract=_types,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    uses_axis=is_named,  # the layer may ask for the index along the axis
)


def _facts(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    problem = "it applies a layer whose saved tensors depend on them"
    return linear_in_tangents(equation, operands, held_object(equation).residuals, problem)


add_rule(tangent_map_p.name, _facts)
