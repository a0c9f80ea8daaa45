"""Whether forward mode agrees with reverse mode, for a layer and for its gradients.

Let J be the derivative of the outputs. Reverse mode gives J^T w for cotangents w, and forward mode gives J t for
tangents t. Both therefore give the same number for any w and t:

    w . (J t)  =  (J^T w) . t

If t is a unit vector, this number is one entry of the gradient J^T w. For complex arrays the real parts are equal.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._compare import Case, Tolerance, exact, first_line, noise_of
from ._internals import NEEDS_VALUES, NoForwardModeError, NotDerivableError, OnceDifferentiableError
from ._subject import Cases, Subject
from ._tensor_function import TensorFunction, scaled

__tracebackhide__ = True  # pytest hides the frames of this module

_MOST_ENTRIES = 200  # of the gradients; larger ones are compared at this many random entries
_NUMBER = "the derivative along a random direction"


def forward_mode(subject: Subject) -> Cases:
    pairing = _Pairing(subject, "by jax.jvp")
    try:
        tangents = pairing.output_tangents
    except TypeError as error:
        if not _is_refusal(error):
            raise
        return f"there is none: {_first_sentence(error)}"
    yield from pairing.sums()
    beside = ""
    if subject.reference is not None:
        try:
            expected = _Pairing(subject, "", subject.reference).jvp(pairing.tangents)
            yield pairing.case(" by jax.jvp", tangents, expected, "by the reference")
            beside = ", and the reference"
        except TypeError as error:
            if not _is_refusal(error):
                raise
    yield from pairing.under_jit()
    yield pairing.under_vmap()
    return f"matches reverse mode at {len(pairing.indices)} entries, also under jit and vmap{beside}"


def forward_over_reverse(subject: Subject) -> Cases:
    pairing = _Pairing(subject.second, "by jax.jvp of the gradients")
    try:
        _ = pairing.output_tangents
    except (TypeError, RuntimeError) as error:
        if not isinstance(error, (NotDerivableError, OnceDifferentiableError)) and not _is_refusal(error):
            raise
        return f"there is none: {_first_sentence(error)}"
    yield from pairing.sums()
    over_forward = yield from _forward_over_forward(subject)
    try:
        yield from pairing.under_jit()
    except NEEDS_VALUES:  # jit cannot run such a layer in reverse mode either
        return f"matches reverse over reverse along a random direction; not under jit, as it needs values{over_forward}"
    return f"matches reverse over reverse at {len(pairing.indices)} entries, also under jit{over_forward}"


def _forward_over_forward(subject: Subject) -> Cases:
    # Along any direction, the derivative of w . (J t) equals the derivative of (J^T w) . t.
    pairing, values = _Pairing(subject, "by jax.jvp of jax.jvp"), subject.function.values
    outer = subject.random_tangents(1)
    try:
        _ = pairing.output_tangents  # where there is none, jvp of it may fail otherwise
        forward = jax.jvp(lambda *values: pairing.jvp(pairing.tangents, values), values, outer)[1]
    except TypeError as error:
        if not _is_refusal(error):
            raise
        return ""
    reverse = jax.jvp(lambda *values: subject.function.with_values(values).grads(subject.cotangents), values, outer)[1]
    yield pairing.case_of_numbers(forward, (reverse, pairing.tangents), "by jax.jvp of the gradients")
    return "; so does forward over forward"


class _Pairing:
    """A function with cotangents w, gradients J^T w, and random tangents t."""

    def __init__(self, subject: Subject, how: str, function: TensorFunction | None = None) -> None:
        self.subject, self.how = subject, how
        self.function = subject.function if function is None else function
        # If tangents and cotangents were the same numbers, an antisymmetric error in J would not show.
        self.tangents = subject.random_tangents()
        sizes = [x.size for x in self.function.values]
        entries = np.arange(sum(sizes))
        if len(entries) > _MOST_ENTRIES:
            entries = np.sort(subject.random(2).choice(entries, _MOST_ENTRIES, replace=False))
        # [entry, array]: the flat index of the entry in the array; out of range if the entry is in another array.
        self.indices = entries[:, None] - np.cumsum([0, *sizes[:-1]])
        self.compiled = jax.jit(self._jvp_and_entries)

    def jvp(self, tangents: Sequence[Any], values: Sequence[Any] | None = None) -> list[Any]:
        """Return J t."""
        return jax.jvp(self._outputs, list(self.function.values if values is None else values), list(tangents))[1]

    def _outputs(self, *values: Any) -> list[Any]:
        returned = self.function.outputs(values)
        return [returned[k] for k in self.subject.cotangents]

    # -- cases ----------------------------------------------------------------------------------------

    def sums(self) -> Iterator[Case]:
        """Yield w . (J t) beside (J^T w) . t, for tangents of all arrays, and of each array alone."""
        values, count = self.function.values, len(self.tangents)
        yield self.case_of_numbers(self.output_tangents, (self.subject.grads, self.tangents), "by reverse mode")
        for j in range(count) if count > 1 else ():

            def outputs(value: Any, j: int = j) -> list[Any]:
                return self._outputs(*values[:j], value, *values[j + 1 :])

            forward = jax.jvp(outputs, [values[j]], [self.tangents[j]])[1]
            reverse = self.subject.grads[j : j + 1], self.tangents[j : j + 1]
            label = f" of {self.function.names[j]} alone"
            yield self.case_of_numbers(forward, reverse, "by reverse mode", label)

    def case_of_numbers(
        self, forward: Sequence[Any], reverse: tuple[Sequence[Any], Sequence[Any]], source: str, label: str = ""
    ) -> Case:
        """Return w . (J t) beside another inner product; the sizes of their terms set the tolerance."""
        w, options, epsilon = self.subject.cotangents, self.subject.options, self.subject.epsilon
        (got, size), (expected, other_size) = _inner_product(w.values(), forward), _inner_product(*reverse)
        rtol = epsilon**0.5 if options.rtol is None else options.rtol
        noise = rtol * (size + other_size)
        noise += sum(self.tolerance.noise[name] * float(np.sum(np.abs(exact(w[k])))) for k, name in self.names.items())
        tolerance = dataclasses.replace(self.tolerance, noise={_NUMBER: noise})
        return Case(f"{label} {self.how}", {_NUMBER: got}, {_NUMBER: expected}, source, tolerance)

    def case(self, label: str, got: Sequence[Any], expected: Sequence[Any], source: str) -> Case:
        return Case(label, self._named(got), self._named(expected), source, self.tolerance)

    def under_jit(self) -> Iterator[Case]:
        """Yield J t under jit beside J t in eager mode, and w . (J t) for unit vectors t beside J^T w."""
        under_jit, (real, imaginary) = self._run(self.function.values, self.tangents)
        yield self.case(f" {self.how}, under jit", under_jit, self.output_tangents, "in eager mode")
        for (name, gradient), indices in zip(self.subject.gradients.items(), self.indices.T, strict=True):
            inside = (indices >= 0) & (indices < gradient.size)
            expected = exact(gradient)
            got = np.full_like(expected, np.nan)
            entries = real - 1j * imaginary if np.iscomplexobj(expected) else real
            got.reshape(-1)[indices[inside]] = entries[inside]
            measured = np.zeros(gradient.size, bool)
            measured[indices[inside]] = True
            expected = np.where(measured.reshape(expected.shape), expected, np.nan)
            yield self.subject.case(f" {self.how}", {name: got}, {name: expected}, "by reverse mode")

    def under_vmap(self) -> Case:
        """Return J t of a batch beside J t of each example."""
        values = [jnp.stack([scaled(1 - 0.1 * i, x) for i in range(3)]) for x in self.function.values]
        tangents = [jnp.stack([scaled(1 + 0.1 * i, t) for i in range(3)]) for t in self.tangents]
        got = jax.jit(lambda values, tangents: jax.jvp(jax.vmap(self._outputs), values, tangents)[1])(values, tangents)
        each = [self._run([x[i] for x in values], [t[i] for t in tangents])[0] for i in range(3)]
        return self.case(" by jax.jvp of vmap", got, list(map(jnp.stack, zip(*each, strict=True))), "of each example")

    # -- numbers --------------------------------------------------------------------------------------

    @functools.cached_property
    def output_tangents(self) -> list[Any]:
        return self.jvp(self.tangents)

    @property
    def names(self) -> dict[int, str]:
        return {k: f"the tangent of output {k}" for k in self.subject.cotangents}

    @functools.cached_property
    def tolerance(self) -> Tolerance:
        otherwise = self._named(self.jvp(self.tangents, self.function.rounded_otherwise().values))
        noise = noise_of(self._named(self.output_tangents), otherwise, self.subject.epsilon)
        return dataclasses.replace(self.subject.tolerance, noise=noise)

    def _named(self, output_tangents: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.names.values(), output_tangents, strict=True))

    def _run(self, values: list[Any], tangents: list[Any]) -> tuple[list[Any], tuple[np.ndarray, np.ndarray]]:
        output_tangents, (real, imaginary) = self.compiled(
            values, tangents, self.subject.cotangents, jnp.asarray(self.indices, jnp.int32)
        )
        return output_tangents, (np.asarray(real), np.asarray(imaginary))

    def _jvp_and_entries(
        self, values: list[Any], tangents: list[Any], cotangents: dict[int, Any], indices: Any
    ) -> tuple[list[Any], tuple[Any, Any]]:
        def along(entry: Any, unit: complex) -> Any:
            unit_tangents = [_unit_tangent(x, entry[j], unit) for j, x in enumerate(values)]
            pairs = zip(cotangents.values(), self.jvp(unit_tangents, values), strict=True)
            return sum(jnp.sum(_widest(w) * _widest(t)).real for w, t in pairs)

        def derivatives(entry: Any) -> tuple[Any, Any]:
            real = along(entry, 1)
            return real, along(entry, 1j) if any(map(jnp.iscomplexobj, values)) else jnp.zeros_like(real)

        return self.jvp(tangents, values), jax.lax.map(derivatives, indices)


def _unit_tangent(like: Any, index: Any, unit: complex) -> Any:
    # A real array has no imaginary direction: its tangent is then zero.
    value = unit if jnp.iscomplexobj(like) else np.real(unit)
    one = jnp.where(jnp.arange(like.size) == index, 1.0, 0.0).reshape(like.shape)
    return one.astype(like.dtype) * jnp.asarray(value, like.dtype)


def _widest(x: Any) -> Any:
    # float64 or complex128; float32 or complex64 if jax_enable_x64 is off.
    return x.astype(jnp.result_type(complex if jnp.iscomplexobj(x) else float))


def _inner_product(some: Iterable[Any], others: Iterable[Any]) -> tuple[np.ndarray, float]:
    """Return the sum of the products, and the sum of their absolute values."""
    products = [exact(a) * exact(b) for a, b in zip(some, others, strict=True)]
    return np.asarray(sum(np.sum(p).real for p in products)), sum(float(np.sum(np.abs(p))) for p in products)


def _is_refusal(error: Exception) -> bool:
    """Return whether an error says that a layer, or a `jax.custom_vjp` function, has no forward mode."""
    return isinstance(error, NoForwardModeError) or "forward-mode autodiff (jvp) to a custom_vjp" in str(error)


def _first_sentence(error: Exception) -> str:
    return first_line(error).split(". ")[0]
