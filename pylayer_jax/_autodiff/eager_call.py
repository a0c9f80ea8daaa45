"""A layer as one operation of our own, for classes with forward mode or their own batching.

`jax.custom_vjp` has no forward mode, and batches what is inside. A class that has either binds

    layer:  inputs  ->  outputs

in eager mode, whose rules look inside no earlier than they have to: `forward` sees concrete values, and a batch
goes to the layer's `vmap` as a whole. Staged code gets *record* instead (NOTE [orders]), with `forward` as a jaxpr.
Both have the same derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

from pylayer_jax._jax.names import (
    Primitive,
    Tracer,
    Zero,
    is_named,
    is_staging,
    mapped_type,
    register,
    stage,
    tangent_type,
    typeof,
    vmap_like,
)
from pylayer_jax._methods.arguments import as_arrays
from pylayer_jax._methods.batches import map_outputs
from pylayer_jax._methods.outputs import Recording

from .call import (
    Application,
    derivative_of,
    differentiate,
    keep,
    run_setup,
    run_undifferentiated,
    stage_forward,
)
from .derivative import Derivative
from .staged_call import Rule, batch_rule, moves, record_p

# What `forward` left, the derivative, and the residuals that it takes.
SetUp = tuple[Recording, Derivative, list[Any]]


class Call(Protocol):
    """What *layer* binds: one application, or a batch of them."""

    application: Application
    first: bool  # whether it is what is differentiated first, so that hooks pack what it keeps
    types: list[Any]  # of its inputs

    def run(self, *tensors: Any) -> list[Any]:
        """The outputs."""
        ...

    def run_batch(self, axis: Any, dims: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """The outputs of a batch, with the mapped axis in front."""
        ...

    def stage(self, told: list[bool], tensors: Sequence[Any] = ()) -> tuple[Rule, list[Any]]:
        """The same as an equation, and the values that it closes over."""
        ...

    def setup(self, tensors: Sequence[Any], outputs: Sequence[Any], told: list[bool]) -> SetUp:
        """What is kept for the derivative, by `setup_context`."""
        ...

    def again(self) -> Call:
        """The same for the next differentiation."""
        ...


class One:
    """One application."""

    def __init__(self, application: Application, first: bool = True) -> None:
        self.application = application
        self.first = first
        self.types = application.arguments.avals

    def run(self, *tensors: Any) -> list[Any]:
        return run_undifferentiated(self.application, tensors)

    def run_batch(self, axis: Any, dims: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        if self.application.layer._batches_itself():
            return map_outputs(self.application, axis, dims, as_arrays(tensors))
        return vmap_like(self.run, axis, tuple(dims), 0)(*tensors)

    def stage(self, told: list[bool], tensors: Sequence[Any] = ()) -> tuple[Rule, list[Any]]:
        recording, rule, consts = stage_forward(self.application, self.types, told, tensors)
        self.application.outputs = recording.outputs
        rule.first = self.first
        return rule, consts

    def setup(self, tensors: Sequence[Any], outputs: Sequence[Any], told: list[bool]) -> SetUp:
        recording, residuals = run_setup(self.application, tensors, outputs, told)
        return recording, derivative_of(self.application, recording, len(residuals)), residuals

    def again(self) -> One:
        return One(self.application, first=False)


class Batch:
    """A batch of calls, which differ in the inputs that have a mapped axis."""

    def __init__(self, inner: Call, axis: Any, dims: Sequence[Any], first: bool) -> None:
        self.application = inner.application
        self.inner = inner
        self.axis = axis
        self.dims = list(dims)
        self.first = first
        self.types = [t if d is None else mapped_type(axis, t, d) for t, d in zip(inner.types, dims, strict=True)]

    def run(self, *tensors: Any) -> list[Any]:
        return self.inner.run_batch(self.axis, self.dims, tensors)

    def run_batch(self, axis: Any, dims: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        return vmap_like(self.run, axis, tuple(dims), 0)(*tensors)

    def stage(self, told: list[bool], tensors: Sequence[Any] = ()) -> tuple[Rule, list[Any]]:
        del tensors  # those of a batch are no help to one application
        rule, consts = self.inner.stage(told)
        types = [*map(typeof, consts), *self.types]
        batched, new, _ = batch_rule(rule, self.axis, types, [None] * len(consts) + self.dims)
        batched.first = self.first
        return batched, [*new, *consts]

    def setup(self, tensors: Sequence[Any], outputs: Sequence[Any], told: list[bool]) -> SetUp:
        found: list[SetUp] = []

        def one(tensors: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
            recording, derivative, residuals = self.inner.setup(tensors, outputs, told)
            shared = {id(x): x for x, d in zip(tensors, self.dims, strict=True) if d is None}
            found[:] = [(recording, derivative, [shared.get(id(x)) for x in residuals])]
            return [x for x in residuals if id(x) not in shared]

        mapped = iter(vmap_like(one, self.axis, (self.dims, 0), 0)(list(tensors), list(outputs)))
        ((recording, derivative, shared),) = found
        dims = [0 if x is None else None for x in shared]
        derivative = derivative.batched(self.axis, [typeof(x) for x in outputs], dims, self.dims)
        return recording, derivative, [next(mapped) if x is None else x for x in shared]

    def again(self) -> Batch:
        return Batch(self.inner, self.axis, self.dims, first=False)


def bind(call: Call, tensors: Sequence[Any]) -> list[Any]:
    """The outputs of a call under all transformations that are active."""
    # What `forward` closes over would be lost to a rule of ours; staged, it becomes an input.
    if is_staging() or call.application.names_closed_over():
        rule, consts = call.stage(call.application.arguments.perturbable([True] * len(tensors)), tensors)
        return record_p.bind(*consts, *tensors, rule=rule)[: rule.outputs]
    return layer_p.bind(*tensors, call=call)


layer_p = Primitive("pylayer_call")


def _types(*_: Any, call: Call) -> tuple[list[Any], Any]:
    jaxpr, _consts = stage(call.run, call.types, call.application.name)
    return [v.aval for v in jaxpr.outvars], jaxpr.effects


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> tuple[list[Any], list[Any]]:
    needed = moves(primals, tangents)
    if not any(needed):
        values = bind(call, primals)
        return values, [Zero(tangent_type(typeof(v))) for v in values]
    derivative, residuals, outputs = _differentiate(call, as_arrays(primals), needed)
    return outputs, derivative.tangents(needed, residuals, [t for t, n in zip(tangents, needed, strict=True) if n])


def _differentiate(call: Call, tensors: list[Any], needed: list[bool]) -> tuple[Derivative, list[Any], list[Any]]:
    """The derivative, the residuals that it takes, and the outputs."""
    application = call.application
    traced = any(isinstance(x, Tracer) for x in tensors)
    if isinstance(call, One) and not traced:
        recording, derivative, outputs, residuals = differentiate(application, tensors, needed)
        application.outputs = recording.outputs
        kept = functools.partial(keep, application, recording)
    elif application.layer._splits() and not is_staging():
        # `forward` may be host code, which cannot be staged; what is kept, `setup_context` tells.
        outputs = bind(call.again(), tensors) if traced else call.run(*tensors)
        recording, derivative, residuals = call.setup(tensors, outputs, needed)
        kept = functools.partial(keep, application, recording)
    else:
        rule, consts = call.again().stage(needed, tensors)  # it is differentiated here
        values = record_p.bind(*consts, *tensors, rule=rule)
        derivative, residuals, outputs = rule.derivative, rule.residuals(tensors, values), values[: rule.outputs]
        kept = rule.keep
    return kept(derivative, residuals, outputs) if call.first else (derivative, residuals, outputs)


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, call: Call) -> tuple[list[Any], list[Any]]:
    # JAX asks in this case too; the layer may ask for the index along the axis, or for a sum over it.
    if all(d is None for d in dims) and not is_named(axis):
        values = bind(call, args)
        return values, [None] * len(values)
    values = bind(Batch(call, axis, dims, call.first), args)
    return values, [0] * len(values)


register(
    layer_p,
    evaluate=lambda *tensors, call: call.run(*tensors),
    abstract=_types,
    jvp=_jvp,
    batch=_batch,
)
