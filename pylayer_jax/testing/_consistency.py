"""Checks that compute the gradients of a layer again: by other runs in eager mode, and under transforms of JAX.

These checks find layers whose gradients are wrong if a cotangent is missing, if `needs_input_grad` is False for an
argument, if cotangents are large or small, or if the layer stores values outside `ctx`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pylayer_jax._jax.jaxprs import stage
from pylayer_jax._jax.linearity import why_not_linear
from pylayer_jax._jax.traces import NEEDS_VALUES, is_tracer
from pylayer_jax._jax.types import has_tangent, is_key
from pylayer_jax._messages import plural

from ._subject import (
    Case,
    Cases,
    Cotangents,
    MismatchError,
    Subject,
    TensorFunction,
    compare,
    exact,
    first_line,
    named_outputs,
    on_one_device,
    placed,
    scaled,
)

__tracebackhide__ = True  # pytest hides the frames of this module

_EXAMPLES = 3
_MOST_CHOICES = 16  # the largest number of choices of batched tensors that `vmap` checks

_Outputs = Callable[[list[Any]], list[Any]]  # from the differentiated values to the outputs


def repeatable(subject: Subject) -> Cases:
    function, w = subject.function, subject.cotangents

    def case(label: str, pull: Any) -> Case:
        return subject.case(label, function.named(pull(w)), source="by the first run")

    pull = function.vjp(w)
    yield case(" by another run", pull)
    yield case(" when the vjp function is called a second time", pull)
    pull = function.vjp(w)
    with contextlib.suppress(Exception):  # the layer may raise an error for these values
        function.with_values([scaled(0.75, x) for x in function.values]).grads(w)
    yield case(" when the layer ran on other values before backward", pull)
    for _ in function.run_with_other_inputs():
        yield case(" when the layer ran on other statics or shapes before backward", pull)
    return "a second run, and other runs before backward, change nothing"


def arguments(subject: Subject) -> Cases:
    names = subject.function.names
    if len(names) == 1:
        return f"there is one, {names[0]}"
    for j, name in enumerate(names):
        alone = subject.function.only(j).gradients(subject.cotangents)
        yield subject.case(f" when {name} alone is differentiated", alone)
    return "each has the same gradient alone"


def cotangents(subject: Subject) -> Cases:
    function, w = subject.function, subject.cotangents
    if len(w) == 1:
        return "there is one, which cannot be missing"
    zeros = {k: jnp.zeros_like(x) for k, x in w.items()}
    some = {f"with a cotangent for output {k} alone": {k: x} for k, x in w.items()}
    if len(w) > 2:
        some |= {f"without a cotangent for output {k}": {i: x for i, x in w.items() if i != k} for k in w}
    for label, given in some.items():
        expected = function.gradients(zeros | given)
        yield subject.case(f" {label}", function.gradients(given), expected, "by backward of zeros for the others")
    return "missing ones count as zeros"


# -- linearity ------------------------------------------------------------------------------------


def linear(subject: Subject) -> Cases:
    cases = _beside_linearity(subject, subject.function, subject.cotangents)
    try:
        for case in cases:
            compare(case)
    except MismatchError as error:
        if subject.reference is None:
            raise
        right = _beside_linearity(subject, subject.reference, on_one_device(subject.cotangents))
        for case, reference in zip(cases, right, strict=True):
            yield subject.case(case.label, case.got, reference.got, "by the reference")
        return f"it is not, as that of the reference: {first_line(error)}"
    yield from cases
    reason = _why_not_proved(subject)
    measured = f"measured with {len(cases)} kinds of cotangents"
    return f"{measured}; not proved: {reason}" if reason else f"proved, and {measured}"


def _beside_linearity(subject: Subject, function: TensorFunction, w: Cotangents) -> list[Case]:
    """Return cases with the gradients for other cotangents; linearity gives the expected gradients."""
    pull = function.vjp(w)
    grads, zeros = pull(w), {k: jnp.zeros_like(x) for k, x in w.items()}
    found: dict[str, tuple[Any, Any]] = {}
    # `large` is a power of two: multiplying a floating-point number by a power of two has no rounding error.
    large = 2.0**20 if all(float(jnp.finfo(x.dtype).max) > 1e30 for x in w.values()) else 2.0**6
    for factor, how in (-1.0, "of the other sign"), (large, f"{large:.0f} times as large"), (1 / large, "very small"):
        got = pull({k: scaled(factor, x) for k, x in w.items()})
        found[f" with cotangents {how}"] = [scaled(1 / factor, g) for g in got], grads
    found[" with cotangents of zero"] = pull(zeros), list(map(jnp.zeros_like, grads))
    v = {k: placed(x, np.roll(exact(x), 1) + 0.3) for k, x in w.items()}
    sums = [a + b for a, b in zip(grads, pull(v), strict=True)]
    found[" with the sum of two cotangents"] = pull({k: w[k] + v[k] for k in w}), sums
    if len(w) > 1:
        parts = [pull(zeros | {k: x}) for k, x in w.items()]
        found[" summed over the outputs"] = [sum(gs[1:], gs[0]) for gs in zip(*parts, strict=True)], grads
    return [
        subject.case(label, function.named(got), function.named(expected), "by linearity")
        for label, (got, expected) in found.items()
    ]


def _why_not_proved(subject: Subject) -> str:
    """Return the reason why there is no proof that the gradients are linear in the cotangents, or "" after a proof."""
    positions, pull = list(subject.cotangents), subject.function.vjp(subject.cotangents)

    def gradients(*cotangents: Any) -> tuple[list[Any], None]:
        return list(pull(dict(zip(positions, cotangents, strict=True)))), None

    try:
        jaxpr, consts, _ = stage(gradients, [jax.typeof(w) for w in subject.cotangents.values()], "backward")
    except NEEDS_VALUES:
        return "it needs concrete values"
    return why_not_linear(jaxpr, [i >= len(consts) for i in range(len(jaxpr.invars))], consts)


# -- leaks ----------------------------------------------------------------------------------------


def leaks(subject: Subject) -> Cases:
    try:
        # Other checks ran the layer before. A new trace must compute the same gradients.
        yield subject.case(" under jit, traced again", _jitted_without_leaks(subject.function, subject.cotangents))
    except NEEDS_VALUES:
        return "not under jit, since it needs concrete values"
    return "no traced value outlives its trace under jit"


def _jitted_without_leaks(function: TensorFunction, w: Cotangents) -> dict[str, Any]:
    """Return the gradients under jit; raise a MismatchError if a traced value outlives its trace."""

    def compute() -> dict[str, Any]:
        return jax.jit(lambda tensors, w: function.with_tensors(tensors).gradients(w))(function.tensors, w)

    try:
        with jax.checking_leaks():
            return compute()
    except jax.errors.UnexpectedTracerError as error:
        raise MismatchError(f"a leaked tracer is used: {first_line(error)}") from error
    except Exception as error:
        # In a large process, JAX may raise an IndexError while it looks for references to a leaked tracer.
        if not isinstance(error, IndexError) and not str(error).startswith("Leaked trace"):
            raise
        # JAX reports a leak for every shard_map, because JAX itself keeps the tracers of a shard_map.
        if "shard_map[" in str(jax.make_jaxpr(compute)()):
            return compute()
        # JAX also reports a tracer that is deleted soon after the trace, such as a tracer in an object on a context.
        before = {*map(id, _living_tracers())}
        with contextlib.suppress(jax.errors.UnexpectedTracerError):
            gradients = compute()
            if not {*map(id, _living_tracers())} - before:
                return gradients
        how = "JAX cannot tell by what" if isinstance(error, IndexError) else " ".join(str(error).split())[:400]
        raise MismatchError(f"a tracer is leaked: {how}") from error


def _living_tracers() -> list[Any]:
    gc.collect()
    return [x for x in gc.get_objects() if type(x).__name__.endswith("Tracer") and is_tracer(x)]


# -- transforms of JAX -----------------------------------------------------------------------------


def jit(subject: Subject) -> Cases:
    return (yield from _transformed(subject, " of jit", jax.jit(subject.function.outputs)))


def remat(subject: Subject) -> Cases:
    return (yield from _transformed(subject, " of jax.checkpoint", jax.checkpoint(subject.function.outputs)))


def _transformed(subject: Subject, label: str, outputs: _Outputs) -> Cases:
    function = subject.function
    yield subject.case(label, _results(function, outputs, function.values, subject.cotangents))
    return "outputs and gradients match eager mode"


def shard_map(subject: Subject) -> Cases:
    function, mesh = subject.function, None
    tensors, cotangents, count = function.tensors, subject.cotangents, jax.sharding.get_abstract_mesh().size
    if jax.sharding.get_abstract_mesh().empty:
        (kind,) = {device.platform for device in function.values[0].devices()}
        devices = jax.local_devices(backend=kind)
        count = len(devices)
        mesh = jax.make_mesh((count,), ("devices",), axis_types=(AxisType.Auto,), devices=devices)
        # JAX would raise an error for arguments that are committed to other devices than those of the mesh.
        tensors, cotangents = jax.device_put((tensors, cotangents), NamedSharding(mesh, P()))

    def results(tensors: list[Any], cotangents: Cotangents) -> dict[str, Any]:
        given = function.with_tensors(tensors)
        mapped = jax.shard_map(lambda xs: given.with_tensors(xs).run(), mesh=mesh, in_specs=P(), out_specs=P())
        outputs = lambda values: mapped(given.with_values(values).tensors)  # noqa: E731
        return _results(function, outputs, given.values, cotangents)

    yield subject.case(" of shard_map under jit", jax.jit(results)(tensors, cotangents))
    yield subject.case(" of shard_map eagerly", results(tensors, cotangents))
    return f"outputs and gradients on {plural(count, 'device', 'devices')} match eager mode, under jit and eagerly"


def _results(function: TensorFunction, outputs: _Outputs, values: list[Any], cotangents: Cotangents) -> dict[str, Any]:
    """Return the outputs that a transformed layer computes without differentiation, and its gradients."""

    def run(values: list[Any]) -> Cotangents:
        returned = outputs(values)
        return {k: returned[k] for k in cotangents}

    pull = jax.vjp(run, values)[1]
    return {**named_outputs(outputs(values)), **function.named(pull(cotangents)[0])}


# -- several examples -----------------------------------------------------------------------------

_Mapping = dict[int, int]  # from the position of a batched tensor to its batch axis


def vmap(subject: Subject) -> Cases:
    function, mappings = subject.function, _mappings(subject.function)
    for i, (description, mapped) in enumerate(mappings.items()):
        # The first choice runs in eager mode. The others are compiled, which is faster.
        yield _case_of_examples(subject, mapped, f" of vmap{description}", is_jitted=i > 0)
    done = f"{_EXAMPLES} examples match eager mode, in {plural(len(mappings), 'choice', 'choices')} of mapped axes"
    others = [p for p in range(len(function.tensors)) if p not in function.differentiated]
    # From a batch of rbg keys, JAX draws other random numbers than from each of these keys alone.
    others = [p for p in others if "rbg" not in str(function.tensors[p].dtype)]
    if not others:
        return done
    names = ", ".join(function.paths[p] for p in others)
    mapped = dict.fromkeys(sorted([*function.differentiated, *others]), 0)
    try:
        case = _case_of_examples(subject, mapped, f" of vmap, {names} mapped too")
    except Exception as error:  # the layer may need a concrete integer, as a shape or an axis
        return f"{done}; none with {names} mapped too ({type(error).__name__}: {first_line(error)})"
    yield case
    return f"{done}, with {names} mapped too"


def _mappings(function: TensorFunction) -> dict[str, _Mapping]:
    """Return the choices of batched tensors and batch axes to check; each key describes its choice in messages."""
    positions = function.differentiated
    mappings = {"": dict.fromkeys(positions, 0), ", mapped along the last axis": dict.fromkeys(positions, -1)}
    for n in range(1, len(positions)):
        for chosen in itertools.combinations(positions, n):
            names = ", ".join(function.paths[p] for p in chosen)
            mappings[f", {names} alone mapped"] = dict.fromkeys(chosen, 0)
    return dict(itertools.islice(mappings.items(), _MOST_CHOICES))


def _case_of_examples(subject: Subject, mapped: _Mapping, label: str, is_jitted: bool = True) -> Case:
    """Return a case that compares the results for a batch of examples with the results for each example alone."""
    function = subject.function
    ways = range(_EXAMPLES)
    examples = [[_example(x, i) if p in mapped else x for p, x in enumerate(function.tensors)] for i in ways]
    each = [function.with_tensors(example) for example in examples]
    grads_of_each = [one.grads(subject.cotangents) for one in each]
    outputs = [jnp.stack(ys) for ys in zip(*(one.run() for one in each), strict=True)]
    # The gradient of an argument that is not batched is the sum of the gradients of all examples.
    grads = [
        jnp.stack(gs, mapped[p]) if p in mapped else sum(gs[1:], gs[0])
        for p, gs in zip(function.differentiated, zip(*grads_of_each, strict=True), strict=True)
    ]
    tensors = [jnp.stack(xs, mapped[p]) if p in mapped else xs[0] for p, xs in enumerate(zip(*examples, strict=True))]

    def batched(values: list[Any]) -> list[Any]:
        shared = function.with_tensors(tensors).with_values(values).tensors

        def one(batch: list[Any]) -> list[Any]:
            example = dict(enumerate(shared)) | dict(zip(mapped, batch, strict=True))
            return function.with_tensors(list(example.values())).run()

        return jax.vmap(one, in_axes=(list(mapped.values()),))([shared[p] for p in mapped])

    results = lambda values, cotangents: _results(function, batched, values, cotangents)  # noqa: E731
    cotangents = {k: jnp.stack([w] * _EXAMPLES) for k, w in subject.cotangents.items()}
    got = (jax.jit(results) if is_jitted else results)([tensors[p] for p in function.differentiated], cotangents)
    return subject.case(label, got, {**named_outputs(outputs), **function.named(grads)}, "for each example alone")


def _example(x: Any, i: int) -> Any:
    if has_tangent(x):
        return scaled(1 - 0.1 * i, x)
    if not is_key(x):
        return jnp.roll(x, i)  # rolled indices stay in range, and a rolled permutation is a permutation
    return jax.random.wrap_key_data(jax.random.key_data(x) + jnp.uint32(i), impl=jax.random.key_impl(x))
