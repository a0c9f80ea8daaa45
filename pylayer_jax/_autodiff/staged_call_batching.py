"""A staged call for a batch of examples, by JAX's batching or by the layer's own `vmap`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pylayer_jax._jax.imports import eval_jaxpr
from pylayer_jax._jax.jaxprs import stage
from pylayer_jax._jax.primitives import vmap_as_needed, vmap_over
from pylayer_jax._jax.types import typeof
from pylayer_jax._methods.batches import check_mapped, map_outputs

from .derivative import Batch
from .staged_call import StagedCall


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class BatchedStagedCall(StagedCall):
    """A staged call for a batch of examples."""

    inner: StagedCall
    axis: Any
    types: Sequence[Any]  # of the consts and inputs
    dims: list[Any]  # where each of them has the mapped axis, or None
    out_dims: list[Any]  # likewise for the outputs and intermediates

    def intermediates(self, *args: Any) -> list[Any]:
        own = len(self.jaxpr.invars) - len(self.dims)  # the constants of the batched code
        in_dims = (*self.dims, *[0] * len(self.inner.carriers))
        return vmap_over(self.axis, self.inner.intermediates, in_dims, self.out_dims[self.inner.outputs :])(*args[own:])

    def carried(self) -> list[bool]:
        return self.inner.carried()

    def restage_for(self, perturbed: Sequence[bool]) -> tuple[StagedCall, list[Any]] | None:
        restaged = self.inner.restage_for(perturbed)
        if restaged is None:
            return None
        inner, consts = restaged
        types = [*map(typeof, consts), *self.types[self.inner.consts :]]
        dims = [None] * len(consts) + self.dims[self.inner.consts :]
        batched, more_consts, _ = batch_staged_call(inner, self.axis, types, dims)
        return batched, [*more_consts, *consts]


def batch_staged_call(
    staged: StagedCall, axis: Any, types: Sequence[Any], dims: list[Any]
) -> tuple[BatchedStagedCall, list[Any], list[Any]]:
    """The call for a batch of examples, its additional consts, and where each of its results has the mapped axis.

    `types` and `dims` are those of all consts and inputs.
    """
    __tracebackhide__ = True
    # Every output gets the mapped axis: NOTE [shared outputs]. An intermediate has no cotangent and stays as it is.
    # Only one application can be handed to the layer's `vmap`; JAX batches the batch.
    if staged.call.layer._has_vmap_method() and not isinstance(staged, BatchedStagedCall):
        mapped = _by_vmap_method(staged, axis, dims)
    else:
        always = [*[True] * staged.outputs, *staged.carried()]
        mapped = vmap_as_needed(axis, lambda *xs: eval_jaxpr(staged.jaxpr, (), *xs), dims, always)
    jaxpr, consts, out_dims = stage(mapped, types, staged.name)
    by_source = {"input": dims[staged.consts :], "output": out_dims, "intermediate": out_dims[staged.outputs :]}
    batch_of_inputs = Batch(axis, [by_source[kind][i] for kind, i in staged.sources], dims[staged.consts :])
    derivative = staged.derivative.batched(batch_of_inputs, [v.aval for v in jaxpr.outvars[: staged.outputs]])
    batched = BatchedStagedCall(
        staged.call,
        staged.saved,
        derivative,
        jaxpr,
        len(consts) + staged.consts,
        staged.sources,
        staged.is_traceable,
        staged.packs,
        staged.carriers,
        inner=staged,
        axis=axis,
        types=types,
        dims=dims,
        out_dims=out_dims,
    )
    return batched, consts, out_dims


def _by_vmap_method(staged: StagedCall, axis: Any, dims: list[Any]) -> Callable[..., tuple[list[Any], list[Any]]]:
    """Outputs by the layer's own batching, and intermediates by JAX's, from inputs and outputs; and where each has the
    mapped axis.
    """

    def mapped(*args: Any) -> tuple[list[Any], list[Any]]:
        __tracebackhide__ = True
        inputs = args[staged.consts :]
        vmap, arguments = staged.call.layer.vmap, staged.call.arguments
        with staged.call.scope("vmap"):
            _, outputs = map_outputs(vmap, arguments, axis, dims[staged.consts :], inputs)
        check_mapped(staged.name, axis, outputs, [v.aval for v in staged.jaxpr.outvars[: staged.outputs]])
        out_dims = [0] * len(outputs)
        if not (count := len(staged.jaxpr.outvars) - staged.outputs):
            return outputs, out_dims
        in_dims = [*dims, *[0] * len(staged.carriers)]
        intermediates = vmap_as_needed(axis, staged.intermediates, in_dims, [False] * count)
        rest, rest_dims = intermediates(*args, *(outputs[i] for i in staged.carriers))
        return [*outputs, *rest], out_dims + rest_dims

    return mapped
