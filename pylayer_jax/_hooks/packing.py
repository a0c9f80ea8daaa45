"""Packing one tensor by a pair of hooks, and unpacking it.

NOTE [packed tensors]
A packed tensor takes part in derivatives of higher order as the tensor itself would, whatever the pair does to its
values: pack and unpack count as the identity, as in torch. If an outer differentiation is under way, the tensor
therefore stays beside its packed form, only for its tangent; its value is never read there, so that XLA drops it from a
compiled program.

If a program is only staged, to be differentiated later (`jax.grad` of `jax.jit`, the body of a scan), or returns its
vjp function (`jax.jit` of `jax.vjp`), nothing tells whether a derivative of higher order follows, and a tensor that
stays would be an output of the compiled forward: the very memory that packing is meant to save. Therefore it does not
stay there. A second derivative goes through the hooks themselves if the pair says that this is right, and is an error
otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, Final

import jax
import numpy as np

from pylayer_jax._jax.identity_primitives import barrier, forbid_derivative, with_tangent
from pylayer_jax._jax.tracers import NEEDS_VALUES, is_differentiated, is_differentiating, is_staged, is_tracer
from pylayer_jax._jax.types import as_array, as_arrays, has_tangent, is_array, is_key, typeof, with_type
from pylayer_jax._trees.closures import hiding_functions
from pylayer_jax._trees.hints import NUMBERS_IN_HOOKS
from pylayer_jax._trees.messages import add_note, describe
from pylayer_jax._trees.partition import TreeWithoutTensors, is_tensor, split

from .host_shards import ShardLayout, from_local_shards, local_shards
from .host_store import PackSite, Place
from .open_blocks import Hooks, hooks_suspended, outside_hooks_trace
from .pair import Hook, Pair, Step

PACK_SCOPE: Final = "pack_hook"  # the operations of pack hooks in compiled programs, profiles and reports


class PackedArray:
    """One array, packed by a step of a pair and by those behind it; without the arrays that are kept for it."""

    __slots__ = ("_aval", "_is_numpy", "_parts", "_sharding", "_skeleton", "_unpack", "_where")

    def __init__(
        self, array: Any, unpack: Hook, skeleton: TreeWithoutTensors, parts: list[tuple[Any, slice]], where: str
    ) -> None:
        self._is_numpy = not is_array(array)
        self._aval = jax.ShapeDtypeStruct(array.shape, array.dtype) if self._is_numpy else typeof(array)
        # If JAX may place an array on any device, there is no sharding to restore.
        self._sharding = None if is_tracer(array) or not getattr(array, "committed", False) else array.sharding
        self._unpack = unpack
        self._skeleton = skeleton  # of what the pack hook returned
        self._parts = parts  # for each array in it, how the next step packed it (None: not), and where its arrays are
        self._where = where  # the layer or operation, and the number of the tensor, for messages

    def restored(self, arrays: Sequence[Any]) -> Any:
        """The array, by the unpack hooks."""
        parts = [arrays[at.start] if part is None else part.restored(arrays[at]) for part, at in self._parts]
        with _running("unpack_hook", self._where):
            value = self._unpack(self._skeleton.fill(parts))
        value = _checked(value, self._aval, self._where)
        if self._is_numpy:
            return np.asarray(value)
        (value,) = as_arrays([value])
        if self._sharding is not None and not is_tracer(value) and value.sharding != self._sharding:
            value = jax.device_put(value, self._sharding)
        return with_type(value, self._aval)


class PackedTensor:
    """One packed tensor, without its arrays."""

    __slots__ = ("__weakref__", "_array", "_pair", "keeps_original")

    def __init__(self, pair: Pair, array: PackedArray, keeps_original: bool) -> None:
        self._pair = pair
        self._array = array
        self.keeps_original = keeps_original  # whether the tensor itself is kept, for its tangent

    def unpack(self, arrays: Sequence[Any], cotangents: Sequence[Any]) -> jax.Array:
        """The tensor, by the unpack hook; in staged code not before the cotangents are there."""
        tensor, packed = (arrays[0], arrays[1:]) if self.keeps_original else (None, arrays)
        if any(map(is_staged, packed)):
            # Otherwise XLA may unpack as early as it packs, and hold all unpacked tensors until backward begins.
            packed = barrier([*packed, *cotangents])[: len(packed)]
        with hooks_suspended(), outside_hooks_trace():
            try:
                value = self._array.restored(as_arrays(packed))  # JAX hands on some constants as numbers
            except Exception:
                self._pair.cache.forget(self)  # what is broken must not serve the next operation that keeps the tensor
                raise
        return with_tangent(tensor, value) if self.keeps_original else value


def _checking(unpack: Hook, aval: Any, where: str) -> Hook:
    return lambda packed: _checked(unpack(packed), aval, where)


def _checked(value: Any, aval: Any, where: str) -> Any:
    """The result of an unpack hook, if it has the dtype and shape of the packed tensor."""
    if not is_tensor(value) or value.shape != aval.shape or value.dtype != aval.dtype:
        raise ValueError(
            f"unpack_hook returned {describe(value)} for {where}: expected dtype {aval.dtype} and shape "
            f"{tuple(aval.shape)}, as they were packed. Return a tensor of that dtype and shape."
        )
    return value


def pack_tensor(hooks: Hooks, tensor: Any, where: str) -> tuple[PackedTensor | None, list[Any]]:
    """Pack one tensor. Returns its packed form (None: it is not packed), and the arrays that JAX has to keep for it."""
    with hooks_suspended(), outside_hooks_trace():
        steps = _chosen_steps(hooks.pair.steps, tensor, where) if _chooses(hooks.pair.only, tensor, where) else ()
        if not steps:
            return None, [tensor]
        if not is_tracer(tensor):
            array, arrays = _pack(hooks, steps, tensor, where)
            packed = PackedTensor(hooks.pair, array, keeps_original=False)
        else:
            with jax.named_scope(PACK_SCOPE):
                packed, arrays = _pack_traced(hooks, steps, tensor, where)
        hooks.pair.packed[is_staged(tensor)] += 1
        return packed, arrays


def _chosen_steps(steps: Sequence[Step], array: Any, where: str) -> Sequence[Step]:
    """The steps from the first one that packs an array; none if none does."""
    first = (i for i, step in enumerate(steps) if _chooses(step.only, array, _in_step(where, step)))
    return () if is_key(array) else steps[next(first, len(steps)) :]


def _chooses(only: Hook | None, array: Any, where: str) -> bool:
    if only is None:
        return True
    with _running("only", where):
        return bool(only(array))


def _in_step(where: str, step: Step) -> str:
    return f"{where}, in {step.name}" if step.name else where


def _pack_traced(hooks: Hooks, steps: Sequence[Step], tensor: Any, where: str) -> tuple[PackedTensor, list[Any]]:
    pair, can_move = hooks.pair, has_tangent(tensor)
    is_outside = is_staged(tensor) and not hooks.deferred and is_differentiating()
    keeps_original = can_move and (is_differentiated(tensor) or is_outside)
    if keeps_original:
        value = jax.lax.stop_gradient(tensor)
    elif can_move and not pair.differentiable:
        (value,) = forbid_derivative([tensor], _PackedWhenStaged(where))
    else:
        value = tensor
    if hooks.rematerialized:
        raise NotImplementedError(
            f"{where} cannot be packed on the host inside of jax.checkpoint, which refuses effects. Put the hooks "
            "block around the checkpointed function instead of inside, or use hooks without host=True."
        )
    array, arrays = _pack(hooks, steps, as_array(value, typeof(tensor)), where)
    return PackedTensor(pair, array, keeps_original), arrays


def _pack(
    hooks: Hooks, steps: Sequence[Step], array: Any, where: str, is_part: bool = False
) -> tuple[PackedArray, list[Any]]:
    """Pack an array by the first step, and the arrays that its pack hook returns by the next steps.

    `is_part`: whether the step before made the array.
    """
    step, later = steps[0], steps[1:]
    here = _in_step(where, step)
    with contextlib.ExitStack() as scope:
        if is_tracer(array) and step.name:
            scope.enter_context(jax.named_scope(f"{PACK_SCOPE}_{len(hooks.pair.steps) - len(later)}"))
        packed, unpack = _run_pack_hook(hooks, step, array, here, is_part)

    chosen: dict[int, Sequence[Step]] = {}  # by the identity of an array in `packed`, the steps that pack it

    def is_kept(leaf: Any) -> bool:
        if not (isinstance(leaf, jax.Array) or _is_numpy_array(leaf)):
            return False
        # A concrete array beside traced ones is a constant of the program.
        is_offered = bool(later) and is_tracer(leaf) == is_tracer(array)
        chosen[id(leaf)] = _chosen_steps(later, leaf, where) if is_offered else ()
        # A NumPy array stays on the host, and is released with the vjp function, as every other object is.
        return isinstance(leaf, jax.Array) or bool(chosen[id(leaf)])

    leaves, skeleton = split(packed, is_kept)
    for path, names in hiding_functions(skeleton):
        raise ValueError(
            f"pack_hook{path} returned, for {here}, a function that closes over traced values "
            f"({names}), which cannot be kept. Return the values themselves in a tuple or dict."
        )
    parts, arrays = list[tuple[Any, slice]](), list[Any]()
    for leaf in leaves:
        part, kept = None, [leaf]
        if steps_of_leaf := chosen[id(leaf)]:
            part, kept = _pack(hooks, steps_of_leaf, leaf, where, is_part or leaf is not array)
        parts.append((part, slice(len(arrays), len(arrays) + len(kept))))
        arrays += kept
    return PackedArray(array, unpack, skeleton, parts, here), arrays


def _is_numpy_array(leaf: object) -> bool:
    """Whether a leaf is a NumPy array of a dtype that JAX has now."""
    return isinstance(leaf, np.ndarray) and is_tensor(leaf) and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype


def _run_pack_hook(hooks: Hooks, step: Step, array: Any, where: str, is_part: bool) -> tuple[Any, Hook]:
    """What the pack hook of a step returns for an array, and the function that makes the array of it again."""
    pack, unpack = (is_part and step.pack_part) or step.pack, step.unpack
    if step.host and is_tracer(array):
        layout = ShardLayout.of(array)
        store, line = hooks.pair.store, hooks.line_in_eager_loop
        place = Place() if line is None else store.place((line, where, layout))
        site = PackSite(store, place, pack, _checking(unpack, layout.piece, where), layout, where)
        return site.token(array), site.restored
    with _running("pack_hook", where):
        if not step.host:
            return pack(*as_arrays([array])), unpack
        if getattr(array, "is_fully_addressable", True):
            return pack(np.asarray(array)), unpack
        shape, sharding = array.shape, array.sharding
        unpack_shard = _checking(unpack, jax.ShapeDtypeStruct(sharding.shard_shape(shape), array.dtype), where)
        packed = [pack(shard) for shard in local_shards(array)]
        return packed, lambda packed: from_local_shards([unpack_shard(x) for x in packed], shape, sharding)


@dataclasses.dataclass(frozen=True)
class _PackedWhenStaged:
    """Makes the error for a second derivative through a tensor that was packed in staged code."""

    where: str

    def __call__(self) -> TypeError:
        return TypeError(
            f"a second derivative goes through {self.where}, which a pack hook packed inside of staged code (a jitted "
            "function, the body of a scan) that was differentiated from outside. Put the hooks block around that code "
            "instead, into the function that jax.grad differentiates; or, where JAX can differentiate the hooks with "
            "the derivative of the identity, pass saved_tensors_hooks(..., differentiable=True)."
        )


@contextlib.contextmanager
def _running(hook: str, where: str) -> Generator[None]:
    """A block that runs a hook of the user: its exceptions say where they happened, and what to do."""
    try:
        yield
    except NEEDS_VALUES as error:
        raise TypeError(
            f"{hook} needs concrete values, but {where} is traced (jax.jit, jax.vmap, jax.lax.scan, ...)."
            f"{NUMBERS_IN_HOOKS[hook]}"
        ) from error
    except Exception as error:
        add_note(error, "", hook, f", for {where}")
        raise
