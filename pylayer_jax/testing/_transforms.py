"""Whether a layer gives the same outputs and gradients under a transform of JAX as in eager mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pylayer_jax._jax.tracers import NEEDS_VALUES
from pylayer_jax._jax.types import has_tangent, is_key

from ._comparison import first_line
from ._flat_function import FlatFunction
from ._layer_under_test import LayerUnderTest, Runs, outputs_and_grads
from ._runs import Run, run

__tracebackhide__ = True  # pytest hides the frames of this module

_EXAMPLES = 3
_MOST_CHOICES = 16  # of what is mapped


def jit(layer: LayerUnderTest) -> Runs:
    yield layer.run_of(jax.jit(layer.flat.outputs), " of jit")
    gradients = jax.jit(lambda values, cotangents: layer.flat.with_values(values).grads(cotangents))
    yield run(" under jit", layer.cotangents, gradients(layer.flat.values, layer.cotangents))
    return "as in eager mode: outputs, gradients, gradients of the jitted layer"


def remat(layer: LayerUnderTest) -> Runs:
    yield layer.run_of(jax.checkpoint(layer.flat.outputs), " of jax.checkpoint")
    return "as in eager mode: outputs, gradients"


def cond(layer: LayerUnderTest) -> Runs:
    @jax.jit
    def outputs(predicate: Any, values: list[Any]) -> list[Any]:
        # The other branch returns constants: if it were taken, the gradients would be zero.
        return jax.lax.cond(predicate, layer.flat.outputs, lambda _: list(layer.outputs), values)

    yield layer.run_of(lambda values: outputs(True, values), " of cond")
    return "as in eager mode: outputs, gradients, where a traced predicate chooses the layer"


def shard_map(layer: LayerUnderTest) -> Runs:
    flat = layer.flat
    tensors, cotangents, mesh, count = flat.tensors, layer.cotangents, None, jax.sharding.get_abstract_mesh().size
    if jax.sharding.get_abstract_mesh().empty:
        (kind,) = {device.platform for device in flat.values[0].devices()}
        devices = jax.local_devices(backend=kind)
        count = len(devices)
        mesh = jax.make_mesh((count,), ("devices",), axis_types=(AxisType.Auto,), devices=devices)
        # Arguments that are committed to other devices would be refused.
        tensors, cotangents = jax.device_put((tensors, cotangents), NamedSharding(mesh, PartitionSpec()))

    def results(tensors: list[Any], cotangents: dict[int, Any]) -> tuple[list[Any], list[Any]]:
        def shards(tensors: list[Any]) -> list[Any]:
            return flat.with_tensors(tensors).run()

        replicated = jax.shard_map(shards, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
        return outputs_and_grads(
            lambda values: replicated(flat.with_tensors(tensors).with_values(values).tensors),
            [tensors[i] for i in flat.differentiated],
            cotangents,
        )

    for label, function in ((" of shard_map under jit", jax.jit(results)), (" of shard_map eagerly", results)):
        outputs, gradients = function(tensors, cotangents)
        yield run(label, cotangents, gradients, outputs=outputs)
    devices = "1 device" if count == 1 else f"each of {count} devices"
    return f"as in eager mode: outputs and gradients on {devices}, under jit and eagerly"


# -- several examples -----------------------------------------------------------------------------

_Mapping = dict[int, int]  # from the position of a mapped tensor to its mapped axis


def vmap(layer: LayerUnderTest) -> Runs:
    def map_over(f: Callable[[Any], Any], batch: Any, axes: Sequence[int]) -> Any:
        return jax.vmap(f, in_axes=(list(axes),))(batch)

    return (yield from _over_examples(layer, map_over, " of vmap", _mappings(layer.flat)))


def scan(layer: LayerUnderTest) -> Runs:
    def map_over(f: Callable[[Any], Any], batch: Any, _: Sequence[int]) -> Any:
        return jax.lax.scan(lambda _, x: (None, f(x)), None, batch)[1]

    flat, differentiated = layer.flat, layer.flat.differentiated
    mappings = {"": dict.fromkeys(differentiated, 0)}
    if len(differentiated) > 1:
        mappings[f", {flat.names[0]} alone mapped"] = {differentiated[0]: 0}
    return (yield from _over_examples(layer, map_over, " of scan", mappings))


def _mappings(flat: FlatFunction) -> dict[str, _Mapping]:
    """Which of the differentiated tensors are mapped along which axes, with the ends of the messages about it."""
    positions, count = flat.differentiated, len(flat.differentiated)
    mappings = {"": dict.fromkeys(positions, 0)}
    if count == 1:
        return mappings | ({", mapped along its last axis": {positions[0]: -1}} if flat.values[0].ndim else {})
    mappings[", mapped along the last and first axes in turn"] = {
        p: -1 if i % 2 == 0 else 0 for i, p in enumerate(positions)
    }
    few_first = [1, count - 1, *range(2, count - 1)]
    for chosen in itertools.chain.from_iterable(itertools.combinations(positions, n) for n in dict.fromkeys(few_first)):
        if len(mappings) == _MOST_CHOICES:
            break
        names = [flat.paths[p] for p in chosen]
        rest = [flat.paths[p] for p in positions if p not in chosen]
        which = f"{names[0]} alone" if len(names) == 1 else f"all but {rest[0]}" if len(rest) == 1 else ", ".join(names)
        mappings[f", {which} mapped"] = dict.fromkeys(chosen, 0)
    return mappings


def _over_examples(
    layer: LayerUnderTest, map_over: Callable[..., Any], label: str, mappings: Mapping[str, _Mapping]
) -> Runs:
    for i, (description, mapped) in enumerate(mappings.items()):
        yield _run_of_examples(layer, map_over, mapped, f"{label}{description}", staged=i > 0)
    flat, done = layer.flat, f"as in eager mode: outputs and gradients of {_EXAMPLES} examples"
    if (choices := 2 ** len(flat.differentiated) - 1) > 1 and len(mappings) > 2:
        chosen = len({tuple(mapped) for mapped in mappings.values()})
        done += f", {chosen} of {choices} choices of what is mapped"
    others = [p for p, x in enumerate(flat.tensors) if p not in flat.differentiated and not _is_rbg_key(x)]
    names = ", ".join(flat.paths[p] for p in others)
    if not names:
        return done
    for description, mapped in ("too", [*flat.differentiated, *others]), ("alone", others):
        ending = f"{label}, {names} mapped {description}"
        try:
            found = _run_of_examples(layer, map_over, dict.fromkeys(sorted(mapped), 0), ending, staged=True)
        except Exception as error:  # the layer may need the integer as a number, for a shape or an axis
            return f"{done}; none with {names} mapped too ({type(error).__name__}: {first_line(error)})"
        yield found
    return f"{done}, with {names} mapped too"


def _run_of_examples(
    layer: LayerUnderTest, map_over: Callable[..., Any], mapped: _Mapping, label: str, staged: bool
) -> Run:
    """Several examples at once, beside the results of each."""
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
        jnp.stack(gs, mapped[p]) if p in mapped else sum(gs[1:], gs[0])
        for p, gs in zip(flat.differentiated, zip(*gradients_of_each, strict=True), strict=True)
    ]
    tensors = [jnp.stack(xs, mapped[p]) if p in mapped else xs[0] for p, xs in enumerate(zip(*examples, strict=True))]

    def batched(values: list[Any]) -> list[Any]:
        shared = flat.with_tensors(tensors).with_values(values).tensors

        def one(batch: list[Any]) -> list[Any]:
            example = list(shared)
            for p, x in zip(mapped, batch, strict=True):
                example[p] = x
            return flat.with_tensors(example).run()

        return map_over(one, [shared[p] for p in mapped], list(mapped.values()))

    values = [tensors[p] for p in flat.differentiated]
    if staged:
        found = _jitted_if_possible(batched, values, cotangents)
    else:
        found = batched(values), outputs_and_grads(batched, values, cotangents)[1]
    return run(label, cotangents, found[1], outputs=found[0], expected=(outputs, gradients))


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
