"""A layer as a function with a rule for its derivative.

NOTE [orders]
For a second derivative, JAX differentiates the body of the fwd rule of a `jax.custom_vjp` function. Here, this body
applies a `RuleFunction` (`_jax/rule_function.py`), so that the second derivative uses the layer's rule again:

    custom_vjp function(traced_call, x)           one jax.custom_vjp function per class, at the end
      fwd   y, intermediates = rule_function(x)   `forward`, staged to a jaxpr; `ctx` records what it saves
            residuals = entries of [x, y, intermediates]
      bwd   `backward`, from the residuals and the cotangents

    rule of rule_function                         used by an outer differentiation, and by forward mode
            y, intermediates = rule_function(x)   the same function again, so that the rule holds at every order
            tangents of y             = linear map of (residuals; tangents of x), whose transpose is `backward`
            tangents of intermediates = JVP of the code of `forward` that computes them from x and y

Each residual is an input of the layer (x), an output (y) or else an intermediate. A saved input has the tangent of the
input, also if `forward` returns it. A saved output has the tangent that the rule computes; of an array that `forward`
returns at two positions, that of the last position. An output that is marked non-differentiable is a constant.

`forward` is staged once per application, so that all runs of a fwd rule keep the same residuals. In eager mode it is
not staged, and sees concrete values. `_bind` in `_layer.py` lists the calls that do not use the custom_vjp function.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from ._arguments import warn_of_integer_outputs
from ._call import LayerCall
from ._context import ForwardResult, Outputs, SavedContext
from ._hooks.saving import held, keeps_residuals, reader
from ._jax.jaxprs import dependence, equations_to, evaluate_jaxpr, evaluate_part, stage, with_checkpoint_names
from ._jax.linearity import transpose_jaxpr
from ._jax.rule_function import (
    BatchedFunction,
    LinearMap,
    RuleFunction,
    Values,
    apply,
    apply_linear,
    as_batched_as,
    merge,
    scatter,
    select,
    vmap_over,
)
from ._jax.traces import (
    NEEDS_VALUES,
    DebugInfo,
    Literal,
    SymbolicZero,
    batch_traces,
    checkpoint_name,
    is_differentiated,
    is_tracer,
    partial_eval,
    set_current_trace,
    trace_of_primals,
)
from ._jax.transparency import forbid_derivative
from ._jax.types import as_arrays, has_tangent, is_ref, tangent_type, types_of, varying_axes, varying_over, zeros_of
from ._messages import NotLinearError, closed_over, noting, once_differentiable_error, source_of
from ._trees import contains

__tracebackhide__ = True  # pytest hides these frames, as JAX does elsewhere


class LayerMap(LinearMap):
    """The derivative of a layer: a linear map from tangents of the inputs to tangents of the outputs.

    It depends on the residuals r, and is the transpose of the pullback B, which is the layer's `backward`:

        c . (B^T(r) t)  =  B(r)(c) . t        for all tangents t and cotangents c.

    Reverse mode calls `backward`, which need not be linear in the cotangents. Forward mode evaluates B^T, and so needs
    a `jvp`, or a linear `backward`.
    """

    def __init__(self, call: LayerCall, kept: SavedContext, n_residuals: int, needs: list[bool], packed: Any) -> None:
        types = [tangent_type(t) for t in select(kept.outputs.types, kept.outputs.has_tangent)]
        super().__init__(call.name, n_residuals, types)
        self.call, self.kept, self.packed = call, kept, packed
        self.needs = needs  # one bool per input: whether the input has a tangent

    def gradients(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return self.call.run_backward(self.kept, self._reader(residuals, cotangents), self.needs, cotangents)

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return select(self.gradients(residuals, scatter(cotangents, self.kept.outputs.has_tangent)), self.needs)

    def evaluate(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        if hasattr(self.call.layer, "jvp"):
            residual, given = self._reader(residuals, ()), scatter(tangents, self.needs)
            pushed = self.call.run_jvp(self.kept, residual, self.needs, given)
        else:
            pushed = self._evaluate_by_transposing(residuals, tangents)
        return [zeros_of(a) if t is None else t for a, t in zip(self.types, pushed, strict=True)]

    def _evaluate_by_transposing(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        name, forbidden = self.call.name, once_differentiable_error(self.call.layer)
        if forbidden is not None:  # in a second derivative, the residuals are differentiated
            residuals = forbid_derivative(residuals, lambda: forbidden)

        def nonzero_gradients(*cotangents: Any) -> tuple[Values, list[bool]]:
            gradients = self.transpose(residuals, cotangents)
            nonzero = [g is not None for g in gradients]
            return select(gradients, nonzero), nonzero

        try:
            jaxpr, consts, nonzero = stage(nonzero_gradients, self.types, f"backward of {name}")
            args, given = [*consts, *[None] * len(self.types)], select(tangents, nonzero)
            return transpose_jaxpr(f"{name}.backward", jaxpr, args, given, "its cotangents")[len(consts) :]
        except Exception as error:
            # Without forward mode, this code runs only for a second derivative: the error has to say that.
            if forbidden is not None and not self.call.layer.forward_mode:
                raise forbidden from error
            if getattr(error, "__notes__", None):  # a method of the user raised the error
                raise
            message = next(iter(str(error).splitlines()), "")
            if not isinstance(error, NotLinearError):
                of_loop = ", as with a loop that solves equations"  # for which JAX asks to open an issue
                reason = of_loop if "issue" in message else f" ({type(error).__name__}: {message})"
                message = f"JAX cannot transpose {name}.backward{reason}."
            raise NotLinearError(
                f"{message} Forward mode, and forward over reverse as in jax.hessian, transpose a backward that is "
                f"linear in its cotangents. Give {name} a static jvp(ctx, *tangents); or use reverse mode, which "
                "differentiates backward instead, at every order: jax.grad, jax.jacrev, jax.jacrev(jax.grad(f))."
            ) from error

    def _reader(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Callable[[int], Any]:
        return residuals.__getitem__ if self.packed is None else reader(self.packed, residuals, cotangents)


class CodeMap(LinearMap):
    """The derivative of the variables `targets` of a jaxpr with respect to its perturbed `sources`.

    It gives the tangents of saved intermediates of `forward`. The residuals are the values of all `sources`. `evaluate`
    calls `jax.jvp`, and `transpose` calls `jax.vjp`, so that code which supports only one of the two modes works in it.
    """

    def __init__(self, name: str, jaxpr: Any, sources: list[Any], perturbed: list[bool], targets: list[Any]) -> None:
        super().__init__(name, len(sources), [tangent_type(v.aval) for v in targets])
        self.jaxpr, self.sources, self.targets = jaxpr, sources, targets
        self.perturbed = perturbed  # a mask of the sources

    def _function(self, residuals: Sequence[Any], targets: list[Any]) -> Callable[..., Values]:
        def function(*values: Any) -> Values:
            known = dict(zip(self.sources, merge(self.perturbed, values, residuals), strict=True))
            return evaluate_part(self.jaxpr, known, targets)

        return function

    def evaluate(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        function, primals = self._function(residuals, self.targets), select(residuals, self.perturbed)
        with noting(self.name, "forward"):
            return list(jax.jvp(function, primals, list(tangents))[1])

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        used = [c is not None for c in cotangents]
        function, primals = self._function(residuals, select(self.targets, used)), select(residuals, self.perturbed)
        with noting(self.name, "forward"):
            return list(jax.vjp(function, *primals)[1](select(cotangents, used)))


class StagedLayer(RuleFunction):
    """A function that evaluates the jaxpr of `forward`, with the derivative that the layer class defines.

    The operands are the closed-over values and the inputs. The results are the outputs and the intermediates.
    """

    def __init__(
        self, call: LayerCall, jaxpr: Any, unnamed: Any, n_consts: int, kept: SavedContext, positions: list[int]
    ) -> None:
        self.call, self.kept, self.jaxpr, self.n_consts = call, kept, jaxpr, n_consts
        self._unnamed = unnamed  # without `checkpoint_name` for `saved_names`
        self.positions = positions  # the position of each residual in [*inputs, *outputs, *intermediates]
        self.name = call.name
        self.layer_name = call.layer.__name__  # by which `origins` knows that this function applies a layer
        self.original: StagedLayer | None = None  # of a copy that `packing` made
        self.n_outputs = len(kept.outputs.types)
        # An output that is also an input is no source of its own: for the intermediates, it has the input's tangent.
        results = jaxpr.outvars
        # The last position counts.
        last = {v: i for i, v in enumerate(results[: self.n_outputs]) if not isinstance(v, Literal)}
        inputs = set(jaxpr.invars)
        self.source_outputs = [i for v, i in last.items() if kept.outputs.has_tangent[i] and v not in inputs]
        self.sources = [*jaxpr.invars, *[results[i] for i in self.source_outputs]]
        self.intermediates = results[self.n_outputs :]  # computed from `sources`, by the code of `forward`

    @property
    def outputs_jaxpr(self) -> Any:
        if not self.intermediates:
            return self._unnamed
        used = [True] * self.n_outputs + [False] * len(self.intermediates)
        return partial_eval.dce_jaxpr(self._unnamed, used, instantiate=True)[0]

    def _values_of_sources(self, of_inputs: Sequence[Any], of_outputs: Sequence[Any]) -> Values:
        return [*of_inputs, *[of_outputs[i] for i in self.source_outputs]]

    def residuals(self, inputs: Sequence[Any], values: Sequence[Any]) -> Values:
        known = [*inputs, *values]
        return [known[i] for i in self.positions]

    def saved(self, operands: Sequence[Any], results: Sequence[Any]) -> list[tuple[Any, str]]:
        """Return the saved values among operands and results, with their names."""
        residuals = self.residuals(operands[self.n_consts :], results)
        return list(zip(residuals, self.call.residual_names(self.kept), strict=True))

    @property
    def is_divisible(self) -> bool:
        # The method `vmap` of the class cannot batch a part of `forward`.
        return super().is_divisible and not hasattr(self.call.layer, "vmap")

    def packing(self) -> StagedLayer:
        """Return a copy whose rule packs residuals, and applies the original: a second derivative packs nothing."""
        if self.call.saver is None:
            return self
        copied = copy.copy(self)
        copied.original = self
        return copied

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        """Pack only in a copy that `packing` made, and not in eager forward mode, which keeps no residuals."""
        n, packs = self.n_consts, self.original is not None and keeps_residuals(tangents)
        if any(t is not None for t in tangents[:n]):
            raise self.call.closed_over_error()
        values = apply(self.original or self, primals)
        run = ForwardResult(self.kept, values[: self.n_outputs], self.residuals(primals[n:], values))
        outputs, of_outputs = _outputs_and_tangents(self.call, run, primals[n:], tangents[n:], packs)
        of_code = self._code_tangents(primals, tangents, values, of_outputs)
        return [*outputs, *values[self.n_outputs :]], [*of_outputs, *of_code]

    def _code_tangents(
        self, primals: Sequence[Any], tangents: Sequence[Any], values: Sequence[Any], of_outputs: Sequence[Any]
    ) -> Values:
        if not self.intermediates:
            return []
        of_sources = self._values_of_sources(tangents, of_outputs)
        perturbed = [t is not None for t in of_sources]
        depends = dependence(self.jaxpr, select(self.sources, perturbed))[self.n_outputs :]
        is_target = [d and has_tangent(v.aval) for d, v in zip(depends, self.intermediates, strict=True)]
        if not any(is_target):
            return [None] * len(is_target)
        targets = select(self.intermediates, is_target)
        _, variables = equations_to(self.jaxpr, self.sources, targets)
        is_read = [v in variables for v in self.sources]
        sources, perturbed = select(self.sources, is_read), select(perturbed, is_read)
        residuals, of_read = select(self._values_of_sources(primals, values), is_read), select(of_sources, is_read)
        code = CodeMap(self.name, self.jaxpr, sources, perturbed, targets)
        return scatter(apply_linear(code, residuals, select(of_read, perturbed)), is_target)

    def transpose(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        # JAX transposes `forward` if the `backward` of another layer applies this layer.
        return transpose_jaxpr(f"{self.name}.forward", jaxpr, args, cotangents)

    def run_batch(self, axis: Any, dims: Sequence[Any]) -> Callable[..., tuple[Values, list[Any]]]:
        if not hasattr(self.call.layer, "vmap") or all(d is None for d in dims):
            return super().run_batch(axis, dims)
        n = self.n_consts

        def run(*args: Any) -> tuple[Values, list[Any]]:
            outputs = self.call.run_vmap(axis, dims[n:], args[n:], self.kept.outputs)

            def intermediates(*known: Any) -> Values:
                return evaluate_part(self.jaxpr, dict(zip(self.sources, known, strict=True)), self.intermediates)

            in_axes = tuple(self._values_of_sources(dims, [0] * len(outputs)))
            with noting(self.name, "forward"):  # JAX batches its code: `vmap` returns the outputs alone
                found = vmap_over(axis, intermediates, in_axes, 0)(*self._values_of_sources(args, outputs))
            return [*outputs, *found], [0] * (len(outputs) + len(found))

        return run


def stage_layer(call: LayerCall, input_types: Sequence[Any], primals: Sequence[Any] = ()) -> tuple[StagedLayer, Values]:
    """Stage `forward` for inputs of these types. Return the staged function, and the closed-over values."""
    try:
        jaxpr, consts, (kept, positions) = _stage_forward(call, input_types, {})
        if missing := _missing_axes(jaxpr, kept.outputs):
            jaxpr, consts, (kept, positions) = _stage_forward(call, input_types, missing)
    except NEEDS_VALUES as error:
        if not any(map(is_differentiated, primals)):
            raise
        raise once_differentiable_error(call.layer) or TypeError(
            f"{call.name}: a second derivative traces forward, which needs concrete values ({type(error).__name__}). "
            "Write forward with jax.numpy; or, if it is NumPy code, set host = 'forward' on the class, or call it by "
            "jax.pure_callback, which works at each order for which backward can be differentiated. "
            "Decorate backward with @once_differentiable if second derivatives are not meant."
        ) from error
    for const in consts:
        if is_differentiated(const):
            raise call.closed_over_error()
        if is_ref(const):
            raise TypeError(
                f"{call.name}.forward closes over a jax.Ref, which a layer cannot read or write where it is traced. "
                f"Pass the Ref as an argument: {call.name}.apply(..., ref)."
            )
    unnamed = jaxpr
    if call.layer.saved_names and not hasattr(call.layer, "vmap"):
        variables = [*jaxpr.invars[len(consts) :], *jaxpr.outvars]
        saved = zip([variables[i] for i in positions[: kept.n_saved]], call.checkpoint_names(kept), strict=True)
        computed = {v for equation in jaxpr.eqns for v in equation.outvars}
        if name_of := {v: name for v, name in saved if name and not isinstance(v, Literal) and v in computed}:
            jaxpr = with_checkpoint_names(jaxpr, name_of, source_of(call.name, call.layer.forward))
            kept.has_names = True
    return StagedLayer(call, jaxpr, unnamed, len(consts), kept, positions), consts


def _stage_forward(
    call: LayerCall, input_types: Sequence[Any], axes_of_output: dict[int, frozenset[Any]]
) -> tuple[Any, Values, tuple[SavedContext, list[int]]]:
    """Trace `forward` to a jaxpr of outputs and intermediates. Return also the context, and where residuals are."""
    axes = frozenset[Any]().union(*axes_of_output.values())

    def forward(*inputs: Any) -> tuple[Values, tuple[SavedContext, list[int]]]:
        if axes:  # gradients vary as inputs do, and cotangents of these outputs vary, so the inputs have to vary too
            inputs = tuple([varying_over(axes, x) if has_tangent(x) else x for x in inputs])
        kept, outputs, residuals = call.run_forward(inputs, [True] * len(inputs))
        # `id` identifies each residual: where the caller passed one array twice, the inputs are distinct tracers.
        known = {id(x) for x in (*inputs, *outputs)}
        intermediates = {id(x): x for x in residuals if id(x) not in known}.values()
        values = [*outputs, *intermediates]
        # If an output is also an input, `position` holds the position of the input.
        position = {id(x): i for i, x in enumerate(values, len(inputs))} | {id(x): i for i, x in enumerate(inputs)}
        positions = [position[id(x)] for x in residuals]
        if axes_of_output:
            values = [varying_over(axes_of_output.get(i, frozenset()), x) for i, x in enumerate(values)]
            kept.outputs.types = types_of(values[: len(outputs)])
        return values, (kept, positions)

    return stage(forward, input_types, source_of(call.name, call.layer.forward), call.arguments.tensor_names())


def _missing_axes(jaxpr: Any, outputs: Outputs) -> dict[int, frozenset[Any]]:
    """Map the index of each output that must vary over more mesh axes to the set of these axes.

    In a shard_map, suppose that an input x varies over a mesh axis, and an output y depends on no such input. JAX would
    sum the cotangent of y over the axis, and `backward` would compute a wrong gradient of x: see NOTE [all outputs are
    batched] in `_jax/rule_function.py`. So y is made to vary. An output that depends on such an input, but does not
    vary, was reduced by `forward`, and stays the same. tests: devices/test_shard_map.py
    """
    missing: dict[int, frozenset[Any]] = {}
    for axis in {axis for v in jaxpr.invars for axis in v.aval.manual_axis_type.varying}:
        inputs = [v for v in jaxpr.invars if axis in varying_axes(v.aval)]
        if not any(has_tangent(v.aval) for v in inputs):
            continue
        depends = dependence(jaxpr, inputs)
        for i, aval in enumerate(outputs.types):
            if outputs.has_tangent[i] and not depends[i] and axis not in varying_axes(aval):
                missing[i] = missing.get(i, frozenset()) | {axis}
    return missing


def _outputs_and_tangents(
    call: LayerCall, run: ForwardResult, inputs: Sequence[Any], tangents: Sequence[Any], packs: bool
) -> tuple[Values, Values]:
    needs = [t is not None for t in tangents]
    linear, outputs, residuals = linearize(call, run, inputs, needs, packs)
    pushed = apply_linear(linear, residuals, select(tangents, needs)) if linear.types else []
    return outputs, scatter(pushed, run.kept.outputs.has_tangent)


def linearize(
    call: LayerCall, run: ForwardResult, inputs: Sequence[Any], needs: Sequence[bool], packs: bool
) -> tuple[LayerMap, Values, Values]:
    """Return the linear map of a run of `forward`, the outputs, and the residuals, packed if `packs`."""
    kept, outputs, residuals = run
    n = kept.n_saved
    if not any(kept.outputs.has_tangent):
        warn_of_integer_outputs(call.layer, kept.outputs, call.arguments, needs)
    packed = None  # residuals with positions in `residuals` in place of arrays, if hooks have packed in a block
    if packs and call.saver is not None and n:
        names = call.residual_names(kept)
        trees, arrays, outputs = call.saver.save(f"{call.name}, saved tensor", names, inputs, residuals[:n], outputs)
        residuals = [*arrays, *held(residuals[n:])]
        packed = trees and [*trees, *range(len(arrays), len(residuals))]
    if call.layer.saved_names:
        named = dict[int, Any]()  # id of an array -> the array, named after a tensor that is restored from it
        for name, positions in zip(call.checkpoint_names(kept), packed[:n] if packed else range(n), strict=True):
            for x in [residuals[i] for i in jax.tree_util.tree_leaves(positions)]:
                # The jaxpr of a staged `forward` names all residuals except inputs. Packed arrays have no name yet.
                is_named = id(x) in named or (kept.has_names and packed is None and not contains(inputs, x))
                if name and not is_named and is_tracer(x):
                    named[id(x)] = checkpoint_name(x, name)
        # Replace a saved output by the named residual: then JAX computes the output only once if a policy saves it.
        residuals, outputs = ([named.get(id(x), x) for x in values] for values in (residuals, outputs))
    return LayerMap(call, kept, len(residuals), list(needs), packed), outputs, residuals


# -- the custom_vjp function of each class ------------------------------------------------------------


@jax.tree_util.register_static
class TracedCall(RuleFunction):
    """One application of a layer: the first argument of the custom_vjp function, which is a pytree without leaves.

    In eager mode, it takes the place of that function where JAX does not allow one: `forward` sees concrete values.
    """

    def __init__(self, call: LayerCall, is_deferred: bool) -> None:
        self.call, self.name = call, call.name
        self.is_deferred = is_deferred  # whether JAX stages the call: it may run the fwd rule later, and more than once
        self.staged: dict[tuple[Any, ...], StagedLayer] = {}  # by input types, if `forward` has no closed-over values
        self.maps: list[LayerMap] = []  # one for each run of the fwd rule, which JAX memoizes

    def stage(self, types: Sequence[Any], primals: Sequence[Any] = ()) -> tuple[StagedLayer, Values]:
        """Return the staged `forward` and its consts. Only an error reads `primals`, those of a rule."""
        key = tuple(types)
        if (staged := self.staged.get(key)) is not None:
            return staged, []
        staged, consts = stage_layer(self.call, key, primals)
        if not consts:  # closed-over values belong to the current trace, so they are not cached
            self.staged[key] = staged
        return staged, consts

    def run(self, *args: Any) -> Values:
        return self.call.run_on_values(as_arrays(args), [False] * len(args)).outputs

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        primals = as_arrays(primals)  # jax.grad(f)(2.0) passes a Python number, not an array
        if any(map(is_tracer, primals)):
            staged, consts = self.stage(types_of(primals), primals)
            n = staged.n_outputs
            values, found = staged.packing().rule([*consts, *primals], [*[None] * len(consts), *tangents])
            return values[:n], found[:n]
        with set_current_trace(trace_of_primals(primals)):
            run = self.call.run_on_values(primals, [t is not None for t in tangents])
        return _outputs_and_tangents(self.call, run, primals, tangents, keeps_residuals(tangents))

    def batch(self, axis: Any, dims: Sequence[Any], types: Sequence[Any]) -> tuple[BatchedFunction, Values]:
        staged, consts = self.stage(self.call.arguments.types)
        all_dims, all_types = [*[None] * len(consts), *dims], [*types_of(consts), *types]
        batched, more = staged.packing().batch(axis, all_dims, all_types)
        return batched, [*more, *consts]


def _primal(traced_call: TracedCall, *tensors: Any) -> tuple[Any, ...]:
    call = traced_call.call
    if any(call.arguments.ref_mask):
        return tuple(call.run_forward(as_arrays(tensors), [False] * len(tensors)).outputs)
    if not traced_call.is_deferred and not any(map(is_tracer, tensors)):
        return tuple(traced_call.run(*tensors))
    staged, consts = traced_call.stage(types_of(tensors))
    # JAX batches `forward` and the fwd rule separately, and assumes equal batch axes. If they differed, JAX would
    # silently exchange axes of equal size. The fwd rule applies a `RuleFunction`, so these outputs get its batch axes:
    # see NOTE [all outputs are batched] in `_jax/rule_function.py`. tests: layers/test_transforms.py
    return tuple(as_batched_as(tensors, evaluate_jaxpr(staged.outputs_jaxpr, *consts, *tensors)))


def _fwd(traced_call: TracedCall, *primals: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    call = traced_call.call
    tensors = [p.value for p in primals]
    needs = [p.perturbed for p in primals]
    if not traced_call.is_deferred and not any(map(is_tracer, tensors)):
        tensors = as_arrays(tensors)  # jax.grad(f)(2.0) passes a Python number, not an array
        run = call.run_on_values(tensors, needs)
    else:
        # If a staged call differentiates a value that `backward` closes over, JAX would silently treat it as a constant
        # (as of jax 0.12, also in a plain `jax.custom_vjp`). tests: test_closed_over.py
        closed = closed_over(call.layer.backward).values() if traced_call.is_deferred else ()
        if any(is_differentiated(x) for found in closed for x in found):
            raise call.closed_over_error("backward")
        staged, consts = traced_call.stage(types_of(tensors), tensors)
        values = apply(staged, [*consts, *tensors])
        run = ForwardResult(staged.kept, values[: staged.n_outputs], staged.residuals(tensors, values))
    return _remember(traced_call, run, tensors, needs)


def _remember(
    traced_call: TracedCall, run: ForwardResult, inputs: Sequence[Any], needs: list[bool]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the results of the fwd rule, and append the `LayerMap` of this run to `traced_call.maps`.

    NOTE [several runs]
    JAX may run the fwd rule several times for one application, and then passes the treedef of the last run to every bwd
    rule. But the runs may differ: hooks may return other objects, and `forward` may keep another value of a `jax.Ref`.
    Therefore, if JAX stages the call, each run has a number, which the bwd rule reads from the shape `(number, 0)` of
    an additional residual. This residual takes no memory. tests: test_several_runs.py
    It is no constant: in a derivative of a `jax.checkpoint` with a tuple for `prevent_cse`, JAX does not count those.
    """
    linear, outputs, residuals = linearize(traced_call.call, run, inputs, needs, packs=True)
    maps = traced_call.maps
    if maps and maps[0].n_residuals != linear.n_residuals:
        raise ValueError(
            f"{traced_call.call.name} kept {maps[0].n_residuals} arrays for backward the first time that JAX traced it "
            f"here, and {linear.n_residuals} the next time. forward, and hooks that pack, have to keep as many each "
            "time; or differentiate inside jit: jax.jit(jax.grad(f))."
        )
    maps.append(linear)
    number = [jax.lax.broadcast(False, (len(maps) - 1, 0))] if traced_call.is_deferred else []
    return tuple(outputs), (traced_call, *residuals, *number)


def _bwd(residuals: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    traced_call, arrays = residuals[0], residuals[1:]
    number = arrays[-1].shape[0] if traced_call.is_deferred else 0
    # The cotangent of an integer has dtype float0. A vjp function also accepts a Python number, which has no dtype.
    is_zero = [isinstance(c, SymbolicZero) or getattr(c, "dtype", None) == jax.dtypes.float0 for c in cotangents]
    given = [None if zero else c for zero, c in zip(is_zero, cotangents, strict=True)]
    linear = traced_call.maps[number]
    with jax.enable_x64(linear.has_x64):
        gradients = linear.gradients(arrays[: linear.n_residuals], given)
        traces = set[Any]().union(*map(batch_traces, given))
        if not traces:
            return None, *gradients
        # JAX sums a gradient over the examples of each `jax.vmap` that batches it, and of no other: see NOTE [all
        # outputs are batched] in `_jax/rule_function.py`. `jnp.where` is batched like its condition.
        condition = functools.reduce(jnp.logical_or, [jnp.any(c) for c in given if c is not None])
        return None, *[g if g is None or traces <= batch_traces(g) else jnp.where(condition, g, g) for g in gradients]


# A call that takes a Ref uses a separate custom_vjp function. It has no symbolic zeros: with these, JAX would not
# recognize that a residual of the fwd rule is an argument Ref. It does not stage `forward`, since the primitives of
# this package cannot write to a Ref. A second derivative is an error: it would differentiate the code of `forward`,
# and ignore `backward`.


def _fwd_with_ref(traced_call: TracedCall, *tensors: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    call = traced_call.call
    tensors = tuple(as_arrays(tensors))
    needs = [True] * len(tensors)
    error = lambda: once_differentiable_error(call.layer) or ref_error(call)
    try:
        kept, outputs, residuals = call.run_forward(tensors, needs)
    except Exception as refused:
        if any(map(is_differentiated, tensors)):  # JAX refuses to write a differentiated value to a Ref
            raise error() from refused
        raise
    outputs, residuals = forbid_derivative(outputs, error), forbid_derivative(residuals, error)
    return _remember(traced_call, ForwardResult(kept, outputs, residuals), tensors, needs)


def ref_error(call: LayerCall) -> TypeError:
    return TypeError(
        f"{call.name}.apply takes a jax.Ref ({', '.join(call.arguments.ref_names())}). Such a call has a first "
        "derivative in reverse mode only: no second derivative, no forward mode, no vmap method, no gradient of what "
        "the Ref holds. Where the Ref is only read, pass its value: ref[...]."
    )


_BY_POSITION: Final = inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])
# Not class attributes: a class made by type(name, bases, dict(vars(other))) would share those of `other`.
_custom_vjps: weakref.WeakKeyDictionary[type, dict[bool, Any]] = weakref.WeakKeyDictionary()


def custom_vjp_of(layer: Any, takes_refs: bool) -> Callable[..., tuple[Any, ...]]:
    """Return the cached `jax.custom_vjp` function of a class: (traced_call, *tensors) -> outputs."""
    functions = _custom_vjps.setdefault(layer, {})
    if takes_refs not in functions:
        # NOTE [names made once]
        # At each call of a custom_vjp function, JAX reads the signatures of its three functions, and derives names for
        # error messages. This takes a fifth of the time that JAX needs to trace a layer. Therefore each copy has the
        # signature and the names as attributes, which JAX reads instead. If JAX stops reading `__fun_debug_info__`,
        # tracing is slower.
        name, copies = layer.__qualname__, list[Any]()
        for rule in (_primal, _fwd_with_ref if takes_refs else _fwd, _bwd):
            copied: Any = types.FunctionType(rule.__code__, rule.__globals__, name)
            copied.__qualname__ = name
            copied.__signature__ = _BY_POSITION
            copied.__fun_debug_info__ = DebugInfo("custom_vjp", source_of(name, layer.forward), None, None)
            copies.append(copied)
        primal, fwd, bwd = copies
        function = jax.custom_vjp(primal)
        function.defvjp(fwd, bwd, symbolic_zeros=not takes_refs)
        functions.setdefault(takes_refs, function)  # another thread may have made the function meanwhile
    return functions[takes_refs]
