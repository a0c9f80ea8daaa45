"""Pytrees: arguments, outputs and saved values of any structure.

- `partition`: tensors and statics, separated.
- `static`: Python objects that travel in a treedef.
- `changes`: whether a container was changed in place.
- `messages`: how error messages show values.
- `matching`: a pytree that a user returned, laid along another.
- `closures`: traced values hidden inside functions and objects.

This file hands their names on, so that the wings above import from `pylayer_jax._trees`.
"""

from .changes import Watched
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
from .partition import LEAF, Skeleton, as_jax, contains, flatten, is_box, is_tensor, split, unboxed
from .static import IdentityKey, Static

__all__ = [
    "LEAF",
    "NO_ATTRIBUTES",
    "IdentityKey",
    "Place",
    "Skeleton",
    "Static",
    "Watched",
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
