"""Whether `backward` is linear in its cotangents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._autodiff.linearity import why_not_linear
from pylayer_jax._jax.jaxprs import stage
from pylayer_jax._jax.tracers import NEEDS_VALUES

from ._comparison import MismatchError, first_line
from ._flat_function import FlatFunction
from ._gradient_runs import of_other_sizes
from ._layer_under_test import LayerUnderTest

__tracebackhide__ = True  # pytest hides the frames of this module


class NotLinearError(MismatchError):
    """`backward` is not linear in its cotangents, which may be meant."""


def linear(layer: LayerUnderTest) -> str:
    count = 0
    try:
        for label, got, expected in _comparisons(layer, layer.flat):
            count += 1
            layer.compare_gradients(got, label, expected, "linearity")
    except MismatchError as error:
        if layer.reference is None:
            raise NotLinearError(str(error)) from None
        _compare_with_reference(layer, layer.reference)
        return f"it is not, as that of the reference: {first_line(error)}"
    reason = _why_not_proved(layer)
    measured = f"as measured with {count} kinds of cotangents"
    return f"{measured}; not proved: {reason}" if reason else f"proved, and {measured}"


def _compare_with_reference(layer: LayerUnderTest, reference: FlatFunction) -> None:
    pairs = zip(_comparisons(layer, layer.flat), _comparisons(layer, reference), strict=True)
    for (label, got, _), (_, expected, _) in pairs:
        layer.compare_gradients(got, label, expected, "the reference")


def _comparisons(layer: LayerUnderTest, flat: FlatFunction) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Gradients from other cotangents, and those that a linear backward has, with the ends of messages."""
    w, gradients, pull = layer.cotangents, layer.gradients, flat.vjp(layer.cotangents)
    for run in of_other_sizes(flat, w):
        yield run.label, list(run.gradients.values()), gradients
    zeros = {k: jnp.zeros_like(x) for k, x in w.items()}
    yield " with cotangents of zero", pull(zeros), [jnp.zeros_like(g) for g in gradients]
    v = layer.other_cotangents()
    sums = [a + b for a, b in zip(gradients, pull(v), strict=True)]
    yield " with the sum of two cotangents", pull({k: w[k] + v[k] for k in w}), sums
    if len(w) > 1:
        parts = [pull(zeros | {k: x}) for k, x in w.items()]
        yield " with cotangents for all outputs", gradients, [sum(gs[1:], gs[0]) for gs in zip(*parts, strict=True)]


def _why_not_proved(layer: LayerUnderTest) -> str:
    """Why it cannot be proved that the gradients are linear in the cotangents; empty if it is proved."""
    positions, pull = list(layer.cotangents), layer.flat.vjp(layer.cotangents)

    def gradients(*cotangents: Any) -> tuple[list[Any], None]:
        return pull(dict(zip(positions, cotangents, strict=True))), None

    try:
        jaxpr, consts, _ = stage(gradients, [jax.typeof(w) for w in layer.cotangents.values()], "backward")
    except NEEDS_VALUES:
        return "it needs concrete values"
    return why_not_linear(jaxpr, [i >= len(consts) for i in range(len(jaxpr.invars))], consts)
