"""Layers of tensor, sequence and data parallel networks, for functions that `jax.shard_map` maps over a mesh.

    def mlp(x, a, b):  # x is replicated; a holds columns, and b rows, of the weights
        hidden = jax.nn.gelu(copy_to(x, "model") @ a)
        return reduce_from(hidden @ b, "model")

    jax.shard_map(mlp, mesh=mesh, in_specs=(P(), P(None, "model"), P("model")), out_specs=P())

The layers know two kinds of values along a mesh axis, as Megatron and Paddle's fleet do:

- A *replicated* value is one value, of which every device has a copy. Its cotangent is replicated as well: every device
  has all of it.
- A *varying* value is a value of each device's own, and so is its cotangent.

    layer                            input       output      forward         backward
    copy_to                          replicated  varying     nothing         all-reduce
    reduce_from                      varying     replicated  all-reduce      nothing
    scatter_to                       replicated  varying     nothing         all-gather
    gather_from                      varying     replicated  all-gather      nothing
    all_gather                       varying     varying     all-gather      reduce-scatter
    reduce_scatter                   varying     varying     reduce-scatter  all-gather
    all_to_all                       varying     varying     all-to-all      all-to-all

`vocab_parallel_cross_entropy` and `sync_batch_norm` communicate what their docstrings say. Every layer has forward
mode, and the gradient of each is made of layers of this module, so that derivatives of every order are right.

**With `check_vma=True`** (the default of `jax.shard_map`) the two kinds are types:
`jax.typeof(x).manual_axis_type.varying` holds the axes over which x varies. A layer that needs a replicated input
raises ValueError for one that varies. So does a layer that adds up varying values (reduce_from, reduce_scatter,
`vocab_parallel_cross_entropy`) for one that is replicated, since N copies of one value would be counted N times; apply
copy_to to it if N equal parts are meant. A layer that joins or exchanges varying values takes a replicated one as N
equal parts, and casts it (`jax.lax.pcast`), which JAX differentiates. JAX also adds such a cast where a replicated
value meets a varying one, so that copy_to may be left out. Gradients are right whether `jax.grad` is inside of the
mapped function or around the `shard_map`. (Inside, JAX itself adds up the gradient of replicated weights, of which
reduce_from would be N times too much.)

**With `check_vma=False`** no type says which kind a value is, and these rules are the caller's to keep: a mistake gives
wrong numbers or gradients without an error. `pylayer_jax.testing.check_parallel` finds it; use it in your tests. Where
a replicated value meets a varying one, in any operation, or enters a layer that needs a varying one, apply copy_to to
it. Then `jax.grad` inside of the mapped function is right. Around the `shard_map`, JAX itself hands each device 1/N of
the cotangent of a replicated output, and adds up the cotangents of all copies of a replicated input.
`replicated_output` and `replicated_input` translate; both compute nothing forward, and nothing at all with
`check_vma=True`:

    def f(x, a, b):
        return replicated_output(mlp(replicated_input(x, "model"), a, b), "model")

    jax.grad(loss_of(jax.shard_map(f, ..., check_vma=False)))

An `axis_name` is the name of a mesh axis, or a tuple of names (the first is the slowest, as in a `PartitionSpec`).

The modules: `_axes` (mesh axes, kinds of values, errors), `_collectives` (the layers), `_public` (the public
functions of them), `_unchecked_vma` (corrects cotangents where check_vma=False), `_cross_entropy`, `_batch_norm`.
"""

from ._batch_norm import sync_batch_norm
from ._cross_entropy import vocab_parallel_cross_entropy
from ._public import (
    all_gather,
    all_to_all,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter,
    scatter_to,
)
from ._unchecked_vma import replicated_input, replicated_output

__all__ = [
    "all_gather",
    "all_to_all",
    "copy_to",
    "gather_from",
    "reduce_from",
    "reduce_scatter",
    "replicated_input",
    "replicated_output",
    "scatter_to",
    "sync_batch_norm",
    "vocab_parallel_cross_entropy",
]
