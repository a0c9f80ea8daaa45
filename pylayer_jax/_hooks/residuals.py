"""The residuals of one layer or operation: which of them backward recomputes, which are packed, and which stay.

The vjp of tanh computes 1 - y² in the forward pass and keeps it. In a block of `quantize_saved(8)`, for which
`Pair.keeps` is `ErrorModel.ABSOLUTE`, `pack_residuals` keeps the values of `jnp.tanh(x @ w)` thus:

    value                 decision                     how it is kept
    y                     packed                       Residual(PackedTensor, [8-bit values, lows, highs])
    1 - y²                recomputed from y            Residual(Recomputed(one_minus_square), [the residual above])
    w, from outside       not packed                   w

JAX keeps the distinct arrays of the right column instead of the tensors.

A `Recorder` records the equations of the forward pass. `_follow` walks back from a residual through the equations that
do not amplify the packing error; the table `_RECOMPUTED` has an entry for each of these operations. A comparison of
floating-point numbers is never recomputed from a packed value: `x == max(x)` would become False everywhere. tests:
hooks/test_derived.py
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
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
    trace_below,
    trace_of_primals,
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

    @property
    def name(self) -> str:
        return self.primitive.name


class Recorder(PassThroughTrace):
    """A trace that passes operations on to its parent, and records the equation of each operation with one result."""

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
        if not primitive.multiple_results and id(result) not in map(id, tracers):
            self.equations[id(result)] = Equation(primitive, params, tracers, result)
        return result


_LONGEST_OPENED: Final = 8  # number of equations; a longer jitted function stays one operation


def small_jaxpr(params: dict[str, Any]) -> tuple[Any, Sequence[Any]] | None:
    """Return the jaxpr and constants of a jitted function if it is small (like many of jax.numpy), otherwise None."""
    jaxpr, consts = jaxpr_and_consts(params["jaxpr"])
    is_small = len(jaxpr.eqns) <= _LONGEST_OPENED and not [j for e in jaxpr.eqns for j in inner_jaxprs(e.params)]
    return (jaxpr, consts) if is_small and not jaxpr.effects and is_inlinable(params) else None


# -- equations that backward recomputes ------------------------------------------------------------------

MOVES: Final = frozenset(
    ("broadcast_in_dim", "copy", "copy_p", "expand_dims", "iota", "reshape", "rev", "squeeze", "transpose")
)
_Equations = dict[int, Equation]


class _Row(NamedTuple):
    """A condition under which backward may recompute an operation's result from packed operands."""

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
    """Return False if an operation adds a last axis of length 1, as from [8] (a statistic of 8 rows) to [8, 1].

    An operand of shape [8] would be packed as one row, with an error that depends on all 8 values. In [8, 1], each
    value is a row of its own.
    """
    shape, shapes = np.shape(equation.value), [np.shape(x) for x in equation.inputs]
    return not (shape and shape[-1] == 1) or all(not operand or operand[-1] == 1 for operand in shapes)


def _with_a_number(equation: Equation, equations: _Equations) -> bool:
    """Return whether one operand is a number, or has one number for each row along the last axis."""
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
    return not dimensions or dimensions[-1] != len(shape) - 1 or operand[-1] == 1


def _is_low_power(equation: Equation, _: _Equations) -> bool:
    return equation.params["y"] in (2, 3)


_RECOMPUTED: Final[dict[str, list[_Row]]] = {
    **{name: [_Row(ErrorModel.ANY, _keeps_rows)] for name in MOVES},
    **{name: [_Row(ErrorModel.ANY, _of_integers)] for name in ("and", "not", "or", "xor")},
    **{name: [_Row(ErrorModel.ANY, _of_integers)] for name in ("eq", "ge", "gt", "le", "lt", "ne")},
    "neg": [_Row(ErrorModel.ANY)],
    "convert_element_type": [_Row(ErrorModel.ANY, _widens)],
    "mul": [_Row(ErrorModel.ANY, _of_integers), _Row(ErrorModel.RELATIVE, _with_a_number)],
    "div": [_Row(ErrorModel.RELATIVE, _with_a_number)],
    "square": [_Row(ErrorModel.RELATIVE)],
    "integer_pow": [_Row(ErrorModel.RELATIVE, _is_low_power)],
    "add": [_Row(ErrorModel.ANY, _of_integers), _Row(ErrorModel.ABSOLUTE, _with_a_number)],
    "sub": [_Row(ErrorModel.ANY, _of_integers), _Row(ErrorModel.ABSOLUTE, _with_a_number)],
    "one_minus_square": [_Row(ErrorModel.ABSOLUTE)],
}


def _may_be_recomputed(equation: Equation, equations: _Equations, model: ErrorModel) -> bool:
    return any(model >= row.model and row.applies(equation, equations) for row in _RECOMPUTED.get(equation.name, ()))


def _follow(
    value: Any,
    equations: _Equations,
    model: ErrorModel,
    is_known: Callable[[Any], bool],
    is_constant: Callable[[Any], bool],
    roots: dict[int, Any],
    steps: dict[int, Equation],
) -> None:
    """Find values from which backward can recompute `value`, and the equations that do this, in their order.

    The values are added to `roots`, and the equations to `steps`; the keys of both dicts are ids of values. The walk
    back stops at a root: a value for which `is_known` is True, or that no recorded equation may recompute.
    """
    if id(value) in roots or id(value) in steps or is_constant(value):
        return
    equation = None if is_known(value) else equations.get(id(value))
    if equation is None or not _may_be_recomputed(equation, equations, model):
        roots[id(value)] = value
        return
    for x in equation.inputs:
        _follow(x, equations, model, is_known, is_constant, roots, steps)
    steps[id(value)] = equation


def is_number(value: Any) -> bool:
    """Return whether a value is a concrete scalar, which is the same in all runs of a program."""
    return np.ndim(value) == 0 and not is_tracer(value)


def _is_larger(values: Sequence[Any], tensor: Any) -> bool:
    """Return True if the total size of the values could exceed the size of the tensor."""

    def n_bytes(aval: Any) -> int:
        return aval.size * aval.dtype.itemsize

    try:
        return sum(n_bytes(aval) for aval in map(typeof, values) if aval.ndim) > n_bytes(typeof(tensor))
    except jax.errors.InconclusiveDimensionOperation:  # symbolic dimensions of `jax.export`
        return True


# -- residuals as expressions ----------------------------------------------------------------------------


class Recomputed(NamedTuple):
    """Function of a `Residual` that applies an operation of the forward pass again. It holds constant operands."""

    primitive: Any
    params: dict[str, Any]
    operands: Sequence[Any]  # the constant operands, and None for each input of the residual
    is_input: Sequence[bool]

    @unchecked
    def __call__(self, *inputs: Any) -> Any:
        result = self.primitive.bind(*merge(self.is_input, inputs, self.operands), **self.params)
        return result[0] if self.primitive.multiple_results else result


def recomputed(primitive: Any, params: dict[str, Any], operands: Sequence[Any], residual_of: Any) -> Residual:
    """Return a `Residual` that recomputes an operation's result.

    `residual_of(x)` is the residual of an operand x, or None for a constant operand.
    """
    residuals = [residual_of(x) for x in operands]
    is_input = [r is not None for r in residuals]
    numbers = [None if is_one else x for x, is_one in zip(operands, is_input, strict=True)]
    return Residual(Recomputed(primitive, params, numbers, is_input), select(residuals, is_input))


# A nested function that calls itself would be a reference cycle, and hold arrays longer than needed.
def fold(
    residual: Any, of_array: Callable[[Any], Any], of_residual: Callable[[Any, list[Any]], Any], done: dict[int, Any]
) -> Any:
    """Return `of_array(x)` for an array x, and `of_residual(function, results of the inputs)` for a residual.

    `done` holds results by the id of the residual, so that a residual that several others share is visited once.
    """
    if not isinstance(residual, Residual):
        return of_array(residual)
    if id(residual) not in done:
        inputs = [fold(x, of_array, of_residual, done) for x in residual.inputs]
        done[id(residual)] = of_residual(residual.function, inputs)
    return done[id(residual)]


class PackedResiduals:
    """The residuals of a layer or an operation, as expressions without arrays.

    Each array is replaced by its position in the list of arrays that JAX keeps.
    """

    def __init__(
        self, residuals: Sequence[Any], owners: Sequence[int], reads: dict[int, list[int]], n_arrays: int
    ) -> None:
        self.residuals = residuals
        self.owners = owners  # for each array, the index of the (first) tensor from which it was packed
        self.reads = reads  # id of a residual -> the positions of the arrays from which it is restored
        self.n_arrays = n_arrays

    @staticmethod
    def of(residuals: Sequence[Any], marks: Sequence[Any] = ()) -> tuple[PackedResiduals, list[Any]]:
        """Replace arrays by positions. Return the result, and the distinct arrays for JAX to keep, with `marks`."""
        arrays: dict[int, Any] = {}
        owners: list[int] = []
        position: dict[int, int] = {}
        shared: dict[Any, Residual] = {}
        reads: dict[int, list[int]] = {}
        done: dict[int, Any] = {}

        def of_array(array: Any) -> int:
            if id(array) not in arrays:
                position[id(array)] = len(arrays)
                arrays[id(array)] = array
            return position[id(array)]

        def of_residual(function: Any, inputs: list[Any]) -> Residual:
            key = id(function), *[x if isinstance(x, int) else id(x) for x in inputs]
            if key not in shared:
                shared[key] = residual = Residual(function, inputs)
                lists = [[x] if isinstance(x, int) else reads[id(x)] for x in inputs]
                reads[id(residual)] = [position for positions in lists for position in positions]
            return shared[key]

        placed: list[Any] = []
        for i, residual in enumerate(residuals):
            placed.append(fold(residual, of_array, of_residual, done))
            owners += [i] * (len(arrays) - len(owners))
        kept = [*arrays.values(), *marks]
        return PackedResiduals(placed, owners, reads, len(kept)), kept

    def unpack(self, arrays: Sequence[Any], cotangents: Sequence[Any]) -> UnpackedTensors:
        """Return the tensors, each unpacked when it is first read. In staged code, XLA first waits for `cotangents`."""
        return UnpackedTensors(self, arrays, cotangents)


class UnpackedTensors(Sequence[Any]):
    """A sequence of the tensors of a layer or an operation. Each tensor is unpacked when it is first read."""

    def __init__(self, packed: PackedResiduals, arrays: Sequence[Any], cotangents: Sequence[Any]) -> None:
        self._packed, self._arrays = packed, arrays
        self.cotangents = list(cotangents)  # the barriers replace these cotangents
        self._waiting: dict[int, Any] = {}  # position -> the array behind a barrier
        self._done: dict[int, Any] = {}  # id of a residual -> its tensor

    def __len__(self) -> int:
        return len(self._packed.residuals)

    def __getitem__(self, index: Any) -> Any:
        return self._tensors([self._packed.residuals[index]])[0]

    def all(self) -> list[Any]:
        """Return all tensors. They share one barrier."""
        return self._tensors(self._packed.residuals)

    def _tensors(self, residuals: Sequence[Any]) -> list[Any]:
        restored = [r for r in residuals if isinstance(r, Residual)]  # the other tensors need no barrier
        if restored:
            with set_current_trace(trace_below(current_trace())), hooks_suspended():
                self._wait({i: None for r in restored for i in self._packed.reads[id(r)] if i not in self._waiting})
                for residual in restored:
                    fold(residual, self._waiting.__getitem__, _call, self._done)
        return [self._done[id(r)] if isinstance(r, Residual) else self._arrays[r] for r in residuals]

    def _wait(self, positions: Collection[int]) -> None:
        """Put arrays behind a barrier, so that XLA does not read them before it has the cotangents.

        Without the barrier, XLA may unpack a tensor right after packing, and hold all tensors until backward begins.
        XLA waits only if backward uses the cotangents that the barrier returns.
        """
        arrays = [self._arrays[i] for i in positions]
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
    """A pair's record of how a tensor was kept. It keeps no array and no result of a hook alive."""

    trace: Callable[[], Any]  # a tracer is valid only in the trace in which it was made
    owner: Callable[[], Any]  # the `PackedResiduals` of the layer or operation that kept the tensor
    residual: Any  # an expression with weak references to arrays and to `PackedTensor`s
    name: str  # the name of the tensor


def _remember(pair: Pair, tensor: Any, residual: Any, owner: PackedResiduals, name: str, done: dict[int, Any]) -> None:
    def of_residual(function: Any, inputs: list[Any]) -> Residual:
        return Residual(weakref.ref(function) if isinstance(function, PackedTensor) else function, inputs)

    weak = fold(residual, reference, of_residual, done)
    pair.residuals.put(tensor, _Remembered(weakref.ref(current_trace()), weakref.ref(owner), weak, name))


def _recall(pair: Pair, tensor: Any, name_of: Callable[[], str]) -> Any:
    """Return the residual of a tensor that the pair remembers, or None.

    Return None too for a tensor that was not packed and has a new name since, which may select it in `by_name`: in
    eager mode, `checkpoint_name` returns the same array.
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
    """A function by which the report finds a tensor x that is kept. Its result is empty: f32[0,8,4] for f32[8,4].

    JAX keeps the result as a residual, whose shape shows scans and `jax.vmap`: f32[3,0,8,4] for a scan of length 3.
    """

    def __init__(self, aval: Any, origin: Origin, is_recomputed: bool) -> None:
        self.name, self.origin, self.is_recomputed = "mark", origin, is_recomputed
        self.jaxpr, _, _ = stage(lambda x: ([jax.lax.slice_in_dim(x[None], 0, 0)], None), [aval], self.name)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        return apply(self, primals), [None]


# -- packing ---------------------------------------------------------------------------------------------


def keeps_residuals(tangents: Sequence[Any]) -> bool:
    """Return whether a rule with these tangents (None means zero) keeps residuals. Eager forward mode keeps none."""
    return any(is_unknown(t) or is_staged(t) for t in tangents)


class Packing(NamedTuple):
    """The arguments of `pack_residuals` that describe a layer or an operation."""

    pair: Pair  # the pair of the block in which the layer or operation was applied
    owner: str  # the name of the layer or operation and the kind of the tensors, for messages: "Tanh, saved tensor"
    operands: Sequence[Any]
    origin_of: Callable[[Any, int], Origin]  # a value, the index of the tensor that needs it -> the value's origin
    stay: Sequence[tuple[Any, Any]]  # the operands that are not packed, with their residuals
    equations: _Equations  # the equations of the forward pass, if they were recorded


def pack_residuals(
    packing: Packing, tensors: Sequence[Any], outputs: Sequence[Any]
) -> tuple[PackedResiduals, list[Any], list[Any]]:
    """Pack the tensors that a layer or an operation keeps. Each distinct tensor is kept once, in one way.

    Returns:
        The residuals of the tensors, the arrays that JAX has to keep, and the outputs.
    """
    pair, owner, operands, origin_of, stay, equations = packing
    with set_current_trace(trace_below(trace_of_primals([*tensors, *outputs]))):
        if active.value is SUSPENDED:  # an enclosing operation packs the residuals
            return *PackedResiduals.of(tensors), list(outputs)
        if pair.packs_nothing:
            return *PackedResiduals.of(tensors, _marks(packing, tensors, ())), list(outputs)
        is_program = is_staging()
        may_vary = {id(x) for x in operands} - {id(x) for x, _ in stay}  # a scalar among these is no constant
        residual_of: dict[int, Any] = {id(x): residual for x, residual in stay}
        to_pack: dict[int, tuple[Any, int]] = {}  # id -> a tensor, and the index of the first tensor that needs it
        steps: dict[int, Equation] = {}  # id -> the equation that recomputes the value
        unknown: set[int] = set()

        def is_known(x: Any, index: int = 0) -> bool:
            if id(x) in residual_of or id(x) in to_pack or id(x) in steps:
                return True
            if id(x) in unknown:
                return False
            found = x if _stays(x, is_program) else _recall(pair, x, lambda: origin_of(x, index).name)
            if found is None:
                unknown.add(id(x))
            else:
                residual_of[id(x)] = found
            return found is not None

        def walk(x: Any) -> tuple[dict[int, Any], dict[int, Equation]]:
            roots: dict[int, Any] = {}
            found: dict[int, Equation] = {}
            is_constant = lambda y: y is not x and id(y) not in may_vary and is_number(y)  # noqa: E731
            _follow(x, equations, pair.keeps, is_known, is_constant, roots, found)
            return roots, found

        # 1. Walk back from each tensor to the tensors that have to be packed.
        for i, tensor in enumerate(tensors):
            if pair.unmatched:
                pair.note(origin_of(tensor, i))
            if not is_known(tensor, i):
                roots, found = walk(tensor)
                missing = [x for x in roots.values() if not is_known(x, i)]
                if found and missing and _is_larger(missing, tensor):
                    missing, found = [tensor], {}  # packing the tensor itself takes less memory
                to_pack |= {id(x): (x, i) for x in missing}
                steps |= found

        # 2. Pack these tensors. In staged code, a barrier binds the packed arrays and the outputs together.
        with hooks_suspended():
            # jax.grad(f)(2.0) passes a number that is no array.
            kept = [pack_tensor(pair, as_arrays([x])[0], f"{owner} {i}", origin_of(x, i)) for x, i in to_pack.values()]
            kept, bound = _bind(kept, outputs)
        residual_of |= zip(to_pack, kept, strict=True)

        # 3. Record how backward recomputes the other tensors, and each output that can be recomputed from residuals: a
        #    later operation that keeps this output finds the record.
        for output in outputs:
            if not is_known(output):
                roots, found = walk(output)
                if all(map(is_known, roots.values())):
                    steps |= found
        for number, equation in steps.items():
            residual_of[number] = recomputed(
                equation.primitive, equation.params, equation.inputs, lambda x: residual_of.get(id(x))
            )
        shown = [x for x in tensors if id(x) in steps and np.ndim(x)] + [x for x, _ in to_pack.values()]
        hidden = [x for x in shown if isinstance(residual_of[id(x)], Residual)]
        marks = [*_marks(packing, shown, steps), *_largest(hidden)]
        packed, arrays = PackedResiduals.of([residual_of[id(x)] for x in tensors], marks)
        new = [x for x, _ in to_pack.values()] + [equation.value for equation in steps.values()]
        pairs = [(x, x) for x in new] + [(y, x) for x, y in zip(outputs, bound, strict=True) if id(x) in residual_of]
        done: dict[int, Any] = {}
        is_left = [n for n in to_pack if not isinstance(residual_of[n], Residual)]
        name_of = {n: origin_of(*to_pack[n]).name for n in is_left}
        for tensor, x in pairs:
            _remember(pair, tensor, residual_of[id(x)], packed, name_of.get(id(x), ""), done)
        return packed, arrays, bound


def _marks(packing: Packing, tensors: Sequence[Any], steps: Collection[int]) -> list[Any]:
    """Return the results of marks for these tensors, if a report is made. `steps`: ids of the recomputed tensors."""
    if not is_reported.value:
        return []
    shown = {id(x): x for x in tensors if not _stays(x, is_staging())}.values()
    return [apply(Mark(typeof(x), packing.origin_of(x, 0), id(x) in steps), [x])[0] for x in shown]


def _largest(tensors: Sequence[Any]) -> list[Any]:
    """Return the largest absolute value of each traced tensor, for JAX to keep, if JAX reports NaN or infinity.

    JAX looks for NaN among the results of a program. Packed and recomputed tensors are not among these results, so JAX
    would not report their NaN. With the largest value of each tensor as a further residual, JAX does. Backward reads
    none of these values. tests: hooks/test_modes.py
    """
    if not is_nan_reported():
        return []
    traced = [jax.lax.stop_gradient(x) for x in tensors if is_tracer(x) and has_tangent(x)]
    return [jnp.max(jnp.abs(x)) for x in traced]


def _stays(tensor: Any, is_program: bool) -> bool:
    # A hook can hardly read a PRNG key, and cannot restore a Ref. A program holds its constants anyway. If they were
    # packed, XLA would evaluate the hooks on them while it compiles, for seconds.
    return is_ref(tensor) or is_key(tensor) or 0 in np.shape(tensor) or (is_program and not is_tracer(tensor))


def _bind(residuals: Sequence[Any], outputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return residuals and outputs. In staged code they pass a barrier, so that XLA packs before it uses the outputs.

    Without the barrier, XLA may simplify unpack(pack(x)) to x and keep x (two casts cancel out), or pack late.
    """
    arrays = [x for residual in residuals if isinstance(residual, Residual) for x in residual.inputs]
    if not any(map(is_staged, arrays)):
        return list(residuals), list(outputs)
    values = barrier([*outputs, *arrays])
    rest = iter(values[len(outputs) :])
    bound = [Residual(r.function, [next(rest) for _ in r.inputs]) if isinstance(r, Residual) else r for r in residuals]
    return bound, values[: len(outputs)]
