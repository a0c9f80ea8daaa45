"""The outputs of `forward`, the context object `ctx`, and the values that one run of `forward` keeps for `backward`."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._jax.traces import STAGED, current_trace, has_named_axis, is_active, is_staging, is_tracer
from ._jax.types import as_arrays, has_tangent, is_array, is_ref, typeof, zeros_of
from ._messages import closed_over, describe, innermost, tensors_in
from ._trees import LEAF, Skeleton, contains, is_tensor, is_tensor_or_ref, split

# -- outputs of `forward` -------------------------------------------------------------------------------------


__tracebackhide__ = True  # pytest hides these frames: errors raised here concern the user's values


def with_tensor(result: Any) -> Any:
    """Return the result of `forward`.

    If it holds no tensor, and an enclosing `vmap` has a named axis, convert its numbers to arrays.

    In an eager `jax.vmap`, `jax.lax.psum(2.0, "i")` of a number that all examples share is a Python number.
    tests: contract/test_vmap.py
    """
    if is_tensor(result) or (isinstance(result, tuple) and any(map(is_tensor, result))):
        return result
    tensors, skeleton = split(result)
    if tensors or not any(map(_is_number, skeleton.statics())) or not has_named_axis():
        return result
    return skeleton.fill([], lambda static: jnp.asarray(static) if _is_number(static) else static)


def _is_number(static: object) -> bool:
    return isinstance(static, (int, float, complex)) and not isinstance(static, bool)


class Outputs:
    """The structure and the types of the outputs of one run of `forward`, without the arrays."""

    __slots__ = ("groups", "has_tangent", "is_sequence", "marked", "shardings", "skeleton", "types")

    def __init__(self, result: Any, skeleton: Skeleton, arrays: Sequence[Any], marked: frozenset[int]) -> None:
        self.skeleton = skeleton
        # `backward` gets one cotangent for each element of a tuple or list, and one cotangent for any other result.
        self.is_sequence = isinstance(result, (tuple, list))
        if skeleton is LEAF:
            self.groups = [LEAF]
        else:
            self.groups = [split(x)[1] for x in result] if self.is_sequence else [skeleton]
        self.marked = marked  # indices of outputs that are marked non-differentiable
        self.types = [typeof(x) for x in arrays]
        self.has_tangent = [i not in marked and has_tangent(t) for i, t in enumerate(self.types)]
        # JAX may place an uncommitted array on any device, so zeros for the cotangent of this array need no sharding.
        self.shardings = [None if is_tracer(x) or not x.committed else x.sharding for x in arrays]

    @staticmethod
    def of(layer: str, result: Any) -> tuple[list[Any], list[Any], Skeleton]:
        """Split the result of a method. Return the tensors, the same tensors as JAX arrays, and the skeleton.

        Raises:
            ValueError: if the result holds no tensor, or if the result holds a Ref.
        """
        tensors, skeleton = split(result)
        if not tensors:
            raise ValueError(
                f"{layer}.forward returned {describe(result)}: expected at least one tensor, alone or in a tuple, "
                "list or dict. Numbers are no tensors; jnp.asarray turns them into tensors."
            )
        if len(skeleton.leaves) > len(tensors) and any(map(is_ref, skeleton.statics())):
            raise ValueError(
                f"{layer}.forward returned a jax.Ref among its outputs, which JAX does not allow. The caller has the "
                "Ref that it passed; for any other Ref, return its value: ref[...]."
            )
        return tensors, as_arrays(tensors), skeleton

    def cotangents(self, given: Sequence[Any], materialize: bool, with_statics: bool) -> list[Any]:
        """Return the cotangents for `backward`, with one entry per top-level output that holds a tensor.

        A missing cotangent is zeros if `materialize`, otherwise None. If `with_statics` is True, the entry for an
        output without a tensor is None.
        """
        full = [self._zeros(i) if c is None and materialize else c for i, c in enumerate(given)]
        entries: list[Any] = []
        for group in self.groups:
            if group.size:
                entries.append(group.without_statics(full[: group.size]))
                full = full[group.size :]
            elif with_statics:
                entries.append(None)
        return entries

    def _zeros(self, i: int) -> jax.Array:
        aval, sharding = self.types[i], self.shardings[i]
        return zeros_of(aval) if sharding is None or is_staging() else _zeros_maker(aval, sharding)()


@functools.lru_cache(maxsize=256)
def _zeros_maker(aval: Any, sharding: Any) -> Callable[[], jax.Array]:
    # With `jax.jit`, each device makes its own shard; `jax.device_put` would first compare the values of all processes.
    return jax.jit(lambda: zeros_of(aval), out_shardings=sharding)


class ContextState:
    """The private state of a context, which is everything except the attributes that the user sets."""

    __slots__ = (
        "in_forward", "inputs", "layer", "load", "marked", "materialize", "must_return", "needs", "numpy_copies",
        "returned", "saved", "saved_for_jvp",
    )  # fmt: skip

    def __init__(self, layer: str, needs: Callable[[], tuple[bool, ...]], inputs: Sequence[Any] = ()) -> None:
        self.layer = layer
        self.needs = needs  # returns the value of ctx.needs_input_grad
        self.inputs = inputs
        self.in_forward = True  # the context accepts saved tensors and flags only in `forward`
        self.numpy_copies: list[tuple[np.ndarray, np.ndarray]] = []  # pairs of a saved NumPy array and its copy
        # For a `forward` that takes no context: pairs of a NumPy value that it returned, and the JAX array that
        # replaced the value. `setup_context` gets the array as `output`. If `setup_context` saves the NumPy value, the
        # JAX array is saved in its place.
        self.returned: list[tuple[Any, Any]] = []
        self.saved: tuple[Any, ...] | None = None
        self.load: Callable[[], tuple[Any, ...] | None] | None = None  # in `backward`, loads `saved` at the first read
        self.saved_for_jvp: tuple[Any, ...] | None = None
        self.marked: list[Any] = []
        self.must_return: list[tuple[Any, str, str]] = []  # (value that has to be an output, ctx method, advice)
        self.materialize = True

    def as_output(self, value: Any) -> Any:
        """Return the JAX array that replaced a NumPy output of `forward`. Return any other value unchanged."""
        return next((output for original, output in self.returned if original is value), value)

    def read_saved(self) -> tuple[Any, ...] | None:
        if self.load is not None:
            self.saved, self.load = self.load(), None
        return self.saved


class PyLayerContext:
    """The object `ctx` of one application of a layer, which carries values and flags from `forward` to `backward`.

        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x)   # tensors
            ctx.scale = scale          # anything else
            return x * scale

    Arrays in an attribute, also within a list, dict or other pytree, are kept like saved tensors. `backward` gets every
    other object unchanged. The context copies each NumPy array, so that a later change of the array in place does not
    affect `backward`, which gets the copy as a `jax.Array`.
    """

    __slots__ = ("__dict__", "_state")

    _state: ContextState

    def __init__(self, state: ContextState) -> None:
        object.__setattr__(self, "_state", state)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise AttributeError(
                f"ctx.{name} cannot be assigned in {self._state.layer}: the name belongs to the context. Choose "
                "another name, or keep tensors with ctx.save_for_backward(...)."
            )
        object.__setattr__(self, name, own_copy(value, self._state, f"ctx.{name} = ..."))

    def __getattr__(self, name: str) -> Any:
        state, known = self._state, getattr(type(self), name, None)
        if isinstance(known, property):  # the property raised an AttributeError: raise the same error again
            return known.__get__(self)
        raise AttributeError(
            f"ctx.{name} does not exist: forward of {state.layer} set {sorted(vars(self)) or 'no attribute'}."
        )

    # -- saving ---------------------------------------------------------------------------------

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep values for `backward`, where `saved_tensor()` returns them in the same order.

        A pytree is one entry, and leaves that are not arrays stay unchanged. A `jax.Ref` argument is saved as a
        reference: `backward` reads the content that the Ref has when `backward` runs. In a second derivative,
        a saved input has the derivative of the input, and a saved output the derivative that `backward` defines. JAX
        differentiates the code of `forward` for other saved tensors.

        Raises:
            RuntimeError: when called outside `forward`, or a second time.
            ValueError: for a `jax.Ref` that is not an argument of `forward`.
        """
        state = self._state_in_forward("save_for_backward")
        if state.saved is not None:
            raise RuntimeError(
                f"ctx.save_for_backward was called twice in {state.layer}.forward. Save everything in one call: "
                "ctx.save_for_backward(a, b, ...)."
            )
        state.saved = tuple([own_copy(x, state, "ctx.save_for_backward(...)") for x in tensors])

    def saved_tensor(self) -> tuple[Any, ...] | None:
        """Return the tuple of saved values. As in Paddle, return None if `forward` saved nothing."""
        return self._state.read_saved()

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The tuple of saved values. As in torch, it is `()` if `forward` saved nothing."""
        return self._state.read_saved() or ()

    # -- flags ----------------------------------------------------------------------------------

    def mark_not_inplace(self, *inputs: Any) -> None:
        """Only check the inputs: this method exists for code from Paddle, and JAX arrays never change in place.

        Raises:
            RuntimeError: when called outside `forward`.
            ValueError: for a value that is not a tensor argument of `forward`.
        """
        state = self._state_in_forward("mark_not_inplace")
        for i, value in enumerate(inputs):
            if not all(is_tensor(x) and contains(state.inputs, x) for x in split(value)[0] or [None]):
                raise ValueError(
                    f"ctx.mark_not_inplace in {state.layer}.forward: argument {i} ({describe(value)}) is not a "
                    "tensor input of forward. Pass the arguments of forward themselves."
                )

    def mark_non_differentiable(self, *outputs: Any) -> None:
        """Stop gradients through these outputs, under every transformation.

        `backward` still gets a cotangent for each marked output: zeros, or None after `set_materialize_grads(False)`.

        Raises:
            RuntimeError: when called outside `forward`.
            ValueError: when `forward` returns, for a marked value that is not an output of `forward`.
        """
        state, advice = self._state_in_forward("mark_non_differentiable"), "Mark the very values that forward returns."
        for leaf in [x for value in outputs for x in (split(value)[0] or [value])]:
            output = state.as_output(leaf)
            state.marked.append(output)
            state.must_return.append((output, "mark_non_differentiable", advice))

    def set_materialize_grads(self, flag: bool) -> None:
        """Choose whether `backward` gets zeros (True, the default) or None (False) for a missing cotangent.

        In a call that takes a `jax.Ref`, a missing cotangent arrives as zeros.

        Raises:
            RuntimeError: when called outside `forward`.
        """
        self._state_in_forward("set_materialize_grads").materialize = bool(flag)

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """A tuple with one bool per argument of the call, which says whether the gradient of this argument is needed.

        The bools are exact in eager mode. In `backward`, these bools are exact unless one jitted function is
        differentiated in several ways. In a traced `forward`, the bool is True for every argument that can have a
        gradient.
        """
        return self._state.needs()

    def _state_in_forward(self, call: str) -> ContextState:
        state = self._state
        if not state.in_forward:
            raise RuntimeError(
                f"ctx.{call} was called in backward of {state.layer}, or after its forward had returned; it works only "
                "inside forward. Move the call into forward."
            )
        return state


def backward_context(
    kind: type[PyLayerContext],
    layer: str,
    needs: Callable[[], tuple[bool, ...]],
    load: Callable[[], tuple[Any, ...] | None],
    attributes: dict[str, Any],
) -> PyLayerContext:
    """Make the context for `backward`; the function `load` returns the saved tensors."""
    state = ContextState(layer, needs)
    state.in_forward, state.load = False, load
    ctx = kind(state)
    vars(ctx).update(attributes)
    return ctx


def own_copy(value: Any, state: ContextState, call: str) -> Any:
    """Return `value` with copies of its NumPy arrays; raise an error for a Ref that is not an argument of `forward`."""
    if is_array(value) or (isinstance(value, (int, float, str, type(None))) and not state.returned):
        return value
    returned = [original for original, _ in state.returned]
    arrays, rest = split(
        value,
        lambda leaf: isinstance(leaf, np.ndarray) or is_ref(leaf) or (bool(returned) and contains(returned, leaf)),
    )
    if not arrays:
        return value  # the user's own container, since nothing in it has to be copied
    for i, array in enumerate(arrays):
        if contains(returned, array):
            arrays[i] = state.as_output(array)
        elif not is_ref(array):
            arrays[i] = array.copy()
            state.numpy_copies.append((array, arrays[i]))
        elif not contains(state.inputs, array):
            raise ValueError(
                f"{call} in {state.layer}: JAX keeps a jax.Ref for backward only if it is an argument of forward. If "
                "forward made the Ref, keep its value: ref[...]. Otherwise pass the Ref as an argument."
            )
    return rest.fill(arrays)


# -- the contents of a context after `forward` ------------------------------------------------------------


class ResidualTree:
    """A value that `forward` kept: its skeleton, and the indices of its tensors in the list of residuals."""

    __slots__ = ("indices", "skeleton")

    def __init__(self, skeleton: Skeleton, indices: list[int]) -> None:
        self.skeleton = skeleton
        self.indices = indices

    def fill(self, residuals: Sequence[Any]) -> Any:
        """Return the value in new containers, so that a change by one run of `backward` does not affect another run."""
        # JAX passes some constant residuals as NumPy arrays.
        return self.skeleton.fill(as_arrays([residuals[i] for i in self.indices]), copy_container)


# The types of mutable containers that may be leaves of a pytree.
_CONTAINERS = (dict, set, collections.deque, bytearray)


def copy_container(static: Any) -> Any:
    """Return a copy of a mutable container that is a leaf of a pytree, so that runs do not share it."""
    return copy.copy(static) if isinstance(static, _CONTAINERS) else static


class SavedContext:
    """Everything that one run of `forward` keeps for `backward`, except the arrays.

    Two instances are equal only if they are the same object.
    """

    __slots__ = (
        "attributes",
        "has_names",
        "has_objects",
        "materialize",
        "n_saved",
        "outputs",
        "saved",
        "saved_for_jvp",
    )

    def __init__(self, outputs: Outputs, materialize: bool) -> None:
        self.outputs = outputs
        self.materialize = materialize
        self.saved: ResidualTree | None = None  # the values of save_for_backward
        self.n_saved = 0  # the number of residuals from save_for_backward, which come first
        self.saved_for_jvp: ResidualTree | None = None  # from save_for_forward; None if `jvp` gets `saved`
        self.attributes: dict[str, ResidualTree] = {}
        self.has_names = False  # whether the jaxpr of `forward` has the names of `saved_names`
        self.has_objects = False  # True if a kept object may hold arrays, although it is no pytree

    def names(self, n_residuals: int, name_of_saved: Callable[[int], str | None]) -> list[str]:
        """Return a name or "" for each residual.

        The function `name_of_saved(i)` returns the name of the i-th saved value.
        """
        names = [""] * n_residuals
        if self.saved is not None:
            for path, i in zip(self.saved.skeleton.tensor_paths(), self.saved.indices, strict=True):
                entry, rest = path[1:].split("]", 1)
                if not names[i] and (name := name_of_saved(int(entry))) is not None:
                    names[i] = name + rest
        others = {f"ctx.{name}": tree for name, tree in self.attributes.items()}
        for start, tree in [*others.items(), ("saved_for_forward", self.saved_for_jvp)]:
            for path, i in zip(tree.skeleton.tensor_paths(), tree.indices, strict=True) if tree else ():
                names[i] = names[i] or start + path
        return names


def keep(ctx: PyLayerContext, result: Any, layer: Any) -> tuple[SavedContext, list[Any], list[Any]]:
    """Return the `SavedContext`, the outputs and the residuals of a run of `forward` that returned `result`.

    A tensor that is saved twice is one residual. A tensor that is saved and also set as an attribute is two residuals,
    since hooks pack only saved tensors.
    """
    state = ctx._state
    if not hasattr(result, "dtype"):  # a single array is the usual case
        result = with_tensor(result)
    tensors, outputs, skeleton = Outputs.of(state.layer, result)
    for value, call, advice in state.must_return:
        if not contains(tensors, value):
            if is_tracer(value) and not is_active(value):
                raise _ended_error(f"ctx.{call}", state.layer)
            raise ValueError(
                f"ctx.{call} in {state.layer}.forward: {describe(value)} is not an output of forward. {advice}"
            )
    marked = frozenset([i for i, x in enumerate(tensors) if contains(state.marked, x)]) if state.marked else frozenset()
    kept = SavedContext(Outputs(result, skeleton, outputs, marked), state.materialize)
    output_of = _numpy_outputs(state, tensors, outputs)
    residuals: list[Any] = []
    indices: dict[int, int] = {}
    trace = getattr(state.inputs[0], "_trace", None) if state.inputs else None  # of the inputs: it is active

    def keep_value(value: Any, name: str) -> ResidualTree:
        found, rest = split(value, is_tensor_or_ref)
        if len(rest.leaves) > len(found):
            _refuse_closures(rest, name, state.layer)
            # In eager mode, nothing has to be checked, because an object holds only concrete arrays, which stay valid.
            if isinstance(trace, STAGED.trace) and not kept.has_objects:
                kept.has_objects = any(map(_may_hold_arrays, rest.statics()))
        found = [output_of.get(id(x), x) for x in found] if output_of else found
        for tensor in found:
            if is_tracer(tensor) and tensor._trace is not trace and not is_active(tensor):
                raise _ended_error(name, state.layer)
            if id(tensor) not in indices:
                indices[id(tensor)] = len(residuals)
                residuals.append(tensor)
        return ResidualTree(rest, [indices[id(x)] for x in found])

    if state.saved is not None:
        kept.saved = keep_value(state.saved, "ctx.save_for_backward")
        kept.n_saved = len(residuals)
        indices = {}
    kept.attributes = {name: keep_value(value, f"ctx.{name}") for name, value in vars(ctx).items()}
    if state.saved_for_jvp is not None and layer._jvp_method() is not None:
        kept.saved_for_jvp = keep_value(state.saved_for_jvp, "ctx.save_for_forward")
    return kept, outputs, as_arrays(residuals)


def _numpy_outputs(state: ContextState, tensors: Sequence[Any], outputs: Sequence[Any]) -> dict[int, Any]:
    """Return a dict from the id of each NumPy output, and of its copy on `ctx`, to the JAX array that replaced it."""
    found = {id(x): y for x, y in zip(tensors, outputs, strict=True) if x is not y}
    for array, own in state.numpy_copies if found else ():
        # Compare the contents: `forward` may have changed the array in place after the copy was made.
        if id(array) in found and array.tobytes() == own.tobytes():
            found[id(own)] = found[id(array)]
    return found


def _ended_error(call: str, layer: str) -> ValueError:
    """Return the error for a tracer whose trace has ended, as the trace of a jitted `forward(ctx, x)` has."""
    return ValueError(
        f"{call} in {layer}.forward: the value belongs to a transformed function that has returned, so that JAX cannot "
        "keep it. If jax.jit, jax.checkpoint or another transformation decorates forward (also with static_argnums for "
        f"ctx), remove it, and put it around the call: jax.jit({layer}.apply). Or let forward take no ctx, and keep "
        "values in setup_context(ctx, inputs, output) of a pylayer_jax.Function. If forward calls a transformed "
        "function that uses ctx, let this function return the values instead."
    )


_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, type, slice, range, enum.Enum, np.dtype, np.generic, np.ufunc,
    types.ModuleType, types.BuiltinFunctionType,
)  # fmt: skip


def _may_hold_arrays(static: Any) -> bool:
    """Return whether an object that is no pytree may hold arrays.

    The closure of a function decides, or the type of any other object.
    """
    if isinstance(static, _PLAIN):
        return False
    if isinstance(innermost(static), types.FunctionType) and not isinstance(static, types.MethodType):
        return not all(isinstance(x, _PLAIN) or callable(x) or is_tensor(x) for x in closed_over(static).values())
    return True


def _refuse_closures(skeleton: Skeleton, name: str, layer: str) -> None:
    """Raise an error for a function that closes over tracers of `forward`, which are invalid after `forward`."""
    trace = current_trace()
    for path, leaf in skeleton.paths():
        values = [x for value in closed_over(leaf).values() for x in tensors_in(value)] if callable(leaf) else ()
        if any(is_tracer(x) and x._trace is trace for x in values):
            raise ValueError(
                f"{name}{path} in {layer}.forward is a function that closes over traced values, which cannot be kept "
                "for backward. Keep the values themselves, with ctx.save_for_backward or as attributes, and build the "
                "function in backward."
            )
