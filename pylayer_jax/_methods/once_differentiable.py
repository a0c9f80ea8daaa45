"""`once_differentiable`: a backward that must not be differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from pylayer_jax._trees.partition import split

from .context import PyLayerContext


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `backward` to say that its own derivative is not defined.

    For a `backward` in host code, or one whose derivative would be wrong. Put it below `@staticmethod`.

    Raises:
        RuntimeError: where a second derivative goes through the decorated `backward`.
    """
    if isinstance(backward, staticmethod):
        return staticmethod(once_differentiable(backward.__func__))

    def refusal() -> RuntimeError:
        return RuntimeError(
            f"{backward.__qualname__} is marked @once_differentiable, but a second derivative goes through it. "
            "Remove the decorator if backward is made of differentiable operations."
        )

    @functools.wraps(backward)
    def guarded(ctx: PyLayerContext, *cotangents: Any) -> Any:
        # All that the result can depend on goes in as an argument, so that no derivative passes by.
        tensors, skeleton = split((ctx._contents(), cotangents))
        result_skeleton: list[Any] = []

        @jax.custom_jvp
        def run(tensors: list[Any]) -> list[Any]:
            contents, given = skeleton.fill(tensors)
            values, rest = split(backward(ctx._with_contents(contents), *given))
            result_skeleton[:] = [rest]
            return values

        @run.defjvp
        def refuse(primals: Any, tangents: Any) -> Any:
            del primals, tangents
            raise refusal()

        del refuse
        values = run(tensors)
        return result_skeleton[0].fill(values)

    guarded.refusal = refusal  # pyright: ignore[reportAttributeAccessIssue]
    return guarded


def refusal_of(backward: Callable[..., Any]) -> Callable[[], RuntimeError] | None:
    """What a second derivative through a decorated `backward` raises; None for any other."""
    return getattr(backward, "refusal", None)
