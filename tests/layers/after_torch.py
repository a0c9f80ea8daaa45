"""Functions that people really write in torch: texts, references in plain JAX, and calls beside real torch.

A text is a function of `xp`, which has the names of JAX or of torch, and runs under both. T and a number name the layer
in the list of layers that they are taken from. What had to change: parameters are explicit inputs (Reversible), and
what torch changes in place goes through `xp.changed`.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np

from pylayer_jax import Function, PyLayer
from tests.kit import names
from tests.kit.case import R3, W, X, after, case, grid, ruled, stop
from tests.kit.oracle import Table


def tutorials(xp):
    """After torch's pages on extending autograd and torch.func."""

    class Linear(xp.Function):
        """An optional bias; each gradient only if it is asked for."""

        @staticmethod
        def forward(ctx, x, weight, bias=None):
            ctx.save_for_backward(x, weight, bias)
            y = x @ weight.T
            return y if bias is None else y + bias

        @staticmethod
        def backward(ctx, grad_output):
            x, weight, bias = ctx.saved_tensors
            grad_x = grad_weight = grad_bias = None
            if ctx.needs_input_grad[0]:
                grad_x = grad_output @ weight
            if ctx.needs_input_grad[1]:
                grad_weight = grad_output.T @ x
            if bias is not None and ctx.needs_input_grad[2]:
                grad_bias = grad_output.sum(0)
            return grad_x, grad_weight, grad_bias

    class LinearSetup(xp.Function):
        """The same with a context set up apart from forward."""

        @staticmethod
        def forward(x, weight, bias=None):
            y = x @ weight.T
            return y if bias is None else y + bias

        @staticmethod
        def setup_context(ctx, inputs, output):
            x, weight, bias = inputs
            ctx.save_for_backward(x, weight, bias)

        backward = staticmethod(Linear.backward)

    class MulConstant(xp.Function):
        """Nothing to do where no gradient arrives."""

        @staticmethod
        def forward(x, constant):
            return x * constant

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.set_materialize_grads(False)
            ctx.constant = inputs[1]

        @staticmethod
        def backward(ctx, grad_output):
            if grad_output is None:
                return None, None
            return grad_output * ctx.constant, None

    class Cube(xp.Function):
        """Gives its derivative as a second output, so that backward can be differentiated through it."""

        @staticmethod
        def forward(x):
            return x**3, 3 * x**2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0], output[1])

        @staticmethod
        def backward(ctx, grad_output, grad_slope):
            x, slope = ctx.saved_tensors
            return grad_output * slope + grad_slope * 6 * x

    class Exp(xp.Function):
        """Saves its output."""

        @staticmethod
        def forward(ctx, x):
            y = xp.exp(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad_output):
            (y,) = ctx.saved_tensors
            return grad_output * y

    class SinProduct(xp.Function):
        """Forward and reverse mode, the context set up apart from forward."""

        @staticmethod
        def forward(x, y, gain):
            return gain * xp.sin(x) * y, None, "units"

        @staticmethod
        def setup_context(ctx, inputs, output):
            x, y, ctx.gain = inputs
            ctx.save_for_backward(x, y)
            ctx.save_for_forward(x, y)

        @staticmethod
        def backward(ctx, grad_output, grad_none, grad_units):
            x, y = ctx.saved_tensors
            return ctx.gain * xp.cos(x) * y * grad_output, ctx.gain * xp.sin(x) * grad_output, None

        @staticmethod
        def jvp(ctx, dx, dy, dgain):
            x, y = ctx.saved_tensors
            return ctx.gain * (xp.cos(x) * dx * y + xp.sin(x) * dy), None, None

    class SinProductInCtx(xp.Function):
        """The same with a context that forward fills."""

        @staticmethod
        def forward(ctx, x, y, gain):
            SinProduct.setup_context(ctx, (x, y, gain), None)
            return gain * xp.sin(x) * y

        @staticmethod
        def backward(ctx, grad_output):
            return SinProduct.backward(ctx, grad_output, None, None)

        @staticmethod
        def jvp(ctx, dx, dy, dgain):
            return SinProduct.jvp(ctx, dx, dy, dgain)[0]

    def _front(x, dim):
        return x if dim is None else xp.moveaxis(x, dim, 0)

    class NumpySort(xp.Function):
        """Sorts with NumPy; the gradient is taken back by the inverse permutation."""

        @staticmethod
        def forward(x, dim):
            values = xp.to_numpy(x)
            order = np.argsort(values, axis=dim, kind="stable")
            inverse = np.argsort(order, axis=dim, kind="stable")
            result = np.take_along_axis(values, order, axis=dim)
            return xp.asarray(result), xp.asarray(order), xp.asarray(inverse)

        @staticmethod
        def setup_context(ctx, inputs, output):
            _, ctx.dim = inputs
            _, order, inverse = output
            ctx.mark_non_differentiable(order, inverse)
            ctx.save_for_backward(order, inverse)

        @staticmethod
        def backward(ctx, grad_output, grad_order, grad_inverse):
            order, inverse = ctx.saved_tensors
            return NumpyTake.apply(grad_output, inverse, order, ctx.dim), None

        @staticmethod
        def vmap(info, in_dims, x, dim):
            x = _front(x, in_dims[0])
            return NumpySort.apply(x, dim + 1 if dim >= 0 else dim), (0, 0, 0)

    class NumpyTake(xp.Function):
        """Takes along an axis with NumPy; its gradient takes by the inverse permutation."""

        @staticmethod
        def forward(x, order, inverse, dim):
            return xp.asarray(np.take_along_axis(xp.to_numpy(x), xp.to_numpy(order), axis=dim))

        @staticmethod
        def setup_context(ctx, inputs, output):
            _, order, inverse, ctx.dim = inputs
            ctx.save_for_backward(order, inverse)

        @staticmethod
        def backward(ctx, grad_output):
            order, inverse = ctx.saved_tensors
            return NumpyTake.apply(grad_output, inverse, order, ctx.dim), None, None, None

        @staticmethod
        def vmap(info, in_dims, x, order, inverse, dim):
            def mapped(value, at):
                if at is None:
                    return xp.broadcast_to(value, (info.batch_size, *value.shape))
                return xp.moveaxis(value, at, 0)

            x, order, inverse = (mapped(*pair) for pair in zip((x, order, inverse), in_dims[:3], strict=True))
            return NumpyTake.apply(x, order, inverse, dim + 1 if dim >= 0 else dim), 0

    class Normalize(xp.Function):
        """Plain operations only, so that its rule for vmap can be made from them."""

        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            norm = xp.sqrt((x * x).sum())
            return x / norm, norm

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*output)

        @staticmethod
        def backward(ctx, grad_output, grad_norm):
            y, norm = ctx.saved_tensors
            return (grad_output - y * (y * grad_output).sum()) / norm + grad_norm * y

    return locals()


def activations(xp):
    """Functions of one tensor to one tensor, each with its slope: T40 to T44."""

    def activation(name, value, slope):
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return value(x)

        def backward(ctx, grad_output):
            return slope(ctx.saved_tensors[0], grad_output)

        return type(name, (xp.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})

    def mish_slope(x, dy):
        t = xp.tanh(xp.softplus(x))
        return dy * (t + x * xp.sigmoid(x) * (1 - t * t))

    def hard_swish_slope(x, dy):
        above = xp.where(x > 3, dy, xp.zeros_like(x))
        return xp.where(xp.abs(x) <= 3, dy * (x / 3 + 0.5), above)

    Mish = activation("Mish", lambda x: x * xp.tanh(xp.softplus(x)), mish_slope)
    HardSwish = activation("HardSwish", lambda x: x * xp.clip(x + 3, 0, 6) / 6, hard_swish_slope)
    return locals()


def losses(xp):
    """Losses."""

    class AuxLossScaler(xp.Function):
        """T61: hands its input on; the scale of the second gradient is an attribute of the class."""

        scale = None

        @staticmethod
        def forward(ctx, output, aux_loss):
            ctx.save_for_backward(aux_loss)
            return output

        @staticmethod
        def backward(ctx, grad_output):
            (aux_loss,) = ctx.saved_tensors
            scale = 1 if AuxLossScaler.scale is None else AuxLossScaler.scale
            return grad_output, xp.ones_like(aux_loss) * scale

        @staticmethod
        def set_loss_scale(scale):
            AuxLossScaler.scale = scale

    return locals()


def static_arguments(xp):
    """Functions with several arguments, most of them static."""

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


def steps(xp):
    """Functions with a gradient that is larger than its input, one with `setup_context`."""

    class LearnedSteps(xp.Function):
        """T67, mended: the last of three outputs may be None, and missing gradients arrive as None."""

        @staticmethod
        def forward(x, step, neg=-2, pos=2, learned=True):
            scaled = x / step
            passed = (scaled >= neg) & (scaled <= pos)
            rounded = xp.clip(xp.round(scaled), neg, pos)
            inside = xp.cast(passed, x.dtype)
            return rounded * step, passed, rounded - scaled * inside if learned else None

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.set_materialize_grads(False)
            ctx.summed = tuple(i for i, n in enumerate(inputs[1].shape) if n == 1)
            ctx.save_for_backward(*output[1:])

        @staticmethod
        def backward(ctx, grad_output, grad_passed, grad_multiplier):
            if grad_output is None:
                return None, None, None, None, None
            passed, multiplier = ctx.saved_tensors
            grad_step = None if multiplier is None else (multiplier * grad_output).sum(ctx.summed, keepdims=True)
            return xp.cast(passed, grad_output.dtype) * grad_output, grad_step, None, None, None

    class JumpReLU(xp.Function):
        """T68: the gradient of the threshold has the shape of x, and is summed down."""

        @staticmethod
        def forward(ctx, x, theta, bandwidth):
            ctx.save_for_backward(x, theta)
            ctx.bandwidth = bandwidth
            return x * xp.cast(x > theta, x.dtype)

        @staticmethod
        def backward(ctx, grad_output):
            x, theta = ctx.saved_tensors
            near = xp.cast(xp.abs((x - theta) / ctx.bandwidth) < 0.5, x.dtype)
            return xp.cast(x > theta, x.dtype) * grad_output, -(theta / ctx.bandwidth) * near * grad_output, None

    return locals()


def layers(xp):
    found = {}
    for define in (tutorials, activations, losses, static_arguments, steps):
        found |= define(xp)
    return SimpleNamespace(**found)


ported = names.text(layers, names.JAX)


# -- layers that call other packages, so that no original stands beside them --------------------------


class Entmax15(Function):
    """T14: saves its output alone."""

    @staticmethod
    def forward(ctx, x):
        y = entmax15(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_output):
        (y,) = ctx.saved_tensors
        # The original takes the root of zeros as well, whose second derivative is no number.
        q = jnp.where(y > 0, jnp.sqrt(jnp.where(y > 0, y, 1)), 0)
        dx = grad_output * q
        return dx - q * dx.sum(-1, keepdims=True) / q.sum(-1, keepdims=True)


class DenseSolver:
    """A live object without arrays of its own."""

    def factor(self, mat):
        return jax.scipy.linalg.lu_factor(mat)

    def solve(self, factors, b, transposed=0):
        return jax.scipy.linalg.lu_solve(factors, b, transposed)


class FactorAndSolve(Function):
    """T69, dense: the solver is the first output, and is kept on ctx beside the factors."""

    @staticmethod
    def forward(ctx, mat, b, solver_fn=None):
        ctx.solver = (solver_fn or DenseSolver)()
        ctx.factors = ctx.solver.factor(mat)
        x = ctx.solver.solve(ctx.factors, b)
        ctx.save_for_backward(x)
        return ctx.solver, x

    @staticmethod
    def backward(ctx, solver, grad_output):
        assert solver is None
        (x,) = ctx.saved_tensors
        db = ctx.solver.solve(ctx.factors, grad_output, 1)
        return -jnp.outer(db, x), db, None


# -- references: each is a case of the registry ---------------------------------------------------------

TARGET = jnp.array([2, 0])


CrossEntropy = case(
    lambda z: -jnp.take_along_axis(jax.nn.log_softmax(z), TARGET[:, None], 1)[:, 0],
    X,
    call=lambda z: CrossEntropy.apply(z, TARGET, 0.0, None),
)(after(ported.VocabParallelCrossEntropy, __name__, "CrossEntropy"))


def sparsemax(x):
    s = jnp.sort(x)[..., ::-1]
    c = jnp.cumsum(s, -1) - 1
    i = jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    k = (i * s > c).sum(-1, keepdims=True)
    return jnp.maximum(x - jnp.take_along_axis(c, k - 1, -1) / k.astype(x.dtype), 0)


Sparsemax = case(sparsemax, X, call=lambda x: Sparsemax.apply(x, -1))(after(ported.Sparsemax, __name__))


def entmax15(x):
    z = (x - stop(x.max(-1, keepdims=True))) / 2
    s = jnp.sort(z)[..., ::-1]
    i = jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    mean, mean_square = jnp.cumsum(s, -1) / i, jnp.cumsum(s * s, -1) / i
    inner = (1 - i * (mean_square - mean**2)) / i
    tau = mean - jnp.sqrt(jnp.where(inner > 1e-9, inner, 1.0)) * (inner > 1e-9).astype(x.dtype)
    k = (tau <= s).sum(-1, keepdims=True)
    return jnp.maximum(z - jnp.take_along_axis(tau, k - 1, -1), 0) ** 2


case(entmax15, X * 0.8)(Entmax15)
case(jnp.linalg.solve, W + 2 * jnp.eye(3), X[0], call=lambda a, b: FactorAndSolve.apply(a, b)[1])(FactorAndSolve)


def _attention(q, k, v):
    s = q @ k.T / 3**0.5
    s = jnp.where(jnp.tril(jnp.ones(s.shape, bool)), s, -1e9)
    return jax.nn.softmax(s) @ v


FlashAttention = case(
    _attention, X[:2], X[:2] * 0.7, X[:2] + 0.2, call=lambda q, k, v: FlashAttention.apply(q, k, v, None, True, 2, 1)
)(after(ported.FlashAttention, __name__))


def _reversible(x, wf, wg):
    x1, x2 = jnp.split(x, 2, -1)
    y1 = x1 + jnp.tanh(x2 @ wf)
    return jnp.concatenate([y1, x2 + jnp.sin(y1 @ wg)], -1)


Reversible = case(
    _reversible,
    grid(2, 4),
    W[:2, :2],
    W[1:, 1:],
    call=lambda x, *w: Reversible.apply(x, ported.BLOCKS[:1], {"gain": 1.0}, *w),
)(after(ported.Reversible, __name__))


def _codes(inputs, codebook):
    return codebook[jnp.argmin(((inputs[..., None, :] - codebook) ** 2).sum(-1), -1)]


VectorQuantize = case(
    lambda x, c: _codes(stop(x), c) + x - stop(x),
    X,
    grid(4, 3),
    call=lambda x, c: VectorQuantize.apply(x, c)[0],
)(after(ported.StraightThroughCode, __name__, "VectorQuantize"))


@case(lambda x, y: (x, y), X, R3)
class Identity(PyLayer):
    """T34: returns the tuple of its arguments as it is, and marks those that need no gradient."""

    @staticmethod
    def forward(ctx, *args):
        asked = ctx.needs_input_grad
        ctx.mark_non_differentiable(*[a for a, wanted in zip(args, asked, strict=True) if not wanted])
        return args

    @staticmethod
    def backward(ctx, *grads):
        return grads


Mish = case(lambda x: x * jnp.tanh(jax.nn.softplus(x)), X)(after(ported.Mish, __name__))


def _jump_rule(residuals, g):
    x, theta = residuals
    near = (jnp.abs((x - theta) / 0.8) < 0.5).astype(x.dtype)
    return g * (x > theta).astype(x.dtype), -(theta / 0.8 * near * g).sum(0)


JumpReLU = case(
    ruled(lambda x, theta: x * (x > theta).astype(x.dtype), _jump_rule),
    X,
    R3,
    linear_loss=True,
    call=lambda x, theta: JumpReLU.apply(x, theta, 0.8),
)(after(ported.JumpReLU, __name__))


# -- calls beside real torch ----------------------------------------------------------------------------

PORTS = Table()
port = functools.partial(PORTS.port, layers)
UNEVEN = np.sin(2 * X)
Y = grid(2, 3, low=-0.9, high=1.1) + np.float32(0.05)
FIRST, SCANNED = {"orders": 1}, {"modes": ("eager", "jit", "scan")}  # the latter have no closed form


def f32(*values):
    return np.array(values, np.float32)


def i32(*values):
    return np.array(values, np.int32)


port("VocabParallelCrossEntropy", X, i32(1, 1), plain=True)
for smoothing, target in ((0.2, i32(2, 0)), (0.0, i32(5, 1))):  # one of them outside
    call = lambda m, x, target, smooth: m.VocabParallelCrossEntropy.apply(x, target, smooth, m.ONE_RANK)  # noqa: E731
    port("VocabParallelCrossEntropy", X, target, smoothing, call=call, **FIRST, label=str(smoothing))
port("Sparsemax", X)
port("Sparsemax", X, 1, label="last")
port("Sparsemax", X, call=lambda m, x: m.Sparsemax.apply(x, dim=1), label="keyword")

# torch has no second derivative, as backward runs under no_grad. The buckets of the second are uneven.
Q, K, V = grid(1, 2, 3, 4), grid(1, 2, 5, 4, low=-1, high=1.2), grid(1, 2, 5, 4, low=-2, high=1.5)
port("FlashAttention", grid(1, 2, 4, 4), K[:, :, :4], V[:, :, :4], None, False, 2, 2, **FIRST)
port("FlashAttention", Q, K, V, None, True, 2, 2, **FIRST, modes=("jit",), label="causal")
port("FlashAttention", Q, K, V, np.array([[True, True, False, True, False]]), False, 8, 8, **FIRST, label="masked")
WEIGHTS = [grid(2, 2, low=low, high=0.9) for low in (-0.8, -0.7, -0.6, -0.5)]
blocks = {"call": lambda m, x, *weights: m.Reversible.apply(x, m.BLOCKS, {"gain": 0.7}, *weights)}
port("Reversible", grid(2, 4), *WEIGHTS, **blocks, plain=True)

CODEBOOK = grid(4, 3)
port("NearestCode", X, CODEBOOK, wrt=(0,), call=lambda m, x, c: (m.NearestCode.apply(x, c), x * 2))
for wrt in ((0, 1), (0,), (1,)):
    port("StraightThroughCode", X, CODEBOOK, wrt=wrt, label=str(wrt))

IMAGES = grid(4, 3, 2)
STATS = np.zeros(3, np.float32), np.ones(3, np.float32)
norm = {"call": lambda m, *args: m.SyncBatchNorm.apply(*args, 1e-5, 0.1, m.ONE_RANK, 1)}
port("SyncBatchNorm", IMAGES, grid(3), grid(3) * 2, None, None, **norm, plain=True)
port("SyncBatchNorm", IMAGES, None, None, None, None, **norm, **FIRST, label="plain")
port("SyncBatchNorm", IMAGES, grid(3), None, *STATS, **norm, **FIRST, wrt=(0, 1), label="unbiased")
port("SyncBatchNorm", IMAGES, grid(3), grid(3), *STATS, **norm, **FIRST, wrt=(2,), label="bias")

# One step of `clip` is exact. Below the first step the changed input of the original says zero, as shown further down.
VALUES, CLIP = f32(-0.4, 0.31, 0.47, 0.83, 1.5), f32(0.9375)
changed = {"call": lambda m, x, c: m.LearnedClip.apply(x * 1, c, 4, True, True)}
port("LearnedClip", VALUES, CLIP, 4, True, False)
port("LearnedClip", VALUES, CLIP, 4, False, False, label="quantized")
port("LearnedClip", VALUES, CLIP, **changed, **SCANNED, label="inplace")
port("UniformQuantize", UNEVEN, **SCANNED)
port(
    "UniformQuantize",
    UNEVEN,
    3,
    np.array(-0.5, np.float32),
    np.array(0.9, np.float32),
    **SCANNED,
    wrt=(0,),
    label="ranged",
)
port("UniformQuantize", UNEVEN, 3, None, None, "static", label="static")
for activation in ("Mish", "HardSwish"):
    port(activation, X * 3 + np.float32(0.01))
port("AuxLossScaler", X, np.array(0.7, np.float32))
port("AuxLossScaler", X, np.array(0.7, np.float32), call=lambda m, x, a: m.AuxLossScaler.apply(x * 2, a), label="inner")
ROW = grid(1, 3, low=0.3, high=0.6)
port("LearnedSteps", X, ROW, used=(0,), **SCANNED)
port("LearnedSteps", X, grid(2, 1, low=0.3, high=0.6), -1, 2, used=(0,), label="columns")
port("LearnedSteps", X, ROW, -2, 2, False, wrt=(0,), **SCANNED, label="frozen")
port("LearnedSteps", X, ROW, label="every-output")
port("JumpReLU", X, grid(3, low=0.2, high=1.1), 0.8)

WEIGHT, BIAS = grid(4, 3), grid(4)
for name in ("Linear", "LinearSetup"):
    port(name, X, WEIGHT, label="default")
    port(name, X, WEIGHT, None, label="none")
    for wrt in ((0, 1, 2), (1,), (0, 2)):
        port(name, X, WEIGHT, BIAS, wrt=wrt, label=str(wrt))
    call = lambda m, x, w, b, name=name: getattr(m, name).apply(x, w, bias=b)  # noqa: E731
    port(name, X, WEIGHT, BIAS, call=call, label="keyword")
port("MulConstant", X, 2.5)
port("Cube", X)
port("Cube", X, used=(0,), label="first")
port("Cube", X, call=lambda m, x: m.Cube.apply(m.Cube.apply(x)[0] * 0.3), label="nested")
port("Exp", X)
port("Exp", X / 2, call=lambda m, x: m.Exp.apply(m.Exp.apply(x)), label="nested")
port("SinProduct", X, Y, 0.7)
port("SinProductInCtx", X, Y, 0.7)
port("Normalize", X)

# -- differences ------------------------------------------------------------------------------------

differ = functools.partial(port, summed=True, **FIRST)
# torch keeps the changed values for backward, of which the lowest step has no gradient; ours keeps the old.
differ(
    "LearnedClip", f32(-1, 0.03, 0.3, 1.5), f32(1), **changed, theirs=[f32(0, 0, 1, 0), 1], ours=[f32(0, 1, 1, 0), 1]
)
differ("LearnedClip", VALUES, CLIP, 4, True, True, theirs=RuntimeError, ours=[f32(0, 1, 1, 1, 0), 1], label="leaf")


def running(m, *args):
    norm["call"](m, *args)
    return args[-2:]


updated = [f32(*0.1 * IMAGES.mean((0, 2))), f32(*(0.9 + 0.1 * IMAGES.var((0, 2), ddof=1)))]
kept = {"theirs": updated, "ours": [*STATS]}
differ(
    "SyncBatchNorm", IMAGES, None, None, *STATS, call=running, orders=0, theirs=updated, ours=[*STATS], label="running"
)
# torch counts the parameters of a class method wrongly, and finds one missing.
named = {"call": lambda m, x: m.UniformQuantize.apply(x, 3, name="static")}
differ("UniformQuantize", UNEVEN, **named, theirs=TypeError, ours=[1], label="keyword")
