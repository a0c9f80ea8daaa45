"""Whether a container was changed in place."""

from __future__ import annotations

from typing import Any

from .partition import TreeWithoutTensors, flatten


class MutationCheck:
    """A pytree and what it held; `change` tells where it holds something else now.

    Leaves are compared by identity, so that nothing of an array is read.
    """

    __slots__ = ("_leaves", "_tree", "_treedef")

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._leaves, self._treedef = flatten(tree)

    def change(self) -> str | None:
        """The path of the first change, as in `['w']`; None if nothing changed."""
        try:
            leaves, treedef = flatten(self._tree)
        except Exception:
            return None  # used up: an `equinox.nn.State` may not be read after another state was made from it
        if self._is_same(leaves, treedef):
            return None
        before = dict(TreeWithoutTensors(self._treedef, self._leaves, 0).static_paths())
        after = dict(TreeWithoutTensors(treedef, leaves, 0).static_paths())
        missing = object()
        for path in {**before, **after}:
            if before.get(path, missing) is not after.get(path, missing):
                return path
        return ""  # static data of a node

    def _is_same(self, leaves: list[Any], treedef: Any) -> bool:
        if len(leaves) != len(self._leaves) or any(a is not b for a, b in zip(leaves, self._leaves, strict=True)):
            return False
        try:
            return bool(treedef == self._treedef)
        except Exception:
            return True
