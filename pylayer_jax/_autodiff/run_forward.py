"""Running `forward`: undifferentiated, or with everything that its context keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._hooks.open_blocks import hooks_suspended
from pylayer_jax._jax.tracers import is_leaked, is_of_no_active_trace
from pylayer_jax._jax.types import as_arrays, has_tangent
from pylayer_jax._methods.arguments import bind
from pylayer_jax._methods.context import ContextState, Phase, PyLayerContext
from pylayer_jax._methods.mistakes import Attributes
from pylayer_jax._methods.outputs import Outputs
from pylayer_jax._trees.closures import is_live, is_of_current_jaxpr
from pylayer_jax._trees.messages import add_note, plural
from pylayer_jax._trees.partition import as_jax, flatten

from .layer_call import LayerCall, null_context
from .saved_state import SavedState, save_state

_TO_CONVERT_OR_CHECK = (np.ndarray, np.generic, jax.Ref)


def forward_only(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `forward` when nothing is traced, so that nothing is differentiated: no rule, no binding of arguments."""
    __tracebackhide__ = True
    name, forward = layer.__qualname__, layer._forward_with_ctx()
    leaves, treedef = flatten((args, kwargs))
    count = len(args) + len(kwargs)
    inputs: Any = leaves
    atoms = len(leaves) + sum(x is None for x in (*args, *kwargs.values()))
    # More than a node for each argument, the tuple of them, the dict, and both; or an empty list.
    if treedef.num_nodes > count + 3 or atoms < count:
        arguments = bind(name, forward, args, kwargs)
        inputs = arguments.take_tensors()
        function = functools.partial(arguments.call, "forward", forward, tensors=inputs, layer=layer)
    else:
        if any(isinstance(leaf, _TO_CONVERT_OR_CHECK) for leaf in leaves):
            bind(name, forward, args, kwargs)  # refuses a Ref that is passed twice
            args, kwargs = as_jax((args, kwargs))
            inputs = (args, kwargs)

        def function(ctx: PyLayerContext) -> Any:
            __tracebackhide__ = True
            attributes = Attributes((), leaves, layer)
            result = forward(ctx, *args, **kwargs)
            attributes.check(name, "forward", result)
            return result

    state = ContextState(name, Phase.FORWARD, lambda: (False,) * count, inputs)
    try:
        _, result = _run(layer, state, "forward", function)
    except TypeError:
        bind(name, forward, args, kwargs)  # if the call does not fit the signature, this error is better
        raise
    if isinstance(result, jax.Array) and not state.must_return:
        return result
    outputs, _, arrays = Outputs.of(name, result, (), state)
    return outputs.skeleton.fill(arrays)


def run_undifferentiated(call: LayerCall, tensors: Sequence[Any], needs: bool = False) -> tuple[Outputs, list[Any]]:
    """Run `forward` when nothing is differentiated. Returns the outputs and their tensors.

    `needs` says whether every gradient counts as needed, since the same jaxpr may be differentiated later.
    """
    __tracebackhide__ = True
    needs_grad = call.arguments.can_get_gradient([needs] * len(tensors))
    tensors = _distinct(as_arrays(tensors))
    ctx, result = _run_call(call, "forward", call.layer._forward_with_ctx(), tensors, needs_grad)
    outputs, _, arrays = Outputs.of(call.name, result, tensors, ctx._state)
    if ctx._state.read_needs_input_grad:
        # If it is differentiated later, `forward` runs again and may mark others.
        outputs.non_differentiable = frozenset()
    return outputs, arrays


def run_and_save(
    call: LayerCall, tensors: Sequence[Any], needs_grad: list[bool], perturbed_is_exact: bool = True
) -> tuple[SavedState, list[Any], list[Any]]:
    """Run `forward`. Returns its saved state, the output tensors, and the residuals."""
    __tracebackhide__ = True
    inputs = _distinct(tensors)
    ctx, result = _run_call(call, "forward", call.layer._forward_with_ctx(), inputs, needs_grad)
    return _saved(call, ctx, tensors, inputs, result, needs_grad, perturbed_is_exact)


def run_setup_context(
    call: LayerCall, outputs: Outputs, values: Sequence[Any], tensors: Sequence[Any], needs_grad: list[bool]
) -> tuple[SavedState, list[Any]]:
    """Run `setup_context` on outputs that `forward` returned before. Returns its saved state, and the residuals."""
    inputs = _distinct(tensors)
    result = outputs.skeleton.fill(outputs.as_returned(values, inputs))
    setup_context = functools.partial(call.layer._run_setup_context, result)
    ctx, _ = _run_call(call, "setup_context", setup_context, inputs, needs_grad)
    saved, _, residuals = _saved(call, ctx, tensors, inputs, result, needs_grad)
    return saved, residuals


def _run_call(
    call: LayerCall, method: str, function: Callable[..., Any], tensors: Sequence[Any], needs_grad: list[bool]
) -> tuple[PyLayerContext, Any]:
    __tracebackhide__ = True
    arguments = call.arguments
    state = ContextState(call.name, Phase.FORWARD, lambda: arguments.needs(needs_grad), tensors)

    def run(ctx: PyLayerContext) -> Any:
        __tracebackhide__ = True
        return arguments.call(method, function, ctx, tensors, call.layer)

    # Inside `forward` only `ctx` saves tensors, and an active pair would give every eager operation its own entry in
    # the compile cache.
    with null_context if call.hooks is None else hooks_suspended(), call.scope(method):
        return _run(call.layer, state, method, run)


def _distinct(tensors: Sequence[Any]) -> Sequence[Any]:
    """The tensors, each an object of its own: an array that was passed twice is two inputs."""
    if len({id(x) for x in tensors}) == len(tensors):
        return tensors
    seen: dict[int, int] = {}
    return [x if seen.setdefault(id(x), i) == i or not has_tangent(x) else jnp.copy(x) for i, x in enumerate(tensors)]


def _run(
    layer: Any, state: ContextState, method: str, function: Callable[[PyLayerContext], Any]
) -> tuple[PyLayerContext, Any]:
    __tracebackhide__ = True
    ctx = layer._context(state)
    try:
        result = function(ctx)
    except Exception as error:
        add_note(error, state.layer, method)
        raise
    state.phase = Phase.RETURNED
    state.inputs = ()
    return ctx, result


def _saved(
    call: LayerCall,
    ctx: PyLayerContext,
    tensors: Sequence[Any],
    inputs: Sequence[Any],
    result: Any,
    needs_grad: list[bool],
    perturbed_is_exact: bool = True,
) -> tuple[SavedState, list[Any], list[Any]]:
    outputs, returned, arrays = Outputs.of(call.name, result, inputs, ctx._state)
    _check_saved_names(call, ctx._state.saved)
    stands_for = ctx._state.numpy_outputs(returned, arrays)
    # An array that was passed twice is kept once.
    stands_for |= {id(copy): x for copy, x in zip(inputs, tensors, strict=True) if copy is not x}
    saved, residuals = save_state(
        ctx,
        outputs,
        stands_for,
        needs_grad,
        perturbed_is_exact=perturbed_is_exact,
        has_jvp=call.layer._jvp_method() is not None,
        packs=call.hooks is not None,
        is_hidden=is_live if call.reaches_traced_values else is_of_current_jaxpr,
    )
    _check_residuals(call, saved, residuals)
    return saved, arrays, residuals


def _check_residuals(call: LayerCall, saved: SavedState, residuals: Sequence[Any]) -> None:
    """Refuse what a function left on the context that JAX traced within `forward`, or in place of it."""
    # Only a call that is staged where it is applied keeps values of a trace that is further out.
    is_lost = is_leaked if call.reaches_traced_values else is_of_no_active_trace
    if any(map(is_lost, residuals)):
        names = saved.residual_names(len(residuals))
        lost = [name for name, x in zip(names, residuals, strict=True) if is_lost(x)]
        raise ValueError(
            f"{call.name}.forward kept a traced value ({', '.join(lost)}) of a function that JAX traced by itself and "
            "that has returned: of forward under jax.jit, or of a jitted function or a branch of jax.lax.cond that got "
            "ctx. Return the value from that function, and keep it on ctx outside. To compile forward, put jax.jit "
            f"around the function that calls {call.name}.apply."
        )


def _check_saved_names(call: LayerCall, saved: tuple[Any, ...] | None) -> None:
    names = call.layer.saved_names
    if isinstance(names, tuple) and names and saved is not None and len(saved) != len(names):
        raise ValueError(
            f"{call.name}.saved_names has {plural(len(names), 'name', 'names')} {names}, but ctx.save_for_backward in "
            f"{call.name}.forward saved {plural(len(saved), 'value', 'values')}. Give one name for each value."
        )
