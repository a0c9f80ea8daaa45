"""The context: it carries values and flags from `forward` to `backward`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pylayer_jax._jax.types import is_array, is_ref
from pylayer_jax._trees.messages import describe, name_meant, plural
from pylayer_jax._trees.partition import contains, flatten, is_tensor, split

__tracebackhide__ = True  # for pytest: errors raised here are about values of the user


class Phase(enum.Enum):
    """Where in its life a context is; it takes values and flags only in `FORWARD`."""

    FORWARD = "in forward"
    RETURNED = "after forward"
    BACKWARD = "in backward"


class ContextState:
    """The private half of a context: everything but the attributes that the user sets."""

    __slots__ = (
        "copies",
        "inputs",
        "layer",
        "load",
        "materialize",
        "must_return",
        "needs",
        "non_differentiable",
        "phase",
        "read_needs_input_grad",
        "saved",
        "saved_for_jvp",
    )

    def __init__(self, layer: str, phase: Phase, needs: Callable[[], tuple[bool, ...]], inputs: Any = ()) -> None:
        self.layer = layer
        self.phase = phase
        self.needs = needs  # gives needs_input_grad
        self.inputs = inputs
        self.copies: list[tuple[np.ndarray, np.ndarray]] = []  # each NumPy array that is kept, and its copy
        self.saved: tuple[Any, ...] | None = None
        self.load: Callable[[], tuple[Any, ...] | None] | None = None  # gives `saved` when `backward` asks for it
        self.saved_for_jvp: tuple[Any, ...] | None = None
        self.non_differentiable: list[Any] = []
        self.must_return: list[tuple[Any, str, str]] = []  # a value that has to be an output, the call, the advice
        self.materialize = True
        self.read_needs_input_grad = False

    def numpy_outputs(self, tensors: Sequence[Any], arrays: Sequence[Any]) -> dict[int, Any]:
        """By the identity of each NumPy value that may be kept, the output that it is.

        `tensors` are the outputs as `forward` returned them, `arrays` the same as JAX arrays.
        """
        outputs = {id(x): y for x, y in zip(tensors, arrays, strict=True) if x is not y}
        for array, copy in self.copies if outputs else ():
            # An array that changed in place after it was kept is another value.
            if id(array) in outputs and array.tobytes() == copy.tobytes():
                outputs[id(copy)] = outputs[id(array)]
        return outputs

    def read_saved(self) -> tuple[Any, ...] | None:
        if self.load is not None:
            self.saved, self.load = self.load(), None
        return self.saved


class PyLayerContext:
    """Carries values and flags from `forward` to `backward` of one application of a layer.

    `forward` may call the methods below and set any further attribute. Arrays anywhere inside an attribute (in lists,
    dicts or any other pytree) are kept like saved tensors; every other object arrives in `backward` unchanged. A NumPy
    array is copied when it is saved or set: a later change in place cannot reach `backward`, where the array arrives
    as a `jax.Array`.
    """

    __slots__ = ("__dict__", "_state")

    _state: ContextState

    def __init__(self, state: ContextState) -> None:
        object.__setattr__(self, "_state", state)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _RESERVED or hasattr(type(self), name):
            raise AttributeError(
                f"ctx.{name} cannot be assigned in {self._state.layer}: the name belongs to the context. "
                f"Choose another attribute name{_RESERVED.get(name, '')}."
            )
        object.__setattr__(self, name, own_copy(value, self._state, f"ctx.{name} = ..."))

    def __getattr__(self, name: str) -> Any:
        state, known = self._state, getattr(type(self), name, None)
        if isinstance(known, property):  # it raised an AttributeError, as that of an unpack hook
            return known.__get__(self)
        if state.phase is Phase.BACKWARD:
            advice = f"forward of {state.layer} did not set it; it set {sorted(vars(self)) or 'no attribute'}"
        else:
            advice = f"{state.layer} has not set it yet"
        if (meant := name_meant(name, dir(self))) is not None:
            advice += f". Did you mean ctx.{meant}?"
        elif name in ("mark_dirty", "save_for_forward"):
            advice += f". The context of a pylayer_jax.Function has {name}"
        elif hasattr(jax.Array, name):
            advice += ". It is an attribute of arrays. Is ctx, which comes first, missing in the parameters?"
        raise AttributeError(f"ctx.{name} does not exist: {advice}")

    def __repr__(self) -> str:
        state = self._state
        parts: list[str] = []
        if state.load is None:  # otherwise they would be unpacked only to be counted
            parts.append(f"{plural(len(state.saved or ()), 'value', 'values')} saved")
        parts += [f"ctx.{name}" for name in vars(self)]
        contents = ", ".join(parts)
        return f"<{type(self).__name__} of {state.layer}, {state.phase.value}{': ' if contents else ''}{contents}>"

    def __dir__(self) -> list[str]:
        return [*(name for name in dir(type(self)) if name[0] != "_"), *vars(self)]

    # -- saving ---------------------------------------------------------------------------------

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep values for `backward`, where `saved_tensor()` returns them in the same order.

        In a second derivative a saved output carries the layer's own rule, and a saved input its own derivative, also
        if `forward` returns it. Any other tensor is differentiated through `forward`, from inputs and outputs; an
        output that is marked non-differentiable is among these tensors. Of one object that is returned twice, the last
        counts. None, Python numbers and other statics pass through unchanged, and a pytree is one entry. A `jax.Ref`
        argument is kept as the reference that it is: `backward` reads what it holds by then.

        Raises:
            RuntimeError: when called outside `forward`, or a second time.
            ValueError: for a `jax.Ref` that is no argument.
        """
        state = self._state_in_forward("save_for_backward")
        if state.saved is not None:
            raise RuntimeError(
                f"ctx.save_for_backward was called twice in {state.layer}.forward. Save everything in one call: "
                "ctx.save_for_backward(a, b, ...)."
            )
        state.saved = tuple(own_copy(x, state, "ctx.save_for_backward(...)") for x in tensors)

    def saved_tensor(self) -> tuple[Any, ...] | None:
        """The tuple that was saved, or None if nothing was saved (as in Paddle)."""
        return self._state.read_saved()

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The tuple that was saved, or `()` if nothing was saved (as in torch)."""
        return self._state.read_saved() or ()

    # -- flags ----------------------------------------------------------------------------------

    def mark_not_inplace(self, *inputs: Any) -> None:
        """Accepted for code written for Paddle: JAX arrays never change in place.

        Raises:
            RuntimeError: when called outside `forward`.
            ValueError: for a value that is not a tensor argument of `forward`.
        """
        state = self._state_in_forward("mark_not_inplace")
        known = flatten(state.inputs)[0]
        for i, value in enumerate(inputs):
            if not all(is_tensor(x) and contains(known, x) for x in jax.tree_util.tree_leaves(value) or [None]):
                raise ValueError(
                    f"ctx.mark_not_inplace in {state.layer}.forward: argument {i} ({describe(value)}) is not a "
                    "tensor input of forward. Pass the arguments of forward themselves."
                )

    def mark_non_differentiable(self, *outputs: Any) -> None:
        """Let no gradient flow through these outputs, under any transform.

        `backward` still gets a cotangent for each: zeros, or None with `set_materialize_grads(False)`.

        Raises:
            RuntimeError: when called outside `forward`.
            ValueError: (when `forward` returns) for a value that is not among its outputs.
        """
        state, advice = self._state_in_forward("mark_non_differentiable"), "Mark the very values that forward returns."
        for leaf in [x for value in outputs for x in (jax.tree_util.tree_leaves(value) or [value])]:
            state.non_differentiable.append(leaf)
            state.must_return.append((leaf, "mark_non_differentiable", advice))

    def set_materialize_grads(self, flag: bool) -> None:
        """Whether `backward` gets zeros (True, the default) or None (False) for a missing cotangent.

        In a call that takes a `jax.Ref`, JAX does not tell which are missing: they come as zeros.

        Raises:
            RuntimeError: when called outside `forward`.
        """
        self._state_in_forward("set_materialize_grads").materialize = bool(flag)

    def set_grad_in_dtype_consistent(self, flag: bool) -> None:
        """Accepted for code written for Paddle: True is how JAX works, where a cotangent has the dtype of its output.

        Raises:
            RuntimeError: when called outside `forward`.
            ValueError: for False.
        """
        state = self._state_in_forward("set_grad_in_dtype_consistent")
        if not flag:
            raise ValueError(
                f"ctx.set_grad_in_dtype_consistent(False) in {state.layer}.forward: in JAX a cotangent always has the "
                "dtype of its output, so that backward cannot get another one. Remove the call; cast in backward what "
                "shall be computed in another dtype."
            )

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """One bool per argument of the call: whether its gradient is needed. All are False where nothing is
        differentiated.

        Under `jax.grad` of `jax.jit`, `forward` runs once undifferentiated and once for the gradient. A class with
        forward mode or with a `vmap` is staged once for both: there every argument that can have a gradient has True.
        So it has in a call that takes a `jax.Ref`.
        """
        self._state.read_needs_input_grad = True
        return self._state.needs()

    # -- for the package ------------------------------------------------------------------------

    def _contents(self) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
        """Everything that `backward` can read: the saved tensors and the attributes."""
        return self._state.read_saved(), dict(vars(self))

    def _with_contents(self, saved: tuple[Any, ...] | None, attributes: dict[str, Any]) -> PyLayerContext:
        """A context for `backward` with the flags of this one."""
        return backward_context(type(self), self._state.layer, self._state.needs, lambda: saved, attributes)

    def _state_in_forward(self, call: str) -> ContextState:
        state = self._state
        if state.phase is not Phase.FORWARD:
            place = "backward" if state.phase is Phase.BACKWARD else "code that ran after forward had returned"
            raise RuntimeError(
                f"ctx.{call} was called in {place} of {state.layer}; it works only inside forward. "
                "Move the call into forward."
            )
        return state


def backward_context(
    kind: type[PyLayerContext],
    layer: str,
    needs: Callable[[], tuple[bool, ...]],
    load: Callable[[], tuple[Any, ...] | None],
    attributes: dict[str, Any],
) -> PyLayerContext:
    """The context that `backward` gets; `load` gives the saved tensors."""
    state = ContextState(layer, Phase.BACKWARD, needs)
    state.load = load
    ctx = kind(state)
    for name, value in attributes.items():
        object.__setattr__(ctx, name, value)
    return ctx


_RESERVED = {"_state": "", "saved_tensors": ", or keep tensors with ctx.save_for_backward(...)"}


def own_copy(value: Any, state: ContextState, call: str) -> Any:
    """`value` with its NumPy arrays copied; a `jax.Ref` that is no argument of `forward` is refused."""
    if is_array(value) or isinstance(value, (int, float, str, type(None))):
        return value
    arrays, rest = split(value, lambda leaf: isinstance(leaf, np.ndarray))
    refs = [leaf for leaf in rest.statics() if is_ref(leaf)]
    if refs and not all(contains(flatten(state.inputs)[0], ref) for ref in refs):
        raise ValueError(
            f"{call} in {state.layer}: JAX keeps no jax.Ref for backward but an argument of forward. If forward made "
            "the Ref, keep its value: ref[...]. Otherwise pass it as an argument."
        )
    if not arrays:
        return value  # the same object, so that a container stays the object that the user holds
    return rest.fill([_copied(array, state) for array in arrays])


def _copied(array: np.ndarray, state: ContextState) -> np.ndarray:
    copy = array.copy()
    state.copies.append((array, copy))
    return copy
