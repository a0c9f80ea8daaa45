"""Kernels: operations that JAX runs as they are, and of which it does not know the derivative in reverse mode.

JAX differentiates a kernel by a kernel that computes values and tangents at once. Reverse mode needs the values without
the tangents, and fails, in code of JAX's own that no longer knows which layer ran the kernel. Therefore a trace that
stands before the current one meets the kernels that a function runs, and marks their operands.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from .identities import drop_operands
from .imports import Primitive, ShapedArray, eval_jaxpr, partial_eval, set_current_trace
from .jaxprs import changed_inside, computing_only, dependence, inner_jaxprs, is_literal, stage
from .masks import merge, one_hot, select
from .primitives import register
from .tracers import PassThroughTrace, current_trace, is_differentiated
from .types import has_tangent, typeof


class Refusal(Protocol):
    """Makes the error, from the name of the kernel. It is a parameter of equations, and therefore hashable."""

    @property
    def allows_forward_mode(self) -> bool: ...

    def __call__(self, kernel: str) -> Exception: ...


KERNEL = "pallas_call"  # the primitive


def kernels_may_run() -> bool:
    """Whether this process has imported what makes kernels; otherwise nobody needs to look for them."""
    return "jax.experimental.pallas" in sys.modules


def first_kernel(jaxpr: Any) -> str | None:
    """The name of the first kernel that a jaxpr runs, or one in the parameters of its equations; None if none does."""
    return next((name for e in jaxpr.eqns if (name := _kernel_in(e.primitive.name, e.params)) is not None), None)


def _kernel_in(primitive: str, params: dict[str, Any]) -> str | None:
    if primitive == KERNEL:
        debug_info = getattr(params.get("jaxpr"), "debug_info", None)
        return f"{params.get('name') or getattr(debug_info, 'func_name', 'kernel')} ({KERNEL})"
    if primitive.startswith("custom_") or primitive == "call_hi_primitive":
        return None  # it has a rule of its own
    return next((name for j in inner_jaxprs(params) if (name := first_kernel(j)) is not None), None)


def _only_runs_a_kernel(primitive: str, params: dict[str, Any]) -> bool:
    # `pallas_call` itself is a jitted function.
    if primitive == KERNEL:
        return True
    equations = [e for jaxpr in inner_jaxprs(params) for e in jaxpr.eqns]
    return bool(equations) and all(_only_runs_a_kernel(e.primitive.name, e.params) for e in equations)


def kernels_of_outputs(jaxpr: Any, inputs: Sequence[bool]) -> list[str | None]:
    """For each output, the first kernel that computes it from the inputs that are set; None if none does."""
    if first_kernel(jaxpr) is None:
        return [None] * len(jaxpr.outvars)
    depends, count = dependence(jaxpr, inputs), len(jaxpr.outvars)
    return [first_kernel(computing_only(jaxpr, one_hot(i, count))) if d else None for i, d in enumerate(depends)]


def has_forward_mode(jaxpr: Any, inputs: Sequence[bool]) -> bool:
    """Whether JAX has the rule, in forward mode, of the kernels that a jaxpr itself runs.

    That rule fails unless all operands of a kernel have tangents, and often not before the jaxpr is batched or
    compiled, where nobody knows the layer.
    """
    moving = {v for v, is_set in zip(jaxpr.invars, inputs, strict=True) if is_set}
    for equation in jaxpr.eqns:
        moves = [not is_literal(v) and v in moving for v in equation.invars]
        if _kernel_in(equation.primitive.name, equation.params) is not None and not all(moves):
            return False
        if any(moves):
            moving.update(v for v in equation.outvars if isinstance(v.aval, ShapedArray) and has_tangent(v.aval))
    return True


# -- kernel_operands: operands -> operands; kernel_tangents: their tangents -> the same --------------
#
# The error is raised where JAX takes tangents apart from values, as reverse mode does. Forward mode runs both in one
# kernel, and is allowed if the refusal says so.

kernel_operands_p = Primitive("kernel_operands")
kernel_tangents_p = Primitive("kernel_tangents")


def _operands_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    nonzero = [t is not None for t in tangents]
    if any(nonzero) and not params["refusal"].allows_forward_mode:
        raise params["refusal"](params["kernel"])
    marked = iter(kernel_tangents_p.bind(*select(tangents, nonzero), **params) if any(nonzero) else ())
    return kernel_operands_p.bind(*primals, **params), [next(marked) if is_set else None for is_set in nonzero]


def _evaluate_tangents(trace: Any, *tracers: Any, **params: Any) -> Any:
    if not all(t.is_known() for t in tracers):
        raise params["refusal"](params["kernel"])
    return trace.default_process_primitive(kernel_tangents_p, tracers, params)


def _evaluate_tangents_of_remat(_: Any, unknown: Sequence[bool], __: Any, equation: Any) -> Any:
    if any(unknown):
        raise equation.params["refusal"](equation.params["kernel"])
    same = [False] * len(unknown)
    return equation, equation, same, same, []


def _register_identity(primitive: Primitive, jvp: Callable[..., Any], transpose: Callable[..., Any]) -> None:
    register(
        primitive,
        evaluate=lambda *xs, **_: list(xs),
        abstract=lambda *types, **_: (list(types), frozenset()),
        jvp=jvp,
        transpose=transpose,
        batch=lambda _, args, dims, **params: (primitive.bind(*args, **params), list(dims)),
        lower=lambda _, *args, **__: list(args),
        drop_unused=drop_operands,
    )


def _is_linear(primitive: Primitive) -> Callable[..., Any]:
    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
        nonzero = [t is not None for t in tangents]
        moved = iter(primitive.bind(*select(tangents, nonzero), **params) if any(nonzero) else ())
        return primitive.bind(*primals, **params), [next(moved) if is_set else None for is_set in nonzero]

    return jvp


def _same_cotangents(cotangents: Sequence[Any], *_: Any, **__: Any) -> list[Any]:
    return list(cotangents)


_register_identity(kernel_operands_p, _operands_jvp, _same_cotangents)
_register_identity(kernel_tangents_p, _is_linear(kernel_tangents_p), _same_cotangents)
partial_eval.custom_partial_eval_rules[kernel_tangents_p] = _evaluate_tangents
partial_eval.partial_eval_jaxpr_custom_rules[kernel_tangents_p] = _evaluate_tangents_of_remat


# -- the trace --------------------------------------------------------------------------------------


class KernelsTrace(PassThroughTrace):
    """Marks the operands of kernels, also of those in jitted functions, loops and branches."""

    __slots__ = ("refusal",)

    def __init__(self, parent_trace: Any, refusal: Refusal) -> None:
        super().__init__(parent_trace)
        self.refusal = refusal

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        kernel = _kernel_in(primitive.name, params)
        if kernel is None:
            return self.parent_trace.process_primitive(primitive, tracers, params)
        with set_current_trace(self.parent_trace):
            try:
                if primitive.name == KERNEL:
                    return primitive.bind(*self._marked_operands(kernel, tracers), **params)
                inside = {name: changed_inside(self._marked, x) for name, x in params.items()}
                return primitive.bind(*tracers, **inside)
            except Exception as error:
                # A rule of JAX fails if it is asked for a derivative of the kernel that it does not have.
                refused = self.refusal(kernel)
                is_of_kernel = any(map(is_differentiated, tracers)) and _only_runs_a_kernel(primitive.name, params)
                if isinstance(error, type(refused)) or not is_of_kernel:
                    raise
                raise refused from error

    def _marked_operands(self, kernel: str, operands: Sequence[Any]) -> list[Any]:
        moves = [isinstance(t := typeof(x), ShapedArray) and has_tangent(t) for x in operands]
        if not any(moves):
            return list(operands)
        marked = kernel_operands_p.bind(*select(operands, moves), kernel=kernel, refusal=self.refusal)
        return merge(moves, marked, operands)

    def _marked(self, jaxpr: Any) -> Any:
        known = _marked_jaxprs.setdefault(jaxpr, {})
        if self.refusal not in known:
            known[self.refusal] = self._with_marks(jaxpr)
        return known[self.refusal] or jaxpr

    def _with_marks(self, jaxpr: Any) -> Any:
        """The jaxpr with marks, or None if it has no kernels."""
        if first_kernel(jaxpr) is None or jaxpr.constvars:
            return None

        def evaluate(*args: Any) -> tuple[list[Any], None]:
            with naming_kernels(self.refusal):
                return eval_jaxpr(jaxpr, (), *args), None

        marked, closed_over, _ = stage(evaluate, [v.aval for v in jaxpr.invars], "kernels")
        same = [v.aval for v in marked.outvars] == [v.aval for v in jaxpr.outvars]
        return marked if same and not closed_over else None


# JAX compiles a jitted function once for the same jaxpr.
_marked_jaxprs: weakref.WeakKeyDictionary[Any, dict[Refusal, Any]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def naming_kernels(refusal: Refusal) -> Generator[None]:
    """Where JAX cannot differentiate a kernel that runs in here, raise what `refusal` returns for its name."""
    with set_current_trace(KernelsTrace(current_trace(), refusal)):
        yield
