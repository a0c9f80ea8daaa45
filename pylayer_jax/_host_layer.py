"""Runs the methods of a layer of NumPy: all with `host = True`, all but `backward` with `host = "forward"`.

    class Solve(PyLayer):        jax.grad of a function that applies Solve binds
        host = True
        ...                      y:f32[3] t:u32[2] = host_call[name=Solve.forward] device a b
                                 ga gb             = host_call[name=Solve.backward] device t a b dy

The first call leaves the context of its run on the host, where the second call finds it by the ticket t, the number of
this slot in the program and that of the run. If the host has dropped it (NOTE [held objects] in `_hooks/host.py`), the
second call runs `forward` again on a and b, so that JAX may drop, move, merge or repeat these calls. A call whose
ticket no code reads leaves no context.

With concrete arrays, the methods run directly. Otherwise the types of the outputs come from a run of `forward` on
example arrays, or from the method `result_types` of the class. With `host = "forward"`, the context keeps only inputs,
outputs and static arguments, so that JAX can trace `backward`. tests: contract/test_host_layers.py
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import coerce, match_gradients
from ._context import ContextState, ResidualTree, check_returned, copy_container, positions_of_kept
from ._hooks.host import HostStore, Slot, call_on_host, new_number
from ._jax.rule_function import scatter, select
from ._jax.traces import NEEDS_VALUES, ShapedArray, checkpoint_name, eval_context, is_tracer
from ._jax.transparency import forbid_derivative
from ._jax.types import as_arrays, has_tangent, is_key, is_tensor, typeof, varying_axes, varying_over
from ._messages import describe, once_differentiable_error
from ._trees import Skeleton, contains, split

LayerCall = Any  # the class in `_call.py`, which imports this module

MOST_BYTES = 2**30  # of the contexts of one slot, each of which counts for at least `_SIZE`
_SIZE: Final = 2**20
_MOST_TRIALS: Final = 64  # of one class, since each call may pass a new lambda
_TICKET: Final = "_ticket"  # an attribute of ctx with host = "forward"
_store = HostStore()  # of all layers


# -- runs ------------------------------------------------------------------------------------------------------


class _Run(NamedTuple):
    """Result of a run of `forward`. A trial, on example arrays, has types in place of arrays."""

    skeleton: Skeleton  # of the outputs
    arrays: list[Any]
    marked: list[bool]  # whether each array is marked non-differentiable
    materialize: bool
    context: Any  # what `forward` kept; with host = "forward", a `ResidualTree`

    def structure(self) -> list[Any]:
        """Return everything but types that has to be the same in every run."""
        kept = self.context
        own = [kept.indices, *kept.skeleton.parts()] if isinstance(kept, ResidualTree) else []
        return [*self.skeleton.parts(), self.materialize, *own]

    def as_trial(self) -> _Run:
        types = [ShapedArray(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in self.arrays]
        return self._replace(arrays=types, context=self.context if isinstance(self.context, ResidualTree) else None)

    def values_of(self, run: _Run, batch: tuple[int, ...]) -> list[np.ndarray]:
        """Return the arrays of a run in the dtypes of this trial. The run may differ in their contents only."""
        rows = [*zip(self.arrays, run.arrays, self.marked, run.marked, strict=False)]
        fits = self.structure() == run.structure() and all(
            y.shape == (*batch, *t.shape)
            and (y.dtype == t.dtype or np.can_cast(y.dtype, t.dtype, "same_kind"))
            and (is_marked == expected or not has_tangent(t))
            for t, y, expected, is_marked in rows
        )
        if not fits:
            raise ValueError(
                f"this run returned {run.shown()}; expected {self.shown(batch)}, as on example arrays or in "
                "result_types. Only the contents of arrays may depend on values, not statics, marks and flags, nor "
                "which inputs and outputs ctx keeps."
            )
        return [np.asarray(y, t.dtype) for t, y, *_ in rows]

    def shown(self, batch: tuple[int, ...] = ()) -> str:
        rows = zip(self.skeleton.tensor_paths(), self.arrays, self.marked, strict=True)
        types = {path: f"{x.dtype}{[*batch, *x.shape]}{' (marked)' * is_marked}" for path, x, is_marked in rows}
        shown = [f"output{path}: {types.get(path) or describe(x)}" for path, x in self.skeleton.paths()]
        return ", ".join([*shown, *["set_materialize_grads(False)"] * (not self.materialize)])


def _is_output(x: Any) -> bool:
    return is_tensor(x) or type(x) in (bool, int, float, complex)


@contextlib.contextmanager
def _refusing_tracers(call: LayerCall, method: str) -> Generator[None]:
    try:
        yield
    except (*NEEDS_VALUES, jax.errors.UnexpectedTracerError) as error:  # the method closes over a tracer
        raise call.closed_over_error(method) from error


class _LayerSlot(Slot):
    """One application of a layer: runs `forward` and `backward` on NumPy arrays, and holds contexts."""

    def __init__(self, call: LayerCall, needs: tuple[bool, ...]) -> None:
        super().__init__(_store, MOST_BYTES)
        self.call, self.number = call, new_number()
        self.needs = needs  # the `needs_input_grad` of `forward`

    def run(self, inputs: Sequence[Any]) -> _Run:
        call, own = self.call, [np.array(x) for x in inputs]
        if call.layer.host == "forward":
            # JAX traces `backward` with the inputs that come, and may drop the call of a `forward` that changes them in
            # some runs only. tests: test_inputs_of_a_forward_whose_backward_is_jax_code_are_read_only
            for x in own:
                x.flags.writeable = False
        state = ContextState(call.name, lambda: self.needs, own)
        ctx = call.layer._context_class(state)
        with _refusing_tracers(call, "forward"):
            result = call.arguments.call("forward", call.layer._forward_with_ctx(), own, ctx)
        state.in_forward = False
        outputs, skeleton = split(result, _is_output)
        check_returned(state, outputs)
        marked = [contains(state.marked, x) for x in outputs]
        if call.layer.host is True:
            kept = split((state.saved, dict(vars(ctx))), lambda x: isinstance(x, np.ndarray))
        else:
            arguments = [a.skeleton.fill(own[a.span]) for a in call.arguments.passed]
            kept = positions_of_kept(state, vars(ctx), arguments, outputs)
        return _Run(skeleton, [np.asarray(x) for x in outputs], marked, state.materialize, kept)

    def hold(self, run: _Run, device: np.ndarray) -> np.ndarray:
        """Hold the context of a run. Return its ticket, or those of a batch of examples, whose axes `device` has."""
        numbers = np.array([new_number() for _ in range(device.size)], np.uint32).reshape(device.shape)
        if numbers.size and self.call.layer.host is True:
            arrays, rest = run.context
            # The size of another object, such as a factorization, is unknown.
            is_known = all(isinstance(x, (int, float, complex, str, np.generic, type(None))) for x in rest.statics())
            size = sum(x.nbytes for x in arrays) + (_SIZE if is_known else 16 * _SIZE)
            self.put(int(numbers.flat[0]), (numbers, run.context), int(device.flat[0]), size)
        return np.stack([np.full_like(numbers, self.number), numbers], -1)

    def gradients(
        self, needed: Sequence[bool], skeleton: Skeleton, device: np.ndarray, tickets: np.ndarray, *arrays: np.ndarray
    ) -> list[np.ndarray]:
        """Run `backward` on inputs and cotangents. Return one array per gradient that is `needed`."""
        call, n = self.call, len(needed)
        is_taken, numbers = tickets[..., 0] == self.number, tickets[..., 1]
        batch = numbers.shape
        gradients = [np.zeros((*batch, *t.shape), t.dtype) for t in select(call.arguments.types, needed)]
        if not is_taken.any():
            return gradients
        if not is_taken.all():
            # Tickets that are 0, or of another slot, come from a batched `cond` of which an example took the other
            # branch. What comes with them are no inputs: zeros, which `forward` may refuse, or other residuals. So an
            # example that took the branch stands in. tests: test_branches_of_a_batch
            rows = np.where(is_taken, np.arange(numbers.size).reshape(batch), np.argmax(is_taken))
            arrays = tuple(x.reshape(numbers.size, *x.shape[len(batch) :])[rows] for x in arrays)
        context = None
        with contextlib.suppress(KeyError):
            held, found = self.get(int(numbers.flat[0]), int(device.flat[0]))
            # If JAX batched the two calls differently, NumPy would silently broadcast the context against cotangents of
            # other examples. tests: test_broadcast_under_a_further_batch
            context = found if np.array_equal(held, numbers) else None
        kept, kept_skeleton = context or self.run(arrays[:n]).context
        saved, attributes = kept_skeleton.fill([x.copy() for x in kept], copy_container)
        ctx = call.backward_context(needed, lambda: saved, attributes)
        with _refusing_tracers(call, "backward"):
            result = call.layer.backward(ctx, *skeleton.fill([np.array(x) for x in arrays[n:]]))
        for i, g in enumerate(select(match_gradients(result, call.arguments, needed, call.layer, batch), needed)):
            if g is not None and is_taken.all():
                gradients[i] = g
            elif g is not None:
                gradients[i][is_taken] = g[is_taken]
        return gradients


# -- trials ----------------------------------------------------------------------------------------------------

_trials: weakref.WeakKeyDictionary[type, dict[Any, _Run]] = weakref.WeakKeyDictionary()


def _trial_of(slot: _LayerSlot) -> _Run:
    """Return a trial: that of an earlier call with the same types and statics, if there is one."""
    arguments = slot.call.arguments
    types = [(t.shape, t.dtype) for t in arguments.types]
    statics = [(type(x), x) for a in arguments.passed for x in itertools.chain([a.name], *a.skeleton.parts())]
    key = jax.enable_x64.value, *types, *statics
    known = _trials.setdefault(slot.call.layer, {})
    with contextlib.suppress(Exception):  # an object may refuse to be hashed or compared
        if key in known:
            return known[key]
    trial = _make_trial(slot)
    with contextlib.suppress(Exception):
        known[key] = trial
        if len(known) > _MOST_TRIALS:
            known.pop(next(iter(known)))
    return trial


def _make_trial(slot: _LayerSlot) -> _Run:
    call = slot.call
    if hasattr(call.layer, "result_types"):
        structs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in call.arguments.types]
        result = call.arguments.call("result_types", call.layer.result_types, structs)
        leaves, skeleton = split(result, lambda x: isinstance(x, jax.ShapeDtypeStruct) or _is_output(x))
        types = [np.asarray(x) if _is_output(x) else x for x in leaves]
        return _Run(skeleton, types, [False] * len(types), True, None).as_trial()
    try:
        with eval_context(), np.errstate(all="ignore"):
            trial = slot.run(_example_arrays(call)).as_trial()
            if not trial.arrays:
                raise ValueError(f"it returned {trial.shown() or None}: expected at least one array or number.")
            return trial
    except (Exception, KeyboardInterrupt) as error:  # of a user who waits for code that does not end
        types = ", ".join(f"{t.dtype}{list(t.shape)}" for t in call.arguments.types)
        error.add_note(
            f"This happened in a run of {call.name}.forward on example arrays ({types}), which shows the types of the "
            "results before a compiled program runs. If it needs particular values, such as a positive definite "
            "matrix, add to the class: @staticmethod def example(x): return ... It gets the arguments of apply, and "
            "returns arrays of the same shapes and dtypes. Or declare the results: @staticmethod def result_types(x): "
            "return jax.ShapeDtypeStruct(x.shape, x.dtype)."
        )
        raise


def _example_arrays(call: LayerCall) -> list[np.ndarray]:
    """Return random numbers from 0 to 1 (zeros for integers), or the result of the method `example`."""
    # Code that takes a logarithm, or distances in a graph, fails or never ends on negative numbers.
    rng, arrays = np.random.default_rng(0), list[np.ndarray]()
    for t in call.arguments.types:
        imaginary = 1j * rng.random(t.shape) if jnp.issubdtype(t.dtype, np.complexfloating) else 0
        arrays.append(np.asarray((rng.random(t.shape) + imaginary) * has_tangent(t)).astype(t.dtype))
    if not hasattr(call.layer, "example"):
        return arrays
    result = call.arguments.call("example", call.layer.example, arrays)
    if result is None:
        raise ValueError(f"{call.name}.example returned None. Did you forget return?")
    try:
        found = match_gradients(result, call.arguments, [True] * len(arrays), call.layer, ())
    except ValueError as error:
        raise ValueError(f"{call.name}.example has to return arrays as backward returns gradients. {error}") from None
    return [x if y is None else y for x, y in zip(arrays, found, strict=True)]


# -- calls in programs -----------------------------------------------------------------------------------------


def _bind_host_call(
    call: LayerCall,
    method: str,
    run: Callable[..., Any],
    types: Sequence[Any],
    tensors: Sequence[Any],
    tickets: Sequence[Any] = (),
    **options: Any,
) -> tuple[list[Any], Any]:
    """Bind a `host_call` of `run(device, *tickets, *tensors)`. Return its results, and the index of the device."""
    values, device = call_on_host(
        _store,
        f"{call.name}.{method}",
        run,
        types,
        [*tickets, *tensors],
        no_derivative="the code of a layer of NumPy has no derivative.",
        takes_batches=call.layer.host_vmap == "broadcast" and method != "vmap",
        **options,
    )
    # Methods are pure, so that their results vary as the tensors do, and not as the tickets, which differ everywhere.
    axes = frozenset[Any]().union(*(varying_axes(typeof(x)) for x in tensors))
    return [varying_over(axes, x) for x in values], device


def run_forward(call: LayerCall, ctx: Any, tensors: Sequence[Any]) -> Any:
    """Run `forward` on NumPy arrays, and keep on `ctx` what JAX keeps. Return its result with JAX arrays."""
    for path, t in zip(call.arguments.tensor_names(), call.arguments.types, strict=True):
        if is_key(t) or path in call.arguments.ref_names():
            raise TypeError(
                f"{call.name}.apply, argument {path!r}: a PRNG key or a jax.Ref is no NumPy array, which the methods "
                f"of a class with host = {call.layer.host!r} get. Pass jax.random.key_data(key), or ref[...]."
            )
    slot, state, is_held = _LayerSlot(call, ctx.needs_input_grad), ctx._state, call.layer.host is True
    if any(map(is_tracer, tensors)):
        result_run = trial = _trial_of(slot)

        def run(device: np.ndarray, *arrays: np.ndarray, holds: bool = True) -> list[np.ndarray]:
            result = slot.run(arrays)
            values = trial.values_of(result, device.shape)
            return [*values, slot.hold(result, device)] if holds else values

        types = [*trial.arrays, ShapedArray((2,), np.dtype(np.uint32))]
        without_ticket = functools.partial(run, holds=False)
        (*values, ticket), device = _bind_host_call(call, "forward", run, types, tensors, without_last=without_ticket)
        # All results bear the first name: a policy of `jax.checkpoint` that saves it does not run `forward` again.
        names = call.layer.saved_names
        if name := f"{call.layer.__name__}.saved[0]" if names is True else next(filter(None, names), None):
            values = [checkpoint_name(x, name) for x in values] if is_held else values
            ticket = checkpoint_name(ticket, name)
        ticket = varying_over(varying_axes(typeof(device)), ticket) if is_held else ticket
        # As a key, the ticket is no tensor that hooks get. tests: test_hooks_do_not_get_the_number_of_a_run
        ticket = jax.random.wrap_key_data(ticket, impl="threefry2x32")
    else:
        result_run = slot.run(tensors)
        ticket = tuple(slot.hold(result_run, np.array(0)).tolist()) if is_held else None
        if hasattr(call.layer, "result_types"):  # a staged call has to return the same
            trial = _trial_of(slot)
            result_run = trial._replace(arrays=trial.values_of(result_run, ()))
        values = as_arrays(result_run.arrays)
    state.marked += select(values, result_run.marked)
    state.materialize = result_run.materialize
    if is_held:
        saved, attributes = tensors, {"slot": slot, "ticket": ticket}
    else:
        saved, attributes = result_run.context.fill([*tensors, *values].__getitem__)
        attributes = {**attributes, _TICKET: ticket}
    if saved is not None:
        ctx.save_for_backward(*saved)
    vars(ctx).update(attributes)
    return result_run.skeleton.fill(values)


def depending_on_run(ctx: Any, cotangents: Sequence[Any]) -> list[Any]:
    """Return the cotangents, made to depend on the ticket of the run, which is removed from `ctx`."""
    # Otherwise XLA drops a `forward` of which `backward` reads no output. Then no code compares what the run keeps with
    # what the trial keeps. tests: test_what_a_dropped_run_keeps_is_compared
    ticket = vars(ctx).pop(_TICKET)
    if ticket is None:  # `forward` ran on concrete arrays
        return [*cotangents]
    return [None if c is None else jnp.where(jnp.any(jax.random.key_data(ticket)), c, 0) for c in cotangents]


def run_backward(call: LayerCall, needs: Sequence[bool], ctx: Any, *cotangents: Any) -> list[Any]:
    inputs, needed = ctx.saved_tensor(), call.arguments.can_get_gradient(needs)
    given, skeleton = split(cotangents)
    tensors, run = [*inputs, *given], functools.partial(ctx.slot.gradients, needed, skeleton)
    was_traced = not isinstance(ctx.ticket, tuple)  # if traced code returned the vjp function, the key is concrete
    ticket = jax.random.key_data(ctx.ticket) if was_traced else np.asarray(ctx.ticket, np.uint32)
    if any(map(is_tracer, [ticket, *tensors])):
        with contextlib.suppress(ValueError):  # a function in C has no signature
            inspect.signature(call.layer.backward).bind(ctx, *cotangents)  # an error here, rather than in a run
        fixed = forbid_derivative(tensors, lambda: once_differentiable_error(call.layer))
        values, _ = _bind_host_call(call, "backward", run, select(call.arguments.types, needed), fixed, [ticket])
    else:
        values = as_arrays(run(np.array(0), np.asarray(ticket), *map(np.asarray, tensors)))
    rows = zip(scatter(values, needed), call.arguments.types, call.arguments.tensor_names(), strict=True)
    return [coerce(g, t, lambda p=path: f"{call.name}.backward, gradient of {p!r}") for g, t, path in rows]


def run_vmap(call: LayerCall, axis: Any, tensors: Sequence[Any], *first: Any) -> list[Any]:
    trial = _trial_of(_LayerSlot(call, call.arguments.needs_input_grad([True] * len(tensors))))
    to_front = lambda x, dim: np.stack([x] * axis.size) if dim is None else np.moveaxis(np.asarray(x), dim, 0)

    def run(_: Any, *arrays: np.ndarray) -> list[np.ndarray]:
        with _refusing_tracers(call, "vmap"):
            result = call.arguments.call("vmap", call.layer.vmap, [np.array(x) for x in arrays], *first)
        skeleton, batch = call.split_batch(axis, result, _is_output, to_front)
        return trial.values_of(trial._replace(skeleton=skeleton, arrays=batch), (axis.size,))

    batch = [ShapedArray((axis.size, *t.shape), t.dtype) for t in trial.arrays]
    return _bind_host_call(call, "vmap", run, batch, tensors)[0]
