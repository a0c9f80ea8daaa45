"""Arrays apart from statics.

Any pytree splits into its tensors, which JAX may trace, and a `Skeleton`, which holds everything else
as it was: containers, Python numbers, functions, objects. Statics are never compared or hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np

_TENSOR: Final = object()
_NUMERIC_KINDS: Final = frozenset("biufcV")  # V: bfloat16, float8 and int4 of ml_dtypes


def is_tensor(leaf: object) -> bool:
    """Whether a leaf is a `jax.Array` (traced or not), a numeric NumPy array or a NumPy scalar."""
    if isinstance(leaf, jax.Array):
        return True
    return isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in _NUMERIC_KINDS


class Skeleton:
    """A pytree whose tensors were taken out; `fill` puts others in their place.

    The skeleton of a bare tensor is always `BARE`.
    """

    __slots__ = ("leaves", "size", "treedef")

    def __init__(self, treedef: Any, leaves: list[Any], size: int) -> None:
        self.treedef = treedef
        self.leaves = leaves
        self.size = size

    def fill(self, tensors: Sequence[Any]) -> Any:
        """The tree with `tensors` (in flattening order) where its own were."""
        if self is BARE:
            return tensors[0]
        rest = iter(tensors)
        return self.treedef.unflatten([next(rest) if x is _TENSOR else x for x in self.leaves])

    def statics_as(self, value: Any, tensors: Sequence[Any]) -> Any:
        """The tree with `tensors` in place and every static replaced by `value`."""
        if self is BARE:
            return tensors[0]
        rest = iter(tensors)
        return self.treedef.unflatten([next(rest) if x is _TENSOR else value for x in self.leaves])

    def statics(self) -> list[Any]:
        """Everything that is not a tensor, in flattening order."""
        return [leaf for leaf in self.leaves if leaf is not _TENSOR]

    def static_paths(self) -> list[tuple[str, Any]]:
        """Every static with its place, as in `['weights'][0]`."""
        return [(path, leaf) for path, leaf in self._paths() if leaf is not _TENSOR]

    def tensor_paths(self) -> list[str]:
        """Where each tensor sits, as in `['weights'][0]`; empty for a bare tensor."""
        return [path for path, leaf in self._paths() if leaf is _TENSOR]

    def tensor_entries(self) -> list[tuple[int, str]]:
        """Of a tuple: the element that each tensor belongs to, and its place in there, as in `['weights'][0]`."""
        if len(self.leaves) == self.treedef.num_nodes - 1:  # one leaf per element
            return [(i, "") for i, leaf in enumerate(self.leaves) if leaf is _TENSOR]
        whole = self.treedef.unflatten(self.leaves)
        pairs, _ = jax.tree_util.tree_flatten_with_path(whole, is_leaf=_is_unsortable)
        return [(path[0].idx, jax.tree_util.keystr(path[1:])) for path, leaf in pairs if leaf is _TENSOR]

    def _paths(self) -> list[tuple[str, Any]]:
        whole = self.treedef.unflatten(self.leaves)
        pairs, _ = jax.tree_util.tree_flatten_with_path(whole, is_leaf=_is_unsortable)
        return [(jax.tree_util.keystr(path), leaf) for path, leaf in pairs]


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and treedef of a pytree, in which a dict whose keys cannot be sorted is one static leaf.

    Raises:
        ValueError: for such a dict with tensors inside, which JAX could not follow.
    """
    try:
        return jax.tree_util.tree_flatten(tree)
    except ValueError:
        leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_is_unsortable)
        for leaf in filter(_is_unsortable, leaves):
            if any(is_tensor(x) for x in flatten(list(leaf.values()))[0]):
                raise ValueError(
                    f"a dict with keys {list(leaf)} holds tensors, but its keys cannot be sorted, as JAX needs of a "
                    "dict of arrays. Use keys of one type."
                ) from None
        return leaves, treedef


def _is_unsortable(node: Any) -> bool:
    if not isinstance(node, dict):
        return False
    try:
        sorted(node)
    except TypeError:
        return True
    return False


# Nearly every argument, output and saved tensor is one bare tensor, which needs no flattening.
BARE: Final = Skeleton(jax.tree_util.tree_structure(0), [_TENSOR], 1)


def split(tree: Any, counts: Callable[[object], bool] = is_tensor) -> tuple[list[Any], Skeleton]:
    """The tensors of a pytree (the leaves that count) in flattening order, and the rest."""
    if counts(tree):
        return [tree], BARE
    leaves, treedef = flatten(tree)
    tensors: list[Any] = []
    for i, leaf in enumerate(leaves):
        if counts(leaf):
            tensors.append(leaf)
            leaves[i] = _TENSOR
    return tensors, Skeleton(treedef, leaves, len(tensors))


@jax.tree_util.register_pytree_node_class
class Carried:
    """A pytree without leaves: its treedef carries one Python object through JAX.

    Treedefs are compared and hashed by JAX. The object is compared by identity alone, so that it may
    hold statics that cannot be compared or hashed.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[tuple[()], ById]:
        return (), ById(self.value)

    @classmethod
    def tree_unflatten(cls, aux: ById, _: Sequence[Any]) -> Carried:
        return cls(aux.value)


class ById:
    """Compares as its object does under `is`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
