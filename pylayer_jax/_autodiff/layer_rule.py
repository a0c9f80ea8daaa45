"""A layer as a function with its rule, and the `jax.custom_vjp` function in front of it. See NOTE [orders]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pylayer_jax._jax import rule_function
from pylayer_jax._jax.custom_vjp import custom_vjp, is_symbolic_zero
from pylayer_jax._jax.identity_primitives import map_all_outputs
from pylayer_jax._jax.imports import eval_context
from pylayer_jax._jax.mapped_axes import axes_shared_by, is_mapped, is_mapped_along, shared_axes
from pylayer_jax._jax.masks import scatter, select
from pylayer_jax._jax.rule_function import BatchRun
from pylayer_jax._jax.run_log import NO_RESIDUAL, RunLog
from pylayer_jax._jax.tracers import (
    NEEDS_VALUES,
    is_differentiated,
    is_rematerialization_tracer,
    is_staging,
    is_tracer,
)
from pylayer_jax._jax.types import as_arrays, has_tangent, typeof
from pylayer_jax._jax.undecided_mode import TwoModeFunction
from pylayer_jax._methods.outputs import Outputs
from pylayer_jax._trees.messages import plural, source_of
from pylayer_jax._trees.opaque import Static
from pylayer_jax._trees.partition import contains

from .host_forward import computed_numbers, known_values, second_derivative_error
from .layer_call import LayerCall
from .own_vmap import eager_batch_run
from .pack_residuals import hooks_that_pack, pack_residuals
from .run_backward import Derivative
from .run_forward import run_and_save, run_setup_context, run_undifferentiated
from .saved_state import SavedState
from .stage_forward import stage_forward
from .tangent_map import output_tangents


class Differentiated(NamedTuple):
    """One run of `forward` that is differentiated."""

    saved: SavedState
    derivative: Derivative
    outputs: list[Any]
    residuals: list[Any]

    def packed(self, call: LayerCall) -> Differentiated:
        """The same with packed residuals, if hooks are active."""
        derivative, residuals, outputs = pack_residuals(call, self.saved, self.derivative, self.residuals, self.outputs)
        return Differentiated(self.saved, derivative, outputs, residuals)


def differentiate(
    call: LayerCall, tensors: Sequence[Any], needs_grad: list[bool], perturbed_is_exact: bool = True
) -> Differentiated:
    """Run `forward` so that its derivative holds at every order: on concrete values as it is, else as a jaxpr."""
    __tracebackhide__ = True
    if not any(map(is_tracer, tensors)):
        saved, outputs, residuals = run_and_save(call, tensors, needs_grad, perturbed_is_exact)
        if any(map(is_differentiated, [*outputs, *residuals])):
            raise call.closed_over_error()
        return Differentiated(saved, Derivative(call, saved, len(residuals)), outputs, residuals)
    is_first = not any(map(is_differentiated, tensors))  # of the derivatives
    # Host code cannot be staged. Then `setup_context`, run apart from `forward`, says which tensors are kept.
    is_set_up_apart = call.layer._has_setup_context() and not is_staging()
    if is_set_up_apart and is_first and call.layer._has_vmap_method():
        return _set_up(call, tensors, needs_grad)
    try:
        types, given = [typeof(x) for x in tensors], () if is_set_up_apart else tensors
        staged, consts = stage_forward(call, types, needs_grad, given, perturbed_is_exact)
    except NEEDS_VALUES:
        if not is_set_up_apart:
            raise
        known = known_values(call)
        found = _set_up(call, tensors, needs_grad)
        numbers = computed_numbers(call, found.saved, known)
        computed = _residuals_of_marked_outputs(found, tensors)
        error = second_derivative_error(call, found.saved, numbers, computed)
        if error is not None and not is_first:
            raise error from None
        return found
    values = staged.bind(consts, tensors)
    residuals = staged.residuals(tensors, values)
    return Differentiated(staged.saved, staged.derivative, values[: staged.outputs], residuals)


def _set_up(call: LayerCall, tensors: Sequence[Any], needs_grad: list[bool]) -> Differentiated:
    """Run `forward` as the function that it is, and `setup_context` on its outputs."""
    values = rule_function.call(LayerFunction(call, packs=False), tensors)
    assert call.outputs is not None
    saved, residuals = run_setup_context(call, call.outputs, values, tensors, needs_grad)
    return Differentiated(saved, Derivative(call, saved, len(residuals)), values, residuals)


def _residuals_of_marked_outputs(found: Differentiated, tensors: Sequence[Any]) -> list[bool]:
    """A mask of the residuals that may be computed from a marked output, which is plain code of `forward`."""
    known = [*tensors, *found.outputs]
    is_any = any(has_tangent(found.outputs[i]) for i in found.saved.outputs.non_differentiable)
    return [is_any and has_tangent(x) and not contains(known, x) for x in found.residuals]


# -- in forward mode, with its own vmap, over hidden tensors ---------------------------------------


class LayerFunction(TwoModeFunction):
    """inputs -> outputs: a layer without a `jax.custom_vjp` function in front. `forward` sees concrete values."""

    kind = "layer"

    def __init__(self, call: LayerCall, packs: bool = True) -> None:
        self.call = call
        self.name, self.jaxpr = call.name, None
        self.packs = packs  # whether its first differentiation packs the residuals; later ones never do

    def run(self, *args: Any) -> list[Any]:
        __tracebackhide__ = True
        self.call.outputs, values = run_undifferentiated(self.call, args, needs=True)
        return values

    @property
    def has_one_rule(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.packs or hooks_that_pack(self.call) is None

    def forward_rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        __tracebackhide__ = True
        return self._rule(primals, tangents, packs=False)

    def reverse_rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        __tracebackhide__ = True
        return self._rule(primals, tangents, packs=self.packs)

    def _rule(self, primals: Sequence[Any], tangents: Sequence[Any], packs: bool) -> tuple[list[Any], list[Any]]:
        __tracebackhide__ = True
        perturbed = [t is not None for t in tangents]
        with eval_context():  # a Python number becomes an array, and no tracer of the trace that runs this rule
            tensors = as_arrays(primals)
        found = differentiate(self.call, tensors, perturbed)
        self.call.outputs = found.saved.outputs
        if packs:
            found = found.packed(self.call)
        return found.outputs, output_tangents(found.derivative, perturbed, found.residuals, select(tangents, perturbed))

    def call_staged(self, *args: Any) -> list[Any]:
        __tracebackhide__ = True
        call, types = self.call, self.call.arguments.avals
        staged, consts = stage_forward(call, types, call.arguments.can_get_gradient([True] * len(args)), args)
        staged.packs = self.packs
        call.outputs = staged.saved.outputs
        return staged.bind(consts, args)[: staged.outputs]

    def batch_run(self, axis: Any, dims: Sequence[Any]) -> BatchRun:
        if self.call.layer._has_vmap_method():
            return eager_batch_run(self.call, self.run, axis, dims)
        return super().batch_run(axis, dims)


def call_without_custom_vjp(call: LayerCall, tensors: Sequence[Any], is_transposed: bool) -> list[Any]:
    """The outputs of a layer as a function with its rule; staged where `jax.linear_transpose` takes its jaxpr."""
    __tracebackhide__ = True
    function = LayerFunction(call)
    # A rule of ours would lose values that `forward` closes over; staged, they become operands.
    if is_transposed or call.reaches_traced_values:
        return function.call_staged(*tensors)
    return rule_function.call(function, tensors)


# -- the custom_vjp function in front --------------------------------------------------------------


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
    return tuple(map_all_outputs(tensors[: call.arguments.first_ref], values))


def _forward_rule(static: Static, *primals: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    __tracebackhide__ = True
    call: LayerCall = static.value
    if call.arguments.refs:
        tensors, perturbed, perturbed_is_exact = as_arrays(primals), [True] * len(primals), False
    else:
        tensors = as_arrays([p.value for p in primals])  # jax.grad(f)(2.0) hands on the Python number
        perturbed = [p.perturbed for p in primals]
        perturbed_is_exact = not any(map(is_rematerialization_tracer, tensors))
    needs_grad = call.arguments.can_get_gradient(perturbed)
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
    axes = axes_shared_by([*arrays, *given])
    if axes and any(is_mapped_along(g, axes) for g in gradients):
        # A layer that `backward` applies made a batch along a named axis, and JAX would count each example of it.
        with shared_axes(axes):
            gradients = run.derivative.gradients(run.needs_grad, arrays, given)
    if any(map(is_mapped, given)):
        # A gradient that no cotangent reaches counts once per example too: NOTE [shared outputs].
        nonzero = [g is not None for g in gradients]
        together = map_all_outputs([c for c in given if c is not None], select(gradients, nonzero))
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
