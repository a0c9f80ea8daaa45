"""A tensor-parallel block lowered for 8 and 512 devices: what it communicates, and what each device computes.

Each device has the same shard on every mesh, so that a program that grows with the number of devices shows.
"""

from __future__ import annotations

import collections
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
SIZES = (8, 512)
BATCH, LENGTH, HIDDEN = 2, 16, 8  # HIDDEN of each device
lax = jax.lax


# -- by hand --------------------------------------------------------------------------------------

copy_by_hand, reduce_by_hand = jax.custom_vjp(lambda x: x), jax.custom_vjp(lambda x: lax.psum(x, "model"))
copy_by_hand.defvjp(lambda x: (x, None), lambda _, dy: (lax.psum(dy, "model"),))
reduce_by_hand.defvjp(lambda x: (reduce_by_hand(x), None), lambda _, dy: (dy,))


def gather_by_hand(x):
    return lax.all_gather(x, "model", axis=1, tiled=True)


def scatter_by_hand(x):
    return lax.psum_scatter(x, "model", scatter_dimension=1, tiled=True)


def over_model(layer, **options):
    return lambda x: layer(x, "model", **options)


OURS = {
    "tensor": (over_model(parallel.copy_to), over_model(parallel.reduce_from)),
    "sequence": (over_model(parallel.all_gather, axis=1), over_model(parallel.reduce_scatter, axis=1)),
}
BY_HAND = {  # without check_vma, where JAX takes a sum over devices for its own transpose, and with it
    ("tensor", False): (copy_by_hand, reduce_by_hand),
    ("tensor", True): (over_model(lax.pcast, to="varying"), over_model(lax.psum)),
    ("sequence", False): (gather_by_hand, scatter_by_hand),
    ("sequence", True): (gather_by_hand, scatter_by_hand),
}
COLLECTIVES = {"tensor": {"all_reduce": 4}, "sequence": {"all_gather": 4, "reduce_scatter": 4}}

# -- programs -------------------------------------------------------------------------------------


def lowered(f: Any, devices: int, ins: Any, outs: Any, check_vma: bool, *shapes: tuple[int, ...]) -> str:
    mesh = AbstractMesh((devices,), ("model",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check_vma)
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return jax.jit(mapped).trace(*args).lower(lowering_platforms=("cpu",)).as_text()


def gradient(ends: Any, check_vma: bool, way: str, devices: int, second: bool) -> str:
    """The lowered gradient, or product of the Hessian with a direction, of one block differentiated on each device."""
    enter, leave = ends

    def block(x, qkv, out, up, down):
        x = x + leave(attention(enter(jnp.sin(x)), qkv, out))
        return jnp.sum(jnp.cos(x + leave(mlp(enter(jnp.sin(x)), up, down))))

    slopes = jax.grad(block, (0, 1, 2, 3, 4))

    def local(*args):
        return jax.jvp(slopes, args, args)[1] if second else slopes(*args)

    x, length = (P(), LENGTH) if way == "tensor" else (P(None, "model"), LENGTH * devices)
    specs = x, P(None, None, "model"), P("model"), P(None, "model"), P("model")
    shapes = (
        (BATCH, length, WIDTH),
        (WIDTH, 3, devices, HEAD),
        (devices, HEAD, WIDTH),
        (WIDTH, HIDDEN * devices),
        (HIDDEN * devices, WIDTH),
    )
    return lowered(local, devices, specs, specs, check_vma, *shapes)


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


def measured(text: str) -> Any:
    return operations(text), collectives(text), bytes_per_device(text)


@pytest.mark.parametrize("second", [False, True], ids=["gradient", "hvp"])
@pytest.mark.parametrize("way", OURS)
@VMA
def test_block_is_that_of_a_hand_written_one_and_does_not_grow(way, check_vma, second):
    small, large = (measured(gradient(OURS[way], check_vma, way, devices, second)) for devices in SIZES)
    assert small[:2] == large[:2]
    # Where the sequence is shared out, each device gathers all of it.
    assert small[2] == large[2] if way == "tensor" else small[2] < large[2]
    assert small[1] == {name: count * (1 + second) for name, count in COLLECTIVES[way].items()}
    # By hand, this has no forward mode, and at second order the sums of backward would be transposed to sums.
    if not (second and BY_HAND[way, check_vma][0] is copy_by_hand):
        for devices, ours in zip(SIZES, (small, large), strict=True):
            assert ours == measured(gradient(BY_HAND[way, check_vma], check_vma, way, devices, second))


# -- what each docstring says ---------------------------------------------------------------------


def loss_of_labels(z):
    return parallel.vocab_parallel_cross_entropy(z, jnp.zeros(z.shape[:1], jnp.int32), "model")


def normalised(x):
    ones = jnp.ones(x.shape[-1:])
    return parallel.sync_batch_norm(x, ones, ones, "model")[0]


SAID = {  # the specs of input and output; what is communicated forward, and backward
    "copy_to": (over_model(parallel.copy_to), ALL, OWN, {}, {"all_reduce": 1}),
    "reduce_from": (over_model(parallel.reduce_from), OWN, ALL, {"all_reduce": 1}, {}),
    "scatter_to": (over_model(parallel.scatter_to), ALL, OWN, {}, {"all_gather": 1}),
    "gather_from": (over_model(parallel.gather_from), OWN, ALL, {"all_gather": 1}, {}),
    "all_gather": (over_model(parallel.all_gather), OWN, OWN, {"all_gather": 1}, {"reduce_scatter": 1}),
    "reduce_scatter": (
        over_model(parallel.reduce_scatter, axis=-1),
        OWN,
        OWN,
        {"reduce_scatter": 1},
        {"all_gather": 1},
    ),
    "all_to_all": (over_model(parallel.all_to_all, split_axis=1), OWN, OWN, {"all_to_all": 1}, {"all_to_all": 1}),
    "vocab_parallel_cross_entropy": (loss_of_labels, OWN, ALL, {"all_reduce": 2}, {}),
    "sync_batch_norm": (normalised, OWN, OWN, {"all_reduce": 2}, {"all_reduce": 1}),
    "replicated_input": (over_model(parallel.replicated_input), ALL, ALL, {}, {}),
}


@pytest.mark.parametrize("name", SAID)
@VMA
def test_communication_is_what_the_docstring_says(name, check_vma):
    layer, before, after, forward, backward = SAID[name]

    def both(x):
        y, pull = jax.vjp(layer, x)
        return y, pull(jnp.cos(y))[0]

    assert collectives(lowered(layer, 64, before, after, check_vma, (64, 64))) == forward
    found = collectives(lowered(both, 64, before, (after, before), check_vma, (64, 64)))
    assert found == collections.Counter(forward) + collections.Counter(backward)


@VMA
def test_the_border_communicates_only_without_check_vma(check_vma):
    text = lowered(jax.grad(over_model(parallel.replicated_output)), 64, ALL, ALL, check_vma, ())
    assert collectives(text) == ({} if check_vma else {"all_reduce": 1})
