"""The linear maps of a layer: the derivatives of its outputs and of other tensors that `forward` computes and saves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._call import LayerCall
from ._context import Kept
from ._errors import NotLinearError, once_differentiable_error
from ._jax.jaxprs import evaluate_part, stage
from ._jax.linearity import transpose_jaxpr
from ._jax.masks import merge, scatter, select
from ._jax.rule_function import LinearMap
from ._jax.types import tangent_type, zeros_of
from ._messages import add_note

Values = list[Any]


class LayerMap(LinearMap):
    """The derivative of a layer: residuals, tangents of inputs in mask `needs` -> tangents of differentiable outputs.

    Let B be the pullback (the layer's `backward`, linear in the cotangents c), and r the residuals. The map is the
    transpose of B,

        c . (B^T(r) t)  =  B(r)(c) . t        for all tangents t and cotangents c,

    or the `jvp` of the class, if the class defines `jvp`. Reverse mode transposes the map, which gives B again. Thus
    reverse mode just calls `backward`, which need not be linear. Only forward mode evaluates B^T, and needs a linear B.
    """

    nonlinearity = "a layer whose saved tensors depend on them"

    def __init__(
        self, call: LayerCall, kept: Kept, n_residuals: int, needs: Sequence[bool], packed: Any = None
    ) -> None:
        self.call, self.kept, self.n_residuals, self.packed = call, kept, n_residuals, packed
        self.needs = list(needs)  # one bool per input: whether the input has a tangent
        self.name = call.name
        self.types = [tangent_type(t) for t in select(kept.outputs.types, kept.outputs.has_tangent)]

    def gradients(self, residuals: Sequence[Any], cotangents: Sequence[Any], is_transposed: bool = False) -> Values:
        """Return one gradient per input from one cotangent per output."""
        __tracebackhide__ = True
        unpacked = self._unpacked(residuals, cotangents)
        return self.call.run_backward(self.kept, unpacked, self.needs, cotangents, is_transposed)

    def pull(self, residuals: Sequence[Any], cotangents: Sequence[Any], is_transposed: bool = False) -> Values:
        __tracebackhide__ = True
        full = scatter(cotangents, self.kept.outputs.has_tangent)
        return select(self.gradients(residuals, full, is_transposed), self.needs)

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        if self.call.layer._jvp_method() is not None:
            unpacked, given = self._unpacked(residuals, ()), scatter(tangents, self.needs)
            pushed = self.call.run_jvp(self.kept, unpacked, self.needs, given)
        else:
            pushed = self._push_by_transposing(residuals, tangents)
        return [zeros_of(a) if t is None else t for a, t in zip(self.types, pushed, strict=True)]

    def _push_by_transposing(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        name = self.call.name

        def nonzero_gradients(*cotangents: Any) -> tuple[Values, list[bool]]:
            __tracebackhide__ = True
            gradients = self.pull(residuals, cotangents, is_transposed=True)
            nonzero = [g is not None for g in gradients]
            return select(gradients, nonzero), nonzero

        try:
            jaxpr, consts, nonzero = stage(nonzero_gradients, self.types, f"backward of {name}")
            args, given = [*consts, *[None] * len(self.types)], select(tangents, nonzero)
            return transpose_jaxpr(f"{name}.backward", jaxpr, args, given, "its cotangents")[len(consts) :]
        except Exception as error:
            # Without forward mode, this is a second derivative, and the error about second derivatives has priority.
            if not self.call.layer.forward_mode:
                self.check_derivative()
            if getattr(error, "__notes__", None):  # a method of the user raised the error
                raise
            message = next(iter(str(error).splitlines()), "")
            if not isinstance(error, NotLinearError):
                message = f"{name}.backward cannot be transposed by JAX ({type(error).__name__}: {message})."
            raise NotLinearError(
                f"{message} Forward mode, and forward over reverse as in jax.hessian, transpose a backward that is "
                f"linear in its cotangents. Give {name} a static jvp(ctx, *tangents), or use reverse mode: jax.grad, "
                "jax.jacrev, jax.jacrev(jax.grad(f))."
            ) from error

    def check_derivative(self) -> None:
        __tracebackhide__ = True
        # JAX transposes the undecorated `backward`, which does not raise the error of @once_differentiable.
        if self.call.layer._jvp_method() is None and (error := once_differentiable_error(self.call.layer)) is not None:
            raise error

    def _unpacked(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        if self.packed is None:
            return residuals
        n = self.packed.n_arrays
        return _Unpacked(self.packed.unpack(residuals[:n], cotangents), self.kept.n_saved, residuals[n:])


class _Unpacked(Sequence[Any]):
    """The residuals of a layer; the first `n_packed` residuals are unpacked when they are read."""

    def __init__(self, packed: Sequence[Any], n_packed: int, rest: Sequence[Any]) -> None:
        self.packed, self.n_packed, self.rest = packed, n_packed, rest

    def __len__(self) -> int:
        return self.n_packed + len(self.rest)

    def __getitem__(self, i: Any) -> Any:
        return self.packed[i] if i < self.n_packed else self.rest[i - self.n_packed]


class CodeMap(LinearMap):
    """The derivative of part of a jaxpr: values of the variables `given`, nonzero tangents -> tangents of `wanted`.

    The map is the derivative of the saved tensors that are neither inputs nor outputs of `forward`. A first derivative
    calls neither `push` nor `pull`, so code that JAX can differentiate only in one mode has a first derivative too.
    """

    nonlinearity = "the code of a forward whose values depend on them"

    def __init__(self, name: str, jaxpr: Any, given: list[Any], nonzero: list[bool], wanted: list[Any]) -> None:
        self.name, self.jaxpr, self.given, self.nonzero, self.wanted = name, jaxpr, given, nonzero, wanted
        self.n_residuals = len(given)
        self.types = [tangent_type(v.aval) for v in wanted]

    def _code(self, residuals: Sequence[Any], wanted: list[Any]) -> tuple[Callable[..., Values], Values]:
        def code(*moving: Any) -> Values:
            known = dict(zip(self.given, merge(self.nonzero, moving, residuals), strict=True))
            return evaluate_part(self.jaxpr, known, wanted)

        return code, select(residuals, self.nonzero)

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        code, moving = self._code(residuals, self.wanted)
        with self._noting_errors():
            return list(jax.jvp(code, moving, list(tangents))[1])

    def pull(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        used = [c is not None for c in cotangents]
        code, moving = self._code(residuals, select(self.wanted, used))
        with self._noting_errors():
            return list(jax.vjp(code, *moving)[1](select(cotangents, used)))

    @contextlib.contextmanager
    def _noting_errors(self) -> Any:
        try:
            yield
        except Exception as error:
            add_note(error, self.name, "forward")
            raise
