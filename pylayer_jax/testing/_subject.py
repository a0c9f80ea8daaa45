"""Defines `Subject`, a function under test with its results in eager mode, and `run_check`, which runs a check."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.types import has_tangent

from ._compare import Arrays, Case, Tolerance, compare, exact, largest
from ._tensor_function import Cotangents, TensorFunction, gathered, placed, random_like

__tracebackhide__ = True  # pytest hides the frames of this module

Cases = Generator[Case, None, str]  # yields the cases of a check, and returns a sentence about them


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `gradcheck` and `check_layer`."""

    rtol: float | None = None
    atol: float | None = None
    step: float | None = None
    limit: int = 200
    seed: int = 0
    float64: bool = True


class Subject:
    """A function under test, with its results in eager mode, and an optional reference that defines the right results.

    `derivative` is the subject for second derivatives. The function of `derivative` maps the values and the cotangents
    of this subject, its `base`, to the gradients. Results are computed when they are first read.
    """

    def __init__(self, function: TensorFunction, reference: Any, options: Options, base: Subject | None = None) -> None:
        self.function, self.options, self.base = function, options, base
        self.reference: TensorFunction | None = reference
        self.order: int = 1 if base is None else base.order + 1

    @functools.cached_property
    def derivative(self) -> Subject:
        w = self.cotangents
        reference = self.reference and self.reference.grad_function(on_one_device(w))
        return Subject(self.function.grad_function(w), reference, self.options, self)

    @property
    def root(self) -> Subject:
        return self if self.base is None else self.base.root

    def at(self, values: Sequence[Any], options: Options) -> Subject:
        """Return the same subject for other values of the function of `root`."""
        if self.base is not None:
            return self.base.at(values, options).derivative
        reference = self.reference and self.reference.with_values(list(map(gathered, values)))
        return Subject(self.function.with_values(values), reference, options)

    @functools.cached_property
    def outputs(self) -> list[Any]:
        return self.function.run()

    @functools.cached_property
    def cotangents(self) -> Cotangents:
        """Random cotangents of all outputs that have a gradient, or, beside a reference, of all float outputs."""
        rng = self.random(self.order)
        cotangents = {i: random_like(y, rng) for i, y in enumerate(self.outputs) if has_tangent(y)}
        if self.base is None and self.reference is None and cotangents:
            cotangents = {k: cotangents[k] for k in self.function.run_differentiated()[1]}
        if not cotangents:
            raise ValueError(
                "none of the outputs carries a gradient: each is an integer, is marked as not differentiable, or does "
                "not depend on a differentiated argument."
            )
        return cotangents

    @functools.cached_property
    def grads(self) -> list[Any]:
        return self.function.grads(self.cotangents)

    @property
    def gradients(self) -> dict[str, Any]:
        return self.function.named(self.grads)

    @property
    def results(self) -> dict[str, Any]:
        """A dict from names to the outputs and the gradients."""
        return {**named_outputs(self.outputs), **self.gradients}

    @functools.cached_property
    def epsilon(self) -> float:
        """The machine epsilon of the narrowest dtype among the values and the outputs."""
        arrays = [*self.function.values, *self.outputs]
        return max(float(jnp.finfo(x.dtype).eps) for x in arrays if has_tangent(x))

    @property
    def terms_of_outputs(self) -> list[float]:
        """The size of the terms whose sum is each output; 0 if it is unknown. The terms may cancel in the sum."""
        return [0.0] * len(self.outputs) if self.base is None else self.base.terms

    @functools.cached_property
    def terms(self) -> list[float]:
        """The size of the terms whose sum is the gradient of each value."""
        sizes = [max(largest(y), size) for y, size in zip(self.outputs, self.terms_of_outputs, strict=True)]
        whole = max(largest(w) * sizes[k] for k, w in self.cotangents.items())
        return [whole / (largest(x) or 1.0) for x in self.function.values]

    @functools.cached_property
    def tolerance(self) -> Tolerance:
        """The tolerance of the results. Their noise is measured with values that differ in the last digits."""
        function, epsilon, rng = self.function, self.epsilon, np.random.default_rng(0)
        steps = [4 * float(jnp.finfo(x.dtype).eps) * rng.choice([-1.0, 1.0], x.shape) for x in function.values]
        values = [placed(x, exact(x) * (1 + step)) for x, step in zip(function.values, steps, strict=True)]
        otherwise: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # a layer may raise an error for other values
            rounded = function.with_values(values)
            otherwise = {**named_outputs(rounded.run()), **rounded.gradients(self.cotangents)}
        terms, noise = {**named_outputs(self.terms_of_outputs), **function.named(self.terms)}, dict[str, float]()
        for name, x in self.results.items():
            moved = largest(exact(x) - exact(otherwise[name])) if name in otherwise else 0.0
            # The noise is limited, because rounding errors are much smaller than 1, unless the array itself is large.
            most = epsilon**0.5 * max(largest(x), 1.0)
            noise[name] = min(4 * max(moved, epsilon * terms[name]), most) if has_tangent(x) else 0.0
        return Tolerance(self.options.rtol, self.options.atol, epsilon, noise)

    def case(self, label: str, got: Arrays, expected: Arrays | None = None, source: str = "in eager mode") -> Case:
        """Return a case with the tolerance of this subject. The default of `expected` is its results in eager mode."""
        return Case(label, got, self.results if expected is None else expected, source, self.tolerance)

    def random(self, stream: int) -> np.random.Generator:
        """Return a generator of random numbers. Generators of different streams are independent."""
        return np.random.default_rng((self.options.seed, stream))


def named_outputs(outputs: Sequence[Any]) -> Arrays:
    return {f"output {i}": y for i, y in enumerate(outputs)}


def on_one_device(cotangents: Cotangents) -> Cotangents:
    return {k: gathered(w) for k, w in cotangents.items()}


def run_check(cases: Cases) -> str:
    """Compare the arrays of all cases of a check, and return the sentence that the check returns.

    Raises:
        MismatchError: about the first case that differs.
    """
    # JAX logs each exception of a callback with its traceback, and also raises it. Only the raised exception is needed.
    logger = logging.getLogger(jax.pure_callback.__module__)
    has_no_exception: Callable[[logging.LogRecord], bool] = lambda record: record.exc_info is None  # noqa: E731
    logger.addFilter(has_no_exception)
    try:
        while True:
            compare(next(cases))
    except StopIteration as end:
        return end.value
    finally:
        logger.removeFilter(has_no_exception)
