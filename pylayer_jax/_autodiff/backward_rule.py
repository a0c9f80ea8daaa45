"""Running `backward` and `jvp`: the derivative of one run of `forward`, by the methods of its class."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._jax.tracers import is_differentiating, is_staging
from pylayer_jax._methods.context import PyLayerContext, backward_context
from pylayer_jax._methods.gradients import match_gradients
from pylayer_jax._methods.mistakes import Attributes, backward_arity_error, jvp_arity_error
from pylayer_jax._methods.once_differentiable import second_derivative_error_of
from pylayer_jax._methods.tangents import argument_tangents, match_tangents
from pylayer_jax._trees.closures import filled
from pylayer_jax._trees.messages import add_note

from .call import LayerCall, force_primitive, null_context
from .derivative import Derivative
from .saved_state import SavedState, SavedTree, fresh


@dataclasses.dataclass(eq=False, repr=False)
class LayerRun:
    """One run of `forward`, with the `backward` of its class, and its `jvp` if it has one."""

    call: LayerCall
    saved: SavedState

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def forward_mode(self) -> bool:
        return self.call.layer.forward_mode

    @property
    def has_pushforward(self) -> bool:
        return self.call.layer._jvp_method() is not None

    def pull(self, needs_grad: Sequence[bool], residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Gradients of the inputs (None for zero), by `backward`, from cotangents of the outputs (None for zero)."""
        __tracebackhide__ = True
        call, saved, layer = self.call, self.saved, self.call.layer
        cotangents = [c if has else None for c, has in zip(cotangents, saved.outputs.has_tangent, strict=True)]
        if all(c is None for c in cotangents):
            return [None] * len(call.arguments.avals)
        seen = self._needs_input_grad(needs_grad)
        ctx = self._context(seen, residuals, saved.saved)
        arrays = residuals if isinstance(residuals, (list, tuple)) else ()  # others are unpacked only if they are read
        attributes = Attributes([(f"ctx.{name}", value) for name, value in vars(ctx).items()], arrays)
        conjugate = _conjugated if layer.complex_convention == "paddle" else list
        given = saved.outputs.cotangents(conjugate(cotangents), saved.materialize, layer._torch_convention)
        # In a first derivative in eager mode `jax.custom_vjp` is faster, and each user context compiles its operations
        # anew.
        is_staged = is_staging(include_outer=True)
        may_be_transposed = is_staged or is_differentiating()
        backward = call.backward_that_checks_closures() if is_staged else layer.backward
        try:
            with (
                self._filled(residuals),
                force_primitive(True) if may_be_transposed else null_context,
                call.staged_scope("backward") if is_staged else null_context,
            ):
                result = backward(ctx, *given)
        except jax.errors.UnexpectedTracerError as error:
            if names := call.names_closed_over_by_backward():
                raise call.closed_over_by_backward_error(names) from error
            add_note(error, call.name, "backward")
            raise
        except Exception as error:
            if misfit := backward_arity_error(error, call.name, layer.backward, (ctx, *given), saved.outputs):
                raise misfit from error
            add_note(error, call.name, "backward")
            raise
        attributes.check(call.name, "backward")
        needed = call.arguments.perturbable(needs_grad)
        return conjugate(match_gradients(result, call.arguments, needed, layer, saved.perturbed_is_exact))

    def push(self, needs_grad: Sequence[bool], residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Tangents of the outputs that can have one, by `jvp`, from tangents of the inputs; None for zero."""
        __tracebackhide__ = True
        call, saved = self.call, self.saved
        seen = self._needs_input_grad(needs_grad)
        ctx = self._context(seen, residuals, saved.saved if saved.saved_for_jvp is None else saved.saved_for_jvp)
        given = argument_tangents(call.arguments, tangents, saved.materialize)
        jvp = call.layer._jvp_method()
        try:
            with self._filled(residuals), call.scope("jvp"):
                result = jvp(ctx, *given)
        except Exception as error:
            names = [a.name for a in call.arguments.arguments]
            if misfit := jvp_arity_error(error, call.name, jvp, (ctx, *given), names):
                raise misfit from error
            add_note(error, call.name, "jvp")
            raise
        return match_tangents(result, saved.outputs, call.name)

    def _needs_input_grad(self, needs_grad: Sequence[bool]) -> list[bool]:
        """`ctx.needs_input_grad`, per tensor. If `forward` read it, the same again, since the saved values fit that."""
        saved = self.saved
        return saved.needs_grad if saved.read_needs_input_grad else self.call.arguments.perturbable(needs_grad)

    def second_derivative_error(self) -> Exception | None:
        make_error = second_derivative_error_of(self.call.layer.backward)
        return None if make_error is None else make_error()

    def _filled(self, residuals: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """A block in which objects on the context hold the tensors of this run: NOTE [hidden tensors]."""
        if not self.saved.hidden:
            return null_context
        places, trees = zip(*self.saved.hidden.values(), strict=True)
        return filled(places, [tree.restore(residuals) for tree in trees])

    def _context(self, needs_grad: list[bool], residuals: Sequence[Any], tensors: Any) -> PyLayerContext:
        def restore(value: Any) -> Any:
            return value.restore(residuals) if isinstance(value, SavedTree) else fresh(value)

        return backward_context(
            self.call.layer._context,
            self.call.name,
            lambda: self.call.arguments.needs(needs_grad),
            lambda: restore(tensors),
            {name: restore(value) for name, value in self.saved.attributes.items()},
        )


def derivative_of(call: LayerCall, saved: SavedState, residuals: int) -> Derivative:
    """The derivative of one run of `forward`, which kept that many residuals."""
    return Derivative(LayerRun(call, saved), saved.outputs.types, saved.outputs.has_tangent, residuals)


def _conjugated(values: Sequence[Any]) -> list[Any]:
    return [jnp.conj(x) if x is not None and jnp.iscomplexobj(x) else x for x in values]
