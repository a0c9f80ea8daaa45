"""Functions with several arguments, most of them static, ported from torch."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax import Function


class OneRank:
    """A process group of this process alone."""

    rank = 0
    size = 1

    def all_reduce(self, x):
        return x

    def all_max(self, x):
        return x

    def all_gather(self, x):
        return [x]


ONE_RANK = OneRank()


class VocabParallelCrossEntropy(Function):
    """T11: the softmax, an intermediate, is what backward needs."""

    @staticmethod
    def forward(ctx, logits, target, label_smoothing=0.0, tp_group=None):
        group = tp_group or ONE_RANK
        shifted = logits.astype(jnp.float32) - group.all_max(logits.astype(jnp.float32).max(-1, keepdims=True))
        size = shifted.shape[-1]
        first = group.rank * size
        out = (target < first) | (target >= first + size)
        index = jnp.where(out, jnp.zeros_like(target), target - first)
        predicted = jnp.take_along_axis(shifted, index[..., None], -1)[..., 0]
        predicted = group.all_reduce(jnp.where(out, jnp.zeros_like(predicted), predicted))
        exps = jnp.exp(shifted)
        total = group.all_reduce(exps.sum(-1))
        loss = jnp.log(total) - predicted
        softmax = exps / total[..., None]
        if label_smoothing > 0:
            share = label_smoothing * size / (size - 1)
            loss = (1 - share) * loss - share * jnp.log(softmax).mean(-1)
        ctx.label_smoothing, ctx.vocab_size = label_smoothing, size
        ctx.save_for_backward(softmax, out, index)
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        softmax, out, index = ctx.saved_tensors
        own = 1.0 - out.astype(jnp.float32)
        one_hot = jax.nn.one_hot(index, ctx.vocab_size).astype(jnp.float32) * own[..., None]
        if ctx.label_smoothing > 0:
            share = ctx.label_smoothing * ctx.vocab_size / (ctx.vocab_size - 1)
            grad = softmax - (1 - share) * one_hot - share / ctx.vocab_size
        else:
            grad = softmax - one_hot
        return grad * grad_output[..., None], None, None, None


class Sparsemax(Function):
    """T12: backward returns a gradient for `dim` as well, which a caller may leave out."""

    @staticmethod
    def forward(ctx, x, dim=0):
        ctx.dim = dim
        x = x - x.max(dim, keepdims=True)
        ordered = jnp.flip(jnp.sort(x, dim), dim)
        sums = ordered.cumsum(dim) - 1
        shape = [1] * x.ndim
        shape[dim] = -1
        position = jnp.arange(1, x.shape[dim] + 1).astype(x.dtype).reshape(shape)
        size = (position * ordered > sums).sum(dim, keepdims=True)
        tau = jnp.take_along_axis(sums, size - 1, dim) / size.astype(x.dtype)
        y = jnp.maximum(x - tau, 0)
        ctx.save_for_backward(size, y)
        return y

    @staticmethod
    def backward(ctx, grad_output):
        size, y = ctx.saved_tensors
        support = (y != 0).astype(grad_output.dtype)
        grad = grad_output * support
        mean = grad.sum(ctx.dim, keepdims=True) / size.astype(grad.dtype)
        return (grad - mean) * support, None


def _split(x, size, axis):
    return jnp.split(x, list(range(size, x.shape[axis], size)), axis)


def _visible(rows, columns, mask, causal, offset):
    """Which keys of one bucket the queries of one bucket may see."""
    seen = jnp.ones((len(rows), len(columns)), dtype=jnp.bool)
    if causal:
        seen = jnp.asarray(np.array(rows)[:, None] + offset >= np.array(columns)[None, :])
    return seen if mask is None else seen & mask


class FlashAttention(Function):
    """T20: softmax attention bucket by bucket; the split mask rides in a tuple on an attribute."""

    @staticmethod
    def forward(ctx, q, k, v, mask, causal, q_bucket_size, k_bucket_size):
        scale = q.shape[-1] ** -0.5
        offset = max(k.shape[-2] - q.shape[-2], 0)
        buckets = math.ceil(q.shape[-2] / q_bucket_size)
        masks = (None,) * buckets if mask is None else _split(mask[:, None, None, :], q_bucket_size, -1)
        outputs, lses = [], []
        for i, (qc, mc) in enumerate(zip(_split(q, q_bucket_size, -2), masks, strict=True)):
            rows = range(i * q_bucket_size, i * q_bucket_size + qc.shape[-2])
            top = jnp.full((*qc.shape[:-1], 1), -1e9)
            total = jnp.zeros_like(top)
            o = jnp.zeros_like(qc)
            for j, (kc, vc) in enumerate(zip(_split(k, k_bucket_size, -2), _split(v, k_bucket_size, -2), strict=True)):
                columns = range(j * k_bucket_size, j * k_bucket_size + kc.shape[-2])
                seen = _visible(rows, columns, mc, causal, offset)
                scores = jnp.where(seen, qc @ jnp.swapaxes(kc, -1, -2) * scale, jnp.asarray(-1e9))
                new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
                p = jnp.exp(scores - new_top) * seen.astype(q.dtype)
                shrink = jnp.exp(top - new_top)
                total = total * shrink + p.sum(-1, keepdims=True)
                o = o * shrink + p @ vc
                top = new_top
            total = jnp.maximum(total, 1e-6)
            outputs.append(o / total)
            lses.append(jnp.log(total) + top)
        o, lse = jnp.concatenate(outputs, -2), jnp.concatenate(lses, -2)
        ctx.args = (causal, scale, offset, masks, q_bucket_size, k_bucket_size)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        causal, scale, offset, masks, q_bucket_size, k_bucket_size = ctx.args
        q, k, v, o, lse = ctx.saved_tensors
        dqs, dks, dvs = [], [0.0] * len(_split(k, k_bucket_size, -2)), [0.0] * len(_split(k, k_bucket_size, -2))
        delta = (do * o).sum(-1, keepdims=True)
        by_row = (_split(x, q_bucket_size, -2) for x in (q, do, lse, delta))
        for i, (qc, doc, lsec, deltac, mc) in enumerate(zip(*by_row, masks, strict=True)):
            rows = range(i * q_bucket_size, i * q_bucket_size + qc.shape[-2])
            dq = jnp.zeros_like(qc)
            for j, (kc, vc) in enumerate(zip(_split(k, k_bucket_size, -2), _split(v, k_bucket_size, -2), strict=True)):
                columns = range(j * k_bucket_size, j * k_bucket_size + kc.shape[-2])
                seen = _visible(rows, columns, mc, causal, offset)
                scores = jnp.where(seen, qc @ jnp.swapaxes(kc, -1, -2) * scale, jnp.asarray(-1e9))
                p = jnp.exp(scores - lsec) * seen.astype(q.dtype)
                ds = p * (doc @ jnp.swapaxes(vc, -1, -2) - deltac) * scale
                dq = dq + ds @ kc
                dks[j] = dks[j] + jnp.swapaxes(ds, -1, -2) @ qc
                dvs[j] = dvs[j] + jnp.swapaxes(p, -1, -2) @ doc
            dqs.append(dq)
        return jnp.concatenate(dqs, -2), jnp.concatenate(dks, -2), jnp.concatenate(dvs, -2), None, None, None, None


class ReversibleBlock:
    """Two residual functions, each of half of the features and a matrix."""

    def __init__(self, bend):
        self.bend = bend

    def f(self, x, weight, gain):
        return gain * jnp.tanh(x @ weight)

    def g(self, x, weight, gain):
        return gain * self.bend(x @ weight)

    def forward(self, x, wf, wg, gain):
        x1, x2 = jnp.split(x, 2, -1)
        y1 = x1 + self.f(x2, wf, gain)
        return jnp.concatenate([y1, x2 + self.g(y1, wg, gain)], -1)

    def backward(self, y, dy, wf, wg, gain):
        y1, y2 = jnp.split(y, 2, -1)
        dy1, dy2 = jnp.split(dy, 2, -1)
        gy1, (d, dwg) = self._pull(self.g, dy2, y1, wg, gain)
        dx1, x2 = dy1 + d, y2 - gy1
        fx2, (d, dwf) = self._pull(self.f, dx1, x2, wf, gain)
        return jnp.concatenate([y1 - fx2, x2], -1), jnp.concatenate([dx1, dy2 + d], -1), (dwf, dwg)

    @staticmethod
    def _pull(function, dy, x, weight, gain):
        y, pull = jax.vjp(lambda x, weight: function(x, weight, gain), x, weight)
        return y, pull(dy)


BLOCKS = [ReversibleBlock(jnp.sin), ReversibleBlock(jnp.tanh)]


class Reversible(Function):
    """T26: saves nothing but its output, on an attribute, and rebuilds the input of each block from it."""

    @staticmethod
    def forward(ctx, x, blocks, kwargs, *parameters):
        for block, wf, wg in zip(blocks, parameters[::2], parameters[1::2], strict=True):
            x = block.forward(x, wf, wg, **kwargs)
        ctx.y, ctx.blocks, ctx.kwargs, ctx.parameters = x, blocks, kwargs, parameters
        return x

    @staticmethod
    def backward(ctx, dy):
        y, grads = ctx.y, []
        for i, block in reversed(list(enumerate(ctx.blocks))):
            wf, wg = ctx.parameters[2 * i : 2 * i + 2]
            y, dy, pair = block.backward(y, dy, wf, wg, **ctx.kwargs)
            grads = [*pair, *grads]
        return dy, None, None, *grads


class NearestCode(Function):
    """T30: an index, and a backward that must never be called."""

    @staticmethod
    def forward(ctx, inputs, codebook):
        index = ((inputs[..., None, :] - codebook) ** 2).sum(-1).argmin(-1)
        ctx.mark_non_differentiable(index)
        return index

    @staticmethod
    def backward(ctx, grad_output):
        raise RuntimeError("an index has no gradient")


class StraightThroughCode(Function):
    """T31: straight through to the inputs, added up by index for the codebook, each only if asked for."""

    @staticmethod
    def forward(ctx, inputs, codebook):
        index = NearestCode.apply(inputs, codebook).reshape(-1)
        ctx.save_for_backward(index, codebook)
        ctx.mark_non_differentiable(index)
        return codebook[index].reshape(inputs.shape), index

    @staticmethod
    def backward(ctx, grad_output, grad_index):
        grad_inputs, grad_codebook = None, None
        if ctx.needs_input_grad[0]:
            grad_inputs = grad_output.copy()
        if ctx.needs_input_grad[1]:
            index, codebook = ctx.saved_tensors
            rows = grad_output.reshape(-1, codebook.shape[-1])
            grad_codebook = jnp.zeros_like(codebook).at[index].add(rows)
        return grad_inputs, grad_codebook


class SyncBatchNorm(Function):
    """T32 with a group of one rank: the context is called self; the running statistics stay as they are.

    The original changes them in place, which JAX arrays do not allow: new ones would have to be further outputs.
    """

    @staticmethod
    def forward(self, x, weight, bias, running_mean, running_var, eps, momentum, process_group, world_size):
        axes = (0, *range(2, x.ndim))
        channels = x.shape[1]
        mean, var = x.mean(axes), x.var(axes)
        count = jnp.full((1,), float(x.size // channels))
        gathered = process_group.all_gather(jnp.concatenate([mean, jax.lax.rsqrt(var + eps), count]))
        gathered = jnp.stack(gathered).reshape(world_size, -1)
        means, invstds, counts = gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:]
        share = counts / counts.sum()
        mean = (share * means).sum(0)
        var = (share * (invstds**-2 - eps + means**2)).sum(0) - mean**2
        invstd = jax.lax.rsqrt(var + eps)
        self.save_for_backward(x, weight, mean, invstd, counts.astype(jnp.int32))
        self.process_group = process_group
        shape = (1, channels, *[1] * (x.ndim - 2))
        y = (x - mean.reshape(shape)) * invstd.reshape(shape)
        if weight is not None:
            y = y * weight.reshape(shape)
        if bias is not None:
            y = y + bias.reshape(shape)
        return y

    @staticmethod
    def backward(self, grad_output):
        x, weight, mean, invstd, counts = self.saved_tensors
        grad_input = grad_weight = grad_bias = None
        axes = (0, *range(2, x.ndim))
        shape = (1, x.shape[1], *[1] * (x.ndim - 2))
        centred = x - mean.reshape(shape)
        sum_dy, sum_dy_xmu = grad_output.sum(axes), (grad_output * centred).sum(axes)
        if weight is not None and self.needs_input_grad[1]:
            grad_weight = sum_dy_xmu * invstd
        if self.needs_input_grad[2]:
            grad_bias = sum_dy
        if self.needs_input_grad[0]:
            total = counts.sum().astype(x.dtype)
            sum_dy, sum_dy_xmu = self.process_group.all_reduce(jnp.stack([sum_dy, sum_dy_xmu])) / total
            inner = grad_output - sum_dy.reshape(shape) - centred * (invstd**2 * sum_dy_xmu).reshape(shape)
            grad_input = inner * (invstd if weight is None else invstd * weight).reshape(shape)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None, None


class LearnedClip(Function):
    """T36: in place means that the new value goes by the name of the old one, and is returned."""

    @staticmethod
    def forward(ctx, x, clip, num_bits, dequantize, inplace):
        ctx.save_for_backward(x, clip)
        scale = (2**num_bits - 1) / clip
        quantized = jnp.floor(scale * jnp.minimum(jnp.maximum(x, 0), clip))
        if dequantize:
            quantized = quantized / scale
        if inplace:
            x = x.at[:].set(quantized)
            ctx.mark_dirty(x)
            return x
        return quantized

    @staticmethod
    def backward(ctx, grad_output):
        x, clip = ctx.saved_tensors
        zero = jnp.zeros_like(grad_output)
        grad_input = jnp.where((x > 0) & (x < clip), grad_output, zero)
        grad_clip = jnp.where(x >= clip, grad_output, zero).sum().reshape(clip.shape)
        return grad_input, grad_clip, None, None, None


class UniformQuantize(Function):
    """T37: class methods, defaults, and tensors on attributes."""

    @classmethod
    def forward(cls, ctx, x, num_bits=4, low=None, high=None, name=""):
        ctx.low = x.min() if low is None else low
        ctx.high = x.max() if high is None else high
        ctx.save_for_backward(x)
        scale = (ctx.high - ctx.low) / cls.levels(num_bits)
        clipped = jnp.minimum(jnp.maximum(x, ctx.low), ctx.high)
        return jnp.round((clipped - ctx.low) / scale) * scale + ctx.low

    @classmethod
    def levels(cls, num_bits):
        return 2**num_bits - 1

    @classmethod
    def backward(cls, ctx, grad_output):
        (x,) = ctx.saved_tensors
        inside = ((x >= ctx.low) & (x <= ctx.high)).astype(grad_output.dtype)
        return grad_output * inside, None, None, None, None


class SignedQuantize(UniformQuantize):
    """Its parent with one argument more: both methods call the parent's."""

    @classmethod
    def forward(cls, ctx, x, gain, num_bits=4):
        ctx.gain = gain
        return super().forward(ctx, x * gain, num_bits) / gain

    @classmethod
    def levels(cls, num_bits):
        return super().levels(num_bits) - 1

    @classmethod
    def backward(cls, ctx, grad_output):
        grads = super().backward(ctx, grad_output / ctx.gain)
        return (grads[0] * ctx.gain, *grads[1:3])
