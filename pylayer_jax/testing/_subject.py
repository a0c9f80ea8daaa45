"""What is checked: a function of tensors, or its gradient, with its results in eager mode."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from ._compare import Arrays, Case, MismatchError, Tolerance, compare, noise_of
from ._tensor_function import Cotangents, TensorFunction, gathered, random_cotangents, random_like

__tracebackhide__ = True  # pytest hides the frames of this module

Cases = Generator[Case, None, str]  # the cases of a check, and in the end a sentence about them


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `gradcheck` and `check_layer`."""

    rtol: float | None = None
    atol: float | None = None
    step: float | None = None
    limit: int = 200
    seed: int = 0
    float64: bool = True


@dataclasses.dataclass
class Subject:
    """A function under test, and perhaps a reference whose outputs and derivatives are right.

    `order` is the order of the derivatives that are compared. From 2 on, `function` is the gradient of `base`: it takes
    the values and the cotangents of that.
    """

    base: TensorFunction
    base_reference: TensorFunction | None
    options: Options
    order: int
    function: TensorFunction
    reference: TensorFunction | None
    outputs: list[Any]
    cotangents: Cotangents

    @functools.cached_property
    def grads(self) -> list[Any]:
        return self.function.grads(self.cotangents)

    @property
    def gradients(self) -> dict[str, Any]:
        return self.function.named(self.grads)

    @property
    def results(self) -> dict[str, Any]:
        """The outputs and the gradients by name."""
        return {**named_outputs(self.outputs), **self.gradients}

    @functools.cached_property
    def epsilon(self) -> float:
        return self.function.epsilon(self.outputs)

    @functools.cached_property
    def tolerance(self) -> Tolerance:
        noise: dict[str, float] = {}
        with contextlib.suppress(Exception):  # a layer may take only the values given
            rounded = self.function.rounded_otherwise()
            otherwise = {**named_outputs(rounded.run()), **rounded.gradients(self.cotangents)}
            noise = noise_of(self.results, otherwise, self.epsilon)
        return Tolerance(self.options.rtol, self.options.atol, self.epsilon, noise)

    def case(
        self,
        label: str,
        got: Arrays,
        expected: Arrays | None = None,
        source: str = "in eager mode",
        error: type[MismatchError] = MismatchError,
    ) -> Case:
        """Return a case of this subject; expected are, by default, its results in eager mode."""
        return Case(label, got, self.results if expected is None else expected, source, self.tolerance, error)

    def at(self, values: Sequence[Any], options: Options) -> Subject:
        """Return the subject at other values of the base."""
        reference = self.base_reference and self.base_reference.with_values(list(map(gathered, values)))
        return subject_of(self.base.with_values(values), reference, options, self.order)

    @functools.cached_property
    def second(self) -> Subject:
        """The subject of second derivatives."""
        return subject_of(self.base, self.base_reference, self.options, 2)

    def random(self, stream: int = 0) -> np.random.Generator:
        """Return a generator of numbers other than those of the cotangents."""
        return np.random.default_rng(self.options.seed).spawn(stream + 1)[stream]

    def random_tangents(self, stream: int = 0) -> list[Any]:
        return [random_like(x, self.random(stream)) for x in self.function.values]


def subject_of(base: TensorFunction, reference: TensorFunction | None, options: Options, order: int = 1) -> Subject:
    """Run a function, differentiate it, and draw cotangents of the result.

    Raises:
        ValueError: if no output has a gradient.
    """
    function, own_reference, rng = base, reference, np.random.default_rng(options.seed)
    outputs = function.run()
    cotangents = random_cotangents(outputs, rng)
    if reference is None and cotangents:
        cotangents = {k: cotangents[k] for k in function.run_differentiated()[1]}
    if order and not cotangents:
        raise ValueError(
            "none of the outputs carries a gradient: each is an integer, is marked as not differentiable, or does not "
            "depend on a differentiated argument."
        )
    for _ in range(1, order):
        function = function.grad_function(cotangents)
        own_reference = own_reference and own_reference.grad_function(on_one_device(cotangents))
        outputs = function.run()
        cotangents = random_cotangents(outputs, rng)
    return Subject(base, reference, options, order, function, own_reference, outputs, cotangents)


def named_outputs(outputs: Sequence[Any]) -> Arrays:
    return {f"output {i}": y for i, y in enumerate(outputs)}


def on_one_device(cotangents: Cotangents) -> Cotangents:
    return {k: gathered(w) for k, w in cotangents.items()}


def run_check(cases: Cases) -> str:
    """Compare the cases of a check, and return its sentence.

    Raises:
        MismatchError: about the first case that differs.
    """
    while True:
        try:
            case = next(cases)
        except StopIteration as end:
            return end.value
        compare(case)


def collect(cases: Cases) -> tuple[list[Case], str]:
    """Return the cases of a check, and its sentence."""
    found: list[Case] = []
    while True:
        try:
            found.append(next(cases))
        except StopIteration as end:
            return found, end.value
