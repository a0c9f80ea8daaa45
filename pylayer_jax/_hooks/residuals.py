"""Packing of all residuals of a layer or an operation, except those that are recomputed or stay unpacked.

    packed, arrays, outputs = Packing(pair, "Tanh, saved tensor", ...).pack([y, 2 * y, w], [y])

JAX keeps `arrays` instead of the tensors, each array once. `packed` restores each tensor from these arrays.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pylayer_jax._jax.identities import barrier
from pylayer_jax._jax.imports import set_current_trace
from pylayer_jax._jax.tracers import (
    current_trace,
    is_staged,
    is_staging,
    is_tracer,
    is_unknown,
    trace_below,
    trace_of_primals,
)
from pylayer_jax._jax.types import as_arrays, is_key, is_ref

from .active import SUSPENDED, active, hooks_suspended
from .derive import Computed, Origin, Residual, Root, fold, follow, is_larger, is_number, with_roots
from .pack_array import pack_tensor
from .pair import Pair, TensorInfo, reference


class _WeakResidual:
    """A weak copy of a residual, for the table of a pair. It keeps no array and no result of a hook alive."""

    def __init__(self, residual: Residual) -> None:
        self._trace = weakref.ref(current_trace())  # a tracer is valid only in the trace in which it was made
        self._residual = with_roots(
            residual, lambda root: Root(list(map(reference, root.arrays)), root.packed and weakref.ref(root.packed))
        )

    def get(self) -> Residual | None:
        if self._trace() is not current_trace():
            return None
        is_alive: list[bool] = []

        def strong(weak: Root) -> Root:
            root = Root([array() for array in weak.arrays], weak.packed and weak.packed())
            is_alive.append(
                not any(x is None for x in root.arrays) and (weak.packed is None or root.packed is not None)
            )
            return root

        residual = with_roots(self._residual, strong)
        return residual if all(is_alive) else None


class PackedResiduals:
    """A recipe that restores each tensor of a layer or operation from the arrays that JAX keeps. It holds no array."""

    def __init__(self, tensors: Sequence[Residual], owners: Sequence[int]) -> None:
        self.tensors = tensors  # the roots of these tensors have indices of arrays in place of arrays
        self.owners = owners  # for each array, the index of the (first) tensor from which it was packed
        self.n_arrays = len(owners)

    @staticmethod
    def of(residuals: Sequence[Residual]) -> tuple[PackedResiduals, list[Any]]:
        """Return the recipe that restores the tensors, and the distinct arrays that JAX has to keep."""
        arrays: list[Any] = []
        owners: list[int] = []
        tensors: list[Residual] = []
        numbers: dict[int, int] = {}
        roots: dict[tuple[int, ...], Root] = {}

        def numbered(root: Root) -> Root:
            for x in root.arrays:
                if id(x) not in numbers:
                    numbers[id(x)] = len(arrays)
                    arrays.append(x)
                    owners.append(len(tensors))
            own = [numbers[id(x)] for x in root.arrays]
            return roots.setdefault((id(root.packed), *own), Root(own, root.packed))

        for residual in residuals:
            tensors.append(with_roots(residual, numbered))  # noqa: PERF401 - `numbered` reads the length
        return PackedResiduals(tensors, owners), arrays

    def unpack(self, arrays: Sequence[Any], cotangents: Sequence[Any]) -> UnpackedTensors:
        """Return the tensors, each unpacked when it is first read. In staged code XLA waits for the cotangents."""
        return UnpackedTensors(self.tensors, arrays, cotangents)


class UnpackedTensors(Sequence[Any]):
    """A sequence of the tensors of a layer or an operation. Each tensor is unpacked when it is first read."""

    def __init__(self, tensors: Sequence[Residual], arrays: Sequence[Any], cotangents: Sequence[Any]) -> None:
        self._tensors, self._arrays = tensors, arrays
        self.cotangents = list(cotangents)  # the barriers replace these cotangents
        self._done: dict[int, Any] = {}  # id of a residual -> its tensor

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        residual = self._tensors[index]
        if isinstance(residual, Root) and residual.packed is None:
            return self._arrays[residual.arrays[0]]  # a tensor that is not packed needs no barrier
        with set_current_trace(trace_below(current_trace())), hooks_suspended():
            return fold(residual, self._unpacked, Computed.evaluate, self._done)

    def _unpacked(self, root: Root) -> Any:
        arrays = self._waiting([self._arrays[i] for i in root.arrays])
        return arrays[0] if root.packed is None else root.packed.unpack(as_arrays(arrays))  # JAX may pass numbers

    def _waiting(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Return the arrays behind a barrier, so that XLA does not read them before it has the cotangents.

        Without the barrier, XLA may unpack a tensor right after packing, and hold all tensors until backward begins.
        XLA waits only if backward uses the cotangents that the barrier returns.
        """
        present = [i for i, c in enumerate(self.cotangents) if c is not None]
        if not present or not any(map(is_staged, arrays)):
            return arrays
        values = barrier([*arrays, *(self.cotangents[i] for i in present)])
        for i, cotangent in zip(present, values[len(arrays) :], strict=True):
            self.cotangents[i] = cotangent
        return values[: len(arrays)]


def keeps_residuals(tangents: Sequence[Any]) -> bool:
    """Return whether a rule with these tangents (None means zero) keeps residuals. Eager forward mode keeps none."""
    return any(is_unknown(t) or is_staged(t) for t in tangents)


@dataclasses.dataclass
class Packing:
    """A packer of the tensors that one layer or operation keeps. Each distinct tensor is packed once."""

    pair: Pair  # the pair of the block in which the layer or operation was applied
    owner: str  # the name of the owner and the kind of the tensors, for messages: "Tanh, saved tensor"
    info: Callable[[int], TensorInfo]  # index of a tensor -> its origin, for `only`
    operands: Sequence[Any]  # the operands of the layer or operation
    known: Sequence[tuple[Any, Residual]]  # the tensors that are not packed, with their residuals
    origins: dict[int, Origin]  # id of a value -> the equation that made the value, if it was recorded

    def pack(self, tensors: Sequence[Any], outputs: Sequence[Any]) -> tuple[PackedResiduals, list[Any], list[Any]]:
        """Pack the tensors. Return the recipe that restores them, the arrays that JAX has to keep, and the outputs."""
        with set_current_trace(trace_below(trace_of_primals([*tensors, *outputs]))):
            if active.value is SUSPENDED:  # an enclosing operation packs the residuals
                return *PackedResiduals.of([Root([x]) for x in tensors]), list(outputs)
            # The keys of these tables are ids of tensors. The tensors are held, so that no other object gets these ids.
            self._found: dict[int, tuple[Any, Residual]] = {}
            self._unknown: dict[int, Any] = {}
            self._unpacked = {id(tensor): residual for tensor, residual in self.known}
            self._new: list[Root] = []  # the roots that this call has packed
            self._is_staging = is_staging()
            with hooks_suspended():
                residuals = [self._residual(x, i) for i, x in enumerate(tensors)]
                outputs = self._bind(outputs)
            return *PackedResiduals.of(residuals), list(outputs)

    def _residual(self, tensor: Any, index: int) -> Residual:
        """Return the residual of a tensor. Pack the tensor, unless it follows from other tensors that are no larger."""
        found = self._known(tensor) or self._derived(tensor, index)
        if found is None:
            (array,) = as_arrays([tensor])  # jax.grad(f)(2.0) passes a number that is no array
            found = pack_tensor(self.pair, array, f"{self.owner} {index}", self.info(index))
            if found.packed is not None:
                self._new.append(found)
        self._found[id(tensor)] = tensor, found
        return found

    def _known(self, tensor: Any) -> Residual | None:
        if id(tensor) in self._found:
            return self._found[id(tensor)][1]
        if id(tensor) in self._unknown:
            return None
        weak = self.pair.residuals.get(tensor)
        found = None if weak is None else weak.get()
        if found is None:
            found = self._unpacked.get(id(tensor))
        if found is None and self._stays(tensor):
            found = Root([tensor])
        if found is None:
            self._unknown[id(tensor)] = tensor
        else:
            self._found[id(tensor)] = tensor, found
        return found

    def _stays(self, tensor: Any) -> bool:
        # A hook can hardly read a PRNG key, and cannot restore a Ref. A program holds its constants anyway, and XLA
        # would run the hooks on constants while it compiles, for seconds.
        return is_ref(tensor) or is_key(tensor) or 0 in np.shape(tensor) or (self._is_staging and not is_tracer(tensor))

    def _derived(self, tensor: Any, index: int | None = None) -> Residual | None:
        """Return the residual of a tensor that follows from known tensors or, if `index` is given, from any tensors."""
        is_known = lambda x: self._known(x) is not None  # noqa: E731
        packed = {id(x) for x in (tensor, *self.operands)} - self._unpacked.keys()
        is_constant = lambda x: id(x) not in packed and is_number(x)  # noqa: E731
        roots: list[Any] = []
        made: list[Origin] = []
        follow(tensor, self.origins, is_known, is_constant, self.pair.keeps, roots, made)
        missing = [root for root in roots if self._known(root) is None]
        if not made or (missing and (index is None or is_larger(missing, tensor))):
            return None
        residuals: dict[int, Residual] = {id(root): self._residual(root, index or 0) for root in roots}
        for primitive, params, inputs, value in made:
            residuals[id(value)] = Computed(primitive, params, [residuals.get(id(x), x) for x in inputs])
        return residuals[id(tensor)]

    def _bind(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the outputs. In staged code, a barrier around the outputs makes XLA pack before it uses the outputs.

        Without the barrier, XLA may simplify unpack(pack(x)) to x and keep x (two casts cancel out), or pack late. The
        pair remembers packed tensors, and outputs that follow from them, for other operations that keep the same
        tensors.
        """
        bound = list(outputs)
        if any(map(is_staged, [x for root in self._new for x in root.arrays])):
            values = iter(barrier([*outputs, *(x for root in self._new for x in root.arrays)]))
            bound = [next(values) for _ in outputs]
            for root in self._new:
                root.arrays[:] = [next(values) for _ in root.arrays]
        for old, new in zip(outputs, bound, strict=True):
            found = self._found.get(id(old))
            residual = self._derived(old) if found is None else found[1]
            if residual is not None:
                self._found[id(new)] = new, residual
        for tensor, residual in self._found.values():
            if not isinstance(residual, Root) or residual.packed is not None:
                self.pair.residuals.put(tensor, _WeakResidual(residual))
        return bound


class PairOfLayer(NamedTuple):
    """The pair that was active where a layer was applied, with a mask of the layer's arguments that are not packed."""

    pair: Pair
    stays: Sequence[bool]

    def packing(self, owner: str, layer: str, names: Sequence[str], inputs: Sequence[Any]) -> Packing:
        """Return the `Packing` of the tensors that the layer saved; `names` is empty if the tensors have no names."""
        known = [(x, Root([x])) for x, stays in zip(inputs, self.stays, strict=False) if stays]
        return Packing(
            self.pair, owner, lambda i: TensorInfo(layer=layer, name=names[i] if names else ""), inputs, known, {}
        )
