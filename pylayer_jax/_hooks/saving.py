"""What layers, and rules of users, save for backward: marked for a plan, or packed as it is saved.

    in a decorated function   a plan keeps or packs what a `SavedByRule` marks, and computes it again by moves only
    in a `with` block         each tensor is packed when the layer, or a rule that JAX differentiates now, has run

By moves only: rules may compare two tensors that they saved, and XLA rounds a formula differently in another fusion.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.tree_util import Partial, tree_leaves, tree_map

from pylayer_jax._jax.linearity import transpose_jaxpr
from pylayer_jax._jax.rule_function import LinearMap, RuleFunction, Values, apply, apply_linear, merge, scatter, select
from pylayer_jax._jax.traces import (
    current_trace,
    is_staged,
    is_staging,
    is_tracer,
    is_unknown,
    set_current_trace,
    trace_of_primals,
    without_pass_through,
)
from pylayer_jax._jax.transparency import Identity, barrier
from pylayer_jax._jax.types import as_arrays, full_tangent, has_tangent, is_nan_reported, is_ref, tangent_type, typeof

from .active import PLANNED, SUSPENDED, active
from .pack import Origin, Pair, Place, pack_tensor, restored, roundings_of, steps_for
from .primitives import UNKNOWN

__tracebackhide__ = True  # pytest hides these frames, as JAX does elsewhere

# -- marks for a plan --------------------------------------------------------------------------------------


class Mark(Identity):
    """Marks values for a plan."""

    depends_on_cotangents = False  # whether backward may read them for some cotangents only


class Held(Mark):
    """Marks residuals that a plan leaves as they are: packed by a body or a block in it, or attributes of `ctx`."""

    name, depends_on_cotangents = "held", True


class SavedByRule(Mark):
    """Marks what a layer or a rule of a user saves."""

    name = "saved"

    def __init__(self, types: Sequence[Any], layer: str, is_exact: bool, depends_on_cotangents: bool) -> None:
        super().__init__(types)
        self.layer, self.is_exact, self.depends_on_cotangents = layer, is_exact, depends_on_cotangents


class ReadAgain(Mark):
    """Marks what an inner decorated function computes from again, which is never packed."""

    name = "read_again"


class Lent(Mark):
    """Marks what a function computes and bodies in it read: if these do not pack it, the plan around them keeps it."""

    name = "lent"

    def __init__(self, types: Sequence[Any], functions: Sequence[Any], inputs: Sequence[int]) -> None:
        super().__init__(types)
        self.functions, self.inputs = functions, inputs  # the planned bodies, and which of their inputs


def held(arrays: Sequence[Any], inputs: Sequence[Any] = ()) -> list[Any]:
    """Mark arrays, while a plan is made, as residuals that it leaves as they are. Inputs are not marked."""
    if active.value is not PLANNED:
        return list(arrays)
    known = {id(x) for x in inputs}
    is_own = [is_tracer(x) and id(x) not in known for x in arrays]
    own = select(arrays, is_own)
    return merge(is_own, apply(Held([typeof(x) for x in own]), own), arrays) if own else list(arrays)


# -- packed tensors of a layer or a rule -------------------------------------------------------------------


def keeps_residuals(tangents: Sequence[Any]) -> bool:
    """Return whether a rule keeps residuals for these tangents. Eager forward mode keeps none."""
    return any(is_unknown(t) or is_staged(t) for t in tangents)


def outside_partial_evaluation(primals: Sequence[Any]) -> Any:
    # JAX runs a rule in a partial evaluation, in which the tangents are unknown. The hooks run in the trace outside of
    # it, in which the primals are known.
    return set_current_trace(without_pass_through(trace_of_primals(primals)))


def past_blocks() -> Any:
    """Set the trace that code outside of all blocks would have."""
    return set_current_trace(without_pass_through(current_trace()))


@contextlib.contextmanager
def without_hooks() -> Generator[None]:
    with active(SUSPENDED), past_blocks():
        yield


def unpacked(residuals: Sequence[Any], arrays: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Values, Values]:
    """Return the tensors of residuals, which have positions in place of arrays, and the cotangents to go on with."""
    positions = list(dict.fromkeys(tree_leaves(list(residuals))))
    present = [c is not None for c in cotangents]
    read, given = as_arrays([arrays[i] for i in positions]), select(cotangents, present)
    # Without a barrier, XLA may unpack a tensor after packing, and hold all tensors until backward begins; or transpose
    # or broadcast one that is kept as it is. It waits only if backward uses the cotangents that come from the barrier.
    if given and any(map(is_staged, read)):
        bound = barrier([*read, *given], waits=True)
        read, given = bound[: len(read)], bound[len(read) :]
    array_at = dict(zip(positions, read, strict=True))
    distinct = {id(x): x for x in residuals}  # what is saved twice is unpacked once
    tensor_of = {key: restored(tree_map(array_at.__getitem__, x)) for key, x in distinct.items()}
    return [tensor_of[id(x)] for x in residuals], scatter(given, present)


def reader(residuals: Sequence[Any], arrays: Sequence[Any], cotangents: Sequence[Any]) -> Callable[[int], Any]:
    """Return a function of an index, which unpacks the tensors of a layer when it first reads one of them."""
    is_packed = [isinstance(x, Partial) for x in residuals]

    @functools.cache
    def tensors() -> Values:
        with without_hooks():
            return scatter(unpacked(select(residuals, is_packed), arrays, cotangents)[0], is_packed)

    return lambda index: tensors()[index] if is_packed[index] else arrays[residuals[index]]


@dataclasses.dataclass(eq=False)
class Saver:
    """Saves the tensors of one layer or rule of a user in a decorated function or a `with` block."""

    pair: Pair | None = None  # None in a decorated function, whose plan packs
    layer: str = ""
    places: Sequence[Place] | None = None  # of the inputs; None unless a `BlockTrace` is current
    is_exact: bool = False  # whether tensors stay as they are if hooks would round them

    def save(
        self, owner: str, names: Sequence[str], inputs: Sequence[Any], tensors: Sequence[Any], outputs: Sequence[Any]
    ) -> tuple[list[Any] | None, list[Any], list[Any]]:
        """Return the residuals with positions in place of arrays, None if nothing is packed; arrays; and outputs."""
        with outside_partial_evaluation([*tensors, *outputs]):
            if active.value is PLANNED and self.places is None:
                has_several_outputs = sum(map(has_tangent, outputs)) > 1
                mark = SavedByRule([typeof(x) for x in tensors], self.layer, self.is_exact, has_several_outputs)
                return None, apply(mark, as_arrays(tensors)) if tensors else [], list(outputs)
            if self.pair is None or active.value is SUSPENDED:
                return None, list(tensors), list(outputs)
            place_of_input = zip(inputs, self.places or (), strict=False)
            residual_of = {id(x): x for x, place in place_of_input if self.pair.never_packs(place)}
            with active(SUSPENDED):
                for i, x in enumerate(tensors):
                    if id(x) not in residual_of:
                        where, origin = f"{owner} {i}", Origin(layer=self.layer, name=names[i] if names else "")
                        residual_of[id(x)] = _packed(self.pair, self.is_exact, x, where, origin)
            outputs, bound = behind_barrier(outputs, list(residual_of.values()))
            residual_of = dict(zip(residual_of, bound, strict=True))
            arrays, residuals = numbered([residual_of[id(x)] for x in tensors])
            arrays += largest({id(x): x for x in tensors if isinstance(residual_of[id(x)], Partial)}.values())
            return residuals, held(arrays, inputs), outputs


def _packed(pair: Pair, is_exact: bool, x: Any, where: str, origin: Origin) -> Any:
    # A program holds its constants anyway, and XLA would evaluate the hooks on them while it compiles.
    if (not is_tracer(x) and is_staging()) or is_ref(x):
        return x
    (array,) = as_arrays([x])  # `jax.grad(f)(2.0)` passes a Python number in place of an array
    steps = steps_for(pair, array, where, origin)
    is_left = is_exact and bool(roundings_of(steps, array) - {UNKNOWN})  # hooks of users get all that layers save
    return pack_tensor(pair, () if is_left else steps, array, where, origin)


def numbered(residuals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the distinct arrays in residuals, and the residuals with positions in place of arrays."""
    arrays = {id(x): x for x in tree_leaves(list(residuals))}
    position_of = {key: i for i, key in enumerate(arrays)}
    # What is saved twice stays one object, which is unpacked once.
    done = {id(x): tree_map(lambda a: position_of[id(a)], x) for x in residuals}
    return list(arrays.values()), [done[id(x)] for x in residuals]


def behind_barrier(values: Sequence[Any], residuals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return both, in staged code with packed arrays behind a barrier with the values."""
    arrays = {id(a): a for a in tree_leaves([x for x in residuals if isinstance(x, Partial)])}
    if not any(map(is_staged, arrays.values())):
        return list(values), list(residuals)
    # Without it, XLA may simplify unpack(pack(x)) to x and keep x (two casts cancel out), or pack late.
    bound = barrier([*as_arrays(values), *arrays.values()])
    array_of = dict(zip(arrays, bound[len(values) :], strict=True))
    return bound[: len(values)], [
        tree_map(lambda a: array_of[id(a)], x) if isinstance(x, Partial) else x for x in residuals
    ]


def largest(tensors: Collection[Any]) -> list[Any]:
    # JAX looks for NaN among the results of a program, and so misses one in a packed or recomputed tensor. It finds the
    # NaN in the largest absolute value of each, which is one more residual. tests: hooks/test_modes.py
    traced = [x for x in tensors if is_tracer(x) and has_tangent(x)] if is_nan_reported() else []
    return [jnp.max(jnp.abs(jax.lax.stop_gradient(x))) for x in traced]


# -- custom rules of users -----------------------------------------------------------------------------------


# The values; the transpose of the derivative, a function of its residuals and of cotangents; the residuals.
Linearized = tuple[Values, Callable[..., Values], list[Any], "Vjp"]


def _have_tangents(values: Sequence[Any], primal: Any) -> list[bool]:
    # A tracer of an outer derivative has no tangent here. tests: test_an_inner_derivative_that_reaches_nothing
    return [is_tracer(x) and x._trace is primal._trace for x in values]


class HookedFunction(RuleFunction):
    """A function whose rule keeps residuals, which hooks pack."""

    def transpose(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return transpose_jaxpr(self.name, jaxpr, args, cotangents)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        nonzero = [t is not None for t in tangents]
        given = select(tangents, nonzero)
        if not keeps_residuals(given):
            run: Any = lambda *args: (ys := self.run(*merge(nonzero, args, primals)), _have_tangents(ys, args[0]))
            values, found, mask = jax.jvp(run, select(primals, nonzero), given, has_aux=True)
            rows = zip(values, found, mask, strict=True)
            return values, [t if is_set and has_tangent(typeof(v)) else None for v, t, is_set in rows]
        with outside_partial_evaluation(primals):
            values, transpose, arrays, vjp = self.linearized(primals, nonzero)
        linear = Pullback(self.name, len(arrays), vjp.cotangent_types, transpose)
        return values, scatter(apply_linear(linear, arrays, given), vjp.nonzero)

    def linearized(self, primals: Sequence[Any], nonzero: Sequence[bool]) -> Linearized:
        raise NotImplementedError


class UsersRule(HookedFunction):
    """One operation that applies a custom rule of a user, whose residuals a `Saver` saves."""

    def __init__(self, name: str, saver: Saver, jaxpr: Any = None, bind: Callable[..., Values] | None = None) -> None:
        self.name, self._saver, self.jaxpr, self._bind = name, saver, jaxpr, bind

    def run(self, *args: Any) -> Values:
        return super().run(*args) if self._bind is None else self._bind(*args)

    def linearized(self, primals: Sequence[Any], nonzero: Sequence[bool]) -> Linearized:
        vjp = Vjp(self.name)
        with contextlib.nullcontext() if self._saver.pair is None else active(SUSPENDED):
            values, residuals = vjp.linearize(self.run, primals, nonzero)
        owner = f"the operation {self.name}, residual"
        packed, arrays, values = self._saver.save(owner, (), primals, residuals, values)

        def transpose(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
            if packed is None:
                return vjp.gradients(residuals, cotangents)
            with without_hooks():
                return vjp.gradients(*unpacked(packed, residuals, cotangents))

        return values, transpose, arrays, vjp


class Pullback(LinearMap):
    """A linear map that is given by its transpose."""

    def __init__(self, name: str, n_residuals: int, types: Sequence[Any], transpose: Callable[..., Values]) -> None:
        super().__init__(name, n_residuals, types)
        self._transpose = transpose

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return self._transpose(residuals, cotangents)

    def evaluate(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        def transposed(*cotangents: Any) -> Values:
            pairs = zip(self.transpose(residuals, cotangents), tangents, strict=True)
            return [full_tangent(x, typeof(t)) for x, t in pairs]

        types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in self.types]
        return list(jax.linear_transpose(transposed, *types)(list(tangents)))


class Vjp:
    """The result of `jax.vjp` without its residuals. Tangents and cotangents that are zero are None."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.nonzero: list[bool] = []  # for each value: whether it has a tangent

    def linearize(
        self, run: Callable[..., Values], primals: Sequence[Any], nonzero: Sequence[bool]
    ) -> tuple[Values, list[Any]]:
        """Differentiate a function. Return its values, and the residuals."""

        def gated(*args: Any) -> Values:
            given = apply(_Gate([typeof(x) for x in args], self._note_reached), args)
            values = run(*merge(nonzero, given, primals))
            values = apply(_Gate([typeof(x) for x in values], self._drop_missing), values)
            self.nonzero = _have_tangents(values, args[0])
            return values

        values, pullback = jax.vjp(gated, *select(primals, nonzero))
        residuals, self._treedef = jax.tree_util.tree_flatten(pullback)
        self.value_types = [typeof(v) for v in values]
        self.cotangent_types = [tangent_type(t) for t in select(self.value_types, self.nonzero)]
        return values, as_arrays(residuals)

    def gradients(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        """Return the gradients for cotangents of the values that have a tangent."""
        pullback: Any = jax.tree_util.tree_unflatten(self._treedef, list(residuals))
        pairs = zip(scatter(cotangents, self.nonzero), self.value_types, strict=True)
        full = [full_tangent(c, t) for c, t in pairs]
        missing, reached, logs = {i for i, c in enumerate(cotangents) if c is None}, set[int](), None
        token = _calls.set({**_calls.get({}), self: (missing, reached)})
        try:
            if hasattr(pullback, "with_logs"):
                found, logs = pullback.with_logs(full)
            else:  # before jax 0.12
                found = pullback(full)
        finally:
            _calls.reset(token)
        if logs:  # only JAX's own primitives may pass logs on
            raise TypeError(
                f"the backward of the operation {self._name} returns the logs {sorted(map(str, logs))}, which a block "
                "of hooks would lose. Apply the function that returns them (defvjp_with_logs) outside of the block."
            )
        return [x if i in reached else None for i, x in enumerate(found)]

    def _note_reached(self, positions: Sequence[int], cotangents: Sequence[Any]) -> Values:
        _, reached = _calls.get({}).get(self, (set(), set()))  # an outer derivative may come here too
        reached.update(i for i, c in zip(positions, cotangents, strict=True) if c is not None)
        return list(cotangents)

    def _drop_missing(self, positions: Sequence[int], cotangents: Sequence[Any]) -> Values:
        missing, _ = _calls.get({}).get(self, (set(), set()))
        return [None if i in missing else c for i, c in zip(positions, cotangents, strict=True)]


# The calls that run: several threads may call one vjp function, and one call may lead to another. A call knows which of
# the values with a tangent have no cotangent (positions among these), and which arguments get one.
_calls: Final[contextvars.ContextVar[dict[Vjp, tuple[set[int], set[int]]]]] = contextvars.ContextVar("calls")


class _Gate(Identity):
    """Stands before and behind a function, so that tangents and cotangents that are zero stay None.

    JAX's vjp functions take and return arrays of zeros for them, and zero times infinity is NaN.
    tests: hooks/test_reach.py::test_an_output_without_a_cotangent, integrations/test_solvers.py
    """

    name = "gate"

    def __init__(self, types: Sequence[Any], transpose: Callable[..., Values]) -> None:
        super().__init__(types)
        self._transpose = transpose

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        nonzero = [t is not None for t in tangents]
        given = select(tangents, nonzero)
        return list(primals), scatter(apply(self.of(list(map(typeof, given)), range(len(given))), given), nonzero)

    def transpose(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return self._transpose(self.original_positions, cotangents)  # positions among those with a tangent
