"""Defines the properties of a layer: each check yields results to compare, and returns a sentence for the report.

Gradients are compared with those of a reference, or else in this way:

    backward in float32  =  backward in float64  =  central differences in float64

Central differences are `(f(x + h) - f(x - h)) / 2h`, where `h` is the cube root of the machine epsilon, for which
rounding and truncation errors have similar sizes (Press et al., Numerical Recipes, 5.7), and `f` is the sum of the
outputs with random weights, so that errors at two outputs do not cancel. For complex arguments the gradient is that of
`jax.grad`: `dL/d(re) - i dL/d(im)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pylayer_jax._jax.jaxprs import evaluate_equation, inner_jaxprs, interpret, line_of, operations, stage
from pylayer_jax._jax.linearity import why_not_linear
from pylayer_jax._jax.traces import NEEDS_VALUES, Literal, is_tracer
from pylayer_jax._jax.types import has_tangent, is_key, is_tensor
from pylayer_jax._messages import HostBackwardError, NoForwardModeError, NotLinearError, OnceDifferentiableError, plural
from pylayer_jax._report import type_text

from ._subject import (
    Arrays,
    Case,
    Cases,
    Cotangents,
    MismatchError,
    Options,
    Subject,
    TensorFunction,
    exact,
    first_line,
    gathered,
    largest,
    mismatch_of,
    named_outputs,
    placed,
    random_like,
    random_signs,
    scaled,
)

__tracebackhide__ = True  # pytest hides the frames of this module


def check_gradients(subject: Subject) -> Cases:
    return (yield from _also_at_other_values(subject, _compare_gradients))


def check_second_order(subject: Subject) -> Cases:
    try:
        return (yield from check_gradients(subject.derivative))
    except HostBackwardError as error:
        return f"not defined: {first_line(error).split('. ')[0]}"


def check_outputs(subject: Subject) -> Cases:
    return (yield from _also_at_other_values(subject, _compare_outputs, with_gradients=False))


def _also_at_other_values(
    subject: Subject, compare_with: Callable[[Subject], Cases], with_gradients: bool = True
) -> Cases:
    """Compare at the user's values, at the first random values that the function accepts, and at `_FAR` multiples."""
    sentence = yield from compare_with(subject)
    given, options = subject.root.function.values, dataclasses.replace(subject.options, limit=1)
    groups = [[(*other, options) for other in _random_values(given, subject.random(0))]]
    if subject.base is None:  # second derivatives would take long
        # Where a layer saturates, gradients are much smaller than their rounding errors. Therefore far values permit
        # an error that is small relative to `result_sizes`, the sizes of the results at the user's values. At large
        # values, `least_size` is 0, because a step relative to 1 may leave the region in which the layer saturates.
        # See "small scale" in tests/checkers/wrong_layers.py.
        sizes = {name: largest(x) for name, x in subject.results.items()} if with_gradients else {}
        for factor in _FAR:
            far = dataclasses.replace(options, least_size=1.0 if factor < 1 else 0.0, result_sizes=sizes)
            groups.append([(f"{factor:g} times the given ones", [scaled(factor, x) for x in given], far)])
    accepted, refusals = {"": given}, list[str]()  # accepted: the values by description
    for group in groups:
        for description, values, other_options in group:
            cases, refusal = _cases_at(subject, values, other_options, compare_with)
            for case in cases:
                yield dataclasses.replace(case, label=f"{case.label} for other values ({description})")
            if cases:
                accepted[description.removesuffix(" the given ones")] = values
                break
            refusals.append(refusal)
    others = ", ".join([*accepted][1:])
    sentence += f", and for other values ({others})" if others else f"; it takes no others ({refusals[0]})"
    if subject.root.not_taken is None:  # else a check of a lower order tells
        subject.root.not_taken = _branches_not_taken(subject.root, list(accepted.values()))
        sentence += subject.root.not_taken and f"; {subject.root.not_taken}"
    return sentence


def _cases_at(
    subject: Subject, values: Sequence[Any], options: Options, compare_with: Callable[[Subject], Cases]
) -> tuple[list[Case], str]:
    """Return the cases at `values` and "", or [] and the reason why the function refuses these values."""
    try:
        other = subject.at(values, options)
        # The outputs of the user's function decide. A gradient that is NaN where they are finite is an error of the
        # layer. See "log_softmax of exp" in tests/checkers/wrong_layers.py.
        finite, other_finite = (
            [np.isfinite(exact(y)).tobytes() for y in each.root.outputs if has_tangent(y)] for each in (subject, other)
        )
        if finite != other_finite:
            return [], "it has outputs that are not finite"
        return list(compare_with(other)), ""
    except Exception as error:  # a layer may raise an error for some values
        return [], f"{type(error).__name__}: {first_line(error)}"


# -- other values ---------------------------------------------------------------------------------

# At ones, at equal arguments, or at a symmetric matrix, even a wrong `backward` of a product, which forgets a transpose
# or swaps two gradients, may return the right gradients; so may one for which the last entry is always the largest.
# Therefore absolute values are shuffled in each row and multiplied by different random numbers: [0.2, -0.9] may become
# [-0.74, -0.16]. Positive values remain positive.

# The range of the random factors, and whether signs may change. The largest changes come first.
_RANDOM_FACTORS = {
    "random sizes and signs": (0.5, 1.5, True),
    "random sizes": (0.5, 1.5, False),
    "larger sizes": (1.0, 1.5, False),
    "smaller sizes": (0.5, 1.0, False),
}
# If the function fails at all of these, all values are multiplied by one number: a positive definite matrix stays so.
# The numbers are not round, since a layer rarely has a kink at such a multiple.
_SCALES = (0.7391, 1.1834)
# The factors above are close to 1, and rarely reveal a rule that forgets to zero the gradient of clipped values. See
# "clipped values" in tests/checkers/wrong_layers.py.
_FAR = (100.0, 0.01)


def _random_values(values: Sequence[Any], rng: np.random.Generator) -> Iterator[tuple[str, list[Any]]]:
    """Yield descriptions and other values, such as ("larger sizes", [...])."""
    for description, (low, high, changes_signs) in _RANDOM_FACTORS.items():
        if not changes_signs or any(_may_change_sign(exact(x)) for x in values):
            yield description, [placed(x, _randomized(exact(x), low, high, changes_signs, rng)) for x in values]
    for scale in _SCALES:
        yield f"{scale} times the given ones", [scaled(scale, x) for x in values]


def _may_change_sign(x: np.ndarray) -> bool:
    return bool(np.iscomplexobj(x) or np.min(x, initial=0.0) < 0 < np.max(x, initial=0.0) or not np.any(x))


def _randomized(x: np.ndarray, low: float, high: float, changes_signs: bool, rng: np.random.Generator) -> np.ndarray:
    is_usual = np.isfinite(x) & (x != 0)
    # Zeros are replaced, because zeros such as those of a unit matrix may hide a wrong gradient.
    size = np.where(is_usual, np.abs(x), np.median(np.abs(x[is_usual])) if np.any(is_usual) else 1.0)
    size = (rng.permuted(size, axis=-1) if x.ndim else size) * rng.uniform(low, high, x.shape)
    if changes_signs and _may_change_sign(x):
        signs = random_signs(x, rng)
    else:  # zeros get the sign of the sum
        signs = np.where(x == 0, np.sign(np.sum(x, where=np.isfinite(x))) or 1.0, np.sign(x))
    return np.where(np.isfinite(x), signs * size, x)


# -- branches that no value takes -----------------------------------------------------------------

# Primitives with branches (`jnp.where` applies select_n, `jnp.clip` max and min, `x * (x > 0)` convert_element_type),
# with a function from the equation and its operands to the mask of the entries that take each branch.
#
#     lambda x: jnp.maximum(x, 0)    x = [-1, 2]    {"its first operand": [F, T], "its second operand": [T, F]}
_BRANCHES: dict[str, Callable[..., dict[str, Any]]] = {
    "select_n": lambda e, which, *_: _masks_of_cases(which, len(e.invars) - 1),
    "cond": lambda e, which, *_: _masks_of_cases(which, len(inner_jaxprs(e.params))),
    "max": lambda _, a, b: {"its first operand": a >= b, "its second operand": b >= a},
    "min": lambda _, a, b: {"its first operand": a <= b, "its second operand": b <= a},
    "clamp": lambda _, low, x, high: {"its lower limit": x <= low, "its upper limit": x >= high},
    **dict.fromkeys(
        ("abs", "sign"),
        lambda _, x: {} if jnp.iscomplexobj(x) else {"of a negative number": x < 0, "of a positive number": x > 0},
    ),
    "convert_element_type": lambda _, x: _masks_of_cases(x, 2) if x.dtype == bool else {},
}
_POSITIVE = ("abs", "exp", "exp2", "logistic", "sqrt", "square")  # and what follows from these by:
_KEEPS_SIGN = ("add", "broadcast_in_dim", "convert_element_type", "div", "mul", "reduce_max", "reduce_sum", "reshape")


def _masks_of_cases(which: Any, count: int) -> dict[str, Any]:
    names = ("False", "True") if count == 2 else [f"case {i}" for i in range(count)]
    return {name: which == np.asarray(i, which.dtype) for i, name in enumerate(names)}


def _branches_not_taken(subject: Subject, accepted: Sequence[Sequence[Any]]) -> str:
    """Return "branches that no value takes: max at layers.py:12 is never its first operand", or ""."""

    def results(*leaves: Any) -> tuple[list[Any], None]:
        values, w = jax.tree.unflatten(tree, leaves)
        outputs, pull = jax.vjp(subject.function.selected(w), *values)
        return [*outputs.values(), *pull(w)], None

    try:
        w = subject.cotangents
        leaves, tree = jax.tree.flatten((accepted[0], w))
        jaxpr, consts, _ = stage(results, list(map(jax.typeof, leaves)), "backward")
    except Exception:  # no gradient, or the function needs concrete values, or fails under jit: other rows tell
        return ""
    if _BRANCHES.keys().isdisjoint(operations(jaxpr)):
        return ""
    # `backward` may clip cotangents, so other sizes and signs of these count too.
    points = [(values, w) for values in accepted]
    points += [(accepted[0], {k: scaled(factor, x) for k, x in w.items()}) for factor in (*_FAR, -1.0)]

    @jax.jit
    def run(*leaves: Any) -> dict[tuple[int, str], Any]:
        inputs = [*(_Value(x, False, True) for x in consts), *(_Value(x, True, True) for x in leaves)]
        return {(i, branch): is_taken for i, (branch, is_taken) in enumerate(_evaluate(jaxpr, inputs)[1])}

    taken = [run(*jax.tree.leaves(point)) for point in points]
    missed = [key[1] for key in taken[0] if not any(at_point[key] for at_point in taken)]
    return f"branches that no value takes: {', '.join(dict.fromkeys(missed))}" if missed else ""


class _Value(NamedTuple):
    array: Any
    is_variable: bool  # whether it depends on more than constants
    is_signed: bool  # whether it may be negative


def _evaluate(
    jaxpr: Any, inputs: Sequence[_Value], within: tuple[Any, ...] = ()
) -> tuple[list[_Value], list[tuple[str, Any]]]:
    """Return the outputs, and for each branch that variables select a text and whether some entry takes it."""
    branches: list[tuple[str, Any]] = []

    def rule(equation: Any, operands: list[_Value]) -> list[_Value]:
        name, equations, arrays = equation.primitive.name, (*within, equation), [x.array for x in operands]
        is_variable = any(x.is_variable for x in operands) and not _is_guard(equation, operands)
        decides = operands[0].is_variable if name in ("select_n", "cond") else is_variable  # the first operand selects
        if name in _BRANCHES and decides and (name not in ("abs", "sign") or operands[0].is_signed):
            operation = " at ".join(filter(None, [name, line_of([e.source_info for e in equations])]))
            masks = _BRANCHES[name](equation, *arrays)
            branches.extend((f"{operation} is never {branch}", jnp.any(mask)) for branch, mask in masks.items())
        inner = inner_jaxprs(equation.params)
        # The jaxpr of a scan is one iteration, and the jaxpr of a shard_map is the part of one device.
        is_call = len(inner) == 1 and not inner[0].constvars and name not in ("scan", "shard_map")
        if is_call and [v.aval.shape for v in inner[0].invars] == [v.aval.shape for v in equation.invars]:
            results, inner_branches = _evaluate(inner[0], operands, equations)
            branches.extend(inner_branches)
            return results
        # JAX itself compares each index with 0, so an integer counts only if it may be the index of a `cond`.
        is_index = name == "convert_element_type" and equation.invars[0].aval.dtype == bool
        is_signed = name not in _POSITIVE and (name not in _KEEPS_SIGN or any(x.is_signed for x in operands))
        return [
            _Value(x, is_variable and (is_index or has_tangent(x) or x.dtype == bool), is_signed)
            for x in evaluate_equation(equation, arrays)
        ]

    known = dict(zip(jaxpr.invars, inputs, strict=True))
    of_literal = lambda a: _Value(a.val, False, bool(np.any(a.val < 0)))
    return interpret(rule, jaxpr.eqns, known, jaxpr.outvars, of_literal), branches


def _is_guard(equation: Any, operands: Sequence[_Value]) -> bool:
    """Return whether finite values take no branch of the operation, as in `x == jnp.inf`, or only single points do."""
    name, atoms = equation.primitive.name, equation.invars
    is_tie = name in ("eq", "ne") and has_tangent(atoms[0].aval)
    has_infinity = any(isinstance(a, Literal) and has_tangent(a.aval) and not np.all(np.isfinite(a.val)) for a in atoms)
    bound = atoms[-1]
    is_known = name in ("ge", "lt") and not operands[0].is_signed and isinstance(bound, Literal) and bound.val <= 0
    return name == "is_finite" or is_tie or has_infinity or is_known


# -- cases with a reference or numerical derivatives ----------------------------------------------


def _compare_outputs(subject: Subject) -> Cases:
    assert subject.reference is not None
    got, expected = subject.function.run(), subject.reference.run()
    if len(got) != len(expected):
        raise MismatchError(f"{plural(len(got), 'tensor')} returned, but {len(expected)} by the reference.")
    yield subject.case("", named_outputs(got), named_outputs(expected), "by the reference")
    return "match those of the reference"


def _compare_gradients(subject: Subject) -> Cases:
    if subject.reference is not None:
        if subject.base is None:
            yield from _compare_outputs(subject)
        expected = subject.reference.named_gradients(jax.tree.map(gathered, subject.cotangents))
        yield subject.case("", subject.named_gradients, expected, "by the reference")
        return "match those of the reference"
    n_entries = sum(min(x.size, subject.options.limit) for x in subject.function.values)
    sentence = f"match finite differences at {n_entries} entries"
    wide, wide_cases = _in_wider_dtype(subject)
    yield from wide_cases
    outputs, gradients = named_outputs(subject.outputs), subject.named_gradients
    # The outputs in float64 of a function that draws random numbers differ by more than rounding errors.
    if wide is None or mismatch_of(subject.case("", outputs, _cast(named_outputs(wide.outputs), outputs))):
        yield from _numerical_cases(subject)
        return sentence
    label = f" in {', '.join(dict.fromkeys(str(x.dtype) for x in subject.function.values))}"
    source = f"in {jnp.finfo(wide.function.values[0].dtype).dtype}"
    yield subject.case(label, gradients, _cast(wide.named_gradients, gradients), source)
    return f"{sentence},{label} too"


def _in_wider_dtype(subject: Subject) -> tuple[Subject | None, list[Case]]:
    """Return a copy in float64, or else in float32, and its cases; None if it casts to a narrower dtype or fails."""
    cotangents, own_epsilon = subject.cotangents, subject.epsilon  # computed outside of enable_x64
    for dtype in jnp.float64, jnp.float32:
        epsilon = float(jnp.finfo(dtype).eps)
        if epsilon >= own_epsilon or not subject.options.float64:
            break
        with jax.enable_x64(True), contextlib.suppress(Exception):  # the caller gets an error in the own dtypes too
            widen = lambda x, dtype=dtype: x.astype(np.promote_types(x.dtype, dtype))  # complex64 to complex128
            values, weights = jax.tree.map(widen, (subject.function.values, cotangents))
            wide = Subject(subject.function.with_values(values), None, subject.options, subject.base)
            wide.cotangents = weights  # in place of random ones
            if wide.epsilon <= epsilon:
                return wide, list(_numerical_cases(wide))
    return None, []


def _cast(arrays: Arrays, like: Arrays) -> dict[str, Any]:
    return {name: np.asarray(x).astype(like[name].dtype) if has_tangent(x) else x for name, x in arrays.items()}


class Slope(NamedTuple):  # of the weighted sum of the outputs, along a direction
    value: float
    error: float  # how large the error of the value may be
    direction: np.ndarray  # of length 1, after rounding


SlopeFunction = Callable[[int, np.ndarray], Slope]  # from the position of an array and a direction


def _numerical_cases(subject: Subject) -> Iterator[Case]:
    rtol, options = subject.epsilon ** (1 / 3), subject.options
    relative_step = rtol if options.step is None else options.step

    def slope_along(j: int, direction: np.ndarray) -> Slope:
        value, is_moved = exact(subject.function.values[j]), direction != 0
        top = largest(value)
        sizes: list[Any] = [max(options.least_size, largest(value[is_moved])) or top or 1.0]
        if options.step is None and top:
            # The best step size may be a fixed number, or proportional to the largest entry, or to each entry. Try all
            # three. The two factors of 0.1 leave out a size that would hardly differ from another one.
            own = np.where(np.isfinite(value) & (value != 0), np.abs(value), top)
            sizes += [top] if top < 0.1 else []
            smallest = np.min(own, where=is_moved, initial=top)
            sizes += [own] if smallest < min(0.1 * max(1.0, top), top) else []
        slopes = [_central_difference(subject, j, relative_step * (size * direction)) for size in sizes]
        finite = [slope for slope in slopes if np.isfinite(slope.error)] or slopes
        # The relative error counts, up to 1, and then the error.
        return min(finite, key=lambda slope: (slope.error / (max(abs(slope.value), slope.error) or 1), slope.error))

    return directional_cases(subject, slope_along, options.limit, "numerically", rtol)


def _central_difference(subject: Subject, j: int, half_step: np.ndarray) -> Slope:
    array, function = subject.function.values[j], subject.function.only(j)
    start, end = (placed(array, exact(array) + sign * half_step) for sign in (-1, 1))
    low, high = function.outputs([start]), function.outputs([end])
    step, change, error = exact(end) - exact(start), 0.0, 0.0
    for k, w in subject.cotangents.items():
        weight, lower, middle, upper = exact(w), exact(low[k]), exact(subject.outputs[k]), exact(high[k])
        change += float(np.sum(weight * (upper - lower)).real)
        rounding = 4 * subject.epsilon * np.abs(weight) * np.maximum(np.abs(upper), subject.output_term_sizes[k])
        # Only entries that differ count. If none does, rounding removed the change, and the error is the largest
        # rounding error of an entry.
        error += float(max(np.sum(rounding, where=lower != upper), np.max(rounding, initial=0.0)))
        # At a kink, the slopes to the left and to the right differ. The error includes half of this difference.
        error += abs(float(np.sum(weight * (upper - 2 * middle + lower)).real))
    length = float(np.linalg.norm(step))
    return Slope(change / length, error / length, step / length)


def directional_cases(
    subject: Subject, slope_along: SlopeFunction, limit: int, source: str, rtol: float
) -> Iterator[Case]:
    """Compare up to `limit` entries of each gradient, and a random direction if there are more, with slopes."""
    rng = subject.random(9)
    relative = rtol if subject.options.rtol is None else subject.options.rtol

    def case(name: str, got: Any, expected: Any, noise: Any) -> Case:
        given = subject.case("", {name: np.asarray(got)}, {name: np.asarray(expected)}, source)
        return dataclasses.replace(given, rtol=relative, noise={name: noise})

    def case_along(label: str, j: int, entries: np.ndarray, direction: np.ndarray, noise: float) -> Case:
        slope = slope_along(j, direction / np.linalg.norm(direction))
        terms = np.real(entries * slope.direction)[slope.direction != 0]
        # The terms may cancel, but their errors do not.
        error_of_terms = relative * float(np.linalg.norm(terms[np.isfinite(terms)])) + noise * terms.size**0.5
        return case(label, np.sum(terms), slope.value, slope.error + error_of_terms)

    for j, (name, gradient) in enumerate(subject.named_gradients.items()):
        entries = exact(gradient)
        noise = max(subject.noise.get(name, 0.0), relative * subject.options.result_sizes.get(name, 0.0))
        # An entry that is not checked is NaN in both arrays of a case.
        got, expected = np.full_like(entries, np.nan), np.full_like(entries, np.nan)
        errors = np.full(entries.shape, noise)
        for i in range(entries.size) if entries.size <= limit else rng.choice(entries.size, limit, replace=False):
            index = np.unravel_index(i, entries.shape)
            got[index], expected[index] = entries[index], 0
            for unit in (1, 1j) if np.iscomplexobj(entries) else (1,):
                direction = np.zeros_like(entries)
                direction[index] = unit
                slope = slope_along(j, direction)
                expected[index] += slope.value * np.conj(unit)
                errors[index] += slope.error
        yield case(name, got, expected, errors)
        if entries.size > limit:
            direction = exact(random_like(gradient, rng))
            label = f"{name} along a random direction over all {entries.size} entries"
            whole = case_along(label, j, entries, direction, noise)
            if mismatch_of(whole):
                index = _worst_entry(lambda part: case_along(label, j, entries, part, noise), direction)  # noqa: B023
                unit = np.zeros_like(direction)
                unit[index] = 1
                yield case_along(f"{name} at index {tuple(map(int, index))}", j, entries, unit, noise)
            yield whole


def _worst_entry(case_along: Callable[[np.ndarray], Case], direction: np.ndarray) -> tuple[Any, ...]:
    """Return the index of a wrong entry: halve the entries, each time keeping the half with the larger error."""

    def error(entries: np.ndarray) -> float:
        part = np.zeros_like(direction)
        part.flat[entries] = direction.flat[entries]
        case = case_along(part)
        ((got, expected),) = zip(case.got.values(), case.expected.values(), strict=True)
        return float(np.nan_to_num(np.linalg.norm(part) * np.abs(got - expected), nan=np.inf))

    entries = np.arange(direction.size)
    while entries.size > 1:
        entries = max(np.array_split(entries, 2), key=error)
    return np.unravel_index(entries[0], direction.shape)


# -- forward mode ---------------------------------------------------------------------------------

# Let J be the Jacobian of the outputs. Reverse mode computes J^T w for cotangents w, and forward mode computes J t for
# tangents t. For any w and t, these two numbers are equal (their real parts, if complex):
#
#     w . (J t)  =  (J^T w) . t
#
# If t is a unit vector, both sides are one entry of the gradient J^T w.


def check_forward_mode(subject: Subject) -> Cases:
    if reason := _why_not_defined(subject):
        return reason
    alone = lambda j, t: _jvp(subject, subject.function.only(j), [t])  # array j alone has a tangent
    yield from _forward_cases(subject, alone, 0, "by jax.jvp")
    yield from _under_jit(subject, "by jax.jvp, under jit")
    outputs = jax.vmap(subject.function.selected(subject.cotangents))
    batched_jvp = jax.jit(lambda values, tangents: jax.jvp(outputs, values, tangents)[1])

    def first_of_two(j: int, tangent: Any) -> list[Any]:
        arrays = subject.function.values, _zeros_but(subject, j, tangent)
        values, tangents = (tuple(jnp.stack([x, scaled(0.9, x)]) for x in xs) for xs in arrays)
        return [t[0] for t in batched_jvp(values, tangents).values()]

    yield from _forward_cases(subject, first_of_two, 0, "by jax.jvp of vmap")
    return "matches reverse mode, entry by entry, also under jit and vmap"


def check_forward_over_reverse(subject: Subject) -> Cases:
    second = subject.derivative
    if reason := _why_not_defined(second):
        return reason
    has_forward_mode = not _why_not_defined(subject)
    if has_forward_mode:
        # Compare the derivatives of (J^T w) . u with those of the same number w . (J u), along random directions.
        u, count = list(second.cotangents.values()), len(subject.function.values)

        def products(*args: Any) -> list[Any]:  # args: the values, then w
            tangents = _jvp(subject, subject.function.with_values(args[:count]), u)
            return [w * t for w, t in zip(args[count:], tangents, strict=True)]

        jvp = lambda j, t: jax.jvp(products, tuple(second.function.values), _zeros_but(second, j, t))[1]
        ones = [np.ones(())] * len(subject.cotangents)
        yield from _forward_cases(second, jvp, 0, "by jax.jvp of jax.jvp", weights=ones)
    yield from _under_jit(second, "by jax.jvp of the gradients, under jit")
    over_forward = "; so does forward over forward" if has_forward_mode else ""
    return f"matches reverse over reverse, entry by entry, also under jit{over_forward}"


def _why_not_defined(subject: Subject) -> str:
    """Return why `jax.jvp` cannot differentiate the function under test, or "" if it can."""
    try:
        _jvp(subject, subject.function, subject.function.values)
    except NoForwardModeError as error:
        return f"not defined ({error.way_out})"
    except (TypeError, RuntimeError) as error:
        # The two known reasons: `backward` is not linear in the cotangents, or has no derivative.
        is_known = subject.base and isinstance(error, (NotLinearError, OnceDifferentiableError))
        if not is_known and "forward-mode autodiff (jvp) to a custom_vjp" not in str(error):
            raise
        return f"not defined: {first_line(error).split('. ')[0]}"
    return ""


def _jvp(subject: Subject, function: TensorFunction, tangents: Sequence[Any]) -> list[Any]:
    outputs = function.selected(subject.cotangents)
    return list(jax.jvp(outputs, tuple(function.values), tuple(tangents))[1].values())


def _zeros_but(subject: Subject, j: int, tangent: Any) -> tuple[Any, ...]:
    return tuple(tangent if i == j else jnp.zeros_like(x) for i, x in enumerate(subject.function.values))


def _forward_cases(
    subject: Subject, jvp: Callable[[int, Any], list[Any]], limit: int, how: str, weights: Sequence[Any] = ()
) -> Iterator[Case]:
    """Compare each gradient with w . (J t), where `jvp` maps the position of an array and its tangent t to J t."""
    weights = weights or list(subject.cotangents.values())

    def slope_along(j: int, direction: np.ndarray) -> Slope:
        tangent = placed(subject.function.values[j], direction)
        terms = [exact(w) * exact(t) for w, t in zip(weights, jvp(j, tangent), strict=True)]
        size = sum(float(np.sum(np.abs(x))) for x in terms)
        return Slope(sum(float(np.sum(x).real) for x in terms), 4 * subject.epsilon * size, exact(tangent))

    return directional_cases(subject, slope_along, limit, how, subject.epsilon**0.5)


def _under_jit(subject: Subject, how: str) -> Iterator[Case]:
    function, limit = subject.function, subject.options.limit
    jitted = jax.jit(lambda values, tangents: _jvp(subject, function.with_values(values), tangents))
    return _forward_cases(subject, lambda j, t: jitted(function.values, _zeros_but(subject, j, t)), limit, how)


# -- other runs, arguments and cotangents ----------------------------------------------------------


def check_eager(subject: Subject) -> Cases:
    yield subject.case(" when it is differentiated", named_outputs(subject.function.run_differentiated()[0]))
    returned = ", ".join(map(type_text, subject.outputs))
    return f"returns {returned}; gradients of {', '.join(subject.function.value_names)}"


# Functions that change arguments of one type. Scalar arrays stay unchanged.
_CHANGES: tuple[Callable[[Any], Any], ...] = (
    lambda x: 0.75 * x if type(x) is float else x,
    lambda x: x + 1 if type(x) is int else x,
    lambda x: not x if type(x) is bool else x,
    lambda x: jnp.concatenate([x, x]) if is_tensor(x) and x.ndim > 0 else x,
)


def check_repeatable(subject: Subject) -> Cases:
    function, w = subject.function, subject.cotangents
    case = lambda label, pull: subject.case(label, function.with_names(pull(w)), source="by the first run")
    pull = function.vjp(w)
    yield case(" by another run", pull)
    yield case(" when the vjp function is called a second time", pull)
    pull = function.vjp(w)
    with contextlib.suppress(Exception):  # the layer may raise an error for these values
        function.with_values([scaled(0.75, x) for x in function.values]).gradients(w)
    yield case(" when the layer ran on other values before backward", pull)
    for change in _CHANGES:
        with contextlib.suppress(Exception):  # the layer may raise an error for these arguments
            function.function(*function.skeleton.fill(list(map(change, function.tensors)), change))
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
    mismatch = next(filter(None, map(mismatch_of, cases)), None)
    if mismatch is not None and subject.reference is not None:
        reference_cases = _linearity_cases(subject, subject.reference, jax.tree.map(gathered, subject.cotangents))
        for case, reference_case in zip(cases, reference_cases, strict=True):
            yield subject.case(case.label, case.got, reference_case.got, "by the reference")
        return f"it is not, as that of the reference: {first_line(mismatch)}"
    yield from cases
    pull, w = subject.function.vjp(subject.cotangents), subject.cotangents
    gradients = lambda *arrays: (list(pull(dict(zip(w, arrays, strict=True)))), None)
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
        with jax.checking_leaks():
            gradients = compute()
    except NEEDS_VALUES:
        return "not under jit, since it needs concrete values"
    except jax.errors.UnexpectedTracerError as error:
        raise MismatchError(f"a leaked tracer is used: {first_line(error)}") from error
    except Exception as error:
        # JAX reports a leak for every shard_map, because JAX itself keeps the tracers of a shard_map. It also reports a
        # tracer that is deleted soon after its trace, such as one that `forward` stores on `ctx`.
        is_of_jax = "shard_map[" in str(jax.make_jaxpr(compute)())  # may raise an error of the layer again
        before = _living_tracers()  # kept alive, so that no later tracer gets the id of one
        gradients: Any = None
        with contextlib.suppress(jax.errors.UnexpectedTracerError):
            gradients = compute()
        is_leaked = not {*map(id, _living_tracers())} <= {*map(id, before)}
        if gradients is None or (is_leaked and not is_of_jax):
            raise MismatchError(f"a tracer is leaked: {' '.join(str(error).split())[:400]}") from error
    yield subject.case(" under jit, traced again", gradients)
    return "no traced value outlives its trace under jit"


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
    function, cotangents, mesh = subject.function, subject.cotangents, jax.sharding.get_abstract_mesh()
    tensors = function.tensors
    if mesh.empty:
        devices = jax.local_devices(backend=next(iter(function.values[0].devices())).platform)
        mesh = jax.make_mesh((len(devices),), ("devices",), axis_types=(AxisType.Auto,), devices=devices)
        # JAX raises an error for arguments that are committed to devices other than those of the mesh.
        tensors, cotangents = jax.device_put((tensors, cotangents), NamedSharding(mesh, P()))
    sharded = jax.shard_map(lambda xs: function.with_tensors(xs).run(), mesh=mesh, in_specs=P(), out_specs=P())
    results = lambda xs, w: TensorFunction(sharded, {"tensors": xs}, function.paths).results(w)
    yield subject.case(" of shard_map under jit", jax.jit(results)(tensors, cotangents))
    yield subject.case(" of shard_map eagerly", results(tensors, cotangents))
    return f"outputs and gradients on {plural(mesh.size, 'device')} match eager mode, under jit and eagerly"


# -- several examples -----------------------------------------------------------------------------

_EXAMPLES = 3
_MOST_CHOICES = 16  # the largest number of choices of batched tensors that `check_vmap` tries


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
    done = f"{_EXAMPLES} examples match eager mode, in {plural(len(choices), 'choice')} of mapped axes"
    # From a batch of rbg keys, JAX draws other random numbers than from each of these keys alone.
    mapped = [p for p, x in enumerate(function.tensors) if p in positions or "rbg" not in str(x.dtype)]
    if mapped == positions:
        return done
    names = ", ".join(function.paths[p] for p in mapped if p not in positions)
    try:
        case = _case_of_examples(subject, dict.fromkeys(mapped, 0), f" of vmap, {names} mapped too")
    except Exception as error:  # the layer may need a concrete integer, as a shape or an axis
        return f"{done}; none with {names} mapped too ({type(error).__name__}: {first_line(error)})"
    yield case
    return f"{done}, with {names} mapped too"


def _case_of_examples(subject: Subject, batch_axes: dict[int, int], label: str, is_jitted: bool = True) -> Case:
    """Compare a batch of examples with each example alone. `batch_axes` maps positions to axes."""
    function, axes = subject.function, [batch_axes.get(p) for p in range(len(subject.function.tensors))]
    tensors = [
        x if axis is None else jnp.stack([_example(x, i) for i in range(_EXAMPLES)], axis)
        for x, axis in zip(function.tensors, axes, strict=True)
    ]
    run = lambda xs: function.with_tensors(xs).run()

    def run_each(xs: list[Any]) -> list[Any]:
        select = lambda x, axis, i: x if axis is None else jax.lax.index_in_dim(x, i, axis, keepdims=False)
        outputs = [run([select(x, axis, i) for x, axis in zip(xs, axes, strict=True)]) for i in range(_EXAMPLES)]
        return [jnp.stack(ys) for ys in zip(*outputs, strict=True)]

    batch = TensorFunction(jax.vmap(run, (axes,)), {"tensors": tensors}, function.paths)
    cotangents = {k: jnp.stack([w] * _EXAMPLES) for k, w in subject.cotangents.items()}
    results = lambda values, cotangents: batch.with_values(values).results(cotangents)
    got = (jax.jit(results) if is_jitted else results)(batch.values, cotangents)
    expected = TensorFunction(run_each, {"tensors": tensors}, function.paths).results(cotangents)
    return subject.case(label, got, expected, "for each example alone")


def _example(x: Any, i: int) -> Any:
    if has_tangent(x):
        return scaled(1 - 0.1 * i, x)
    if not is_key(x):
        return jnp.roll(x, i)  # rolled indices stay in range, and a rolled permutation is a permutation
    return jax.random.wrap_key_data(jax.random.key_data(x) + jnp.uint32(i), impl=jax.random.key_impl(x))
