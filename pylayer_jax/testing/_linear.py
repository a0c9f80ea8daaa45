"""Whether `backward` is linear in its cotangents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._autodiff.linearity import why_not_linear
from pylayer_jax._jax.jaxprs import stage
from pylayer_jax._jax.tracers import NEEDS_VALUES

from ._comparison import MismatchError, first_line
from ._flat_function import FlatFunction
from ._layer_under_test import LayerUnderTest
from ._runs import Run, of_other_sizes, run

__tracebackhide__ = True  # pytest hides the frames of this module


class NotLinearError(MismatchError):
    """`backward` is not linear in its cotangents, which may be meant."""


def linear(layer: LayerUnderTest) -> str:
    count = 0
    try:
        for count, found in enumerate(_runs(layer, layer.flat), 1):  # noqa: B007
            layer.compare(found)
    except MismatchError as error:
        if layer.reference is None:
            raise NotLinearError(str(error)) from None
        for found, right in zip(_runs(layer, layer.flat), _runs(layer, layer.reference), strict=True):
            expected = [], list(right.gradients.values())
            layer.compare(dataclasses.replace(found, expected=expected, right="the reference"))
        return f"it is not, as that of the reference: {first_line(error)}"
    reason = _why_not_proved(layer)
    measured = f"as measured with {count} kinds of cotangents"
    return f"{measured}; not proved: {reason}" if reason else f"proved, and {measured}"


def _runs(layer: LayerUnderTest, flat: FlatFunction) -> Iterator[Run]:
    """Gradients from other cotangents, beside those that a linear backward has."""
    w, gradients, pull = layer.cotangents, layer.gradients, flat.vjp(layer.cotangents)

    def beside(expected: list[Any], label: str, got: list[Any]) -> Run:
        return run(label, w, got, expected=([], expected), right="linearity")

    for sized in of_other_sizes(flat, w):
        yield beside(gradients, sized.label, list(sized.gradients.values()))
    zeros = {k: jnp.zeros_like(x) for k, x in w.items()}
    yield beside([jnp.zeros_like(g) for g in gradients], " with cotangents of zero", pull(zeros))
    v = layer.other_cotangents()
    sums = [a + b for a, b in zip(gradients, pull(v), strict=True)]
    yield beside(sums, " with the sum of two cotangents", pull({k: w[k] + v[k] for k in w}))
    if len(w) > 1:
        parts = [pull(zeros | {k: x}) for k, x in w.items()]
        sums = [sum(gs[1:], gs[0]) for gs in zip(*parts, strict=True)]
        yield beside(sums, " with cotangents for all outputs", gradients)


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
