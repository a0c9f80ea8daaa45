"""Decides for each residual of a layer or an operation whether it is packed, recomputed in backward, or kept as it is.

The vjp of y = tanh(x) computes 1 - y² in the forward pass, and keeps it as a residual. In a block of
`quantize_saved(8)`, for which `Pair.error_model` is `ErrorModel.ABSOLUTE`, `pack_residuals` keeps the values of
`jnp.tanh(x @ w)` thus:

    value                 decision                     how it is kept
    y                     packed                       Residual(PackedTensor, [8-bit values, lows, highs])
    1 - y²                recomputed from y            Residual(Recomputed(one_minus_square), [the residual above])
    w, from outside       not packed                   w

In place of each value in the left column, JAX keeps the arrays in the right column as residuals. JAX keeps each of
these arrays once.

A `Recorder` is a trace that records the equations of the forward pass. `_plan` decides for each residual. For each
residual, `_derivation` follows the recorded equations back to the tensors that have to be packed. `_derivation` follows
an equation only if recomputing its result amplifies the packing error at most a little. The table `_RECOMPUTED` lists
the operations that backward may evaluate again. `_carry_out` packs these tensors. `_remember` stores the residuals of
the packed tensors in the pair of hooks. If a later operation keeps the same tensor, the pair does not pack the tensor
again.

A comparison of floating-point numbers is never recomputed from a packed value: `x == max(x)` would become False
everywhere. tests: hooks/test_derived.py
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.jaxprs import inner_jaxprs, is_inlinable, jaxpr_and_consts, stage, with_users_line
from pylayer_jax._jax.rule_function import RuleFunction, Values, apply, barrier, merge, select
from pylayer_jax._jax.traces import (
    PassThroughTrace,
    current_trace,
    eval_jaxpr,
    is_staged,
    is_staging,
    is_tracer,
    is_unknown,
    set_current_trace,
    without_pass_through,
)
from pylayer_jax._jax.types import as_arrays, has_tangent, is_key, is_nan_reported, is_ref, typeof, unchecked

from .active import SUSPENDED, active, hooks_suspended, is_reported
from .pack import ErrorModel, Origin, PackedTensor, Pair, Residual, pack_tensor, reference

# -- the equations of the forward pass -----------------------------------------------------------------


class Equation(NamedTuple):
    """A recorded equation with one result."""

    primitive: Any
    params: dict[str, Any]
    inputs: Sequence[Any]
    value: Any
    number: int  # the equations are numbered in the order in which they ran

    @property
    def name(self) -> str:
        return self.primitive.name


class Recorder(PassThroughTrace):
    """A trace that records an `Equation` for each JAX operation with exactly one result.

    This trace does not transform an operation, but applies the operation in the parent trace. If code calls a short
    jitted function, this trace records the operations inside the function instead of the call.
    """

    __slots__ = ("equations",)

    def __init__(self, parent_trace: Any) -> None:
        super().__init__(parent_trace)
        self.equations: dict[int, Equation] = {}  # id of a value -> the equation that computed the value

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        if primitive.name == "jit" and (opened := small_jaxpr(params)) is not None:
            jaxpr, consts = opened
            with set_current_trace(self):
                return eval_jaxpr(with_users_line(jaxpr), consts, *tracers)
        with set_current_trace(self.parent_trace):
            result = primitive.bind(*tracers, **params)
        # A primitive that returns its operand computes nothing.
        if not primitive.multiple_results and id(result) not in map(id, tracers):
            self.equations[id(result)] = Equation(primitive, params, tracers, result, len(self.equations))
        return result


_LONGEST_OPENED: Final = 8  # number of equations; a longer jitted function stays one operation


def small_jaxpr(params: dict[str, Any]) -> tuple[Any, Sequence[Any]] | None:
    """Return the jaxpr and the constants of a jitted function if its jaxpr is small.

    Most functions of jax.numpy are small.

    Return None for a large one.
    """
    jaxpr, consts = jaxpr_and_consts(params["jaxpr"])
    is_small = len(jaxpr.eqns) <= _LONGEST_OPENED and not [j for e in jaxpr.eqns for j in inner_jaxprs(e.params)]
    return (jaxpr, consts) if is_small and not jaxpr.effects and is_inlinable(params) else None


# -- equations that backward recomputes ------------------------------------------------------------------

MOVES: Final = frozenset(
    ("broadcast_in_dim", "copy", "copy_p", "expand_dims", "iota", "reshape", "rev", "squeeze", "transpose")
)
_Equations = dict[int, Equation]


class _Condition(NamedTuple):
    """A condition under which backward may recompute the result of an operation from operands that backward unpacks."""

    model: ErrorModel  # the least error model of the pair
    applies: Callable[[Equation, _Equations], bool] = lambda *_: True


def _is_integer(value: Any) -> bool:
    dtype = typeof(value).dtype
    return dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer)


def _of_integers(equation: Equation, _: _Equations) -> bool:
    return all(map(_is_integer, equation.inputs))


def _widens(equation: Equation, _: _Equations) -> bool:
    (x,) = equation.inputs
    return _is_integer(x) or np.can_cast(typeof(x).dtype, equation.params["new_dtype"])


def _keeps_rows(equation: Equation, _: _Equations) -> bool:
    """Return False if the result's last axis has length 1, but the last axis of an operand is longer.

    For example, the function returns False for a reshape from [8] to [8, 1]. The operand is one row with eight values,
    and the result is eight rows with one value each.

    An operand of shape [8] would be packed as one row, with an error that depends on all 8 values. In an array of shape
    [8, 1], each row has only one value, so the packing error of a value depends on this value alone. Other operations
    that change the last axis, such as a reshape to [4, 2], are accepted.
    """
    last_axes = [np.shape(x)[-1:] for x in equation.inputs]
    return np.shape(equation.value)[-1:] != (1,) or all(axis in ((), (1,)) for axis in last_axes)


def _with_a_number(equation: Equation, equations: _Equations) -> bool:
    """Return whether an operand (in a division: the divisor) is a scalar, or is constant along its last axis."""
    candidates = equation.inputs[1:] if equation.name == "div" else equation.inputs
    return any(_is_constant_along_rows(x, equations) for x in candidates)


def _is_constant_along_rows(value: Any, equations: _Equations) -> bool:
    shape = np.shape(value)
    if not shape or shape[-1] == 1:
        return True
    equation = equations.get(id(value))
    if equation is None or equation.name != "broadcast_in_dim":
        return False
    operand, dimensions = np.shape(equation.inputs[0]), equation.params["broadcast_dimensions"]
    # In two cases, the broadcast repeats values along the last axis of its result. In the first case, no axis of the
    # operand becomes the last axis of the result. In the second case, an operand axis of length 1 becomes the last axis
    # of the result.
    return not dimensions or dimensions[-1] != len(shape) - 1 or operand[-1] == 1


def _is_low_power(equation: Equation, _: _Equations) -> bool:
    return equation.params["y"] in (2, 3)


_RECOMPUTED: Final[dict[str, list[_Condition]]] = {
    **{name: [_Condition(ErrorModel.ANY, _keeps_rows)] for name in MOVES},
    **{name: [_Condition(ErrorModel.ANY, _of_integers)] for name in ("and", "not", "or", "xor")},
    **{name: [_Condition(ErrorModel.ANY, _of_integers)] for name in ("eq", "ge", "gt", "le", "lt", "ne")},
    "neg": [_Condition(ErrorModel.ANY)],
    "convert_element_type": [_Condition(ErrorModel.ANY, _widens)],
    "mul": [_Condition(ErrorModel.ANY, _of_integers), _Condition(ErrorModel.RELATIVE, _with_a_number)],
    "div": [_Condition(ErrorModel.RELATIVE, _with_a_number)],
    "square": [_Condition(ErrorModel.RELATIVE)],
    "integer_pow": [_Condition(ErrorModel.RELATIVE, _is_low_power)],
    "add": [_Condition(ErrorModel.ANY, _of_integers), _Condition(ErrorModel.ABSOLUTE, _with_a_number)],
    "sub": [_Condition(ErrorModel.ANY, _of_integers), _Condition(ErrorModel.ABSOLUTE, _with_a_number)],
    # JAX's primitive for 1 - y², in the derivative of tanh
    "one_minus_square": [_Condition(ErrorModel.ABSOLUTE)],
}


def _may_be_recomputed(equation: Equation, equations: _Equations, model: ErrorModel) -> bool:
    conditions = _RECOMPUTED.get(equation.name, ())
    return any(model >= condition.model and condition.applies(equation, equations) for condition in conditions)


def is_number(value: Any) -> bool:
    """Return whether a value is a concrete scalar, which is the same in all runs of a program."""
    return np.ndim(value) == 0 and not is_tracer(value)


def _is_larger(values: Sequence[Any], tensor: Any) -> bool:
    """Return whether the total size of `values` could exceed the size of `tensor`."""

    def n_bytes(aval: Any) -> int:
        return aval.size * aval.dtype.itemsize

    try:
        return sum(n_bytes(aval) for aval in map(typeof, values) if aval.ndim) > n_bytes(typeof(tensor))
    except jax.errors.InconclusiveDimensionOperation:  # symbolic dimensions of `jax.export`
        return True


# -- residuals as expressions ----------------------------------------------------------------------------


class Recomputed(NamedTuple):
    """A function that repeats one operation of the forward pass in backward, to recompute the result of the operation.

    An instance of this class is the attribute `function` of a `Residual`.

    It holds constant operands.
    """

    primitive: Any
    params: dict[str, Any]
    operands: Sequence[Any]  # the constant operands, and None for each input of the residual
    is_input: Sequence[bool]

    @unchecked
    def __call__(self, *inputs: Any) -> Any:
        result = self.primitive.bind(*merge(self.is_input, inputs, self.operands), **self.params)
        # The operation may be a jitted function that computes a view of a value from outside the block of hooks. For a
        # jitted function, `bind` returns a list with the one result.
        return result[0] if self.primitive.multiple_results else result


def recomputed(primitive: Any, params: dict[str, Any], operands: Sequence[Any], residual_of: Any) -> Residual:
    """Return a `Residual` that recomputes an operation's result.

    The function `residual_of` returns the residual of an operand, or None for a constant operand.
    """
    residuals = [residual_of(x) for x in operands]
    is_input = [r is not None for r in residuals]
    numbers = [None if is_one else x for x, is_one in zip(operands, is_input, strict=True)]
    return Residual(Recomputed(primitive, params, numbers, is_input), select(residuals, is_input))


# This function is defined at module level. A nested function that calls itself is a reference cycle, and the cycle
# would keep arrays alive.
def fold(
    residual: Any, of_array: Callable[[Any], Any], of_residual: Callable[[Any, list[Any]], Any], done: dict[int, Any]
) -> Any:
    """Evaluate an expression: `of_array(x)` for an array x, `of_residual(function, inputs)` for a `Residual`.

    The list `inputs` holds the result of this evaluation for each input of the `Residual`.

    `done` maps the id of each visited `Residual` to its result. Therefore the function visits a shared `Residual` only
    once.
    """
    if not isinstance(residual, Residual):
        return of_array(residual)
    if id(residual) not in done:
        inputs = [fold(x, of_array, of_residual, done) for x in residual.inputs]
        done[id(residual)] = of_residual(residual.function, inputs)
    return done[id(residual)]


def leaves_of(residual: Any) -> list[Any]:
    """Return the distinct leaves of an expression.

    Each leaf is an array, or an integer that gives the position of an array in a list.
    """
    visited: dict[int, Any] = {}
    to_visit = [residual]
    while to_visit:
        x = to_visit.pop()
        if id(x) not in visited:
            visited[id(x)] = x
            to_visit += reversed(x.inputs) if isinstance(x, Residual) else ()
    return [x for x in visited.values() if not isinstance(x, Residual)]


class PackedResiduals:
    """Expressions for the residuals of a layer or an operation, without the arrays that JAX keeps for them.

    In these expressions, an integer stands for each array that JAX keeps. This integer is the position of the array in
    the list of arrays that JAX keeps.
    """

    def __init__(self, residuals: Sequence[Any], n_arrays: int) -> None:
        self.residuals = residuals
        self.n_arrays = n_arrays

    @staticmethod
    def of(residuals: Sequence[Any], marks: Sequence[Any] = ()) -> tuple[PackedResiduals, list[Any]]:
        """Replace arrays by positions. Return the `PackedResiduals`, and a list of the arrays that JAX has to keep.

        The list contains each array of the residuals exactly once, followed by the arrays in `marks`.
        """
        numbered: dict[int, tuple[int, Any]] = {}  # id of an array -> its position, and the array
        distinct: dict[Any, Residual] = {}  # the residuals, each once, by their functions and inputs
        done: dict[int, Any] = {}

        def position(array: Any) -> int:
            return numbered.setdefault(id(array), (len(numbered), array))[0]

        def shared(function: Any, inputs: list[Any]) -> Residual:
            key = id(function), *[x if isinstance(x, int) else id(x) for x in inputs]
            return distinct.setdefault(key, Residual(function, inputs))

        placed = [fold(residual, position, shared, done) for residual in residuals]
        arrays = [*[array for _, array in numbered.values()], *marks]
        return PackedResiduals(placed, len(arrays)), arrays

    @property
    def owners(self) -> list[int]:
        """A list with one entry per array: the index of the first tensor that backward restores from the array.

        The list leaves out the arrays that only mark tensors for `saved_tensors_report`.
        """
        pairs = [(i, owner) for owner, residual in enumerate(self.residuals) for i in leaves_of(residual)]
        return [owner for _, owner in sorted(dict(reversed(pairs)).items())]

    def unpack(self, arrays: Sequence[Any], cotangents: Sequence[Any]) -> UnpackedTensors:
        """Return the tensors, each unpacked when it is first read.

        In staged code, XLA does not unpack a tensor before it has computed `cotangents`.
        """
        return UnpackedTensors(self.residuals, arrays, cotangents)


@contextlib.contextmanager
def outside_blocks() -> Generator[None]:
    """Enter a context in which saved-tensor hooks pack nothing.

    In this context, saved-tensor hooks are suspended. Operations skip the trace of the block. JAX passes each operation
    directly to the next outer trace that is not a `PassThroughTrace`.
    """
    with hooks_suspended(), set_current_trace(without_pass_through(current_trace())):
        yield


class UnpackedTensors(Sequence[Any]):
    """A sequence of the tensors that a layer or operation keeps. Each tensor is unpacked when it is first read."""

    def __init__(self, residuals: Sequence[Any], arrays: Sequence[Any], cotangents: Sequence[Any]) -> None:
        self._residuals, self._arrays = residuals, arrays
        self.cotangents = list(cotangents)  # the barriers replace these cotangents
        self._waiting: dict[int, Any] = {}  # position -> the array behind a barrier
        self._done: dict[int, Any] = {}  # id of a residual -> its tensor

    def __len__(self) -> int:
        return len(self._residuals)

    def __getitem__(self, index: Any) -> Any:
        with outside_blocks():
            return self._tensors([self._residuals[index]])[0]

    def all(self) -> list[Any]:
        """Return all tensors. They share one barrier. The caller has entered `outside_blocks()`."""
        return self._tensors(self._residuals)

    def _tensors(self, residuals: Sequence[Any]) -> list[Any]:
        restored = [r for r in residuals if isinstance(r, Residual)]  # the other tensors need no barrier
        if restored:
            self._wait(dict.fromkeys(i for r in restored for i in leaves_of(r) if i not in self._waiting))
            for residual in restored:
                fold(residual, self._waiting.__getitem__, _call, self._done)
        return [self._done[id(r)] if isinstance(r, Residual) else self._arrays[r] for r in residuals]

    def _wait(self, positions: Collection[int]) -> None:
        """Put arrays behind a barrier, so that XLA does not read them before it has the cotangents.

        Without the barrier, XLA may unpack a tensor right after packing, and hold all tensors until backward begins.
        The barrier also returns the cotangents. XLA waits for the cotangents only if backward uses these returned
        cotangents, not the original ones.
        """
        arrays = as_arrays([self._arrays[i] for i in positions])  # JAX may pass numbers
        present = [i for i, c in enumerate(self.cotangents) if c is not None]
        if present and any(map(is_staged, arrays)):
            values = barrier([*arrays, *[self.cotangents[i] for i in present]], waits=True)
            arrays = values[: len(arrays)]
            for i, cotangent in zip(present, values[len(arrays) :], strict=True):
                self.cotangents[i] = cotangent
        self._waiting |= zip(positions, arrays, strict=True)


def _call(function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    return function(*inputs)


# -- the tensors that a pair remembers -------------------------------------------------------------------


class _Remembered(NamedTuple):
    """How a pair of hooks kept one tensor for backward. This record keeps no array and no result of a hook alive."""

    trace: Callable[[], Any]  # a tracer is valid only in the trace in which it was made
    # The `PackedResiduals` of the layer or operation that kept the tensor. After JAX has dropped them, a gradient packs
    # the tensor again, and so asks `only` again. tests: hooks/test_only.py
    owner: Callable[[], Any]
    residual: Any  # an expression with weak references to arrays and to `PackedTensor`s
    name: str  # the name of the tensor


def _remember(known: _KnownResiduals, plan: _Plan, values: Iterable[Any], owner: PackedResiduals) -> None:
    """Store, in the pair of hooks, the residual of each of `values` whose residual is known."""
    trace, done = weakref.ref(current_trace()), dict[int, Any]()
    index_of = {id(x): i for x, i in plan.packed}
    for x, residual in known.items(values):
        was_not_packed = id(x) in index_of and not isinstance(residual, Residual)
        # `_recall` compares this name.
        name = known.packing.origin_of(x, index_of[id(x)]).name if was_not_packed else ""
        weak = fold(residual, reference, _with_weak_hook, done)
        known.packing.pair.residuals.put(x, _Remembered(trace, weakref.ref(owner), weak, name))


def _with_weak_hook(function: Any, inputs: list[Any]) -> Residual:
    return Residual(weakref.ref(function) if isinstance(function, PackedTensor) else function, inputs)


def _recall(pair: Pair, tensor: Any, name_of: Callable[[], str]) -> Any:
    """Return the residual that the pair of hooks has stored for a tensor, or None if there is none.

    In eager mode, `checkpoint_name` returns its argument itself. So an operation may keep a tensor that the hooks leave
    unpacked, and `checkpoint_name` may give this tensor a name afterwards. Then `by_name` may select this name.
    Therefore also return None for a tensor that the hooks left unpacked, if the tensor has got a new name since then.
    """
    found: _Remembered | None = pair.residuals.get(tensor)
    if found is None or found.trace() is not current_trace() or found.owner() is None:
        return None
    if not isinstance(found.residual, Residual) and name_of() not in ("", found.name):
        return None
    strong: list[Any] = []  # the arrays and hooks' results, or None for each that was deleted

    def of_array(weak: Any) -> Any:
        strong.append(weak())
        return strong[-1]

    def of_residual(function: Any, inputs: list[Any]) -> Residual:
        if isinstance(function, weakref.ref):
            strong.append(function())
            return Residual(strong[-1], inputs)
        return Residual(function, inputs)

    residual = fold(found.residual, of_array, of_residual, {})
    return None if [x for x in strong if x is None] else residual


# -- marks for the report --------------------------------------------------------------------------------


class Mark(RuleFunction):
    """A function that marks a tensor x which JAX keeps for backward, so that `saved_tensors_report` finds x.

    The function returns an empty array. The shape of this array is the shape of the operand with an additional first
    axis of size 0. For an operand f32[8,4], the result is f32[0,8,4].

    JAX keeps this array as a residual. The report follows this residual back through the jaxpr, and so finds the tensor
    x. Each enclosing scan or `jax.vmap` adds one axis to the shape of the empty array that marks a tensor. For example,
    the shape is f32[3,0,8,4] in a scan of length 3.
    """

    def __init__(self, aval: Any, origin: Origin, is_recomputed: bool) -> None:
        self.name, self.origin, self.is_recomputed = "mark", origin, is_recomputed
        self.jaxpr, _, _ = stage(lambda x: ([jax.lax.slice_in_dim(x[None], 0, 0)], None), [aval], self.name)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        return apply(self, primals), [None]


# -- packing ---------------------------------------------------------------------------------------------


def keeps_residuals(tangents: Sequence[Any]) -> bool:
    """Return whether a derivative rule keeps residuals for the given tangents. A tangent of None means zero.

    Eager forward mode keeps none.
    """
    return any(is_unknown(t) or is_staged(t) for t in tangents)


class Packing(NamedTuple):
    """A description of a layer or an operation, for `pack_residuals`."""

    pair: Pair  # the pair of the block in which the layer or operation was applied
    owner: str  # the name of the layer or operation and the kind of the tensors, for messages: "Tanh, saved tensor"
    operands: Sequence[Any]
    origin_of: Callable[[Any, int], Origin]  # a value, the index of the tensor that needs it -> the value's origin
    left_unpacked: Sequence[tuple[Any, Any]]  # the operands that are not packed, with their residuals
    equations: _Equations  # the equations of the forward pass, if they were recorded


def pack_residuals(
    packing: Packing, tensors: Sequence[Any], outputs: Sequence[Any]
) -> tuple[PackedResiduals, list[Any], list[Any]]:
    """Pack the tensors that a layer or an operation keeps.

    JAX keeps a tensor only once, even if it occurs several times in `tensors`. The tensor is either packed, or kept
    unpacked, or recomputed in backward.

    `outputs` are the results of the layer or operation. If backward can compute an output from the packed residuals,
    the pair of hooks stores the expression that computes this output. If a later operation keeps this output as a
    residual, backward recomputes the output. The hooks do not pack the output.

    Returns:
        The residuals of the tensors, the arrays that JAX has to keep, and the outputs.
    """
    if active.value is SUSPENDED:  # an enclosing operation packs the residuals
        return *PackedResiduals.of(tensors), list(outputs)
    if packing.pair.packs_nothing:
        return *PackedResiduals.of(tensors, _marks(packing, tensors, ())), list(outputs)
    known = _KnownResiduals(packing)
    plan = _plan(known, tensors)
    behind = _carry_out(known, plan, outputs)  # the outputs; in staged code, as they come out of a barrier
    output_equations = _recomputable(known, outputs)  # now that the residuals of `tensors` are known
    known.put_recomputed(output_equations)
    known.put_equal(behind, outputs)  # later code reads `behind`, so the pair has to remember these arrays
    packed, arrays = PackedResiduals.of([known.get(x) for x in tensors], _further_residuals(known, plan, tensors))
    by_equation = [equation.value for equation in (*plan.recomputed, *output_equations)]
    _remember(known, plan, [*[x for x, _ in plan.packed], *by_equation, *behind], packed)
    return packed, arrays, behind


class _KnownResiduals:
    """The residuals that are known so far for the values in one layer or one operation."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self._found = {id(x): residual for x, residual in packing.left_unpacked}  # None: the value has no residual
        # In eager mode, such an operand may be a scalar that the block computed. This is a residual, not a constant.
        self._packable_operands = {id(x) for x in packing.operands} - self._found.keys()
        self._is_program = is_staging()

    def get(self, value: Any, index: int = 0) -> Any:
        """Return the residual of a value, or None if there is none.

        `value` is a tensor of the layer or operation, or a value from which the backward pass computes such a tensor.
        `index` is the index of this tensor.
        """
        if id(value) not in self._found:
            is_left = _is_never_packed(value, self._is_program)
            self._found[id(value)] = value if is_left else self._recalled(value, index)
        return self._found[id(value)]

    def put(self, value: Any, residual: Any) -> None:
        self._found[id(value)] = residual

    def items(self, values: Iterable[Any]) -> list[tuple[Any, Any]]:
        """Return a list of the pairs (value, residual) for those `values` that have a known residual."""
        pairs = [(x, self._found.get(id(x))) for x in values]
        return [(x, residual) for x, residual in pairs if residual is not None]

    def is_constant(self, value: Any) -> bool:
        """Return whether a value is a number that is the same in all runs.

        If a number is an operand that the hooks may pack, `is_constant` returns False.
        """
        return is_number(value) and id(value) not in self._packable_operands

    def input_of(self, operand: Any) -> Any:
        """Return the residual for an operand of an equation that backward recomputes; return None for a constant."""
        return None if self.is_constant(operand) else self.get(operand)

    def put_recomputed(self, equations: Sequence[Equation]) -> None:
        """For each equation, store a residual from which backward recomputes the result of the equation.

        `equations` must list the equations in the order in which the forward pass evaluated them.
        """
        for e in equations:
            self.put(e.value, recomputed(e.primitive, e.params, e.inputs, self.input_of))

    def put_equal(self, values: Sequence[Any], others: Sequence[Any]) -> None:
        """Give each value in `values` the residual of the value at the same position in `others`.

        In staged code, `others` are the operands of an optimization barrier, and `values` are its results.
        """
        self._found |= {id(x): self._found.get(id(other)) for x, other in zip(values, others, strict=True)}

    def _recalled(self, value: Any, index: int) -> Any:
        return _recall(self.packing.pair, value, lambda: self.packing.origin_of(value, index).name)


class _Plan(NamedTuple):
    """A plan for the tensors of a layer or an operation: which are packed, and how the others are recomputed."""

    packed: Sequence[tuple[Any, int]]  # the tensors to pack, each with the index of the first tensor that needs it
    recomputed: Sequence[Equation]  # the equations that backward evaluates again


def _plan(known: _KnownResiduals, tensors: Sequence[Any]) -> _Plan:
    """Decide which tensors to pack, and which equations backward evaluates again.

    The function follows the recorded equations from each of `tensors` back to the tensors that have to be packed.
    """
    pair, origin_of = known.packing.pair, known.packing.origin_of
    to_pack: dict[int, tuple[Any, int]] = {}
    equations: dict[int, Equation] = {}

    def is_given(x: Any, i: int) -> bool:
        return id(x) in to_pack or id(x) in equations or known.get(x, i) is not None

    for i, tensor in enumerate(tensors):
        if pair.unmatched:
            pair.note(origin_of(tensor, i))
        if is_given(tensor, i):
            continue
        roots, found = _derivation(known, tensor, lambda x, i=i: is_given(x, i))
        missing = [x for x in roots if not is_given(x, i)]
        if found and missing and _is_larger(missing, tensor):
            missing, found = [tensor], []  # packing the tensor itself takes less memory
        to_pack |= {id(x): (x, i) for x in missing}
        equations |= {id(equation.value): equation for equation in found}
    return _Plan(list(to_pack.values()), list(equations.values()))


def _derivation(
    known: _KnownResiduals, value: Any, is_given: Callable[[Any], bool]
) -> tuple[list[Any], list[Equation]]:
    """Return values from which backward can recompute `value`, and the equations that recompute it, in order.

    From `value`, the function follows the recorded equations back to their operands. The function stops at constants,
    at values for which `is_given` returns True, and at results that backward may not recompute.
    """
    recorded, model = known.packing.equations, known.packing.pair.error_model
    roots: dict[int, Any] = {}
    equations: dict[int, Equation] = {}
    to_visit = [value]
    while to_visit:
        x = to_visit.pop()
        if id(x) in roots or id(x) in equations or (x is not value and known.is_constant(x)):
            continue
        equation = None if is_given(x) else recorded.get(id(x))
        if equation is None or not _may_be_recomputed(equation, recorded, model):
            roots[id(x)] = x
        else:
            equations[id(x)] = equation
            to_visit += equation.inputs
    return list(roots.values()), sorted(equations.values(), key=lambda equation: equation.number)


def _recomputable(known: _KnownResiduals, outputs: Sequence[Any]) -> list[Equation]:
    """Return the equations that can recompute outputs from known residuals. The list is in the order of evaluation."""
    equations: dict[int, Equation] = {}

    def is_given(x: Any) -> bool:
        return id(x) in equations or known.get(x) is not None

    for output in [x for x in outputs if id(x) in known.packing.equations]:
        roots, found = _derivation(known, output, is_given)
        if all(map(is_given, roots)):
            equations |= {id(equation.value): equation for equation in found}
    return list(equations.values())


def _carry_out(known: _KnownResiduals, plan: _Plan, outputs: Sequence[Any]) -> list[Any]:
    """Pack the tensors that a plan selects for packing.

    For each tensor that the plan packs, or that backward recomputes, store the residual in `known`. Return the outputs.
    """
    pair, owner, origin_of = known.packing.pair, known.packing.owner, known.packing.origin_of
    with hooks_suspended():
        # `jax.grad(f)(2.0)` passes a Python number in place of an array.
        residuals = [pack_tensor(pair, as_arrays([x])[0], f"{owner} {i}", origin_of(x, i)) for x, i in plan.packed]
        residuals, outputs = _behind_one_barrier(residuals, outputs)
    for (x, _), residual in zip(plan.packed, residuals, strict=True):
        known.put(x, residual)
    known.put_recomputed(plan.recomputed)
    return outputs


def _behind_one_barrier(residuals: list[Any], outputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return residuals and outputs.

    In staged code, the packed arrays and the outputs pass through one optimization barrier. Therefore XLA packs the
    tensors before it uses the outputs.

    Without the barrier, XLA may simplify unpack(pack(x)) to x and keep x (two casts cancel out), or pack late.
    """
    packed = [residual for residual in residuals if isinstance(residual, Residual)]
    arrays = {id(x): x for residual in packed for x in leaves_of(residual)}
    if not any(map(is_staged, arrays.values())):
        return residuals, list(outputs)
    values = barrier([*outputs, *arrays.values()])
    bound = dict(zip(arrays, values[len(outputs) :], strict=True))
    of_bound = [fold(r, lambda x: bound[id(x)], Residual, {}) if isinstance(r, Residual) else r for r in residuals]
    return of_bound, values[: len(outputs)]


def _further_residuals(known: _KnownResiduals, plan: _Plan, tensors: Sequence[Any]) -> list[Any]:
    """Return additional residuals, which only the saved-tensors report and JAX's check for NaN read.

    Backward does not read these residuals.

    The first kind of residual is the result of a `Mark` that is applied to a tensor. The report finds the tensor by
    this `Mark`. The second kind of residual is the largest absolute value of a tensor. JAX checks this value for NaN.
    """
    if not (is_reported.value or is_nan_reported()):
        return []
    of_equations = {id(equation.value) for equation in plan.recomputed}
    shown = [x for x in tensors if id(x) in of_equations and np.ndim(x)] + [x for x, _ in plan.packed]
    hidden = [x for x in shown if isinstance(known.get(x), Residual)]
    return [*_marks(known.packing, shown, of_equations), *_largest(hidden)]


def _marks(packing: Packing, tensors: Sequence[Any], recomputed: Collection[int]) -> list[Any]:
    """Apply a `Mark` to each tensor in `tensors` that hooks can pack. Return the marks, which are empty arrays.

    If no report is being made, return an empty list.

    `recomputed`: ids of recomputed tensors.
    """
    if not is_reported.value:
        return []
    shown = {id(x): x for x in tensors if not _is_never_packed(x, is_staging())}.values()
    return [apply(Mark(typeof(x), packing.origin_of(x, 0), id(x) in recomputed), [x])[0] for x in shown]


def _largest(tensors: Sequence[Any]) -> list[Any]:
    """If JAX reports NaN or infinity, return the largest absolute value of each traced tensor.

    These values are residuals.

    JAX looks for NaN among the results of a program. Packed and recomputed tensors are not among these results, so JAX
    would not find a NaN in them. The forward pass returns the largest absolute value of each traced tensor as one more
    residual. JAX checks this residual, and so finds a NaN in the tensor. Backward reads none of these values. tests:
    hooks/test_modes.py
    """
    if not is_nan_reported():
        return []
    traced = [jax.lax.stop_gradient(x) for x in tensors if is_tracer(x) and has_tangent(x)]
    return [jnp.max(jnp.abs(x)) for x in traced]


def _is_never_packed(tensor: Any, is_program: bool) -> bool:
    """Return whether a value is never packed.

    Few hooks can read a PRNG key, and no hook can restore a Ref. A program holds its constants anyway. If constants
    were packed, XLA would evaluate the hooks on them while it compiles, which may take seconds.
    """
    return is_ref(tensor) or is_key(tensor) or 0 in np.shape(tensor) or (is_program and not is_tracer(tensor))
