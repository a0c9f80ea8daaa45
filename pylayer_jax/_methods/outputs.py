"""What one run of `forward` left for `backward`: everything but the tensors themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from pylayer_jax._jax.names import Tracer, differentiable, instantiate, typeof
from pylayer_jax._trees.partition import Skeleton, split

from .arguments import as_arrays
from .context import Record, contains, describe


class Outputs:
    """What one run of `forward` returned, without its tensors."""

    __slots__ = ("groups", "has_tangent", "is_sequence", "marked", "shardings", "skeleton", "types")

    def __init__(self, layer: str, result: Any, record: Record | None = None) -> None:
        tensors, self.skeleton = split(result)
        if not tensors:
            raise ValueError(
                f"{layer}.forward returned {describe(result)}: expected at least one tensor, alone or in a tuple, "
                "list or dict."
            )
        # One cotangent per element of a tuple or list, or one for anything else.
        self.is_sequence = isinstance(result, (tuple, list))
        self.groups = [split(x)[1] for x in result] if self.is_sequence else [self.skeleton]
        self.marked = _marked(layer, tensors, record.marked) if record and record.marked else frozenset[int]()
        if record and record.dirty:
            _check_dirty(layer, tensors, record.dirty)

    def arrays(self, result: Any) -> list[jax.Array]:
        """The tensors of `result` as JAX arrays, whose types are kept."""
        arrays = as_arrays(split(result)[0])
        self.types = [typeof(x) for x in arrays]
        self.has_tangent = tuple(i not in self.marked and differentiable(t) for i, t in enumerate(self.types))
        self.shardings = [None if isinstance(x, Tracer) else x.sharding for x in arrays]
        return arrays

    def cotangents(self, given: Sequence[Any], materialize: bool, every: bool) -> list[Any]:
        """What `backward` gets: one entry per element that holds a tensor, with zeros or None for None.

        With `every`, the other elements have an entry too, which is None.
        """
        full = [self._zeros(i) if c is None and materialize else c for i, c in enumerate(given)]
        entries: list[Any] = []
        for group in self.groups:
            if group.size:
                entries.append(group.statics_as(None, full[: group.size]))
                full = full[group.size :]
            elif every:
                entries.append(None)
        return entries

    def _zeros(self, i: int) -> jax.Array:
        zeros, sharding = instantiate(self.types[i]), self.shardings[i]
        if sharding is None or len(sharding.device_set) == 1 or isinstance(zeros, Tracer):
            return zeros
        return jax.device_put(zeros, sharding)


def _marked(layer: str, tensors: Sequence[Any], marked: Sequence[Any]) -> frozenset[int]:
    flat = [leaf for value in marked for leaf in (jax.tree_util.tree_leaves(value) or [value])]
    for leaf in flat:
        if not contains(tensors, leaf):
            raise ValueError(
                f"ctx.mark_non_differentiable in {layer}.forward: {describe(leaf)} is not an output of forward. "
                "Mark the very values that forward returns."
            )
    return frozenset(i for i, tensor in enumerate(tensors) if contains(flat, tensor))


def _check_dirty(layer: str, tensors: Sequence[Any], dirty: Sequence[Any]) -> None:
    for value in dirty:
        if not contains(tensors, value):
            raise ValueError(
                f"ctx.mark_dirty in {layer}.forward: {describe(value)} is not an output of forward. JAX arrays never "
                "change in place; what would change is a new array, which forward has to return: "
                "x = x.at[...].set(...); ctx.mark_dirty(x); return x."
            )


@dataclasses.dataclass(slots=True)
class Kept:
    """A pytree with tensors: the rest of it, and which residuals they are."""

    skeleton: Skeleton
    residuals: list[int]

    def restore(self, residuals: Sequence[Any]) -> Any:
        # JAX hands on some constants as NumPy arrays.
        return self.skeleton.fill(as_arrays([residuals[i] for i in self.residuals]))


@dataclasses.dataclass(eq=False, slots=True)
class Recording:
    """What one run of `forward` left for `backward`, without its tensors."""

    outputs: Outputs
    saved: Any  # like an attribute; None if nothing was saved
    saved_residuals: int  # which are the first
    saved_for_jvp: Any  # likewise; None for the same as `saved`
    attributes: dict[str, Any]  # a `Kept`, or a static as it is
    materialize: bool
    told: list[bool]  # the inputs that `forward` was told need a gradient
    asked: bool  # whether it looked, so that what it saved may depend on it
    surely: bool = True  # whether they do, or only may
