"""One call of a layer with its `forward` as a jaxpr.

NOTE [orders]
A forward rule of `jax.custom_vjp` is ordinary code: an outer differentiation goes through its body, so that the custom
rule is lost at the second order. Here the forward rule binds one opaque equation instead,

    staged_call:  consts, inputs  ->  outputs, saved intermediates

whose own derivative is the custom rule again (`derivative`). A class with forward mode binds *staged_call* itself,
without a `jax.custom_vjp` around it.

Residuals are told apart by their source (`_sources`), since they differ under an outer differentiation:

- an input is handed on by the caller and keeps its own derivative, also where it is returned;
- an output carries the rule of *staged_call*; of one object that is returned twice, the last counts;
- any other tensor is an intermediate. It is differentiated through `forward`, whose jaxpr *staged_call* holds, as a
  function of the inputs and of the outputs that carry the rule (`carriers`). An output that is marked
  non-differentiable carries no rule: it is plain code of `forward`.

Objects are compared in the jaxpr, where each argument has a variable of its own. An operation that does nothing, as
`x.reshape(x.shape)`, makes no new variable: it is its operand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

from pylayer_jax._jax.imports import eval_context
from pylayer_jax._jax.jaxprs import dependence, eval_with_given, is_literal, prune, stage
from pylayer_jax._jax.tracers import NEEDS_VALUES, concrete_value, is_differentiated, is_forward_mode, is_leaked
from pylayer_jax._jax.types import has_tangent, is_ref
from pylayer_jax._methods.once_differentiable import second_derivative_error_of
from pylayer_jax._methods.outputs import Identity, Outputs
from pylayer_jax._trees.closures import values_in_reach

from .backward_rule import derivative_of
from .call import LayerCall, force_primitive, null_context
from .derivative import Derivative
from .residuals import pack_residuals
from .run_forward import run_and_save
from .saved_state import SavedState

Source = Identity | tuple[Literal["intermediate"], int]


@dataclasses.dataclass(eq=False, repr=False)
class StagedCall:
    """One call of a layer: its `forward` as a jaxpr, and its derivative.

    Compared by identity, since it is a parameter of equations.
    """

    call: LayerCall
    saved: SavedState
    derivative: Derivative
    jaxpr: Any  # consts, inputs -> outputs, intermediates
    consts: int  # the number of values that `forward` closes over
    sources: tuple[Source, ...]  # one per residual
    is_traceable: bool = True  # whether the jaxpr computes, or only holds the results of a concrete run
    packs: bool = False  # whether its first differentiation packs the residuals; later ones never do
    carriers: tuple[int, ...] = ()  # the outputs that carry the rule into what `forward` computes from them

    def __repr__(self) -> str:
        return self.name  # as jaxprs show it

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return len(self.derivative.output_types)

    def residuals(self, inputs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The residuals, from the inputs and the results of *staged_call*."""
        by_source = {"input": inputs, "output": values, "intermediate": values[self.outputs :]}
        return [by_source[kind][i] for kind, i in self.sources]

    def keeps_refs(self, inputs: Sequence[Any]) -> bool:
        """Whether a Ref among the inputs is kept for `backward`."""
        return any(kind == "input" and is_ref(inputs[i]) for kind, i in self.sources)

    def intermediates(self, *args: Any) -> list[Any]:
        """The intermediates, from consts, inputs, and the outputs that carry the rule."""
        count = len(self.jaxpr.invars)
        given = zip((self.jaxpr.outvars[i] for i in self.carriers), args[count:], strict=True)
        return eval_with_given(self.jaxpr, args[:count], dict(given))[self.outputs :]

    def carried(self) -> list[bool]:
        """A mask of the intermediates that come from an output that carries the rule."""
        variables = [self.jaxpr.outvars[i] for i in self.carriers]
        return dependence(self.jaxpr, [False] * len(self.jaxpr.invars), variables=variables)[self.outputs :]

    def dce(self, used: Sequence[bool] | None) -> tuple[Any, list[bool]]:
        """The jaxpr of the results that are used (None: of all), and a mask of the inputs that it reads."""
        return (self.jaxpr, [True] * len(self.jaxpr.invars)) if used is None else prune(self.jaxpr, used)

    def loses_tangents(self, of_consts: Sequence[bool]) -> bool:
        """Whether an output depends on closed-over values that are differentiated; what is kept may depend on them."""
        nonzero = [*of_consts, *[False] * (len(self.jaxpr.invars) - self.consts)]
        return any(of_consts) and (not self.is_traceable or any(dependence(self.jaxpr, nonzero)[: self.outputs]))

    def without_packing(self) -> Self:
        return dataclasses.replace(self, packs=False) if self.packs else self

    def pack_residuals(self, residuals: list[Any], outputs: list[Any]) -> tuple[Derivative, list[Any], list[Any]]:
        return pack_residuals(self.call, self.saved, self.derivative, residuals, outputs)

    def restage_for(self, perturbed: Sequence[bool]) -> tuple[StagedCall, list[Any]] | None:
        """Restage `forward` if this differentiation perturbs inputs that `needs_input_grad` reported False.

        Returns the new call and its constants, or None if nothing changes.
        """
        if not self.saved.read_needs_input_grad:
            return None
        needs_grad = [n or p for n, p in zip(self.saved.needs_grad, perturbed, strict=True)]
        if needs_grad == self.saved.needs_grad:
            return None
        return stage_call(self.call, [v.aval for v in self.jaxpr.invars[self.consts :]], needs_grad)


def second_derivative_error(call: LayerCall, saved: SavedState, intermediates: Sequence[Any]) -> Exception | None:
    """The error for a second derivative of a `forward` that ran on concrete values; None if nothing would be lost."""
    if any(map(has_tangent, intermediates)):
        kept = "saved a tensor that is neither an input nor an output"
    elif names := saved.numbers(_known_before(call)):
        kept = f"kept {', '.join(names)}, which may depend on the inputs"
    else:
        return None
    if (forbidden := second_derivative_error_of(call.layer.backward)) is not None:
        return forbidden()
    return TypeError(
        f"{call.name}: a second derivative goes through forward, which needs concrete values and cannot be traced, and "
        f"which {kept}. Its derivative would be lost. Write forward with jax.numpy, or keep inputs and outputs only. "
        "Decorate backward with @once_differentiable if second derivatives are not meant."
    )


def _known_before(call: LayerCall) -> list[Any]:
    """Values that are no results of `forward`."""
    methods = [call.layer.forward, getattr(call.layer, "setup_context", None)]
    given = [x for a in call.arguments.arguments for x in a.skeleton.statics()]
    return given + [x for method in methods for x in values_in_reach(method)]


def stage_call(
    call: LayerCall,
    types: Sequence[Any],
    needs_grad: list[bool],
    tensors: Sequence[Any] = (),
    perturbed_is_exact: bool = True,
) -> tuple[StagedCall, list[Any]]:
    """`forward` as one equation, and the values that it closes over.

    A `forward` that cannot be staged runs on the values of `tensors`, if they are given and concrete.
    """
    __tracebackhide__ = True
    is_traceable = True

    def forward(*inputs: Any) -> tuple[list[Any], tuple[SavedState, tuple[Source, ...]]]:
        __tracebackhide__ = True
        saved, outputs, residuals = run_and_save(call, inputs, needs_grad, perturbed_is_exact)
        sources, intermediates = _sources(inputs, outputs, saved.outputs, residuals)
        return [*outputs, *intermediates], (saved, sources)

    try:
        with force_primitive(True) if is_forward_mode() else null_context:
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
        results, is_traceable = forward(*inputs), False
        jaxpr, consts, (saved, sources) = stage(lambda *_: results, types, call.source)
    derivative = derivative_of(call, saved, len(sources))
    carriers = _carriers(jaxpr, derivative.has_tangent)
    staged = StagedCall(call, saved, derivative, jaxpr, len(consts), sources, is_traceable, carriers=carriers)
    if any(map(is_leaked, consts)) or staged.loses_tangents([*map(is_differentiated, consts)]):
        raise call.closed_over_error()
    return staged, consts


def _carriers(jaxpr: Any, has_tangent: Sequence[bool]) -> tuple[int, ...]:
    last = {v: i for i, v in enumerate(jaxpr.outvars[: len(has_tangent)]) if not is_literal(v)}
    return tuple(i for v, i in last.items() if has_tangent[i] and v not in jaxpr.invars)


def _sources(
    inputs: Sequence[Any], values: Sequence[Any], outputs: Outputs, residuals: Sequence[Any]
) -> tuple[tuple[Source, ...], list[Any]]:
    # Staged inputs are distinct objects even if the caller passed one array twice, so that identity tells.
    sources: list[Source] = []
    intermediates: list[Any] = []
    known: dict[int, Source] = {id(x): ("input", i) for i, x in enumerate(inputs)}
    for i, (value, identity) in enumerate(zip(values, outputs.identities, strict=True)):
        # A marked output is plain code; of a type without tangents it is no matter.
        if i not in outputs.non_differentiable or not has_tangent(value):
            known[id(value)] = identity
    for tensor in residuals:
        source = known.get(id(tensor))
        if source is None:
            source = ("intermediate", len(intermediates))
            intermediates.append(tensor)
        sources.append(source)
    return tuple(sources), intermediates
