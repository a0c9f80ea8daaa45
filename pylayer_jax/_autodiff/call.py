"""One application of a layer: its forward run, recorded or staged, and its derivative.

What is in here is shared by the two ways in which a layer is bound: as a `jax.custom_vjp` function (`_rules.py`),
and as an operation of our own (`_opaque.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pylayer_jax._hooks.active import COVERED, Hooks, active, covered
from pylayer_jax._hooks.packing import pack, unpacking
from pylayer_jax._jax.names import (
    NEEDS_VALUES,
    Tracer,
    concrete_value,
    is_differentiated,
    is_staging,
    is_tracer,
    stage,
    typeof,
)
from pylayer_jax._methods.arguments import Arguments, as_arrays
from pylayer_jax._methods.batches import map_outputs
from pylayer_jax._methods.context import Phase, PyLayerContext, Record, add_note, backward_context
from pylayer_jax._methods.gradients import match_gradients
from pylayer_jax._methods.once_differentiable import refusal_of
from pylayer_jax._methods.outputs import Kept, Outputs, Recording
from pylayer_jax._methods.tangents import argument_tangents, match_tangents
from pylayer_jax._trees.closures import traced_attributes, traced_names
from pylayer_jax._trees.partition import Skeleton, split

from .derivative import Derivative
from .staged_call import Rule, Source, record_p

# Who follows what is kept, for a report: part of jit's cache key, so that staged code is traced anew for it.
observer: Final = jax.make_user_context(None)


class Application:
    """One call of `apply`, as it travels through JAX inside a treedef. Holds no array."""

    __slots__ = ("arguments", "hooks", "layer", "name", "outputs", "perturbed", "recordings", "source")

    def __init__(self, layer: Any, arguments: Arguments, hooks: Hooks | None = None) -> None:
        self.layer = layer
        # JAX may run the fwd rule long after the block was left, so that the pair is taken at the call.
        self.hooks = hooks
        self.name = arguments.layer
        self.arguments = arguments
        # Of a forward that looked at needs_input_grad: each recording, with its derivative.
        self.recordings: list[tuple[Recording, Derivative]] = []
        self.perturbed = [False] * len(arguments.avals)  # by any of the differentiations so far
        self.outputs: Outputs | None = None
        self.source = "" if observer.value is None else observer.value.call_site()

    def names_closed_over(self, counts: Callable[[object], bool] = is_tracer) -> list[str]:
        """Under which names `forward`, or a static among the arguments, reaches traced values that count."""
        names = traced_names(self.layer.forward, counts)
        for argument in self.arguments.arguments:
            for leaf in argument.skeleton.statics():
                found = traced_names(leaf, counts) if callable(leaf) else traced_attributes(leaf, counts)
                names += [f"{name} (in argument {argument.name})" for name in found]
        return names

    def closed_over(self) -> Exception:
        for argument in self.arguments.arguments:
            for path, leaf in argument.skeleton.static_paths():
                if not callable(leaf) and (held := traced_attributes(leaf)):
                    return jax.errors.UnexpectedTracerError(
                        f"{self.name}.apply: argument {argument.name}{path} holds a traced value in {held[0]}, but "
                        f"its type {type(leaf).__qualname__} is no pytree, so that its gradient would be lost. "
                        "Register the type (jax.tree_util.register_dataclass), or pass the array itself."
                    )
        names = self.names_closed_over()
        found = f" ({', '.join(names)})" if names else ""
        return jax.errors.UnexpectedTracerError(
            f"{self.name}.forward uses a traced value that it closes over{found}. Its gradient would be lost, since "
            "backward returns gradients for the arguments of forward alone. Pass it as an argument: "
            f"{self.name}.apply(..., {names[0].split()[0] if names else 'value'})."
        )


# -- forward --------------------------------------------------------------------------------------


def run_forward(application: Application, tensors: Sequence[Any], told: list[bool]) -> tuple[PyLayerContext, Any]:
    """Run `forward`: the context that it leaves, and what it returned."""
    return _run(application, "forward", application.layer._body(), tensors, told)


def run_undifferentiated(application: Application, tensors: Sequence[Any]) -> list[Any]:
    """Run `forward` where nothing is differentiated, though it may be later: its output tensors."""
    # So that every gradient counts as asked for.
    told = application.arguments.perturbable([True] * len(tensors))
    ctx, result = run_forward(application, as_arrays(tensors), told)
    application.outputs = Outputs(application.name, result, ctx._record)
    return application.outputs.arrays(result)


def run_setup(
    application: Application, tensors: Sequence[Any], outputs: Sequence[Any], told: list[bool]
) -> tuple[Recording, list[Any]]:
    """Run `setup_context` for outputs that `forward` gave before: what it left, and each tensor that it kept."""
    assert application.outputs is not None
    result = application.outputs.skeleton.fill(outputs)
    setup = functools.partial(application.layer._setup, result)
    ctx, _ = _run(application, "setup_context", setup, tensors, told)
    recording, _, residuals = _recorded(application, ctx, result, told)
    return recording, residuals


def _run(
    application: Application, method: str, function: Callable[..., Any], tensors: Sequence[Any], told: list[bool]
) -> tuple[PyLayerContext, Any]:
    arguments = application.arguments
    record = Record(application.name, Phase.FORWARD, lambda: arguments.needs(told), tensors)
    ctx = application.layer._context(record)
    try:
        # Of what runs in here only `ctx` saves anything. In eager mode, moreover, JAX would compile each operation
        # anew for each pair that it sees.
        with contextlib.nullcontext() if application.hooks is None else covered():
            result = arguments.call(function, ctx, tensors)
    except Exception as error:
        add_note(error, application.name, method)
        raise
    record.phase = Phase.RETURNED
    record.inputs = ()
    return ctx, result


def record_forward(
    application: Application, tensors: Sequence[Any], told: list[bool]
) -> tuple[Recording, list[Any], list[Any]]:
    """Run `forward`: what it left, the outputs, and each tensor that it kept, once."""
    ctx, result = run_forward(application, tensors, told)
    return _recorded(application, ctx, result, told)


def _recorded(
    application: Application, ctx: PyLayerContext, result: Any, told: list[bool]
) -> tuple[Recording, list[Any], list[Any]]:
    record = ctx._record
    for_jvp = None if application.layer._tangent_map() is None else record.saved_for_jvp
    outputs = Outputs(application.name, result, record)
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
        places.clear()  # neither an attribute nor a tensor for jvp is packed: they share nothing with what is
    recording = Recording(
        outputs=outputs,
        saved=saved,
        saved_residuals=saved_residuals,
        saved_for_jvp=None if for_jvp is None else keep(for_jvp, "ctx.save_for_forward"),
        attributes={name: keep(value, f"ctx.{name}") for name, value in vars(ctx).items()},
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


def stage_forward(
    application: Application, types: Sequence[Any], told: list[bool], tensors: Sequence[Any] = ()
) -> tuple[Recording, Rule, list[Any]]:
    """`forward` as the rule of one equation, and the values that it closes over.

    A `forward` that cannot be staged is run on the values of `tensors`, where they are given and have any.
    """
    traceable = True
    found: list[tuple[Recording, tuple[Source, ...]]] = []

    def forward(*inputs: Any) -> list[Any]:
        recording, outputs, residuals = record_forward(application, inputs, told)
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

    def widen(needed: Sequence[bool]) -> tuple[Rule, list[Any]] | None:
        wider = [t or n for t, n in zip(told, needed, strict=True)]
        return None if wider == told else stage_forward(application, types, wider)[1:]

    rule = Rule(
        derivative=derivative_of(application, recording, len(sources)),
        jaxpr=jaxpr,
        consts=len(consts),
        sources=sources,
        closed_over=application.closed_over,
        keep=functools.partial(keep, application, recording),
        widen=widen if recording.asked else None,
        traceable=traceable,
        mapped=functools.partial(map_outputs, application) if application.layer._batches_itself() else None,
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


def differentiate(
    application: Application, tensors: Sequence[Any], told: list[bool]
) -> tuple[Recording, Derivative, list[Any], list[Any]]:
    """Run `forward` where it is differentiated: what it left, its derivative, the outputs and the residuals."""
    if any(isinstance(x, Tracer) for x in tensors):
        recording, rule, consts = stage_forward(application, [typeof(x) for x in tensors], told, tensors)
        values = record_p.bind(*consts, *tensors, rule=rule)
        return recording, rule.derivative, values[: rule.outputs], rule.residuals(tensors, values)
    recording, outputs, residuals = record_forward(application, tensors, told)
    if any(map(is_differentiated, [*outputs, *residuals])):
        raise application.closed_over()
    return recording, derivative_of(application, recording, len(residuals)), outputs, residuals


# -- what is kept ---------------------------------------------------------------------------------


def keep(
    application: Application,
    recording: Recording,
    derivative: Derivative,
    residuals: list[Any],
    outputs: list[Any],
) -> tuple[Derivative, list[Any], list[Any]]:
    """What JAX keeps of the residuals: packed where hooks are active, and named where it is staged.

    Returns:
        A derivative that takes what is kept, that, and the outputs bound to it.
    """
    saved, tensors, follower = recording.saved_residuals, residuals, observer.value
    if not saved and follower is None:
        return derivative, residuals, outputs
    owners: Sequence[int] = range(saved)
    if application.hooks is not None and active.value is not COVERED:
        owner = f"{application.name}, saved tensor"
        packed, arrays, outputs = pack(application.hooks, residuals[:saved], outputs, owner)
        derivative = unpacking(derivative, packed)
        residuals, owners = [*arrays, *residuals[saved:]], packed.owners
    if not is_staging(beneath=True):
        return derivative, residuals, outputs
    names = _names(application, recording)
    marked = residuals if follower is None else follower.mark(application, recording, tensors, residuals, owners)
    named = [_named(x, names[i]) for x, i in zip(marked, owners, strict=False)] + list(marked[len(owners) :])
    # An output that is kept goes on under its name, so that a policy which saves it does not compute it twice.
    outputs = [next((y for x, y in zip(residuals, named, strict=True) if x is o), o) for o in outputs]
    return derivative, named, outputs


def _named(tensor: Any, name: str) -> Any:
    return checkpoint_name(tensor, name) if is_tracer(tensor) else tensor


def _names(application: Application, recording: Recording) -> list[str]:
    """Of each saved residual, for the policies of `jax.checkpoint`."""
    layer, saved = application.layer, recording.saved
    names = [""] * recording.saved_residuals
    if not isinstance(saved, Kept):
        return names
    for (entry, path), residual in zip(saved.skeleton.tensor_entries(), saved.residuals, strict=True):
        given = layer.saved_names[entry] if entry < len(layer.saved_names) else f"{layer.__name__}.saved[{entry}]"
        names[residual] = names[residual] or given + path
    return names


# -- derivative -----------------------------------------------------------------------------------


def derivative_of(application: Application, recording: Recording, residuals: int) -> Derivative:
    """The derivative of one run of `forward`, by the `backward` of its class, and by its `jvp` if it has one."""
    layer = application.layer

    def pullback(needed: Sequence[bool], residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        return _pull(application, recording, application.arguments.perturbable(needed), residuals, cotangents)

    def pushforward(needed: Sequence[bool], residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        return _push(application, recording, application.arguments.perturbable(needed), residuals, tangents)

    return Derivative(
        name=application.name,
        output_types=recording.outputs.types,
        has_tangent=recording.outputs.has_tangent,
        residuals=residuals,
        pullback=pullback,
        pushforward=None if layer._tangent_map() is None else pushforward,
        forward_mode=layer.forward_mode,
        refusal=refusal_of(layer.backward),
    )


def _pull(
    application: Application,
    recording: Recording,
    needed: list[bool],
    residuals: Sequence[Any],
    given: Sequence[Any],
) -> list[Any]:
    """Gradients of the inputs (None for zero), by `backward`, from cotangents of the outputs (None for zero)."""
    outputs, arguments, layer = recording.outputs, application.arguments, application.layer
    given = [c if has else None for c, has in zip(given, outputs.has_tangent, strict=True)]
    if all(c is None for c in given):
        return [None] * len(arguments.avals)
    ctx = _context(application, recording, needed, residuals, recording.saved)
    conjugate = _conjugated if layer.complex_convention == "paddle" else list
    cotangents = outputs.cotangents(conjugate(given), recording.materialize, layer._one_per_value)
    try:
        result = layer.backward(ctx, *cotangents)
    except Exception as error:
        add_note(error, application.name, "backward")
        raise
    return conjugate(match_gradients(result, arguments, needed, layer._one_per_value, recording.surely))


def _push(
    application: Application,
    recording: Recording,
    needed: list[bool],
    residuals: Sequence[Any],
    tangents: Sequence[Any],
) -> list[Any]:
    """Tangents of the outputs that have one (None for zero), by `jvp`, from those of the inputs (None for zero)."""
    saved = recording.saved if recording.saved_for_jvp is None else recording.saved_for_jvp
    ctx = _context(application, recording, needed, residuals, saved)
    given = argument_tangents(application.arguments, tangents, recording.materialize)
    try:
        result = application.layer._tangent_map()(ctx, *given)
    except Exception as error:
        add_note(error, application.name, "jvp")
        raise
    return match_tangents(result, recording.outputs, application.name)


def _context(
    application: Application, recording: Recording, needed: list[bool], residuals: Sequence[Any], saved: Any
) -> PyLayerContext:
    def restore(value: Any) -> Any:
        return value.restore(residuals) if isinstance(value, Kept) else value

    return backward_context(
        application.layer._context,
        application.name,
        lambda: application.arguments.needs(needed),
        lambda: restore(saved),
        {name: restore(value) for name, value in recording.attributes.items()},
    )


def _conjugated(values: Sequence[Any]) -> list[Any]:
    return [jnp.conj(x) if x is not None and jnp.iscomplexobj(x) else x for x in values]
