"""Functions with several arguments, most of them static."""

from __future__ import annotations

import math

import numpy as np


def define(xp):
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

    class VocabParallelCrossEntropy(xp.Function):
        """T11: the softmax, an intermediate, is what backward needs."""

        @staticmethod
        def forward(ctx, logits, target, label_smoothing=0.0, tp_group=None):
            group = tp_group or ONE_RANK
            logits = xp.cast(logits, xp.float32)
            shifted = logits - group.all_max(xp.amax(logits, -1, keepdims=True))
            size = shifted.shape[-1]
            first = group.rank * size
            out = (target < first) | (target >= first + size)
            index = xp.where(out, xp.zeros_like(target), target - first)
            predicted = xp.take_along_dim(shifted, index[..., None], -1)[..., 0]
            predicted = group.all_reduce(xp.where(out, xp.zeros_like(predicted), predicted))
            exps = xp.exp(shifted)
            total = group.all_reduce(exps.sum(-1))
            loss = xp.log(total) - predicted
            softmax = exps / total[..., None]
            if label_smoothing > 0:
                share = label_smoothing * size / (size - 1)
                loss = (1 - share) * loss - share * xp.log(softmax).mean(-1)
            ctx.label_smoothing, ctx.vocab_size = label_smoothing, size
            ctx.save_for_backward(softmax, out, index)
            return loss

        @staticmethod
        def backward(ctx, grad_output):
            softmax, out, index = ctx.saved_tensors
            own = 1.0 - xp.cast(out, xp.float32)
            one_hot = xp.cast(xp.one_hot(index, ctx.vocab_size), xp.float32) * own[..., None]
            if ctx.label_smoothing > 0:
                share = ctx.label_smoothing * ctx.vocab_size / (ctx.vocab_size - 1)
                grad = softmax - (1 - share) * one_hot - share / ctx.vocab_size
            else:
                grad = softmax - one_hot
            return grad * grad_output[..., None], None, None, None

    class Sparsemax(xp.Function):
        """T12: backward returns a gradient for `dim` as well, which a caller may leave out."""

        @staticmethod
        def forward(ctx, x, dim=0):
            ctx.dim = dim
            x = x - xp.amax(x, dim, keepdims=True)
            ordered = xp.flip(xp.sort(x, dim), (dim,))
            sums = ordered.cumsum(dim) - 1
            shape = [1] * x.ndim
            shape[dim] = -1
            position = xp.cast(xp.arange(1, x.shape[dim] + 1), x.dtype).reshape(shape)
            size = (position * ordered > sums).sum(dim, keepdims=True)
            tau = xp.take_along_dim(sums, size - 1, dim) / xp.cast(size, x.dtype)
            y = xp.clip(x - tau, min=0)
            ctx.save_for_backward(size, y)
            return y

        @staticmethod
        def backward(ctx, grad_output):
            size, y = ctx.saved_tensors
            support = xp.cast(y != 0, grad_output.dtype)
            grad = grad_output * support
            mean = grad.sum(ctx.dim, keepdims=True) / xp.cast(size, grad.dtype)
            return (grad - mean) * support, None

    def _visible(rows, columns, mask, causal, offset):
        """Which keys of one bucket the queries of one bucket may see."""
        seen = xp.ones((len(rows), len(columns)), dtype=xp.bool)
        if causal:
            seen = xp.asarray(np.array(rows)[:, None] + offset >= np.array(columns))
        return seen if mask is None else seen & mask

    class FlashAttention(xp.Function):
        """T20: softmax attention bucket by bucket; the split mask rides in a tuple on an attribute."""

        @staticmethod
        @xp.no_grad
        def forward(ctx, q, k, v, mask, causal, q_bucket_size, k_bucket_size):
            scale = q.shape[-1] ** -0.5
            offset = max(k.shape[-2] - q.shape[-2], 0)
            buckets = math.ceil(q.shape[-2] / q_bucket_size)
            masks = (None,) * buckets if mask is None else xp.split(mask[:, None, None, :], q_bucket_size, -1)
            by_column = list(zip(*(xp.split(x, k_bucket_size, -2) for x in (k, v)), strict=True))
            outputs, lses = [], []
            for i, (qc, mc) in enumerate(zip(xp.split(q, q_bucket_size, -2), masks, strict=True)):
                rows = range(i * q_bucket_size, i * q_bucket_size + qc.shape[-2])
                top = xp.full((*qc.shape[:-1], 1), -1e9)
                total = xp.zeros_like(top)
                o = xp.zeros_like(qc)
                for j, (kc, vc) in enumerate(by_column):
                    columns = range(j * k_bucket_size, j * k_bucket_size + kc.shape[-2])
                    seen = _visible(rows, columns, mc, causal, offset)
                    scores = xp.where(seen, qc @ kc.swapaxes(-1, -2) * scale, -1e9)
                    new_top = xp.maximum(top, xp.amax(scores, -1, keepdims=True))
                    p = xp.exp(scores - new_top) * xp.cast(seen, q.dtype)
                    shrink = xp.exp(top - new_top)
                    total = total * shrink + p.sum(-1, keepdims=True)
                    o = o * shrink + p @ vc
                    top = new_top
                total = xp.clip(total, min=1e-6)
                outputs.append(o / total)
                lses.append(xp.log(total) + top)
            o, lse = xp.concatenate(outputs, -2), xp.concatenate(lses, -2)
            ctx.args = (causal, scale, offset, masks, q_bucket_size, k_bucket_size)
            ctx.save_for_backward(q, k, v, o, lse)
            return o

        @staticmethod
        @xp.no_grad
        def backward(ctx, do):
            causal, scale, offset, masks, q_bucket_size, k_bucket_size = ctx.args
            q, k, v, o, lse = ctx.saved_tensors
            by_column = list(zip(*(xp.split(x, k_bucket_size, -2) for x in (k, v)), strict=True))
            dqs, dks, dvs = [], [0.0] * len(by_column), [0.0] * len(by_column)
            delta = (do * o).sum(-1, keepdims=True)
            by_row = (xp.split(x, q_bucket_size, -2) for x in (q, do, lse, delta))
            for i, (qc, doc, lsec, deltac, mc) in enumerate(zip(*by_row, masks, strict=True)):
                rows = range(i * q_bucket_size, i * q_bucket_size + qc.shape[-2])
                dq = xp.zeros_like(qc)
                for j, (kc, vc) in enumerate(by_column):
                    columns = range(j * k_bucket_size, j * k_bucket_size + kc.shape[-2])
                    seen = _visible(rows, columns, mc, causal, offset)
                    scores = xp.where(seen, qc @ kc.swapaxes(-1, -2) * scale, -1e9)
                    p = xp.exp(scores - lsec) * xp.cast(seen, q.dtype)
                    ds = p * (doc @ vc.swapaxes(-1, -2) - deltac) * scale
                    dq = dq + ds @ kc
                    dks[j] = dks[j] + ds.swapaxes(-1, -2) @ qc
                    dvs[j] = dvs[j] + p.swapaxes(-1, -2) @ doc
                dqs.append(dq)
            return *(xp.concatenate(parts, -2) for parts in (dqs, dks, dvs)), None, None, None, None

    class ReversibleBlock:
        """Two residual functions, each of half of the features and a matrix."""

        def __init__(self, bend):
            self.bend = bend

        def f(self, x, weight, gain):
            return gain * xp.tanh(x @ weight)

        def g(self, x, weight, gain):
            return gain * self.bend(x @ weight)

        def forward(self, x, wf, wg, gain):
            x1, x2 = xp.split(x, x.shape[-1] // 2, -1)
            y1 = x1 + self.f(x2, wf, gain)
            return xp.concatenate([y1, x2 + self.g(y1, wg, gain)], -1)

        def backward(self, y, dy, wf, wg, gain):
            (y1, y2), (dy1, dy2) = (xp.split(v, v.shape[-1] // 2, -1) for v in (y, dy))
            gy1, (d, dwg) = xp.pull(lambda x, w: self.g(x, w, gain), (y1, wg), dy2)
            dx1, x2 = dy1 + d, y2 - gy1
            fx2, (d, dwf) = xp.pull(lambda x, w: self.f(x, w, gain), (x2, wf), dx1)
            return xp.concatenate([y1 - fx2, x2], -1), xp.concatenate([dx1, dy2 + d], -1), (dwf, dwg)

    BLOCKS = [ReversibleBlock(xp.sin), ReversibleBlock(xp.tanh)]

    class Reversible(xp.Function):
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

    class NearestCode(xp.Function):
        """T30: an index, and a backward that must never be called."""

        @staticmethod
        def forward(ctx, inputs, codebook):
            index = ((inputs[..., None, :] - codebook) ** 2).sum(-1).argmin(-1)
            ctx.mark_non_differentiable(index)
            return index

        @staticmethod
        def backward(ctx, grad_output):
            raise RuntimeError("an index has no gradient")

    class StraightThroughCode(xp.Function):
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
                grad_inputs = xp.copy(grad_output)
            if ctx.needs_input_grad[1]:
                index, codebook = ctx.saved_tensors
                rows = grad_output.reshape(-1, codebook.shape[-1])
                grad_codebook = xp.add_rows(xp.zeros_like(codebook), index, rows)
            return grad_inputs, grad_codebook

    class SyncBatchNorm(xp.Function):
        """T32 with a group of one rank: the context is called self; statistics change in place under torch alone."""

        @staticmethod
        def forward(self, x, weight, bias, running_mean, running_var, eps, momentum, process_group, world_size):
            axes = (0, *range(2, x.ndim))
            channels = x.shape[1]
            mean, var = x.mean(axes), xp.var(x, axes)
            count = xp.full((1,), float(math.prod(x.shape) // channels))
            gathered = process_group.all_gather(xp.concatenate([mean, xp.rsqrt(var + eps), count]))
            gathered = xp.stack(gathered).reshape(world_size, -1)
            means, invstds, counts = gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:]
            share = counts / counts.sum()
            mean = (share * means).sum(0)
            var = (share * (invstds**-2 - eps + means**2)).sum(0) - mean**2
            invstd = xp.rsqrt(var + eps)
            if running_mean is not None:
                total = counts.sum()
                unbiased = var * total / (total - 1)
                xp.changed(running_mean, (1 - momentum) * running_mean + momentum * mean)
                xp.changed(running_var, (1 - momentum) * running_var + momentum * unbiased)
            self.save_for_backward(x, weight, mean, invstd, xp.cast(counts, xp.int32))
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
                total = xp.cast(counts.sum(), x.dtype)
                sum_dy, sum_dy_xmu = self.process_group.all_reduce(xp.stack([sum_dy, sum_dy_xmu])) / total
                inner = grad_output - sum_dy.reshape(shape) - centred * (invstd**2 * sum_dy_xmu).reshape(shape)
                grad_input = inner * (invstd if weight is None else invstd * weight).reshape(shape)
            return grad_input, grad_weight, grad_bias, None, None, None, None, None, None

    class LearnedClip(xp.Function):
        """T36: saves its input before it may change it in place, which JAX cannot."""

        @staticmethod
        def forward(ctx, x, clip, num_bits, dequantize, inplace):
            ctx.save_for_backward(x, clip)
            scale = (2**num_bits - 1) / clip
            quantized = xp.floor(scale * xp.minimum(xp.clip(x, min=0), clip))
            if dequantize:
                quantized = quantized / scale
            if inplace:
                x = xp.changed(x, quantized)
                ctx.mark_dirty(x)
                return x
            return quantized

        @staticmethod
        def backward(ctx, grad_output):
            x, clip = ctx.saved_tensors
            zero = xp.zeros_like(grad_output)
            grad_input = xp.where((x > 0) & (x < clip), grad_output, zero)
            grad_clip = xp.where(x >= clip, grad_output, zero).sum().reshape(clip.shape)
            return grad_input, grad_clip, None, None, None

    class UniformQuantize(xp.Function):
        """T37: class methods, defaults, and tensors on attributes."""

        @classmethod
        def forward(cls, ctx, x, num_bits=4, low=None, high=None, name=""):
            ctx.low = x.min() if low is None else low
            ctx.high = x.max() if high is None else high
            ctx.save_for_backward(x)
            scale = (ctx.high - ctx.low) / (2**num_bits - 1)
            clipped = xp.minimum(xp.maximum(x, ctx.low), ctx.high)
            return xp.round((clipped - ctx.low) / scale) * scale + ctx.low

        @classmethod
        def backward(cls, ctx, grad_output):
            (x,) = ctx.saved_tensors
            inside = xp.cast((x >= ctx.low) & (x <= ctx.high), grad_output.dtype)
            return grad_output * inside, None, None, None, None

    return locals()
