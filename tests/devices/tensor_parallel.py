"""A transformer of one block on a mesh of data and model parallelism, built from `pylayer_jax.parallel`.

`unsharded_loss` is the same network on one device, in plain JAX. `mapped_loss` is to be differentiated around its
shard_map, `derivatives_on_each_device` differentiates inside. Both take whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pylayer_jax import parallel
from tests.kit.case import grid

VOCABULARY, WIDTH, HEADS, HEAD, HIDDEN = 12, 8, 4, 2, 16
BATCH, LENGTH = 4, 8
Params = dict[str, Any]
MODEL, DATA = "model", "data"

# Of each parameter the shape, the smallest and the largest number, and where it is cut.
TABLE = {
    "embedding": ((VOCABULARY, WIDTH), -1.4, 1.7, P()),
    "norm1": ((WIDTH,), 0.6, 1.3, P()),
    "qkv": ((WIDTH, 3, HEADS, HEAD), -0.7, 0.8, P(None, None, MODEL)),
    "out": ((HEADS, HEAD, WIDTH), -0.8, 0.7, P(MODEL)),
    "norm2": ((WIDTH,), 0.7, 1.4, P()),
    "up": ((WIDTH, HIDDEN), -0.6, 0.7, P(None, MODEL)),
    "down": ((HIDDEN, WIDTH), -0.6, 0.5, P(MODEL)),
    "norm": ((WIDTH,), 0.8, 1.5, P()),
    "unembedding": ((WIDTH, VOCABULARY), -1.4, 1.7, P(None, MODEL)),
}


def params() -> Params:
    return {name: grid(*shape, low=low, high=high) for name, (shape, low, high, _) in TABLE.items()}


def param_specs() -> Params:
    return {name: spec for name, (*_, spec) in TABLE.items()}


def data() -> tuple[jax.Array, jax.Array]:
    """Tokens and labels, some of which are left out."""
    tokens = (jnp.arange(BATCH * LENGTH) * 7 % VOCABULARY).reshape(BATCH, LENGTH)
    labels = jnp.roll(tokens, -1, 1).at[:, -1].set(-100)
    return tokens, labels


# -- the network ----------------------------------------------------------------------------------


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def attention(x: jax.Array, qkv: jax.Array, out: jax.Array) -> jax.Array:
    """Of the heads of the weights that are given; a part of a sum, if these are not all."""
    q, k, v = jnp.einsum("btd,dshk->sbhtk", x, qkv)
    scores = jnp.einsum("bhtk,bhuk->bhtu", q, k) / HEAD**0.5
    scores = jnp.where(jnp.tri(scores.shape[-1], dtype=bool), scores, -1e9)
    return jnp.einsum("bhtu,bhuk,hkd->btd", jax.nn.softmax(scores), v, out)


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.tanh(x @ up) @ down


def forward(params: Params, tokens: jax.Array, split: Any, enter: Any, leave: Any, shared: Any) -> jax.Array:
    """The logits. The other arguments stand where the devices communicate, or are the identity on one device."""
    x = split(params["embedding"][tokens])
    x = x + leave(attention(enter(norm(x, shared(params["norm1"]))), params["qkv"], params["out"]))
    x = x + leave(mlp(enter(norm(x, shared(params["norm2"]))), params["up"], params["down"]))
    return enter(norm(x, shared(params["norm"]))) @ params["unembedding"]


def same(x: Any) -> Any:
    return x


def unsharded_loss(params: Params, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    logits = forward(params, tokens, same, same, same, same)
    picked = jnp.take_along_axis(logits, labels[..., None], -1, mode="clip")[..., 0]
    losses = jnp.where(labels >= 0, jax.nn.logsumexp(logits, -1) - picked, 0.0)
    return jnp.sum(losses) / tokens.size


def sharded_loss(params: Params, tokens: jax.Array, labels: jax.Array, sequence: bool) -> jax.Array:
    """The loss of the whole batch, on every device, from the shards of one device.

    With `sequence`, the devices along `model` share out the sequence between the products with weights.
    """
    params = parallel.copy_to(params, DATA)
    if sequence:
        ends = (
            lambda x: parallel.scatter_to(x, MODEL, axis=1),
            lambda x: parallel.all_gather(x, MODEL, axis=1),
            lambda y: parallel.reduce_scatter(y, MODEL, axis=1),
            lambda scale: parallel.copy_to(scale, MODEL),
        )
    else:
        ends = same, lambda x: parallel.copy_to(x, MODEL), lambda y: parallel.reduce_from(y, MODEL), same
    logits = forward(params, tokens, *ends)
    loss = jnp.sum(parallel.vocab_parallel_cross_entropy(logits, labels, MODEL)) / tokens.size
    return parallel.reduce_from(loss / jax.lax.axis_size(DATA), DATA)


def mapped_loss(mesh: Any, *, sequence: bool = False, check_vma: bool = True) -> Callable[..., jax.Array]:
    """The loss as a function of whole params, tokens and labels."""

    def local(params: Params, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        def enter(x: Any, spec: Any) -> Any:
            return parallel.replicated_input(x, tuple(name for name in mesh.axis_names if name not in spec))

        loss = sharded_loss(jax.tree.map(enter, params, param_specs()), tokens, labels, sequence)
        return parallel.replicated_output(loss, tuple(mesh.axis_names))

    specs = param_specs(), P(DATA), P(DATA)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)


def derivatives(loss: Callable[..., Any], params: Params, ways: Params) -> tuple[Any, Any, Any]:
    """Loss, gradient, and the product of the Hessian with `ways`."""
    value, gradient = jax.value_and_grad(loss)(params)
    return value, gradient, jax.jvp(jax.grad(loss), (params,), (ways,))[1]


def derivatives_on_each_device(mesh: Any, *, sequence: bool = False, check_vma: bool = True) -> Callable[..., Any]:
    """`derivatives` of the loss, as a function of whole params, ways, tokens and labels."""

    def local(params: Params, ways: Params, tokens: jax.Array, labels: jax.Array) -> Any:
        return derivatives(lambda p: sharded_loss(p, tokens, labels, sequence), params, ways)

    specs = param_specs()
    ins, outs = (specs, specs, P(DATA), P(DATA)), (P(), specs, specs)
    return jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check_vma)
