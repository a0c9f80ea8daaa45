"""Implements a layer as a JAX primitive, for classes with forward mode or their own batching: NOTE [two bindings].

In eager mode such a class binds *eager_call*: inputs -> outputs, whose rules look inside as late as possible: `forward`
sees concrete values, and a batch goes to the layer's `vmap` as a whole. Staged code gets *staged_call* instead (NOTE
[orders]), with `forward` as a jaxpr. Both have the same derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pylayer_jax._jax.imports import eval_context
from pylayer_jax._jax.jaxprs import stage
from pylayer_jax._jax.masks import select
from pylayer_jax._jax.primitives import PrimitiveWithObject, is_named, register, vmap_over
from pylayer_jax._jax.tracers import NEEDS_VALUES, concrete_value, is_differentiated, is_staging, is_tracer, is_unknown
from pylayer_jax._jax.types import as_arrays, has_tangent, mapped_type, typeof
from pylayer_jax._methods.batches import check_mapped, map_outputs
from pylayer_jax._methods.outputs import Outputs
from pylayer_jax._trees.opaque import Static
from pylayer_jax._trees.partition import contains

from .backward_rule import derivative_of
from .call import LayerCall
from .derivative import Batch, Derivative
from .forward_rule import Differentiated, differentiate
from .run_forward import run_setup_context, run_undifferentiated
from .saved_state import SavedState
from .staged_call import StagedCall, second_derivative_error, stage_call
from .staged_call_batching import batch_staged_call
from .staged_call_rules import bind_staged_call, nonzero_tangents
from .tangent_map import output_tangents

# The saved state, the derivative, and the residuals that the derivative takes.
SetUp = tuple[SavedState, Derivative, list[Any]]


class EagerCall(Protocol):
    """The parameter of *eager_call*: one call of a layer, or a batch of them."""

    call: LayerCall
    packs: bool  # whether its first differentiation packs the residuals; later ones never do
    types: list[Any]  # of its inputs

    def run(self, *tensors: Any) -> tuple[list[Any], Outputs]:
        """The output tensors, and their structure."""
        ...

    def run_batch(self, axis: Any, dims: Sequence[Any], tensors: Sequence[Any]) -> tuple[list[Any], Outputs]:
        """The output tensors of a batch, with the mapped axis in front, and their structure."""
        ...

    def stage(self, needs_grad: list[bool], tensors: Sequence[Any] = ()) -> tuple[StagedCall, list[Any]]:
        """The same call for *staged_call*, and the values that it closes over."""
        ...

    def setup(self, outputs: Outputs, values: Sequence[Any], tensors: Sequence[Any], needs_grad: list[bool]) -> SetUp:
        """Run `setup_context` on outputs that `forward` returned."""
        ...

    def without_packing(self) -> EagerCall: ...


class SingleCall:
    """One call of a layer."""

    def __init__(self, call: LayerCall, packs: bool = True) -> None:
        self.call = call
        self.packs = packs
        self.types = call.arguments.avals

    def __repr__(self) -> str:
        return self.call.name  # as jaxprs show it

    def run(self, *tensors: Any) -> tuple[list[Any], Outputs]:
        __tracebackhide__ = True
        outputs, values = run_undifferentiated(self.call, tensors, needs=True)
        return values, outputs

    def run_batch(self, axis: Any, dims: Sequence[Any], tensors: Sequence[Any]) -> tuple[list[Any], Outputs]:
        __tracebackhide__ = True
        if not self.call.layer._has_vmap_method():
            return _vmap_run(self, axis, dims, tensors)
        with self.call.scope("vmap"):
            outputs, values = map_outputs(self.call.layer.vmap, self.call.arguments, axis, dims, as_arrays(tensors))
        if axis.size and (types := self._output_types(dims, tensors)) is not None:
            check_mapped(self.call.name, axis, values, types)
        return values, outputs

    def _output_types(self, dims: Sequence[Any], tensors: Sequence[Any]) -> list[Any] | None:
        """The types of the outputs of one example; None if they cannot be known here."""
        try:
            jaxpr, _consts, _outputs = stage(self.run, self.types, self.call.source)
            return [v.aval for v in jaxpr.outvars]
        except NEEDS_VALUES:
            pass
        try:  # host code runs on the first example
            tensors = [x if d is None else jnp.take(x, 0, axis=d) for x, d in zip(tensors, dims, strict=True)]
            return [typeof(x) for x in self.run(*map(concrete_value, tensors))[0]]
        except jax.errors.ConcretizationTypeError:
            return None

    def stage(self, needs_grad: list[bool], tensors: Sequence[Any] = ()) -> tuple[StagedCall, list[Any]]:
        __tracebackhide__ = True
        staged, consts = stage_call(self.call, self.types, needs_grad, tensors)
        staged.packs = self.packs
        return staged, consts

    def setup(self, outputs: Outputs, values: Sequence[Any], tensors: Sequence[Any], needs_grad: list[bool]) -> SetUp:
        saved, residuals = run_setup_context(self.call, outputs, values, tensors, needs_grad)
        return saved, derivative_of(self.call, saved, len(residuals)), residuals

    def without_packing(self) -> SingleCall:
        return SingleCall(self.call, packs=False)


class BatchedCall:
    """A batch of calls, which differ in the inputs that have a mapped axis."""

    def __init__(self, inner: EagerCall, axis: Any, dims: Sequence[Any], packs: bool) -> None:
        self.call = inner.call
        self.inner = inner
        self.axis = axis
        self.dims = list(dims)
        self.packs = packs
        self.types = [t if d is None else mapped_type(axis, t, d) for t, d in zip(inner.types, dims, strict=True)]

    def __repr__(self) -> str:
        return self.call.name

    def run(self, *tensors: Any) -> tuple[list[Any], Outputs]:
        __tracebackhide__ = True
        return self.inner.run_batch(self.axis, self.dims, tensors)

    def run_batch(self, axis: Any, dims: Sequence[Any], tensors: Sequence[Any]) -> tuple[list[Any], Outputs]:
        return _vmap_run(self, axis, dims, tensors)

    def stage(self, needs_grad: list[bool], tensors: Sequence[Any] = ()) -> tuple[StagedCall, list[Any]]:
        __tracebackhide__ = True
        del tensors  # the values of a batch do not help to stage one call
        staged, consts = self.inner.stage(needs_grad)
        types = [*map(typeof, consts), *self.types]
        batched, more_consts, _ = batch_staged_call(staged, self.axis, types, [None] * len(consts) + self.dims)
        batched.packs = self.packs
        return batched, [*more_consts, *consts]

    def setup(self, outputs: Outputs, values: Sequence[Any], tensors: Sequence[Any], needs_grad: list[bool]) -> SetUp:
        def setup_one(tensors: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], Static]:
            saved, derivative, residuals = self.inner.setup(outputs, values, tensors, needs_grad)
            # The number of the input that all examples share, or None for a residual of each example.
            shared = {id(x): i for i, (x, d) in enumerate(zip(tensors, self.dims, strict=True)) if d is None}
            inputs = [shared.get(id(x)) for x in residuals]
            return [x for x, i in zip(residuals, inputs, strict=True) if i is None], Static((saved, derivative, inputs))

        setup = vmap_over(self.axis, setup_one, (self.dims, 0), 0)
        own, static = setup(list(tensors), list(values))
        saved, derivative, inputs = static.value
        batch = Batch(self.axis, [0 if i is None else None for i in inputs], self.dims)
        batched = derivative.batched(batch, [typeof(x) for x in values])
        rest = iter(own)
        return saved, batched, [next(rest) if i is None else tensors[i] for i in inputs]

    def without_packing(self) -> BatchedCall:
        return BatchedCall(self.inner, self.axis, self.dims, packs=False)


def _vmap_run(eager: EagerCall, axis: Any, dims: Sequence[Any], tensors: Sequence[Any]) -> tuple[list[Any], Outputs]:
    __tracebackhide__ = True

    def run(*tensors: Any) -> tuple[list[Any], Static]:
        __tracebackhide__ = True
        values, outputs = eager.run(*tensors)
        return values, Static(outputs)

    values, outputs = vmap_over(axis, run, tuple(dims), 0)(*tensors)
    return values, outputs.value


# -- eager_call: inputs -> outputs -----------------------------------------------------------------

eager_call_p = PrimitiveWithObject("eager_call", "eager")


def bind(eager: EagerCall, tensors: Sequence[Any]) -> list[Any]:
    """The outputs of a call under all transformations that are active."""
    __tracebackhide__ = True
    # A rule of ours would lose values that `forward` closes over; staged, they become inputs.
    # `jax.linear_transpose` transposes the jaxpr of `forward`.
    if not is_staging() and not any(map(is_unknown, tensors)) and not eager.call.names_closed_over():
        return eager_call_p.bind(*tensors, eager=eager)
    needs_grad = eager.call.arguments.perturbable([True] * len(tensors))
    staged, consts = eager.stage(needs_grad, tensors)
    eager.call.outputs = staged.saved.outputs
    return bind_staged_call(staged, consts, tensors)[: staged.outputs]


def _evaluate(*tensors: Any, eager: EagerCall) -> list[Any]:
    __tracebackhide__ = True
    values, eager.call.outputs = eager.run(*tensors)
    return values


def _types(*_: Any, eager: EagerCall) -> tuple[list[Any], Any]:
    jaxpr, _consts, eager.call.outputs = stage(eager.run, eager.types, eager.call.source)
    return [v.aval for v in jaxpr.outvars], jaxpr.effects


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, eager: EagerCall) -> tuple[list[Any], list[Any]]:
    __tracebackhide__ = True
    perturbed = nonzero_tangents(primals, tangents)
    if not any(perturbed):
        values = bind(eager, primals)
        return values, [None] * len(values)
    with eval_context():  # a Python number becomes an array, and no tracer of the trace that runs this rule
        tensors = as_arrays(primals)
    found = _differentiate(eager, tensors, perturbed)
    return found.outputs, output_tangents(found.derivative, perturbed, found.residuals, select(tangents, perturbed))


def _differentiate(eager: EagerCall, tensors: list[Any], needs_grad: list[bool]) -> Differentiated:
    __tracebackhide__ = True
    call, traced = eager.call, any(map(is_tracer, tensors))
    is_first = not any(map(is_differentiated, tensors))  # of the derivatives
    # Host code cannot be staged. Then `setup_context`, run apart from `forward`, says which tensors are kept.
    may_set_up = call.layer._has_setup_context() and not is_staging()
    if isinstance(eager, SingleCall) and not traced:
        found = differentiate(call, tensors, needs_grad)
        call.outputs = found.saved.outputs
    elif may_set_up and call.layer._has_vmap_method() and is_first:
        found = _set_up(eager, tensors, needs_grad)
    else:
        try:
            staged, consts = eager.without_packing().stage(needs_grad, () if may_set_up else tensors)
        except NEEDS_VALUES:
            if not may_set_up:
                raise
            found = _set_up(eager, tensors, needs_grad)
            error = second_derivative_error(call, found.saved, _computed_from_marked(found, tensors))
            if error is not None and not is_first:
                raise error from None
        else:
            call.outputs = staged.saved.outputs
            found = Differentiated.staged(staged, consts, tensors)
    return found.packed(call) if eager.packs else found


def _set_up(eager: EagerCall, tensors: list[Any], needs_grad: list[bool]) -> Differentiated:
    values, outputs = bind(eager.without_packing(), tensors), eager.call.outputs
    assert outputs is not None
    saved, derivative, residuals = eager.setup(outputs, values, tensors, needs_grad)
    return Differentiated(saved, derivative, values, residuals)


def _computed_from_marked(found: Differentiated, tensors: Sequence[Any]) -> list[Any]:
    """Residuals that may come from a marked output, which is plain code, here host code, of `forward`."""
    marked = found.saved.outputs.non_differentiable
    known = [*tensors, *(x for i, x in enumerate(found.outputs) if i not in marked)]
    is_any = any(has_tangent(x) for i, x in enumerate(found.outputs) if i in marked)
    return [x for x in found.residuals if is_any and not contains(known, x)]


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, eager: EagerCall) -> tuple[list[Any], list[Any]]:
    __tracebackhide__ = True
    values = bind(BatchedCall(eager, axis, dims, eager.packs), args)
    return values, [0] * len(values)


register(
    eager_call_p,
    evaluate=_evaluate,
    abstract=_types,
    jvp=_jvp,
    batch=_batch,
    bind=lambda *args, eager: bind(eager, args),
    uses_axis=is_named,  # the layer may ask for the index along the axis, or for a sum over it
)
