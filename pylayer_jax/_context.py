"""The outputs of `forward`, the context `ctx`, and the values that one run of `forward` keeps for `backward`."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from ._jax.traces import current_trace, is_active, is_staging, is_tracer
from ._jax.types import as_arrays, has_tangent, is_array, is_ref, is_tensor, is_tensor_or_ref, types_of, zeros_of
from ._messages import closed_over, describe
from ._trees import Skeleton, contains, split

__tracebackhide__ = True  # pytest hides these frames: errors raised here concern the user's values


class Outputs:
    """The structure and the types of the outputs of one run of `forward`, without the arrays."""

    def __init__(self, result: Any, skeleton: Skeleton, arrays: Sequence[Any], marked: frozenset[int]) -> None:
        self.skeleton = skeleton
        self.is_sequence = isinstance(result, (tuple, list))
        # One skeleton per cotangent of `backward`: one per element of a tuple or list, one for any other result.
        self.groups = [split(x)[1] for x in result] if self.is_sequence else [skeleton]
        self.marked = marked  # indices of outputs that are marked non-differentiable
        self.types = types_of(arrays)
        self.has_tangent = [i not in marked and has_tangent(t) for i, t in enumerate(self.types)]
        # Zeros for an uncommitted array may be on any device, and those for a tracer get the sharding of its type.
        self.shardings = [None if is_tracer(x) or not x.committed else x.sharding for x in arrays]

    def cotangents(self, given: Sequence[Any], materialize: bool, with_statics: bool) -> list[Any]:
        """Return one cotangent for `backward` per top-level output; without a tensor, None or no entry."""
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
    # Under `jax.jit`, each device makes only its shard; `jax.device_put` would compare the zeros of all processes.
    return jax.jit(lambda: zeros_of(aval), out_shardings=sharding)


@dataclasses.dataclass(eq=False, slots=True)
class ContextState:
    """The private state of a context: everything except the attributes that the user sets."""

    layer_name: str
    needs_input_grad: Callable[[], tuple[bool, ...]]
    inputs: Sequence[Any] = ()
    in_forward: bool = True  # the context accepts saved tensors and flags only in `forward`
    load_saved: Callable[[], tuple[Any, ...] | None] | None = None  # in `backward`, called at the first read
    saved: tuple[Any, ...] | None = None
    saved_for_jvp: tuple[Any, ...] | None = None
    materialize: bool = True
    marked: list[Any] = dataclasses.field(default_factory=list[Any])
    # (value that has to be an output, ctx method, advice)
    must_return: list[tuple[Any, str, str]] = dataclasses.field(default_factory=list[Any])
    # Pairs of a saved NumPy array and its copy, which counts as the output if `forward` also returns the array.
    numpy_copies: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list[Any])
    # Pairs of a NumPy value that a `forward` without context returned, and the JAX array that replaced it.
    returned: Sequence[tuple[Any, Any]] = ()

    def read_saved(self) -> tuple[Any, ...] | None:
        if self.load_saved is not None:
            self.saved, self.load_saved = self.load_saved(), None
        return self.saved


class PyLayerContext:
    """The object `ctx`, which carries values and flags from `forward` to `backward` in one application of a layer.

        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x)   # tensors
            ctx.scale = scale          # anything else
            return x * scale

    Arrays in an attribute, also within a list, dict or other pytree, are kept like saved tensors. `backward` gets every
    other object unchanged, and a copy of each NumPy array as a `jax.Array`.
    """

    __slots__ = ("__dict__", "_state")

    _state: ContextState

    def __init__(self, state: ContextState) -> None:
        object.__setattr__(self, "_state", state)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, own_copy(value, self._state, f"ctx.{name} = ..."))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep values for `backward`, where `saved_tensor()` returns them in the same order.

        Each value may be a pytree, whose leaves that are not arrays are saved unchanged. Of a `jax.Ref` argument,
        `backward` reads what it then holds. In a second derivative, a saved input is the input itself, a saved output
        has the derivative that `backward` defines, and any other saved tensor that of the code of `forward`.

        Raises:
            RuntimeError: when called outside `forward`, or a second time.
            ValueError: for a `jax.Ref` that is not an argument of `forward`.
        """
        state = self._state_in_forward("save_for_backward")
        if state.saved is not None:
            raise RuntimeError(
                f"ctx.save_for_backward was called twice in {state.layer_name}.forward. Save everything in one call: "
                "ctx.save_for_backward(a, b, ...)."
            )
        state.saved = tuple([own_copy(x, state, "ctx.save_for_backward(...)") for x in tensors])

    def saved_tensor(self) -> tuple[Any, ...] | None:
        """Return the tuple of saved values, or None, as in Paddle, if `forward` saved nothing."""
        return self._state.read_saved()

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The tuple of saved values, empty if `forward` saved nothing, as in torch."""
        return self._state.read_saved() or ()

    def mark_not_inplace(self, *inputs: Any) -> None:
        """Check that each value is an input of `forward`. Code for Paddle calls this; JAX arrays never change in place.

        Raises:
            RuntimeError: when called outside `forward`.
            ValueError: for a value that is not a tensor argument of `forward`.
        """
        state = self._state_in_forward("mark_not_inplace")
        for i, value in enumerate(inputs):
            if not all(is_tensor(x) and contains(state.inputs, x) for x in split(value)[0] or [None]):
                raise ValueError(
                    f"ctx.mark_not_inplace in {state.layer_name}.forward: argument {i} ({describe(value)}) is not a "
                    "tensor input of forward. Pass the arguments of forward themselves."
                )

    def mark_non_differentiable(self, *outputs: Any) -> None:
        """Stop gradients through these outputs, under every transformation.

        For a marked output, `backward` gets a cotangent of zeros, or None after `set_materialize_grads(False)`.

        Raises:
            RuntimeError: when called outside `forward`.
            ValueError: when `forward` returns, for a marked value that is not an output of `forward`.
        """
        state, advice = self._state_in_forward("mark_non_differentiable"), "Mark the very values that forward returns."
        marked = [x for value in outputs for x in (split(value)[0] or [value])]
        state.marked += marked
        state.must_return += [(x, "mark_non_differentiable", advice) for x in marked]

    def set_materialize_grads(self, flag: bool) -> None:
        """Choose whether `backward` gets zeros (True, the default) or None (False) for a missing cotangent.

        If a call takes a `jax.Ref`, `backward` always gets zeros.

        Raises:
            RuntimeError: when called outside `forward`.
        """
        self._state_in_forward("set_materialize_grads").materialize = bool(flag)

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """One bool per argument of the call: whether its gradient is needed.

        The bools are exact in eager mode, and in `backward` unless JAX differentiates one jitted function several times
        with respect to different arguments. In a traced `forward`, they are True for every argument that can have a
        gradient.
        """
        return self._state.needs_input_grad()

    def _state_in_forward(self, call: str) -> ContextState:
        state = self._state
        if not state.in_forward:
            raise RuntimeError(
                f"ctx.{call} was called in backward of {state.layer_name}, or after its forward had returned; it works "
                "only inside forward. Move the call into forward."
            )
        return state


def own_copy(value: Any, state: ContextState, call: str) -> Any:
    """Return `value` as the context keeps it: NumPy arrays are copied, or replaced by JAX outputs."""
    if is_array(value) or isinstance(value, (int, float, str, type(None))):
        return value
    leaves, rest = split(value, lambda x: isinstance(x, np.ndarray) or is_ref(x))
    if not leaves:
        return value  # the user's own container, since nothing in it has to be copied
    for i, leaf in enumerate(leaves):
        if not is_ref(leaf):
            leaves[i] = leaf.copy()
            state.numpy_copies.append((leaf, leaves[i]))
        elif state.in_forward and not contains(state.inputs, leaf):
            raise ValueError(
                f"{call} in {state.layer_name}: JAX keeps a jax.Ref for backward only if it is an argument of forward. "
                "If forward made the Ref, keep its value: ref[...]. Otherwise pass the Ref as an argument."
            )
    return rest.fill(leaves)


# -- the contents of a context after `forward` ------------------------------------------------------------


class ResidualTree(NamedTuple):
    """A value that `forward` kept, without its tensors."""

    skeleton: Skeleton
    indices: list[int]  # of its tensors, in a list

    def fill(self, residual: Callable[[int], Any]) -> Any:
        """Return the value in new containers, which no other run of `backward` shares."""
        # JAX passes some constant residuals as NumPy arrays.
        return self.skeleton.fill(as_arrays([residual(i) for i in self.indices]), copy_container)


def copy_container(static: Any) -> Any:
    return copy.copy(static) if isinstance(static, (dict, set, collections.deque, bytearray)) else static


@dataclasses.dataclass(eq=False, slots=True)
class SavedContext:
    """Everything that one run of `forward` keeps for `backward`, except the arrays."""

    outputs: Outputs
    materialize: bool
    saved: ResidualTree | None  # the values of save_for_backward
    n_values: int  # the number of values that save_for_backward got; each may be a pytree
    n_saved: int  # the number of residuals from save_for_backward, which come first
    n_residuals: int
    attributes: dict[str, ResidualTree]
    saved_for_jvp: ResidualTree | None  # from save_for_forward; None if `jvp` gets `saved`
    has_names: bool = False  # True if the jaxpr of `forward` already applies `checkpoint_name` for `saved_names`

    def names(self, of_values: Sequence[str | None]) -> list[str]:
        """Return the name of each residual, or "", from those of the values of save_for_backward."""
        names = [""] * self.n_residuals
        if self.saved is not None:
            for path, i in zip(self.saved.skeleton.tensor_paths(), self.saved.indices, strict=True):
                index, rest = path[1:].split("]", 1)  # "[0]['w']" gives "0" and "['w']"
                if not names[i] and (name := of_values[int(index)]) is not None:
                    names[i] = name + rest
        others = [(f"ctx.{name}", tree) for name, tree in self.attributes.items()]
        for start, tree in [*others, ("saved_for_forward", self.saved_for_jvp)]:
            for path, i in zip(tree.skeleton.tensor_paths(), tree.indices, strict=True) if tree else ():
                names[i] = names[i] or start + path
        return names


class ForwardResult(NamedTuple):
    kept: SavedContext
    outputs: list[Any]
    residuals: list[Any]


def keep(ctx: PyLayerContext, result: Any, layer: Any) -> ForwardResult:
    state = ctx._state
    tensors, skeleton = split(result)
    if not tensors:
        raise ValueError(
            f"{state.layer_name}.forward returned {describe(result)}: expected at least one tensor, alone or in a "
            "tuple, list or dict. Numbers are no tensors; jnp.asarray turns them into tensors."
        )
    if len(skeleton.leaves) > len(tensors) and any(map(is_ref, skeleton.statics())):
        raise ValueError(
            f"{state.layer_name}.forward returned a jax.Ref among its outputs, which JAX does not allow. The caller "
            "has the Ref that it passed; for any other Ref, return its value: ref[...]."
        )
    arrays = as_arrays(tensors)
    check_returned(state, tensors)
    marked = [i for i, x in enumerate(tensors) if contains(state.marked, x)] if state.marked else ()
    # From the id of a NumPy output, and of its copy on `ctx`, to the JAX array that replaced the output.
    output_of = {id(x): y for x, y in [*zip(tensors, arrays, strict=True), *state.returned] if x is not y}
    for array, own in state.numpy_copies if output_of else ():
        # `forward` may have changed the array in place after the copy was made.
        if id(array) in output_of and array.tobytes() == own.tobytes():
            output_of[id(own)] = output_of[id(array)]
    residuals = list[Any]()
    # From (is_saved, id of a tensor) to its index in `residuals`. A tensor that is saved and also an attribute of `ctx`
    # is two residuals, because hooks pack only saved tensors.
    index_of: dict[tuple[bool, int], int] = {}
    # This trace is active, so `add` does not call the slow `is_active` for its tracers.
    trace = getattr(state.inputs[0], "_trace", None) if state.inputs else None

    def add(value: Any, name: str, is_saved: bool = False) -> ResidualTree:
        """Add the tensors of a value. Refuse tracers of an ended trace, and functions that close over tracers."""
        tensors, skeleton = split(value, is_tensor_or_ref)
        if len(skeleton.leaves) > len(tensors):
            _refuse_closures(skeleton, name, state.layer_name)
        if output_of:
            tensors = [output_of.get(id(x), x) for x in tensors]
        for x in tensors:
            if is_tracer(x) and x._trace is not trace and not is_active(x):
                raise _ended_error(name, state.layer_name)
            if (is_saved, id(x)) not in index_of:
                index_of[is_saved, id(x)] = len(residuals)
                residuals.append(x)
        return ResidualTree(skeleton, [index_of[is_saved, id(x)] for x in tensors])

    saved = None if state.saved is None else add(state.saved, "ctx.save_for_backward", is_saved=True)
    n_saved = len(residuals)
    attributes = {name: add(value, f"ctx.{name}") for name, value in vars(ctx).items()}
    saved_for_jvp = None
    if state.saved_for_jvp is not None and hasattr(layer, "jvp"):
        saved_for_jvp = add(state.saved_for_jvp, "ctx.save_for_forward")
    outputs = Outputs(result, skeleton, arrays, frozenset(marked))
    n_values, n_residuals = len(state.saved or ()), len(residuals)
    kept = SavedContext(outputs, state.materialize, saved, n_values, n_saved, n_residuals, attributes, saved_for_jvp)
    return ForwardResult(kept, arrays, as_arrays(residuals))


def positions_of_kept(
    state: ContextState, attributes: dict[str, Any], arguments: Sequence[Any], outputs: Sequence[Any]
) -> ResidualTree:
    """Return what a `forward` on NumPy arrays kept for a `backward` in JAX, as positions in [*inputs, *outputs]."""
    statics = [x for x in jax.tree.leaves(arguments, is_leaf=lambda x: x is None) if not is_tensor(x)]
    copied_from = {id(own): array for array, own in state.numpy_copies}
    known = [*state.inputs, *outputs]

    def position(x: Any) -> Any:
        source: Any = copied_from.get(id(x), x)
        same = [] if contains(statics, x) else [i for i, y in enumerate(known) if y is source]
        if not same or (x is not source and x.tobytes() != source.tobytes()):  # or changed in place after the copy
            return None
        return same[0] if same[0] < len(state.inputs) else same[-1]  # the first input, or the last output

    for name, value in {"save_for_backward": state.saved or (), **attributes}.items():
        for x in jax.tree.leaves(value, is_leaf=lambda x: x is None):
            if position(x) is None and not contains(statics, x):
                raise ValueError(
                    f"{state.layer_name}.forward, ctx.{name}: with host = 'forward', ctx keeps inputs, outputs and "
                    f"static arguments, but this is {describe(x)}. Return it as another output, mark this output by "
                    "ctx.mark_non_differentiable, and keep the output."
                )
    tensors, skeleton = split((state.saved, dict(attributes)), lambda x: position(x) is not None)
    return ResidualTree(skeleton, [position(x) for x in tensors])


def check_returned(state: ContextState, tensors: Sequence[Any]) -> None:
    for value, call, advice in state.must_return:
        if contains(tensors, value):
            continue
        if is_tracer(value) and not is_active(value):
            raise _ended_error(f"ctx.{call}", state.layer_name)
        raise ValueError(
            f"ctx.{call} in {state.layer_name}.forward: {describe(value)} is not an output of forward. {advice}"
        )


def _ended_error(call: str, layer_name: str) -> ValueError:
    return ValueError(
        f"{call} in {layer_name}.forward: the value belongs to a transformed function that has returned, so that JAX "
        "cannot keep it. If jax.jit, jax.checkpoint or another transformation decorates forward (also with "
        f"static_argnums for ctx), remove it, and put it around the call: jax.jit({layer_name}.apply). Or let forward "
        "take no ctx, and keep values in setup_context(ctx, inputs, output) of a pylayer_jax.Function. If forward "
        "calls a transformed function that uses ctx, let this function return the values instead."
    )


def _refuse_closures(skeleton: Skeleton, name: str, layer_name: str) -> None:
    trace = current_trace()
    for path, leaf in skeleton.paths():
        for tensors in closed_over(leaf).values():
            if any(is_tracer(x) and x._trace is trace for x in tensors):
                raise ValueError(
                    f"{name}{path} in {layer_name}.forward is a function that closes over traced values, which cannot "
                    "be kept for backward. Keep the values themselves, with ctx.save_for_backward or as attributes, "
                    "and build the function in backward."
                )
