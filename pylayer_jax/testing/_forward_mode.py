"""Whether forward mode agrees with reverse mode, for a layer and for its gradients.

With J the derivative of the outputs, reverse mode gives J^T w for cotangents w, and forward mode J t for tangents t, so
that both give one number for any pair of them:

    w . (J t)  =  (J^T w) . t

For t a unit vector this is one entry of J^T w, the gradient. For complex arrays it holds of the real parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.names import NEEDS_VALUES, is_missing_forward_mode

from ._comparison import MismatchError, exact, first_line
from ._flat_function import FlatFunction, random_like
from ._layer_under_test import LayerUnderTest

_LIMIT = 200  # entries of the gradients that are compared one by one


def forward_mode(layer: LayerUnderTest) -> str:
    pairing = _Pairing(layer, layer.flat, layer.cotangents, layer.gradients)
    try:
        moved = pairing.eager("jax.jvp")
    except TypeError as error:
        if (without := _without_forward_mode(error)) is None:
            raise
        return f"there is none: {without} defines backward alone"
    beside = _beside_reference(layer, pairing, moved)
    places = pairing.staged(moved, "jax.jvp", layer.gradient_names)
    pairing.of_vmap()
    return f"as reverse mode at {places} places, under jit, of vmap{beside}"


def forward_over_reverse(layer: LayerUnderTest) -> str:
    flat = layer.flat.grad_function(layer.cotangents)
    cotangents = flat.random_cotangents(layer.gradients, layer.random)
    try:
        pairing = _Pairing(layer, flat, cotangents, flat.grads(cotangents))
        moved = pairing.eager("jax.jvp of the gradients")
    except (TypeError, RuntimeError) as error:
        if any(refusal in str(error) for refusal in _REFUSALS):
            return f"there is none: {first_line(error).split('. ')[0]}"
        raise
    names = [f"reverse over reverse for {name}" for name in flat.names]
    beside = _forward_over_forward(layer)
    try:
        places = pairing.staged(moved, "jax.jvp of the gradients", names)
    except NEEDS_VALUES:  # of a layer that jit cannot run either
        return f"as reverse over reverse along a random direction; it needs concrete values, so not under jit{beside}"
    return f"as reverse over reverse at {places} places, under jit{beside}"


def _forward_over_forward(layer: LayerUnderTest) -> str:
    # Along u, w . (J t) changes as (J^T w) . t does.
    flat, cotangents = layer.flat, layer.cotangents
    inner, outer = _tangents(layer, flat), _tangents(layer, flat, 1)
    pairing = _Pairing(layer, flat, cotangents, [])

    def moved(*values: Any) -> list[Any]:
        return jax.jvp(pairing.outputs, values, tuple(inner))[1]

    try:
        forward = jax.jvp(moved, flat.values, outer)[1]
    except TypeError as error:
        if _without_forward_mode(error) is None:
            raise
        return ""
    reverse = jax.jvp(lambda *values: flat.with_values(values).grads(cotangents), flat.values, outer)[1]
    pairing.agree(
        _paired(cotangents.values(), forward), _paired(reverse, inner), "jax.jvp of jax.jvp", "jax.jvp of the gradients"
    )
    return "; so is forward over forward"


# What the library says of a layer without forward mode, and where it cannot have a second derivative in forward mode.
_NO_RULE = " has no rule for forward-mode differentiation"
_REFUSALS = (
    _NO_RULE,
    "is not linear in its cotangents",
    "cannot be transposed by JAX",
    "needs forward mode of",
    "is marked @once_differentiable",
)


def _without_forward_mode(error: TypeError) -> str | None:
    """What the error says has no forward mode; None for any other error."""
    if is_missing_forward_mode(error):
        return "a jax.custom_vjp function"
    return first_line(error).split(_NO_RULE)[0] if _NO_RULE in str(error) else None


def _beside_reference(layer: LayerUnderTest, pairing: _Pairing, moved: Sequence[Any]) -> str:
    if layer.reference is None:
        return ""
    try:
        expected = _Pairing(layer, layer.reference, layer.cotangents, []).pushed(pairing.tangents)[1]
    except TypeError as error:
        if _without_forward_mode(error) is None:
            raise
        return ""
    comparison = dataclasses.replace(layer.comparison, right="the reference")
    comparison.of_all(moved, expected, pairing.names, "by jax.jvp")
    return ", and as of the reference"


class _Pairing:
    """A function with its cotangents and gradients, and tangents to pair them with."""

    def __init__(
        self, layer: LayerUnderTest, flat: FlatFunction, cotangents: dict[int, Any], gradients: Sequence[Any]
    ) -> None:
        self.comparison = layer.comparison
        self.flat = flat
        self.cotangents = cotangents
        self.gradients = gradients
        self.tangents = _tangents(layer, flat)
        self.names = [f"the tangent of output {k}" for k in cotangents]
        sizes = [x.size for x in flat.values]
        entries = np.arange(sum(sizes))
        if len(entries) > _LIMIT:
            entries = np.sort(layer.random.choice(entries, _LIMIT, replace=False))
        # Per chosen entry, and per array, where it is within the array; out of range where it is in another one.
        self.places = entries[:, None] - np.cumsum([0, *sizes[:-1]])
        self.compiled = jax.jit(self._along_entries)

    def outputs(self, *values: Any) -> list[Any]:
        returned = self.flat.outputs(values)
        return [returned[k] for k in self.cotangents]

    def pushed(self, tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return jax.jvp(self.outputs, self.flat.values, list(tangents))

    def eager(self, label: str) -> list[Any]:
        """The tangents of the outputs, once they agree with the gradients in sum."""
        _, moved = self.pushed(self.tangents)
        self.agree(
            _paired(self.cotangents.values(), moved), _paired(self.gradients, self.tangents), label, "reverse mode"
        )
        return moved

    def agree(self, found: tuple[float, float], expected: tuple[float, float], label: str, right: str) -> None:
        """Compare two sums, each with the sum of the sizes of its terms."""
        rtol = (
            self.flat.epsilon(list(self.cotangents.values())) ** 0.5
            if self.comparison.rtol is None
            else self.comparison.rtol
        )
        tolerance = (self.comparison.atol or 0.0) + rtol * (found[1] + expected[1])
        if not abs(found[0] - expected[0]) <= tolerance:
            raise MismatchError(
                f"along a random direction the derivative is {found[0]:.6g} by {label}, but {expected[0]:.6g} by "
                f"{right} (tolerance {tolerance:.1g})."
            )

    def staged(self, moved: Sequence[Any], label: str, names: Sequence[str]) -> int:
        """Compare the tangents under jit with those of eager mode, and the gradients with tangents, entry by entry."""
        under_jit, found = self._run(self.flat.values, self.tangents)
        self.comparison.of_all(under_jit, moved, self.names, f"by {label}, under jit")
        comparison = dataclasses.replace(self.comparison, right=label)
        for gradient, name, place in zip(self.gradients, names, self.places.T, strict=True):
            expected = np.array(gradient)
            chosen = (place >= 0) & (place < expected.size)
            real, imaginary = (np.asarray(part)[chosen] for part in found)
            entries = real - 1j * imaginary if np.iscomplexobj(expected) else real
            expected.reshape(-1)[place[chosen]] = entries.astype(expected.dtype)
            comparison.of_arrays(gradient, jnp.asarray(expected), name)
        return len(self.places)

    def of_vmap(self) -> None:
        """Compare the tangents of a batch with those of each example."""
        count = range(3)
        batch = [jnp.stack([x * jnp.asarray(1 - 0.1 * i, x.dtype) for i in count]) for x in self.flat.values]
        moving = [jnp.stack([t * jnp.asarray(1 + 0.1 * i, t.dtype) for i in count]) for t in self.tangents]
        moved = jax.jit(lambda batch, moving: jax.jvp(jax.vmap(self.outputs), batch, moving)[1])(batch, moving)
        each = [self._run([x[i] for x in batch], [t[i] for t in moving])[0] for i in count]
        expected = [jnp.stack(ts) for ts in zip(*each, strict=True)]
        dataclasses.replace(self.comparison, right="each example").of_all(
            moved, expected, self.names, "by jax.jvp of vmap"
        )

    def _run(self, values: list[Any], tangents: list[Any]) -> tuple[list[Any], tuple[Any, Any]]:
        return self.compiled(values, tangents, self.cotangents, jnp.asarray(self.places, jnp.int32))

    def _along_entries(
        self, values: list[Any], tangents: list[Any], cotangents: dict[int, Any], places: Any
    ) -> tuple[list[Any], tuple[Any, Any]]:
        def push(tangents: list[Any]) -> list[Any]:
            return jax.jvp(self.outputs, values, tangents)[1]

        def along(place: Any, unit: complex) -> Any:
            moved = push([_unit(x, place[j], unit) for j, x in enumerate(values)])
            return sum(jnp.sum(_wide(w) * _wide(t)).real for w, t in zip(cotangents.values(), moved, strict=True))

        def entry(place: Any) -> tuple[Any, Any]:
            real = along(place, 1)
            return real, along(place, 1j) if any(map(jnp.iscomplexobj, values)) else jnp.zeros_like(real)

        return push(tangents), jax.lax.map(entry, places)


def _tangents(layer: LayerUnderTest, flat: FlatFunction, stream: int = 0) -> list[Any]:
    # Not the numbers of the cotangents, with which an antisymmetric error would vanish.
    rng = layer.random.spawn(2)[stream]
    return [random_like(x, rng) for x in flat.values]


def _unit(like: Any, place: Any, unit: complex) -> Any:
    # An imaginary direction is none for a real array.
    value = unit if jnp.iscomplexobj(like) else np.real(unit)
    one = jnp.where(jnp.arange(like.size) == place, 1.0, 0.0).reshape(like.shape)
    return one.astype(like.dtype) * jnp.asarray(value, like.dtype)


def _wide(x: Any) -> Any:
    return x.astype(jnp.result_type(complex if jnp.iscomplexobj(x) else float))


def _paired(some: Iterable[Any], others: Iterable[Any]) -> tuple[float, float]:
    """The sum of the products, and of their sizes."""
    products = [exact(a) * exact(b) for a, b in zip(some, others, strict=True)]
    return sum(float(np.sum(p).real) for p in products), sum(float(np.sum(np.abs(p))) for p in products)
