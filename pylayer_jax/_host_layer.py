"""Runs the methods of a layer that has `host = True`.

The methods get NumPy arrays in eager mode and under all transforms.

    class Erf(PyLayer):                         jax.make_jaxpr(Erf.apply)(x) runs forward on an example array, whose
        host = True                             result has the type float32[3]:

        @staticmethod                           { lambda ; a:f32[3]. let
        def forward(ctx, x):                        b:f32[3] = host_call[name=Erf.forward] a
            ctx.save_for_backward(x)              in (b,) }
            return scipy.special.erf(x)
                                                The saved x is the operand a, so it is not a result.

A method runs directly if its tensors are concrete. Otherwise a `host_call` runs the method when the program runs, and
an `_Example` gives the types of its results: the arrays that the method returns or keeps on `ctx`, except those that
are inputs. `run_forward` then puts the results on the context of the layer, so that hooks and all transformations treat
them as they treat the tensors of any other layer. tests: contract/test_host_layers.py

NOTE [dropped calls]
XLA drops a call of `forward` if the program uses none of its results, as in the gradient of a linear function. Then the
call cannot check that an object on `ctx`, or a saved input that `forward` changed in place, is the same as in the run
on example arrays; if it differs, `backward` computes a wrong gradient. So if `forward` keeps such values, and keeps no
array that it computed, then `forward` has one more result, the token, on which `backward` depends.
tests: test_objects_made_from_values
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._context import ContextState, backward_context, copy_container
from ._jax.host_call import HostFunction, host_call_p
from ._jax.rule_function import forbid_derivative, merge, select
from ._jax.traces import NEEDS_VALUES, ShapedArray, eval_context, is_tracer
from ._jax.types import as_arrays, has_tangent, is_key, is_set, typeof, varying_axes, varying_over
from ._messages import describe, second_derivative_error
from ._trees import Skeleton, _Dict, contains, split

_SAVED = "ctx.save_for_backward"
_TOKEN = "_has_run"  # the attribute of ctx that holds the token of NOTE [dropped calls]
_NEEDS = "_needs_in_forward"  # the attribute of ctx that holds the `needs_input_grad` of `forward`
_MAX_EXAMPLES = 64  # per class, since each call may pass a new lambda


class _Run:
    """The result of one run of a method: the arrays that it returned or kept, and a skeleton of all other values."""

    def __init__(
        self, tree: dict[str, Any], state: ContextState | None = None, originals: Sequence[np.ndarray] = ()
    ) -> None:
        """`originals` are the inputs before the method ran. The method got copies, which it may have changed."""
        self.tensors, self.skeleton = split(tree)
        inputs, marked, copies = (state.inputs, state.marked, state.numpy_copies) if state else ((), (), ())
        self.materialize = state is None or state.materialize
        self.n_inputs = len(inputs)
        self.marked = [contains(marked, x) for x in self.tensors]
        # Values that `forward` marked and did not return. For these values, the context of the layer raises an error.
        self.missing = [x for x in state.must_return if not contains(self.tensors, x[0])] if state else []
        # The position of each tensor in the list [*inputs, *values]. A tensor at the position of an input has the
        # derivative of the input. Therefore an input that the method changed in place is listed among the values. So is
        # a saved copy of an input if it differs from the input.
        self.positions: list[int] = []
        contents = list(originals)
        position_of = {id(x): i for i, x in enumerate(inputs)}
        saved = {id(own): array for array, own in copies}  # ctx keeps copies of NumPy arrays
        for x in self.tensors:
            key = id(saved.get(id(x), x))
            position = position_of.get(key)
            if position is None or not _has_same_bits(x, contents[position]):
                position = position_of[key] = len(contents)
                contents.append(x)
            self.positions.append(position)

    def values(self, tensors: Sequence[Any]) -> list[Any]:
        """Return those of the `tensors` of a run that are no inputs, each once."""
        first = dict(zip(reversed(self.positions), reversed(tensors), strict=True))
        return [first[i] for i in sorted(first) if i >= self.n_inputs]

    def types(self) -> list[Any]:
        values = self.values(self.tensors)
        return [ShapedArray(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in values]

    def fill(self, inputs: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the tensors and the tree of this run, as JAX arrays."""
        known = [*inputs, *values]
        tensors = [known[i] for i in self.positions]
        return tensors, self.skeleton.fill(tensors, copy_container)

    def with_token(self, batch: tuple[int, ...] = ()) -> _Run:
        """Return a copy of this run in which `ctx` has one more value, the token."""
        tree = self.skeleton.fill(self.tensors) | {f"ctx.{_TOKEN}": np.zeros((*batch, 1), np.uint8)}
        run = copy.copy(self)
        run.tensors, run.skeleton = split(tree)
        run.marked, run.positions = (
            [*self.marked, False],
            [*self.positions, max([self.n_inputs - 1, *self.positions]) + 1],
        )
        return run

    def forget_arrays(self) -> None:
        """Replace the arrays by arrays of the same shapes and dtypes that take no memory."""
        self.tensors = [np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in self.tensors]

    def values_of(self, run: _Run, batch: tuple[int, ...], types: Sequence[Any]) -> list[np.ndarray]:
        """Return the values of another run of the method. They have the order of this run, and the given types.

        Raises:
            ValueError: if the run differs from this one in more than the contents of arrays.
        """
        if not _all_equal(_parts(self.skeleton), _parts(run.skeleton)) or self.materialize != run.materialize:
            raise ValueError(self._difference(run))
        partner = {i: i for i in range(self.n_inputs)}
        for i, (x, y) in enumerate(zip(self.tensors, run.tensors, strict=True)):
            is_same = partner.setdefault(self.positions[i], run.positions[i]) == run.positions[i]
            if not is_same or self.marked[i] != run.marked[i]:
                raise ValueError(
                    f"{self.names()[i]}: an array was changed in place, or marked, in this run and not in the run on "
                    "example arrays, or the other way round. Change a copy: x = x.copy()."
                )
            fits = x.dtype == y.dtype or np.can_cast(y.dtype, x.dtype, "same_kind")
            if y.shape != batch + x.shape or not fits:
                raise ValueError(
                    f"{self.names()[i]}: expected {x.dtype}{[*batch, *x.shape]}, as in the run on example arrays; got "
                    f"{y.dtype}{list(y.shape)}. Shapes and dtypes may depend only on those of the arguments."
                )
        return [np.asarray(y, t.dtype) for y, t in zip(self.values(run.tensors), types, strict=True)]

    def names(self) -> list[str]:
        """Return the name of each tensor for messages, such as `output[0]` or `ctx.inverse`."""
        return [_pretty(path) for path in self.skeleton.tensor_paths()]

    def _difference(self, run: _Run) -> str:
        for (path, x), (other, y) in zip(self.skeleton.paths(), run.skeleton.paths(), strict=False):
            if path == other and not _all_equal([x], [y]):
                return (
                    f"{_pretty(path)}: {describe(y)} in this run, {describe(x)} in the run on example arrays. Objects "
                    "that are not arrays have to be equal in all runs. Keep the arrays of an object that is made from "
                    "values, and np.asarray(number) instead of a number."
                )
        return "what it returned or kept on ctx has another structure than in the run on example arrays."


def _has_same_bits(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    ours, others = (np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (x, y))
    return np.array_equal(ours, others)


def _parts(skeleton: Skeleton) -> list[Any]:
    """Return a list of all nodes and leaves of a skeleton, which can be compared and hashed."""
    found: list[Any] = [skeleton.treedef]
    for leaf in skeleton.leaves:
        if type(leaf) is _Dict:
            found += [type(leaf.like), tuple(leaf.keys), *(part for child in leaf.children for part in _parts(child))]
        else:
            found.append(leaf)
    return found


def _all_equal(ours: Sequence[Any], others: Sequence[Any]) -> bool:
    def is_equal(a: Any, b: Any) -> bool:
        if type(a) is not type(b) or isinstance(a, (float, complex)):
            return repr(a) == repr(b) and type(a) is type(b)  # 0.0 is not -0.0, and NaN is NaN
        return a is b or bool(a == b)

    try:
        return len(ours) == len(others) and all(map(is_equal, ours, others))
    except Exception:  # objects that cannot be compared
        return False


def _pretty(path: str) -> str:
    """Return `ctx.inverse[0]` for the path `['ctx.inverse'][0]`."""
    return path[2:].replace("']", "", 1)


# -- examples ----------------------------------------------------------------------------------------------


class _Example:
    """The runs of `forward` and `backward` on example arrays, for one class and one signature of its arguments."""

    def __init__(self, call: Any, needs: tuple[bool, ...]) -> None:
        self.needs = needs
        self.forward = self._run_forward(call)
        self.backwards: dict[Any, _Run] = {}
        self.has_arrays = True  # False after the first run of `backward`, which drops the arrays of `forward`

    def _run_forward(self, call: Any) -> _Run:
        """Run `forward`, and find out whether `backward` needs its token: see NOTE [dropped calls]."""
        arrays = _on_example(call, "example", lambda: _example_arrays(call))
        forward, needs = call.layer._forward_with_ctx(), self.needs
        writes = False
        try:
            run = _on_example(call, "forward", lambda: _forward(call, forward, needs, arrays, is_writable=False))
        except Exception:
            run = _on_example(call, "forward", lambda: _forward(call, forward, needs, arrays))
            writes = True
        kept = [i for i, name in zip(run.positions, run.names(), strict=True) if not name.startswith("output")]
        leaves = [path for path, _ in run.skeleton.paths() if not _pretty(path).startswith("output")]
        has_statics, has_values = len(leaves) > len(kept), any(i >= run.n_inputs for i in kept)
        self.has_token = (has_statics or (writes and bool(kept))) and not has_values
        return run.with_token() if self.has_token else run

    def backward(self, call: Any, needs: tuple[bool, ...], cotangents: Sequence[Any]) -> _Run:
        tensors, skeleton = split(cotangents)
        key = (needs, *_parts(skeleton))
        if key not in self.backwards:
            forward = self.forward if self.has_arrays else self._run_forward(call)
            tree = forward.skeleton.fill([np.array(x) for x in forward.tensors], copy_container)
            given = skeleton.fill(_drawn([typeof(x) for x in tensors]))
            self.backwards[key] = _on_example(call, "backward", lambda: _backward(call, needs, tree, given))
            self.has_arrays = False
            self.forward.forget_arrays()
            self.backwards[key].forget_arrays()
        return self.backwards[key]


# An example keeps its class alive only if the class is an argument of the call or is kept on ctx.
_examples: weakref.WeakKeyDictionary[type, dict[Any, _Example]] = weakref.WeakKeyDictionary()


def _example_of(call: Any, needs: tuple[bool, ...]) -> _Example:
    """Return the example for the class and the arguments of a call. Cache it if the statics can be hashed."""
    types = [(t.shape, t.dtype) for t in call.arguments.types]
    statics = [(a.name, x) for a in call.arguments.arguments for x in _parts(a.skeleton)]
    key = (needs, *types, *((name, type(x), repr(x) if isinstance(x, (float, complex)) else x) for name, x in statics))
    known = _examples.setdefault(call.layer, {})
    try:
        found = known.get(key)
    except Exception:  # an object that cannot be hashed or compared
        return _Example(call, needs)
    if found is None:
        found = _Example(call, needs)
        if len(known) >= _MAX_EXAMPLES:
            known.pop(next(iter(known)), None)
        known[key] = found
    return found


def _on_example(call: Any, method: str, run: Callable[[], Any]) -> Any:
    types = ", ".join(f"{t.dtype}{list(t.shape)}" for t in call.arguments.types)
    try:
        with eval_context(), np.errstate(all="ignore"):
            return run()
    except NEEDS_VALUES as error:  # the method closes over a tracer
        raise call.closed_over_error(method) from error
    except Exception as error:
        error.add_note(
            f"{call.name}.{method} raised this error on example arrays ({types}), which show the types of the results "
            "before a compiled program runs. If it needs particular values, such as a positive definite matrix, add to "
            "the class: @staticmethod def example(x): return ... It gets the arguments of apply, and returns arrays of "
            "the same shapes and dtypes."
        )
        raise


def _drawn(types: Sequence[Any]) -> list[np.ndarray]:
    """Return arrays of the given types: floating-point numbers from a normal distribution, zeros for integers."""
    rng = np.random.default_rng(0)

    def draw(t: Any) -> np.ndarray:
        if not has_tangent(t):
            return np.zeros(t.shape, t.dtype)
        imaginary = 1j * rng.standard_normal(t.shape) if jnp.issubdtype(t.dtype, np.complexfloating) else 0
        return np.asarray(rng.standard_normal(t.shape) + imaginary).astype(t.dtype)

    return [draw(t) for t in types]


def _example_arrays(call: Any) -> list[np.ndarray]:
    """Return one array per tensor of the call: random numbers, or the result of the `example` method of the class."""
    arguments, arrays = call.arguments, _drawn(call.arguments.types)
    make: Any = getattr(call.layer, "example", None)
    if make is None:
        return arrays
    result = arguments.call("example", lambda _, *args, **kwargs: make(*args, **kwargs), None, arrays)
    slots = arguments.slots()
    entries = list(result) if isinstance(result, tuple) and len(arguments.arguments) > 1 else [result]
    chosen = slots if len(entries) == len(slots) else arguments.arguments
    if len(entries) != len(chosen):
        names = ", ".join(arguments.names())
        raise ValueError(f"example returned {len(entries)} values; expected a tuple with one per argument ({names}).")
    for argument, entry in zip(chosen, entries, strict=True):
        for i, value in enumerate(argument.skeleton.flatten_up_to(entry), argument.span.start):
            given = arrays[i] if value is None else np.asarray(value)
            if given.shape != arrays[i].shape or not np.can_cast(given.dtype, arrays[i].dtype, "same_kind"):
                raise ValueError(
                    f"example, argument {argument.name!r}: expected {arrays[i].dtype}{list(arrays[i].shape)}, got "
                    f"{describe(value)}."
                )
            arrays[i] = given.astype(arrays[i].dtype)
    return arrays


# -- methods on the host ---------------------------------------------------------------------------------------


def _forward(
    call: Any, forward: Any, needs: tuple[bool, ...], originals: Sequence[np.ndarray], is_writable: bool = True
) -> _Run:
    inputs = [np.array(x) for x in originals]
    for x in inputs:
        x.flags.writeable = is_writable
    state = ContextState(call.name, lambda: needs, inputs)
    ctx = call.layer._context(state)
    result = call.arguments.call("forward", forward, ctx, inputs)
    state.in_forward = False
    attributes = {f"ctx.{name}": value for name, value in vars(ctx).items()}
    return _Run({"output": result, _SAVED: state.saved, **attributes}, state, originals)


def _backward(call: Any, needs: tuple[bool, ...], kept: dict[str, Any], cotangents: Sequence[Any]) -> _Run:
    hidden = ("output", _SAVED, f"ctx.{_TOKEN}")
    attributes = {name.removeprefix("ctx."): x for name, x in kept.items() if name not in hidden}
    ctx = backward_context(call.layer._context, call.name, lambda: needs, lambda: kept[_SAVED], attributes)
    return _Run({"gradient": call.layer.backward(ctx, *cotangents)})


def _call_host(
    call: Any, method: str, example: _Run, run: Callable[[Sequence[np.ndarray]], _Run], tensors: Sequence[Any]
) -> list[Any]:
    """Bind a `host_call`, which runs a method each time the program runs. Return the values of the method."""
    types, ndim = example.types(), tensors[0].ndim

    def on_host(*arrays: Any) -> list[np.ndarray]:
        batch = arrays[0].shape[: arrays[0].ndim - ndim]
        try:
            made = run([np.asarray(x) for x in arrays])
        except Exception as error:  # XLA passes on the text and the traceback of an exception, but not its notes
            message = f"{call.name}.{method} raised {type(error).__name__}: {error}"
            raise RuntimeError(message).with_traceback(error.__traceback__) from error
        try:
            return example.values_of(made, batch, types)
        except ValueError as error:
            raise ValueError(f"{call.name}.{method}, {error}") from None

    name, error = f"{call.name}.{method}", "the code of a layer of NumPy has no derivative."
    takes_batches = call.layer.host_vmap == "broadcast" and method != "vmap"
    function = HostFunction(name, on_host, types, frozenset(), error, is_set("enable_x64"), takes_batches)
    found = host_call_p.bind(*tensors, payload=function) if types else []
    axes = frozenset[Any]().union(*(varying_axes(typeof(x)) for x in tensors))
    return [varying_over(axes, x) for x in found]


def run_forward(call: Any, forward: Callable[..., Any], ctx: Any, tensors: Sequence[Any]) -> Any:
    """Run `forward` on NumPy arrays, and put what it kept on `ctx`. Return its result, with JAX arrays."""
    _check_arguments(call)
    needs, state = ctx.needs_input_grad, ctx._state
    if any(map(is_tracer, tensors)):
        example, ndim = _example_of(call, needs), tensors[0].ndim
        run = example.forward
        known = {i for i, name in zip(run.positions, run.names(), strict=True) if name.startswith("output")}
        known |= set(range(run.n_inputs))
        pairs = zip(run.positions, run.names(), run.tensors, strict=True)
        names = [name for i, name, x in pairs if i not in known and has_tangent(x)]

        def on_host(arrays: Sequence[np.ndarray]) -> _Run:
            made = _forward(call, forward, needs, arrays)
            batch = arrays[0].shape[: arrays[0].ndim - ndim]
            return made.with_token(batch) if example.has_token else made

        def error() -> Exception:
            return TypeError(
                f"{call.name}: a second derivative goes through {', '.join(names)}, which forward computed in NumPy. "
                "Keep inputs and outputs of forward only: return such an array as another output, and save it."
            )

        given = forbid_derivative(tensors, error) if names else tensors
        values = _call_host(call, "forward", run, on_host, given)
    else:
        run = _forward(call, forward, needs, [np.asarray(x) for x in tensors])
        values = as_arrays(run.values(run.tensors))
    found, tree = run.fill(tensors, values)
    state.must_return += run.missing
    state.marked += select(found, run.marked)
    state.materialize = run.materialize
    result, saved = tree.pop("output"), tree.pop(_SAVED)
    if saved is not None:
        ctx.save_for_backward(*saved)
    for name, value in tree.items():
        setattr(ctx, name.removeprefix("ctx."), value)
    if call.layer.host is True:  # `backward` in JAX code would see this attribute
        setattr(ctx, _NEEDS, needs)
    return result


def run_backward(call: Any, ctx: Any, *cotangents: Any) -> Any:
    """Run `backward` on NumPy arrays. Return its result, with JAX arrays."""
    attributes = {f"ctx.{name}": value for name, value in vars(ctx).items()}
    forward_needs, needs = attributes.pop(f"ctx.{_NEEDS}"), ctx.needs_input_grad
    tensors, skeleton = split(({_SAVED: ctx.saved_tensor(), **attributes}, cotangents))

    def run(arrays: Sequence[np.ndarray]) -> _Run:
        return _backward(call, needs, *skeleton.fill([np.array(x) for x in arrays], copy_container))

    if any(map(is_tracer, tensors)):
        known = _example_of(call, forward_needs).backward(call, needs, cotangents)
        may_move = [is_tracer(x) and has_tangent(x) for x in tensors]
        fixed = forbid_derivative(select(tensors, may_move), lambda: second_derivative_error(call.layer))
        values = _call_host(call, "backward", known, run, merge(may_move, fixed, tensors))
    else:
        known = run([np.asarray(x) for x in tensors])
        values = as_arrays(known.values(known.tensors))
    return known.fill((), values)[1]["gradient"]


def depending_on_forward(ctx: Any, cotangents: list[Any]) -> list[Any]:
    """Return cotangents for a `backward` in JAX code. If `forward` has a token, the cotangents depend on it."""
    token = vars(ctx).pop(_TOKEN, None)
    if token is None or not is_tracer(token):
        return cotangents
    tensors, skeleton = split(cotangents)
    one = 1 - token[0].astype(np.int8)  # XLA does not know that the token is zero
    return skeleton.fill([x * one.astype(x.dtype) for x in tensors])


def run_vmap(call: Any, axis: Any, dims: Sequence[Any], vmap: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """Run the method `vmap` of a layer class on NumPy arrays. Return its result, with JAX arrays."""

    def run(arrays: Sequence[np.ndarray]) -> _Run:
        return _Run({"result": call.arguments.call("vmap", vmap, None, [np.array(x) for x in arrays])})

    if any(map(is_tracer, tensors)):
        examples = zip(_on_example(call, "example", lambda: _example_arrays(call)), dims, strict=True)
        batches = [x if d is None else np.stack([x] * axis.size, d) for x, d in examples]
        known = _on_example(call, "vmap", lambda: run(batches))
        known.forget_arrays()
        values = _call_host(call, "vmap", known, run, tensors)
    else:
        known = run([np.asarray(x) for x in tensors])
        values = as_arrays(known.values(known.tensors))
    return known.fill((), values)[1]["result"]


def _check_arguments(call: Any) -> None:
    paths = [a.name + path for a in call.arguments.arguments for path in a.skeleton.tensor_paths()]
    for i, (path, t) in enumerate(zip(paths, call.arguments.types, strict=True)):
        is_ref = call.arguments.has_refs and call.arguments.ref_mask[i]
        if is_ref or is_key(t):
            advice = "its value: ref[...]" if is_ref else "its numbers: jax.random.key_data(key)"
            kind = "a jax.Ref" if is_ref else "a PRNG key"
            raise TypeError(
                f"{call.name}.apply, argument {path!r}: {kind} is no NumPy array, which the methods of a class with "
                f"host = {call.layer.host!r} get. Pass {advice}."
            )
