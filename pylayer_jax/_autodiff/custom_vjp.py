"""A class as one `jax.custom_vjp` function: the binding of most layers. See NOTE [two bindings]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pylayer_jax._jax.custom_vjp import NO_RESIDUAL, RunLog, custom_vjp, is_symbolic_zero
from pylayer_jax._jax.identities import batch_together
from pylayer_jax._jax.masks import scatter, select
from pylayer_jax._jax.tracers import is_mapped, is_rematerialization_tracer
from pylayer_jax._jax.types import as_arrays
from pylayer_jax._methods.outputs import Outputs
from pylayer_jax._trees.messages import plural, source_of
from pylayer_jax._trees.opaque import Static

from .call import LayerCall
from .derivative import Derivative
from .forward_rule import differentiate
from .run_forward import run_undifferentiated


def compile_layer(layer: Any, takes_refs: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The one `jax.custom_vjp` function of a class: (static call, *tensors) -> tensors.

    NOTE [Refs]
    A Ref travels behind the tensors of a call. A forward rule may keep a Ref only if JAX recognises it as an argument,
    which JAX does not with symbolic zeros. Calls that take a Ref therefore have a function of their own, without them:
    there every input that can have a gradient counts as perturbed, and every cotangent comes as zeros.
    """
    name = layer.__qualname__
    source = source_of(name, layer.forward)
    return custom_vjp(name, source, _primal, _forward_rule, _backward_rule, symbolic_zeros=not takes_refs)


class _SavedRun(NamedTuple):
    """What one run of the forward rule leaves for the backward rule, without its arrays."""

    layer: str
    derivative: Derivative
    needs_grad: list[bool]


def _primal(static: Static, *tensors: Any) -> tuple[Any, ...]:
    __tracebackhide__ = True
    call: LayerCall = static.value
    call.outputs, values = run_undifferentiated(call, tensors)
    return tuple(batch_together(tensors[: call.arguments.first_ref], values))


def _forward_rule(static: Static, *primals: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    __tracebackhide__ = True
    call: LayerCall = static.value
    if call.arguments.refs:
        tensors, perturbed, perturbed_is_exact = as_arrays(primals), [True] * len(primals), False
    else:
        tensors = as_arrays([p.value for p in primals])  # jax.grad(f)(2.0) hands on the Python number
        perturbed = [p.perturbed for p in primals]
        perturbed_is_exact = not any(map(is_rematerialization_tracer, tensors))
    needs_grad = call.arguments.perturbable(perturbed)
    saved, derivative, outputs, residuals = differentiate(call, tensors, needs_grad, perturbed_is_exact).packed(call)
    _check_outputs(call.name, call.outputs, saved.outputs)
    call.outputs = saved.outputs
    run = _SavedRun(call.name, derivative, needs_grad)
    if call.log is None:
        return tuple(outputs), (Static(run), *residuals)
    # NOTE [several runs]
    count = len(residuals) if not saved.read_needs_input_grad else -(-len(residuals) // _PADDED_TO) * _PADDED_TO
    padding = [NO_RESIDUAL] * (count - len(residuals))
    return tuple(outputs), (Static(call.log), call.log.add(run), *residuals, *padding)


def _check_outputs(layer: str, staged: Outputs | None, found: Outputs) -> None:
    """Refuse other outputs than those of the run that is not differentiated, where JAX staged it before."""
    if staged is None or len(staged.types) == len(found.types):
        return
    raise ValueError(
        f"{layer}.forward returned {plural(len(staged.types), 'tensor', 'tensors')} where nothing is differentiated "
        f"(all of ctx.needs_input_grad are False), but {len(found.types)} where something is. jit stages both as one "
        "function: return the same outputs, or differentiate inside jit, as in jax.jit(jax.grad(f))."
    )


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


def _check_count(run: _SavedRun, residuals: int) -> None:
    if not residuals - _PADDED_TO < run.derivative.residuals <= residuals:
        raise RuntimeError(
            f"{run.layer}.forward saved {run.derivative.residuals} tensors for one choice of needs_input_grad "
            f"and at most {residuals} for another, within one jitted function that was differentiated both "
            "ways. Save the same tensors for every choice, or differentiate inside jit: jax.jit(jax.grad(f))."
        )
