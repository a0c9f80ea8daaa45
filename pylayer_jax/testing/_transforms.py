"""Whether a layer gives the same outputs and gradients under a transform of JAX as in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pylayer_jax._jax import NEEDS_VALUES, has_tangent, is_key

from ._comparison import MismatchError, first_line
from ._layer_under_test import LayerUnderTest, outputs_and_grads

_EXAMPLES = 3


def jit(layer: LayerUnderTest) -> str:
    layer.compare_with_eager(jax.jit(layer.flat.outputs), "of jit")
    gradients = jax.jit(lambda values, cotangents: layer.flat.with_values(values).grads(cotangents))
    inside = gradients(layer.flat.values, layer.cotangents)
    layer.comparison.of_all(inside, layer.gradients, layer.gradient_names, "under jit")
    return "as in eager mode: outputs, gradients, gradients of the jitted layer"


def remat(layer: LayerUnderTest) -> str:
    layer.compare_with_eager(jax.checkpoint(layer.flat.outputs), "of jax.checkpoint")
    return "as in eager mode: outputs, gradients"


def cond(layer: LayerUnderTest) -> str:
    flat = layer.flat

    @jax.jit
    def run(predicate: Any, values: list[Any], cotangents: dict[int, Any]) -> Any:
        def outputs(values: list[Any]) -> list[Any]:
            # The other branch returns constants: if it were taken, the gradients would be zero.
            return jax.lax.cond(predicate, flat.outputs, lambda _: list(layer.outputs), values)

        return outputs_and_grads(outputs, values, cotangents)

    outputs, gradients = run(jnp.asarray(True), flat.values, layer.cotangents)
    layer.comparison.of_all(outputs, layer.outputs, layer.output_names, "of cond")
    layer.comparison.of_all(gradients, layer.gradients, layer.gradient_names, "of cond")
    return "as in eager mode: outputs, gradients, where a traced predicate chooses the layer"


def shard_map(layer: LayerUnderTest) -> str:
    flat = layer.flat
    tensors, cotangents, mesh, count = flat.tensors, layer.cotangents, None, jax.sharding.get_abstract_mesh().size
    if jax.sharding.get_abstract_mesh().empty:
        (kind,) = {device.platform for device in flat.values[0].devices()}
        devices = jax.local_devices(backend=kind)
        count = len(devices)
        mesh = jax.make_mesh((count,), ("devices",), axis_types=(AxisType.Auto,), devices=devices)
        # Arguments that are committed to other devices would be refused.
        tensors, cotangents = jax.device_put((tensors, cotangents), NamedSharding(mesh, PartitionSpec()))

    def run(tensors: list[Any], cotangents: dict[int, Any]) -> tuple[list[Any], list[Any]]:
        def shards(tensors: list[Any]) -> list[Any]:
            return flat.with_tensors(tensors).run()

        replicated = jax.shard_map(shards, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
        return outputs_and_grads(
            lambda values: replicated(flat.with_tensors(tensors).with_values(values).tensors),
            [tensors[i] for i in flat.differentiated],
            cotangents,
        )

    for label, runs in (("under jit", jax.jit(run)), ("eagerly", run)):
        outputs, gradients = runs(tensors, cotangents)
        layer.comparison.of_all(outputs, layer.outputs, layer.output_names, f"of shard_map {label}")
        layer.comparison.of_all(gradients, layer.gradients, layer.gradient_names, f"of shard_map {label}")
    devices = "1 device" if count == 1 else f"each of {count} devices"
    return f"as in eager mode: outputs and gradients on {devices}, under jit and eagerly"


# -- several examples -----------------------------------------------------------------------------

# The positions of the mapped tensors, the mapped axis, and its description in a message.
_Mapping = tuple[Sequence[int], int, str]


def vmap(layer: LayerUnderTest) -> str:
    flat, differentiated = layer.flat, layer.flat.differentiated
    mappings: list[_Mapping] = [(differentiated, 0, "")]
    if len(differentiated) > 1:
        mappings.append((differentiated[:1], -1, f", {flat.names[0]} alone mapped, along its last axis"))
        mappings.append((differentiated[1:], 0, f", all but {flat.names[0]} mapped"))
    elif flat.values[0].ndim:
        mappings.append((differentiated, -1, ", mapped along its last axis"))
    return _over_examples(layer, lambda f, batch, axis: jax.vmap(f, in_axes=axis)(batch), "of vmap", mappings)


def scan(layer: LayerUnderTest) -> str:
    def map_over(f: Callable[[Any], Any], batch: Any, _: int) -> Any:
        return jax.lax.scan(lambda _, x: (None, f(x)), None, batch)[1]

    flat, differentiated = layer.flat, layer.flat.differentiated
    mappings: list[_Mapping] = [(differentiated, 0, "")]
    if len(differentiated) > 1:
        mappings.append((differentiated[:1], 0, f", {flat.names[0]} alone mapped"))
    return _over_examples(layer, map_over, "of scan", mappings)


def _over_examples(
    layer: LayerUnderTest, map_over: Callable[..., Any], label: str, mappings: Sequence[_Mapping]
) -> str:
    for i, (mapped, axis, description) in enumerate(mappings):
        _compare_examples(layer, map_over, axis, mapped, f"{label}{description}", staged=i > 0)
    flat, done = layer.flat, f"as in eager mode: outputs and gradients of {_EXAMPLES} examples"
    everything = [p for p, x in enumerate(flat.tensors) if not _is_rbg_key(x)]
    names = ", ".join(flat.paths[p] for p in everything if p not in flat.differentiated)
    if not names:
        return done
    try:
        _compare_examples(layer, map_over, 0, everything, f"{label}, {names} mapped too", staged=True)
    except MismatchError:
        raise
    except Exception as error:  # the layer may need the integer as a number, for a shape or an axis
        return f"{done}; none with {names} mapped too ({type(error).__name__}: {first_line(error)})"
    return f"{done}, with {names} mapped too"


def _compare_examples(
    layer: LayerUnderTest, map_over: Callable[..., Any], axis: int, mapped: Sequence[int], label: str, staged: bool
) -> None:
    flat, count = layer.flat, _EXAMPLES
    cotangents = {k: jnp.stack([w] * count) for k, w in layer.cotangents.items()}
    examples = [[_example(x, i) if p in mapped else x for p, x in enumerate(flat.tensors)] for i in range(count)]
    try:
        outputs_of_each = [flat.with_tensors(example).run() for example in examples]
    except Exception:  # the layer refuses the other integers: the examples then share them
        fixed = [[e[p] if p in flat.differentiated else x for p, x in enumerate(flat.tensors)] for e in examples]
        examples, outputs_of_each = fixed, [flat.with_tensors(example).run() for example in fixed]
    gradients_of_each = [flat.with_tensors(example).grads(layer.cotangents) for example in examples]
    outputs = [jnp.stack(ys) for ys in zip(*outputs_of_each, strict=True)]
    # The gradient of an argument that is not mapped is the sum over the examples.
    gradients = [
        jnp.stack(gs, axis) if p in mapped else sum(gs[1:], gs[0])
        for p, gs in zip(flat.differentiated, zip(*gradients_of_each, strict=True), strict=True)
    ]
    tensors = [jnp.stack(xs, axis) if p in mapped else xs[0] for p, xs in enumerate(zip(*examples, strict=True))]

    def run(values: list[Any]) -> list[Any]:
        shared = flat.with_tensors(tensors).with_values(values).tensors

        def one(batch: list[Any]) -> list[Any]:
            example = list(shared)
            for p, x in zip(mapped, batch, strict=True):
                example[p] = x
            return flat.with_tensors(example).run()

        return map_over(one, [shared[p] for p in mapped], axis)

    values = [tensors[p] for p in flat.differentiated]
    if staged:
        got_outputs, got_gradients = _jitted_if_possible(run, values, cotangents)
    else:
        got_outputs, (_, got_gradients) = run(values), outputs_and_grads(run, values, cotangents)
    layer.comparison.of_all(got_outputs, outputs, layer.output_names, label)
    layer.comparison.of_all(got_gradients, gradients, layer.gradient_names, label)


def _jitted_if_possible(
    outputs: Callable[[list[Any]], list[Any]], values: list[Any], cotangents: dict[int, Any]
) -> tuple[list[Any], list[Any]]:
    # Compiling the run once is much faster than running it operation by operation.
    try:
        return jax.jit(lambda values, cotangents: outputs_and_grads(outputs, values, cotangents))(values, cotangents)
    except NEEDS_VALUES:
        return outputs_and_grads(outputs, values, cotangents)


def _example(x: Any, i: int) -> Any:
    if has_tangent(x):
        return x * jnp.asarray(1 - 0.1 * i, x.dtype)
    if not is_key(x):
        return jnp.roll(x, i)  # indices stay in range, and a permutation stays a permutation
    return jax.random.wrap_key_data(jax.random.key_data(x) + jnp.uint32(i), impl=jax.random.key_impl(x))


def _is_rbg_key(x: Any) -> bool:
    # With a batch of such keys, JAX draws other numbers than with each key on its own.
    return is_key(x) and "rbg" in str(jax.random.key_impl(x))
