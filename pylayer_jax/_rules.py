"""A class's forward and backward as one `jax.custom_vjp` function."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import Arguments, as_arrays
from ._closures import traced_names
from ._compat import (
    NEEDS_VALUES,
    Tracer,
    concrete_value,
    is_differentiated,
    is_symbolic_zero,
    is_tracer,
    stage,
    typeof,
)
from ._context import Phase, PyLayerContext, Record, backward_context
from ._gradients import match_gradients
from ._hook_stack import COVERED, Hooks, active, covered
from ._orders import Rule, Source, joined, record_p
from ._packing import pack
from ._partition import Carried, Skeleton, split
from ._recording import Kept, Outputs, Recording


class Application:
    """One call of `apply`, as it travels through JAX inside a treedef. Holds no array."""

    __slots__ = ("arguments", "hooks", "layer", "name", "outputs", "perturbed", "recordings")

    def __init__(self, layer: Any, arguments: Arguments, hooks: Hooks | None = None) -> None:
        self.layer = layer
        # JAX may run the fwd rule long after the block was left, so that the pair is taken at the call.
        self.hooks = hooks
        self.name = arguments.layer
        self.arguments = arguments
        self.recordings: list[Recording] = []  # of a forward that looked at needs_input_grad
        self.perturbed = [False] * len(arguments.avals)  # by any of the differentiations so far
        self.outputs: Outputs | None = None

    def names_closed_over(self, counts: Callable[[object], bool] = is_tracer) -> list[str]:
        """Under which names `forward`, or a function among the arguments, reaches traced values that count."""
        names = traced_names(self.layer.forward, counts)
        for argument in self.arguments.arguments:
            for leaf in argument.skeleton.statics():
                if callable(leaf):
                    names += [f"{name} (in argument {argument.name})" for name in traced_names(leaf, counts)]
        return names

    def closed_over(self) -> Exception:
        names = self.names_closed_over()
        found = f" ({', '.join(names)})" if names else ""
        return jax.errors.UnexpectedTracerError(
            f"{self.name}.forward uses a traced value that it closes over{found}. Its gradient would be lost, since "
            "backward returns gradients for the arguments of forward alone. Pass it as an argument: "
            f"{self.name}.apply(..., {names[0].split()[0] if names else 'value'})."
        )


def add_note(error: Exception, layer: str, method: str) -> None:
    """Let an exception of the user's own keep its type, and say where it came from."""
    note = f"This happened in {layer}.{method}."
    if isinstance(error, jax.errors.UnexpectedTracerError):
        note += (
            " If it uses a traced value from elsewhere (a closure, a global, an object kept on ctx), pass that value "
            "as an argument of forward, or keep it with ctx.save_for_backward or as ctx.name = array."
        )
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


# -- forward --------------------------------------------------------------------------------------


def _run(application: Application, tensors: Sequence[Any], told: list[bool]) -> tuple[PyLayerContext, Any]:
    arguments = application.arguments
    record = Record(application.name, Phase.FORWARD, lambda: arguments.needs(told), tensors)
    ctx = PyLayerContext(record)
    try:
        # Of what runs in here only `ctx` saves anything. In eager mode, moreover, JAX would compile each operation
        # anew for each pair that it sees.
        with contextlib.nullcontext() if application.hooks is None else covered():
            result = arguments.call(application.layer.forward, ctx, tensors)
    except Exception as error:
        add_note(error, application.name, "forward")
        raise
    record.phase = Phase.RETURNED
    record.inputs = ()
    return ctx, result


def _primal(carried: Carried, *tensors: Any) -> tuple[Any, ...]:
    application: Application = carried.value
    # Staged code may be differentiated later, so that here every gradient counts as asked for.
    ctx, result = _run(application, as_arrays(tensors), application.arguments.perturbable([True] * len(tensors)))
    application.outputs = Outputs(application.name, result, ctx._record.marked)
    return tuple(joined(tensors, application.outputs.arrays(result)))


def _record_forward(
    application: Application, tensors: Sequence[Any], told: list[bool]
) -> tuple[Recording, list[Any], list[Any]]:
    """Run `forward`; the outputs, and each tensor that it kept, once."""
    ctx, result = _run(application, tensors, told)
    record = ctx._record
    outputs = Outputs(application.name, result, record.marked)
    arrays = outputs.arrays(result)
    residuals: list[Any] = []
    places: dict[int, int] = {}

    def keep(value: Any, name: str) -> Any:
        kept, skeleton = split(value)
        if any(map(callable, skeleton.statics())):
            _refuse_hidden_tracers(skeleton, name, application.name)
        for tensor in kept:
            if places.setdefault(id(tensor), len(residuals)) == len(residuals):
                residuals.append(tensor)
        return Kept(skeleton, [places[id(x)] for x in kept]) if kept else value

    saved = None if record.saved is None else keep(record.saved, "ctx.save_for_backward")
    saved_residuals = len(residuals)
    if application.hooks is not None:
        places.clear()  # an attribute is not packed, so that it shares nothing with what is
    attributes = {name: keep(value, f"ctx.{name}") for name, value in vars(ctx).items()}
    recording = Recording(
        outputs=outputs,
        saved=saved,
        saved_residuals=saved_residuals,
        attributes=attributes,
        residuals=len(residuals),
        materialize=record.materialize,
        told=told,
        asked=record.asked_needs,
    )
    return recording, arrays, as_arrays(residuals)


def _refuse_hidden_tracers(skeleton: Skeleton, name: str, layer: str) -> None:
    for path, leaf in skeleton.static_paths():
        if callable(leaf) and (hidden := traced_names(leaf)):
            raise ValueError(
                f"{name + path} in {layer}.forward is a function that closes over traced values "
                f"({', '.join(hidden)}), which cannot be kept for backward. Keep the values themselves, with "
                "ctx.save_for_backward or as attributes, and build the function in backward."
            )


def _stage_forward(
    application: Application, types: Sequence[Any], told: list[bool], tensors: Sequence[Any] = ()
) -> tuple[Recording, Rule, list[Any]]:
    """`forward` as the rule of one equation, and the values that it closes over.

    A `forward` that cannot be staged is run on the values of `tensors`, where they are given and have any.
    """
    traceable = True
    found: list[tuple[Recording, tuple[Source, ...]]] = []

    def forward(*inputs: Any) -> list[Any]:
        recording, outputs, residuals = _record_forward(application, inputs, told)
        sources, intermediates = _sources(inputs, outputs, residuals)
        found[:] = [(recording, sources)]
        return [*outputs, *intermediates]

    try:
        jaxpr, consts = stage(forward, types, application.name)
    except NEEDS_VALUES as error:
        # Host code in `forward`. Under eager differentiation the numbers are there, below the tracers.
        if not tensors:
            raise
        try:
            inputs = [jnp.copy(concrete_value(x)) for x in tensors]
        except jax.errors.ConcretizationTypeError:
            raise error from None
        values, traceable = forward(*inputs), False
        jaxpr, consts = stage(lambda *_: values, types, application.name)
    if any(map(is_differentiated, consts)):
        raise application.closed_over()
    ((recording, sources),) = found

    def pullback(needed: Sequence[bool], residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        return _pull(application, recording, application.arguments.perturbable(needed), residuals, cotangents)

    def widen(needed: Sequence[bool]) -> tuple[Rule, list[Any]] | None:
        wider = [t or n for t, n in zip(told, needed, strict=True)]
        return None if wider == told else _stage_forward(application, types, wider)[1:]

    rule = Rule(
        name=application.name,
        jaxpr=jaxpr,
        consts=len(consts),
        output_types=recording.outputs.types,
        has_tangent=recording.outputs.has_tangent,
        sources=sources,
        pullback=pullback,
        closed_over=application.closed_over,
        widen=widen if recording.asked else None,
        traceable=traceable,
    )
    return recording, rule, consts


def _sources(
    inputs: Sequence[Any], outputs: Sequence[Any], residuals: Sequence[Any]
) -> tuple[tuple[Source, ...], list[Any]]:
    # Staged inputs are distinct objects even where the caller passed one array twice, so identity tells.
    sources: list[Source] = []
    intermediates: list[Any] = []
    where: dict[int, Source] = {id(x): ("output", i) for i, x in enumerate(outputs)}
    where |= {id(x): ("input", i) for i, x in enumerate(inputs)}
    for tensor in residuals:
        source = where.get(id(tensor))
        if source is None:
            source = ("intermediate", len(intermediates))
            intermediates.append(tensor)
        sources.append(source)
    return tuple(sources), intermediates


def _forward_rule(carried: Carried, *primals: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    application: Application = carried.value
    tensors = as_arrays([p.value for p in primals])  # jax.grad(f)(2.0) hands on the Python number
    told = application.arguments.perturbable([p.perturbed for p in primals])
    application.perturbed = [a or b for a, b in zip(application.perturbed, told, strict=True)]
    if any(isinstance(x, Tracer) for x in tensors):
        recording, rule, consts = _stage_forward(application, [typeof(x) for x in tensors], told, tensors)
        values = record_p.bind(*consts, *tensors, rule=rule)
        outputs, residuals = values[: rule.outputs], rule.residuals(tensors, values)
    else:
        recording, outputs, residuals = _record_forward(application, tensors, told)
        if any(map(is_differentiated, [*outputs, *residuals])):
            raise application.closed_over()
    application.outputs = recording.outputs
    if application.hooks is not None and active.value is not COVERED:
        saved = recording.saved_residuals
        owner = f"{application.name}, saved tensor"
        recording.packed, arrays, outputs = pack(application.hooks, residuals[:saved], outputs, owner)
        residuals = [*arrays, *residuals[saved:]]
        recording.residuals = len(residuals)
    if recording.asked:
        residuals.append(jnp.zeros((0, len(application.recordings))))
        application.recordings.append(recording)
    return tuple(outputs), (Carried((application, recording)), *residuals)


# -- backward -------------------------------------------------------------------------------------


def _backward_rule(residuals: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    application, recording = residuals[0].value
    recording, kept = _recording_of(application, recording, list(residuals[1:]))
    needed = recording.told if recording.asked else application.perturbed
    given = [None if is_symbolic_zero(c) else c for c in cotangents]
    packed, unpack = recording.packed, None
    if packed is not None:
        arrays, kept = kept[: packed.size], [None] * recording.saved_residuals + kept[packed.size :]
        unpack = functools.partial(packed.open, arrays, given)
    return None, *_pull(application, recording, needed, kept, given, unpack)


def _recording_of(application: Application, recording: Recording, residuals: list[Any]) -> tuple[Recording, list[Any]]:
    # NOTE [several recordings]
    # A jitted function that is differentiated for different arguments runs the fwd rule once for each
    # choice, and JAX keeps the structure of the residuals of the last run alone. Where `forward` looked at
    # needs_input_grad, what it saved may differ, so that an empty array tells by its shape which run it was.
    if recording.asked:
        recording = application.recordings[residuals.pop().shape[-1]]
        if len(residuals) != recording.residuals:
            raise RuntimeError(
                f"{application.name}.forward saved {recording.residuals} tensors for one choice of needs_input_grad "
                f"and {len(residuals)} for another, within one jitted function that was differentiated both ways. Save "
                "the same tensors for every choice, or differentiate inside jit: jax.jit(jax.grad(f))."
            )
    return recording, residuals


def _pull(
    application: Application,
    recording: Recording,
    needed: list[bool],
    residuals: Sequence[Any],
    given: Sequence[Any],
    unpack: Callable[[], Sequence[Any]] | None = None,
) -> list[Any]:
    """Gradients of the inputs (None for zero), by `backward`, from cotangents of the outputs (None for zero).

    `unpack` gives the residuals that `save_for_backward` saved, where hooks packed them.
    """
    outputs, arguments, layer = recording.outputs, application.arguments, application.layer
    given = [c if has else None for c, has in zip(given, outputs.has_tangent, strict=True)]
    if all(c is None for c in given):
        return [None] * len(arguments.avals)

    def restore(value: Any, tensors: Sequence[Any] = residuals) -> Any:
        return value.restore(tensors) if isinstance(value, Kept) else value

    ctx = backward_context(
        application.name,
        lambda: arguments.needs(needed),
        lambda: restore(recording.saved, residuals if unpack is None else unpack()),
        {name: restore(value) for name, value in recording.attributes.items()},
    )

    conjugate = _conjugated if layer.complex_convention == "paddle" else list
    cotangents = outputs.cotangents(conjugate(given), recording.materialize)
    try:
        result = layer.backward(ctx, *cotangents)
    except Exception as error:
        add_note(error, application.name, "backward")
        raise
    return conjugate(match_gradients(result, arguments, needed))


def _conjugated(values: Sequence[Any]) -> list[Any]:
    return [jnp.conj(x) if x is not None and jnp.iscomplexobj(x) else x for x in values]


def compile_layer(name: str) -> Callable[..., tuple[Any, ...]]:
    """The one `jax.custom_vjp` function of a class: (carried application, *tensors) -> tensors."""

    def primal(carried: Carried, *tensors: Any) -> tuple[Any, ...]:
        return _primal(carried, *tensors)

    primal.__name__ = primal.__qualname__ = name  # what jaxprs, profiles and errors show
    _with_signature(primal, _PRIMAL)
    rule = jax.custom_vjp(primal)
    rule.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
    return rule


def _with_signature(function: Callable[..., Any], signature: inspect.Signature) -> None:
    # JAX asks for the signatures of the three functions at each call; found ready, they cost next to nothing.
    function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]


_PRIMAL = inspect.signature(_primal)
_with_signature(_forward_rule, inspect.signature(_forward_rule))
_with_signature(_backward_rule, inspect.signature(_backward_rule))
