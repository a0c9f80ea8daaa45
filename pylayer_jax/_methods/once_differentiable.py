"""`once_differentiable`: a `backward` that must not be differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from pylayer_jax._trees import Static, split

from .context import PyLayerContext


class OnceDifferentiableError(RuntimeError):
    """A second derivative goes through a decorated `backward`."""


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `backward` to say that its own derivative is not defined.

    For a `backward` in host code, or one whose derivative would be wrong. Put it below `@staticmethod`.

    Raises:
        RuntimeError: if a second derivative goes through the decorated `backward`.
    """
    if isinstance(backward, staticmethod):
        return staticmethod(once_differentiable(backward.__func__))

    def second_derivative_error() -> OnceDifferentiableError:
        return OnceDifferentiableError(
            f"{backward.__qualname__} is marked @once_differentiable, but a second derivative goes through it. "
            "Remove the decorator if backward is made of differentiable operations."
        )

    @functools.wraps(backward)
    def guarded(ctx: PyLayerContext, *cotangents: Any) -> Any:
        # Every value that the result can depend on goes in as an argument, so that no derivative can bypass the rule.
        tensors, skeleton = split((ctx._contents(), cotangents))

        @jax.custom_jvp
        def run(tensors: list[Any]) -> tuple[list[Any], Static]:
            contents, given = skeleton.fill(tensors)
            values, result_skeleton = split(backward(ctx._with_contents(contents), *given))
            return values, Static(result_skeleton)

        @run.defjvp
        def refuse(primals: Any, tangents: Any) -> Any:
            del primals, tangents
            raise second_derivative_error()

        del refuse
        values, result_skeleton = run(tensors)
        return result_skeleton.value.fill(values)

    guarded.second_derivative_error = second_derivative_error  # pyright: ignore[reportAttributeAccessIssue]
    return guarded


def second_derivative_error_of(backward: Callable[..., Any]) -> Callable[[], OnceDifferentiableError] | None:
    """Makes the error for a second derivative through a decorated `backward`; None for any other `backward`."""
    return getattr(backward, "second_derivative_error", None)
