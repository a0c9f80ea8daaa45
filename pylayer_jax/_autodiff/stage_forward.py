"""`forward` as a function with its rule: a jaxpr, and the derivative that the class defines. See NOTE [orders]."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pylayer_jax._jax import rule_function
from pylayer_jax._jax.define_primitive import vmap_as_needed
from pylayer_jax._jax.identity_primitives import forbid_derivative
from pylayer_jax._jax.imports import eval_context, eval_jaxpr
from pylayer_jax._jax.jaxprs import (
    computing_only,
    dependence,
    eval_with_given,
    is_literal,
    prune,
    reads_refs,
    stage,
    without_checks,
    without_refs,
)
from pylayer_jax._jax.masks import scatter, select
from pylayer_jax._jax.rule_function import BatchRun
from pylayer_jax._jax.tracers import NEEDS_VALUES, concrete_value, is_differentiated, is_forward_mode, is_leaked
from pylayer_jax._jax.types import has_tangent, is_ref, typeof
from pylayer_jax._jax.undecided_mode import TwoModeFunction
from pylayer_jax._methods.batches import check_mapped
from pylayer_jax._methods.outputs import Identity, Outputs

from . import ref_call
from .code_tangents import code_tangents
from .host_forward import computed_numbers, known_values, second_derivative_error
from .layer_call import LayerCall, in_backward, null_context
from .own_vmap import run_vmap_method
from .pack_residuals import hooks_that_pack, pack_residuals
from .run_backward import Derivative
from .run_forward import run_and_save
from .saved_state import SavedState
from .tangent_map import output_tangents
from .transpose_backward import transpose_forward

Source = Identity | tuple[Literal["intermediate"], int]


@dataclasses.dataclass(eq=False, repr=False)
class StagedForward(TwoModeFunction):
    """consts, inputs -> outputs, intermediates: `forward` as a jaxpr, whose derivative is the one of the class."""

    kind = "layer"

    call: LayerCall
    saved: SavedState
    derivative: Derivative
    jaxpr: Any
    consts: int  # the number of values that `forward` closes over
    sources: tuple[Source, ...]  # one per residual
    is_traceable: bool  # whether the jaxpr computes, or only holds the results of a concrete run
    outputs_with_rule: tuple[int, ...]  # the outputs that carry the rule into what `forward` computes from them
    numbers: Sequence[str]  # the names of what the concrete run kept beside tensors, and may have computed
    packs: bool = False  # whether its first differentiation packs the residuals; later ones never do

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.call.name

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return len(self.saved.outputs.types)

    def bind(self, consts: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """The outputs and intermediates."""
        __tracebackhide__ = True
        staged, has_refs = self, reads_refs(self.jaxpr)
        if has_refs and not self.keeps_refs(tensors) and (pure := without_refs(self.jaxpr)) is not None:
            # What nobody writes in between is a value, which can be differentiated around.
            staged, has_refs = dataclasses.replace(self, jaxpr=pure), False
            consts, tensors = ([x[...] if is_ref(x) else x for x in values] for values in (consts, tensors))
        # `checkify` does not look into an operation that it does not know.
        jaxpr, checks = without_checks(staged.jaxpr)
        if checks is not None:
            eval_jaxpr(checks, (), *consts, *tensors)
            staged = dataclasses.replace(staged, jaxpr=jaxpr)
        if not has_refs:
            return rule_function.call(staged, [*consts, *tensors])
        # An equation of ours cannot write to a Ref. The operations themselves can, but do not know the rule.
        error = functools.partial(ref_call.second_derivative_error, self.call)
        try:
            values = eval_jaxpr(staged.jaxpr, (), *consts, *tensors)
        except Exception as refused:
            if any(map(is_differentiated, tensors)):  # JAX refuses to write a value that is differentiated
                raise error() from refused
            raise
        return forbid_derivative(values, error)

    def residuals(self, inputs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The residuals, from the inputs, and from the outputs and intermediates."""
        by_source = {"input": inputs, "output": values, "intermediate": values[self.outputs :]}
        return [by_source[kind][i] for kind, i in self.sources]

    def keeps_refs(self, inputs: Sequence[Any]) -> bool:
        """Whether a Ref among the inputs is kept for `backward`."""
        return any(kind == "input" and is_ref(inputs[i]) for kind, i in self.sources)

    # -- differentiated -----------------------------------------------------------------------------

    @property
    def has_one_rule(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.packs or hooks_that_pack(self.call) is None

    def forward_rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        __tracebackhide__ = True
        return self._rule(primals, tangents, packs=False)

    def reverse_rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        __tracebackhide__ = True
        return self._rule(primals, tangents, packs=self.packs)

    def _rule(self, primals: Sequence[Any], tangents: Sequence[Any], packs: bool) -> tuple[list[Any], list[Any]]:
        __tracebackhide__ = True
        nonzero = [t is not None for t in tangents]
        if self.closes_over_differentiated(nonzero[: self.consts]):
            raise self.call.closed_over_error()
        values = rule_function.call(dataclasses.replace(self, packs=False) if self.packs else self, primals)
        # If `forward` ran on concrete values, the jaxpr holds its results as constants.
        intermediates = values[self.outputs :]
        if not self.is_traceable:
            computed = [kind == "intermediate" and has_tangent(intermediates[i]) for kind, i in self.sources]
            if error := second_derivative_error(self.call, self.saved, self.numbers, computed):
                raise error
        inputs, perturbed = primals[self.consts :], nonzero[self.consts :]
        out_tangents = [None] * self.outputs
        if any(perturbed):  # otherwise only values that are kept for `backward` move
            outputs, out_tangents = self._outputs(inputs, values, perturbed, tangents[self.consts :], packs)
            values = [*outputs, *intermediates]
        return values, [*out_tangents, *self._intermediate_tangents(primals, tangents, values, out_tangents)]

    def _outputs(
        self, inputs: Sequence[Any], values: list[Any], perturbed: list[bool], tangents: Sequence[Any], packs: bool
    ) -> tuple[list[Any], list[Any]]:
        """The outputs, bound to what is packed, and their tangents."""
        __tracebackhide__ = True
        staged, residuals = self, self.residuals(inputs, values)
        if (restaged := self._restaged_for(perturbed)) is not None:
            staged, consts = restaged
            residuals = staged.residuals(inputs, staged.bind(consts, inputs))
        derivative, outputs = staged.derivative, values[: self.outputs]
        if packs:
            derivative, residuals, outputs = pack_residuals(self.call, staged.saved, derivative, residuals, outputs)
        return outputs, output_tangents(derivative, perturbed, residuals, select(tangents, perturbed))

    def _restaged_for(self, perturbed: Sequence[bool]) -> tuple[StagedForward, list[Any]] | None:
        """`forward` staged again, if inputs are perturbed that `needs_input_grad` reported False; None if none is."""
        if not self.saved.read_needs_input_grad:
            return None
        needs_grad = [n or p for n, p in zip(self.saved.needs_grad, perturbed, strict=True)]
        if needs_grad == self.saved.needs_grad:
            return None
        return stage_forward(self.call, [v.aval for v in self.jaxpr.invars[self.consts :]], needs_grad)

    def closes_over_differentiated(self, of_consts: Sequence[bool]) -> bool:
        """Whether an output depends on closed-over values that are differentiated; what is kept may depend on them."""
        nonzero = [*of_consts, *[False] * (len(self.jaxpr.invars) - self.consts)]
        return any(of_consts) and (not self.is_traceable or any(dependence(self.jaxpr, nonzero)[: self.outputs]))

    def _intermediate_tangents(
        self, primals: Sequence[Any], tangents: Sequence[Any], values: Sequence[Any], out_tangents: Sequence[Any]
    ) -> list[Any]:
        if len(values) == self.outputs:
            return []
        primals = [*primals, *(values[i] for i in self.outputs_with_rule)]
        tangents = [*tangents, *(out_tangents[i] for i in self.outputs_with_rule)]
        jaxpr, consts, _ = stage(
            lambda *args: (self._intermediates(*args), None), [typeof(x) for x in primals], self.name
        )
        primals, tangents = [*consts, *primals], [*(None for _ in consts), *tangents]
        depends = dependence(jaxpr, [t is not None for t in tangents])
        wanted = [d and has_tangent(v.aval) for d, v in zip(depends, jaxpr.outvars, strict=True)]
        return scatter(code_tangents(self.name, jaxpr, wanted, primals, tangents) if any(wanted) else [], wanted)

    def _intermediates(self, *args: Any) -> list[Any]:
        """The intermediates, from consts, inputs, and the outputs that carry the rule."""
        count, results = len(self.jaxpr.invars), self.jaxpr.outvars
        given = zip((results[i] for i in self.outputs_with_rule), args[count:], strict=True)
        code = computing_only(self.jaxpr, [i >= self.outputs for i in range(len(results))])
        return eval_with_given(code, args[:count], dict(given))

    # -- mapped, transposed -------------------------------------------------------------------------

    def also_mapped(self, differ: list[bool], is_any: bool) -> list[bool]:
        # NOTE [shared outputs]. Before the first differentiation nobody knows which axes `backward` uses. An
        # intermediate has no cotangent; it is mapped only if it comes from an output that carries the rule.
        if not (is_any or self.packs or any(differ[: self.outputs])):
            return differ
        variables = [self.jaxpr.outvars[i] for i in self.outputs_with_rule]
        carried = dependence(self.jaxpr, [False] * len(self.jaxpr.invars), variables=variables)
        return [True] * self.outputs + carried[self.outputs :]

    def batch_run(self, axis: Any, dims: Sequence[Any]) -> BatchRun:
        if not (self.call.layer._has_vmap_method() and (self.packs or any(d is not None for d in dims))):
            return super().batch_run(axis, dims)

        def run(*args: Any) -> tuple[list[Any], list[Any]]:
            __tracebackhide__ = True
            _, outputs = run_vmap_method(self.call, axis, dims[self.consts :], args[self.consts :])
            check_mapped(self.name, axis, outputs, self.saved.outputs.types)
            carrying = [outputs[i] for i in self.outputs_with_rule]
            shared = vmap_as_needed(axis, self._intermediates, [*dims, *[0] * len(carrying)], lambda differ: differ)
            intermediates, intermediate_dims = shared(*args, *carrying)
            return [*outputs, *intermediates], [0] * len(outputs) + intermediate_dims

        return run

    def transpose(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        # A layer within the backward of another layer, which forward mode transposes: it counts as the linear map that
        # its `forward` is, whatever its own rule says.
        is_used = [c is not None and has_tangent(v.aval) for c, v in zip(cotangents, jaxpr.outvars, strict=True)]
        jaxpr, is_read = prune(jaxpr, is_used)
        read = select(args, is_read)
        found = transpose_forward(self.name, jaxpr, read, select(cotangents, is_used))
        return scatter(scatter(found, [x is None for x in read]), is_read)


def stage_forward(
    call: LayerCall,
    types: Sequence[Any],
    needs_grad: list[bool],
    tensors: Sequence[Any] = (),
    perturbed_is_exact: bool = True,
) -> tuple[StagedForward, list[Any]]:
    """`forward` as a jaxpr, and the values that it closes over.

    A `forward` that cannot be staged runs on the values of `tensors`, if they are given and concrete.
    """
    __tracebackhide__ = True
    is_traceable, numbers = True, []

    def forward(*inputs: Any) -> tuple[list[Any], tuple[SavedState, tuple[Source, ...]]]:
        __tracebackhide__ = True
        saved, outputs, residuals = run_and_save(call, inputs, needs_grad, perturbed_is_exact)
        sources, intermediates = _sources(inputs, outputs, saved.outputs, residuals)
        return [*outputs, *intermediates], (saved, sources)

    try:
        with in_backward(True) if is_forward_mode() else null_context:
            jaxpr, consts, (saved, sources) = stage(forward, types, call.source)
    except NEEDS_VALUES as error:
        # Host code in `forward`. Under eager differentiation the numbers are there, below the tracers.
        if not tensors:
            raise
        try:
            with eval_context():
                inputs = [x if is_ref(x) else jnp.copy(concrete_value(x)) for x in tensors]
        except jax.errors.ConcretizationTypeError:
            raise error from None
        known = known_values(call)
        results, is_traceable = forward(*inputs), False
        jaxpr, consts, (saved, sources) = stage(lambda *_: results, types, call.source)
        numbers = computed_numbers(call, saved, known)
    derivative = Derivative(call, saved, len(sources))
    with_rule = _outputs_with_rule(jaxpr, derivative.has_tangent)
    staged = StagedForward(call, saved, derivative, jaxpr, len(consts), sources, is_traceable, with_rule, numbers)
    if any(map(is_leaked, consts)) or staged.closes_over_differentiated([*map(is_differentiated, consts)]):
        raise call.closed_over_error()
    return staged, consts


def _outputs_with_rule(jaxpr: Any, has_tangent: Sequence[bool]) -> tuple[int, ...]:
    last = {v: i for i, v in enumerate(jaxpr.outvars[: len(has_tangent)]) if not is_literal(v)}
    return tuple([i for v, i in last.items() if has_tangent[i] and v not in jaxpr.invars])


def _sources(
    inputs: Sequence[Any], values: Sequence[Any], outputs: Outputs, residuals: Sequence[Any]
) -> tuple[tuple[Source, ...], list[Any]]:
    # Staged inputs are distinct objects even if the caller passed one array twice, so that identity tells.
    sources: list[Source] = []
    intermediates: list[Any] = []
    known: dict[int, Source] = {id(x): ("input", i) for i, x in enumerate(inputs)}
    known |= {id(value): identity for value, identity in zip(values, outputs.identities, strict=True)}
    for tensor in residuals:
        source = known.get(id(tensor))
        if source is None:
            source = ("intermediate", len(intermediates))
            intermediates.append(tensor)
        sources.append(source)
    return tuple(sources), intermediates
