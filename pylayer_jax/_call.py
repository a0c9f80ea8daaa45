"""Runs the methods `forward`, `backward`, `jvp` and `vmap` of a class for one call of the layer."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from . import _host_layer
from ._arguments import Arguments, match_gradients, match_tangents
from ._context import ContextState, ForwardResult, Outputs, PyLayerContext, ResidualTree, SavedContext, keep
from ._jax.rule_function import batch_axis_to_front
from ._jax.traces import TraceState, is_differentiated, is_staging, is_tracer
from ._jax.types import has_tangent, is_array, is_tensor, number_as, tangent_type, zeros_of
from ._messages import add_note, closed_over, describe, innermost, noting, plural
from ._trees import Skeleton, contains, split

__tracebackhide__ = True  # pytest hides these frames: errors raised here concern the user's values

# True while a `backward` runs that JAX may transpose, or differentiate in forward mode. `jax.custom_vjp` supports
# neither, so layers in this `backward` do not use it. A jitted function may apply a layer, so the flag is part of the
# cache key of `jax.jit`.
in_transposable_backward: Final = jax.make_user_context(False)

_null_context: Final = contextlib.nullcontext()


class VmapInfo(NamedTuple):
    """The first argument of a layer's `vmap`, which describes the batch."""

    batch_size: int  # the number of examples
    randomness: str  # always "error", a value of torch.vmap: in JAX, random keys are ordinary arguments


class LayerCall:
    """One call of a layer, without the tensors."""

    def __init__(self, layer: Any, arguments: Arguments) -> None:
        self.layer = layer
        self.name = arguments.layer_name
        self.arguments = arguments
        # The `Saver` of the hooks around the call, or None. JAX may run a fwd rule after the block has ended.
        self.saver: Any = None
        # The structure of the outputs of the last run of `forward`: a custom_vjp function returns only arrays.
        self.outputs: Outputs | None = None

    def scope(self, method: str, is_staged: bool) -> contextlib.AbstractContextManager[Any]:
        """Name a method's operations in profiles and HLO, e.g. `Tanh/forward`."""
        # In eager mode, JAX compiles each operation separately and ignores name scopes.
        return jax.named_scope(f"{self.layer.__name__}/{method}") if is_staged else _null_context

    def _given_names(self, kept: SavedContext) -> list[str | None]:
        given = self.layer.saved_names
        if not given or self.layer.host is True:  # then JAX keeps the inputs, whatever `forward` saves
            return [None] * kept.n_values
        if given is True:
            return [f"{self.layer.__name__}.saved[{i}]" for i in range(kept.n_values)]
        if len(given) != kept.n_values:
            raise ValueError(
                f"{self.name}.saved_names has {len(given)} names, but forward saved {kept.n_values} values with "
                "ctx.save_for_backward. Give one for each, None for a value without a name."
            )
        return list(given)

    def checkpoint_names(self, kept: SavedContext) -> list[str]:
        """Return the name of each saved tensor for the policies of `jax.checkpoint`, or ""."""
        return kept.names(self._given_names(kept))[: kept.n_saved]

    def residual_names(self, kept: SavedContext) -> list[str]:
        """Return the name of each residual for hooks and reports."""
        given = [None] * kept.n_values if self.layer.saved_names is True else self._given_names(kept)
        return kept.names([name or f"saved[{i}]" for i, name in enumerate(given)])

    # -- forward ---------------------------------------------------------------------------------------

    def run_forward(self, tensors: Sequence[Any], needs: Sequence[bool]) -> ForwardResult:
        """Run `forward`, and collect the residuals. `needs` has one bool per tensor."""
        ctx, result = self._call_forward(tensors, needs, is_staging())
        run = keep(ctx, result, self.layer)
        self.outputs = run.kept.outputs
        return run

    def run_undifferentiated(self, tensors: Sequence[Any]) -> Any:
        ctx, result = self._call_forward(tensors, [False] * len(tensors), False)
        if is_array(result) and not ctx._state.must_return:  # the usual case
            return result
        run = keep(ctx, result, self.layer)
        return run.kept.outputs.skeleton.fill(run.outputs)

    def run_on_values(self, tensors: Sequence[Any], needs: Sequence[bool]) -> ForwardResult:
        """Run `forward` on concrete values. It must not close over a value that is being differentiated."""
        # If the caller passed one array twice, copy it, so that `id()` distinguishes the arguments.
        originals: dict[int, Any] = {}
        if len(set(map(id, tensors))) < len(tensors):
            copies = [jnp.copy(x) if contains(tensors[:i], x) else x for i, x in enumerate(tensors)]
            originals = {id(own): x for own, x in zip(copies, tensors, strict=True)}
            tensors = copies
        run = self.run_forward(tensors, needs)
        if originals:  # put the originals back, so that hooks pack each array only once
            run = run._replace(residuals=[originals.get(id(x), x) for x in run.residuals])
        if any(map(is_differentiated, [*run.outputs, *run.residuals])):
            raise self.closed_over_error()
        return run

    def _call_forward(
        self, tensors: Sequence[Any], needs: Sequence[bool], is_staged: bool
    ) -> tuple[PyLayerContext, Any]:
        state = ContextState(self.name, lambda: self.arguments.needs_input_grad(needs), tensors)
        ctx = self.layer._context_class(state)
        try:
            with self.scope("forward", is_staged):
                if self.layer.host:
                    return ctx, _host_layer.run_forward(self, ctx, tensors)
                return ctx, self.arguments.call("forward", self.layer._forward_with_ctx(), tensors, ctx)
        except Exception as error:
            add_note(error, self.name, "forward")
            raise
        finally:
            state.in_forward = False

    def closed_over_error(self, method: str = "forward") -> Exception:
        own = closed_over(getattr(self.layer, method))
        traced = [name for name, tensors in own.items() if any(map(is_tracer, tensors))]
        names = {name: name for name in traced or [name for name, tensors in own.items() if tensors]}
        for argument in self.arguments.passed if method == "forward" else ():
            for path, static in argument.skeleton.paths():
                for name, tensors in closed_over(static).items():
                    if any(map(is_tracer, tensors)):
                        names[f"{name} (in argument {argument.name}{path})"] = name
        found = f": {', '.join(names)}" if names else ""
        example = next(iter(names.values()), "value")
        return jax.errors.UnexpectedTracerError(
            f"{self.name}.{method} uses a traced value that it closes over, or that is held by a function or object "
            f"that is no pytree{found}. Its gradient would be lost, since backward returns gradients for the arguments "
            f"of forward alone. Pass it as an argument: {self.name}.apply(..., {example}); a function with its values "
            "becomes a pytree by jax.tree_util.Partial, a type that holds arrays by jax.tree_util.register_dataclass."
        )

    # -- backward --------------------------------------------------------------------------------------

    def run_backward(
        self, kept: SavedContext, residual: Callable[[int], Any], needs: Sequence[bool], cotangents: Sequence[Any]
    ) -> list[Any]:
        """Run `backward`, and return one gradient per tensor of the call. `residual` reads one by its index."""
        layer, outputs, arguments = self.layer, kept.outputs, self.arguments
        rows = zip(cotangents, outputs.types, outputs.has_tangent, strict=True)
        cotangents = [number_as(c, t) if can_have_one else None for c, t, can_have_one in rows]
        if all(c is None for c in cotangents):
            return [None] * len(arguments.types)
        ctx = self._context_of(kept, residual, needs, kept.saved)
        if layer.host == "forward":
            cotangents = _host_layer.depending_on_run(ctx, cotangents)
        is_conjugated = layer.complex_convention == "paddle"
        cotangents = _conjugated(cotangents) if is_conjugated else cotangents
        entries = outputs.cotangents(cotangents, kept.materialize, layer._torch_convention)
        state = TraceState()
        scope = self.scope("backward", state.is_staged)
        # Nothing transposes a first derivative in eager mode. There, layers within `backward` are faster with
        # `jax.custom_vjp`, and JAX compiles jitted functions again if the flag changes.
        may_be_transposed = state.is_staged or state.is_differentiated
        backward = functools.partial(_host_layer.run_backward, self, needs) if layer.host is True else layer.backward
        try:
            with in_transposable_backward(True) if may_be_transposed else _null_context, scope:
                result = backward(ctx, *entries)
        except Exception as error:
            if isinstance(error, TypeError) and (misfit := _misfit(error, layer.backward, (ctx, *entries))):
                static = [str(i) for i, x in enumerate(outputs.groups) if not x.size and not layer._torch_convention]
                without = f" (output {', '.join(static)} holds no array, and so has no cotangent)" if static else ""
                raise TypeError(
                    f"{self.name}.backward: forward returned {plural(len(outputs.groups), 'output')}"
                    f"{without}, so backward takes ctx and {plural(len(entries), 'cotangent')}: {misfit}."
                ) from error
            add_note(error, self.name, "backward")
            raise
        if layer.host is not True:
            result = match_gradients(result, arguments, arguments.can_get_gradient(needs), layer)
        return _conjugated(result) if is_conjugated else result

    def run_jvp(
        self, kept: SavedContext, residual: Callable[[int], Any], needs: Sequence[bool], tangents: Sequence[Any]
    ) -> list[Any]:
        """Run `jvp` on one tangent per tensor. Return one per differentiable output."""
        ctx = self._context_of(kept, residual, needs, kept.saved_for_jvp or kept.saved)
        full = [
            zeros_of(tangent_type(a) if has_tangent(a) else a) if t is None and kept.materialize else number_as(t, a)
            for t, a in zip(tangents, self.arguments.types, strict=True)
        ]
        with noting(self.name, "jvp"), self.scope("jvp", is_staging()):
            result = self.layer.jvp(ctx, *self.arguments.per_argument(full))
        return match_tangents(result, kept.outputs, self.name)

    def _context_of(
        self, kept: SavedContext, residual: Callable[[int], Any], needs: Sequence[bool], saved: ResidualTree | None
    ) -> Any:
        attributes = {name: tree.fill(residual) for name, tree in kept.attributes.items()}
        return self.backward_context(needs, lambda: None if saved is None else saved.fill(residual), attributes)

    def backward_context(self, needs: Sequence[bool], load_saved: Callable[[], Any], attributes: dict[str, Any]) -> Any:
        needs_input_grad = lambda: self.arguments.needs_input_grad(needs)
        state = ContextState(self.name, needs_input_grad, in_forward=False, load_saved=load_saved)
        ctx = self.layer._context_class(state)
        vars(ctx).update(attributes)
        return ctx

    # -- vmap --------------------------------------------------------------------------------------------

    def run_vmap(self, axis: Any, dims: Sequence[Any], tensors: Sequence[Any], expected: Outputs) -> list[Any]:
        """Run `vmap`. Return its outputs in the order of `expected`, with the batch axis in front."""
        first = VmapInfo(axis.size, "error"), tuple(self.arguments.per_argument(dims))
        with noting(self.name, "vmap"), self.scope("vmap", is_staging()):
            if self.layer.host:
                return _host_layer.run_vmap(self, axis, tensors, *first)
            result = self.arguments.call("vmap", self.layer.vmap, tensors, *first)
        skeleton, values = self.split_batch(axis, result, is_tensor, functools.partial(batch_axis_to_front, axis))
        value_at = dict(zip(skeleton.tensor_paths(), values, strict=True))
        found = {path: f"{x.dtype}{list(x.shape)}" for path, x in value_at.items()}
        types = zip(expected.skeleton.tensor_paths(), expected.types, strict=True)
        wanted = {path: f"{t.dtype}{[axis.size, *t.shape]}" for path, t in types}
        if found != wanted:
            needed, given = (", ".join(f"output{path}: {t}" for path, t in each.items()) for each in (wanted, found))
            raise ValueError(
                f"{self.name}.vmap: expected {needed} (with the batch axis in front), as forward returns for one "
                f"example; got {given}."
            )
        return [value_at[path] for path in wanted]  # a dict may have its keys in another order

    def split_batch(
        self, axis: Any, result: Any, is_output: Callable[[object], bool], to_front: Callable[[Any, Any], Any]
    ) -> tuple[Skeleton, list[Any]]:
        """Split what `vmap` returned, with the batch axis of each array in front."""
        cause: Exception | None = None
        if isinstance(result, tuple) and len(result) == 2:
            try:
                arrays, skeleton = split(result[0], is_output)
                dims = _dims_of_tensors(result[1], result[0], is_output)
                return skeleton, [to_front(x, dim) for x, dim in zip(arrays, dims, strict=True)]
            except (TypeError, ValueError) as error:
                cause = error
        raise ValueError(
            f"{self.name}.vmap: expected a pair (outputs, out_dims): what forward returns for the whole batch, and "
            f"where each output has the axis of size {axis.size}, or None; got {describe(result)}. {cause or ''}"
        ) from cause


def _dims_of_tensors(out_dims: Any, outputs: Any, is_output: Callable[[object], bool]) -> list[Any]:
    """Return the batch axis of each tensor. An int or None in `out_dims` applies to a whole subtree."""
    tensors, skeleton = split(outputs, is_output)
    if out_dims is None or isinstance(out_dims, int):
        return [out_dims] * len(tensors)
    if isinstance(out_dims, (tuple, list)) and type(outputs) is type(out_dims) and len(outputs) == len(out_dims):
        pairs = zip(out_dims, outputs, strict=True)
        return [dim for dims, output in pairs for dim in _dims_of_tensors(dims, output, is_output)]
    return skeleton.flatten_up_to(jax.tree.broadcast(out_dims, outputs, is_leaf=lambda x: x is None))


def _misfit(error: TypeError, function: Callable[..., Any], args: Sequence[Any]) -> str:
    """Return why `args` do not fit the signature of `function`, or "" if the error has another cause."""
    code = getattr(innermost(function), "__code__", None)
    if any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__)):
        return ""  # the function itself raised the error
    with contextlib.suppress(ValueError):  # a function implemented in C has no signature
        try:
            inspect.signature(function).bind(*args)
        except TypeError as misfit:
            return str(misfit)
    return ""


def _conjugated(values: Sequence[Any]) -> list[Any]:
    return [jnp.conj(x) if x is not None and jnp.iscomplexobj(x) else x for x in values]
