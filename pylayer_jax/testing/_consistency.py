"""Compares gradients with those of other runs, of other cotangents, and under transforms of JAX."""

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
from pylayer_jax._report import type_of

from ._subject import (
    CHANGES,
    Arrays,
    Case,
    Cases,
    Cotangents,
    MismatchError,
    Subject,
    TensorFunction,
    exact,
    first_line,
    first_mismatch,
    named_outputs,
    on_one_device,
    placed,
    scaled,
)

__tracebackhide__ = True  # pytest hides the frames of this module

_EXAMPLES = 3
_MOST_CHOICES = 16  # the largest number of choices of batched tensors that `check_vmap` tries


def check_eager(subject: Subject) -> Cases:
    yield subject.case(" when it is differentiated", named_outputs(subject.function.run_differentiated()[0]))
    returned = ", ".join(map(type_of, subject.outputs))
    return f"returns {returned}; gradients of {', '.join(subject.function.value_names)}"


def check_repeatable(subject: Subject) -> Cases:
    function, w = subject.function, subject.cotangents

    def case(label: str, pull: Any) -> Case:
        return subject.case(label, function.with_names(pull(w)), source="by the first run")

    pull = function.vjp(w)
    yield case(" by another run", pull)
    yield case(" when the vjp function is called a second time", pull)
    pull = function.vjp(w)
    with contextlib.suppress(Exception):  # the layer may raise an error for these values
        function.with_values([scaled(0.75, x) for x in function.values]).gradients(w)
    yield case(" when the layer ran on other values before backward", pull)
    for kind in CHANGES:
        if function.run_changed(kind):
            yield case(" when the layer ran on other statics or shapes before backward", pull)
    return "a second run, and other runs before backward, change nothing"


def check_arguments(subject: Subject) -> Cases:
    names = subject.function.value_names
    if len(names) == 1:
        return f"there is one, {names[0]}"
    for j, name in enumerate(names):
        alone = subject.function.only(j).named_gradients(subject.cotangents)
        yield subject.case(f" when {name} alone is differentiated", alone)
    return "each has the same gradient alone"


def check_cotangents(subject: Subject) -> Cases:
    function, w = subject.function, subject.cotangents
    if len(w) == 1:
        return "there is one, which cannot be missing"
    zeros = {k: jnp.zeros_like(x) for k, x in w.items()}
    subsets = {f"with a cotangent for output {k} alone": {k: x} for k, x in w.items()}
    if len(w) > 2:
        subsets |= {f"without a cotangent for output {k}": {i: x for i, x in w.items() if i != k} for k in w}
    for label, subset in subsets.items():
        expected = function.named_gradients(zeros | subset)
        got = function.named_gradients(subset)
        yield subject.case(f" {label}", got, expected, "by backward of zeros for the others")
    return "missing ones count as zeros"


# -- linearity ------------------------------------------------------------------------------------


def check_linear(subject: Subject) -> Cases:
    cases = _linearity_cases(subject, subject.function, subject.cotangents)
    mismatch = first_mismatch(cases)
    if mismatch is not None and subject.reference is not None:
        reference_cases = _linearity_cases(subject, subject.reference, on_one_device(subject.cotangents))
        for case, reference_case in zip(cases, reference_cases, strict=True):
            yield subject.case(case.label, case.got, reference_case.got, "by the reference")
        return f"it is not, as that of the reference: {first_line(mismatch)}"
    yield from cases
    pull, w = subject.function.vjp(subject.cotangents), subject.cotangents
    gradients = lambda *arrays: (list(pull(dict(zip(w, arrays, strict=True)))), None)  # noqa: E731
    try:
        jaxpr, consts, _ = stage(gradients, list(map(jax.typeof, w.values())), "backward")
        reason = why_not_linear(jaxpr, [i >= len(consts) for i in range(len(jaxpr.invars))], consts)
    except NEEDS_VALUES:
        reason = "it needs concrete values"
    measured = f"measured with {len(cases)} kinds of cotangents"
    return f"{measured}; not proved: {reason}" if reason else f"proved, and {measured}"


def _linearity_cases(subject: Subject, function: TensorFunction, w: Cotangents) -> list[Case]:
    pull = function.vjp(w)
    gradients, zeros = pull(w), {k: jnp.zeros_like(x) for k, x in w.items()}
    got_and_expected: dict[str, tuple[Any, Any]] = {}
    # `large` is a power of two, so that a multiplication has no rounding error.
    large = 2.0**20 if all(float(jnp.finfo(x.dtype).max) > 1e30 for x in w.values()) else 2.0**6
    for factor, how in (-1.0, "of the other sign"), (large, f"{large:.0f} times as large"), (1 / large, "very small"):
        got = pull({k: scaled(factor, x) for k, x in w.items()})
        got_and_expected[f" with cotangents {how}"] = [scaled(1 / factor, g) for g in got], gradients
    got_and_expected[" with cotangents of zero"] = pull(zeros), list(map(jnp.zeros_like, gradients))
    v = {k: placed(x, np.roll(exact(x), 1) + 0.3) for k, x in w.items()}
    sums = [a + b for a, b in zip(gradients, pull(v), strict=True)]
    got_and_expected[" with the sum of two cotangents"] = pull({k: w[k] + v[k] for k in w}), sums
    if len(w) > 1:
        parts = [pull(zeros | {k: x}) for k, x in w.items()]
        sums = [sum(gs[1:], gs[0]) for gs in zip(*parts, strict=True)]
        got_and_expected[" summed over the outputs"] = sums, gradients
    return [
        subject.case(label, function.with_names(got), function.with_names(expected), "by linearity")
        for label, (got, expected) in got_and_expected.items()
    ]


# -- leaks ----------------------------------------------------------------------------------------


def check_leaks(subject: Subject) -> Cases:
    """Compare the gradients of a new trace, which would read a tracer that the layer stored in an earlier check."""
    function = subject.function

    def compute() -> dict[str, Any]:
        gradients = jax.jit(lambda tensors, w: function.with_tensors(tensors).named_gradients(w))
        return gradients(function.tensors, subject.cotangents)

    try:
        yield subject.case(" under jit, traced again", _without_leaks(compute))
    except NEEDS_VALUES:
        return "not under jit, since it needs concrete values"
    return "no traced value outlives its trace under jit"


def _without_leaks(compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `compute`; raise a MismatchError if a tracer outlives its trace."""
    try:
        with jax.checking_leaks():
            return compute()
    except jax.errors.UnexpectedTracerError as error:
        raise MismatchError(f"a leaked tracer is used: {first_line(error)}") from error
    except Exception as error:
        # JAX reports a leak for every shard_map, because JAX itself keeps the tracers of a shard_map.
        if "shard_map[" in str(jax.make_jaxpr(compute)()):  # raises the same error again, if the layer raised it
            return compute()
        # JAX also reports a tracer that is deleted soon after its trace, such as one that `forward` stores on `ctx`.
        before = _living_tracers()  # kept alive, so that no later tracer gets the id of one
        with contextlib.suppress(jax.errors.UnexpectedTracerError):
            results = compute()
            if {*map(id, _living_tracers())} <= {*map(id, before)}:
                return results
        # In a large process, JAX may raise an IndexError while it looks for references to a leaked tracer.
        how = "JAX cannot tell by what" if isinstance(error, IndexError) else " ".join(str(error).split())[:400]
        raise MismatchError(f"a tracer is leaked: {how}") from error


def _living_tracers() -> list[Any]:
    gc.collect()
    return [x for x in gc.get_objects() if type(x).__name__.endswith("Tracer") and is_tracer(x)]


# -- transforms of JAX -----------------------------------------------------------------------------


def check_transform(transform: Callable[..., Any], label: str, subject: Subject) -> Cases:
    function = subject.function
    transformed = TensorFunction(transform(function.outputs), {"values": function.values}, function.value_names)
    yield subject.case(label, transformed.results(subject.cotangents))
    return "outputs and gradients match eager mode"


def check_shard_map(subject: Subject) -> Cases:
    function, mesh = subject.function, None
    tensors, cotangents, count = function.tensors, subject.cotangents, jax.sharding.get_abstract_mesh().size
    if jax.sharding.get_abstract_mesh().empty:
        (platform,) = {device.platform for device in function.values[0].devices()}
        devices = jax.local_devices(backend=platform)
        count = len(devices)
        mesh = jax.make_mesh((count,), ("devices",), axis_types=(AxisType.Auto,), devices=devices)
        # JAX raises an error for arguments that are committed to devices other than those of the mesh.
        tensors, cotangents = jax.device_put((tensors, cotangents), NamedSharding(mesh, P()))
    sharded = jax.shard_map(lambda xs: function.with_tensors(xs).run(), mesh=mesh, in_specs=P(), out_specs=P())

    def results(tensors: list[Any], cotangents: Cotangents) -> Arrays:
        return TensorFunction(sharded, {"tensors": tensors}, function.paths).results(cotangents)

    yield subject.case(" of shard_map under jit", jax.jit(results)(tensors, cotangents))
    yield subject.case(" of shard_map eagerly", results(tensors, cotangents))
    return f"outputs and gradients on {plural(count, 'device', 'devices')} match eager mode, under jit and eagerly"


# -- several examples -----------------------------------------------------------------------------


def check_vmap(subject: Subject) -> Cases:
    function, positions = subject.function, subject.function.differentiated_positions
    # For each choice, by a text for messages: the batch axes by the positions of the batched tensors.
    choices = {"": dict.fromkeys(positions, 0), ", mapped along the last axis": dict.fromkeys(positions, -1)}
    for n in range(1, len(positions)):
        for chosen in itertools.combinations(positions, n):
            names = ", ".join(function.paths[p] for p in chosen)
            choices[f", {names} alone mapped"] = dict.fromkeys(chosen, 0)
    choices = dict(itertools.islice(choices.items(), _MOST_CHOICES))
    for i, (description, batch_axes) in enumerate(choices.items()):
        # The first choice runs in eager mode. The others are compiled, which is faster.
        yield _case_of_examples(subject, batch_axes, f" of vmap{description}", is_jitted=i > 0)
    done = f"{_EXAMPLES} examples match eager mode, in {plural(len(choices), 'choice', 'choices')} of mapped axes"
    # From a batch of rbg keys, JAX draws other random numbers than from each of these keys alone.
    mapped = [p for p, x in enumerate(function.tensors) if p in positions or "rbg" not in str(x.dtype)]
    if mapped == positions:
        return done
    names = ", ".join(function.paths[p] for p in mapped if p not in positions)
    batch_axes = dict.fromkeys(mapped, 0)
    try:
        case = _case_of_examples(subject, batch_axes, f" of vmap, {names} mapped too")
    except Exception as error:  # the layer may need a concrete integer, as a shape or an axis
        return f"{done}; none with {names} mapped too ({type(error).__name__}: {first_line(error)})"
    yield case
    return f"{done}, with {names} mapped too"


def _case_of_examples(subject: Subject, batch_axes: dict[int, int], label: str, is_jitted: bool = True) -> Case:
    """Compare a batch of examples with each example alone. `batch_axes` maps positions to axes."""
    function, positions = subject.function, subject.function.differentiated_positions
    examples = [
        function.with_tensors([_example(x, i) if p in batch_axes else x for p, x in enumerate(function.tensors)])
        for i in range(_EXAMPLES)
    ]
    outputs = [jnp.stack(ys) for ys in zip(*(example.run() for example in examples), strict=True)]
    # The gradient of an argument that is not batched is the sum of the gradients of all examples.
    gradients = [
        jnp.stack(gs, batch_axes[p]) if p in batch_axes else sum(gs[1:], gs[0])
        for p, gs in zip(positions, zip(*(e.gradients(subject.cotangents) for e in examples), strict=True), strict=True)
    ]
    tensors = [
        jnp.stack(xs, batch_axes[p]) if p in batch_axes else xs[0]
        for p, xs in enumerate(zip(*(example.tensors for example in examples), strict=True))
    ]
    in_axes = ([batch_axes.get(p) for p in range(len(tensors))],)
    run = jax.vmap(lambda xs: function.with_tensors(xs).run(), in_axes=in_axes)
    batch = TensorFunction(run, {"tensors": tensors}, function.paths)
    results = lambda values, cotangents: batch.with_values(values).results(cotangents)  # noqa: E731
    cotangents = {k: jnp.stack([w] * _EXAMPLES) for k, w in subject.cotangents.items()}
    got = (jax.jit(results) if is_jitted else results)(batch.values, cotangents)
    expected = {**named_outputs(outputs), **function.with_names(gradients)}
    return subject.case(label, got, expected, "for each example alone")


def _example(x: Any, i: int) -> Any:
    if has_tangent(x):
        return scaled(1 - 0.1 * i, x)
    if not is_key(x):
        return jnp.roll(x, i)  # rolled indices stay in range, and a rolled permutation is a permutation
    return jax.random.wrap_key_data(jax.random.key_data(x) + jnp.uint32(i), impl=jax.random.key_impl(x))
