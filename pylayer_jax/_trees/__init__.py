"""Pytrees: arguments, outputs and saved values of any structure.

- `partition`: tensors and statics, separated.
- `opaque`: Python objects that travel in a treedef.
- `changes`: whether a container was changed in place.
- `messages`: how error messages show values.
- `matching`: a pytree that a user returned, laid along another.
- `closures`: traced values hidden inside functions and objects.

This file hands their names on, so that the subpackages above import from `pylayer_jax._trees`.
"""

from .changes import MutationCheck
from .closures import (
    Place,
    content,
    filled,
    hidden,
    hiding_functions,
    is_live,
    is_live_constant,
    is_made_here,
    traced_names,
    vacate,
    values_in_reach,
)
from .matching import collect_like
from .messages import NO_ATTRIBUTES, add_note, describe, innermost, name_meant, plural, source_of
from .opaque import IdentityKey, Static
from .partition import LEAF, TreeWithoutTensors, as_jax, contains, flatten, is_box, is_tensor, split, unboxed

__all__ = [
    "LEAF",
    "NO_ATTRIBUTES",
    "IdentityKey",
    "MutationCheck",
    "Place",
    "Static",
    "TreeWithoutTensors",
    "add_note",
    "as_jax",
    "collect_like",
    "contains",
    "content",
    "describe",
    "filled",
    "flatten",
    "hidden",
    "hiding_functions",
    "innermost",
    "is_box",
    "is_live",
    "is_live_constant",
    "is_made_here",
    "is_tensor",
    "name_meant",
    "plural",
    "source_of",
    "split",
    "traced_names",
    "unboxed",
    "vacate",
    "values_in_reach",
]
