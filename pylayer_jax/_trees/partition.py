"""Tensors and statics, separated.

Any pytree splits into its tensors, which JAX may trace, and a `TreeWithoutTensors`, which holds everything else
unchanged: containers, Python numbers, functions, objects. Statics are never compared or hashed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np

from pylayer_jax._jax.types import as_arrays, is_array, is_ref

_TENSOR: Final = object()
_NONE: Final = jax.tree_util.tree_structure(None)
_ONE_LEVEL: Final = jax.tree_util.default_registry.flatten_one_level
_NUMERIC_KINDS: Final = frozenset("biufcV")  # V: bfloat16, float8 and int4 of ml_dtypes
_NOT_IN_JAX: Final = frozenset((np.void, np.record, np.longdouble, np.clongdouble))  # np.void: structured arrays


def is_tensor(leaf: object) -> bool:
    """Whether a leaf is a `jax.Array` (traced or not), or a NumPy array or scalar of numbers that JAX has."""
    if is_array(leaf):
        return True
    is_numpy = isinstance(leaf, (np.ndarray, np.generic))
    return is_numpy and leaf.dtype.kind in _NUMERIC_KINDS and leaf.dtype.type not in _NOT_IN_JAX


def is_tensor_or_ref(leaf: object) -> bool:
    return is_tensor(leaf) or is_ref(leaf)


def is_box(value: object) -> bool:
    """Whether a value stands for the array that it holds, as `flax.nnx.Param` does."""
    return not is_array(value) and hasattr(type(value), "__jax_array__")


def unboxed(value: Any) -> Any:
    """The array that a box holds; any other value itself."""
    return value.__jax_array__() if is_box(value) else value


class TreeWithoutTensors:
    """A pytree without its tensors; `fill` puts other tensors where they were.

    The skeleton of a bare tensor is always `LEAF`.
    """

    __slots__ = ("_made_as", "leaves", "size", "treedef")

    def __init__(self, treedef: Any, leaves: list[Any], size: int, made_as: Any = None) -> None:
        self.treedef = treedef
        self.leaves = leaves
        self.size = size
        self._made_as = treedef if made_as is None else made_as  # of the same leaves; makes dicts in their own order

    @property
    def is_container(self) -> bool:
        """Whether the tree is more than one leaf or None; an empty list is a container too."""
        return self.treedef.num_nodes > 1 or not (self.leaves or self.treedef == _NONE)

    def fill(self, tensors: Sequence[Any], change: Callable[[Any], Any] = lambda static: static) -> Any:
        """The tree with `tensors`, in flattening order, where its own tensors were; `change` maps every static."""
        if self is LEAF:
            return tensors[0]
        rest = iter(tensors)
        return self._made_as.unflatten([next(rest) if x is _TENSOR else change(x) for x in self.leaves])

    def fill_without_statics(self, tensors: Sequence[Any]) -> Any:
        """The tree with `tensors` where its own tensors were, and None for every static."""
        return self.fill(tensors, lambda _: None)

    def statics(self) -> list[Any]:
        """Everything that is not a tensor, in flattening order."""
        return [leaf for leaf in self.leaves if leaf is not _TENSOR]

    def static_data(self) -> list[Any]:
        """The static data of each container, as the keys of a dict."""
        data: list[Any] = []
        treedefs = [self.treedef]
        while treedefs:
            treedef = treedefs.pop()
            treedefs += treedef.children()
            data += [] if (node := treedef.node_data()) is None else [node[1]]
        return data

    def replace_statics(self, change: Callable[[str, Any], Any]) -> None:
        """Replace each static by `change(path, static)`."""
        for i, (path, leaf) in enumerate(self._paths()):
            if leaf is not _TENSOR:
                self.leaves[i] = change(path, leaf)

    def static_paths(self) -> list[tuple[str, Any]]:
        """Every static with its path, as in `['weights'][0]`."""
        return [(path, leaf) for path, leaf in self._paths() if leaf is not _TENSOR]

    def tensor_paths(self) -> list[str]:
        """The path of each tensor, as in `['weights'][0]`; empty for a bare tensor."""
        return [path for path, leaf in self._paths() if leaf is _TENSOR]

    def tensor_entries(self) -> list[tuple[int, str]]:
        """For a tuple: the index of each tensor's element, and its path in that element, as in `['weights'][0]`."""
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
        ValueError: if such a dict holds tensors, which JAX could not trace.
    """
    try:
        return jax.tree_util.tree_flatten(tree)
    except (TypeError, ValueError):
        leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_is_unsortable)
        for leaf in filter(_is_unsortable, leaves):
            if any(is_tensor(x) for x in flatten(list(leaf.values()))[0]):
                raise ValueError(
                    f"a dict with keys {list(leaf)} holds tensors, but its keys cannot be sorted, as JAX needs of a "
                    "dict of arrays. Use keys of one type."
                ) from None
        return leaves, treedef


def one_level(node: Any) -> tuple[list[Any], Any] | None:
    """The children and the static data of a node; None of a leaf, such as a dict whose keys cannot be sorted."""
    level = None if _is_unsortable(node) else _ONE_LEVEL(node)
    return None if level is None else (list(level[0]), level[1])


def _is_unsortable(node: Any) -> bool:
    if not isinstance(node, dict):
        return False
    try:
        _ONE_LEVEL(node)
    except (TypeError, ValueError):  # of a defaultdict, and of a dict
        return True
    return False


def _flatten_once(node: Any) -> tuple[list[Any], Any]:
    return jax.tree_util.tree_flatten(node, is_leaf=lambda x: x is not node)


def _is_reordered(node: Any) -> bool:
    """Whether a node is a dict of any kind whose keys JAX sorts, so that it makes the dict in another order."""
    if not isinstance(node, dict) or len(node) < 2 or _is_unsortable(node):
        return False
    children, treedef = _flatten_once(node)
    keys = list(treedef.unflatten(children))
    return keys != list(node) and set(keys) == set(node)


@jax.tree_util.register_pytree_node_class
class _InOrder:
    """A dict whose keys JAX sorts, as a node from which JAX makes the dict in its own order.

    JAX sorts the keys also where it makes the dict again; `a, b = d.values()` would then be another pair.
    """

    def __init__(self, keys: tuple[Any, ...], children: list[Any], treedef: Any) -> None:
        self._keys, self._children, self._treedef = keys, children, treedef

    def tree_flatten(self) -> tuple[list[Any], tuple[Any, ...]]:
        return self._children, (self._keys, self._treedef)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], children: Sequence[Any]) -> dict[Any, Any]:
        keys, treedef = aux
        values = treedef.unflatten(children)
        for key in keys:
            values[key] = values.pop(key)
        return values


def _treedef_in_order(tree: Any) -> Any:
    """The treedef that makes dicts in their own order, from the same leaves; None if JAX makes all of them so."""

    def stops(node: Any) -> bool:
        return _is_reordered(node) or _is_unsortable(node)

    def in_order(tree: Any) -> Any:
        def change(node: Any) -> Any:
            if not _is_reordered(node):
                return node
            children, treedef = _flatten_once(node)
            return _InOrder(tuple(node), [in_order(x) for x in children], treedef)

        return jax.tree_util.tree_map(change, tree, is_leaf=stops)

    if not any(map(_is_reordered, jax.tree_util.tree_leaves(tree, is_leaf=stops))):
        return None
    return jax.tree_util.tree_structure(in_order(tree), is_leaf=_is_unsortable)


# Nearly every argument, output and saved tensor is a bare tensor, which needs no flattening.
LEAF: Final = TreeWithoutTensors(jax.tree_util.tree_structure(0), [_TENSOR], 1)


def split(tree: Any, predicate: Callable[[object], bool] = is_tensor) -> tuple[list[Any], TreeWithoutTensors]:
    """The tensors of a pytree (the leaves for which `predicate` holds) in flattening order, and its skeleton."""
    if predicate(tree):
        return [tree], LEAF
    if type(tree) is tuple and all(map(predicate, tree)):
        return list(tree), _tuple_of(len(tree))
    leaves, treedef = flatten(tree)
    tensors: list[Any] = []
    for i, leaf in enumerate(leaves):
        if predicate(leaf):
            tensors.append(leaf)
            leaves[i] = _TENSOR
    has_order = treedef.num_nodes > 2  # only a dict of two or more
    return tensors, TreeWithoutTensors(treedef, leaves, len(tensors), _treedef_in_order(tree) if has_order else None)


@functools.cache
def _tuple_of(count: int) -> TreeWithoutTensors:
    """The skeleton of a tuple of tensors, as most outputs and saved tensors are."""
    return TreeWithoutTensors(jax.tree_util.tree_structure((0,) * count), [_TENSOR] * count, count)


def as_jax(tree: Any) -> Any:
    """The tree with its NumPy arrays and scalars as JAX arrays, as they are under jit."""
    tensors, skeleton = split(tree)
    return skeleton.fill(as_arrays(tensors)) if tensors else tree


def contains(values: Sequence[Any], wanted: object) -> bool:
    """Whether `wanted` itself, not an equal value, is among `values`."""
    return any(value is wanted for value in values)
