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

VOCABULARY, WIDTH, HEADS, HEAD, HIDDEN, BLOCKS = 12, 8, 4, 2, 16, 1
BATCH, LENGTH = 4, 8
Params = dict[str, Any]

# Where the layers of one mesh axis stand; None leaves out data parallelism.
MODEL, DATA = "model", "data"


def block_params(scale: float) -> Params:
    return {
        "norm1": grid(WIDTH, low=0.6, high=1.3),
        "qkv": grid(WIDTH, 3, HEADS, HEAD, low=-0.7 * scale, high=0.8 * scale),
        "out": grid(HEADS, HEAD, WIDTH, low=-0.8 * scale, high=0.7 * scale),
        "norm2": grid(WIDTH, low=0.7, high=1.4),
        "up": grid(WIDTH, HIDDEN, low=-0.6, high=0.7) * scale,
        "down": grid(HIDDEN, WIDTH, low=-0.6, high=0.5) * scale,
    }


def params() -> Params:
    return {
        "embedding": grid(VOCABULARY, WIDTH),
        "blocks": [block_params(1 + 0.1 * i) for i in range(BLOCKS)],
        "norm": grid(WIDTH, low=0.8, high=1.5),
        "unembedding": grid(WIDTH, VOCABULARY),
    }


def param_specs() -> Params:
    block = {
        "norm1": P(),
        "qkv": P(None, None, MODEL),
        "out": P(MODEL),
        "norm2": P(),
        "up": P(None, MODEL),
        "down": P(MODEL),
    }
    return {"embedding": P(), "blocks": [block] * BLOCKS, "norm": P(), "unembedding": P(None, MODEL)}


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
    for block in params["blocks"]:
        x = x + leave(attention(enter(norm(x, shared(block["norm1"]))), block["qkv"], block["out"]))
        x = x + leave(mlp(enter(norm(x, shared(block["norm2"]))), block["up"], block["down"]))
    return enter(norm(x, shared(params["norm"]))) @ params["unembedding"]


def same(x: Any) -> Any:
    return x


def unsharded_loss(params: Params, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    logits = forward(params, tokens, same, same, same, same)
    picked = jnp.take_along_axis(logits, labels[..., None], -1, mode="clip")[..., 0]
    losses = jnp.where(labels >= 0, jax.nn.logsumexp(logits, -1) - picked, 0.0)
    return jnp.sum(losses) / tokens.size


def sharded_loss(
    params: Params, tokens: jax.Array, labels: jax.Array, *, sequence: bool = False, data: bool = True
) -> jax.Array:
    """The loss of the whole batch, on every device, from the shards of one device.

    With `sequence`, the devices along `model` share out the sequence between the products with weights.
    """
    if data:
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
    return parallel.reduce_from(loss / jax.lax.axis_size(DATA), DATA) if data else loss


def _specs(mesh: Any) -> tuple[Any, Any, Any]:
    batch = P(DATA) if DATA in mesh.axis_names else P()
    return param_specs(), batch, batch


def mapped_loss(mesh: Any, *, sequence: bool = False, check_vma: bool = True) -> Callable[..., jax.Array]:
    """The loss as a function of whole params, tokens and labels. The mesh has the axis `model`, and perhaps `data`."""
    has_data = DATA in mesh.axis_names

    def local(params: Params, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        def enter(x: Any, spec: Any) -> Any:
            missing = tuple(name for name in mesh.axis_names if name not in spec)
            return parallel.replicated_input(x, missing) if missing else x

        params = jax.tree.map(enter, params, param_specs())
        loss = sharded_loss(params, tokens, labels, sequence=sequence, data=has_data)
        return parallel.replicated_output(loss, tuple(mesh.axis_names))

    return jax.shard_map(local, mesh=mesh, in_specs=_specs(mesh), out_specs=P(), check_vma=check_vma)


def derivatives(loss: Callable[..., Any], params: Params, ways: Params) -> tuple[Any, Any, Any]:
    """Loss, gradient, and the product of the Hessian with `ways`."""
    value, gradient = jax.value_and_grad(loss)(params)
    return value, gradient, jax.jvp(jax.grad(loss), (params,), (ways,))[1]


def derivatives_on_each_device(mesh: Any, *, sequence: bool = False, check_vma: bool = True) -> Callable[..., Any]:
    """`derivatives` of the loss, as a function of whole params, ways, tokens and labels."""
    has_data = DATA in mesh.axis_names

    def local(params: Params, ways: Params, tokens: jax.Array, labels: jax.Array) -> Any:
        loss = lambda p: sharded_loss(p, tokens, labels, sequence=sequence, data=has_data)  # noqa: E731
        return derivatives(loss, params, ways)

    specs, *batch = _specs(mesh)
    return jax.shard_map(
        local, mesh=mesh, in_specs=(specs, specs, *batch), out_specs=(P(), specs, specs), check_vma=check_vma
    )
