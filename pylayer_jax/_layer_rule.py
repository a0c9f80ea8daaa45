"""A layer as a function with its rule, and the `jax.custom_vjp` function in front of it.

NOTE [orders]
`jax.custom_vjp` differentiates the body of its fwd rule the second time. Here the body binds a function with its rule
(`_jax/rule_function.py`), so that an outer differentiation finds the rule of the layer again:

    front(application, x)                         one jax.custom_vjp function per class
      fwd   y, intermediates = rule_function(x)   `forward`, staged to a jaxpr with a recording context
            residuals = positions of [x, y, intermediates]
      bwd   `backward`, from the residuals and the cotangents

    rule of rule_function                         what an outer differentiation, or forward mode, goes through
            y, intermediates = rule_function(x)   the same function again: that is "every order"
            tangents of y             = linear map of (residuals; tangents of x), whose transpose is `backward`
            tangents of intermediates = those of the code of `forward` that leads to them from x and y

A residual is a position. An input keeps its own derivative, also where it is returned. An output carries the rule; of
one object that is returned twice, the last position counts. An output that is marked non-differentiable is a constant.
Any other tensor is an intermediate, and has the derivative of the equations that lead to it.

`forward` is staged once per application, so that all runs of a fwd rule keep the same. Where it runs on concrete values
in eager mode it is not staged, and sees numbers. The front does not stand where JAX allows no custom_vjp function: for
a class with forward mode, within a `backward` (which may be transposed), and for the others that `_layer.py` names.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from . import _hooks
from ._call import LayerCall, Run
from ._context import Kept
from ._errors import NotLinearError, OnceDifferentiableError
from ._jax.identities import forbid_derivative
from ._jax.imports import DebugInfo, SymbolicZero, checkpoint_name, set_current_trace
from ._jax.jaxprs import dependence, evaluate_part, is_literal, stage, variables_read
from ._jax.linearity import transpose_jaxpr
from ._jax.masks import merge, scatter, select
from ._jax.primitives import vmap_over
from ._jax.rule_function import LinearMap, RuleFunction, apply, apply_linear
from ._jax.tracers import (
    NEEDS_VALUES,
    is_batched,
    is_differentiated,
    is_tracer,
    trace_of_primals,
)
from ._jax.types import as_arrays, explicit_sharding, has_tangent, is_ref, tangent_type, typeof, zeros_of
from ._messages import add_note, source_of

Values = list[Any]


# -- linear maps ---------------------------------------------------------------------------------------------


class LayerMap(LinearMap):
    """residuals, tangents of the inputs in the mask `needs` -> tangents of the outputs that can have one.

    With a pullback B (the layer's `backward`, linear in the cotangents c) and residuals r, it is the transpose of B,

        c . (B^T(r) t)  =  B(r)(c) . t        for all tangents t and cotangents c,

    unless the class gives the map itself, as its `jvp`. Reverse mode transposes the map, which gives B back: `backward`
    is simply called, so it may be anything. Only forward mode evaluates the map; then B itself has to be linear.
    """

    nonlinearity = "a layer whose saved tensors depend on them"

    def __init__(
        self, call: LayerCall, kept: Kept, n_residuals: int, needs: Sequence[bool], packed: Any = None
    ) -> None:
        self.call, self.kept, self.n_residuals, self.packed = call, kept, n_residuals, packed
        self.needs = list(needs)  # which inputs have a tangent
        self.name = call.name
        self.types = [tangent_type(t) for t in select(kept.outputs.types, kept.outputs.has_tangent)]

    def gradients(self, residuals: Sequence[Any], cotangents: Sequence[Any], is_transposed: bool = False) -> Values:
        """Return gradients of all inputs from cotangents of all outputs."""
        __tracebackhide__ = True
        unpacked = self._unpacked(residuals, cotangents)
        return self.call.run_backward(self.kept, unpacked, self.needs, cotangents, is_transposed)

    def pull(self, residuals: Sequence[Any], cotangents: Sequence[Any], is_transposed: bool = False) -> Values:
        __tracebackhide__ = True
        full = scatter(cotangents, self.kept.outputs.has_tangent)
        return select(self.gradients(residuals, full, is_transposed), self.needs)

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        call, layer = self.call, self.call.layer
        if layer._jvp_method() is not None:
            given = scatter(tangents, self.needs)
            pushed = call.run_jvp(self.kept, self._unpacked(residuals, ()), self.needs, given)
            return [zeros_of(a) if t is None else t for a, t in zip(self.types, pushed, strict=True)]

        def nonzero_gradients(*cotangents: Any) -> tuple[Values, list[bool]]:
            __tracebackhide__ = True
            gradients = self.pull(residuals, cotangents, is_transposed=True)
            nonzero = [g is not None for g in gradients]
            return select(gradients, nonzero), nonzero

        try:
            jaxpr, consts, nonzero = stage(nonzero_gradients, self.types, f"backward of {call.name}")
            args = [*consts, *[None] * len(self.types)]
            given = select(tangents, nonzero)
            found = transpose_jaxpr(f"{call.name}.backward", jaxpr, args, given, "its cotangents")
        except NEEDS_VALUES as error:
            self._check_declared()
            error.add_note(
                f"Forward mode transposes {call.name}.backward, which is traced for that and sees no numbers. Write it "
                f"with jax.numpy, or give {call.name} a static jvp(ctx, *tangents), which sees them."
            )
            raise
        except Exception as error:
            self._check_declared()
            if getattr(error, "__notes__", None):  # it happened in a method of the user
                raise
            raise self._not_linear_error(error) from error
        pushed = found[len(consts) :]
        return [zeros_of(a) if t is None else t for a, t in zip(self.types, pushed, strict=True)]

    def _check_declared(self) -> None:
        __tracebackhide__ = True
        # Without forward mode this is a second derivative, and its own error comes before any other.
        if not self.call.layer.forward_mode:
            self.check_derivative()

    def _not_linear_error(self, error: Exception) -> NotLinearError:
        name = self.call.name
        message = next(iter(str(error).splitlines()), "")
        if not isinstance(error, NotLinearError):
            message = f"{name}.backward cannot be transposed by JAX ({type(error).__name__}: {message})."
        if self.call.layer.forward_mode:
            advice = (
                f"forward_mode = True derives the tangent map by transposing a linear backward. Give {name} a static "
                "jvp(ctx, *tangents) instead, or use reverse mode: jax.vjp, jax.grad, jax.jacrev."
            )
        else:
            advice = (
                "Forward mode over reverse (jax.hessian, jax.jvp of jax.grad) transposes a linear backward. Use "
                "reverse over reverse: jax.jacrev(jax.grad(f)); or give the layer a static jvp(ctx, *tangents)."
            )
        return NotLinearError(f"{message} {advice}")

    def check_derivative(self) -> None:
        __tracebackhide__ = True
        # A transposed `backward` does not run as it was written, and cannot raise this itself.
        if self.call.layer._jvp_method() is None and (error := once_differentiable_error(self.call.layer)) is not None:
            raise error

    def _unpacked(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        if self.packed is None:
            return residuals
        n = self.packed.n_arrays
        return _Unpacked(self.packed.unpack(residuals[:n], cotangents), self.kept.n_saved, residuals[n:])


class _Unpacked(Sequence[Any]):
    """Residuals of which the first are unpacked when they are read."""

    def __init__(self, packed: Sequence[Any], n_packed: int, rest: Sequence[Any]) -> None:
        self.packed, self.n_packed, self.rest = packed, n_packed, rest

    def __len__(self) -> int:
        return self.n_packed + len(self.rest)

    def __getitem__(self, i: Any) -> Any:
        return self.packed[i] if i < self.n_packed else self.rest[i - self.n_packed]


class CodeMap(LinearMap):
    """values of variables of a jaxpr, tangents of some of them -> tangents of variables computed from them.

    Differentiates the code of `forward` for the tensors that it saved and that are neither inputs nor outputs. A first
    derivative needs neither `push` nor `pull`, so code that JAX derives in one mode only is no obstacle in the other.
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


# -- functions with their rule ---------------------------------------------------------------------------------


class StagedLayer(RuleFunction):
    """consts, inputs -> outputs, intermediates: `forward` as a jaxpr, with the derivative of the class."""

    def __init__(self, call: LayerCall, jaxpr: Any, n_consts: int, kept: Kept, positions: list[int]) -> None:
        self.call, self.kept, self.jaxpr, self.n_consts, self.positions = call, kept, jaxpr, n_consts, positions
        self.name = call.name
        self.unpacked: StagedLayer | None = None  # set if this one packs: the same function without packing
        self.n_outputs = len(kept.outputs.types)
        # Other saved tensors depend on these outputs through the rule, not through the code of `forward`.
        last = {v: i for i, v in enumerate(jaxpr.outvars[: self.n_outputs]) if not is_literal(v)}
        inputs = set(jaxpr.invars)
        self.with_rule = [i for v, i in last.items() if kept.outputs.has_tangent[i] and v not in inputs]

    def residuals(self, inputs: Sequence[Any], values: Sequence[Any]) -> Values:
        known = [*inputs, *values]
        return [known[i] for i in self.positions]

    def packing(self) -> StagedLayer:
        """Return a copy whose residuals are packed the first time that it is differentiated."""
        if self.call.pair is None:
            return self
        copied = copy.copy(self)
        copied.unpacked = self
        return copied

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        __tracebackhide__ = True
        if self.unpacked is None:
            return self.differentiate(primals, tangents, packs=False)
        return self.unpacked.differentiate(primals, tangents, _hooks.keeps_residuals(tangents))

    def differentiate(self, primals: Sequence[Any], tangents: Sequence[Any], packs: bool) -> tuple[Values, Values]:
        """Compute values and tangents; with `packs`, from residuals that are packed."""
        __tracebackhide__ = True
        n = self.n_consts
        if any(t is not None for t in tangents[:n]):
            raise self.call.closed_over_error()
        values = apply(self, primals)
        needs = [t is not None for t in tangents[n:]]
        run = Run(self.kept, values[: self.n_outputs], self.residuals(primals[n:], values))
        linear, outputs, residuals = differentiated(self.call, run, primals[n:], needs, packs)
        pushed = apply_linear(linear, residuals, select(tangents[n:], needs)) if linear.types else []
        of_outputs = scatter(pushed, self.kept.outputs.has_tangent)
        return [*outputs, *values[self.n_outputs :]], [
            *of_outputs,
            *self._code_tangents(primals, tangents, values, of_outputs),
        ]

    def _code_tangents(
        self, primals: Sequence[Any], tangents: Sequence[Any], values: Sequence[Any], of_outputs: Sequence[Any]
    ) -> Values:
        """Return the tangents of the intermediates."""
        results = self.jaxpr.outvars
        if len(results) == self.n_outputs:
            return []
        given = [*self.jaxpr.invars, *(results[i] for i in self.with_rule)]
        known = [*primals, *(values[i] for i in self.with_rule)]
        moving = [*tangents, *(of_outputs[i] for i in self.with_rule)]
        nonzero = [t is not None for t in moving]
        depends = dependence(self.jaxpr, select(given, nonzero))[self.n_outputs :]
        wanted = [d and has_tangent(v.aval) for d, v in zip(depends, results[self.n_outputs :], strict=True)]
        if not any(wanted):
            return [None] * len(wanted)
        targets = select(results[self.n_outputs :], wanted)
        read = variables_read(self.jaxpr, given, targets)
        given, known, moving, nonzero = (
            [x for x, v in zip(column, given, strict=True) if v in read] for column in (given, known, moving, nonzero)
        )
        code = CodeMap(self.name, self.jaxpr, given, nonzero, targets)
        return scatter(apply_linear(code, known, select(moving, nonzero)), wanted)

    def transpose(self, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        # Within the `backward` of another layer, a layer counts as the linear map that its `forward` is.
        return transpose_jaxpr(f"{self.name}.forward", self.jaxpr, args, cotangents)

    def run_batch(self, axis: Any, dims: Sequence[Any]) -> Callable[..., tuple[Values, list[Any]]]:
        if not self.call.layer._has_vmap_method() or all(d is None for d in dims):
            return super().run_batch(axis, dims)
        n = self.n_consts

        def run(*args: Any) -> tuple[Values, list[Any]]:
            __tracebackhide__ = True
            outputs = self.call.run_vmap(axis, dims[n:], args[n:])
            self.call.check_batch(axis, outputs, self.kept.outputs.types)
            results = self.jaxpr.outvars
            given = [*self.jaxpr.invars, *(results[i] for i in self.with_rule)]

            def intermediates(*known: Any) -> Values:
                return evaluate_part(self.jaxpr, dict(zip(given, known, strict=True)), results[self.n_outputs :])

            in_axes = (*dims, *(0 for _ in self.with_rule))
            found = vmap_over(axis, intermediates, in_axes, 0)(*args, *(outputs[i] for i in self.with_rule))
            values = [*outputs, *found]
            return values, [0] * len(values)

        return run


def stage_layer(call: LayerCall, tensor_types: Sequence[Any]) -> tuple[StagedLayer, Values]:
    """Stage `forward` for inputs of these types. Return the function, and the values that `forward` closes over."""
    __tracebackhide__ = True

    def forward(*inputs: Any) -> tuple[Values, tuple[Kept, list[int]]]:
        __tracebackhide__ = True
        needs = call.arguments.can_get_gradient([True] * len(inputs))
        kept, outputs, residuals = call.run_forward(inputs, needs)
        # Staged inputs are distinct objects, also where the caller passed one array twice.
        values = list(outputs)
        position = {id(x): len(inputs) + i for i, x in enumerate(outputs)}
        position |= {id(x): i for i, x in enumerate(inputs)}
        for x in residuals:
            if position.setdefault(id(x), len(inputs) + len(values)) == len(inputs) + len(values):
                values.append(x)
        return values, (kept, [position[id(x)] for x in residuals])

    jaxpr, consts, (kept, positions) = stage(forward, tensor_types, call.source)
    if any(map(is_differentiated, consts)):
        raise call.closed_over_error()
    if any(map(is_ref, consts)):
        raise TypeError(
            f"{call.name}.forward closes over a jax.Ref, which a layer cannot read or write where it is traced. Pass "
            f"the Ref as an argument: {call.name}.apply(..., ref)."
        )
    return StagedLayer(call, jaxpr, len(consts), kept, positions), consts


class EagerLayer(RuleFunction):
    """inputs -> outputs: a layer without a front in eager mode, where `forward` sees concrete values."""

    def __init__(self, call: LayerCall) -> None:
        self.call, self.name = call, call.name

    def run(self, *args: Any) -> Values:
        __tracebackhide__ = True
        return self.call.run_on_values(as_arrays(args), [False] * len(args)).outputs

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        __tracebackhide__ = True
        needs = [t is not None for t in tangents]
        packs = _hooks.keeps_residuals(tangents)
        with set_current_trace(trace_of_primals(primals)):
            primals = as_arrays(primals)  # jax.grad(f)(2.0) hands on the Python number
            run = self._run_apart(primals, needs)
        if run is None:
            staged, consts = self._staged(primals)
            n = staged.n_outputs
            values, found = staged.differentiate([*consts, *primals], [*(None for _ in consts), *tangents], packs)
            return values[:n], found[:n]
        linear, outputs, residuals = differentiated(self.call, run, primals, needs, packs)
        pushed = apply_linear(linear, residuals, select(tangents, needs)) if linear.types else []
        return outputs, scatter(pushed, run.kept.outputs.has_tangent)

    def _run_apart(self, primals: Values, needs: list[bool]) -> Run | None:
        """Run `forward` without staging it; None if it has to be staged."""
        __tracebackhide__ = True
        call, layer = self.call, self.call.layer
        if not any(map(is_tracer, primals)):
            return call.run_on_values(primals, needs)
        if layer._has_setup_context() and layer._has_vmap_method() and not any(map(is_differentiated, primals)):
            # `forward` may be host code that only the `vmap` of the class can batch. `setup_context` keeps what
            # `backward` needs, from inputs and outputs.
            values = apply(self, primals)
            assert call.skeleton is not None
            output = call.skeleton.fill(values)
            return call.record(layer._setup_with(output), primals, needs)
        return None

    def _staged(self, primals: Sequence[Any]) -> tuple[StagedLayer, Values]:
        __tracebackhide__ = True
        try:
            return stage_layer(self.call, [typeof(x) for x in primals])
        except NEEDS_VALUES as error:
            refuse_host_code(self.call, error, primals)
            raise

    def batch(self, axis: Any, dims: Sequence[Any], types: Sequence[Any]) -> tuple[RuleFunction, Values, Any]:
        __tracebackhide__ = True
        if self.call.layer._has_vmap_method() and any(d is not None for d in dims):
            return EagerBatch(self, axis, dims), [], None
        staged, consts = stage_layer(self.call, self.call.arguments.types)
        staged = staged.packing()
        batched, more, out_dims = staged.batch(axis, [*(None for _ in consts), *dims], [*map(typeof, consts), *types])
        return batched, [*more, *consts], out_dims


class EagerBatch(RuleFunction):
    """A batch of an eager layer by the `vmap` of its class, which sees concrete values."""

    def __init__(self, inner: EagerLayer, axis: Any, dims: Sequence[Any]) -> None:
        self.inner, self.axis, self.dims, self.name = inner, axis, list(dims), inner.name

    def run(self, *args: Any) -> Values:
        __tracebackhide__ = True
        call = self.inner.call
        values = call.run_vmap(self.axis, self.dims, as_arrays(args))
        with contextlib.suppress(*NEEDS_VALUES):  # of host code, the outputs for one example are not known
            expected, _ = stage_layer(LayerCall(call.layer, call.arguments), call.arguments.types)
            call.check_batch(self.axis, values, expected.kept.outputs.types)
        return values

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        __tracebackhide__ = True
        return vmap_over(self.axis, self.inner.rule, (self.dims, self.dims), 0)(list(primals), list(tangents))


# -- residuals: packed by hooks, named for checkpoints -----------------------------------------------------------


def differentiated(
    call: LayerCall, run: Run, inputs: Sequence[Any], needs: Sequence[bool], packs: bool
) -> tuple[LayerMap, Values, Values]:
    """Return the linear map of a run of `forward` on some inputs, the outputs, and the residuals of the map."""
    __tracebackhide__ = True
    kept, outputs, residuals = run
    packed, owners = None, list(range(kept.n_saved))  # owners: the tensor that each of the first arrays comes from
    if packs and call.pair is not None and kept.n_saved:
        given: Any = call.layer.saved_names if isinstance(call.layer.saved_names, tuple) else ()
        names = kept.names(len(residuals), lambda i: (given and given[i]) or f"saved[{i}]")
        packed, arrays, outputs = _hooks.pack(
            call.pair,
            residuals[: kept.n_saved],
            outputs,
            f"{call.name}, saved tensor",
            (call.layer.__name__, names),
            operands=inputs,
        )
        residuals, owners = [*arrays, *residuals[kept.n_saved :]], packed.owners
    if call.layer.saved_names:
        residuals, outputs = _named(call, kept, len(run.residuals), owners, residuals, outputs)
    return LayerMap(call, kept, len(residuals), needs, packed), outputs, residuals


def _named(
    call: LayerCall, kept: Kept, n_tensors: int, owners: Sequence[int], residuals: Values, outputs: Values
) -> tuple[Values, Values]:
    """Name the residuals for the policies of `jax.checkpoint`."""
    given, layer = call.layer.saved_names, call.layer.__name__
    n_values = len(kept.saved.skeleton.leaves) if kept.saved else 0
    if given is not True and len(given) != n_values:
        raise ValueError(
            f"{call.name}.saved_names has {len(given)} names, but forward saved {n_values} values with "
            "ctx.save_for_backward. Give one for each, None for a value without a name."
        )
    names = kept.names(n_tensors, lambda i: f"{layer}.saved[{i}]" if given is True else given[i])
    named = list(residuals)
    for i, owner in enumerate(owners):
        if names[owner] and is_tracer(residuals[i]):
            named[i] = checkpoint_name(residuals[i], names[owner])
    # A saved output goes on under its name, so that a policy which saves it does not compute it twice.
    return named, [next((y for x, y in zip(residuals, named, strict=True) if x is o), o) for o in outputs]


# -- errors ---------------------------------------------------------------------------------------------------


def once_differentiable_error(layer: Any) -> OnceDifferentiableError | None:
    """Make the error for a second derivative of a class whose `backward` is decorated; None for any other class."""
    make_error = getattr(layer.backward, "second_derivative_error", None)
    return None if make_error is None else make_error()


def refuse_host_code(call: LayerCall, error: Exception, primals: Sequence[Any]) -> None:
    """Raise the error for a second derivative of a `forward` that needs numbers, and so cannot be traced."""
    if not any(map(is_differentiated, primals)):
        return
    raise once_differentiable_error(call.layer) or TypeError(
        f"{call.name}: a second derivative traces forward, which needs concrete values ({type(error).__name__}). Write "
        "forward with jax.numpy; or call host code by jax.pure_callback, which works at every order. Decorate backward "
        "with @once_differentiable if second derivatives are not meant."
    ) from error


# -- the custom_vjp function in front of a class -------------------------------------------------------------------


class Application:
    """One application of a layer, as the first argument of the front: a pytree node without leaves."""

    __slots__ = ("call", "is_deferred", "maps", "staged")

    def __init__(self, call: LayerCall, is_deferred: bool) -> None:
        self.call = call
        # True if a jaxpr is being made: JAX may run the fwd rule later, any number of times.
        self.is_deferred = is_deferred
        self.staged: dict[tuple[Any, ...], StagedLayer] = {}  # by the types of the inputs, if it closes over nothing
        self.maps: list[LayerMap] = []  # of each run of the fwd rule

    def stage(self, tensors: Sequence[Any]) -> tuple[StagedLayer, Values]:
        """Stage `forward` for tensors of these types, once. Return the values that it closes over, too."""
        __tracebackhide__ = True
        key = tuple([typeof(x) for x in tensors])
        if (staged := self.staged.get(key)) is not None:
            return staged, []
        staged, consts = stage_layer(self.call, key)
        if not consts:  # otherwise they belong to the trace that is active now
            self.staged[key] = staged
        return staged, consts

    def bind(self, tensors: Sequence[Any], packs: bool = False) -> tuple[StagedLayer, Values]:
        """Return `forward` as a function with its rule, and its values."""
        __tracebackhide__ = True
        staged, consts = self.stage(tensors)
        return staged, apply(staged.packing() if packs else staged, [*consts, *tensors])


jax.tree_util.register_static(Application)


def _primal(application: Application, *tensors: Any) -> tuple[Any, ...]:
    __tracebackhide__ = True
    if not application.is_deferred and not any(map(is_tracer, tensors)):
        return tuple(application.call.run_on_values(as_arrays(tensors), [False] * len(tensors)).outputs)
    staged, values = application.bind(tensors)
    return tuple(values[: staged.n_outputs])


def _fwd(application: Application, *primals: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    __tracebackhide__ = True
    call = application.call
    tensors = [p.value for p in primals]
    needs = [p.perturbed for p in primals]
    if not application.is_deferred and not any(map(is_tracer, tensors)):
        tensors = as_arrays(tensors)  # jax.grad(f)(2.0) hands on the Python number
        run = call.run_on_values(tensors, call.arguments.can_get_gradient(needs))
    else:
        if application.is_deferred:
            call.check_closure_of_backward()
        try:
            staged, values = application.bind(tensors)
        except NEEDS_VALUES as error:
            refuse_host_code(call, error, tensors)
            raise
        run = Run(staged.kept, values[: staged.n_outputs], staged.residuals(tensors, values))
    return _remember(application, run, tensors, needs)


def _remember(
    application: Application, run: Run, inputs: Sequence[Any], needs: list[bool]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what a fwd rule returns, and remember the linear map of the run on the application.

    NOTE [several runs]
    JAX may run the fwd rule of one application several times, and gives the bwd rule of each the structure of the last.
    What differs between the runs (what hooks returned, and what `forward` kept of a Ref) is found by the number of the
    run, which travels as the length of an empty residual. tests: test_several_runs.py
    """
    linear, outputs, residuals = differentiated(application.call, run, inputs, needs, packs=True)
    maps = application.maps
    if maps and maps[0].n_residuals != linear.n_residuals:
        raise ValueError(
            f"{application.call.name} kept {maps[0].n_residuals} arrays for backward the first time that JAX traced it "
            f"here, and {linear.n_residuals} the next time. forward, and hooks that pack, have to keep as many each "
            "time; or differentiate inside jit: jax.jit(jax.grad(f))."
        )
    maps.append(linear)
    number = [np.zeros((len(maps) - 1, 0), np.bool)] if application.is_deferred else []
    return tuple(outputs), (application, *residuals, *number)


def _bwd(residuals: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    __tracebackhide__ = True
    application, arrays = residuals[0], residuals[1:]
    number = arrays[-1].shape[0] if application.is_deferred else 0
    given = [None if _is_symbolic_zero(c) else c for c in cotangents]
    gradients = application.maps[number].gradients(arrays[: application.maps[number].n_residuals], given)
    batched = next((c for c in given if is_batched(c)), None)
    if batched is not None:
        # NOTE [all outputs are batched]: a gradient that no cotangent reaches counts once per example too.
        # Along an explicit axis of a mesh, JAX takes no single entry.
        has_entry = batched.size and explicit_sharding(batched) is None
        is_any = (batched[(0,) * batched.ndim] if has_entry else jnp.sum(batched)) == 0
        gradients = [g if g is None or is_batched(g) else jnp.where(is_any, g, g) for g in gradients]
    return None, *gradients


def _is_symbolic_zero(cotangent: Any) -> bool:
    # float0 is the dtype of the cotangent of an integer. A Python number, which a vjp function takes, has no dtype.
    return isinstance(cotangent, SymbolicZero) or getattr(cotangent, "dtype", None) == jax.dtypes.float0


# A call that takes a Ref has a front of its own, without symbolic zeros: only there does JAX recognize a Ref that the
# fwd rule keeps as an argument. `forward` is not staged, since an equation of ours cannot write to a Ref. A second
# derivative would go through its code, so it is forbidden.


def _primal_with_ref(application: Application, *tensors: Any) -> tuple[Any, ...]:
    __tracebackhide__ = True
    return tuple(application.call.run_forward(as_arrays(tensors), [False] * len(tensors)).outputs)


def _fwd_with_ref(application: Application, *tensors: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    __tracebackhide__ = True
    call = application.call
    tensors = tuple(as_arrays(tensors))
    needs = call.arguments.can_get_gradient([True] * len(tensors))

    def error() -> Exception:
        return once_differentiable_error(call.layer) or ref_error(call)

    try:
        kept, outputs, residuals = call.run_forward(tensors, needs)
    except Exception as refused:
        if any(map(is_differentiated, tensors)):  # JAX refuses to write a value that is differentiated
            raise error() from refused
        raise
    arrays = [not is_ref(x) for x in residuals]
    outputs = forbid_derivative(outputs, error)
    residuals = merge(arrays, forbid_derivative(select(residuals, arrays), error), residuals)
    return _remember(application, Run(kept, outputs, residuals), tensors, needs)


def ref_error(call: LayerCall) -> TypeError:
    return TypeError(
        f"{call.name}.apply takes a jax.Ref ({', '.join(call.arguments.ref_names())}). Such a call has a first "
        "derivative in reverse mode only: no second derivative, no forward mode, no vmap method, no gradient of what "
        "the Ref holds. Where the Ref is only read, pass its value: ref[...]."
    )


_BY_POSITION: Final = inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])
# Not an attribute of the class, which a class made from the members of another one would take over.
_fronts: weakref.WeakKeyDictionary[type, dict[bool, Any]] = weakref.WeakKeyDictionary()


def front_of(layer: Any, takes_refs: bool) -> Callable[..., tuple[Any, ...]]:
    """Return the `jax.custom_vjp` function of a class, (application, *tensors) -> outputs; made at the first call."""
    fronts = _fronts.setdefault(layer, {})
    if takes_refs not in fronts:
        name, source = layer.__qualname__, source_of(layer.__qualname__, layer.forward)
        rules = (_primal_with_ref, _fwd_with_ref, _bwd) if takes_refs else (_primal, _fwd, _bwd)
        primal, fwd, bwd = (_named_copy(rule, name, source) for rule in rules)
        front = jax.custom_vjp(primal)
        front.defvjp(fwd, bwd, symbolic_zeros=not takes_refs)
        fronts.setdefault(takes_refs, front)  # another thread may have been first
    return fronts[takes_refs]


def _named_copy(function: Any, name: str, source: str) -> Any:
    """Copy a plain function under another name.

    NOTE [names made once]
    At each call of a custom_vjp function, JAX reads the signatures of its three functions, and works out their names
    and the names of their arguments, which errors show. This takes a fifth of the time to trace a layer. Therefore the
    copies have these as attributes. A JAX that does not read `__fun_debug_info__` works them out again, and is slower.
    """
    copy: Any = types.FunctionType(function.__code__, function.__globals__, name)
    copy.__qualname__ = name
    copy.__signature__ = _BY_POSITION
    copy.__fun_debug_info__ = DebugInfo("custom_vjp", source, None, None)
    return copy
