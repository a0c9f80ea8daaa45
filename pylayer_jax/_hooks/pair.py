"""A pair of saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .function_keys import function_key
from .host_store import HostStore, host_store_of
from .pack_cache import PackCache
from .recompute import Errors

Hook = Callable[[Any], Any]


class Pair:
    """A pack hook and an unpack hook. Equal pairs are one entry in jit's caches."""

    __slots__ = (
        "__weakref__",
        "_hash",
        "cache",
        "differentiable",
        "errors",
        "host",
        "key",
        "only",
        "pack",
        "store",
        "unpack",
    )

    def __init__(
        self,
        pack: Hook,
        unpack: Hook,
        host: bool,
        differentiable: bool = False,
        only: Hook | None = None,
        errors: Errors = Errors(),  # noqa: B008 - immutable
    ) -> None:
        self.pack = pack
        self.unpack = unpack
        self.host = host
        self.differentiable = differentiable  # whether pack, then unpack, has the derivative of the identity
        self.only = only  # a predicate: tensors for which it is False are not packed
        self.errors = errors
        self.key = self._present_key()
        self._hash = hash(self.key)
        self.store: HostStore = host_store_of(self.key)
        self.cache = PackCache()

    def _present_key(self) -> Any:
        functions = (self.pack, self.unpack, *(() if self.only is None else (self.only,)))
        return *map(function_key, functions), self.host, self.differentiable, self.errors

    def globals_changed(self) -> bool:
        """Whether a variable that a hook reads was bound anew."""
        return self.key != self._present_key()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash
