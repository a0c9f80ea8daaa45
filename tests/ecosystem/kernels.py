"""Two layers whose forward and backward are Pallas kernels, and the same functions in plain jax.numpy.

Without a GPU the kernels run in the interpreter of Pallas. Sizes are powers of two, and 16 at least, as Triton needs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pylayer_jax import PyLayer

ROWS = 16  # of the blocks into which a kernel cuts its arguments


def call(kernel, grid, in_blocks, outputs, out_blocks, args):
    """Run a kernel for each point of a grid. A block is a shape, and the axis that the grid walks along (or None)."""

    def spec(block):
        shape, axis = block
        return pl.BlockSpec(shape, lambda i: tuple(i if k == axis else 0 for k in range(len(shape))))

    run = pl.pallas_call(
        kernel,
        grid=(grid,),
        in_specs=[spec(b) for b in in_blocks],
        out_specs=[spec(b) for b in out_blocks],
        out_shape=outputs,
        interpret=jax.default_backend() == "cpu",
    )
    return run(*args)


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# -- softmax cross entropy: logits [N, V], labels [N] -> losses [N] ----------------------------------


def xent_forward_kernel(logits_ref, labels_ref, loss_ref, logsumexp_ref):
    logits = logits_ref[...]
    largest = jnp.max(logits, axis=1)
    logsumexp = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[:, None]), axis=1))
    is_label = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == labels_ref[...][:, None]
    loss_ref[...] = logsumexp - jnp.sum(jnp.where(is_label, logits, 0.0), axis=1)
    logsumexp_ref[...] = logsumexp


def xent_backward_kernel(logits_ref, labels_ref, logsumexp_ref, dloss_ref, dlogits_ref):
    logits = logits_ref[...]
    softmax = jnp.exp(logits - logsumexp_ref[...][:, None])
    is_label = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == labels_ref[...][:, None]
    dlogits_ref[...] = dloss_ref[...][:, None] * (softmax - jnp.where(is_label, 1.0, 0.0))


def xent_forward(logits, labels):
    rows, matrix = ((ROWS,), 0), ((ROWS, logits.shape[1]), 0)
    losses = jax.ShapeDtypeStruct(labels.shape, logits.dtype)
    grid = logits.shape[0] // ROWS
    return call(xent_forward_kernel, grid, [matrix, rows], [losses, losses], [rows, rows], (logits, labels))


def xent_backward(logits, labels, logsumexp, dloss):
    rows, matrix = ((ROWS,), 0), ((ROWS, logits.shape[1]), 0)
    args, blocks = (logits, labels, logsumexp, dloss), [matrix, rows, rows, rows]
    return call(xent_backward_kernel, logits.shape[0] // ROWS, blocks, [like(logits)], [matrix], args)[0]


class CrossEntropy(PyLayer):
    saved_names = (None, None, "logsumexp")

    @staticmethod
    def forward(ctx, logits, labels):
        loss, logsumexp = xent_forward(logits, labels)
        ctx.save_for_backward(logits, labels, logsumexp)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        return xent_backward(*ctx.saved_tensor(), dloss), None


def plain_cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


# -- flash attention: q, k, v [S, D] -> out [S, D] ---------------------------------------------------


def flash_forward_kernel(q_ref, k_ref, v_ref, out_ref, logsumexp_ref):
    q = q_ref[...] / q_ref.shape[1] ** 0.5

    def step(i, carry):
        largest, total, out = carry
        block = pl.ds(i * ROWS, ROWS)
        scores = q @ k_ref[block, :].T
        larger = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights, shrink = jnp.exp(scores - larger[:, None]), jnp.exp(largest - larger)
        total = total * shrink + jnp.sum(weights, axis=1)
        return larger, total, out * shrink[:, None] + weights @ v_ref[block, :]

    start = jnp.full(q.shape[0], -jnp.inf, q.dtype), jnp.zeros(q.shape[0], q.dtype), jnp.zeros_like(q)
    largest, total, out = jax.lax.fori_loop(0, k_ref.shape[0] // ROWS, step, start)
    out_ref[...] = out / total[:, None]
    logsumexp_ref[...] = largest + jnp.log(total)


def flash_dq_kernel(q_ref, k_ref, v_ref, dout_ref, logsumexp_ref, delta_ref, dq_ref):
    scale = q_ref.shape[1] ** -0.5
    q, dout, logsumexp, delta = q_ref[...] * scale, dout_ref[...], logsumexp_ref[...], delta_ref[...]

    def step(i, dq):
        k, v = k_ref[pl.ds(i * ROWS, ROWS), :], v_ref[pl.ds(i * ROWS, ROWS), :]
        weights = jnp.exp(q @ k.T - logsumexp[:, None])
        return dq + (weights * (dout @ v.T - delta[:, None])) @ k

    dq_ref[...] = scale * jax.lax.fori_loop(0, k_ref.shape[0] // ROWS, step, jnp.zeros_like(q))


def flash_dkv_kernel(q_ref, k_ref, v_ref, dout_ref, logsumexp_ref, delta_ref, dk_ref, dv_ref):
    scale = q_ref.shape[1] ** -0.5
    k, v = k_ref[...], v_ref[...]

    def step(i, carry):
        dk, dv = carry
        rows = pl.ds(i * ROWS, ROWS)
        q, dout = q_ref[rows, :] * scale, dout_ref[rows, :]
        weights = jnp.exp(q @ k.T - logsumexp_ref[rows][:, None])
        dk = dk + (weights * (dout @ v.T - delta_ref[rows][:, None])).T @ q
        return dk, dv + weights.T @ dout

    dk_ref[...], dv_ref[...] = jax.lax.fori_loop(
        0, q_ref.shape[0] // ROWS, step, (jnp.zeros_like(k), jnp.zeros_like(v))
    )


def _blocks(q):
    """The blocks of a matrix and of a vector, of which each point of the grid takes one, and of all of them."""
    size, width = q.shape
    return ((ROWS, width), 0), ((ROWS,), 0), ((size, width), None), ((size,), None)


def flash_forward(q, k, v):
    matrix, rows, whole, _ = _blocks(q)
    outputs = [like(q), jax.ShapeDtypeStruct(q.shape[:1], q.dtype)]
    return call(flash_forward_kernel, q.shape[0] // ROWS, [matrix, whole, whole], outputs, [matrix, rows], (q, k, v))


def flash_dq(q, k, v, dout, logsumexp, delta):
    matrix, rows, whole, _ = _blocks(q)
    args, blocks = (q, k, v, dout, logsumexp, delta), [matrix, whole, whole, matrix, rows, rows]
    return call(flash_dq_kernel, q.shape[0] // ROWS, blocks, [like(q)], [matrix], args)[0]


def flash_dkv(q, k, v, dout, logsumexp, delta):
    matrix, _, whole, all_rows = _blocks(q)
    args, blocks = (q, k, v, dout, logsumexp, delta), [whole, matrix, matrix, whole, all_rows, all_rows]
    return call(flash_dkv_kernel, k.shape[0] // ROWS, blocks, [like(k), like(v)], [matrix, matrix], args)


class FlashAttention(PyLayer):
    saved_names = ("q", "k", "v", "out", "logsumexp")

    @staticmethod
    def forward(ctx, q, k, v):
        out, logsumexp = flash_forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, logsumexp = ctx.saved_tensor()
        delta = jnp.sum(dout * out, axis=1)
        args = (q, k, v, dout, logsumexp, delta)
        return flash_dq(*args), *flash_dkv(*args)


def plain_attention(q, k, v):
    return jax.nn.softmax(q @ k.T / q.shape[1] ** 0.5) @ v


# -- arguments ------------------------------------------------------------------------------------


def cross_entropy_arguments():
    return jnp.cos(jnp.arange(32 * 16.0)).reshape(32, 16) * 3, jnp.arange(32) * 7 % 16


def attention_arguments():
    return [jnp.sin(jnp.arange(32 * 16.0) * (i + 1) + i).reshape(32, 16) for i in range(3)]
