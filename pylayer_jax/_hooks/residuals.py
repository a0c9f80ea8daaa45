"""All residuals of a layer or an operation: packed, computed again from others, or left as they are.

    packed, arrays, outputs = pack(pair, [y, 2 * y, w], [y], "Tanh, saved tensor", info)

JAX keeps `arrays` instead, each distinct array once. `packed` describes how to make each tensor from these arrays.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from .derive import ROOT, STEP, Code, Origin, evaluate, follow, is_larger, is_number
from .pack_array import PackedTensor, pack_tensor
from .pair import Pair, PairOfLayer, TensorInfo, reference


class Root:
    """A tensor that is packed, or left as it is (`packed` is None), with its arrays."""

    __slots__ = ("arrays", "packed")

    def __init__(self, packed: PackedTensor | None, arrays: list[Any]) -> None:
        self.packed, self.arrays = packed, arrays


class Residual(NamedTuple):
    """How a tensor is kept: as a root, or by code that computes it from roots."""

    roots: Sequence[Root]
    code: Code = ()

    @staticmethod
    def of(tensor: Any) -> Residual:
        """Return the residual of a tensor that is not packed."""
        return Residual([Root(None, [tensor])])

    @staticmethod
    def computed(code: Code, parts: Sequence[Residual]) -> Residual:
        """Return the residual that a code computes from other residuals, `parts`."""
        roots: list[Root] = []
        steps: list[Any] = []
        references: list[tuple[int, Any]] = []  # to each of the parts
        for part in parts:
            for root in part.roots:
                if id(root) not in map(id, roots):
                    roots.append(root)
            own = [(ROOT, next(i for i, other in enumerate(roots) if other is root)) for root in part.roots]
            n_before = len(steps)
            steps += [instruction.moved(own, n_before) for instruction in part.code]
            references.append((STEP, len(steps) - 1) if part.code else own[0])
        n_before = len(steps)
        return Residual(roots, [*steps, *(instruction.moved(references, n_before) for instruction in code)])


class _WeakResidual:
    """A residual as a pair remembers it: it keeps no array and no result of a hook alive."""

    def __init__(self, residual: Residual) -> None:
        self.trace = weakref.ref(current_trace())  # a traced value belongs to the one jaxpr in which it was made
        self.code = residual.code
        self.roots = [
            (root.packed and weakref.ref(root.packed), list(map(reference, root.arrays))) for root in residual.roots
        ]

    def get(self) -> Residual | None:
        if self.trace() is not current_trace():
            return None
        roots: list[Root] = []
        for packed, arrays in self.roots:
            root = Root(packed and packed(), [array() for array in arrays])
            if (packed is not None and root.packed is None) or any(x is None for x in root.arrays):
                return None
            roots.append(root)
        return Residual(roots, self.code)


class PackedResiduals:
    """How to make each tensor of a layer or operation from the arrays that JAX keeps. Holds no array."""

    def __init__(self, residuals: Sequence[Residual]) -> None:
        self.arrays: list[Any] = []  # until `pack` returns
        self.owners: list[int] = []  # index of the tensor that each array was packed from (the first of several)
        numbers: dict[int, int] = {}
        self.tensors: list[tuple[list[tuple[PackedTensor | None, list[int]]], Code]] = []
        for i, residual in enumerate(residuals):
            for x in [x for root in residual.roots for x in root.arrays]:
                if id(x) not in numbers:
                    numbers[id(x)] = len(numbers)
                    self.arrays.append(x)
                    self.owners.append(i)
            roots = [(root.packed, [numbers[id(x)] for x in root.arrays]) for root in residual.roots]
            self.tensors.append((roots, residual.code))
        self.n_arrays = len(self.arrays)

    def unpack(self, arrays: Sequence[Any], cotangents: Sequence[Any]) -> UnpackedTensors:
        """Return the tensors. Each is unpacked when it is first read; in staged code XLA waits for the cotangents."""
        return UnpackedTensors(self, arrays, cotangents)


class UnpackedTensors(Sequence[Any]):
    """The tensors of a layer or an operation, each unpacked when it is first read."""

    def __init__(self, packed: PackedResiduals, arrays: Sequence[Any], cotangents: Sequence[Any]) -> None:
        self._packed, self._arrays = packed, arrays
        self.cotangents = list(cotangents)  # as the barriers return them
        self._roots: dict[tuple[int, ...], Any] = {}
        self._tensors: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._packed.tensors)

    def __getitem__(self, index: Any) -> Any:
        if index not in self._tensors:
            roots, code = self._packed.tensors[index]
            with set_current_trace(trace_below(current_trace())), hooks_suspended():
                # An array that is the tensor itself needs no barrier.
                values = [self._root(packed, numbers, waits=bool(code)) for packed, numbers in roots]
                self._tensors[index] = evaluate(code, values)
        return self._tensors[index]

    def _root(self, packed: PackedTensor | None, numbers: Sequence[int], waits: bool) -> Any:
        key = (*numbers, -1 if packed is None else id(packed), waits and packed is None)
        if key not in self._roots:
            arrays = [self._arrays[i] for i in numbers]
            if packed is not None:
                # JAX passes some constants as numbers.
                self._roots[key] = packed.unpack(as_arrays(self._waiting(arrays)))
            else:
                (self._roots[key],) = self._waiting(arrays) if waits else arrays
        return self._roots[key]

    def _waiting(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Return the arrays behind a barrier, so that XLA does not read them before it has the cotangents.

        Otherwise XLA may unpack as soon as it has packed, and hold all tensors until backward begins. XLA waits only if
        the cotangents that the barrier returns are used.
        """
        present = [i for i, c in enumerate(self.cotangents) if c is not None]
        if not present or not any(map(is_staged, arrays)):
            return arrays
        values = barrier([*arrays, *(self.cotangents[i] for i in present)])
        for i, cotangent in zip(present, values[len(arrays) :], strict=True):
            self.cotangents[i] = cotangent
        return values[: len(arrays)]


# For a layer: its class, and the names of the tensors.
Info = Callable[[int], TensorInfo] | tuple[str, Sequence[str]]


def pack(
    pair: Pair | PairOfLayer,
    tensors: Sequence[Any],
    outputs: Sequence[Any],
    owner: str,
    info: Info,
    *,
    origins: dict[int, Origin] | None = None,
    known: Sequence[tuple[Any, Residual]] = (),
    operands: Sequence[Any] = (),
) -> tuple[PackedResiduals, list[Any], list[Any]]:
    """Pack the tensors that a layer or an operation keeps.

    Args:
        pair: the pair of the block in which the layer or operation was applied, as `pair_to_pack_with` returned it.
        tensors: the tensors to pack.
        outputs: the outputs of the layer or operation.
        owner: its name and the kind of the tensors, for messages: "Tanh, saved tensor".
        info: the argument of `only` for each tensor: a function of its index, or the class of the layer and the names.
        origins: the operations that made these values, as far as they were recorded.
        known: tensors that are not packed, and how they are kept.
        operands: the arguments of the layer or operation.

    Returns:
        How the tensors are kept; the arrays that JAX has to keep; and the outputs.
    """
    if isinstance(pair, PairOfLayer):
        pair, stays = pair
        known = [(x, Residual.of(x)) for x, is_set in zip(operands, stays, strict=False) if is_set]
    with set_current_trace(trace_below(trace_of_primals([*tensors, *outputs]))):
        if active.value is SUSPENDED:  # an enclosing operation packs
            packed = PackedResiduals(list(map(Residual.of, tensors)))
        else:
            tell = info if callable(info) else functools.partial(_of_layer, *info)
            packing = _Packing(pair, owner, tell, origins or {}, known, operands)
            with hooks_suspended():
                residuals = [packing.residual(x, i) for i, x in enumerate(tensors)]
                outputs = packing.bind(outputs)
            packed = PackedResiduals(residuals)
    arrays, packed.arrays = packed.arrays, []
    return packed, arrays, list(outputs)


def keeps_residuals(tangents: Sequence[Any]) -> bool:
    """Return whether a rule with these tangents (None: zero) keeps residuals. Eager forward mode keeps none."""
    return any(is_unknown(t) or is_staged(t) for t in tangents)


def _of_layer(layer: str, names: Sequence[str], i: int) -> TensorInfo:
    return TensorInfo(layer=layer, name=names[i] if names else "")


class _Packing:
    """Packs the tensors of one layer or operation, each distinct one once."""

    def __init__(
        self,
        pair: Pair,
        owner: str,
        tell: Callable[[int], TensorInfo],
        origins: dict[int, Origin],
        known: Sequence[tuple[Any, Residual]],
        operands: Sequence[Any],
    ) -> None:
        self._pair, self._owner, self._tell, self._origins = pair, owner, tell, origins
        self._operands = {id(x) for x in operands}
        # Keys are ids of tensors. The tensors are held, so that no other object gets these ids.
        self._found: dict[int, tuple[Any, Residual]] = {}
        self._unknown: dict[int, Any] = {}
        self._unpacked = {id(tensor): residual for tensor, residual in known}
        self._new: list[Root] = []  # the roots that were packed here
        self._is_staging = is_staging()

    def residual(self, tensor: Any, index: int) -> Residual:
        """Return how a tensor is kept. It is packed unless it follows from other tensors that are no larger."""
        found = self._known(tensor) or self._derived(tensor, index)
        if found is None:
            packed, arrays = pack_tensor(self._pair, tensor, f"{self._owner} {index}", self._tell(index))
            found = Residual([Root(packed, list(arrays))])
            if packed is not None:
                self._new += found.roots
        self._found[id(tensor)] = tensor, found
        return found

    def _known(self, tensor: Any) -> Residual | None:
        if id(tensor) in self._found:
            return self._found[id(tensor)][1]
        if id(tensor) in self._unknown:
            return None
        weak = self._pair.residuals.get(tensor)
        found = None if weak is None else weak.get()
        if found is None:
            found = self._unpacked.get(id(tensor))
        if found is None and self._stays(tensor):
            found = Residual.of(tensor)
        if found is None:
            self._unknown[id(tensor)] = tensor
        else:
            self._found[id(tensor)] = tensor, found
        return found

    def _stays(self, tensor: Any) -> bool:
        # A hook could hardly read a PRNG key, and could not restore a Ref. A program holds its constants anyway, and
        # XLA would run the hooks on the constants while it compiles, for seconds.
        return is_ref(tensor) or is_key(tensor) or 0 in tensor.shape or (self._is_staging and not is_tracer(tensor))

    def _is_constant(self, value: Any) -> bool:
        return is_number(value) and (id(value) not in self._operands or id(value) in self._unpacked)

    def _derived(self, tensor: Any, index: int | None = None) -> Residual | None:
        """Return the residual of a tensor that follows from known tensors, or, with an index, from any tensors."""
        is_known = lambda x: self._known(x) is not None  # noqa: E731
        is_constant = lambda x: x is not tensor and self._is_constant(x)  # noqa: E731
        code, roots = follow(tensor, self._origins, is_known, is_constant, self._pair.keeps)
        missing = [root for root in roots if self._known(root) is None]
        if not code or (missing and (index is None or is_larger(missing, tensor))):
            return None
        return Residual.computed(code, [self.residual(root, index or 0) for root in roots])

    def bind(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the outputs; in staged code they are behind a barrier, so that XLA packs before it uses them.

        Otherwise XLA may simplify unpack(pack(x)) to x and keep x (two casts cancel out), or pack late. The pair
        remembers the packed tensors, and outputs that follow from these, for operations that keep the same tensors.
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
            if [root for root in residual.roots if root.packed is not None]:
                self._pair.residuals.put(tensor, _WeakResidual(residual))
        return bound
