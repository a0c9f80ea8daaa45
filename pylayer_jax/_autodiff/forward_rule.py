"""Running a layer that is differentiated: the part that both bindings share.

NOTE [two bindings]
A layer is bound in one of two ways. Most classes are a `jax.custom_vjp` function (`custom_vjp`). A class with forward
mode, or with its own batching, is an operation of our own (`eager_call`), because `jax.custom_vjp` has no forward mode
and batches the code inside. An operation of our own for every class was tried, and is worse for the others: an eager
gradient takes 3.2 times as long (the table of linearization rules is not public), `needs_input_grad` is not exact under
`grad` of `jit`, and JAX's caches keep the static arguments alive. Therefore two bindings stay, with one derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from pylayer_jax._jax.tracers import is_differentiated, is_tracer
from pylayer_jax._jax.types import typeof

from .backward_rule import derivative_of
from .call import LayerCall
from .derivative import Derivative
from .residuals import pack_residuals
from .run_forward import run_and_save
from .saved_state import SavedState
from .staged_call import StagedCall, stage_call
from .staged_call_rules import bind_staged_call


class Differentiated(NamedTuple):
    """One run of `forward` that is differentiated."""

    saved: SavedState
    derivative: Derivative
    outputs: list[Any]
    residuals: list[Any]

    @classmethod
    def staged(cls, staged: StagedCall, consts: Sequence[Any], tensors: Sequence[Any]) -> Self:
        """A run whose `forward` is a jaxpr."""
        __tracebackhide__ = True
        values = bind_staged_call(staged, consts, tensors)
        return cls(staged.saved, staged.derivative, values[: staged.outputs], staged.residuals(tensors, values))

    def packed(self, call: LayerCall) -> Differentiated:
        """The same with packed residuals, if hooks are active."""
        derivative, residuals, outputs = pack_residuals(call, self.saved, self.derivative, self.residuals, self.outputs)
        return Differentiated(self.saved, derivative, outputs, residuals)


def differentiate(
    call: LayerCall, tensors: Sequence[Any], needs_grad: list[bool], perturbed_is_exact: bool = True
) -> Differentiated:
    """Run `forward` so that its derivative holds at every order: NOTE [orders]."""
    __tracebackhide__ = True
    if any(map(is_tracer, tensors)):
        staged, consts = stage_call(call, [typeof(x) for x in tensors], needs_grad, tensors, perturbed_is_exact)
        return Differentiated.staged(staged, consts, tensors)
    saved, outputs, residuals = run_and_save(call, tensors, needs_grad, perturbed_is_exact)
    if any(map(is_differentiated, [*outputs, *residuals])):
        raise call.closed_over_error()
    return Differentiated(saved, derivative_of(call, saved, len(residuals)), outputs, residuals)
