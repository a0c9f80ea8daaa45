"""Errors of derivatives that do not exist, as types: the test kit tells them from other errors."""

from __future__ import annotations

import dataclasses


class NoForwardModeError(TypeError):
    """A layer has no rule for forward mode."""

    def __init__(self, layer: str) -> None:
        super().__init__(
            f"{layer} has no rule for forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize): it "
            "defines backward alone. Add forward_mode = True to the class, which derives the rule from a backward that "
            "is linear in its cotangents; or a static jvp(ctx, *tangents). Or use reverse mode: jax.vjp, jax.grad, "
            "jax.jacrev."
        )
        self.layer = layer


class NotDerivableError(TypeError):
    """Forward mode, or forward mode over reverse mode, cannot be derived from the methods of a layer."""


class NoKernelRuleError(NotDerivableError):
    """A second derivative meets a kernel, for which JAX has no rule."""


_NOT_MEANT = "Decorate backward with @once_differentiable if second derivatives are not meant"


@dataclasses.dataclass(frozen=True)
class KernelInBackward:
    """Makes the error for a kernel that `backward` of a layer runs."""

    layer: str
    allows_forward_mode: bool = False  # whether the class has a jvp, so that forward mode does not transpose backward

    def __call__(self, kernel: str) -> NoKernelRuleError:
        return NoKernelRuleError(
            f"{self.layer}.backward runs the kernel {kernel}, which has no derivative rule, but a second derivative "
            f"goes through it. {_NOT_MEANT}; otherwise {self._as_layer()}."
        )

    def not_transposable(self, kernel: str, forward_mode: bool) -> NoKernelRuleError:
        """The error for forward mode, which transposes `backward`."""
        start = f"{self.layer}.backward runs the kernel {kernel}, which JAX cannot transpose. "
        if forward_mode:
            return NoKernelRuleError(
                f"{start}forward_mode = True derives the tangent map by transposing backward. Give {self.layer} a "
                "static jvp(ctx, *tangents) instead, or use reverse mode: jax.vjp, jax.grad, jax.jacrev."
            )
        return NoKernelRuleError(
            f"{start}Forward mode over reverse (jax.hessian, jax.jvp of jax.grad) needs that. {_NOT_MEANT}; otherwise "
            f"{self._as_layer()}, and use reverse over reverse: jax.jacrev(jax.grad(f))."
        )

    def _as_layer(self) -> str:
        return (
            "write this kernel as a layer of its own, with its derivative as the backward of that layer, and apply it "
            f"in {self.layer}.backward"
        )


@dataclasses.dataclass(frozen=True)
class KernelInForward:
    """Makes the error for a kernel that computed a tensor which `forward` of a layer saved."""

    layer: str
    allows_forward_mode: bool = True

    def __call__(self, kernel: str) -> NoKernelRuleError:
        return NoKernelRuleError(
            f"{self.layer}.forward saved a tensor that the kernel {kernel} computed, and that is neither an input nor "
            "an output. A second derivative goes through this kernel, which has no derivative rule. "
            f"{_NOT_MEANT}; otherwise return this tensor as one more output, which has the rule of the layer, or "
            "save inputs and outputs only, and compute it from them in backward."
        )
