"""A pytree that a user returned, laid along the pytree that it has to match."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from .messages import describe, plural
from .partition import TreeWithoutTensors, is_box, is_tensor, one_level, unboxed


class _NumberedLeaf:
    """Stands for the i-th tensor of a pytree."""

    def __init__(self, index: int) -> None:
        self.index = index


def collect_like(entry: Any, skeleton: TreeWithoutTensors, where: str) -> list[Any]:
    """The leaves of `entry`, one per tensor of `skeleton`; None in `entry` is None for a whole subtree.

    Raises:
        ValueError: if the structures differ; it begins with `where`.
    """
    model = skeleton.fill([_NumberedLeaf(i) for i in range(skeleton.size)])
    leaves: list[Any] = [None] * skeleton.size
    for index, leaf in _numbered_leaves(entry, model, "", where):
        leaves[index] = leaf
    return leaves


def _numbered_leaves(entry: Any, model: Any, path: str, where: str) -> Iterator[tuple[int, Any]]:
    # Written out because jax.tree.broadcast would spread an array over a whole dict, and flatten_up_to
    # refuses a None that stands for a subtree.
    if isinstance(model, _NumberedLeaf):
        yield model.index, entry
        return
    level = one_level(model)
    if entry is None or level is None:  # None is zero for the whole subtree; a static has no gradient
        return
    children, aux = level
    if len(children) == 1 and is_box(model) and (is_tensor(entry) or is_box(entry)):
        yield from _numbered_leaves(unboxed(entry), children[0], path, where)
        return
    other = one_level(entry)
    kinds = {type(model), type(entry)}
    at = f" at {path}" if path else ""
    if other is not None and other[1] != aux and type(entry) is type(model) and not isinstance(model, dict):
        kind = type(model).__name__
        raise ValueError(
            f"{where}: expected a {kind}{at} with the static data of the argument, {_short(aux)}, or None; got a "
            f"{kind} with {_short(other[1])}. Build the gradient from the argument, so that only its arrays differ."
        )
    if type(entry) is type(model) and isinstance(model, dict) and set(entry) != set(model):
        missing, unknown = [k for k in model if k not in entry], [k for k in entry if k not in model]
        got = [f"without {', '.join(map(repr, missing))}"] * bool(missing)
        got += [f"with {', '.join(map(repr, unknown))}, which the argument does not have"] * bool(unknown)
        raise ValueError(
            f"{where}: expected a {type(model).__name__}{at} with the keys of the argument, "
            f"{', '.join(map(repr, model))}; got one {' and '.join(got)}. Return None under a key whose gradient is "
            "zero."
        )
    if other is None or other[1] != aux or (len(kinds) > 1 and not kinds <= {list, tuple}):
        raise ValueError(
            f"{where}: expected the structure of the argument, {_structure(model)}{at}, or None; got {describe(entry)}."
        )
    others = other[0]
    if len(others) != len(children):
        raise ValueError(f"{where}: expected {plural(len(children), 'entry', 'entries')}{at}, got {len(others)}.")
    keys = sorted(model) if type(model) is dict else range(len(children))
    for key, child, part in zip(keys, children, others, strict=True):
        yield from _numbered_leaves(part, child, f"{path}[{key!r}]", where)


def _structure(node: Any) -> str:
    # Not the repr: many nodes have none without their arrays, such as a sparse matrix.
    if isinstance(node, _NumberedLeaf):
        return "*"
    if one_level(node) is None:
        return repr(node)
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    parts = [_name(path[0]) + _structure(child) for path, child in children]
    if type(node) is tuple:
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    brackets = {dict: "{}", list: "[]"}.get(type(node), "()")
    name = "" if type(node) in (dict, list) else type(node).__name__
    return name + brackets[0] + ", ".join(parts) + brackets[1]


def _name(key: Any) -> str:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return f"{key.name}="
    return f"{key.key!r}: " if isinstance(key, jax.tree_util.DictKey) else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
