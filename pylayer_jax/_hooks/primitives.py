"""The table of JAX's primitives: what a block of hooks knows about each of them. A primitive without a row is kept.

    FACTS["select_n"].recomputed      {Error.EXACT: _always, Error.RELATIVE: _always, Error.RANGE: _within}

Backward may select from x and y again if they are exact, or have an error relative to each value, as after a cast. If
the error depends on the range of a row, as in quantization, it may do so only within the operation that keeps x and y
too: the result may have a smaller range, so that its own packing would be finer. Only a limit lets it compute again:
products and convolutions, which cost too much; reductions, whose results are small; gathers, slices of what is
computed, and what else communicates along a sharded axis; random bits. Never: comparisons of floats and all else that
decides, since XLA rounds differently in another fusion; loops, callbacks and kernels. tests: hooks/test_recompute.py,
hooks/test_limit.py
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.jaxprs import all_equations
from pylayer_jax._jax.traces import Literal, Var, is_tracer
from pylayer_jax._jax.types import typeof

BODIES: Final = ("scan", "cond", "shard_map")


class Error(enum.IntEnum):
    """What is known about the error unpack(pack(x)) - x of a packed tensor x. Of known ones, a larger is coarser."""

    UNKNOWN = -1  # hooks of users
    EXACT = 0  # there is none
    RELATIVE = 1  # each value has an error relative to itself, as in a cast
    OVERFLOWING = 2  # the same, but large values become infinite: computed again as for hooks of users
    RANGE = 3  # the errors depend on the range of the values along the last axis, as in quantization


class Rounding(NamedTuple):
    """The error of a packer, and its size: half of the distance between neighbours, relative to value or range."""

    error: Error
    size: float = 0.0


EXACT: Final = Rounding(Error.EXACT)
UNKNOWN: Final = Rounding(Error.UNKNOWN)


# How far an operand is from kept tensors, whose errors it has.
SAME: Final = 0  # it is exact, or computed from tensors that the operation of the equation keeps
OTHER: Final = 1  # from tensors that another operation keeps, without a large factor
STEEP: Final = 2  # from such tensors, where a factor may enlarge an error


class Operand(NamedTuple):
    """What is known about an operand of an equation that backward may repeat."""

    value: Any  # a variable, or a number
    sources: frozenset[Any]  # the kept tensors with an error from which it is computed
    distance: int  # from the kept tensors that it is computed from
    by: str  # the primitive that computes it again; "" for a kept tensor
    is_uniform: bool = False  # whether it is the same along the last axis, as a mean: it scales a row and its error

    @property
    def aval(self) -> Any:
        return self.value.aval if isinstance(self.value, Var) else typeof(self.value)

    @property
    def is_exact(self) -> bool:
        return not self.sources

    @property
    def has_error_along_row(self) -> bool:
        return not (self.is_exact or self.is_uniform or self.aval.shape == ())


def is_steep(name: str, operands: Sequence[Operand]) -> bool:
    """Return whether a `mul` or `div` has an exact factor that varies in a row, or a number that enlarges by over 2."""
    factors = operands if name == "mul" else operands[1:]
    factor = next((x.value for x in factors if x.is_exact and not x.is_uniform), None)
    if factor is None:
        return False
    if not is_number(factor):
        return True
    size = np.abs(np.asarray(factor))
    return not (size <= 2 if name == "mul" else size >= 0.5)  # True for NaN


# Takes an equation with one result.
Condition = Callable[[Any, Sequence[Operand]], bool]


@functools.cache
def _is_integer(dtype: Any) -> bool:
    return dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer)


_always: Condition = lambda _, __: True
_of_integers: Condition = lambda e, xs: all(_is_integer(x.aval.dtype) for x in (*e.outvars, *xs))
_to_float: Condition = lambda e, xs: jnp.issubdtype(e.params["new_dtype"], jnp.inexact) or _of_integers(e, xs)
_widens: Condition = lambda e, xs: _is_integer(xs[0].aval.dtype) or np.can_cast(xs[0].aval.dtype, e.params["new_dtype"])
_within: Condition = lambda _, xs: all(x.distance == SAME for x in xs)
_not_steep: Condition = lambda _, xs: all(x.distance < STEEP for x in xs)
_of_same_and_not_steep: Condition = lambda e, xs: _not_steep(e, xs) and _of_same_tensors(e, xs)
_with_zero: Condition = lambda _, xs: any(is_number(x.value) and x.value == 0 for x in xs)
_of_tanh: Condition = lambda _, xs: xs[0].by == "tanh"
_by_exact_along_row: Condition = lambda _, xs: not xs[1].has_error_along_row
_one_has_error_along_row: Condition = lambda _, xs: sum([x.has_error_along_row for x in xs]) <= 1
_square_or_within: Condition = lambda e, xs: e.params["y"] == 2 or (e.params["y"] > 0 and _within(e, xs))


def _splits_no_row(equation: Any, operands: Sequence[Operand]) -> bool:
    # From [8] to [8, 1], one row, whose error depends on all values, becomes eight rows of one value.
    ends = [x.aval.shape[-1:] for x in operands]
    return equation.outvars[0].aval.shape[-1:] != (1,) or all(end in ((), (1,)) for end in ends)


def _within_or_of_sum(equation: Any, operands: Sequence[Operand]) -> bool:
    # What saturates has a small range, beside which the error of its operand is large if another operation keeps this,
    # as a gate with a massive channel. Within a gelu, the operand is a sum or a product.
    return _within(equation, operands) or (_not_steep(equation, operands) and operands[0].by in ("add", "mul", "sub"))


def _of_same_tensors(_: Any, operands: Sequence[Operand]) -> bool:
    # All operands follow from the same tensors, or are numbers: x + x³ and 1 + x, but not x - mean.
    return len({x.sources for x in operands if x.sources}) == 1 and all(
        x.sources or is_number(x.value) for x in operands
    )


_SIGMOIDS: Final = "erf", "logistic", "tanh"


def _of_far_values(equation: Any, operands: Sequence[Operand]) -> bool:
    # exp(h) - 1 of a rounded exp(h) would be 0 for small h. But 1 - tanh(h) is small only where the gradient is too.
    if not _of_same_tensors(equation, operands):
        return False
    is_sub, numbers = equation.primitive.name == "sub", [np.real(x.value) for x in operands if x.is_exact]
    is_sum = all((n > 0) != is_sub for n in numbers or [1])  # of values that are taken as positive, as x + x³
    return is_sum or any(not x.is_exact and (x.distance == SAME or x.by in _SIGMOIDS) for x in operands)


def is_repeatable(equation: Any) -> bool:
    condition = FACTS[equation.primitive.name].recomputed.get(Error.EXACT)
    values = [a.val if isinstance(a, Literal) else a for a in equation.invars]
    return condition is not None and condition(equation, [Operand(x, frozenset(), SAME, "") for x in values])


def _repeats_exactly(equation: Any, _: Sequence[Operand]) -> bool:
    inner = all_equations(equation.params["call_jaxpr"])
    return all(e.primitive.name == "jit" or is_repeatable(e) for e in inner)


def _either(*conditions: Condition) -> Condition:
    return lambda equation, operands: any(condition(equation, operands) for condition in conditions)


class Facts(NamedTuple):
    """What is known about one primitive."""

    recomputed: Mapping[Error, Condition] = {}  # the errors of its operands from which its result may be computed again
    is_move: bool = False  # it computes nothing: its result has the values of its operand, if it has one
    is_view: bool = False  # its result has the origin of its operand, and is left unpacked where the operand is
    keeps_nothing: bool = False  # its vjp keeps no array
    keeps_numbers: bool = False  # its vjp keeps no array where an operand (for `div`, the divisor) is a number
    amplifies: bool = False  # it can enlarge an error: a residual that it reads is kept, or made of exact tensors
    # The transpose of its derivative compares an operand, as for max pooling, or solves with it: with L and U of a
    # matrix in one array, which have very different sizes in one row. Hooks that round do not pack such an operand.
    needs_exact: bool = False
    is_product: bool = False  # a product of matrices or a convolution
    decides: bool = False  # its result changes by leaps
    for_limit: bool = False  # only a limit lets backward compute it again, unless it is a view of what is outside
    per_element: int = 1  # about how many operations an element of the result takes; products and reductions: more
    # (equation, d) -> c: if an operand is (1 + e)ᵈ times as large, the result is (1 + e)ᶜ times as large. None: c is d.
    degree: Callable[[Any, float], float] | None = None
    adds_degrees: bool = False  # whether c is the sum for all operands, as of a product; else it is that of the largest


def _facts() -> dict[str, Facts]:
    exact, relative, any_error = Error.EXACT, Error.RELATIVE, tuple(Error)

    def facts(names: str, recomputed: dict[Error, Condition] | None = None, **more: Any) -> dict[str, Facts]:
        found = recomputed or {}
        if Error.UNKNOWN in found:
            found = found | {Error.OVERFLOWING: found[Error.UNKNOWN]}
        return {name: Facts(found, **more) for name in names.split()}

    def elementwise(range_: Condition | None = None, integers: bool = False) -> dict[Error, Condition]:
        found = {exact: _always, relative: _always}
        return found | ({Error.RANGE: range_} if range_ else {}) | ({Error.UNKNOWN: _of_integers} if integers else {})

    moves = {**dict.fromkeys((exact, relative), _always), **dict.fromkeys((Error.UNKNOWN, Error.RANGE), _splits_no_row)}
    everywhere = dict.fromkeys(any_error, _always)
    of_integers = dict.fromkeys(any_error, _of_integers)
    cast = {exact: _to_float, Error.UNKNOWN: _widens, relative: _to_float, Error.RANGE: _to_float}
    only_exact: dict[Error, Condition] = {exact: _always}
    view: dict[str, Any] = {"is_view": True, "keeps_nothing": True}
    sums = elementwise(_either(_one_has_error_along_row, _of_same_and_not_steep), integers=True) | {
        relative: _either(_of_integers, _of_far_values)
    }
    return {
        **facts("broadcast_in_dim copy iota reshape squeeze transpose", moves, is_move=True, **view),
        **facts("name pvary stop_gradient", everywhere, is_move=True, **view),
        **facts("device_put pcast sharding_constraint", **view),
        # A slice, and a reversal, communicate along a sharded axis.
        **facts("rev slice split unstack", **view, for_limit=True),
        **facts("dynamic_slice", is_view=True, for_limit=True),
        **facts("convert_element_type", cast, **view),
        **facts("new_ref psum real imag", keeps_nothing=True),
        **facts("concatenate pad reduce_sum", keeps_nothing=True, for_limit=True),
        **facts("cumsum cumlogsumexp cummax cummin cumprod gather stack tile", for_limit=True),
        **facts("reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_window_sum", for_limit=True),
        # Not `scatter`: which of the values for one index it takes may differ from run to run.
        **facts("dynamic_update_slice scatter-add scatter-max scatter-min scatter-mul scatter-sub", for_limit=True),
        **facts("fft", for_limit=True, per_element=50),
        **facts("random_fold_in random_seed random_split random_unwrap random_wrap", for_limit=True),
        **facts("bitcast_convert_type shift_left shift_right_arithmetic shift_right_logical", for_limit=True),
        **facts("random_bits threefry2x32", for_limit=True, per_element=100),
        **facts("neg", everywhere, keeps_nothing=True),
        **facts("add add_any sub", sums, keeps_nothing=True),
        **facts(
            "mul",
            elementwise(_either(_one_has_error_along_row, _within, _of_same_and_not_steep), integers=True),
            keeps_numbers=True,
            adds_degrees=True,
        ),
        **facts("div", elementwise(_by_exact_along_row), keeps_numbers=True, amplifies=True, adds_degrees=True),
        **facts("square", elementwise(_always), degree=lambda _, d: 2 * d),
        **facts("integer_pow", elementwise(_square_or_within), degree=lambda e, d: abs(e.params["y"]) * d),
        # 1 - y², in the derivative of tanh. It multiplies an error of y, but not one of the operand of tanh.
        **facts("one_minus_square", {exact: _always, relative: _of_tanh, Error.RANGE: _of_tanh}),
        # Their derivatives compare; a cast keeps the sign alone. tests: test_the_second_derivative_of_a_bound
        **facts("abs", elementwise()),
        **facts("clamp", only_exact),
        **facts("max min", only_exact | {relative: _with_zero}),
        **facts("select_n", elementwise(_within)),
        **facts("logistic", elementwise(_within_or_of_sum), per_element=10),
        **facts("erf tanh", elementwise(_within_or_of_sum), per_element=10, degree=lambda _, d: min(d, 1)),
        **facts("cbrt", elementwise(), per_element=10),
        **facts("rsqrt sqrt", elementwise(), per_element=10, amplifies=True, degree=lambda _, d: d / 2),
        **facts("exp exp2 expm1 log log1p pow", only_exact, per_element=10, amplifies=True),
        **facts(
            "acos acosh asin asinh atan atan2 atanh cos cosh erf_inv erfc sin sinh tan", only_exact, per_element=10
        ),
        **facts("and not or xor", of_integers),
        **facts("custom_jvp_call", {exact: _repeats_exactly}, per_element=10, amplifies=True),  # as jax.nn.relu
        **facts("eq ge gt le lt ne", of_integers, decides=True),
        **facts("argmax argmin ceil floor is_finite rem round sign sort top_k", decides=True),
        **facts("reduce_window_max reduce_window_min select_and_gather_add", needs_exact=True),
        **facts("custom_linear_solve triangular_solve", needs_exact=True),
        **facts("conv_general_dilated dot_general ragged_dot_general", is_product=True, for_limit=True),
    }


class _Table(dict[str, Facts]):
    def __missing__(self, name: str) -> Facts:
        return Facts()


FACTS: Final = _Table(_facts())


def is_number(value: Any) -> bool:
    """Return whether a value is a concrete scalar, the same in all runs of a program."""
    return not (is_tracer(value) or type(value) is Var) and np.ndim(value) == 0
