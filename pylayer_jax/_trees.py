"""Splits a pytree into a list of tensors and a skeleton, which can rebuild the pytree.

    >>> tensors, skeleton = split({"w": jnp.ones(3), "act": jnp.tanh, "n": 2})
    >>> len(tensors), skeleton.size
    (1, 1)
    >>> skeleton.fill([jnp.zeros(3)])
    {'w': Array([0., 0., 0.], dtype=float32), 'act': <...tanh...>, 'n': 2}

A tensor is a leaf for which `is_tensor` in `_jax/types.py` is True. The other leaves are *statics*, which the skeleton
stores unchanged, and never compares or hashes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import jax

from ._jax.types import is_tensor, unboxed


def contains(values: Sequence[Any], wanted: object) -> bool:
    """Return whether the object `wanted` is among `values`, compared by identity."""
    return any(value is wanted for value in values)


@dataclasses.dataclass(eq=False)
class Skeleton:
    """A pytree without its tensors. If the whole pytree is one tensor, its skeleton is the object `LEAF`.

    A dict within it is a skeleton of its own, with a `_DictNode` in place of a treedef: JAX sorts the keys of a dict,
    and refuses keys that cannot be sorted.
    """

    node: Any  # a treedef or a `_DictNode`
    leaves: list[Any]  # skeletons of tensors and dicts, and statics
    # The path to each leaf, from the tree itself. `treedef.unflatten` of placeholders would call user code, which may
    # accept arrays only. tests: contract/test_strict_pytrees.py
    leaf_paths: Sequence[Any]
    size: int  # the number of tensors

    def fill(self, tensors: Iterable[Any], change: Callable[[Any], Any] = lambda static: static) -> Any:
        """Rebuild the tree from `tensors`, in flattening order, and from `change(static)` for each static."""
        rest = iter(tensors)
        if self is LEAF:
            return next(rest)
        return self.node.unflatten(
            [
                next(rest) if x is LEAF else x.fill(rest, change) if type(x) is Skeleton else change(x)
                for x in self.leaves
            ]
        )

    def without_statics(self, tensors: Sequence[Any]) -> Any:
        try:
            return self.fill(tensors, lambda _: None)
        except Exception:  # a class may accept arrays only; of equal batch axes or None, one stands for the whole tree
            if any(is_tensor(x) or x != tensors[0] for x in tensors):
                raise
            return tensors[0]

    def parts(self) -> tuple[list[Any], list[Any]]:
        """Return the nodes and the leaves, which identify the skeleton; a placeholder stands for each tensor."""
        node, leaves = self.node, list[Any]()
        nodes = [(type(node.like), node.keys) if type(node) is _DictNode else node]
        for leaf in self.leaves:
            leaves.append(leaf if leaf is LEAF or type(leaf) is not Skeleton else Skeleton)
            if leaves[-1] is Skeleton:  # [x, {"a": y}] has other parts than [{"a": x}, y]
                more_nodes, more_leaves = leaf.parts()
                nodes += more_nodes
                leaves += more_leaves
        return nodes, leaves

    def statics(self) -> list[Any]:
        return [x for x in self.parts()[1] if x is not LEAF and x is not Skeleton]

    def tensor_paths(self) -> list[str]:
        """Return the path of each tensor, as in `['weights'][0]`; the path of a bare tensor is empty."""
        return [path for path, leaf in self.paths() if leaf is LEAF]

    def paths(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for path, leaf in zip(self.leaf_paths, self.leaves, strict=True):
            is_inner = type(leaf) is Skeleton and leaf is not LEAF
            inner = leaf.paths() if is_inner else [("", leaf)]
            found += [(jax.tree_util.keystr(path) + rest, x) for rest, x in inner]
        return found

    def flatten_up_to(self, tree: Any) -> list[Any]:
        """Return the values in `tree` at the positions of the tensors, or raise a ValueError for another structure.

        `tree` may be None, or a bare array for a container of one array, such as `flax.nnx.Param`.
        """
        if tree is None:
            return [None] * self.size
        node = self.node.node_data()
        if node is not None and hasattr(node[0], "__jax_array__") and is_tensor(unboxed(tree)):
            return [tree]
        found: list[Any] = []
        for leaf, value in zip(self.leaves, self.node.flatten_up_to(tree), strict=True):
            if type(leaf) is Skeleton:
                found += [value] if leaf is LEAF else leaf.flatten_up_to(value)
        return found


class _DictNode(NamedTuple):
    """The node of a dict, with the methods of a treedef. The keys keep their order, and need not be sortable."""

    like: Any  # an empty dict or defaultdict, as a template
    keys: tuple[Any, ...]
    needed: tuple[Any, ...]  # the keys of values that hold a tensor

    def unflatten(self, values: Sequence[Any]) -> Any:
        filled = self.like.copy()
        filled.update(zip(self.keys, values, strict=True))
        return filled

    def node_data(self) -> None:
        return None

    def flatten_up_to(self, tree: Any) -> list[Any]:
        if not isinstance(tree, dict) or not set(self.needed) <= tree.keys() <= set(self.keys):
            got = list(tree) if isinstance(tree, dict) else f"a {type(tree).__name__}"
            raise ValueError(f"Expected a dict with the keys {list(self.needed)}, got {got}.")
        return [tree.get(key) for key in self.keys]


LEAF: Final = Skeleton(jax.tree_util.tree_structure(0), [], [()], 1)
LEAF.leaves.append(LEAF)


@functools.cache
def _tuple_of(count: int) -> Skeleton:
    paths = [(jax.tree_util.SequenceKey(i),) for i in range(count)]
    return Skeleton(jax.tree_util.tree_structure((0,) * count), [LEAF] * count, paths, count)


_DICTS: Final = (dict, collections.defaultdict, collections.OrderedDict)  # for JAX, other subclasses are leaves


def split(tree: Any, predicate: Callable[[object], bool] = is_tensor) -> tuple[list[Any], Skeleton]:
    """Split a pytree into its tensors, the leaves for which `predicate` is True, and the rest."""
    if type(tree) is not tuple:
        if predicate(tree):
            return [tree], LEAF
    elif all(map(predicate, tree)):
        return list(tree), _tuple_of(len(tree))
    tensors: list[Any] = []
    return tensors, _skeleton(tree, predicate, tensors)


def _skeleton(tree: Any, predicate: Callable[[object], bool], tensors: list[Any]) -> Skeleton:
    """Return the `Skeleton` of a tree, and append its tensors to `tensors`."""
    before = len(tensors)
    if type(tree) in _DICTS:
        like = tree.copy()
        like.clear()
        leaves = [_skeleton(x, predicate, tensors) for x in tree.values()]
        node = _DictNode(like, tuple(tree), tuple([key for key, x in zip(tree, leaves, strict=True) if x.size]))
        paths = [(jax.tree_util.DictKey(key),) for key in tree]
    elif predicate(tree):
        tensors.append(tree)
        return LEAF
    else:
        pairs, node = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: type(node) in _DICTS)
        paths, leaves = [path for path, _ in pairs], [leaf for _, leaf in pairs]
        for i, leaf in enumerate(leaves):
            if predicate(leaf):
                tensors.append(leaf)
                leaves[i] = LEAF
            elif type(leaf) in _DICTS:
                leaves[i] = _skeleton(leaf, predicate, tensors)
    return Skeleton(node, leaves, paths, len(tensors) - before)


def has_changed(before: tuple[list[Any], Skeleton], after: tuple[list[Any], Skeleton]) -> bool:
    """Return whether two results of `split` differ in leaves, compared by identity, or in nodes."""
    nodes, leaves = before[1].parts()
    new_nodes, new_leaves = after[1].parts()
    pairs = zip([*before[0], *leaves], [*after[0], *new_leaves], strict=False)
    if len(leaves) != len(new_leaves) or any(x is not y for x, y in pairs):
        return True
    with contextlib.suppress(Exception):  # static data that cannot be compared counts as equal
        return nodes != new_nodes
    return False


def hashable_or_none(key: Any) -> Any:
    try:
        hash(key)
    except TypeError:
        return None
    return key


class WeakTable:
    """A table whose keys are objects. It compares them by identity, and keeps none alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Callable[[], Any], Any]] = {}

    def get(self, key: Any, default: Any = None) -> Any:
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else default

    def put(self, key: Any, value: Any) -> None:
        number, entries = id(key), self._entries
        try:
            entries[number] = weakref.ref(key, lambda _: entries.pop(number, None)), value
        except TypeError:  # JAX may pass a Python or NumPy number, to which no weak reference can be made
            return

    def drop(self, key: Any) -> None:
        self._entries.pop(id(key), None)

    def __len__(self) -> int:
        return len(self._entries)
