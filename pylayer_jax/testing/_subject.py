"""Defines `Subject` (a function under test, with its results in eager mode) and `mismatch_of`, which checks others.

    f = tensor_function("gradcheck", Linear, ({"w": w, "b": b}, x, "relu"))
    f.values                      # [b, w, x]: the differentiated tensors
    f.value_names                 # ["args[0]['b']", "args[0]['w']", "args[1]"]
    f.run()                       # the tensors that Linear.apply returns, in a list
    f.gradients({0: dy})          # [the gradient of b, ...]
    f.named_gradients({0: dy})    # {"the gradient of args[0]['b']": ..., ...}

`Subject(f, reference, Options())` adds random cotangents, and a tolerance.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.jaxprs import all_equations, stage
from pylayer_jax._jax.traces import is_tracer
from pylayer_jax._jax.types import has_tangent, is_key
from pylayer_jax._report import function_of, type_text
from pylayer_jax._trees import split

__tracebackhide__ = True  # pytest hides the frames of this module

# From the position of an output to its cotangent. Other outputs have no cotangent.
Cotangents = dict[int, Any]


class TensorFunction:
    """A function and its arguments, as a function of `values`: the float and complex tensors in these arguments."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any], names: Sequence[str] = ()) -> None:
        self.function = function
        tensors, self.skeleton = split(tuple(arguments.values()))
        self.tensors: list[Any] = [jnp.asarray(x) for x in tensors]
        self.differentiated_positions = [i for i, x in enumerate(self.tensors) if has_tangent(x)]
        places = [path[1:].split("]", 1) for path in self.skeleton.tensor_paths()]  # "[0]['w'][1]" is in args[0]
        self.paths = names or [list(arguments)[int(position)] + path for position, path in places]

    @property
    def value_names(self) -> list[str]:
        return [self.paths[i] for i in self.differentiated_positions]

    @property
    def values(self) -> list[Any]:
        return [self.tensors[i] for i in self.differentiated_positions]

    def with_values(self, values: Sequence[Any]) -> TensorFunction:
        tensors = dict(enumerate(self.tensors)) | dict(zip(self.differentiated_positions, values, strict=True))
        return self.with_tensors(list(tensors.values()))

    def with_tensors(self, tensors: Sequence[Any]) -> TensorFunction:
        other = copy.copy(self)
        other.tensors = list(tensors)
        return other

    def only(self, j: int) -> TensorFunction:
        other = copy.copy(self)
        other.differentiated_positions = [self.differentiated_positions[j]]
        return other

    def run(self) -> list[Any]:
        return [jnp.asarray(y) for y in split(self.function(*self.skeleton.fill(self.tensors)))[0]]

    def outputs(self, values: Sequence[Any]) -> list[Any]:
        return self.with_values(values).run()

    def inner_dtypes(self) -> set[str]:
        """Return the floating-point dtypes to which the function casts wider numbers on the way to its outputs."""
        try:
            jaxpr, _, _ = stage(lambda *values: (self.outputs(values), None), list(map(jax.typeof, self.values)), "")
        except Exception:  # the function needs concrete values, or fails: other checks tell
            return set()
        # Casts of what forward only saves do not count, nor do casts to fewer than 16 bits, which a layer makes to
        # quantize: the tolerance of float8 would be 0.35.
        casts = [e for e in all_equations(jaxpr, are_live=True) if e.primitive.name == "convert_element_type"]
        dtypes = [(e.invars[0].aval.dtype, e.outvars[0].aval.dtype) for e in casts]
        of_floats = [pair for pair in dtypes if all(jnp.issubdtype(dtype, jnp.inexact) for dtype in pair)]
        return {new.name for old, new in of_floats if new.itemsize > 1 and jnp.finfo(new).eps > jnp.finfo(old).eps}

    def run_differentiated(self) -> tuple[list[Any], list[int]]:
        """Return the outputs of a run under `jax.vjp`, and the positions of those that have a gradient."""

        def run(values: list[Any]) -> tuple[list[Any], tuple[list[Any], list[int]]]:
            outputs = self.outputs(values)
            return outputs, (outputs, [i for i, y in enumerate(outputs) if has_tangent(y) and is_tracer(y)])

        return jax.vjp(run, self.values, has_aux=True)[2]

    def selected(self, positions: Collection[int]) -> Callable[..., dict[int, Any]]:
        return lambda *values: {k: y for k, y in enumerate(self.outputs(values)) if k in positions}

    def vjp(self, outputs: Collection[int]) -> Callable[[Cotangents], Any]:
        return jax.vjp(self.selected(outputs), *self.values)[1]

    def gradients(self, cotangents: Cotangents) -> list[Any]:
        return list(self.vjp(cotangents)(cotangents))

    def named_gradients(self, cotangents: Cotangents) -> dict[str, Any]:
        return self.with_names(self.gradients(cotangents))

    def with_names(self, gradients: Sequence[Any]) -> dict[str, Any]:
        return {f"the gradient of {name}": g for name, g in zip(self.value_names, gradients, strict=True)}

    def results(self, cotangents: Cotangents) -> Arrays:
        return {**named_outputs(self.run()), **self.named_gradients(cotangents)}

    def gradient_function(self, cotangents: Cotangents, order: int) -> TensorFunction:
        """Return the function from the values and the cotangents to the gradients, which are of order `order`."""
        gradients = lambda values, cotangents: self.with_values(values).gradients(cotangents)
        where = " of the gradient" if order > 1 else ""
        names = [*self.value_names, *(f"cotangent[{k}]{where}" for k in cotangents)]
        return TensorFunction(gradients, {"values": self.values, "cotangents": cotangents}, names)


def tensor_function(checker: str, function: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> TensorFunction:
    call = function_of(function)
    if not callable(call):
        raise TypeError(f"{checker}: expected a layer or a function, got {function!r}.")
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"{checker}: expected the arguments as a tuple, got {type(args).__name__}. Pass (x,) for one x."
        )
    keywords = dict(kwargs or {})
    run = lambda *values: call(*values[: len(args)], **dict(zip(keywords, values[len(args) :], strict=True)))
    result = TensorFunction(run, {f"args[{i}]": value for i, value in enumerate(args)} | keywords)
    if not result.differentiated_positions:
        raise ValueError(
            f"{checker}: none of the arguments holds an array of floating-point or complex numbers, so that there is "
            "no gradient to check. Python numbers are statics: pass jnp.float32(1.5) for 1.5."
        )
    return result


def name_of(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    named = owner if isinstance(owner, type) else function
    return getattr(named, "__qualname__", type(named).__name__)


# -- arrays of other numbers ----------------------------------------------------------------------


def placed(like: Any, numbers: Any) -> Any:
    x = jnp.asarray(np.asarray(numbers), like.dtype)
    return jax.device_put(x, like.sharding) if len(like.sharding.device_set) > 1 else x


def gathered(x: Any) -> Any:
    if is_tracer(x) or len(x.sharding.device_set) == 1:
        return x
    if is_key(x):
        return jax.random.wrap_key_data(gathered(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return jnp.asarray(np.asarray(x))


def random_like(like: Any, rng: np.random.Generator) -> Any:
    return placed(like, rng.uniform(0.5, 1.5, like.shape) * random_signs(like, rng))


def random_signs(like: Any, rng: np.random.Generator) -> np.ndarray:
    if jnp.iscomplexobj(like):
        return np.exp(1j * rng.uniform(0, 2 * np.pi, like.shape))
    return rng.choice([-1.0, 1.0], like.shape)


def scaled(factor: float, x: Any) -> Any:
    return x * jnp.asarray(factor, x.dtype)


# -- comparison of arrays -------------------------------------------------------------------------

# The default tolerances depend on the machine epsilon, on the size of the expected array, and on its *noise*: how far
# rounding errors may move its entries. The size alone does not bound these, because large terms may cancel in a sum,
# and a fixed tolerance would hide every error of a layer whose values are small. Therefore `Subject.noise` measures
# how far each result moves if the last digits of the arguments change.

Arrays = Mapping[str, Any]  # arrays by name, such as "output 0" or "the gradient of args[0]"


class MismatchError(AssertionError):
    """Error about arrays that differ, which only the checkers of this package raise."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The arrays that a function returns, such as under `jax.jit`, and the expected arrays."""

    label: str  # the way to run the function, in words that follow "output 0": " under jit"
    got: Arrays
    expected: Arrays
    source: str  # the source of the expected arrays, in words that end a message: "in eager mode"
    rtol: float | None  # None: a default that fits the dtype
    atol: float | None  # the same
    epsilon: float  # machine epsilon of the narrowest dtype in the computation
    noise: Arrays  # for each array, one number or one per entry


@np.errstate(all="ignore")
def mismatch_of(case: Case) -> MismatchError | None:
    """Return an error about the first array that differs, at its entry with the largest excess error."""
    for name, got in case.got.items():
        expected, label = case.expected[name], f"{name}{case.label}"
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return MismatchError(f"{label} is {type_text(got)}, but {type_text(expected)} {case.source}.")
        got_numbers, numbers = exact(got), exact(expected)
        epsilon = case.epsilon if has_tangent(got) else 0.0
        rtol = epsilon**0.5 if case.rtol is None else case.rtol
        atol = epsilon**0.5 * largest(numbers) if case.atol is None else case.atol
        allowed = atol + rtol * np.abs(numbers) + case.noise.get(name, 0.0)
        error = np.where(got_numbers == numbers, 0.0, np.abs(got_numbers - numbers))
        excess = np.where(np.isnan(got_numbers) & np.isnan(numbers), -np.inf, error - allowed)
        wrong = ~(excess <= 0)
        if np.any(wrong):
            index = tuple(map(int, np.unravel_index(np.argmax(excess), wrong.shape)))  # the first NaN, if there is one
            tolerance = "which is not finite there, so that the layer may be right"
            if np.isfinite(allowed[index]):
                tolerance = f"tolerance {allowed[index]:.1g}"
            return MismatchError(
                f"{label}{f' at index {index}' if index else ''} is {got_numbers[index]:.6g}, but "
                f"{numbers[index]:.6g} {case.source} ({tolerance}); wrong at {np.sum(wrong)} of "
                f"{np.sum(~np.isnan(numbers) | wrong)} places."
            )
        # Under `shard_map` with check_vma=False, devices may hold different copies of a replicated array.
        for shard in getattr(got, "addressable_shards", ()):
            if np.any(np.abs(exact(shard.data) - got_numbers[shard.index]) > 2 * allowed[shard.index]):
                return MismatchError(f"{label} is another one on {shard.device}, where a copy should be.")
    return None


def exact(x: Any) -> np.ndarray:
    x = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def largest(x: Any) -> float:
    x = exact(x)
    return float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the last line if it is the traceback of a callback."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if lines[0].endswith("Traceback (most recent call last):") else lines[0]


# -- a function under test ------------------------------------------------------------------------

Cases = Generator[Case, None, str]  # yields the cases of a check, and returns a sentence about them


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a checker; only `_also_at_other_values` sets `least_size` and `result_sizes`."""

    rtol: float | None = None
    atol: float | None = None
    step: float | None = None
    limit: int = 200
    seed: int = 0
    float64: bool = True
    least_size: float = 1.0  # the first step tried for a smaller entry is that of an entry of this size
    # For each result by name, the largest absolute value for the user's arguments.
    result_sizes: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


class Subject:
    """A function under test, its results in eager mode when they are first read, and an optional reference.

    first = Subject(f, None, Options())
    second = first.derivative               # its gradients are the second derivatives of f
    second.base is first, second.root is first, second.order == 2
    """

    def __init__(
        self, function: TensorFunction, reference: TensorFunction | None, options: Options, base: Subject | None = None
    ) -> None:
        self.function, self.options, self.base = function, options, base
        # A reference runs on one device.
        self.reference = reference and reference.with_tensors(list(map(gathered, reference.tensors)))
        self.not_taken: str | None = None  # of a root: the branches that no value takes; None before a check
        self.order: int = 1 if base is None else base.order + 1

    @functools.cached_property
    def derivative(self) -> Subject:
        w = self.cotangents
        reference = self.reference and self.reference.gradient_function(w, self.order)
        return Subject(self.function.gradient_function(w, self.order), reference, self.options, self)

    @property
    def root(self) -> Subject:
        return self if self.base is None else self.base.root

    def at(self, values: Sequence[Any], options: Options) -> Subject:
        if self.base is not None:
            return self.base.at(values, options).derivative
        reference = self.reference and self.reference.with_values(values)
        return Subject(self.function.with_values(values), reference, options)

    @functools.cached_property
    def outputs(self) -> list[Any]:
        return self.function.run()

    @functools.cached_property
    def cotangents(self) -> Cotangents:
        """A random cotangent for each output with a gradient: each float output, if there is a reference or a base."""
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
    def named_gradients(self) -> dict[str, Any]:
        return self.function.named_gradients(self.cotangents)

    @property
    def results(self) -> dict[str, Any]:
        return {**named_outputs(self.outputs), **self.named_gradients}

    @functools.cached_property
    def epsilon(self) -> float:
        dtypes = [x.dtype for x in (*self.function.values, *self.outputs) if has_tangent(x)]
        inner = (self.reference or self.function).inner_dtypes()  # a reference says how exact the layer is meant to be
        return max(float(jnp.finfo(dtype).eps) for dtype in (*dtypes, *inner))

    @property
    def output_term_sizes(self) -> list[float]:
        # Of the terms whose sum is an output, or 0 if unknown: where large terms cancel, rounding errors are large.
        return [0.0] * len(self.outputs) if self.base is None else self.base.gradient_term_sizes

    @functools.cached_property
    def gradient_term_sizes(self) -> list[float]:
        # An estimate: in y = a * x with the cotangent w, the gradient of x is w * a = w * y / x.
        sizes = [max(largest(y), size) for y, size in zip(self.outputs, self.output_term_sizes, strict=True)]
        whole = max(largest(w) * sizes[k] for k, w in self.cotangents.items())
        return [whole / (largest(x) or 1.0) for x in self.function.values]

    @functools.cached_property
    def noise(self) -> dict[str, float]:
        rng = np.random.default_rng(0)
        steps = [4 * float(jnp.finfo(x.dtype).eps) * rng.choice([-1.0, 1.0], x.shape) for x in self.function.values]
        values = [placed(x, exact(x) * (1 + step)) for x, step in zip(self.function.values, steps, strict=True)]
        rounded: Arrays = {}  # the results for values that differ in their last digits
        with contextlib.suppress(Exception):  # a layer may raise an error for other values
            rounded = self.function.with_values(values).results(self.cotangents)
        term_sizes = {**named_outputs(self.output_term_sizes), **self.function.with_names(self.gradient_term_sizes)}
        noise: dict[str, float] = {}
        for name, x in self.results.items():
            if has_tangent(x):
                change = largest(exact(x) - exact(rounded[name])) if name in rounded else 0.0
                measured = 4 * max(change, self.epsilon * term_sizes[name])
                # Rounding errors are much smaller than 1 unless the array has large values.
                most = self.epsilon**0.5 * max(largest(x), 1.0)
                # At scaled values, an error may also be small relative to the results at the user's values.
                noise[name] = max(min(measured, most), self.epsilon**0.5 * self.options.result_sizes.get(name, 0.0))
        return noise

    def case(self, label: str, got: Arrays, expected: Arrays | None = None, source: str = "in eager mode") -> Case:
        expected, options = self.results if expected is None else expected, self.options
        return Case(label, got, expected, source, options.rtol, options.atol, self.epsilon, self.noise)

    def random(self, stream: int) -> np.random.Generator:
        return np.random.default_rng((self.options.seed, stream))


def named_outputs(outputs: Sequence[Any]) -> Arrays:
    return {f"output {i}": y for i, y in enumerate(outputs)}


def run_check(cases: Cases) -> tuple[str, int]:
    n_cases = 0
    try:
        while True:
            if error := mismatch_of(next(cases)):
                raise error
            n_cases += 1
    except StopIteration as end:
        return end.value, n_cases
