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

from pylayer_jax._jax.identities import compute_together, forbid_derivative, with_tangent
from pylayer_jax._jax.tracers import NEEDS_VALUES, is_differentiated, is_differentiating, is_staged, is_tracer
from pylayer_jax._jax.types import as_array, as_arrays, has_tangent, typeof, with_type
from pylayer_jax._trees.closures import hiding_functions
from pylayer_jax._trees.messages import describe
from pylayer_jax._trees.partition import TreeWithoutTensors, is_tensor, split

from .host_shards import ShardLayout, from_local_shards, local_shards
from .host_store import PackSite
from .open_blocks import Hooks, hooks_suspended, outside_hooks_trace
from .pair import Hook, Pair

PACK_SCOPE: Final = "pack_hook"  # the operations of pack hooks in compiled programs, profiles and reports


class PackedTensor:
    """One packed tensor, without its arrays."""

    __slots__ = (
        "__weakref__",
        "aval",
        "is_in_shards",
        "keeps_original",
        "pair",
        "sharding",
        "site",
        "skeleton",
        "where",
    )

    def __init__(self, pair: Pair, tensor: Any, where: str, keeps_original: bool) -> None:
        self.pair = pair
        self.aval = typeof(tensor)
        # If JAX may place an array on any device, there is no sharding to restore.
        self.sharding = None if is_tracer(tensor) or not getattr(tensor, "committed", False) else tensor.sharding
        self.where = where  # the layer or operation, and the number of the tensor, for messages
        self.keeps_original = keeps_original  # whether the tensor itself is kept, for its tangent
        self.is_in_shards = False  # whether its shards in this process are packed, each by itself
        self.site: PackSite | None = None
        self.skeleton: TreeWithoutTensors

    def unpack(self, arrays: Sequence[Any], cotangents: Sequence[Any]) -> jax.Array:
        """The tensor, by the unpack hook; in staged code not before the cotangents are there."""
        tensor, packed = (arrays[0], arrays[1:]) if self.keeps_original else (None, arrays)
        if self.site is None and any(map(is_staged, packed)):
            # Otherwise XLA may unpack as early as it packs, and hold all unpacked tensors until backward begins.
            packed = compute_together([*packed, *cotangents])[: len(packed)]
        value = self._run_unpack_hook(packed)
        return with_tangent(tensor, value) if self.keeps_original else value

    def _run_unpack_hook(self, arrays: Sequence[Any]) -> jax.Array:
        with hooks_suspended(), outside_hooks_trace():
            if self.site is not None:
                return with_type(self.site.restored(arrays[0]), self.aval)
            packed = self.skeleton.fill(as_arrays(arrays))  # JAX hands on some constants as numbers
            try:
                with _needs_no_values("unpack_hook", self.where):
                    value = self._joined(packed) if self.is_in_shards else self.pair.unpack(packed)
            except Exception:
                self.pair.cache.forget(self)  # what is broken must not serve the next operation that keeps the tensor
                raise
            (value,) = as_arrays([_checked(value, self.aval, self.where)])
            if self.sharding is not None and not is_tracer(value) and value.sharding != self.sharding:
                value = jax.device_put(value, self.sharding)
            return with_type(value, self.aval)

    def _joined(self, packed: Sequence[Any]) -> jax.Array:
        """The tensor whose shards in this process are packed."""
        assert self.sharding is not None
        shape = self.aval.shape
        shard = jax.ShapeDtypeStruct(self.sharding.shard_shape(shape), self.aval.dtype)
        unpack = _checking(self.pair.unpack, shard, self.where)
        return from_local_shards([unpack(x) for x in packed], shape, self.sharding)


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


def pack_tensor(hooks: Hooks, tensor: Any, where: str) -> tuple[PackedTensor, list[Any]]:
    """Pack one tensor. Returns its packed form, and the arrays that JAX has to keep for it."""
    with hooks_suspended(), outside_hooks_trace():
        if not is_tracer(tensor):
            return _pack_concrete(hooks, tensor, where)
        with jax.named_scope(PACK_SCOPE):
            return _pack_traced(hooks, tensor, where)


def is_packed(hooks: Hooks, tensor: Any, where: str) -> bool:
    """Whether the predicate of the pair, if it has one, chooses a tensor."""
    if hooks.pair.only is None:
        return True
    with (
        hooks_suspended(),
        outside_hooks_trace(),
        _needs_no_values("only", where, "It may read the shape, dtype and sharding of a tensor."),
    ):
        return bool(hooks.pair.only(tensor))


def _pack_concrete(hooks: Hooks, tensor: Any, where: str) -> tuple[PackedTensor, list[Any]]:
    pair, packed = hooks.pair, PackedTensor(hooks.pair, tensor, where, keeps_original=False)
    packed.is_in_shards = pair.host and not tensor.is_fully_addressable
    if packed.is_in_shards:
        arrays, packed.skeleton = _run_pack_hook(
            lambda shards: [pair.pack(x) for x in shards], local_shards(tensor), where
        )
    else:
        value = np.asarray(tensor) if pair.host else tensor
        arrays, packed.skeleton = _run_pack_hook(pair.pack, value, where)
    return packed, arrays


def _pack_traced(hooks: Hooks, tensor: Any, where: str) -> tuple[PackedTensor, list[Any]]:
    pair, can_move = hooks.pair, has_tangent(tensor)
    is_outside = is_staged(tensor) and not hooks.deferred and is_differentiating()
    keeps_original = can_move and (is_differentiated(tensor) or is_outside)
    packed = PackedTensor(pair, tensor, where, keeps_original)
    if keeps_original:
        value = jax.lax.stop_gradient(tensor)
    elif can_move and not pair.differentiable:
        (value,) = forbid_derivative([tensor], _PackedWhenStaged(where))
    else:
        value = tensor
    value = as_array(value, packed.aval)
    if pair.host:
        if hooks.rematerialized:
            raise NotImplementedError(
                f"{where} cannot be packed on the host inside of jax.checkpoint, which refuses effects. Put the hooks "
                "block around the checkpointed function instead of inside, or use hooks without host=True."
            )
        division = ShardLayout.of(value)
        unpack = _checking(pair.unpack, division.piece, where)
        packed.site = PackSite(pair.store, pair.pack, unpack, division, where)
        arrays = [packed.site.token(value)]
    else:
        arrays, packed.skeleton = _run_pack_hook(pair.pack, value, where)
    return packed, arrays


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


def _run_pack_hook(pack: Hook, value: Any, where: str) -> tuple[list[Any], TreeWithoutTensors]:
    with _needs_no_values("pack_hook", where):
        packed = pack(value)
    # A NumPy array stays on the host, and is released with the vjp function, as every other object is.
    arrays, skeleton = split(packed, lambda leaf: isinstance(leaf, jax.Array))
    for path, names in hiding_functions(skeleton):
        raise ValueError(
            f"pack_hook{path} returned, for {where}, a function that closes over traced values "
            f"({names}), which cannot be kept. Return the values themselves in a tuple or dict."
        )
    return arrays, skeleton


_RUN_ON_HOST = "Run it on the host: saved_tensors_hooks(pack_hook, unpack_hook, host=True)."


@contextlib.contextmanager
def _needs_no_values(hook: str, where: str, advice: str = _RUN_ON_HOST) -> Generator[None]:
    try:
        yield
    except NEEDS_VALUES as error:
        raise TypeError(
            f"{hook} needs concrete values, but {where} is traced (jax.jit, jax.vmap, jax.lax.scan, ...). {advice}"
        ) from error
    except Exception as error:
        error.add_note(f"This happened in {hook}, for {where}.")
        raise
