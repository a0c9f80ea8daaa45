"""Python objects that travel through JAX inside a treedef."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


@jax.tree_util.register_pytree_node_class
class Static:
    """A pytree without leaves: its treedef carries one Python object through JAX.

    JAX compares and hashes treedefs. The object is compared by identity only, so that it may hold statics that cannot
    be compared or hashed.
    """

    __slots__ = ("_key",)

    def __init__(self, value: Any) -> None:
        self._key = IdentityKey(value)

    @property
    def value(self) -> Any:
        return self._key.value

    def tree_flatten(self) -> tuple[tuple[()], IdentityKey]:
        return (), self._key

    @classmethod
    def tree_unflatten(cls, aux: IdentityKey, _: Sequence[Any]) -> Static:
        static = cls.__new__(cls)
        static._key = aux
        return static


class IdentityKey:
    """Two keys are equal if their objects are one object."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
