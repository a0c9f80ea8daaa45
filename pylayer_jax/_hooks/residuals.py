"""Decides for each residual of a layer or an operation whether it is packed, computed again in backward, or kept.

The vjp of y = gelu(x) keeps x, a derivative of x³, 1 - t² and 0.5 (1 + t), where t is a tanh. In a block of
`quantize_saved(8)`, JAX keeps one array for them, the packed x:

    value            how backward gets it
    x                Expression(PackedTensor, [8-bit values, lows, highs])
    3 x²             Expression(mul, [Expression(3), Expression(integer_pow, [the expression of x])])
    1 - t², ...      likewise
    y                likewise, if a later operation keeps it

A tensor that is kept as it is has its array in place of an expression. A `Recorder` records the expressions of the
forward pass. From each residual, `_Packer` follows them back to tensors that are kept anyway, or that are smaller, as
far as the table in `primitives` allows for the errors of these tensors. It packs these, and stores in the pair how each
tensor is kept, for later operations with the same tensor.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.jaxprs import inner_jaxprs, is_inlinable, jaxpr_and_consts, with_users_line
from pylayer_jax._jax.rule_function import apply, select, with_tangent
from pylayer_jax._jax.traces import (
    PassThroughTrace,
    current_trace,
    eval_jaxpr,
    is_staged,
    is_staging,
    is_tracer,
    is_unknown,
    set_current_trace,
    whole_batch,
    without_pass_through,
)
from pylayer_jax._jax.transparency import barrier
from pylayer_jax._jax.types import (
    as_arrays,
    has_tangent,
    is_key,
    is_nan_reported,
    is_ref,
    typeof,
)

from .active import SUSPENDED, active, hooks_suspended, is_reported
from .origins import Mark
from .pack import (
    Origin,
    PackedTensor,
    Pair,
    Step,
    is_selected,
    pack_tensor,
    reference,
    roundings_of,
    steps_for,
)
from .plan import own_rounding
from .primitives import (
    EXACT,
    JITTED,
    MOST_EQUATIONS,
    OTHER,
    ROWS,
    SAME,
    STEEP,
    UNKNOWN,
    Error,
    Expression,
    Operand,
    PrimitiveFunction,
    Rounding,
    fold,
    is_number,
    leaves_of,
)

# -- the expressions of the forward pass ---------------------------------------------------------------


class Recorder(PassThroughTrace):
    """A trace that records an `Expression` for each operation in `ROWS` that backward may repeat.

    It goes into short jitted functions.
    """

    __slots__ = ("amplified", "compared", "expressions")

    def __init__(self, parent_trace: Any) -> None:
        super().__init__(parent_trace)
        self.expressions: dict[int, tuple[Any, Expression]] = {}  # id of a value -> the value, and what computes it
        self.amplified: dict[int, Any] = {}  # operands of operations that may make a small error large
        self.compared: dict[int, Any] = {}  # operands that a transpose compares

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        if primitive.name in JITTED and (opened := short_jaxpr(params)) is not None:
            jaxpr, consts = opened
            with set_current_trace(self):
                return eval_jaxpr(with_users_line(jaxpr), consts, *tracers)
        with set_current_trace(self.parent_trace):
            result = primitive.bind(*tracers, **params)
        row = ROWS.get(primitive.name)
        is_unknown_code = row is None and primitive.multiple_results
        if is_unknown_code or (row and row.amplifies):
            self.amplified |= {id(x): x for x in tracers}
        if row and row.is_compared:
            self.compared |= {id(x): x for x in tracers}
        inputs = tracers
        if id(result) in map(id, tracers):  # it computes nothing, but may name the result, as in eager mode
            inputs = [self.expressions[id(result)][1]] if id(result) in self.expressions else ()
        if row and row.recomputed and inputs:
            self.expressions[id(result)] = result, Expression.of(primitive, params, inputs, typeof(result))
        return result


def short_jaxpr(params: dict[str, Any]) -> tuple[Any, Sequence[Any]] | None:
    """Return the jaxpr and the constants of a jitted function, or None for a long one."""
    jaxpr, consts = jaxpr_and_consts(params["jaxpr"])
    is_short = _count_of_equations(jaxpr) <= MOST_EQUATIONS
    return (jaxpr, consts) if is_short and not jaxpr.effects and is_inlinable(params) else None


def _count_of_equations(jaxpr: Any) -> float:
    """Count equations, also in jitted functions; infinity if there is other code in parameters."""
    count: float = 0
    for equation in jaxpr.eqns:
        inner = inner_jaxprs(equation.params)
        if inner and equation.primitive.name not in JITTED:
            return float("inf")
        count += sum(map(_count_of_equations, inner)) if inner else 1
    return count


# -- residuals as expressions ----------------------------------------------------------------------------


def recomputed(expression: Expression, residual_of: Callable[[Any], Any], done: dict[int, Any]) -> Expression:
    """Return an expression of `residual_of(x)`, or of a constant where that is None, for each value x."""

    def of_leaf(x: Any) -> Any:
        residual = residual_of(x)
        return Expression(lambda: x, ()) if residual is None else residual

    return fold(expression, of_leaf, done=done)


class PackedResiduals:
    """Expressions for the residuals of a layer or an operation, with positions for the arrays that JAX keeps."""

    def __init__(self, residuals: Sequence[Any], n_arrays: int) -> None:
        self.residuals = residuals
        self.n_arrays = n_arrays

    @staticmethod
    def of(residuals: Sequence[Any], marks: Sequence[Any] = ()) -> tuple[PackedResiduals, list[Any]]:
        """Replace arrays by positions. Return also the arrays that JAX has to keep: each once, and then `marks`."""
        numbered: dict[int, tuple[int, Any]] = {}  # id of an array -> its position, and the array
        distinct: dict[Any, Expression] = {}  # the residuals, each once, by their functions and inputs
        done: dict[int, Any] = {}

        def position(array: Any) -> int:
            return numbered.setdefault(id(array), (len(numbered), array))[0]

        def shared(function: Any, inputs: list[Any]) -> Expression:
            key = id(function), *[x if isinstance(x, int) else id(x) for x in inputs]
            return distinct.setdefault(key, Expression(function, inputs))

        placed = [fold(residual, position, shared, done) for residual in residuals]
        arrays = [*[array for _, array in numbered.values()], *marks]
        return PackedResiduals(placed, len(arrays)), arrays

    @property
    def owners(self) -> list[int]:
        """For each array except marks: the index of the first tensor that backward restores from it."""
        pairs = [(i, owner) for owner, residual in enumerate(self.residuals) for i in leaves_of(residual)]
        return [owner for _, owner in sorted(dict(reversed(pairs)).items())]

    def unpack(self, arrays: Sequence[Any], cotangents: Sequence[Any]) -> UnpackedTensors:
        return UnpackedTensors(self.residuals, arrays, cotangents)


@contextlib.contextmanager
def outside_blocks() -> Generator[None]:
    """Suspend hooks, and let operations skip the trace of the block."""
    with hooks_suspended(), set_current_trace(without_pass_through(current_trace())):
        yield


class UnpackedTensors(Sequence[Any]):
    """The tensors that a layer or operation keeps, each unpacked when it is first read.

    In staged code, XLA does not unpack one before it has computed the cotangents.
    """

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
        """Return all tensors, behind one barrier. The caller has entered `outside_blocks()`."""
        # Also a tensor that is kept as it is waits: XLA would transpose or broadcast it when the forward pass ends.
        self._wait([i for r in self._residuals for i in leaves_of(r)])
        return self._tensors(self._residuals)

    def _tensors(self, residuals: Sequence[Any]) -> list[Any]:
        restored = [r for r in residuals if isinstance(r, Expression)]
        self._wait([i for r in restored for i in leaves_of(r)])
        for residual in restored:
            fold(residual, self._waiting.__getitem__, _call, self._done)
        return [
            self._done[id(r)] if isinstance(r, Expression) else self._waiting.get(r, self._arrays[r]) for r in residuals
        ]

    def _wait(self, positions: Collection[int]) -> None:
        """Put arrays behind a barrier with the cotangents. XLA waits only if backward uses the cotangents from it.

        Without the barrier, XLA may unpack a tensor right after packing, and hold all tensors until backward begins.
        """
        positions = [i for i in dict.fromkeys(positions) if i not in self._waiting]
        if not positions:
            return
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
    """How a pair kept one tensor for backward. It keeps no array and no result of a hook alive."""

    trace: Callable[[], Any]  # a tracer is valid only in the trace in which it was made
    # The `PackedResiduals` of the layer or operation that kept the tensor. After JAX has dropped them, a gradient packs
    # the tensor again, and so asks `only` again. tests: hooks/test_only.py
    owner: Callable[[], Any]
    residual: Any  # an expression with weak references to arrays and to `PackedTensor`s


def _recall(pair: Pair, tensor: Any) -> Any:
    """Return the residual that the pair remembers for a tensor, or None."""
    found: _Remembered | None = pair.residuals.get(tensor)
    if found is None or found.trace() is not current_trace() or found.owner() is None:
        return None
    strong: list[Any] = []  # the arrays and hooks' results, or None for each that was deleted

    def of_array(weak: Any) -> Any:
        strong.append(weak())
        return strong[-1]

    def of_residual(function: Any, inputs: list[Any]) -> Expression:
        if isinstance(function, weakref.ref):
            strong.append(function())
            return Expression(strong[-1], inputs)
        return Expression(function, inputs)

    residual = fold(found.residual, of_array, of_residual)
    return None if [x for x in strong if x is None] else residual


# -- packing ---------------------------------------------------------------------------------------------


def keeps_residuals(tangents: Sequence[Any]) -> bool:
    """Return whether a rule keeps residuals for these tangents. Eager forward mode keeps none."""
    return any(is_unknown(t) or is_staged(t) for t in tangents)


class Packing(NamedTuple):
    """A description of a layer or an operation, for `pack_residuals`."""

    pair: Pair  # the pair of the block in which the layer or operation was applied
    owner: str  # the name of the layer or operation and the kind of the tensors, for messages: "Tanh, saved tensor"
    operands: Sequence[Any]
    origin_of: Callable[[Any, int], Origin]  # a value, the index of the tensor that needs it -> the value's origin
    left_unpacked: Sequence[tuple[Any, Any]]  # the operands that are not packed, with their residuals
    expressions: Mapping[int, tuple[Any, Expression]] = {}  # as in `Recorder`
    amplified: Collection[int] = ()  # ids of operands that are packed, and not computed from rounded tensors
    exact: Collection[int] = ()  # ids of tensors that are neither rounded nor computed from rounded ones
    # Whether a rule of a user saved the tensors. It may compare two of them, and XLA rounds an expression differently
    # in another fusion. So they are computed again by moves only. tests: hooks/test_recompute.py
    is_users_rule: bool = False


def pack_residuals(
    packing: Packing, tensors: Sequence[Any], outputs: Sequence[Any]
) -> tuple[PackedResiduals, list[Any], list[Any]]:
    """Pack the tensors that a layer or an operation keeps. Return also the arrays for JAX to keep, and the outputs.

    If backward can compute an output from what is kept, the pair stores how, for later operations that keep the output.
    """
    if active.value is SUSPENDED:  # an enclosing operation packs the residuals
        if is_reported.value:
            for i, x in enumerate(tensors):
                packing.pair.origins.put(whole_batch(x), packing.origin_of(x, i))
        return *PackedResiduals.of(tensors), list(outputs)
    if packing.pair.packs_nothing:
        return *PackedResiduals.of(tensors, _marks(packing, tensors, {})), list(outputs)
    packer = _Packer(packing, tensors)
    packer.choose(outputs)
    behind = packer.pack(outputs)
    packer.derive_outputs(outputs, behind)
    packed, arrays = PackedResiduals.of([packer.get(x) for x in tensors], packer.further_residuals())
    packer.remember(behind, packed)
    return packed, arrays, behind


class _Derivation(NamedTuple):
    """How backward could get a value: from kept tensors, by equations that it evaluates again."""

    missing: dict[int, Any]  # the tensors that would have to be kept for this, by id
    leaves: dict[int, tuple[float, frozenset[Rounding]]]  # each tensor that is read: its size in bytes, its errors
    n_equations: int
    distance: int  # see `Operand`
    by: str = ""

    @property
    def roundings(self) -> frozenset[Rounding]:
        return frozenset[Rounding]().union(*[roundings for _, roundings in self.leaves.values()])

    @property
    def rounded(self) -> frozenset[int]:
        return frozenset([key for key, (_, roundings) in self.leaves.items() if roundings])


_CONSTANT: Final = _Derivation({}, {}, 0, SAME)
_SMALL: Final = 1 / 16  # a tensor is small beside another one of 16 times its size, as a mean beside its rows
_MOST_LARGE_LEAVES: Final = 2  # so that a residual stream x + f(x) is kept once a layer, and not summed from the first


class _Packer:
    """Decides how the tensors of one layer or operation are kept, and keeps them.

    `choose` puts each tensor without a residual into `_chosen`, the tensors to keep, or into `_derived`. `pack` makes
    the residuals of both. `derive_outputs` does so for outputs, and `remember` stores all in the pair.
    """

    def __init__(self, packing: Packing, tensors: Sequence[Any]) -> None:
        self.packing, self.pair = packing, packing.pair
        self._tensors: dict[int, tuple[Any, int]] = {}  # each tensor once, with its first index
        for i, x in enumerate(tensors):
            self._tensors.setdefault(id(x), (x, i))
        self._residuals = {id(x): residual for x, residual in packing.left_unpacked}  # None: there is none
        # In eager mode, such an operand may be a scalar that the block computed: a residual, not a constant.
        self._packable_operands = {id(x) for x in packing.operands} - self._residuals.keys()
        self._is_program = is_staging()
        self._chosen: dict[int, Any] = {}
        self._derived: dict[int, Any] = {}
        self._derivations: dict[int, _Derivation | None] = {}  # valid while nothing more is chosen
        self._steps: dict[int, tuple[Sequence[Step], frozenset[Rounding]]] = {}

    def get(self, value: Any) -> Any:
        if id(value) not in self._residuals:
            is_left = _is_never_packed(value, self._is_program)
            self._residuals[id(value)] = value if is_left else self._recalled(value)
        return self._residuals[id(value)]

    def _recalled(self, value: Any) -> Any:
        residual = _recall(self.pair, value)
        is_exact = id(value) in self.packing.exact
        if residual is None or not (self.packing.is_users_rule or is_exact):
            return residual
        if any(isinstance(f, PrimitiveFunction) and not f.row.is_move for f in _functions_of(residual)):
            return None
        is_rounded = is_exact and any(_known(roundings) for _, roundings in _contents(residual)[0].values())
        return None if is_rounded else residual

    def _origin_of(self, value: Any) -> Origin:
        return self.packing.origin_of(value, self._index_of(value))

    def _expression_of(self, value: Any) -> Expression | None:
        return self.packing.expressions.get(id(value), (value, None))[1]

    def _index_of(self, value: Any) -> int:
        return self._tensors.get(id(value), (value, 0))[1]

    def _where(self, value: Any) -> str:
        return f"{self.packing.owner} {self._index_of(value)}"

    def _steps_for(self, value: Any) -> tuple[Sequence[Step], frozenset[Rounding]]:
        """Return the steps that would pack a value, and their errors."""
        if id(value) not in self._steps:
            # `jax.grad(f)(2.0)` passes a Python number in place of an array.
            array = value if hasattr(value, "ndim") else as_arrays([value])[0]
            steps = steps_for(self.pair, array, self._where(value), self._origin_of(value))
            roundings = roundings_of(steps, array)
            if _known(roundings) and id(value) in self.packing.exact:
                steps, roundings = (), frozenset[Rounding]()
            self._steps[id(value)] = steps, roundings
        return self._steps[id(value)]

    # -- what to keep, and what to compute again ---------------------------------------------------------

    def choose(self, outputs: Sequence[Any]) -> None:
        """Choose which tensors to keep, so that backward can compute the others from them."""
        undecided = [x for x, _ in self._tensors.values() if self.get(x) is None]
        # First those that cannot be computed again, so that others can be computed from them.
        for x in [x for x in undecided if not self._may_derive(x)]:
            self._choose([x])
        undecided = [x for x in undecided if id(x) not in self._chosen]
        shared = {id(x) for x in (*self.packing.operands, *outputs)}
        while undecided:  # each round chooses or derives the first one, or chooses all that it needs
            x = undecided[0]
            missing = self._missing(x)
            if missing is None:
                self._choose([x])
            elif missing:
                group = [
                    y for y in undecided if (other := self._missing(y)) is not None and other.keys() <= missing.keys()
                ]
                cost, gain = (sum(map(_size, values)) for values in (missing.values(), group))  # in bytes
                # At about equal cost, it is as good to keep an operand or an output, which a later operation may keep
                # too; integers, which are not rounded; and small tensors.
                is_as_good = all(
                    key in shared or not has_tangent(y) or _size(y) < gain * _SMALL for key, y in missing.items()
                )
                is_worth = cost < gain or (is_as_good and cost <= gain * (1 + _SMALL))
                self._choose([*missing.values()] if is_worth else [x])
            else:
                self._derived[id(x)] = x
            undecided = [x for x in undecided if id(x) not in self._chosen and id(x) not in self._derived]

    def _choose(self, values: Iterable[Any]) -> None:
        values = list(values)
        if not self.packing.is_users_rule and self.pair.recomputes:
            # A rounded mean would move all that is computed from it. But a user's rule may compare it with a rounded
            # tensor. tests: test_a_mean_that_the_rest_is_computed_from_is_not_rounded
            largest = max([_size(x) for x, _ in self._tensors.values()])
            small = [x for x in values if _size(x) < largest * _SMALL and self._steps_for(x)[1]]
            self._steps |= {id(x): ((), frozenset[Rounding]()) for x in small}
        self._chosen |= {id(x): x for x in values}
        self._derivations.clear()

    def _missing(self, value: Any) -> dict[int, Any] | None:
        """Return what has to be kept to compute a value again, or None if it has to be kept itself."""
        return self._derivation(value).missing if self._may_derive(value) else None

    def _may_derive(self, value: Any) -> bool:
        if id(value) in self.packing.exact:
            return False
        if self._is_constant(value):  # it may follow from other numbers
            expression = self._expression_of(value)
            from_numbers = None if expression is None else self._by_expression(expression)
            return from_numbers is not None and not from_numbers.missing
        found = self._derivation(value)
        if id(value) in found.missing:
            return False
        if not self.pair.steps and not is_selected(self.pair.only, value, self._where(value), self._origin_of(value)):
            return False  # the predicate of `recompute_saved`
        if not found.roundings:
            return True
        own = self._steps_for(value)[1]
        if own and id(value) in self.packing.amplified:
            return False
        # Hooks of users may be exact or coarse: a tensor of theirs is computed again from tensors of theirs alone.
        if UNKNOWN in found.roundings and UNKNOWN not in own:
            return False
        return max(_known(found.roundings), default=EXACT) <= max([*_known(own), own_rounding(typeof(value))])

    def _derivation(self, value: Any) -> _Derivation:
        found = self._derive(value)
        assert found is not None  # a value can be kept itself
        return found

    def _derive(self, value: Any) -> _Derivation | None:
        """Return how backward could get a value. None for an `Expression` that it may not evaluate."""
        if id(value) not in self._derivations:
            self._derivations[id(value)] = None  # an operation may have returned its operand, which follows from itself
            self._derivations[id(value)] = self._found_derivation(value)
        return self._derivations[id(value)]

    def _found_derivation(self, value: Any) -> _Derivation | None:
        if isinstance(value, Expression):
            return self._by_expression(value)
        if self._is_constant(value):
            return _CONSTANT
        if id(value) in self._chosen:
            return self._itself(value)._replace(missing={})
        distance = SAME if id(value) in self._tensors else OTHER
        if (residual := self.get(value)) is not None:
            leaves, n_equations = _contents(residual)
            return _Derivation({}, leaves, n_equations, distance)
        expression = self._expression_of(value)
        found = None if expression is None else self._by_expression(expression)
        if found is None:
            return self._itself(value)
        return found._replace(distance=SAME) if distance == SAME else found

    def _itself(self, value: Any) -> _Derivation:
        distance = SAME if id(value) in self._tensors or id(value) in self._chosen else STEEP
        return _Derivation({id(value): value}, {id(value): (_size(value), self._steps_for(value)[1])}, 0, distance)

    def _by_expression(self, expression: Expression) -> _Derivation | None:
        function = expression.function
        row = function.row
        if not row.recomputed or (self.packing.is_users_rule and not row.is_move):
            return None
        found = [self._derive(x) for x in expression.inputs]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            return None
        operands = [
            Operand(x, part.rounded, part.distance, part.by) for x, part in zip(expression.inputs, parts, strict=True)
        ]
        leaves = {key: leaf for part in parts for key, leaf in part.leaves.items()}
        errors = {rounding.error for _, roundings in leaves.values() for rounding in roundings} or {Error.EXACT}
        for error in errors if self.pair.recomputes else {Error.UNKNOWN}:
            condition = row.recomputed.get(error)
            if condition is None or not condition(function, operands):
                return None
        n_equations = 1 + sum([part.n_equations for part in parts])
        large = _n_bytes(function.aval) * _SMALL
        n_large = sum([size > large for size, _ in leaves.values()])
        if n_equations > MOST_EQUATIONS or n_large > _MOST_LARGE_LEAVES:
            return None
        missing = {key: x for part in parts for key, x in part.missing.items()}
        distance = STEEP if function.is_steep(operands) else max([SAME, *[part.distance for part in parts]])
        return _Derivation(missing, leaves, n_equations, distance, function.primitive.name)

    def _is_constant(self, value: Any) -> bool:
        return is_number(value) and id(value) not in self._packable_operands

    # -- keeping -----------------------------------------------------------------------------------------

    def pack(self, outputs: Sequence[Any]) -> list[Any]:
        """Pack the chosen tensors. Return the outputs, in staged code behind a barrier."""
        with hooks_suspended():
            residuals = [
                pack_tensor(self.pair, self._steps_for(x)[0], as_arrays([x])[0], self._where(x), self._origin_of(x))
                for x in self._chosen.values()
            ]
            residuals, outputs = _behind_one_barrier(residuals, outputs)
        self._residuals |= zip(self._chosen, residuals, strict=True)
        if is_reported.value:
            for x, residual in zip(self._chosen.values(), residuals, strict=True):
                kept = residual.function if isinstance(residual, Expression) else residual
                self.pair.names.put(kept, next(iter(self._origin_of(x).keys), ""))
        self._put_derived(self._derived.values())
        return outputs

    def derive_outputs(self, outputs: Sequence[Any], behind: Sequence[Any]) -> None:
        """Find the outputs that follow from the tensors that are kept. `behind`: the outputs behind a barrier."""
        self._derivations.clear()
        is_open = [
            self._expression_of(x) is not None and not self._is_constant(x) and self.get(x) is None for x in outputs
        ]
        derived = {id(x): x for x in select(outputs, is_open) if not self._derivation(x).missing}
        self._put_derived(derived.values())
        self._derived |= derived
        # Later code reads `behind`.
        self._residuals |= {id(x): self._residuals.get(id(other)) for x, other in zip(behind, outputs, strict=True)}

    def _put_derived(self, values: Iterable[Any]) -> None:
        done: dict[int, Any] = {}
        self._residuals |= {id(x): self._recomputed(x, done) for x in values}

    def _recomputed(self, value: Any, done: dict[int, Any]) -> Expression:
        def residual_of(x: Any) -> Any:
            if self._is_constant(x):
                return None
            residual = self.get(x)
            return self._recomputed(x, done) if residual is None else residual

        expression = self._expression_of(value)
        assert expression is not None  # else `_derive` found that the value has to be kept
        return recomputed(expression, residual_of, done)

    def remember(self, behind: Sequence[Any], owner: PackedResiduals) -> None:
        """Store in the pair how each tensor and output is kept, for as long as `owner` exists."""

        def weakly_held(function: Any, inputs: list[Any]) -> Expression:
            return Expression(weakref.ref(function) if isinstance(function, PackedTensor) else function, inputs)

        trace, done = weakref.ref(current_trace()), dict[int, Any]()
        self.pair.n_recomputed[self._is_program] += len(self._derived.keys() & self._tensors.keys())
        for x in (*self._chosen.values(), *self._derived.values(), *behind):
            residual = self._residuals.get(id(x))
            if residual is None:
                continue
            weak = fold(residual, reference, weakly_held, done)
            self.pair.residuals.put(x, _Remembered(trace, weakref.ref(owner), weak))

    def further_residuals(self) -> list[Any]:
        """Return residuals that only the report and JAX's check for NaN read."""
        if not (is_reported.value or is_nan_reported()):
            return []
        recomputed_ = {id(x): x for x, _ in self._tensors.values() if id(x) in self._derived and np.ndim(x)}
        shown = [*recomputed_.values(), *self._chosen.values()]
        hidden = [x for x in shown if isinstance(self.get(x), Expression)]
        sources: dict[int, str] = {}
        for key, residual in ((key, self.get(x)) for key, x in recomputed_.items()):
            names = [self.pair.names.get(x) for x in (*_functions_of(residual), *leaves_of(residual))]
            sources[key] = ", ".join(dict.fromkeys(name for name in names if name)) or "inputs"
        return [*_marks(self.packing, shown, sources), *_largest(hidden)]


def _contents(residual: Any) -> tuple[dict[int, tuple[float, frozenset[Rounding]]], int]:
    """Return size and errors of each kept tensor that an expression reads, and the number of its equations."""
    leaves: dict[int, tuple[float, frozenset[Rounding]]] = {}
    visited: dict[int, Any] = {}
    to_visit, n_equations = [residual], 0
    while to_visit:
        x = to_visit.pop()
        if id(x) in visited:
            continue
        visited[id(x)] = x
        if not isinstance(x, Expression):
            leaves[id(x)] = _size(x), frozenset()
        elif isinstance(x.function, PackedTensor):
            leaves[id(x.function)] = _n_bytes(x.function.type), x.function.roundings
        elif x.function is with_tangent:
            to_visit.append(x.inputs[1])
        else:
            n_equations += isinstance(x.function, PrimitiveFunction)  # or it is a constant
            to_visit += x.inputs
    return leaves, n_equations


def _functions_of(residual: Any) -> list[Any]:
    functions: list[Any] = []
    fold(residual, lambda _: None, lambda function, _: functions.append(function))
    return functions


def _known(roundings: Iterable[Rounding]) -> list[Rounding]:
    """Leave out errors of users' hooks."""
    return [rounding for rounding in roundings if rounding != UNKNOWN]


def _n_bytes(aval: Any) -> float:
    size: Any = math.prod(aval.shape)  # no integer, if `jax.export` has symbolic dimensions
    return (size * aval.dtype.itemsize if aval.shape else 0) if isinstance(size, int) else math.inf


def _size(value: Any) -> float:
    return _n_bytes(typeof(value))


def _behind_one_barrier(residuals: list[Any], outputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """In staged code, put the packed arrays and the outputs behind one barrier, so that XLA packs first.

    Without it, XLA may simplify unpack(pack(x)) to x and keep x (two casts cancel out), or pack late.
    """
    packed = [residual for residual in residuals if isinstance(residual, Expression)]
    arrays = {id(x): x for residual in packed for x in leaves_of(residual)}
    if not any(map(is_staged, arrays.values())):
        return residuals, list(outputs)
    values = barrier([*outputs, *arrays.values()])
    bound = dict(zip(arrays, values[len(outputs) :], strict=True))
    of_bound = [fold(r, lambda x: bound[id(x)]) if isinstance(r, Expression) else r for r in residuals]
    return of_bound, values[: len(outputs)]


def _marks(packing: Packing, tensors: Sequence[Any], sources: Mapping[int, str]) -> list[Any]:
    """Return marks of tensors for the report. `sources`: id of a recomputed tensor -> names of its sources."""
    if not is_reported.value:
        return []
    shown = {id(x): x for x in tensors if not _is_never_packed(x, is_staging())}.values()
    return [apply(Mark(typeof(x), packing.origin_of(x, 0), sources.get(id(x))), [x])[0] for x in shown]


def _largest(tensors: Sequence[Any]) -> list[Any]:
    # JAX looks for NaN among the results of a program, and so misses one in a packed or recomputed tensor. It finds the
    # NaN in the largest absolute value of each, which is one more residual. tests: hooks/test_modes.py
    if not is_nan_reported():
        return []
    traced = [jax.lax.stop_gradient(x) for x in tensors if is_tracer(x) and has_tangent(x)]
    return [jnp.max(jnp.abs(x)) for x in traced]


def _is_never_packed(tensor: Any, is_program: bool) -> bool:
    # Few hooks can read a PRNG key, and no hook can restore a Ref. A program holds its constants anyway, and XLA would
    # evaluate the hooks on them while it compiles, which may take seconds.
    return is_ref(tensor) or is_key(tensor) or 0 in np.shape(tensor) or (is_program and not is_tracer(tensor))
