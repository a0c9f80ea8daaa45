"""A class as one `jax.custom_vjp` function: the binding of most layers. See NOTE [two bindings]."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pylayer_jax._jax import (
    NO_RESIDUAL,
    RunLog,
    as_arrays,
    batch_together,
    copy_function,
    is_mapped,
    is_rematerialization_tracer,
    is_symbolic_zero,
    scatter,
    select,
    set_forward_mode_error,
)
from pylayer_jax._trees import Static, innermost

from .call import LayerCall
from .derivative import Derivative
from .differentiate import differentiate
from .forward import run_undifferentiated
from .refusals import NoForwardModeError


class _Forward:
    """Stands for the `forward` of a class where JAX asks what it traces, which its errors name with file and line."""

    def __init__(self, layer: type, otherwise: Callable[..., Any]) -> None:
        self.__name__ = layer.__qualname__  # jaxprs, profiles and errors show it
        self._layer = weakref.ref(layer)
        self._otherwise = otherwise.__code__

    @functools.cached_property
    def __code__(self) -> types.CodeType:
        # Not before the first call: the members of an unpickled class are set after it was made.
        forward = innermost(getattr(self._layer(), "forward", None))
        return getattr(forward, "__code__", self._otherwise)


def compile_layer(layer: type) -> Callable[..., tuple[Any, ...]]:
    """The one `jax.custom_vjp` function of a class: (static call, *tensors) -> tensors."""

    def primal(static: Static, *tensors: Any) -> tuple[Any, ...]:
        __tracebackhide__ = True
        return _primal(static, *tensors)

    primal.__name__ = primal.__qualname__ = layer.__qualname__
    primal.__wrapped__ = _Forward(layer, primal)  # pyright: ignore[reportFunctionMemberAccess]
    _set_signature(primal, _PRIMAL)
    backward_rule = copy_function(_backward_rule)
    _set_signature(backward_rule, _BACKWARD)
    set_forward_mode_error(backward_rule, functools.partial(NoForwardModeError, layer.__qualname__))
    rule = jax.custom_vjp(primal)
    rule.defvjp(_forward_rule, backward_rule, symbolic_zeros=True)
    return rule


class _Run(NamedTuple):
    """What one run of the forward rule leaves for the backward rule, without its arrays."""

    layer: str
    derivative: Derivative
    needs_grad: list[bool]


def _primal(static: Static, *tensors: Any) -> tuple[Any, ...]:
    __tracebackhide__ = True
    call: LayerCall = static.value
    call.outputs, values = run_undifferentiated(call, tensors)
    return tuple(batch_together(tensors, values))


def _forward_rule(static: Static, *primals: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    __tracebackhide__ = True
    call: LayerCall = static.value
    tensors = as_arrays([p.value for p in primals])  # jax.grad(f)(2.0) hands on the Python number
    needs_grad = call.arguments.perturbable([p.perturbed for p in primals])
    perturbed_is_exact = not any(map(is_rematerialization_tracer, tensors))
    saved, derivative, outputs, residuals = differentiate(call, tensors, needs_grad, perturbed_is_exact).packed(call)
    call.outputs = saved.outputs
    run = _Run(call.name, derivative, needs_grad)
    if call.log is None:
        return tuple(outputs), (Static(run), *residuals)
    # NOTE [several runs]
    count = len(residuals) if not saved.read_needs_input_grad else -(-len(residuals) // _PADDED_TO) * _PADDED_TO
    padding = [NO_RESIDUAL] * (count - len(residuals))
    return tuple(outputs), (Static(call.log), call.log.add(run), *residuals, *padding)


def _backward_rule(residuals: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    __tracebackhide__ = True
    run, arrays = residuals[0].value, residuals[1:]
    if isinstance(run, RunLog):
        run, arrays = run.find(arrays[0]), arrays[1:]
        _check_count(run, len(arrays))
        arrays = arrays[: run.derivative.residuals]
    given = [None if is_symbolic_zero(c) else c for c in cotangents]
    gradients = run.derivative.gradients(run.needs_grad, arrays, given)
    if any(map(is_mapped, given)):
        # A gradient that no cotangent reaches counts once per example too: NOTE [shared outputs].
        nonzero = [g is not None for g in gradients]
        together = batch_together([c for c in given if c is not None], select(gradients, nonzero))
        gradients = scatter(together, nonzero)
    return None, *gradients


# A `forward` may save more tensors for one choice of needs_input_grad than for another, but JAX keeps one structure of
# the residuals for all runs. Their number is therefore rounded up.
_PADDED_TO = 16


def _check_count(run: _Run, residuals: int) -> None:
    if not residuals - _PADDED_TO < run.derivative.residuals <= residuals:
        raise RuntimeError(
            f"{run.layer}.forward saved {run.derivative.residuals} tensors for one choice of needs_input_grad "
            f"and {residuals} or somewhat fewer for another, within one jitted function that was differentiated both "
            "ways. Save the same tensors for every choice, or differentiate inside jit: jax.jit(jax.grad(f))."
        )


def _set_signature(function: Callable[..., Any], signature: inspect.Signature) -> None:
    # JAX reads the signatures of the three functions at each call; ready-made, they cost next to nothing.
    function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]


_PRIMAL = inspect.signature(_primal)
_set_signature(_forward_rule, inspect.signature(_forward_rule))
_BACKWARD = inspect.signature(_backward_rule)
