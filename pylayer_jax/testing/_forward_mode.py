"""Whether forward mode agrees with reverse mode, for a layer and for its gradients.

Let J be the derivative of the outputs. Reverse mode gives J^T w for cotangents w, and forward mode gives J t for
tangents t. Both therefore give the same number for any w and t:

    w . (J t)  =  (J^T w) . t

If t is a unit vector, this number is one entry of the gradient J^T w. For complex arrays the real parts are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._compare import Case, exact, first_line, noise_of
from ._gradients import Derivative, directional_cases
from ._internals import NEEDS_VALUES, NoForwardModeError, NotDerivableError, OnceDifferentiableError
from ._subject import Cases, Subject
from ._tensor_function import placed, scaled

__tracebackhide__ = True  # pytest hides the frames of this module


def forward_mode(subject: Subject) -> Cases:
    forward = _Forward(subject, "by jax.jvp")
    if refusal := forward.refusal():
        return f"there is none: {refusal}"
    yield from forward.along_random_directions()
    yield from forward.under_jit()
    yield forward.under_vmap()
    return "matches reverse mode, entry by entry, also under jit and vmap"


def forward_over_reverse(subject: Subject) -> Cases:
    forward = _Forward(subject.derivative, "by jax.jvp of the gradients")
    if refusal := forward.refusal(NotDerivableError, OnceDifferentiableError):
        return f"there is none: {refusal}"
    over_forward = yield from _forward_over_forward(subject)
    try:
        yield from forward.under_jit()
    except NEEDS_VALUES:  # jit cannot run such a layer in reverse mode either
        yield from forward.along_random_directions()
        return f"matches reverse over reverse; not under jit, since it needs concrete values{over_forward}"
    return f"matches reverse over reverse, entry by entry, also under jit{over_forward}"


def _forward_over_forward(subject: Subject) -> Cases:
    # Along any direction, the derivative of w . (J t) equals the derivative of (J^T w) . t.
    forward, values, outer = _Forward(subject, ""), subject.function.values, subject.random_tangents(1)
    if forward.refusal():
        return ""
    twice = jax.jvp(lambda *values: forward.jvp(forward.tangents, values), values, outer)[1]
    grads = jax.jvp(lambda *values: subject.function.with_values(values).grads(subject.cotangents), values, outer)[1]
    (got, size), (expected, _) = _inner_product(forward.weights, twice), _inner_product(grads, forward.tangents)
    name = "the second derivative along random directions"
    tolerance = dataclasses.replace(subject.tolerance, noise={name: subject.rtol * size})
    source = "by jax.jvp of the gradients"
    yield Case(" by jax.jvp of jax.jvp", {name: np.asarray(got)}, {name: np.asarray(expected)}, source, tolerance)
    return "; so does forward over forward"


class _Forward:
    """The map from tangents t to J t, of a subject with cotangents w."""

    def __init__(self, subject: Subject, how: str) -> None:
        self.subject, self.function, self.how = subject, subject.function, how
        self.weights = list(subject.cotangents.values())
        # If tangents and cotangents were the same numbers, an antisymmetric error in J would not show.
        self.tangents = subject.random_tangents()

    def refusal(self, *kinds: type[Exception]) -> str:
        """Return why there is no forward mode, by an error of one of these kinds too; empty if there is."""
        try:
            self.jvp(self.tangents)
        except (TypeError, RuntimeError) as error:
            # JAX has no type for its error about a `jax.custom_vjp` function.
            if isinstance(error, (NoForwardModeError, *kinds)) or "forward-mode autodiff (jvp) to a custom_vjp" in str(
                error
            ):
                return first_line(error).split(". ")[0]
            raise
        return ""

    def jvp(self, tangents: Sequence[Any], values: Sequence[Any] | None = None) -> list[Any]:
        """Return J t."""
        return jax.jvp(self._outputs, list(self.function.values if values is None else values), list(tangents))[1]

    def _outputs(self, *values: Any) -> list[Any]:
        returned = self.function.outputs(values)
        return [returned[k] for k in self.subject.cotangents]

    def along_random_directions(self) -> Iterator[Case]:
        """Yield the gradient of each array along a random direction, in eager mode; nothing else has a tangent."""
        values = self.function.values

        def jvp_of_one(j: int, tangent: Any) -> list[Any]:
            return jax.jvp(lambda x: self._outputs(*values[:j], x, *values[j + 1 :]), [values[j]], [tangent])[1]

        yield from directional_cases(self.subject, self._along(jvp_of_one), 0, self.how)

    def under_jit(self) -> Iterator[Case]:
        """Yield the gradients entry by entry."""
        values, jitted = self.function.values, jax.jit(lambda values, tangents: self.jvp(tangents, values))
        zeros = list(map(jnp.zeros_like, values))
        along = self._along(lambda j, tangent: jitted(values, [*zeros[:j], tangent, *zeros[j + 1 :]]))
        yield from directional_cases(self.subject, along, self.subject.options.limit, f"{self.how}, under jit")

    def under_vmap(self) -> Case:
        """Return J t of a batch beside J t of each example."""
        values = [jnp.stack([scaled(1 - 0.1 * i, x) for i in range(3)]) for x in self.function.values]
        tangents = [jnp.stack([scaled(1 + 0.1 * i, t) for i in range(3)]) for t in self.tangents]
        got = jax.jit(lambda values, tangents: jax.jvp(jax.vmap(self._outputs), values, tangents)[1])(values, tangents)
        each = [self.jvp([t[i] for t in tangents], [x[i] for x in values]) for i in range(3)]
        rounded = self.jvp(self.tangents, self.function.rounded_otherwise().values)

        def named(arrays: Sequence[Any]) -> dict[str, Any]:
            return {f"the tangent of output {k}": t for k, t in zip(self.subject.cotangents, arrays, strict=True)}

        noise = noise_of(named(self.jvp(self.tangents)), named(rounded), self.subject.epsilon)
        tolerance = dataclasses.replace(self.subject.tolerance, noise=noise)
        expected = named(list(map(jnp.stack, zip(*each, strict=True))))
        return Case(" by jax.jvp of vmap", named(got), expected, "for each example", tolerance)

    def _along(self, jvp: Callable[[int, Any], list[Any]]) -> Derivative:
        """Return w . (J t) as a function of the direction of one array."""

        def along(j: int, direction: np.ndarray) -> tuple[float, float, np.ndarray]:
            tangent = placed(self.function.values[j], direction)
            derivative, size = _inner_product(self.weights, jvp(j, tangent))
            return derivative, 4 * self.subject.epsilon * size, exact(tangent)

        return along


def _inner_product(some: Sequence[Any], others: Sequence[Any]) -> tuple[float, float]:
    """Return the sum of the products, and the sum of their absolute values."""
    products = [exact(a) * exact(b) for a, b in zip(some, others, strict=True)]
    return sum(float(np.sum(p).real) for p in products), sum(float(np.sum(np.abs(p))) for p in products)
