"""Functions of one rank on all devices of a mesh axis, and what they mean for the stack of what all ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from tests.kit.transforms import along, gradient

from .collective_layers import AXIS, RANKS, Group

OWN, ALL = PartitionSpec(AXIS), PartitionSpec()
SHARED = Group(AXIS, RANKS, shared=True)
VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "plain"])


def shard(f: Callable[..., Any], check_vma: bool, in_specs: Any = OWN, out_specs: Any = OWN) -> Callable[..., Any]:
    mesh = jax.make_mesh((RANKS,), (AXIS,), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def stacked(layer: Callable[..., Any], check_vma: bool) -> Callable[..., Any]:
    """The layer on each rank, as a function of the arrays of all ranks along a leading axis."""
    return shard(lambda *xs: layer(*(x[0] for x in xs))[None], check_vma)


def same(x: Any) -> Any:
    return x


def total(xs):
    return jnp.broadcast_to(xs.sum(0), xs.shape)


def chunk(dim):
    return lambda xs: jnp.stack([jnp.split(x, RANKS, dim)[rank] for rank, x in enumerate(xs)])


def joined(dim):
    return lambda xs: jnp.stack([jnp.concatenate(list(xs), dim)] * RANKS)


def summed_chunk(dim):
    return lambda xs: chunk(dim)(total(xs))


def exchanged(xs):
    return jnp.stack([jnp.concatenate([jnp.split(x, RANKS)[rank] for x in xs]) for rank in range(RANKS)])


def spread(xs):
    return jnp.stack([xs] * RANKS)


def weights(y: jax.Array) -> jax.Array:
    """Of a loss, so that cotangents differ from entry to entry."""
    return 1 + 0.5 * jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)


def direction(x: jax.Array) -> jax.Array:
    return jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)


def loss(f: Callable[..., Any]) -> Callable[..., Any]:
    """Bent, and different on each rank, so that cotangents depend on the outputs and on the rank."""

    def of(*xs: Any) -> jax.Array:
        y = f(*xs)
        return jnp.sum(weights(y) * jnp.sin(y))

    return of


def numbers(f: Callable[..., Any]) -> Callable[..., Any]:
    """The outputs of f, and the first and second derivatives of its loss."""
    return lambda xs: (f(xs), gradient(loss(f), [xs])(xs), gradient(along(loss(f), [xs]), [xs])(xs))
