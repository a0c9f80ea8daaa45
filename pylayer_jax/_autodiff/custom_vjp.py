"""A class's forward and backward as one `jax.custom_vjp` function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._jax.identities import joined
from pylayer_jax._jax.names import is_for_any_gradient, is_mapped, is_symbolic_zero
from pylayer_jax._methods.arguments import as_arrays
from pylayer_jax._methods.outputs import Recording
from pylayer_jax._trees.partition import Carried

from .call import Application, differentiate, keep, run_undifferentiated
from .derivative import Derivative


def compile_layer(name: str) -> Callable[..., tuple[Any, ...]]:
    """The one `jax.custom_vjp` function of a class: (carried application, *tensors) -> tensors."""

    def primal(carried: Carried, *tensors: Any) -> tuple[Any, ...]:
        return _primal(carried, *tensors)

    primal.__name__ = primal.__qualname__ = name  # what jaxprs, profiles and errors show
    _with_signature(primal, _PRIMAL)
    rule = jax.custom_vjp(primal)
    rule.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
    return rule


def _primal(carried: Carried, *tensors: Any) -> tuple[Any, ...]:
    return tuple(joined(tensors, run_undifferentiated(carried.value, tensors)))


def _forward_rule(carried: Carried, *primals: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    application: Application = carried.value
    tensors = as_arrays([p.value for p in primals])  # jax.grad(f)(2.0) hands on the Python number
    told = application.arguments.perturbable([p.perturbed for p in primals])
    application.perturbed = [a or b for a, b in zip(application.perturbed, told, strict=True)]
    recording, derivative, outputs, residuals = differentiate(application, tensors, told)
    recording.surely = not any(map(is_for_any_gradient, tensors))
    application.outputs = recording.outputs
    derivative, residuals, outputs = keep(application, recording, derivative, residuals, outputs)
    if recording.asked:
        residuals.append(jnp.zeros((0, len(application.recordings))))
        application.recordings.append((recording, derivative))
    return tuple(outputs), (Carried((application, recording, derivative)), *residuals)


def _backward_rule(residuals: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    application, recording, derivative = residuals[0].value
    arrays, needed = list(residuals[1:]), application.perturbed
    if recording.asked:
        recording, derivative = _recording_of(application, arrays)
        needed = recording.told
    given = [None if is_symbolic_zero(c) else c for c in cotangents]
    gradients = derivative.gradients(needed, arrays, given)
    if any(map(is_mapped, given)):
        # A gradient that no cotangent reaches counts once per example too: NOTE [shared outputs].
        rest = iter(joined([c for c in given if c is not None], [g for g in gradients if g is not None]))
        gradients = [None if g is None else next(rest) for g in gradients]
    return None, *gradients


def _recording_of(application: Application, residuals: list[Any]) -> tuple[Recording, Derivative]:
    # NOTE [several recordings]
    # A jitted function that is differentiated for different arguments runs the fwd rule once for each
    # choice, and JAX keeps the structure of the residuals of the last run alone. Where `forward` looked at
    # needs_input_grad, what it saved may differ, so that an empty array tells by its shape which run it was.
    recording, derivative = application.recordings[residuals.pop().shape[-1]]
    if len(residuals) != derivative.residuals:
        raise RuntimeError(
            f"{application.name}.forward saved {derivative.residuals} tensors for one choice of needs_input_grad "
            f"and {len(residuals)} for another, within one jitted function that was differentiated both ways. Save "
            "the same tensors for every choice, or differentiate inside jit: jax.jit(jax.grad(f))."
        )
    return recording, derivative


def _with_signature(function: Callable[..., Any], signature: inspect.Signature) -> None:
    # JAX asks for the signatures of the three functions at each call; found ready, they cost next to nothing.
    function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]


_PRIMAL = inspect.signature(_primal)
_with_signature(_forward_rule, inspect.signature(_forward_rule))
_with_signature(_backward_rule, inspect.signature(_backward_rule))
