"""The `jax.custom_vjp` function of each class: see NOTE [orders] in `_layer_rule.py`."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from ._call import LayerCall
from ._context import ForwardResult
from ._jax.jaxprs import evaluate_jaxpr
from ._jax.rule_function import Values, apply, as_batched_as, merge, select
from ._jax.traces import DebugInfo, SymbolicZero, is_batched, is_differentiated, is_tracer
from ._jax.transparency import forbid_derivative
from ._jax.types import as_arrays, explicit_sharding, is_ref, types_of
from ._layer_rule import LayerMap, StagedLayer, linearize, stage_layer
from ._messages import closed_over, once_differentiable_error, source_of, tensors_in

__tracebackhide__ = True  # pytest hides these frames, as JAX does elsewhere


class TracedCall:
    """One application of a layer: the first argument of the custom_vjp function, which is a pytree without leaves."""

    def __init__(self, call: LayerCall, is_deferred: bool) -> None:
        self.call = call
        # True if JAX stages the call to a jaxpr, so that it may run the fwd rule later, and more than once.
        self.is_deferred = is_deferred
        self.staged: dict[tuple[Any, ...], StagedLayer] = {}  # by input types, if `forward` has no closed-over values
        self.maps: list[LayerMap] = []  # one linear map for each run of the fwd rule

    def stage(self, tensors: Sequence[Any], in_rule: bool = False) -> tuple[StagedLayer, Values]:
        """Return the staged `forward` and its consts. In a fwd rule, a derivative of `tensors` is a second one."""
        key = tuple(types_of(tensors))
        if (staged := self.staged.get(key)) is not None:
            return staged, []
        staged, consts = stage_layer(self.call, key, tensors if in_rule else ())
        if not consts:  # closed-over values belong to the current trace, so they are not cached
            self.staged[key] = staged
        return staged, consts


jax.tree_util.register_static(TracedCall)


def _primal(traced_call: TracedCall, *tensors: Any) -> tuple[Any, ...]:
    call, needs = traced_call.call, [False] * len(tensors)
    if call.arguments.ref_mask:
        return tuple(call.run_forward(as_arrays(tensors), needs).outputs)
    if not traced_call.is_deferred and not any(map(is_tracer, tensors)):
        return tuple(call.run_on_values(as_arrays(tensors), needs).outputs)
    staged, consts = traced_call.stage(tensors)
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
        if any(is_differentiated(x) for value in closed for x in tensors_in(value)):
            raise call.closed_over_error("backward")
        staged, consts = traced_call.stage(tensors, in_rule=True)
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
    gradients = traced_call.maps[number].gradients(arrays[: traced_call.maps[number].n_residuals], given)
    batched = next((c for c in given if is_batched(c)), None)
    if batched is None:
        return None, *gradients
    # JAX would not sum a gradient without a batch axis over the examples: see NOTE [all outputs are batched] in
    # `_jax/rule_function.py`. `jnp.where` is batched like its condition, which is any bool that is batched.
    has_entry = batched.size and explicit_sharding(batched) is None  # JAX cannot index along an explicit mesh axis
    condition = (batched[(0,) * batched.ndim] if has_entry else jnp.sum(batched)) == 0
    return None, *[g if g is None or is_batched(g) else jnp.where(condition, g, g) for g in gradients]


# -- calls with a Ref --------------------------------------------------------------------------------------
#
# A call that takes a Ref uses a separate custom_vjp function. It has no symbolic zeros: with these, JAX would not
# recognize that a residual of the fwd rule is an argument Ref. It does not stage `forward`, since the primitives of
# this package cannot write to a Ref. A second derivative is an error: it would differentiate the code of `forward`,
# and ignore `backward`.


def _fwd_with_ref(traced_call: TracedCall, *tensors: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    call = traced_call.call
    tensors = tuple(as_arrays(tensors))
    needs = [True] * len(tensors)

    def error() -> Exception:
        return once_differentiable_error(call.layer) or ref_error(call)

    try:
        kept, outputs, residuals = call.run_forward(tensors, needs)
    except Exception as refused:
        if any(map(is_differentiated, tensors)):  # JAX refuses to write a differentiated value to a Ref
            raise error() from refused
        raise
    arrays = [not is_ref(x) for x in residuals]
    outputs = forbid_derivative(outputs, error)
    residuals = merge(arrays, forbid_derivative(select(residuals, arrays), error), residuals)
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
