"""A tensor-parallel block lowered for 8, 64 and 512 devices: what it communicates, and what each device computes.

Each device has the same shard on every mesh, so that a program that grows with the number of devices shows.
"""

from __future__ import annotations

import collections
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pylayer_jax import parallel

from .ranks import VMA
from .tensor_parallel import HEAD, WIDTH, attention, mlp

pytestmark = pytest.mark.own_primitive

OWN, ALL = P("model"), P()
SIZES = (8, 64, 512)
BATCH, LENGTH, HIDDEN = 2, 16, 8  # HIDDEN of each device
lax = jax.lax


# -- by hand --------------------------------------------------------------------------------------


@jax.custom_vjp
def copy_by_hand(x):
    return x


copy_by_hand.defvjp(lambda x: (x, None), lambda _, dy: (lax.psum(dy, "model"),))


@jax.custom_vjp
def reduce_by_hand(x):
    return lax.psum(x, "model")


reduce_by_hand.defvjp(lambda x: (reduce_by_hand(x), None), lambda _, dy: (dy,))


def gather_by_hand(x):
    return lax.all_gather(x, "model", axis=1, tiled=True)


def scatter_by_hand(x):
    return lax.psum_scatter(x, "model", scatter_dimension=1, tiled=True)


def cast(x):
    return lax.pcast(x, "model", to="varying")


OURS = {
    "tensor": (lambda x: parallel.copy_to(x, "model"), lambda y: parallel.reduce_from(y, "model")),
    "sequence": (
        lambda x: parallel.all_gather(x, "model", axis=1),
        lambda y: parallel.reduce_scatter(y, "model", axis=1),
    ),
}
BY_HAND = {  # without check_vma, where JAX takes a sum over devices for its own transpose, and with it
    ("tensor", False): (copy_by_hand, reduce_by_hand),
    ("tensor", True): (cast, lambda y: lax.psum(y, "model")),
    ("sequence", False): (gather_by_hand, scatter_by_hand),
    ("sequence", True): (gather_by_hand, scatter_by_hand),
}
COLLECTIVES = {"tensor": {"all_reduce": 4}, "sequence": {"all_gather": 4, "reduce_scatter": 4}}

# -- programs -------------------------------------------------------------------------------------


def gradient(ends: Any, check_vma: bool, way: str, devices: int, second: bool) -> str:
    """The lowered gradient, or product of the Hessian with a direction, of one block differentiated on each device."""
    enter, leave = ends

    def block(x, qkv, out, up, down):
        x = x + leave(attention(enter(jnp.sin(x)), qkv, out))
        return jnp.sum(jnp.cos(x + leave(mlp(enter(jnp.sin(x)), up, down))))

    slopes = jax.grad(block, (0, 1, 2, 3, 4))

    def local(*args):
        return jax.jvp(slopes, args, args)[1] if second else slopes(*args)

    mesh = AbstractMesh((devices,), ("model",), axis_types=(AxisType.Auto,))
    x, length = (P(), LENGTH) if way == "tensor" else (P(None, "model"), LENGTH * devices)
    specs = x, P(None, None, "model"), P("model"), P(None, "model"), P("model")
    shapes = (
        (BATCH, length, WIDTH),
        (WIDTH, 3, devices, HEAD),
        (devices, HEAD, WIDTH),
        (WIDTH, HIDDEN * devices),
        (HIDDEN * devices, WIDTH),
    )
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=check_vma)
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return jax.jit(mapped).trace(*args).lower(lowering_platforms=("cpu",)).as_text()


# -- what a program holds -------------------------------------------------------------------------

COMMUNICATE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
BYTES = {"f32": 4, "i32": 4, "ui32": 4, "i1": 1, "i64": 8}


def operations(text: str) -> dict[str, int]:
    """How often each operation stands in a lowered program. Its types are the shapes of one device."""
    return dict(collections.Counter(re.findall(r"stablehlo\.(\w+)", text)))


def collectives(text: str) -> dict[str, int]:
    return {name: count for name, count in operations(text).items() if name in COMMUNICATE}


def bytes_of(kind: str) -> int:
    *shape, dtype = kind.split("x")
    return math.prod(map(int, shape)) * BYTES[dtype]


def bytes_per_device(text: str) -> int:
    """Of the results of all operations within the mapped function, collectives included."""
    body = text[text.index("sdy.manual_computation") :]
    results = re.findall(r"^\s*(?:%\S+ = \"?stablehlo\.|\}\)).*?tensor<([^>]+)>$", body, re.MULTILINE)
    assert len(results) > 100  # otherwise the pattern does not fit what JAX prints
    return sum(map(bytes_of, results))


@functools.cache
def measured(way: str, by_hand: bool, check_vma: bool, second: bool, devices: int) -> Any:
    ends = BY_HAND[way, check_vma] if by_hand else OURS[way]
    text = gradient(ends, check_vma, way, devices, second)
    return operations(text), collectives(text), bytes_per_device(text)


CHOICES = [
    (way, check_vma, second)
    for way in OURS
    for check_vma in (True, False)
    for second in (False, True)
    # By hand, this has no forward mode, and at second order the sums of backward would be transposed to sums.
    if not (second and BY_HAND[way, check_vma][0] is copy_by_hand)
]
PROGRAMS = pytest.mark.parametrize(
    ("way", "check_vma", "second"),
    CHOICES,
    ids=["-".join((w, "vma" if v else "plain", "hvp" if s else "gradient")) for w, v, s in CHOICES],
)


@PROGRAMS
def test_block_is_that_of_a_hand_written_one(way, check_vma, second):
    for devices in SIZES:
        ours = measured(way, False, check_vma, second, devices)
        assert ours == measured(way, True, check_vma, second, devices)
        assert ours[1] == {name: count * (1 + second) for name, count in COLLECTIVES[way].items()}


@PROGRAMS
def test_block_does_not_grow_with_the_number_of_devices(way, check_vma, second):
    first, *others = (measured(way, False, check_vma, second, devices) for devices in SIZES)
    for other in others:
        assert other[:2] == first[:2]
        # Where the sequence is shared out, each device gathers all of it.
        assert other[2] == first[2] if way == "tensor" else other[2] > first[2]


# -- what each docstring says ---------------------------------------------------------------------


def loss_of_labels(z):
    return parallel.vocab_parallel_cross_entropy(z, jnp.zeros(z.shape[:1], jnp.int32), "model")


def normalised(x):
    ones = jnp.ones(x.shape[-1:])
    return parallel.sync_batch_norm(x, ones, ones, "model")[0]


SAID = {  # the specs of input and output; what is communicated forward, and backward
    "copy_to": (lambda x: parallel.copy_to(x, "model"), ALL, OWN, {}, {"all_reduce": 1}),
    "reduce_from": (lambda x: parallel.reduce_from(x, "model"), OWN, ALL, {"all_reduce": 1}, {}),
    "scatter_to": (lambda x: parallel.scatter_to(x, "model"), ALL, OWN, {}, {"all_gather": 1}),
    "gather_from": (lambda x: parallel.gather_from(x, "model"), OWN, ALL, {"all_gather": 1}, {}),
    "all_gather": (lambda x: parallel.all_gather(x, "model"), OWN, OWN, {"all_gather": 1}, {"reduce_scatter": 1}),
    "reduce_scatter": (
        lambda x: parallel.reduce_scatter(x, "model", -1),
        OWN,
        OWN,
        {"reduce_scatter": 1},
        {"all_gather": 1},
    ),
    "all_to_all": (lambda x: parallel.all_to_all(x, "model", 1), OWN, OWN, {"all_to_all": 1}, {"all_to_all": 1}),
    "vocab_parallel_cross_entropy": (loss_of_labels, OWN, ALL, {"all_reduce": 2}, {}),
    "sync_batch_norm": (normalised, OWN, OWN, {"all_reduce": 2}, {"all_reduce": 1}),
    "replicated_input": (lambda x: parallel.replicated_input(x, "model"), ALL, ALL, {}, {}),
}


@pytest.mark.parametrize("name", SAID)
@VMA
def test_communication_is_what_the_docstring_says(name, check_vma):
    layer, before, after, forward, backward = SAID[name]
    mesh = AbstractMesh((64,), ("model",), axis_types=(AxisType.Auto,))

    def both(x):
        y, pull = jax.vjp(layer, x)
        return y, pull(jnp.cos(y))[0]

    def lowered(f, out_specs):
        mapped = jax.shard_map(f, mesh=mesh, in_specs=before, out_specs=out_specs, check_vma=check_vma)
        trace = jax.jit(mapped).trace(jax.ShapeDtypeStruct((64, 64), jnp.float32))
        return collectives(trace.lower(lowering_platforms=("cpu",)).as_text())

    assert lowered(layer, after) == forward
    assert lowered(both, (after, before)) == dict(collections.Counter(forward) + collections.Counter(backward))


def test_the_border_communicates_only_without_check_vma():
    layer = lambda x: parallel.replicated_output(x, "model")  # noqa: E731
    mesh = AbstractMesh((64,), ("model",), axis_types=(AxisType.Auto,))
    counts = []
    for check_vma in (True, False):
        mapped = jax.shard_map(jax.grad(layer), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check_vma)
        trace = jax.jit(mapped).trace(jax.ShapeDtypeStruct((), jnp.float32))
        counts.append(collectives(trace.lower(lowering_platforms=("cpu",)).as_text()))
    assert counts == [{}, {"all_reduce": 1}]
