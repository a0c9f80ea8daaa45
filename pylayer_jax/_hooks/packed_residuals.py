"""The residuals of one layer or operation, packed: each distinct tensor once, unless it follows from others."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pylayer_jax._jax.identity_primitives import barrier
from pylayer_jax._jax.run_log import is_run_number
from pylayer_jax._jax.tracers import is_staged, is_staging, is_tracer
from pylayer_jax._jax.types import is_key, is_ref, typeof

from .derived_residuals import Expression, Origins
from .open_blocks import Hooks, hooks_suspended, outside_hooks_trace
from .pack_cache import PackCache
from .packing import PackedTensor, pack_tensor


class DerivedTensor:
    """A tensor that is not packed, since it follows from others that are. Holds no array."""

    __slots__ = ("__weakref__", "_expression", "roots")

    def __init__(self, expression: Expression, roots: Sequence[tuple[Kept, slice]]) -> None:
        self._expression = expression
        self.roots = roots  # what is kept for each root, and where its arrays are

    def evaluate(self, roots: Sequence[Any]) -> Any:
        with hooks_suspended(), outside_hooks_trace():
            return self._expression.evaluate(roots)

    def reference(self) -> Callable[[], DerivedTensor | None]:
        """A function that finds the tensor again, as long as everything that it follows from is there."""
        expression = self._expression
        roots = [(None if kept is None else _reference(kept), at) for kept, at in self.roots]

        def found() -> DerivedTensor | None:
            present = [(None if find is None else find(), at) for find, at in roots]
            is_gone = any(
                find is not None and kept is None for (find, _), (kept, _) in zip(roots, present, strict=True)
            )
            return None if is_gone else DerivedTensor(expression, present)

        return found


def _reference(kept: PackedTensor | DerivedTensor) -> Callable[[], Any]:
    # A packed tensor may hold objects on the host, or files, which go with the function that `jax.vjp` returned.
    return weakref.ref(kept) if isinstance(kept, PackedTensor) else kept.reference()


Kept = PackedTensor | DerivedTensor | None  # None: the tensor itself


class PackedResiduals:
    """A list of packed tensors, without their arrays."""

    __slots__ = ("entries", "size", "tensors")

    def __init__(self) -> None:
        self.entries: list[tuple[Kept, slice]] = []  # what is kept, and where its arrays are
        self.tensors: list[int] = []  # the index of each tensor's entry
        self.size = 0  # the number of arrays

    def add(self, packed: Kept, arrays: int) -> None:
        self.entries.append((packed, slice(self.size, self.size + arrays)))
        self.size += arrays

    @property
    def owners(self) -> list[int]:
        """The index of the tensor that each array was packed from; of the first one if there are several."""
        return [self.tensors.index(i) for i, (_, at) in enumerate(self.entries) for _ in range(at.start, at.stop)]

    def unpack(self, arrays: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The tensors, by the unpack hook. The cotangents, of which some may be None, say when `backward` begins."""
        wait_for = [c for c in cotangents if c is not None][:1]
        found: dict[tuple[int, ...], Any] = {}
        values = [_unpacked(packed, arrays[at], wait_for, found) for packed, at in self.entries]
        return [values[i] for i in self.tensors]


def _unpacked(packed: Kept, arrays: Sequence[Any], wait_for: list[Any], found: dict[tuple[int, ...], Any]) -> Any:
    """One tensor; `found` has those that were unpacked before, since several may follow from one."""
    key = (id(packed), *map(id, arrays))
    if key not in found:
        if packed is None:
            found[key] = arrays[0]
        elif isinstance(packed, DerivedTensor):
            found[key] = packed.evaluate([_unpacked(root, arrays[at], wait_for, found) for root, at in packed.roots])
        else:
            found[key] = packed.unpack(arrays, wait_for)
    return found[key]


class UnpackOnRead(Sequence[Any]):
    """Residuals of which the first are packed. They are unpacked when one of them is asked for."""

    def __init__(self, packed: PackedResiduals, arrays: Sequence[Any], cotangents: Sequence[Any]) -> None:
        self._unpack = functools.cache(lambda: packed.unpack(arrays[: packed.size], cotangents))
        self._rest = arrays[packed.size :]
        self._count = len(packed.tensors)

    def __len__(self) -> int:
        return self._count + len(self._rest)

    def __getitem__(self, index: Any) -> Any:
        return self._unpack()[index] if index < self._count else self._rest[index - self._count]


def pack(
    hooks: Hooks,
    tensors: Sequence[Any],
    outputs: Sequence[Any],
    owner: str,
    origins: Origins | None = None,
    constants: Sequence[Any] = (),
) -> tuple[PackedResiduals, list[Any], list[Any]]:
    """Pack the tensors that a layer or an operation keeps.

    Args:
        hooks: the hooks of the layer or operation.
        tensors: what it keeps.
        outputs: what it returns.
        owner: its name and the kind of the tensors, for messages.
        origins: what made these values, as far as it was recorded.
        constants: tracers that stand for constants of the program.

    Returns:
        The packed tensors, the arrays that JAX keeps for them, and the outputs, bound to the packing.
    """
    packing = _Packing(hooks, owner, {} if origins is None else origins, constants)
    entries = [packing.entry(tensor, i) for i, tensor in enumerate(tensors)]
    bound = packing.bind(outputs)
    distinct = list(dict.fromkeys(entries))
    residuals, kept = PackedResiduals(), list[Any]()
    for entry in distinct:
        residuals.add(entry.packed, len(entry.kept))
        kept += entry.kept
    residuals.tensors = [distinct.index(entry) for entry in entries]
    return residuals, kept, bound


class _Entry:
    """One tensor among those that a layer or an operation keeps."""

    __slots__ = ("arrays", "packed", "roots", "tensor")

    def __init__(self, tensor: Any, packed: Kept, arrays: list[Any], roots: Sequence[_Entry] = ()) -> None:
        self.tensor = tensor
        self.packed = packed
        self.arrays = arrays
        self.roots = roots  # what it follows from

    @property
    def kept(self) -> list[Any]:
        """The arrays that JAX has to keep."""
        if self.roots:
            return [x for root in self.roots for x in root.kept]
        keeps_original = isinstance(self.packed, PackedTensor) and self.packed.keeps_original
        return [self.tensor, *self.arrays] if keeps_original else self.arrays

    def put(self, cache: PackCache, tensor: Any) -> None:
        if self.packed is not None:
            arrays = self.kept if isinstance(self.packed, DerivedTensor) else self.arrays
            cache.put(tensor, _reference(self.packed), arrays)


class _Packing:
    """Packs the tensors of one layer or operation, each distinct one once."""

    def __init__(self, hooks: Hooks, owner: str, origins: Origins, constants: Sequence[Any]) -> None:
        self._hooks = hooks
        self._cache = hooks.pair.cache
        self._owner = owner
        self._origins = origins
        self._entries: dict[int, _Entry] = {}  # by the identity of the tensor
        self._new: list[_Entry] = []  # of tensors that were packed here
        self._constants = constants
        self._is_staging = is_staging(include_outer=True)

    def entry(self, tensor: Any, index: int) -> _Entry:
        """The entry of a tensor, which is packed if it does not follow from others that are no larger."""
        entry = self._known(tensor)
        if entry is None and self._is_left_out(tensor):
            entry = _Entry(tensor, None, [tensor])
        if entry is None:
            entry = self._derived(tensor, index)
        if entry is None:
            entry = _Entry(tensor, *pack_tensor(self._hooks, tensor, f"{self._owner} {index}"))
            self._new.append(entry)
        self._entries[id(tensor)] = entry
        return entry

    def _is_left_out(self, tensor: Any) -> bool:
        # A hook could hardly read a PRNG key, and what it made of a Ref would be no Ref.
        if is_ref(tensor) or is_key(tensor) or is_run_number(tensor):
            return True
        # A program holds its constants anyway, and XLA would run the hooks on them while it compiles, for seconds.
        is_constant = self._is_staging and not is_tracer(tensor)
        return is_constant or any(tensor is x for x in self._constants)

    def _known(self, tensor: Any) -> _Entry | None:
        if id(tensor) not in self._entries and (cached := self._cache.get(tensor)) is not None:
            self._entries[id(tensor)] = _Entry(tensor, *cached)
        return self._entries.get(id(tensor))

    def _is_known(self, tensor: Any) -> bool:
        return self._known(tensor) is not None

    def _derived(self, tensor: Any, index: int | None = None) -> _Entry | None:
        """The entry of a tensor that follows from known ones; with an index, also from others that are no larger."""
        expression, roots = Expression.of(tensor, self._origins, self._is_known, self._hooks.pair.errors)
        missing = [root for root in roots if not self._is_known(root)]
        if not expression.steps or (missing and index is None):
            return None
        if _may_be_larger(sum(_bytes(root) for root in missing if typeof(root).ndim), _bytes(tensor)):
            return None
        entries = [self.entry(root, index or 0) for root in roots]
        ends = list(itertools.accumulate((len(entry.kept) for entry in entries), initial=0))
        slices = itertools.starmap(slice, itertools.pairwise(ends))
        packed = DerivedTensor(expression, list(zip((entry.packed for entry in entries), slices, strict=True)))
        return _Entry(tensor, packed, [], entries)

    def bind(self, outputs: Sequence[Any]) -> list[Any]:
        """Enter the packed tensors, and outputs that follow from them, into the cache; under jit, bind them."""
        # Otherwise XLA may see unpack(pack(x)) as a whole and keep x (two casts, for example, cancel out there), or
        # pack so late that all tensors live until then.
        new = [entry for entry in self._new if isinstance(entry.packed, PackedTensor)]
        staged = [x for entry in new for x in entry.arrays if is_staged(x)]
        bound = list(outputs)
        if staged:
            values = barrier([*outputs, *staged])
            bound = values[: len(bound)]
            renamed = {id(x): y for x, y in zip(staged, values[len(bound) :], strict=True)}
            for entry in new:
                entry.arrays[:] = [renamed.get(id(x), x) for x in entry.arrays]
        for entry in self._new:
            entry.put(self._cache, entry.tensor)
        for old, output in zip(outputs, bound, strict=True):
            entry = self._entries.get(id(old)) or self._derived(old)
            if entry is not None and self._cache.get(output) is None:
                entry.put(self._cache, output)
        return bound


def _may_be_larger(size: Any, other: Any) -> bool:
    try:
        return size > other
    except jax.errors.InconclusiveDimensionOperation:  # symbols of `jax.export`
        return True


def _bytes(tensor: Any) -> int:
    aval = typeof(tensor)
    return aval.size * aval.dtype.itemsize
