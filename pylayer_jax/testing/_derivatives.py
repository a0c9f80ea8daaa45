"""Checks derivatives against a reference or numerical derivatives, and forward mode against reverse mode.

Numerical derivatives are central differences `(f(x + h) - f(x - h)) / 2h`. The step `h` is the cube root of the machine
epsilon, for which rounding and truncation errors have similar sizes (Press et al., Numerical Recipes, 5.7). `f` is the
sum of the outputs with random weights, so that errors at two outputs do not cancel. Gradients in float64 are compared
with central differences, and gradients in the dtypes of the arguments are compared with the gradients in float64:

    backward in float32  =  backward in float64  =  central differences in float64

For complex arguments the gradient is that of `jax.grad`: `dL/d(re) - i dL/d(im)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.jaxprs import evaluate_part, has_equation, inner_jaxprs, is_literal, stage
from pylayer_jax._jax.types import has_tangent
from pylayer_jax._messages import HostBackwardError, NoForwardModeError, NotLinearError, OnceDifferentiableError, plural
from pylayer_jax._report import line_of

from ._subject import (
    Arrays,
    Case,
    Cases,
    MismatchError,
    Subject,
    TensorFunction,
    compare,
    exact,
    first_line,
    in_double_precision,
    largest,
    named_outputs,
    on_one_device,
    placed,
    random_like,
    scaled,
)

__tracebackhide__ = True  # pytest hides the frames of this module

_WIDE = 1e-15  # larger than the machine epsilon of float64


def check_gradients(subject: Subject) -> Cases:
    return (yield from _also_for_other_values(subject, _beside_reference if subject.reference else _beside_numbers))


def check_second_order(subject: Subject) -> Cases:
    try:
        return (yield from check_gradients(subject.derivative))
    except HostBackwardError as error:
        return f"not defined: {first_line(error).split('. ')[0]}"


def check_outputs(subject: Subject) -> Cases:
    return (yield from _also_for_other_values(subject, _outputs_beside_reference))


def _also_for_other_values(subject: Subject, beside: Callable[[Subject], Cases]) -> Cases:
    """Yield the cases at the values of the user, at random values, and at much larger and much smaller values.

    The random values are the first ones that the function accepts and for which its results are finite. Second
    derivatives are not checked at the larger and smaller values, since these checks would take long.
    """
    sentence = yield from beside(subject)
    derivatives = beside is not _outputs_beside_reference
    accepted, described, refusal = [subject.function.values], list[str](), ""
    near = _ways(subject.root.function.values, subject.random(0))
    for how, values in near:
        cases, why_not = _cases_at(subject, values, beside, limit=1)
        refusal = refusal or why_not
        if cases:
            yield from _labelled(cases, how)
            accepted.append(values)
            described.append(how)
            break
    # Where a layer saturates, gradients are much smaller than their rounding errors. Therefore an error is permitted if
    # it is small relative to `sizes`, the sizes of the results at the user's values. A step that is relative to 1 may
    # also leave the saturated region, so at large values `least_size` is 0, and each step is relative to the entry
    # alone. See "small scale" in tests/checkers/wrong_layers.py.
    result_sizes = {name: largest(x) for name, x in subject.results.items()} if derivatives else {}
    for factor in () if subject.base else _FAR:
        values, how = [scaled(factor, x) for x in subject.function.values], f"{factor:g} times the given ones"
        least_size = 1.0 if factor < 1 else 0.0
        cases, _ = _cases_at(subject, values, beside, limit=1, least_size=least_size, result_sizes=result_sizes)
        if cases:
            yield from _labelled(cases, how)
            accepted.append(values)
            described.append(f"{factor:g} times")
    other = f", and for other values ({', '.join(described)})" if described else ""
    refused = "" if len(accepted) > 1 else f"; it takes no other values that were tried ({refusal})"
    not_taken = _never_taken(subject, accepted) if derivatives and not subject.base else ""
    return f"{sentence}{other}{refused}{not_taken}"


def _cases_at(
    subject: Subject, values: Sequence[Any], beside: Callable[[Subject], Cases], **options: Any
) -> tuple[list[Case], str]:
    """Return the cases at other values with other `options`; or no case, and the reason, if the values are refused."""
    derivatives = beside is not _outputs_beside_reference
    try:
        other = subject.at(values, dataclasses.replace(subject.options, **options))
        finite, found = (_where_finite(each, derivatives) for each in (subject, other))
        if len(found) != len(finite) or not all(map(np.array_equal, found, finite)):
            return [], "it has results that are not finite"
        return list(beside(other)), ""
    except Exception as error:  # a layer may raise an error for some values
        return [], f"{type(error).__name__}: {first_line(error)}"


def _labelled(cases: Sequence[Case], how: str) -> Iterator[Case]:
    for case in cases:
        yield dataclasses.replace(case, label=f"{case.label} for other values ({how})")


def _where_finite(subject: Subject, derivatives: bool) -> list[np.ndarray]:
    arrays = [*subject.root.outputs, *subject.outputs, *(subject.gradients if derivatives else ())]
    return [np.isfinite(exact(x)) for x in arrays if has_tangent(x)]


# -- other values ---------------------------------------------------------------------------------

# Users often check a layer at ones, at equal arguments, or at a symmetric matrix. At such values, the gradients of a
# product are right even if backward forgets a transpose or swaps two gradients. The checks therefore multiply each
# entry by a different random number: [0.2, -0.9] may become [-0.16, 0.74]. Positive values remain positive, values in
# [-1, 1] remain in this range, and sorted values remain sorted.

# How values change: the range of the random factors, and whether signs may change. The largest changes come first.
_WAYS = {
    "random sizes and signs": (0.5, 1.5, True),
    "random sizes": (0.5, 1.5, False),
    "larger sizes": (1.0, 1.5, False),
    "smaller sizes": (0.5, 1.0, False),
}
# If all ways above fail, all values are multiplied by one number: a positive definite matrix stays positive definite.
# The numbers are not round, because layers rarely have a kink at such multiples of the values of the user.
_SCALES = (0.7391, 1.1834)
# Users often check a clipping rule at values that are not clipped. The ways above hardly change the magnitude of
# values. A rule that forgets to zero the gradient of clipped values is found at larger values (test_wrong_layers.py,
# "saturated").
_FAR = (100.0, 0.01)


def _ways(values: Sequence[Any], rng: np.random.Generator) -> Iterator[tuple[str, list[Any]]]:
    """Yield pairs of a description and a list of other values, such as ("larger sizes", [...])."""
    for how, (low, high, signs) in _WAYS.items():
        if not signs or any(_has_both_signs(exact(x)) for x in values):
            yield how, [placed(x, _other(exact(x), low, high, signs, rng)) for x in values]
    for scale in _SCALES:
        yield f"{scale} times the given ones", [scaled(scale, x) for x in values]


def _has_both_signs(x: np.ndarray) -> bool:
    return bool(np.iscomplexobj(x) or np.min(x, initial=0.0) < 0 < np.max(x, initial=0.0) or not np.any(x))


def _other(x: np.ndarray, low: float, high: float, signs: bool, rng: np.random.Generator) -> np.ndarray:
    size = np.abs(x)
    nonzero = size[np.isfinite(size) & (size > 0)]
    # Zeros are replaced, because zeros such as those of a unit matrix may hide a wrong gradient.
    size = np.where(size == 0, np.median(nonzero) if nonzero.size else 1.0, size) * rng.uniform(low, high, x.shape)
    if np.max(nonzero, initial=0.0) <= 1 and low < 1 < high:
        size = np.where(size > 1, 1 / size, size)
    if np.iscomplexobj(x):
        angle = rng.uniform(0, 2 * np.pi, x.shape) if signs else np.angle(x)
        other = size * np.exp(1j * angle)
    else:
        sign = -1.0 if np.max(x, initial=0.0) <= 0 > np.min(x, initial=0.0) else 1.0
        if _has_both_signs(x):
            sign = rng.choice([-1.0, 1.0], x.shape) if signs else np.where(x < 0, -1.0, 1.0)
        other = _sorted_as(x, sign * size)
    return np.where(np.isfinite(x), other, x)


def _sorted_as(x: np.ndarray, other: np.ndarray) -> np.ndarray:
    for direction in (1, -1):
        if x.ndim and x.shape[-1] > 1 and np.all(np.diff(direction * x) > 0):
            return direction * np.sort(direction * other)
    return other


# -- branches that no value takes -----------------------------------------------------------------

# An operation may choose between its operands for each entry, as those of `jnp.where` and `jnp.clip` do. For each such
# operation, this table has a function from the equation and its operands to one mask per choice: True for the entries
# that take the choice.
_Masks = dict[str, Any]
_CHOICES: dict[str, Callable[..., _Masks]] = {
    "select_n": lambda e, which, *_: _cases_of(which, len(e.invars) - 1),
    "cond": lambda e, which, *_: _cases_of(which, len(inner_jaxprs(e.params))),
    "max": lambda _, a, b: {"its first operand": a >= b, "its second operand": b >= a},
    "min": lambda _, a, b: {"its first operand": a <= b, "its second operand": b <= a},
    "clamp": lambda _, low, x, high: {"its lower limit": x <= low, "its upper limit": x >= high},
}


def _cases_of(which: Any, count: int) -> _Masks:
    return {
        ("False", "True")[i] if count == 2 else f"case {i}": which == np.asarray(i, which.dtype) for i in range(count)
    }


def _never_taken(subject: Subject, accepted: Sequence[Sequence[Any]]) -> str:
    """Return the end of a sentence, which lists the branches that no value in `accepted` takes.

    Return "" if there are none.
    """
    function, w = subject.function, subject.cotangents
    points = [(values, w) for values in accepted]
    points += [(accepted[0], {k: scaled(factor, x) for k, x in w.items()}) for factor in _FAR]
    leaves, tree = jax.tree.flatten(points[0])

    def gradients(*leaves: Any) -> tuple[list[Any], None]:
        values, w = jax.tree.unflatten(tree, leaves)
        return function.with_values(values).gradients(w), None

    try:
        jaxpr, consts, _ = stage(gradients, list(map(jax.typeof, leaves)), "backward")
    except Exception:  # the function needs concrete values, or fails under jit: other rows tell
        return ""
    if not any(has_equation(jaxpr, name) for name in _CHOICES):
        return ""

    def masks(*leaves: Any) -> dict[tuple[int, str], _Masks]:
        found, _ = _choices(jaxpr, [*consts, *leaves], [False] * len(consts) + [True] * len(leaves))
        return {(i, place): each for i, (place, each) in enumerate(found)}

    program = jax.jit(masks)
    taken = [jax.device_get(program(*jax.tree.leaves(point))) for point in points]
    missed = [
        f"{operation} is never {choice}"
        for place, choices in taken[0].items()
        for operation in place[1:]
        for choice in choices
        if not any(each[place][choice] for each in taken)
    ]
    return f"; branches that no value takes: {', '.join(dict.fromkeys(missed))}" if missed else ""


def _choices(
    jaxpr: Any, inputs: Sequence[Any], depends: Sequence[bool], within: tuple[Any, ...] = ()
) -> tuple[list[tuple[str, _Masks]], list[tuple[Any, bool]]]:
    """Evaluate a jaxpr; `depends` has one bool per input, which is False if the input depends on constants only.

    Return the choices that depend on non-constant inputs. Also return a pair for each output: the output, and whether
    it depends on non-constant inputs. A choice is a pair of an operation with its source line, such as "max at
    layers.py:12", and a dict from each branch to a scalar: whether any entry takes it.
    """
    values: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
    dependent = {v for v, does in zip(jaxpr.invars, depends, strict=True) if does}
    found: list[tuple[str, _Masks]] = []
    read = lambda atom: atom.val if is_literal(atom) else values[atom]  # noqa: E731
    is_dependent = lambda atom: not is_literal(atom) and atom in dependent  # noqa: E731
    for equation in jaxpr.eqns:
        name, operands, equations = equation.primitive.name, list(map(read, equation.invars)), (*within, equation)
        masks = list(map(is_dependent, equation.invars))
        depends_on_values = any(masks) and not _is_guard(equation)
        if name in _CHOICES and any(masks[:1] if name in ("select_n", "cond") else [depends_on_values]):
            choices = _CHOICES[name](equation, *operands)
            found.append(
                (" at ".join(filter(None, [name, line_of(equations)])), {k: jnp.any(x) for k, x in choices.items()})
            )
        if _is_call(equation):
            more, results = _choices(inner_jaxprs(equation.params)[0], operands, masks, equations)
            found += more
        else:
            results = evaluate_part(jaxpr.replace(eqns=[equation]), values, equation.outvars)
            results = [
                (x, depends_on_values and _is_followed(equation, v))
                for x, v in zip(results, equation.outvars, strict=True)
            ]
        values.update(zip(equation.outvars, [x for x, _ in results], strict=True))
        dependent.update(v for v, (_, does) in zip(equation.outvars, results, strict=True) if does)
    return found, [(read(v), is_dependent(v)) for v in jaxpr.outvars]


def _is_call(equation: Any) -> bool:
    """Return whether an equation evaluates its inner jaxpr once on its operands, as a jitted function does."""
    # The jaxpr of a scan is one iteration, and the jaxpr of a shard_map is the part of one device.
    if equation.primitive.name in ("scan", "shard_map"):
        return False
    inner = inner_jaxprs(equation.params)
    return len(inner) == 1 and not inner[0].constvars and _shapes(inner[0].invars) == _shapes(equation.invars)


def _is_guard(equation: Any) -> bool:
    """Return whether an operation distinguishes infinities and NaN from numbers, as in `jnp.where(x == jnp.inf, 0, x)`.

    No right result of a layer takes such a branch.
    """
    name, operands = equation.primitive.name, equation.invars
    is_compared_with_itself = name in ("eq", "ne") and operands[0] is operands[1]
    has_infinity = any(is_literal(a) and has_tangent(a.aval) and not np.all(np.isfinite(a.val)) for a in operands)
    return name == "is_finite" or is_compared_with_itself or has_infinity


def _is_followed(equation: Any, result: Any) -> bool:
    """Return whether a choice that depends on this result may be a branch of the layer."""
    # A choice by an integer does not count, because JAX itself compares each index with 0. The index of a `cond` is an
    # exception: JAX converts it from a bool.
    is_index_of_cond = equation.primitive.name == "convert_element_type" and equation.invars[0].aval.dtype == bool
    return has_tangent(result.aval) or result.aval.dtype == bool or is_index_of_cond


def _shapes(variables: Sequence[Any]) -> list[Any]:
    return [v.aval.shape for v in variables]


# -- cases with a reference -----------------------------------------------------------------------


def _beside_reference(subject: Subject) -> Cases:
    if subject.base is None:
        yield from _outputs_beside_reference(subject)
    assert subject.reference is not None
    expected = subject.reference.named_gradients(on_one_device(subject.cotangents))
    yield subject.case("", subject.named_gradients, expected, "by the reference")
    return "match those of the reference"


def _outputs_beside_reference(subject: Subject) -> Cases:
    """Compare the tensors and the statics (objects that are not tensors) that the function and the reference return."""
    assert subject.reference is not None
    (got, statics), (expected, right) = subject.function.run_with_statics(), subject.reference.run_with_statics()
    if len(got) != len(expected):
        returned = plural(len(got), "tensor is", "tensors are")
        raise MismatchError(f"{returned} returned, but {len(expected)} by the reference.")
    if right and not (len(statics) == len(right) and all(map(_is_same_static, statics, right))):
        raise MismatchError(f"the statics {statics!r} are returned, but {right!r} by the reference.")
    yield subject.case("", named_outputs(got), named_outputs(expected), "by the reference")
    return "match those of the reference"


def _is_same_static(a: Any, b: Any) -> bool:
    # Only Python literals are compared, as other objects may differ between runs. `repr` is equal for two NaNs.
    is_literal = isinstance(a, (str, bytes, int, float, complex, type(None)))
    return type(a) is type(b) and (not is_literal or repr(a) == repr(b))


# -- cases with numerical derivatives -------------------------------------------------------------


def _beside_numbers(subject: Subject) -> Cases:
    places = sum(min(x.size, subject.options.limit) for x in subject.gradients)
    found = _in_float64(subject) if subject.options.float64 else None
    sentence = f"match finite differences at {places} entries"
    if found is None:
        yield from _numerical_cases(subject)
        return sentence
    wide, cases = found
    yield from cases
    try:
        outputs = named_outputs(subject.outputs)
        compare(subject.case("", outputs, _cast(named_outputs(wide.outputs), outputs)))
    except MismatchError:  # the function computes other outputs in float64, as a function with random numbers does
        yield from _numerical_cases(subject)
        return sentence
    dtypes = dict.fromkeys(str(x.dtype) for x in subject.function.values if jnp.finfo(x.dtype).eps > _WIDE)
    if not dtypes:
        return sentence
    label = f" in {', '.join(dtypes)}"
    yield subject.case(
        label, subject.named_gradients, _cast(wide.named_gradients, subject.named_gradients), "in float64"
    )
    return f"{sentence},{label} too"


def _in_float64(subject: Subject) -> tuple[Subject, list[Case]] | None:
    """Return a copy of the subject with values in float64 and complex128, and the cases of this copy.

    Return None if the function returns a narrower dtype, or raises an error. Other errors occur again in the caller.
    """
    cotangents = subject.cotangents  # computed outside of enable_x64
    with jax.enable_x64(True):
        try:
            values = [in_double_precision(x) for x in subject.function.values]
            weights = {k: in_double_precision(w) for k, w in cotangents.items()}
            wide = Subject(subject.function.with_values(values), None, subject.options, subject.base, weights)
            return (wide, list(_numerical_cases(wide))) if wide.epsilon < _WIDE else None
        except Exception:
            return None


def _cast(arrays: Arrays, like: Arrays) -> dict[str, Any]:
    return {name: np.asarray(x).astype(like[name].dtype) if has_tangent(x) else x for name, x in arrays.items()}


def _numerical_cases(subject: Subject) -> Iterator[Case]:
    """Yield cases with the gradients, and central differences of the weighted sum of the outputs as expected arrays."""
    function, epsilon, terms, options = subject.function, subject.epsilon, subject.output_term_sizes, subject.options
    values, middle = list(map(exact, function.values)), list(map(exact, subject.outputs))
    relative_step = epsilon ** (1 / 3) if options.step is None else options.step

    def from_a_step(j: int, half_step: np.ndarray) -> tuple[float, float, np.ndarray]:
        ends = [placed(function.values[j], values[j] + sign * half_step) for sign in (-1, 1)]
        low, high = (function.only(j).outputs([end]) for end in ends)
        step, change, error = exact(ends[1]) - exact(ends[0]), 0.0, 0.0
        for k, w in subject.cotangents.items():
            weight, lower, upper = exact(w), exact(low[k]), exact(high[k])
            change += float(np.sum(weight * (upper - lower)).real)
            rounding = 4 * epsilon * np.abs(weight) * np.maximum(np.abs(upper), terms[k])
            # If rounding removed the change of every entry, take the error of one entry.
            error += float(max(np.sum(rounding, where=lower != upper), np.max(rounding, initial=0.0)))
            # At a kink, the slopes on both sides of the middle differ. The error includes half of this difference.
            error += abs(float(np.sum(weight * (upper - 2 * middle[k] + lower)).real))
        length = float(np.linalg.norm(step))
        return change / length, error / length, step / length

    def along(j: int, direction: np.ndarray) -> tuple[float, float, np.ndarray]:
        value, moved, whole = values[j], direction != 0, largest(values[j])
        half_steps = [(max(options.least_size, largest(value[moved])) or whole or 1.0) * direction]
        if options.step is None and whole:
            # The best step size is unknown: it may be relative to 1, to the largest entry, or to each entry. Therefore
            # try all three.
            own = np.where(np.isfinite(value) & (value != 0), np.abs(value), whole)
            half_steps += [whole * direction] if whole < 0.1 else []
            smallest = np.min(own, where=moved, initial=whole)
            half_steps += [own * direction] if smallest < min(0.1 * max(1.0, whole), whole) else []
        return min((from_a_step(j, relative_step * half_step) for half_step in half_steps), key=_relative_error)

    return directional_cases(subject, along, options.limit, "numerically", epsilon ** (1 / 3))


def _relative_error(found: tuple[float, float, np.ndarray]) -> tuple[float, float]:
    """Return a sort key: the error of a derivative relative to the derivative, at most 1, and then the error itself."""
    derivative, error, _ = found
    if not np.isfinite(error):
        return np.inf, np.inf
    return error / max(abs(derivative), error) if error else 0.0, error


# Maps the position of an array and a direction to the derivative, its largest error, and the direction after rounding.
Derivative = Callable[[int, np.ndarray], tuple[float, float, np.ndarray]]


def directional_cases(
    subject: Subject, derivative: Derivative, limit: int, source: str, rtol: float | None = None
) -> Iterator[Case]:
    """Yield cases that compare the gradient of each array, at up to `limit` entries.

    For larger arrays, they also compare it along a random direction.

    `rtol` is the default of the relative tolerance; None means the square root of the machine epsilon.
    """
    rng = subject.random(9)
    default = subject.epsilon**0.5 if rtol is None else rtol
    relative = default if subject.options.rtol is None else subject.options.rtol

    def case(name: str, got: Any, expected: Any, noise: Any) -> Case:
        tolerance = dataclasses.replace(subject.tolerance, rtol=relative, noise={name: noise})
        return Case("", {name: np.asarray(got)}, {name: np.asarray(expected)}, source, tolerance)

    for j, (name, gradient) in enumerate(subject.named_gradients.items()):
        right = exact(gradient)
        noise = max(subject.tolerance.noise.get(name, 0.0), relative * subject.options.result_sizes.get(name, 0.0))
        # An entry that is not checked is NaN in both arrays of a case.
        got, expected = np.full_like(right, np.nan), np.full_like(right, np.nan)
        errors = np.full(right.shape, noise)
        for entry in range(right.size) if right.size <= limit else rng.choice(right.size, limit, replace=False):
            index = np.unravel_index(entry, right.shape)
            got[index], expected[index] = right[index], 0
            for unit in (1, 1j) if np.iscomplexobj(right) else (1,):
                direction = np.zeros_like(right)
                direction[index] = unit
                found, error, _ = derivative(j, direction)
                expected[index] += found * np.conj(unit)
                errors[index] += error
        yield case(name, got, expected, errors)
        if right.size > limit:
            direction = exact(random_like(gradient, rng))
            found, error, taken = derivative(j, direction / np.linalg.norm(direction))
            terms = np.real(right * taken)
            # The terms of the sum may cancel, but the errors of the terms do not cancel.
            error += relative * float(np.linalg.norm(terms[np.isfinite(terms)])) + noise * right.size**0.5
            yield case(f"{name} along a random direction over all {right.size} entries", np.sum(terms), found, error)


# -- forward mode ---------------------------------------------------------------------------------

# Let J be the Jacobian of the outputs. Reverse mode computes J^T w for cotangents w, and forward mode computes J t for
# tangents t. If both modes are right, these two numbers are equal for any w and t (their real parts, if complex):
#
#     w . (J t)  =  (J^T w) . t
#
# If t is a unit vector, both sides are one entry of the gradient J^T w.


def check_forward_mode(subject: Subject) -> Cases:
    if reason := _why_not_defined(subject):
        return reason
    alone = lambda j, t: _jvp(subject, subject.function.only(j), [t])  # noqa: E731  (array j alone has a tangent)
    yield from _forward_cases(subject, alone, 0, "by jax.jvp")
    yield from _under_jit(subject, "by jax.jvp, under jit")
    yield from _under_vmap(subject, "by jax.jvp of vmap")
    return "matches reverse mode, entry by entry, also under jit and vmap"


def check_forward_over_reverse(subject: Subject) -> Cases:
    second = subject.derivative
    if reason := _why_not_defined(second):
        return reason
    over_forward = ""
    if not _why_not_defined(subject):
        yield from _over_forward(subject, "by jax.jvp of jax.jvp")
        over_forward = "; so does forward over forward"
    yield from _under_jit(second, "by jax.jvp of the gradients, under jit")
    return f"matches reverse over reverse, entry by entry, also under jit{over_forward}"


def _why_not_defined(subject: Subject) -> str:
    """Return the reason why `jax.jvp` cannot differentiate the function under test, or "" if it can."""
    try:
        _jvp(subject, subject.function, subject.function.values)
    except NoForwardModeError as error:
        return f"not defined ({error.way_out})"
    except (TypeError, RuntimeError) as error:
        # The gradients of a layer have no `jax.jvp` if `backward` is not linear, or may be differentiated only once.
        is_known = subject.base and isinstance(error, (NotLinearError, OnceDifferentiableError))
        # For a `jax.custom_vjp` function, JAX raises a TypeError, which only its message identifies.
        if not is_known and "autodiff (jvp) to a custom_vjp" not in str(error):
            raise
        return f"not defined: {first_line(error).split('. ')[0]}"
    return ""


def _jvp(subject: Subject, function: TensorFunction, tangents: Sequence[Any]) -> list[Any]:
    """Return J t, where J is the Jacobian of `function` at the arguments and t is `tangents`."""
    outputs = function.selected(subject.cotangents)
    return list(jax.jvp(outputs, tuple(function.values), tuple(tangents))[1].values())


def _zeros_but(subject: Subject, j: int, tangent: Any) -> tuple[Any, ...]:
    return tuple(tangent if i == j else jnp.zeros_like(x) for i, x in enumerate(subject.function.values))


# -- cases with derivatives by forward mode -------------------------------------------------------


def _forward_cases(
    subject: Subject, jvp: Callable[[int, Any], list[Any]], limit: int, how: str, weights: Sequence[Any] = ()
) -> Iterator[Case]:
    """Yield cases that compare gradients with w . (J t); `jvp` maps the position and the tangent of an array to J t."""
    weights = weights or list(subject.cotangents.values())

    def along(j: int, direction: np.ndarray) -> tuple[float, float, np.ndarray]:
        tangent = placed(subject.function.values[j], direction)
        terms = [exact(w) * exact(t) for w, t in zip(weights, jvp(j, tangent), strict=True)]
        size = sum(float(np.sum(np.abs(x))) for x in terms)
        return sum(float(np.sum(x).real) for x in terms), 4 * subject.epsilon * size, exact(tangent)

    return directional_cases(subject, along, limit, how)


def _under_jit(subject: Subject, how: str) -> Iterator[Case]:
    """Yield cases that compare each entry of the gradients with forward mode under jit."""
    function, limit = subject.function, subject.options.limit
    jitted = jax.jit(lambda values, tangents: _jvp(subject, function.with_values(values), tangents))
    return _forward_cases(subject, lambda j, t: jitted(function.values, _zeros_but(subject, j, t)), limit, how)


def _under_vmap(subject: Subject, how: str) -> Iterator[Case]:
    """Yield cases along random directions, with the derivatives of the first example of a batch."""
    mapped = jax.vmap(subject.function.selected(subject.cotangents))
    batched = jax.jit(lambda values, tangents: jax.jvp(mapped, values, tangents))

    def jvp(j: int, tangent: Any) -> list[Any]:
        arrays = subject.function.values, _zeros_but(subject, j, tangent)
        values, tangents = (tuple(jnp.stack([x, scaled(0.9, x)]) for x in xs) for xs in arrays)
        return [t[0] for t in batched(values, tangents)[1].values()]

    return _forward_cases(subject, jvp, 0, how)


def _over_forward(subject: Subject, how: str) -> Iterator[Case]:
    """Yield cases with second derivatives along random directions, by forward over forward.

    Reverse over reverse differentiates (J^T w) . u, with cotangents u of J^T w. Forward over forward differentiates
    w . (J u), which is the same number.
    """
    second, count = subject.derivative, len(subject.function.values)
    u = list(second.cotangents.values())

    def products(*args: Any) -> list[Any]:  # args: the values, then w
        tangents = _jvp(subject, subject.function.with_values(args[:count]), u)
        return [w * t for w, t in zip(args[count:], tangents, strict=True)]

    def jvp(j: int, tangent: Any) -> list[Any]:
        return jax.jvp(products, tuple(second.function.values), _zeros_but(second, j, tangent))[1]

    return _forward_cases(second, jvp, 0, how, weights=[np.ones(())] * len(subject.cotangents))
