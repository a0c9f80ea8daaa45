"""Exceptions that several modules of the package raise."""

from __future__ import annotations

from typing import Any

from ._jax.linearity import NotLinearError

__all__ = [
    "HostBackwardError",
    "NoForwardModeError",
    "NotLinearError",
    "OnceDifferentiableError",
    "once_differentiable_error",
    "second_derivative_error",
]


class OnceDifferentiableError(RuntimeError):
    """Raised if a second derivative goes through a `backward` that is decorated with @once_differentiable."""


class HostBackwardError(OnceDifferentiableError):
    """Raised if a second derivative goes through a `backward` that runs on NumPy arrays."""

    def __init__(self, layer: str) -> None:
        super().__init__(
            f"{layer}.backward gets NumPy arrays (host = True), so it has no derivative, but a second derivative goes "
            "through it. Set host = 'forward' on the class, and write backward with jax.numpy; it may apply layers."
        )


def once_differentiable_error(layer: Any) -> OnceDifferentiableError | None:
    """Return the second-derivative error of a class whose `backward` has no derivative, None for other classes."""
    has_none = hasattr(layer.backward, "second_derivative_error") or layer.host is True
    return second_derivative_error(layer) if has_none else None


def second_derivative_error(layer: Any) -> OnceDifferentiableError:
    """Return the error for a `backward` that is decorated with @once_differentiable, or that is NumPy code."""
    make_error = getattr(layer.backward, "second_derivative_error", None)
    return HostBackwardError(layer.__qualname__) if make_error is None else make_error()


class NoForwardModeError(TypeError):
    """Raised if forward mode is used on a layer that has no rule for forward mode."""

    def __init__(self, layer: Any) -> None:
        name = layer.__qualname__
        advice = (
            "Add forward_mode = True to the class, which derives the rule from a backward that is linear in its "
            "cotangents; or a static jvp(ctx, *tangents). Or use"
        )
        self.way_out = f"set forward_mode = True on {name}"  # for `check_layer`
        if layer.host:
            advice, self.way_out = "A layer of NumPy cannot have one. Use", f"{name} is a layer of NumPy"
        super().__init__(
            f"{name} has no rule for forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize): it defines "
            f"backward alone. {advice} reverse mode: jax.vjp, jax.grad, jax.jacrev."
        )
