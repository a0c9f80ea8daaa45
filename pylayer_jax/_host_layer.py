"""Runs the methods that a class declares to be NumPy code: all, or with `host = "forward"` all except `backward`.

These methods get NumPy arrays in eager mode and under all transforms.

    class Erf(PyLayer):                         jax.make_jaxpr(Erf.apply)(x) runs forward on an example array, whose
        host = True                             result has the type float32[3]:

        @staticmethod                           { lambda ; a:f32[3]. let
        def forward(ctx, x):                        b:f32[3] c:u8[1] = host_call[name=Erf.forward] a
            ctx.save_for_backward(x)              in (b,) }
            return scipy.special.erf(x)
                                                The saved x is the operand a, so it is not a result. The result c is
                                                the token of NOTE [dropped calls].

A method runs directly if its tensors are concrete. Otherwise a `host_call` runs the method when the program runs. The
`host_call` returns the arrays that the method returns or keeps on `ctx`. If such an array is an input of the method,
the `host_call` does not return it. An `_Example` has run the method on example arrays. Therefore the `_Example` knows
the types of these results. `run_forward` then puts the results on the context of the layer, so that hooks and all
transformations treat them as they treat the tensors of any other layer. tests: contract/test_host_layers.py

NOTE [dropped calls]
XLA drops a `host_call` if the program uses none of its results. For example, the gradient of a linear function uses no
result of the `host_call` that runs `forward`. A `host_call` compares the structure of its result with the structure of
the result for example arrays. If XLA drops the `host_call`, this comparison does not take place. Without this
comparison, the gradient may silently be wrong if the two runs differ in structure. For example, `forward` keeps None in
one run and a mask in the other run, or `backward` returns None in only one of the two runs. Therefore each call of
`forward` has one more result, the *token*. A `host_call` of `backward` gets the token as an operand, and its results
are the gradients. If `backward` is JAX code, `depending_on` makes each gradient depend on the token. tests:
test_objects_made_from_values, test_what_differs_between_runs

Nothing in a program can depend on the token if the program uses only an output that is no array, if all outputs are
marked non-differentiable, if all gradients are None, or if a derivative of `backward` is zero. Then a difference
between the runs stays unnoticed.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._context import ContextState, backward_context, copy_container, entry_of
from ._jax.host_call import HostFunction, host_call_p
from ._jax.rule_function import barrier, forbid_derivative, merge, scatter, select
from ._jax.traces import NEEDS_VALUES, ShapedArray, checkpoint_name, eval_context, is_tracer
from ._jax.types import as_arrays, has_tangent, is_key, is_set, typeof, varying_axes, varying_over, with_type
from ._messages import describe, second_derivative_error
from ._trees import Skeleton, _Dict, contains, split

LayerCall = Any  # the class in `_call.py`, which imports this module

_SAVED = "ctx.save_for_backward"
_TOKEN = "_pylayer_jax_token"  # the attribute of ctx that holds the token of NOTE [dropped calls]
# The name of the attribute of ctx that holds the `needs_input_grad` of `forward`. `run_backward` uses this
# `needs_input_grad` to find the `_Example` of `forward`.
_NEEDS = "_pylayer_jax_needs"
_MAX_EXAMPLES = 64  # per class, since each call may pass a new lambda


@dataclasses.dataclass(frozen=True, eq=False)
class _Structure:
    """The part of a method's result that must be the same in every run: all but the contents of arrays.

    The result of a run is a tree of the values that the method returned and the values that the method kept on `ctx`.
    The *values* of a run are the distinct tensors of this tree, without the inputs of the method.
    """

    skeleton: Skeleton  # of the tree
    types: list[tuple[tuple[int, ...], np.dtype[Any]]]  # the shape and dtype of each tensor of the tree
    positions: list[int]  # the position of each tensor of the tree in the list [*inputs, *values]
    n_inputs: int
    marked: list[bool]  # a mask of the tensors of the tree: those that are marked non-differentiable
    must_return: list[Any]  # values that `forward` marked and did not return: the context of the layer raises the error
    materialize: bool

    def values(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the distinct tensors that are not inputs, sorted by position.

        `tensors` are from a run with this structure.
        """
        tensor_at: dict[int, Any] = {}
        for i, x in zip(self.positions, tensors, strict=True):
            tensor_at.setdefault(i, x)
        return [tensor_at[i] for i in sorted(tensor_at) if i >= self.n_inputs]

    def value_types(self) -> list[Any]:
        """Return the types of the values as JAX arrays."""
        return [ShapedArray(shape, jax.dtypes.canonicalize_dtype(dtype)) for shape, dtype in self.values(self.types)]

    def fill(self, inputs: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Rebuild the result of a method from `inputs` and `values`. Return its tensors, and the tree with them."""
        known = [*inputs, *values]
        tensors = [known[i] for i in self.positions]
        return tensors, self.skeleton.fill(tensors, copy_container)

    def names(self) -> list[str]:
        """Return the name of each tensor for messages, such as `output[0]` or `ctx.inverse`."""
        return [_pretty(path) for path in self.skeleton.tensor_paths()]

    def check(self, run: _Run, batch: tuple[int, ...]) -> None:
        """Check that a run differs from the run on example arrays only in the contents of arrays.

        Raises:
            ValueError: if it differs in more.
        """
        other = run.structure
        if not _all_equal(_parts(self.skeleton), _parts(other.skeleton)) or self.materialize != other.materialize:
            raise ValueError(self._difference(other))
        # `position_in_run` maps each position in the run on example arrays to the position of the same array in this
        # run. Inputs map to themselves. Two positions in the example run may map to the same position in this run. Two
        # different arrays of the example run are then one array in this run.
        position_in_run = {i: i for i in range(self.n_inputs)}
        for i, ((shape, dtype), y) in enumerate(zip(self.types, run.tensors, strict=True)):
            expected = position_in_run.setdefault(self.positions[i], other.positions[i])
            if expected != other.positions[i] or self.marked[i] != other.marked[i]:
                raise ValueError(
                    f"{self.names()[i]}: an array was changed in place, or marked, in this run and not in the run on "
                    "example arrays, or the other way round. Change a copy: x = x.copy()."
                )
            fits = dtype == y.dtype or np.can_cast(y.dtype, dtype, "same_kind")
            if y.shape != batch + shape or not fits:
                raise ValueError(
                    f"{self.names()[i]}: expected {dtype}{[*batch, *shape]}, as in the run on example arrays; got "
                    f"{y.dtype}{list(y.shape)}. Shapes and dtypes may depend only on those of the arguments."
                )

    def _difference(self, other: _Structure) -> str:
        for (path, x), (other_path, y) in zip(self.skeleton.paths(), other.skeleton.paths(), strict=False):
            if path == other_path and not _all_equal([x], [y]):
                return (
                    f"{_pretty(path)}: {describe(y)} in this run, {describe(x)} in the run on example arrays. Objects "
                    "that are not arrays have to be equal in all runs. Keep the arrays of an object that is made from "
                    "values, and np.asarray(number) instead of a number."
                )
        ours, others = self._entries(), other._entries()
        names = [name for name in ours | others if not _all_equal(ours.get(name, ()), others.get(name, ()))]
        if not names:
            return "ctx.set_materialize_grads: another flag in this run than in the run on example arrays."
        return (
            f"{', '.join(names)}: another structure in this run than in the run on example arrays. Return and keep the "
            "same containers in all runs, with arrays of the same shapes: for example zeros in place of None."
        )

    def _entries(self) -> dict[str, list[Any]]:
        """Return a dict from names to structures: those of the method's result, and of the values that `ctx` keeps."""
        (tree,) = self.skeleton.leaves
        return {name: _parts(child) for name, child in zip(tree.keys, tree.children, strict=True)}


class _Run(NamedTuple):
    """The result of one run of a method: its structure, and the tensors of its tree."""

    structure: _Structure
    tensors: list[Any]

    @classmethod
    def of_forward(cls, tree: dict[str, Any], state: ContextState, originals: Sequence[np.ndarray]) -> _Run:
        """Return the result of a run of `forward`. `originals` are the input arrays before `forward` ran.

        `forward` got `state.inputs`, which are copies of the originals. `forward` may have changed its copies of the
        inputs in place.
        """
        tensors, skeleton = split(tree)
        structure = _Structure(
            skeleton,
            [(x.shape, x.dtype) for x in tensors],
            _positions(tensors, len(split(tree["output"])[0]) if "output" in tree else 0, state, originals),
            len(originals),
            [contains(state.marked, x) for x in tensors],
            [x for x in state.must_return if not contains(tensors, x[0])],
            state.materialize,
        )
        return cls(structure, tensors)

    @classmethod
    def of(cls, tree: dict[str, Any]) -> _Run:
        """Return the `_Run` of a method that keeps nothing on `ctx`. All of its tensors are values."""
        return cls.of_forward(tree, ContextState("", tuple), ())

    def with_token(self, batch: tuple[int, ...] = ()) -> _Run:
        """Return a copy of this run in which `ctx` keeps one more array: the token of NOTE [dropped calls]."""
        old = self.structure
        token = np.zeros((*batch, 1), np.uint8)
        tensors, skeleton = split(old.skeleton.fill(self.tensors) | {f"ctx.{_TOKEN}": token})
        position = max([old.n_inputs - 1, *old.positions]) + 1
        structure = dataclasses.replace(
            old,
            skeleton=skeleton,
            types=[*old.types, (token.shape, token.dtype)],
            positions=[*old.positions, position],
            marked=[*old.marked, False],
        )
        return _Run(structure, tensors)


def _positions(
    tensors: Sequence[Any], n_returned: int, state: ContextState, originals: Sequence[np.ndarray]
) -> list[int]:
    """Return the position of each tensor in the list [*inputs, *values]. The first `n_returned` tensors were returned.

    If a saved tensor has the position of an input, JAX differentiates the tensor as it differentiates this input.
    Suppose that the method changes the content of an input, or of the copy of this input on `ctx`. The changed tensor
    then gets a new position, which is not the position of an input. The position of a changed tensor is in the part
    `values` of the list, not in the part `inputs`. An input that `forward` returns counts as a value too, since
    `forward` may change the input in another run. tests: test_an_input_that_is_returned
    """
    copied_from = {id(own): array for array, own in state.numpy_copies}  # ctx keeps copies of NumPy arrays
    position_of = {id(x): i for i, x in enumerate(state.inputs)}
    contents = list(originals)  # the array at each position
    positions: list[int] = []
    for i, x in enumerate(tensors):
        key = id(copied_from.get(id(x), x))
        position = position_of.get(key, -1)
        is_known = position >= 0 and _has_same_bits(x, contents[position])
        is_returned_input = is_known and position < len(originals) and i < n_returned
        if not is_known or is_returned_input:
            position = len(contents)
            contents.append(x)
        if not is_known:
            position_of[key] = position
        positions.append(position)
    return positions


def _has_same_bits(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    ours, others = (np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (x, y))
    return np.array_equal(ours, others)


def _parts(skeleton: Skeleton) -> list[Any]:
    """Return the parts of a `Skeleton` as a list: its treedefs, its static leaves, and the types and keys of its dicts.

    To compare two skeletons, callers compare the lists of parts of the two skeletons.
    """
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


def _is_returned(name: str) -> bool:
    """Return whether `forward` returned the tensor or object of this name, instead of keeping it on `ctx`."""
    return name.startswith("output")


class _Example:
    """The structures of `forward` and `backward`, for one class and one signature of its arguments.

    They come from runs on example arrays.
    """

    def __init__(self, call: LayerCall, needs: tuple[bool, ...]) -> None:
        self.needs = needs
        run = self._run_forward(call)
        self.forward = run.with_token().structure
        self._run: _Run | None = run  # kept for the first example run of `backward`, and freed after it
        self._backwards: dict[Any, _Structure] = {}

    def _run_forward(self, call: LayerCall) -> _Run:
        arrays = _on_example(call, "example", lambda: _example_arrays(call))
        forward = call.layer._forward_with_ctx()
        return _on_example(call, "forward", lambda: _forward(call, forward, self.needs, arrays))

    def backward(self, call: LayerCall, needs: tuple[bool, ...], cotangents: Sequence[Any]) -> _Structure:
        given, skeleton = split(cotangents)
        key = (needs, *_parts(skeleton))
        if key not in self._backwards:
            run = self._run or self._run_forward(call)  # another thread may set `_run` to None meanwhile
            # `backward` gets the arrays of a program in JAX's dtypes: float32 for a float64 array without x64. tests:
            # test_backward_gets_dtypes_of_jax_on_example_arrays_too
            tensors = [np.array(x, jax.dtypes.canonicalize_dtype(x.dtype)) for x in run.tensors]
            tree = run.structure.skeleton.fill(tensors, copy_container)
            examples = skeleton.fill(_drawn([typeof(x) for x in given]))
            run = _on_example(call, "backward", lambda: _backward(call, needs, tree, examples))
            self._backwards[key] = run.structure
            self._run = None
        return self._backwards[key]


# A cached example usually does not keep its layer class alive. A cached example keeps its layer class alive only if the
# class is an argument of the call, or if `forward` keeps the class on `ctx`.
_examples: weakref.WeakKeyDictionary[type, dict[Any, _Example]] = weakref.WeakKeyDictionary()


def _example_of(call: LayerCall, needs: tuple[bool, ...]) -> _Example:
    """Return the `_Example` of a call: the structure of the results of `forward` and `backward`.

    Runs on example arrays give this structure. The structure depends on the layer class, on the shapes, dtypes and
    static arguments of the call, and on `needs`, the mask of the inputs that need a gradient. Cache it if the statics
    can be hashed.
    """
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


def _on_example(call: LayerCall, method: str, run: Callable[[], Any]) -> Any:
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


def _example_arrays(call: LayerCall) -> list[np.ndarray]:
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


def _forward(call: LayerCall, forward: Any, needs: tuple[bool, ...], originals: Sequence[np.ndarray]) -> _Run:
    inputs = [np.array(x) for x in originals]
    state = ContextState(call.name, lambda: needs, inputs)
    ctx = call.layer._context(state)
    result = call.arguments.call("forward", forward, ctx, inputs)
    state.in_forward = False
    attributes = {f"ctx.{name}": value for name, value in vars(ctx).items()}
    return _Run.of_forward({"output": result, _SAVED: state.saved, **attributes}, state, originals)


def _backward(call: LayerCall, needs: tuple[bool, ...], kept: dict[str, Any], cotangents: Sequence[Any]) -> _Run:
    hidden = ("output", _SAVED, f"ctx.{_TOKEN}")
    attributes = {name.removeprefix("ctx."): x for name, x in kept.items() if name not in hidden}
    ctx = backward_context(call.layer._context, call.name, lambda: needs, lambda: kept[_SAVED], attributes)
    return _Run.of({"gradient": call.layer.backward(ctx, *cotangents)})


def _run_directly(run: Callable[[list[np.ndarray]], _Run], tensors: Sequence[Any]) -> tuple[_Structure, list[Any]]:
    """Run a method on concrete tensors. Return the `_Structure` of the run, and the values of the run as JAX arrays."""
    structure, made = run([np.asarray(x) for x in tensors])
    return structure, as_arrays(structure.values(made))


def _run_later(
    call: LayerCall,
    method: str,
    structure: _Structure,
    run: Callable[[list[np.ndarray], tuple[int, ...]], _Run],
    tensors: Sequence[Any],
) -> list[Any]:
    """Bind a `host_call`, which runs a method each time the program runs.

    Return tracers for the arrays that the method returns or keeps on `ctx`, except its inputs.

    Under `jax.vmap`, the arrays that `run` gets may have additional leading batch axes. It also gets their lengths.
    """
    types, ndim = structure.value_types(), tensors[0].ndim

    def on_host(*arrays: Any) -> list[np.ndarray]:
        batch = arrays[0].shape[: arrays[0].ndim - ndim]
        try:
            made = run([np.asarray(x) for x in arrays], batch)
        except Exception as error:  # XLA passes on the text and the traceback of an exception, but not its notes
            message = f"{call.name}.{method} raised {type(error).__name__}: {error}"
            raise RuntimeError(message).with_traceback(error.__traceback__) from error
        try:
            structure.check(made, batch)
        except ValueError as error:
            raise ValueError(f"{call.name}.{method}, {error}") from None
        return [np.asarray(x, t.dtype) for x, t in zip(structure.values(made.tensors), types, strict=True)]

    function = HostFunction(
        name=f"{call.name}.{method}",
        run=on_host,
        results=types,
        effects=frozenset(),
        no_derivative="the code of a layer of NumPy has no derivative.",
        has_x64=is_set("enable_x64"),
        takes_batches=call.layer.host_vmap == "broadcast" and method != "vmap",
    )
    found = host_call_p.bind(*tensors, payload=function) if types else []
    axes = frozenset[Any]().union(*(varying_axes(typeof(x)) for x in tensors))
    return [varying_over(axes, x) for x in found]


def run_forward(call: LayerCall, forward: Callable[..., Any], ctx: Any, tensors: Sequence[Any]) -> Any:
    """Run `forward` on NumPy arrays, and store on `ctx` what `forward` keeps. Return its result, with JAX arrays."""
    _check_arguments(call)
    needs, state = ctx.needs_input_grad, ctx._state
    if any(map(is_tracer, tensors)):
        structure = _example_of(call, needs).forward

        def run(arrays: Sequence[np.ndarray], batch: tuple[int, ...]) -> _Run:
            return _forward(call, forward, needs, arrays).with_token(batch)

        values = _run_later(call, "forward", structure, run, _without_second_derivative(call, structure, tensors))
        if name := _name_of_token(call, structure):
            values[-1] = checkpoint_name(values[-1], name)
    else:
        structure, values = _run_directly(lambda arrays: _forward(call, forward, needs, arrays), tensors)
    found, tree = structure.fill(tensors, values)
    state.must_return += structure.must_return
    state.marked += select(found, structure.marked)
    state.materialize = structure.materialize
    result, saved = tree.pop("output"), tree.pop(_SAVED)
    if saved is not None:
        ctx.save_for_backward(*saved)
    for name, value in tree.items():
        setattr(ctx, name.removeprefix("ctx."), value)
    if call.layer.host is True:  # `run_backward` removes this attribute; a `backward` in JAX code would see it
        setattr(ctx, _NEEDS, needs)
    return result


def _name_of_token(call: LayerCall, structure: _Structure) -> str:
    """Return the name of the first saved value that `forward` computes, if `saved_names` gives one, or "".

    Under this name, a policy of `jax.checkpoint` saves the token, which is the last value, together with the saved
    value. Otherwise backward would run `forward` again to get the token. tests: test_a_policy_that_saves_a_name
    """
    for position, name in zip(structure.positions, structure.names(), strict=True):
        if position >= structure.n_inputs and name.startswith(f"{_SAVED}["):
            index, path = entry_of(name.removeprefix(_SAVED))
            if own := call.checkpoint_name_of(index):
                return own + path
    return ""


def _without_second_derivative(call: LayerCall, structure: _Structure, tensors: Sequence[Any]) -> Sequence[Any]:
    """Return the tensors.

    If `forward` computes a float array, and keeps this array without returning it, a second derivative raises an error.

    If `forward` also returns the float array, the array has a derivative. Then a second derivative raises no error.
    """
    rows = list(zip(structure.positions, structure.names(), structure.types, strict=True))
    returned = {position for position, name, _ in rows if _is_returned(name)}
    names = [
        name
        for position, name, (_, dtype) in rows
        if position >= structure.n_inputs and position not in returned and has_tangent(np.empty((), dtype))
    ]

    def error() -> Exception:
        return TypeError(
            f"{call.name}: a second derivative goes through {', '.join(names)}, which forward computed in NumPy. "
            "Keep inputs and outputs of forward only: return such an array as another output, and save it."
        )

    return forbid_derivative(tensors, error) if names else tensors


def run_backward(call: LayerCall, ctx: Any, *cotangents: Any) -> Any:
    """Run `backward` on NumPy arrays. Return the result of `backward`, with JAX arrays."""
    attributes = {f"ctx.{name}": value for name, value in vars(ctx).items()}
    forward_needs, needs = attributes.pop(f"ctx.{_NEEDS}"), ctx.needs_input_grad
    tensors, skeleton = split(({_SAVED: ctx.saved_tensor(), **attributes}, cotangents))

    def run(arrays: Sequence[np.ndarray], *_: Any) -> _Run:
        return _backward(call, needs, *skeleton.fill([np.array(x) for x in arrays], copy_container))

    if any(map(is_tracer, tensors)):
        structure = _example_of(call, forward_needs).backward(call, needs, cotangents)
        perturbed = [is_tracer(x) and has_tangent(x) for x in tensors]
        fixed = forbid_derivative(select(tensors, perturbed), lambda: second_derivative_error(call.layer))
        values = _run_later(call, "backward", structure, run, merge(perturbed, fixed, tensors))
    else:
        structure, values = _run_directly(run, tensors)
    return structure.fill((), values)[1]["gradient"]


def token_of_forward(ctx: Any) -> Any:
    """Remove the token of `forward` from the context of a `backward` that is JAX code.

    Return it, or None without a token.
    """
    return vars(ctx).pop(_TOKEN, None)


def depending_on(token: Any, gradients: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Return the gradients of a `backward` in JAX code, each of which depends on the token of `forward`.

    See NOTE [dropped calls]. A gradient stays None: zeros in its place would be a cotangent for other layers. The
    gradients get the explicit shardings of `types`, which the token does not have. In a shard_map, a gradient that is
    the same on all devices stays as it is if the token differs between devices.
    """
    has_one = [gradient is not None for gradient in gradients]
    if not is_tracer(token) or not any(has_one):
        return list(gradients)
    has_run = token[0] == 0  # XLA does not know that the token is zero

    def dependent(gradient: Any, aval: Any) -> Any:
        if not varying_axes(typeof(has_run)) <= varying_axes(typeof(gradient)):
            return gradient
        # Unlike a product, `select` keeps complex infinities. It is linear, so it has zeros in place of NaN.
        return with_type(jax.lax.select(has_run, gradient, jnp.zeros_like(gradient)), aval)

    # XLA would drop a choice between zeros and a gradient that is zero. It does not look behind the barrier.
    pairs = zip(barrier(select(gradients, has_one)), select(types, has_one), strict=True)
    return scatter([dependent(gradient, aval) for gradient, aval in pairs], has_one)


def run_vmap(call: LayerCall, axis: Any, dims: Sequence[Any], vmap: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """Run the method `vmap` of a layer class on NumPy arrays. Return its result, with JAX arrays."""

    def run(arrays: Sequence[np.ndarray], *_: Any) -> _Run:
        return _Run.of({"result": call.arguments.call("vmap", vmap, None, [np.array(x) for x in arrays])})

    if any(map(is_tracer, tensors)):
        examples = zip(_on_example(call, "example", lambda: _example_arrays(call)), dims, strict=True)
        batches = [x if d is None else np.stack([x] * axis.size, d) for x, d in examples]
        structure = _on_example(call, "vmap", lambda: run(batches)).structure
        values = _run_later(call, "vmap", structure, run, tensors)
    else:
        structure, values = _run_directly(run, tensors)
    return structure.fill((), values)[1]["result"]


def _check_arguments(call: LayerCall) -> None:
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
