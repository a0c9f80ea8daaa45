"""Checks that compute the gradients in other ways in eager mode, and the detection of leaked tracers.

A layer that is wrong about missing cotangents, about `needs_input_grad`, about the size of its cotangents, or about
values stored outside `ctx` gives other gradients in one of these ways.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.jaxprs import stage
from pylayer_jax._jax.linearity import why_not_linear
from pylayer_jax._jax.tracers import NEEDS_VALUES, is_tracer

from ._compare import Case, MismatchError, compare, exact, first_line
from ._subject import Cases, Subject, on_one_device
from ._tensor_function import Cotangents, TensorFunction, placed, scaled

__tracebackhide__ = True  # pytest hides the frames of this module


def repeatable(subject: Subject) -> Cases:
    function, w = subject.function, subject.cotangents

    def case(label: str, pull: Any) -> Case:
        return subject.case(label, function.named(pull(w)), source="by the first run")

    pull = function.vjp(w)
    yield case(" by another run", pull)
    yield case(" when the vjp function is called a second time", pull)
    pull = function.vjp(w)
    with contextlib.suppress(Exception):  # the layer may refuse these values; it has run on them all the same
        function.with_values([scaled(0.75, x) for x in function.values]).grads(w)
    yield case(" when the layer ran on other values before backward", pull)
    for _ in function.run_with_other_inputs():
        yield case(" when the layer ran on other statics or shapes before backward", pull)
    return "a second run, and other runs before backward, change nothing"


def arguments(subject: Subject) -> Cases:
    names = subject.function.names
    if len(names) == 1:
        return f"{names[0]} alone is differentiable"
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
    reason = _why_not_proved(subject)
    measured = f"measured with {len(cases)} kinds of cotangents"
    return f"{measured}; not proved: {reason}" if reason else f"proved, and {measured}"


def _beside_linearity(subject: Subject, function: TensorFunction, w: Cotangents) -> list[Case]:
    """Return gradients from other cotangents, beside those that a linear backward would return."""
    pull = function.vjp(w)
    grads, zeros = pull(w), {k: jnp.zeros_like(x) for k, x in w.items()}
    found: dict[str, tuple[Any, Any]] = {}
    # A power of two, by which floating-point numbers are multiplied without rounding.
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
    """Return why it cannot be proved that the gradients are linear in the cotangents; empty if it is proved."""
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
        # Other runs of the layer came before: a new trace has to compute the same.
        yield subject.case(" under jit, traced again", _jitted_without_leaks(subject))
    except NEEDS_VALUES:
        return "not under jit, since it needs concrete values"
    return "no traced value outlives its trace under jit"


def _jitted_without_leaks(subject: Subject) -> dict[str, Any]:
    """Return the gradients under jit.

    Raises:
        MismatchError: if a traced value outlives its trace, or is used after it.
    """
    function = subject.function

    def compute() -> dict[str, Any]:
        jitted = jax.jit(lambda tensors, cotangents: function.with_tensors(tensors).gradients(cotangents))
        return jitted(function.tensors, subject.cotangents)

    try:
        with jax.checking_leaks():
            return compute()
    except jax.errors.UnexpectedTracerError as error:
        raise MismatchError(f"a leaked tracer is used: {first_line(error)}") from error
    except Exception as error:
        # In a large process, JAX can fail with an IndexError while it looks for references to the tracer.
        if not isinstance(error, IndexError) and not str(error).startswith("Leaked trace"):
            raise
        # JAX itself keeps the tracers of a shard_map.
        if "shard_map[" in str(jax.make_jaxpr(compute)()):
            return compute()
        # It also reports a tracer that is dropped a moment later, such as one in an object on a context.
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
