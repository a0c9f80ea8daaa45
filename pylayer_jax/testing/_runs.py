"""Gradients in every way in which JAX may compute them, and the detection of leaked tracers.

A layer that is wrong about missing cotangents, about `needs_input_grad`, about the size of its cotangents, or about
values stored outside `ctx` gives different gradients in one of these ways.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._jax.imports import Tracer
from pylayer_jax._jax.tracers import NEEDS_VALUES, is_leaked

from ._comparison import MismatchError, first_line
from ._flat_function import FlatFunction

__tracebackhide__ = True  # pytest hides the frames of this module


@dataclasses.dataclass(frozen=True)
class Run:
    """Gradients, and perhaps outputs, that were computed in one of the ways."""

    label: str  # the way, as the end of a sentence; "" for all gradients at once
    cotangents: dict[int, Any]
    gradients: dict[int, Any]  # from the position of a value to its gradient, divided by `factor`
    factor: float = 1.0  # how much larger the cotangents are than those that were given
    outputs: Sequence[Any] = ()
    # The outputs and gradients that are right, and their source, if these are not those of eager mode.
    expected: tuple[Sequence[Any], Sequence[Any]] | None = None
    right: str = "eager mode"


class LeakError(MismatchError):
    """A traced value outlived its trace."""


def at_once(flat: FlatFunction, cotangents: dict[int, Any]) -> Iterator[Run]:
    """All gradients, from all cotangents."""
    yield run("", cotangents, flat.grads(cotangents))


def repeated(flat: FlatFunction, cotangents: dict[int, Any]) -> Iterator[Run]:
    """The same again, by the same vjp function and after other runs."""
    pull = flat.vjp(cotangents)
    yield run("", cotangents, pull(cotangents))
    yield run(" when the vjp function is called a second time", cotangents, pull(cotangents))
    pull = flat.vjp(cotangents)
    with contextlib.suppress(Exception):  # the layer may refuse these values; it has run on them all the same
        flat.with_values(flat.scaled_values()).grads(cotangents)
    yield run(" when the layer ran on other values before backward", cotangents, pull(cotangents))
    for _ in flat.run_with_other_inputs():
        yield run(" when the layer ran on other statics or shapes before backward", cotangents, pull(cotangents))


def of_some_outputs(flat: FlatFunction, cotangents: dict[int, Any]) -> Iterator[Run]:
    """From a cotangent for each output alone, and for all outputs but one."""
    if len(cotangents) > 1:
        for k, w in cotangents.items():
            yield run(f" with a cotangent for output {k} alone", {k: w}, flat.grads({k: w}))
    if len(cotangents) > 2:
        for k in cotangents:
            others = {i: w for i, w in cotangents.items() if i != k}
            yield run(f" without a cotangent for output {k}", others, flat.grads(others))


def of_some_arguments(flat: FlatFunction, cotangents: dict[int, Any]) -> Iterator[Run]:
    """Of each array alone, and of each argument that holds several arrays."""
    everyone = range(len(flat.values))
    groups = [[j for j in everyone if flat.owners[j] == owner] for owner in dict.fromkeys(flat.owners)]
    for group in [*(g for g in groups if 1 < len(g) < len(everyone)), *([j] for j in everyone if len(everyone) > 1)]:
        names = ", ".join(flat.names[j] for j in group)
        label = f" when {names} alone {'is' if len(group) == 1 else 'are'} differentiated"
        yield run(label, cotangents, flat.grads(cotangents, group), wanted=group)


def of_other_sizes(flat: FlatFunction, cotangents: dict[int, Any]) -> Iterator[Run]:
    """From cotangents of the other sign, and from large and small ones."""
    pull = flat.vjp(cotangents)
    # A power of two, by which floating-point numbers are multiplied without rounding.
    large = 2.0**20 if all(float(jnp.finfo(w.dtype).max) > 1e30 for w in cotangents.values()) else 2.0**6
    for factor, how in (-1.0, "of the other sign"), (large, f"{large:.0f} times as large"), (1 / large, "very small"):
        scaled = {k: times(factor, w) for k, w in cotangents.items()}
        gradients = [times(1 / factor, g) for g in pull(scaled)]
        yield run(f" with cotangents {how}", scaled, gradients, factor=factor)


def under_jit(flat: FlatFunction, cotangents: dict[int, Any]) -> Iterator[Run]:
    """Under jit, unless the function needs concrete values."""
    with contextlib.suppress(*NEEDS_VALUES):
        yield run(" under jit", cotangents, jitted_without_leaks(flat, cotangents))


def every_run(flat: FlatFunction, cotangents: dict[int, Any]) -> Iterator[Run]:
    for runs in (repeated, of_some_outputs, of_some_arguments, of_other_sizes, under_jit):
        yield from runs(flat, cotangents)


def run(
    label: str, cotangents: dict[int, Any], gradients: Sequence[Any], wanted: Sequence[int] | None = None, **others: Any
) -> Run:
    """A run with the gradients of the values at the positions `wanted`, by default of all."""
    wanted = range(len(gradients)) if wanted is None else wanted
    return Run(label, cotangents, dict(zip(wanted, gradients, strict=True)), **others)


def times(factor: float, x: Any) -> Any:
    return x * jnp.asarray(factor, x.dtype)


def jitted_without_leaks(flat: FlatFunction, cotangents: dict[int, Any]) -> list[Any]:
    """The gradients under jit.

    Raises:
        LeakError: if a traced value outlives its trace, or is used after it.
    """

    def compute() -> list[Any]:
        jitted = jax.jit(lambda tensors, cotangents: flat.with_tensors(tensors).grads(cotangents))
        return jitted(flat.tensors, cotangents)

    try:
        with jax.checking_leaks():
            return compute()
    except jax.errors.UnexpectedTracerError as error:
        raise LeakError(f"a leaked tracer is used: {first_line(error)}") from error
    except Exception as error:
        # In a large process, JAX can fail while it looks for references to the tracer, with an IndexError.
        if not isinstance(error, IndexError) and not str(error).startswith("Leaked trace"):
            raise
        # It also reports what is dropped a moment later, as what an object on a context holds.
        known = _leaked_tracers()
        with contextlib.suppress(jax.errors.UnexpectedTracerError):
            gradients = compute()
            if not {*map(id, _leaked_tracers())} - {*map(id, known)}:
                return gradients
        how = "JAX cannot tell by what" if isinstance(error, IndexError) else _leak(error)
        raise LeakError(f"a tracer is leaked: {how}") from error


def _leaked_tracers() -> list[Any]:
    gc.collect()
    return [x for x in gc.get_objects() if issubclass(type(x), Tracer) and is_leaked(x)]


def _leak(error: Exception) -> str:
    # The message gives the type of the tracer, its origin, and then a line per reference to it.
    lines = [line.strip() for line in str(error).splitlines()[1:]]
    kept = [line for line in lines if " is referred to by " in line]
    return "; ".join(kept[:3]) or " ".join(lines)[:300]
