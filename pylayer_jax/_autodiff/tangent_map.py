"""The derivative of one application of a layer, as one linear map.

With a pullback B (the layer's `backward`, linear in the cotangents c) and residuals r, the tangent map of the outputs
is the transpose of B,

    c . (B^T(r) t)  =  B(r)(c) . t        for all tangents t and cotangents c,

unless the layer gives that map itself, as its `jvp`. Reverse mode transposes the map, which gives B back: `backward` is
simply called, so it may be anything. Only forward mode evaluates the map, and then B itself is transposed and has to be
linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pylayer_jax._jax import linear_map
from pylayer_jax._jax.define_primitive import held_object
from pylayer_jax._jax.linear_map import LinearMap, linear_map_p
from pylayer_jax._jax.masks import merge, scatter, select
from pylayer_jax._jax.tracers import NEEDS_VALUES
from pylayer_jax._jax.types import zeros_of

from .linearity import ZeroInfo, add_rule, result_of
from .run_backward import Derivative
from .transpose_backward import NotDerivableError, transpose


def output_tangents(
    derivative: Derivative, needs_grad: Sequence[bool], arrays: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    """Tangents of all outputs from the arrays that are kept and the tangents of the inputs that are set."""
    __tracebackhide__ = True
    pushed = linear_map.call(TangentMap(derivative, needs_grad), arrays, tangents)
    return scatter(pushed, derivative.has_tangent)


class TangentMap(LinearMap):
    """residuals, tangents of the inputs that `needs_grad` sets -> tangents of the outputs that can have one."""

    why_not_linear = "it applies a layer whose saved tensors depend on them"

    def __init__(self, derivative: Derivative, needs_grad: Sequence[bool]) -> None:
        self.derivative = derivative
        self.needs_grad = list(needs_grad)
        self.name = derivative.name
        self.constants = derivative.residuals
        self.types = derivative.tangent_types

    def push(self, constants: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        __tracebackhide__ = True
        derivative, needs_grad = self.derivative, self.needs_grad
        residuals, layer = derivative.unpack(constants, ()), derivative.call.layer
        if layer._jvp_method() is not None:
            pushed = derivative.push(needs_grad, residuals, scatter(tangents, needs_grad))
            return [zeros_of(a) if t is None else t for a, t in zip(self.types, pushed, strict=True)]

        def pull(*cotangents: Any) -> list[Any]:
            __tracebackhide__ = True
            gradients = derivative.pull(needs_grad, residuals, scatter(cotangents, derivative.has_tangent))
            return select(gradients, needs_grad)

        try:
            return transpose(self.name, pull, self.types, tangents, layer.forward_mode)
        except (*NEEDS_VALUES, NotDerivableError):
            # A backward that must not be differentiated. Without forward mode this is a second derivative.
            if not layer.forward_mode and (error := derivative.second_derivative_error()) is not None:
                raise error from None
            raise

    def pull(self, constants: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        __tracebackhide__ = True
        derivative = self.derivative
        full = scatter(cotangents, derivative.has_tangent)
        return select(derivative.gradients(self.needs_grad, constants, full), self.needs_grad)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        __tracebackhide__ = True
        derivative = self.derivative
        if derivative.call.layer._jvp_method() is None and (error := derivative.second_derivative_error()) is not None:
            raise error  # a transposed pullback does not run as it was written, and cannot raise this itself
        nonzero = [t is not None for t in tangents]

        def push(*moving: Any) -> list[Any]:
            args = merge(nonzero, moving, primals)
            return self.push(args[: self.constants], args[self.constants :])

        return jax.jvp(push, select(primals, nonzero), select(tangents, nonzero))


def _zero_info(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    linear: LinearMap = held_object(equation)
    fact = result_of(operands, all(f.is_zero for f in operands[linear.constants :]))
    if not fact.reason and any(f.depends for f in operands[: linear.constants]):
        fact = fact._replace(reason=linear.why_not_linear)
    return [fact] * len(equation.outvars)


add_rule(linear_map_p.name, _zero_info)
