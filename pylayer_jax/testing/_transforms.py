"""Checks that a layer gives the same outputs and gradients under a transform of JAX as in eager mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pylayer_jax._jax.types import has_tangent, is_key
from pylayer_jax._messages import plural

from ._compare import Case, first_line
from ._subject import Cases, Subject, named_outputs
from ._tensor_function import Cotangents, TensorFunction, scaled

__tracebackhide__ = True  # pytest hides the frames of this module

_EXAMPLES = 3
_MOST_CHOICES = 16  # the largest number of choices of mapped tensors that vmap is checked with

_Outputs = Callable[[list[Any]], list[Any]]  # from the differentiated values


def jit(subject: Subject) -> Cases:
    return (yield from _transformed(subject, " of jit", jax.jit(subject.function.outputs)))


def remat(subject: Subject) -> Cases:
    return (yield from _transformed(subject, " of jax.checkpoint", jax.checkpoint(subject.function.outputs)))


def _transformed(subject: Subject, label: str, outputs: _Outputs) -> Cases:
    function = subject.function
    yield subject.case(label, _results(function, outputs, function.values, subject.cotangents))
    return "outputs and gradients match eager mode"


def shard_map(subject: Subject) -> Cases:
    function, mesh = subject.function, None
    tensors, cotangents, count = function.tensors, subject.cotangents, jax.sharding.get_abstract_mesh().size
    if jax.sharding.get_abstract_mesh().empty:
        (kind,) = {device.platform for device in function.values[0].devices()}
        devices = jax.local_devices(backend=kind)
        count = len(devices)
        mesh = jax.make_mesh((count,), ("devices",), axis_types=(AxisType.Auto,), devices=devices)
        # Arguments that are committed to other devices would be refused.
        tensors, cotangents = jax.device_put((tensors, cotangents), NamedSharding(mesh, P()))

    def results(tensors: list[Any], cotangents: Cotangents) -> dict[str, Any]:
        given = function.with_tensors(tensors)
        mapped = jax.shard_map(lambda xs: given.with_tensors(xs).run(), mesh=mesh, in_specs=P(), out_specs=P())
        outputs = lambda values: mapped(given.with_values(values).tensors)  # noqa: E731
        return _results(function, outputs, given.values, cotangents)

    yield subject.case(" of shard_map under jit", jax.jit(results)(tensors, cotangents))
    yield subject.case(" of shard_map eagerly", results(tensors, cotangents))
    devices = "1 device" if count == 1 else f"each of {count} devices"
    return f"outputs and gradients on {devices} match eager mode, under jit and eagerly"


def _results(function: TensorFunction, outputs: _Outputs, values: list[Any], cotangents: Cotangents) -> dict[str, Any]:
    """Return the outputs of a transformed layer, of a run without differentiation, and its gradients."""

    def run(values: list[Any]) -> Cotangents:
        returned = outputs(values)
        return {k: returned[k] for k in cotangents}

    pull = jax.vjp(run, values)[1]
    return {**named_outputs(outputs(values)), **function.named(pull(cotangents)[0])}


# -- several examples -----------------------------------------------------------------------------

_Mapping = dict[int, int]  # from the position of a mapped tensor to its mapped axis


def vmap(subject: Subject) -> Cases:
    function, mappings = subject.function, _mappings(subject.function)
    for i, (description, mapped) in enumerate(mappings.items()):
        # One choice runs in eager mode. To compile the others is faster.
        yield _case_of_examples(subject, mapped, f" of vmap{description}", is_jitted=i > 0)
    done = f"{_EXAMPLES} examples match eager mode, in {plural(len(mappings), 'choice', 'choices')} of mapped axes"
    others = [p for p, x in enumerate(function.tensors) if p not in function.differentiated and not _is_rbg_key(x)]
    names = ", ".join(function.paths[p] for p in others)
    for description, mapped in (("too", [*function.differentiated, *others]), ("alone", others)) if others else ():
        try:
            ending = f" of vmap, {names} mapped {description}"
            case = _case_of_examples(subject, dict.fromkeys(sorted(mapped), 0), ending)
        except Exception as error:  # the layer may need the integer as a number, for a shape or an axis
            return f"{done}; none with {names} mapped too ({type(error).__name__}: {first_line(error)})"
        yield case
    return f"{done}, with {names} mapped too" if others else done


def _mappings(function: TensorFunction) -> dict[str, _Mapping]:
    """Return the choices of mapped tensors and axes to check, by the end of the message about each choice."""
    positions = function.differentiated
    mappings = {"": dict.fromkeys(positions, 0), ", mapped along the last axis": dict.fromkeys(positions, -1)}
    for n in range(1, len(positions)):
        for chosen in itertools.combinations(positions, n):
            names = ", ".join(function.paths[p] for p in chosen)
            mappings[f", {names} alone mapped"] = dict.fromkeys(chosen, 0)
    return dict(itertools.islice(mappings.items(), _MOST_CHOICES))


def _case_of_examples(subject: Subject, mapped: _Mapping, label: str, is_jitted: bool = True) -> Case:
    """Return the results of several examples at once, beside the results of each."""
    function = subject.function
    ways = range(_EXAMPLES)
    examples = [[_example(x, i) if p in mapped else x for p, x in enumerate(function.tensors)] for i in ways]
    each = [function.with_tensors(example) for example in examples]
    grads_of_each = [one.grads(subject.cotangents) for one in each]
    outputs = [jnp.stack(ys) for ys in zip(*(one.run() for one in each), strict=True)]
    # The gradient of an argument that is not mapped is the sum over the examples.
    grads = [
        jnp.stack(gs, mapped[p]) if p in mapped else sum(gs[1:], gs[0])
        for p, gs in zip(function.differentiated, zip(*grads_of_each, strict=True), strict=True)
    ]
    tensors = [jnp.stack(xs, mapped[p]) if p in mapped else xs[0] for p, xs in enumerate(zip(*examples, strict=True))]

    def batched(values: list[Any]) -> list[Any]:
        shared = function.with_tensors(tensors).with_values(values).tensors

        def one(batch: list[Any]) -> list[Any]:
            example = dict(enumerate(shared)) | dict(zip(mapped, batch, strict=True))
            return function.with_tensors(list(example.values())).run()

        return jax.vmap(one, in_axes=(list(mapped.values()),))([shared[p] for p in mapped])

    results = lambda values, cotangents: _results(function, batched, values, cotangents)  # noqa: E731
    cotangents = {k: jnp.stack([w] * _EXAMPLES) for k, w in subject.cotangents.items()}
    got = (jax.jit(results) if is_jitted else results)([tensors[p] for p in function.differentiated], cotangents)
    return subject.case(label, got, {**named_outputs(outputs), **function.named(grads)}, "for each example alone")


def _example(x: Any, i: int) -> Any:
    if has_tangent(x):
        return scaled(1 - 0.1 * i, x)
    if not is_key(x):
        return jnp.roll(x, i)  # indices stay in range, and a permutation stays a permutation
    return jax.random.wrap_key_data(jax.random.key_data(x) + jnp.uint32(i), impl=jax.random.key_impl(x))


def _is_rbg_key(x: Any) -> bool:
    # With a batch of rbg keys, JAX draws other numbers than with each key on its own.
    return is_key(x) and "rbg" in str(jax.random.key_impl(x))
