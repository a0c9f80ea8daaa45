"""Gradients in every way in which JAX may compute them, and the detection of leaked tracers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from pylayer_jax._jax import NEEDS_VALUES

from ._comparison import MismatchError, first_line
from ._flat_function import FlatFunction


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients that were computed in one of the ways."""

    label: str  # the way, as the end of a sentence; "" for all gradients at once
    outputs: tuple[int, ...]  # the outputs with a cotangent
    by_argument: dict[int, Any]
    leak: str = ""  # if set, there are no gradients because a tracer is leaked


class LeakError(MismatchError):
    """A traced value outlived its trace."""


def gradient_variants(flat: FlatFunction, cotangents: dict[int, Any]) -> Iterator[Gradients]:
    """The gradients at once, a second time, after another run, of each output, for each argument, and under jit.

    A layer that is wrong about missing cotangents, about `needs_input_grad`, or about values stored outside `ctx` gives
    different gradients in one of these ways. A function that needs concrete values does not run under jit.
    """
    everything, everyone = tuple(cotangents), range(len(flat.values))

    def found(
        label: str, gradients: Sequence[Any], outputs: Sequence[int] = everything, wanted: Sequence[int] = everyone
    ):
        return Gradients(label, tuple(outputs), dict(zip(wanted, gradients, strict=True)))

    pull = flat.vjp(cotangents)
    yield found("", pull(cotangents))
    yield found(" when the vjp function is called a second time", pull(cotangents))
    pull = flat.vjp(cotangents)
    flat.outputs(flat.scaled_values())
    yield found(" when forward ran on other values before backward", pull(cotangents))
    if len(cotangents) > 1:
        for k in cotangents:
            label = f" with a cotangent for output {k} alone"
            yield found(label, flat.grads({k: cotangents[k]}), [k])
    if len(flat.values) > 1:
        for j in everyone:
            label = f" when {flat.names[j]} alone is differentiated"
            yield found(label, flat.grads(cotangents, [j]), wanted=[j])
    try:
        yield found(" under jit", jitted_without_leaks(flat, cotangents))
    except NEEDS_VALUES:
        return
    except LeakError as error:
        yield Gradients(" under jit", everything, {}, str(error))


def jitted_without_leaks(flat: FlatFunction, cotangents: dict[int, Any]) -> list[Any]:
    """The gradients under jit.

    Raises:
        LeakError: if a traced value outlives its trace, or is used after it.
    """

    def run() -> list[Any]:
        jitted = jax.jit(lambda tensors, cotangents: flat.with_tensors(tensors).grads(cotangents))
        return jitted(flat.tensors, cotangents)

    try:
        with jax.checking_leaks():
            return run()
    except IndexError as error:
        with contextlib.suppress(jax.errors.UnexpectedTracerError):
            run()
        # This is no error of the layer: in a large process, JAX can fail while it looks for references to the tracer.
        raise LeakError("a tracer is leaked: JAX cannot tell by what") from error
    except jax.errors.UnexpectedTracerError as error:
        raise LeakError(f"a leaked tracer is used: {first_line(error)}") from error
    except Exception as error:
        if not str(error).startswith("Leaked trace"):
            raise
        raise LeakError(f"a tracer is leaked: {_leak(error)}") from error


def _leak(error: Exception) -> str:
    # The message gives the type of the tracer, its origin, and then a line per reference to it.
    lines = [line.strip() for line in str(error).splitlines()[1:]]
    kept = [line for line in lines if " is referred to by " in line]
    return "; ".join(kept[:3]) or " ".join(lines)[:300]
