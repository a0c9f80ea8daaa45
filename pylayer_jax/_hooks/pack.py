"""Defines pairs of saved-tensor hooks and the origin of a tensor, and packs and restores one tensor.

    residual = pack_tensor(pair, steps, x, "Tanh, saved tensor 0", info)    # x: f32[8,64]; a `Partial` of bf16[8,64]
    restored(residual)                                                      # f32[8,64]

A step is a pack hook and an unpack hook. A pair has one, or none (`recompute_saved()`); a chain has those of its pairs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import functools
import itertools
import os
import sys
import threading
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.tree_util import Partial

from pylayer_jax._jax.jaxprs import frames_between, scopes_between
from pylayer_jax._jax.rule_function import merge, select, value_with_tangent_of
from pylayer_jax._jax.traces import NEEDS_VALUES, is_active, is_differentiated, is_staged, is_tracer
from pylayer_jax._jax.transparency import forbid_derivative
from pylayer_jax._jax.types import as_arrays, has_tangent, is_array, is_key, is_tensor, number_as, typeof, with_type
from pylayer_jax._messages import add_note, describe
from pylayer_jax._trees import WeakTable, split

from .host import HostStore, pack_on_host
from .primitives import EXACT, UNKNOWN, Rounding

Hook = Callable[[Any], Any]

IDLE: Final = (
    "0 tensors packed. The block stands around code in which JAX differentiates nothing that it can see: "
    "the residuals of plain operations inside jax.grad or a jitted step. Put it into the function that "
    "jax.grad differentiates, or decorate that function: jax.grad(pair(loss))."
)
_STANDARD_LIBRARY: Final = contextlib.__file__, functools.__file__
_NOT_OF_USER: Final = (f"{Path(__file__).parents[1]}{os.sep}", "site-packages", "dist-packages", *_STANDARD_LIBRARY)


class Place(enum.Enum):
    """Where an operand of a block, of a decorated function or of a body in it comes from."""

    CONSTANT = enum.auto()  # a concrete array in staged code, or a number
    OUTSIDE = enum.auto()
    LENT = enum.auto()  # the function around a body computes it, and may pack it
    COMPUTED = enum.auto()  # the block computes it; or a loop carries it, or a shard_map gets it from such code


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a tensor was computed, for `only` and `by_name`. A reshape, slice or cast has the origin of its operand."""

    operation: str = ""  # the jitted function of jax.numpy, or the primitive, that computed the tensor
    layer: str = ""  # the class of the layer that computed the tensor, or that saved it first
    name: str = ""  # the name from `saved_names` or `jax.ad_checkpoint.checkpoint_name`
    # JAX's source information of the equations that lead to the tensor, outermost first
    sources: tuple[Any, ...] = dataclasses.field(default=(), repr=False, compare=False)
    entry: Any = dataclasses.field(default=None, repr=False, compare=False)  # of the decorated call

    # Other branches of a `cond` may compute the tensor: JAX keeps one array for all of them.
    others: tuple[Origin, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def branches(self) -> tuple[Origin, ...]:
        return self, *[branch for other in self.others for branch in other.branches]

    @functools.cached_property
    def inside(self) -> tuple[str, ...]:
        """The functions, classes and named scopes between this call and the operation, each kind outermost first."""
        if self.entry is None:
            return ()
        pairs = list(itertools.pairwise((self.entry, *self.sources)))
        names = [name for between in (frames_between, scopes_between) for pair in pairs for name in between(*pair)]
        return tuple(name for name, previous in zip(names, [None, *names], strict=False) if name != previous)

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(f"info.{attribute} does not exist: info has name, layer, operation and inside.")

    @property
    def keys(self) -> tuple[str, ...]:
        """The names by which `by_name` finds the tensor, the most specific name first."""
        return tuple(dict.fromkeys(key for key in (self.name, self.layer, self.operation, *self.inside[::-1]) if key))


class Step(NamedTuple):
    """A pack hook and an unpack hook, with their options."""

    pack: Hook
    unpack: Hook
    host: bool = False
    differentiable: bool = False  # whether `unpack(pack(x))` has the derivative of the identity
    only: Callable[[Any, Origin], Any] | None = None  # the step does not pack an array for which `only` is False
    takes: Callable[[Any], bool] | None = None  # whether it packs a saved tensor; not for what a previous step made
    is_in_host_memory: bool = False  # so that no step can follow, as after one with `host`
    name: str = ""  # the name of a step of a chain, for messages
    rounding: Callable[[Any], Rounding] = lambda _: UNKNOWN  # an array or type -> the error of its packed form
    size: Callable[[Any], float] | None = None  # a type -> the bytes that a plan counts for its packed form


@dataclasses.dataclass(eq=False)
class Pair:
    """The hooks of a `saved_tensors_hooks` object. Each step packs what the pack hook of the previous one returned."""

    steps: Sequence[Step]
    key: Any  # equal for equal pairs; each function in it is replaced by a number from `key_of`
    store: HostStore  # what hooks on the host returned in compiled programs; equal pairs share it
    class_name: str  # for warnings
    recomputes_elementwise: bool  # as well as moves, `neg`, casts that widen and integers, as all pairs do
    packs_arguments: bool  # whether values from outside the block are packed
    only: Callable[[Any, Origin], Any] | None = None  # the predicate that applies before all steps
    by_name: Mapping[Any, Sequence[Step]] | None = None  # name -> steps; if given, it replaces `steps`
    limit: float | None = None  # the bytes that backward may keep

    def __post_init__(self) -> None:
        self.is_selective: bool = self.by_name is not None or bool(self.predicates())
        self.n_packed: Counter[bool] = Counter()  # the key is True for tensors of staged code
        self.n_recomputed: Counter[bool] = Counter()
        self.unmatched = {key for key in self.by_name or () if key is not ...}  # keys that named no kept tensor yet
        self.seen: Counter[str] = Counter()  # name -> how many tensors of it are kept, while keys are unmatched
        self.terms_of: dict[Any, Any] = {}  # operations of a function -> how it meets the limit, and what it keeps
        self._told: set[Any] = set()  # keys of the warnings that were given

    @property
    def moves_to_host(self) -> bool:
        """Whether a step packs on the host, or into its memory. JAX cannot batch a cond with such branches."""
        return any(step.host or step.is_in_host_memory for step in self.all_steps())

    def never_packs(self, place: Place) -> bool:
        """Return whether values from a place stay as they are."""
        return place is Place.CONSTANT or (place is not Place.COMPUTED and not self.packs_arguments)

    @property
    def needs_plan(self) -> bool:
        """Whether only a plan for a whole function can do what the pair says."""
        reads_info = any(not only.takes_array_alone for only in self.predicates())
        return self.limit is not None or self.by_name is not None or reads_info

    @property
    def n_used(self) -> int:
        return self.n_packed.total() + self.n_recomputed.total()

    def predicates(self) -> list[Any]:
        found = self.only, *[step.only for step in self.all_steps()]
        return list(dict.fromkeys([only for only in found if only is not None]))

    def all_steps(self) -> list[Step]:
        lists = [self.steps] if self.by_name is None else self.by_name.values()
        return [step for steps in lists for step in steps]

    def steps_by_name(self, origin: Origin) -> Sequence[Step]:
        """Return the steps for a tensor; none if a branch of a `cond` that returns it in one array is excluded."""
        if self.by_name is None:
            return self.steps
        found = [next((key for key in o.keys if key in self.by_name), ...) for o in origin.branches]
        named = [key for key in found if key is not ...]
        excluded = [key for key in named if not self.by_name[key]]
        return self.by_name.get((excluded or named or [...])[0], ())

    def note(self, origin: Origin, is_kept: bool) -> None:
        """Record the names of a tensor, for a warning about keys of `by_name` that match no kept one."""
        for key in {key for o in origin.branches for key in o.keys}:
            self.seen[key] += is_kept
            if is_kept or not (self.by_name or {}).get(key):  # a key for None packs nothing in either case
                self.unmatched.discard(key)

    def warn_of_unmatched(self) -> None:
        if self.unmatched and any(self.seen.values()):
            keys = ", ".join(sorted(map(self._described, self.unmatched)))
            self.unmatched.clear()
            kept = [name for name, n_kept in self.seen.items() if n_kept]
            self.warn_once(
                f"no tensor that code in the block keeps for backward has the name {keys}. "
                f"The names of these tensors are {_listed(kept)}. What jax.checkpoint computes again is not kept."
            )
        for only in self.predicates():
            if only.seen and not only.was_true:
                self.warn_once(
                    "the predicate only= was False for each tensor that code in the block keeps for backward: "
                    f"{_listed(only.seen)}. Nothing was packed.",
                    only,
                )

    def _described(self, key: Any) -> str:
        if key in self.seen:
            otherwise = "; with recompute=False they are packed" if self.recomputes_elementwise else ""
            return f"{key!r} (backward computes such tensors again from others{otherwise})"
        similar = difflib.get_close_matches(str(key), self.seen, 1)
        return f"{key!r} (did you mean {similar[0]!r}?)" if similar else repr(key)

    def warn_once(self, message: str, key: Any = None) -> None:
        if (key or message) not in self._told:
            self._told.add(key or message)
            files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe())]
            is_users = [not any(part in file for part in _NOT_OF_USER) for file in files]
            stacklevel = is_users.index(True) + 1 if any(is_users) else 2
            warnings.warn(f"{self.class_name}: {message}", stacklevel=stacklevel)


def _listed(names: Collection[str], most: int = 30) -> str:
    shown = ", ".join(sorted(names)[:most])
    return f"{shown}, and {len(names) - most} more" if len(names) > most else shown


_numbers = WeakTable()  # object -> its number
_new_numbers = itertools.count(1)
_lock = threading.Lock()


def key_of(value: Any) -> Any:
    """Return a key that only this object ever has, and that does not keep it alive."""
    if isinstance(value, types.MethodType):  # Python makes a new object each time that a method is read
        return key_of(value.__self__), key_of(value.__func__)
    if value is None:
        return None
    with _lock:
        number = _numbers.get(value) or next(_new_numbers)
        _numbers.put(value, number)  # an object that allows no weak reference gets a new number each time
    return number


# -- packing and unpacking one tensor ------------------------------------------------------------------------
#
# NOTE [derivatives of packed tensors]
# Derivatives of higher order treat `unpack(pack(x))` as the identity, whatever the pair does to values. Therefore,
# during an outer differentiation, JAX keeps the tensor beside its packed form, for its tangent only: XLA drops it from
# a compiled program. In a program that is staged now and differentiated later (the body of a scan, `jax.grad` of
# `jax.jit`), it would take the memory that packing saves, and a second derivative may never follow. So it is not kept
# there: a second derivative differentiates the hooks themselves if the pair is `differentiable`, and is an error
# otherwise. tests: hooks/test_orders.py


PACK_SCOPE: Final = "pylayer_jax_pack"  # the named scope for operations of pack hooks in traced code


def _restorer(array: Any, unpack: Hook, fill: Callable[..., Any], where: str) -> Callable[..., Any]:
    """Return a function that restores a tensor from the arrays that the pack hook returned. It holds no JAX array."""
    is_numpy, has_x64 = not is_array(array), jax.enable_x64.value
    expected = jax.ShapeDtypeStruct(array.shape, array.dtype) if is_numpy else typeof(array)
    # JAX may place an uncommitted array on any device, so its sharding is not restored.
    sharding = None if is_tracer(array) or not getattr(array, "committed", False) else array.sharding

    def restore(*arrays: Any) -> Any:
        with jax.enable_x64(has_x64):  # otherwise JAX would restore a tensor of 64 bits with 32 bits
            with _running("unpack_hook", where):
                value = unpack(fill(arrays))
            value = checked(value, expected, where)
            # `pack_hook` hid the tracer in an object that is no pytree, so JAX did not keep the tracer as an array.
            if not arrays and is_tracer(value) and not is_active(value):
                raise TypeError(
                    f"unpack_hook returned a traced tensor of a transformation that has ended, for {where}: JAX "
                    "cannot keep a tensor in an object that is no pytree. pack_hook has to return traced tensors in a "
                    "tuple, a dict or a registered pytree; or run the hooks on the host, with host=True."
                )
            if is_numpy:
                return np.asarray(value)
            (value,) = as_arrays([value])
            if sharding is not None and not is_tracer(value) and value.sharding != sharding:
                value = jax.device_put(value, sharding)
            return with_type(value, expected)

    return restore


def steps_for(pair: Pair, tensor: Any, where: str, origin: Origin) -> Sequence[Step]:
    if is_key(tensor) or 0 in tensor.shape or not is_selected(pair.only, tensor, where, origin):
        return ()
    return _steps_that_pack(tensor, pair.steps_by_name(origin), where, origin)


def roundings_of(steps: Sequence[Step], tensor: Any) -> frozenset[Rounding]:
    return frozenset(step.rounding(tensor) for step in steps) - {EXACT}


def pack_tensor(pair: Pair, steps: Sequence[Step], tensor: Any, where: str, origin: Origin) -> Any:
    """Return a `Partial` that `restored` evaluates, or the tensor itself if there are no steps."""
    if not steps:
        return tensor
    pair.n_packed[is_staged(tensor)] += 1
    if not is_tracer(tensor):
        return _pack(pair.store, steps, tensor, where, origin)
    value, keeps_original = tensor, has_tangent(tensor) and is_differentiated(tensor)
    if keeps_original:
        value = jax.lax.stop_gradient(tensor)
    elif has_tangent(tensor) and not all(step.differentiable for step in steps):
        error = lambda: TypeError(
            f"a second derivative goes through {where}, which a pack hook packed inside of staged code (a jitted "
            "function, the body of a scan) that was differentiated from outside. Put the hooks block around that code "
            "instead, into the function that jax.grad differentiates; or, where JAX can differentiate the hooks with "
            "the derivative of the identity, pass saved_tensors_hooks(..., differentiable=True)."
        )
        (value,) = forbid_derivative([tensor], error)
    with jax.named_scope(PACK_SCOPE):
        residual = _pack(pair.store, steps, number_as(value, typeof(tensor)), where, origin)
    return Partial(value_with_tangent_of, tensor, residual) if keeps_original else residual


def restored(residual: Any) -> Any:
    """Return the tensor of a residual: of a `Partial`, whose arguments are residuals too, or of a tensor itself."""
    return residual.func(*map(restored, residual.args)) if isinstance(residual, Partial) else residual


def is_selected(only: Any, array: Any, where: str, origin: Origin) -> bool:
    if only is None:
        return True
    with _running("only", where):
        return all(bool(only(array, o)) for o in origin.branches)


def _steps_that_pack(
    array: Any, steps: Sequence[Step], where: str, origin: Origin, is_part: bool = False
) -> Sequence[Step]:
    """Return the first step that packs `array`, and all later ones. `is_part`: a previous step made `array`."""
    for i, step in enumerate(() if is_key(array) else steps):
        is_taken = is_part or step.takes is None or step.takes(array)
        if is_taken and is_selected(step.only, array, _in_step(where, step), origin):
            return steps[i:]
    return ()


def _in_step(where: str, step: Step) -> str:
    return f"{where}, in {step.name}" if step.name else where


def checked(value: Any, expected: Any, where: str) -> Any:
    if not is_tensor(value) or value.shape != expected.shape or value.dtype != expected.dtype:
        raise ValueError(
            f"unpack_hook returned {describe(value)} for {where}: expected dtype {expected.dtype} and shape "
            f"{tuple(expected.shape)}, as they were packed. Return a tensor of that dtype and shape."
        )
    return value


def _pack(
    store: HostStore, steps: Sequence[Step], array: Any, where: str, origin: Origin, is_part: bool = False
) -> Partial:
    step, later = steps[0], steps[1:]
    here = _in_step(where, step)
    packed, unpack = _run_pack_hook(store, step, array, here)

    leaves, skeleton = split(packed)
    residual_of = {id(x): x for x in leaves}
    for x in residual_of.values() if later else ():
        # Where JAX traces the hooks, a concrete array is a constant, which no later step packs.
        if is_tracer(x) == is_tracer(array):
            is_made = is_part or x is not array  # a hook that returns the saved tensor itself made no new array
            if own := _steps_that_pack(x, later, where, origin, is_made):
                residual_of[id(x)] = _pack(store, own, x, where, origin, is_made)
    residuals = [residual_of[id(x)] for x in leaves]
    # A NumPy array that no later step packs stays in the function, so on the host, and is freed with the one that
    # `jax.vjp` returned.
    is_kept = [isinstance(x, (jax.Array, Partial)) for x in residuals]
    others = [None if is_residual else x for is_residual, x in zip(is_kept, residuals, strict=True)]
    fill = lambda arrays: skeleton.fill(merge(is_kept, arrays, others))
    return Partial(_restorer(array, unpack, fill, here), *select(residuals, is_kept))


def _run_pack_hook(store: HostStore, step: Step, array: Any, where: str) -> tuple[Any, Hook]:
    """Return the result of the pack hook of a step, and the function that restores the array from it."""
    pack, unpack = step.pack, step.unpack
    if step.host and is_tracer(array):
        expected = typeof(array)
        return pack_on_host(store, pack, lambda packed: checked(unpack(packed), expected, where), array, where)
    with _running("pack_hook", where):
        return pack(np.array(array) if step.host else as_arrays([array])[0]), unpack  # a host hook may write


@contextlib.contextmanager
def _running(hook: str, where: str) -> Generator[None]:
    """Add to exceptions of a user's hook where it failed, and what the user can do."""
    try:
        yield
    except NEEDS_VALUES as error:
        advice = "Run it on the host: saved_tensors_hooks(pack_hook, unpack_hook, host=True)."
        raise TypeError(
            f"{hook} needs concrete values, but {where} is traced (jax.jit, jax.vmap, jax.lax.scan, ...). "
            f"{'It may read the shape, dtype and sharding of a tensor.' if hook == 'only' else advice}"
        ) from error
    except Exception as error:
        add_note(error, "", hook, f", for {where}")
        raise
