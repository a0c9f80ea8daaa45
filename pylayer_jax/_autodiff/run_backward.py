"""Running `backward` and `jvp`: the derivative of one run of `forward`, by the methods of its class."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._hooks.packed_residuals import PackedResiduals, UnpackOnRead
from pylayer_jax._jax.masks import select
from pylayer_jax._jax.tracers import is_differentiating, is_staging
from pylayer_jax._jax.types import as_array, tangent_type
from pylayer_jax._methods.context import PyLayerContext, backward_context
from pylayer_jax._methods.gradients import match_gradients
from pylayer_jax._methods.mistakes import Attributes, backward_arity_error, jvp_arity_error, missing_cotangents
from pylayer_jax._methods.once_differentiable import second_derivative_error_of
from pylayer_jax._methods.tangents import argument_tangents, match_tangents
from pylayer_jax._trees.closures import with_values
from pylayer_jax._trees.messages import add_note

from .layer_call import LayerCall, in_backward, null_context
from .saved_state import SavedState, SavedTree, copy_container
from .summed_cotangents import watching_sums


@dataclasses.dataclass(eq=False, repr=False)
class Derivative:
    """Both directions of the derivative of one run of `forward`, by the methods of its class. Holds no array.

    `needs_grad` is a mask of the inputs. None is a zero gradient, cotangent or tangent. Compared by identity, since a
    derivative is a parameter of equations.
    """

    call: LayerCall
    saved: SavedState
    residuals: int  # the number of arrays that are kept
    packed: PackedResiduals | None = None  # the first residuals, if they are packed

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def has_tangent(self) -> tuple[bool, ...]:
        """Per output, whether it is neither marked non-differentiable nor of an integer type."""
        return self.saved.outputs.has_tangent

    @property
    def tangent_types(self) -> list[Any]:
        return [tangent_type(a) for a in select(self.saved.outputs.types, self.has_tangent)]

    def packing(self, packed: PackedResiduals) -> Derivative:
        """The same derivative, of which the first residuals are packed."""
        kept = self.residuals - len(packed.tensors) + packed.size
        return dataclasses.replace(self, residuals=kept, packed=packed)

    def gradients(self, needs_grad: Sequence[bool], arrays: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Gradients of all inputs from the arrays that are kept and cotangents of all outputs."""
        __tracebackhide__ = True
        cotangents = [as_array(c, a) for c, a in zip(cotangents, self.saved.outputs.types, strict=True)]
        return self.pull(needs_grad, self.unpack(arrays, cotangents), cotangents)

    def unpack(self, arrays: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        """The residuals, from the arrays that are kept; in staged code not before the cotangents are there."""
        return arrays if self.packed is None else UnpackOnRead(self.packed, arrays, cotangents)

    def pull(self, needs_grad: Sequence[bool], residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Gradients of all inputs, by `backward`, from cotangents of all outputs."""
        __tracebackhide__ = True
        call, saved, layer = self.call, self.saved, self.call.layer
        cotangents = [c if has else None for c, has in zip(cotangents, self.has_tangent, strict=True)]
        if all(c is None for c in cotangents):
            return [None] * len(call.arguments.avals)
        conjugate = _conjugated if layer.complex_convention == "paddle" else list
        given = saved.outputs.cotangents(conjugate(cotangents), saved.materialize, layer._torch_convention)
        arrays = residuals if isinstance(residuals, (list, tuple)) else ()  # others are unpacked only if they are read
        with self._with_hidden_values(residuals):
            ctx = self._context(self._needs_input_grad(needs_grad), residuals, saved.saved)
            attributes = Attributes([(f"ctx.{name}", value) for name, value in vars(ctx).items()], arrays, layer)
            result = self._run_backward(ctx, given, cotangents)
            attributes.check(call.name, "backward", result)
        needed = call.arguments.can_get_gradient(needs_grad)
        return conjugate(match_gradients(result, call.arguments, needed, layer, saved.perturbed_is_exact))

    def _run_backward(self, ctx: PyLayerContext, given: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        __tracebackhide__ = True
        call, saved, layer = self.call, self.saved, self.call.layer
        # In a first derivative in eager mode `jax.custom_vjp` is faster, and each user context compiles its operations
        # anew.
        is_staged = is_staging(include_outer=True)
        may_be_transposed = is_staged or is_differentiating()
        backward = watching_sums(call, call.backward_that_checks_closures()) if is_staged else layer.backward
        try:
            with (
                in_backward(True) if may_be_transposed else null_context,
                call.staged_scope("backward") if is_staged else null_context,
            ):
                return backward(ctx, *given)
        except jax.errors.UnexpectedTracerError as error:
            if names := call.names_closed_over_by_backward():
                raise call.closed_over_by_backward_error(names) from error
            add_note(error, call.name, "backward")
            raise
        except Exception as error:
            if misfit := backward_arity_error(error, call.name, layer.backward, (ctx, *given), saved.outputs):
                raise misfit from error
            where = "" if saved.materialize else missing_cotangents(error, saved.outputs, cotangents)
            add_note(error, call.name, "backward", where)
            raise

    def push(self, needs_grad: Sequence[bool], residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Tangents of the outputs that can have one, by the `jvp` of the class, from tangents of all inputs."""
        __tracebackhide__ = True
        call, saved = self.call, self.saved
        tensors = saved.saved if saved.saved_for_jvp is None else saved.saved_for_jvp
        given = argument_tangents(call.arguments, tangents, saved.materialize)
        jvp = call.layer._jvp_method()
        with self._with_hidden_values(residuals):
            ctx = self._context(self._needs_input_grad(needs_grad), residuals, tensors)
            try:
                with call.scope("jvp"):
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
        return saved.needs_grad if saved.read_needs_input_grad else self.call.arguments.can_get_gradient(needs_grad)

    def second_derivative_error(self) -> Exception | None:
        """The error for a derivative of the transposed `backward`, if the class forbids it."""
        make_error = second_derivative_error_of(self.call.layer.backward)
        return None if make_error is None else make_error()

    def _with_hidden_values(self, residuals: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """A block in which objects on the context hold the tensors of this run: NOTE [hidden tensors]."""
        if not self.saved.hidden:
            return null_context
        _, places, trees = zip(*self.saved.hidden, strict=True)
        return with_values(places, [tree.restore(residuals) for tree in trees])

    def _context(self, needs_grad: list[bool], residuals: Sequence[Any], tensors: Any) -> PyLayerContext:
        def restore(value: Any) -> Any:
            return value.restore(residuals) if isinstance(value, SavedTree) else copy_container(value)

        return backward_context(
            self.call.layer._context,
            self.call.name,
            lambda: self.call.arguments.needs(needs_grad),
            lambda: restore(tensors),
            {name: restore(value) for name, value in self.saved.attributes.items()},
        )


def _conjugated(values: Sequence[Any]) -> list[Any]:
    return [jnp.conj(x) if x is not None and jnp.iscomplexobj(x) else x for x in values]
