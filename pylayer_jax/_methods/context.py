"""What `forward` records for `backward`, and when it may record it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pylayer_jax._trees.partition import flatten, is_tensor


class Phase(enum.Enum):
    """Where in its life a context is; only `FORWARD` takes recordings."""

    FORWARD = "forward"
    RETURNED = "returned"
    BACKWARD = "backward"


class Record:
    """The private half of a context: everything but the attributes that the user sets."""

    __slots__ = (
        "asked_needs",
        "dirty",
        "inputs",
        "layer",
        "load",
        "marked",
        "materialize",
        "needs",
        "phase",
        "saved",
        "saved_for_jvp",
    )

    def __init__(self, layer: str, phase: Phase, needs: Callable[[], tuple[bool, ...]], inputs: Any = ()) -> None:
        self.layer = layer
        self.phase = phase
        self.needs = needs
        self.inputs = inputs
        self.saved: tuple[Any, ...] | None = None
        self.load: Callable[[], tuple[Any, ...] | None] | None = None  # gives `saved`, once it is asked for
        self.saved_for_jvp: tuple[Any, ...] | None = None
        self.marked: list[Any] = []
        self.dirty: list[Any] = []
        self.materialize = True
        self.asked_needs = False

    def read_saved(self) -> tuple[Any, ...] | None:
        if self.load is not None:
            self.saved, self.load = self.load(), None
        return self.saved


class PyLayerContext:
    """Carries values and flags from `forward` to `backward` of one application of a layer.

    `forward` may call the methods below and set any further attribute. Arrays anywhere inside an
    attribute (in lists, dicts or any other pytree) are kept like saved tensors; everything else is
    carried as it is. A NumPy array is copied when it is saved or set, so that changing it in place
    afterwards cannot reach `backward`, where it arrives as a `jax.Array`.
    """

    __slots__ = ("__dict__", "_record")

    _record: Record

    def __init__(self, record: Record) -> None:
        object.__setattr__(self, "_record", record)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _RESERVED or hasattr(type(self), name):
            raise AttributeError(
                f"ctx.{name} cannot be assigned in {self._record.layer}: the name belongs to the context. "
                f"Choose another attribute name{_RESERVED.get(name, '')}."
            )
        object.__setattr__(self, name, own_copy(value, self._record.layer, f"ctx.{name} = ..."))

    def __getattr__(self, name: str) -> Any:
        record = self._record
        if record.phase is Phase.BACKWARD:
            advice = f"forward of {record.layer} did not set it; it set {sorted(vars(self)) or 'no attribute'}"
        else:
            advice = f"{record.layer} has not set it yet"
        raise AttributeError(f"ctx.{name} does not exist: {advice}.")

    # -- saving ---------------------------------------------------------------------------------

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep values for `backward`, where `saved_tensor()` returns them in the same order.

        Inputs and outputs of `forward` keep their place in higher derivatives (an output carries the
        layer's own rule, an input its own derivative); an intermediate is differentiated through
        `forward`. None, Python numbers and other statics pass through, and a pytree is one entry.

        Raises:
            RuntimeError: when called outside `forward`, or a second time.
            TypeError: for a `jax.Ref`, which can change before `backward` runs.
        """
        record = self._recording("save_for_backward")
        if record.saved is not None:
            raise RuntimeError(
                f"ctx.save_for_backward was called twice in {record.layer}.forward. Save everything in one call: "
                "ctx.save_for_backward(a, b, ...)."
            )
        record.saved = tuple(own_copy(x, record.layer, "ctx.save_for_backward(...)") for x in tensors)

    def saved_tensor(self) -> tuple[Any, ...] | None:
        """The tuple that was saved, or None if nothing was saved (as in Paddle)."""
        return self._record.read_saved()

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The tuple that was saved, or `()` if nothing was saved (as in torch)."""
        return self._record.read_saved() or ()

    # -- flags ----------------------------------------------------------------------------------

    def mark_not_inplace(self, *inputs: Any) -> None:
        """Accepted for code written for Paddle: JAX arrays never change in place.

        Raises:
            RuntimeError: when called outside `forward`.
            ValueError: for a value that is not a tensor among the arguments of `forward`.
        """
        record = self._recording("mark_not_inplace")
        known = flatten(record.inputs)[0]
        for i, value in enumerate(inputs):
            if not all(is_tensor(x) and contains(known, x) for x in jax.tree_util.tree_leaves(value) or [None]):
                raise ValueError(
                    f"ctx.mark_not_inplace in {record.layer}.forward: argument {i} ({describe(value)}) is not a "
                    "tensor input of forward. Pass the arguments of forward themselves."
                )

    def mark_non_differentiable(self, *outputs: Any) -> None:
        """Let no gradient flow through these outputs, under any transform.

        `backward` still gets a cotangent for each: zeros, or None with `set_materialize_grads(False)`.

        Raises:
            RuntimeError: when called outside `forward`.
            ValueError: (when `forward` returns) for a value that is not among its outputs.
        """
        self._recording("mark_non_differentiable").marked.extend(outputs)

    def set_materialize_grads(self, flag: bool) -> None:
        """Whether `backward` gets zeros (True, the default) or None (False) for a missing cotangent.

        Raises:
            RuntimeError: when called outside `forward`.
        """
        self._recording("set_materialize_grads").materialize = bool(flag)

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """One bool per argument that was passed: whether its gradient is asked for.

        Under `jax.jit`, the run of `forward` that only stages it is told True for every argument that can have
        a gradient, since what will be asked is not known yet.
        """
        self._record.asked_needs = True
        return self._record.needs()

    # -- for the package ------------------------------------------------------------------------

    def _contents(self) -> tuple[Any, dict[str, Any]]:
        """Everything that `backward` can read."""
        return self._record.read_saved(), dict(vars(self))

    def _with_contents(self, contents: tuple[Any, dict[str, Any]]) -> PyLayerContext:
        """A context for `backward` with the flags of this one."""
        saved, attributes = contents
        return backward_context(type(self), self._record.layer, self._record.needs, lambda: saved, attributes)

    def _recording(self, call: str) -> Record:
        record = self._record
        if record.phase is not Phase.FORWARD:
            place = "backward" if record.phase is Phase.BACKWARD else "code that ran after forward had returned"
            raise RuntimeError(
                f"ctx.{call} was called in {place} of {record.layer}; it works only inside forward. "
                "Move the call into forward."
            )
        return record


def backward_context(
    kind: type[PyLayerContext],
    layer: str,
    needs: Callable[[], tuple[bool, ...]],
    load: Callable[[], tuple[Any, ...] | None],
    attributes: dict[str, Any],
) -> PyLayerContext:
    """The context that `backward` gets; `load` gives the saved tensors."""
    record = Record(layer, Phase.BACKWARD, needs)
    record.load = load
    ctx = kind(record)
    for name, value in attributes.items():
        object.__setattr__(ctx, name, value)
    return ctx


_RESERVED = {"_record": "", "saved_tensors": ", or keep tensors with ctx.save_for_backward(...)"}


def add_note(error: Exception, layer: str, method: str) -> None:
    """Let an exception of the user's own keep its type, and say where it came from."""
    note = f"This happened in {layer}.{method}."
    if isinstance(error, jax.errors.UnexpectedTracerError):
        note += (
            " If it uses a traced value from elsewhere (a closure, a global, an object kept on ctx), pass that value "
            "as an argument of forward, or keep it with ctx.save_for_backward or as ctx.name = array."
        )
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def own_copy(value: Any, layer: str, call: str) -> Any:
    """`value` with its NumPy arrays copied; a `jax.Ref` inside is refused."""
    if isinstance(value, (jax.Array, int, float, str, type(None))) and not isinstance(value, jax.Ref):
        return value
    leaves, treedef = flatten(value)
    for leaf in leaves:
        if isinstance(leaf, jax.Ref):
            raise TypeError(
                f"{call} in {layer}: a jax.Ref can change before backward runs, so it cannot be kept. "
                "Save its present value: ref[...]."
            )
    if not any(isinstance(leaf, np.ndarray) for leaf in leaves):
        return value  # the very object, so that a container stays the one that the user holds
    return treedef.unflatten([leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves])


def contains(values: Sequence[Any], wanted: object) -> bool:
    """Whether `wanted` itself, not an equal value, is among `values`."""
    return any(value is wanted for value in values)


def describe(value: Any) -> str:
    """A value as an error message shows it: type, and dtype and shape for a tensor."""
    if is_tensor(value):
        return f"{type(value).__name__} of dtype {value.dtype} and shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}" if len(repr(value)) < 60 else type(value).__name__
