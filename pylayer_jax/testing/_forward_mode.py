"""Whether forward mode agrees with reverse mode, for a layer and for its gradients.

Let J be the derivative of the outputs. Reverse mode gives J^T w for cotangents w, and forward mode gives J t for
tangents t. Both therefore give the same number for any w and t:

    w . (J t)  =  (J^T w) . t

If t is a unit vector, this number is one entry of the gradient J^T w. For complex arrays the real parts are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._autodiff.transpose_backward import NoForwardModeError, NotDerivableError
from pylayer_jax._jax.custom_vjp import custom_function_in
from pylayer_jax._jax.tracers import NEEDS_VALUES
from pylayer_jax._methods.once_differentiable import OnceDifferentiableError

from ._comparison import MismatchError, exact, first_line, rounded_otherwise, rounding_noise
from ._flat_function import FlatFunction, random_like
from ._layer_under_test import LayerUnderTest

__tracebackhide__ = True  # pytest hides the frames of this module

_MAX_ENTRIES = 200  # of the gradients; larger ones are compared at this many random entries


def forward_mode(layer: LayerUnderTest) -> str:
    pairing = _Pairing(layer, layer.flat, layer.cotangents, layer.gradients)
    try:
        output_tangents = pairing.compare_sums("jax.jvp")
    except TypeError as error:
        if (refusing := _name_without_forward_mode(error, layer.flat)) is None:
            raise
        return f"there is none: {refusing} defines backward alone"
    beside = _compare_with_reference(layer, pairing, output_tangents)
    names = [f"the gradient of {name}" for name in layer.flat.names]
    count = pairing.compare_under_jit(output_tangents, "jax.jvp", names)
    pairing.compare_under_vmap()
    return f"as reverse mode at {count} places, under jit, of vmap{beside}"


def forward_over_reverse(layer: LayerUnderTest) -> str:
    flat = layer.flat.grad_function(layer.cotangents)
    cotangents = flat.random_cotangents(layer.gradients, layer.random)
    try:
        pairing = _Pairing(layer, flat, cotangents, flat.grads(cotangents))
        output_tangents = pairing.compare_sums("jax.jvp of the gradients")
    except (TypeError, RuntimeError) as error:
        if isinstance(error, _REFUSALS):
            return f"there is none: {first_line(error).split('. ')[0]}"
        raise
    names = [f"reverse over reverse for {name}" for name in flat.names]
    beside = _forward_over_forward(layer)
    try:
        count = pairing.compare_under_jit(output_tangents, "jax.jvp of the gradients", names)
    except NEEDS_VALUES:  # jit cannot run such a layer in reverse mode either
        return f"as reverse over reverse along a random direction; it needs concrete values, so not under jit{beside}"
    return f"as reverse over reverse at {count} places, under jit{beside}"


def _forward_over_forward(layer: LayerUnderTest) -> str:
    # Along any direction, the derivative of w . (J t) equals the derivative of (J^T w) . t.
    flat, cotangents = layer.flat, layer.cotangents
    inner, outer = _random_tangents(layer, flat), _random_tangents(layer, flat, 1)
    pairing = _Pairing(layer, flat, cotangents, [])

    def output_tangents(*values: Any) -> list[Any]:
        return jax.jvp(pairing.outputs, values, tuple(inner))[1]

    try:
        output_tangents(*flat.values)  # where there is none, jvp of it may fail otherwise
        forward = jax.jvp(output_tangents, flat.values, outer)[1]
    except TypeError as error:
        if _name_without_forward_mode(error, flat) is None:
            raise
        return ""
    reverse = jax.jvp(lambda *values: flat.with_values(values).grads(cotangents), flat.values, outer)[1]
    pairing.compare_numbers(
        _inner_product(cotangents.values(), forward),
        _inner_product(reverse, inner),
        "jax.jvp of jax.jvp",
        "jax.jvp of the gradients",
    )
    return "; so is forward over forward"


def _compare_with_reference(layer: LayerUnderTest, pairing: _Pairing, output_tangents: Sequence[Any]) -> str:
    if layer.reference is None:
        return ""
    try:
        expected = _Pairing(layer, layer.reference, layer.cotangents, []).jvp(pairing.tangents)
    except TypeError as error:
        if _name_without_forward_mode(error, layer.reference) is None:
            raise
        return ""
    comparison = layer.comparison("the reference")
    comparison.of_all(output_tangents, expected, pairing.names, " by jax.jvp", pairing.noise(output_tangents))
    return ", and as of the reference"


class _Pairing:
    """A function with cotangents w, gradients J^T w, and random tangents t."""

    def __init__(
        self, layer: LayerUnderTest, flat: FlatFunction, cotangents: dict[int, Any], gradients: Sequence[Any]
    ) -> None:
        self.comparison = layer.comparison()
        self.flat = flat
        self.cotangents = cotangents
        self.gradients = gradients
        self.tangents = _random_tangents(layer, flat)
        self.names = [f"the tangent of output {k}" for k in cotangents]
        sizes = [x.size for x in flat.values]
        entries = np.arange(sum(sizes))
        if len(entries) > _MAX_ENTRIES:
            entries = np.sort(layer.random.choice(entries, _MAX_ENTRIES, replace=False))
        # [entry, array]: the flat index of the entry in the array; out of range if the entry is in another array.
        self.indices = entries[:, None] - np.cumsum([0, *sizes[:-1]])
        self.compiled = jax.jit(self._jvp_and_entries)

    def outputs(self, *values: Any) -> list[Any]:
        returned = self.flat.outputs(values)
        return [returned[k] for k in self.cotangents]

    def jvp(self, tangents: Sequence[Any], values: Sequence[Any] | None = None) -> list[Any]:
        return jax.jvp(self.outputs, list(self.flat.values if values is None else values), list(tangents))[1]

    def noise(self, output_tangents: Sequence[Any]) -> list[float]:
        return rounding_noise(output_tangents, self.jvp(self.tangents, rounded_otherwise(self.flat.values)))

    def compare_sums(self, label: str) -> list[Any]:
        """Compare w . (J t) with (J^T w) . t in eager mode, and return J t."""
        output_tangents = self.jvp(self.tangents)
        found = _inner_product(self.cotangents.values(), output_tangents)
        sizes = [float(np.sum(np.abs(exact(w)))) for w in self.cotangents.values()]
        noise = float(np.dot(sizes, self.noise(output_tangents)))
        self.compare_numbers(found, _inner_product(self.gradients, self.tangents), label, "reverse mode", noise)
        return output_tangents

    def compare_numbers(
        self, found: tuple[float, float], expected: tuple[float, float], label: str, right: str, noise: float = 0.0
    ) -> None:
        """Compare two inner products; the size of their terms sets the tolerance."""
        rtol, atol = self.comparison.rtol, self.comparison.atol
        rtol = self.flat.epsilon(list(self.cotangents.values())) ** 0.5 if rtol is None else rtol
        tolerance = (noise if atol is None else atol) + rtol * (found[1] + expected[1])
        if not abs(found[0] - expected[0]) <= tolerance:
            raise MismatchError(
                f"along a random direction the derivative is {found[0]:.6g} by {label}, but {expected[0]:.6g} by "
                f"{right} (tolerance {tolerance:.1g})."
            )

    def compare_under_jit(self, output_tangents: Sequence[Any], label: str, names: Sequence[str]) -> int:
        """Compare J t under jit with J t in eager mode, and J^T w with w . (J t) for unit vectors t.

        Returns:
            The number of entries of J^T w that were compared.
        """
        under_jit, derivatives = self._run(self.flat.values, self.tangents)
        noise = self.noise(output_tangents)
        self.comparison.of_all(under_jit, output_tangents, self.names, f" by {label}, under jit", noise)
        rounded = self.flat.with_values(rounded_otherwise(self.flat.values))
        noise = rounding_noise(self.gradients, rounded.grads(self.cotangents))
        comparison = dataclasses.replace(self.comparison, right=label)
        for i, (gradient, name, indices) in enumerate(zip(self.gradients, names, self.indices.T, strict=True)):
            expected = np.array(gradient)
            inside = (indices >= 0) & (indices < expected.size)
            real, imaginary = (np.asarray(part)[inside] for part in derivatives)
            entries = real - 1j * imaginary if np.iscomplexobj(expected) else real
            expected.reshape(-1)[indices[inside]] = entries.astype(expected.dtype)
            comparison.of_arrays(gradient, jnp.asarray(expected), name, noise[i])
        return len(self.indices)

    def compare_under_vmap(self) -> None:
        """Compare J t of a batch with J t of each example."""
        count = range(3)
        values = [jnp.stack([x * jnp.asarray(1 - 0.1 * i, x.dtype) for i in count]) for x in self.flat.values]
        tangents = [jnp.stack([t * jnp.asarray(1 + 0.1 * i, t.dtype) for i in count]) for t in self.tangents]
        batched = jax.jit(lambda values, tangents: jax.jvp(jax.vmap(self.outputs), values, tangents)[1])
        each = [self._run([x[i] for x in values], [t[i] for t in tangents])[0] for i in count]
        expected = [jnp.stack(ts) for ts in zip(*each, strict=True)]
        comparison = dataclasses.replace(self.comparison, right="each example")
        noise = self.noise(self.jvp(self.tangents))
        comparison.of_all(batched(values, tangents), expected, self.names, " by jax.jvp of vmap", noise)

    def _run(self, values: list[Any], tangents: list[Any]) -> tuple[list[Any], tuple[Any, Any]]:
        return self.compiled(values, tangents, self.cotangents, jnp.asarray(self.indices, jnp.int32))

    def _jvp_and_entries(
        self, values: list[Any], tangents: list[Any], cotangents: dict[int, Any], indices: Any
    ) -> tuple[list[Any], tuple[Any, Any]]:
        def jvp(tangents: list[Any]) -> list[Any]:
            return jax.jvp(self.outputs, values, tangents)[1]

        def along(entry: Any, unit: complex) -> Any:
            output_tangents = jvp([_unit_tangent(x, entry[j], unit) for j, x in enumerate(values)])
            pairs = zip(cotangents.values(), output_tangents, strict=True)
            return sum(jnp.sum(_widest(w) * _widest(t)).real for w, t in pairs)

        def derivatives(entry: Any) -> tuple[Any, Any]:
            real = along(entry, 1)
            return real, along(entry, 1j) if any(map(jnp.iscomplexobj, values)) else jnp.zeros_like(real)

        return jvp(tangents), jax.lax.map(derivatives, indices)


def _random_tangents(layer: LayerUnderTest, flat: FlatFunction, stream: int = 0) -> list[Any]:
    # If tangents and cotangents were the same numbers, an antisymmetric error in J would not show.
    rng = layer.random.spawn(2)[stream]
    return [random_like(x, rng) for x in flat.values]


def _unit_tangent(like: Any, index: Any, unit: complex) -> Any:
    # A real array has no imaginary direction: its tangent is then zero.
    value = unit if jnp.iscomplexobj(like) else np.real(unit)
    one = jnp.where(jnp.arange(like.size) == index, 1.0, 0.0).reshape(like.shape)
    return one.astype(like.dtype) * jnp.asarray(value, like.dtype)


def _widest(x: Any) -> Any:
    # float64 or complex128; float32 or complex64 if jax_enable_x64 is off.
    return x.astype(jnp.result_type(complex if jnp.iscomplexobj(x) else float))


def _inner_product(some: Iterable[Any], others: Iterable[Any]) -> tuple[float, float]:
    """The sum of the products, and the sum of their absolute values."""
    products = [exact(a) * exact(b) for a, b in zip(some, others, strict=True)]
    return sum(float(np.sum(p).real) for p in products), sum(float(np.sum(np.abs(p))) for p in products)


# -- refusals -------------------------------------------------------------------------------------


def _name_without_forward_mode(error: TypeError, flat: FlatFunction) -> str | None:
    """The name of the layer that has no forward mode; None if this is another error."""
    if isinstance(error, NoForwardModeError):
        return error.layer
    try:
        jaxpr = jax.make_jaxpr(flat.outputs)(flat.values)
    except NEEDS_VALUES:
        return None
    # JAX has no type for this error.
    return "a jax.custom_vjp function" if custom_function_in(jaxpr.jaxpr) else None


_REFUSALS = (NoForwardModeError, NotDerivableError, OnceDifferentiableError)
