"""Ports functions of torch projects: their code, references in plain JAX, and rows that compare them with real torch.

A text is a function of `xp`, which has the names of JAX or of torch, and runs under both. T and a number name the layer
in the list of layers that they are taken from.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from tests.kit import names
from tests.kit.case import X, after, case, grid, stop
from tests.kit.oracle import Table


def layers(xp):
    # -- of torch's pages about extending autograd and torch.func --

    class MulConstant(xp.Function):
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

    class SinProduct(xp.Function):
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

    def _front(x, dim):
        return x if dim is None else xp.moveaxis(x, dim, 0)

    class NumpySort(xp.Function):
        host = "forward"  # which torch ignores

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
        host = "forward"

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

    # -- of projects on GitHub --

    class AuxLossScaler(xp.Function):
        """T61: returns its input. The scale of the second gradient is an attribute of the class."""

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

    class NearestCode(xp.Function):
        """T30: returns an index. Its backward must never be called."""

        @staticmethod
        def forward(ctx, inputs, codebook):
            index = ((inputs[..., None, :] - codebook) ** 2).sum(-1).argmin(-1)
            ctx.mark_non_differentiable(index)
            return index

        @staticmethod
        def backward(ctx, grad_output):
            raise RuntimeError("an index has no gradient")

    class StraightThroughCode(xp.Function):
        """T31: a straight-through gradient for the inputs, and a sum by index for the codebook, each only if needed."""

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

    return SimpleNamespace(**locals())


ported = names.text(layers, names.JAX)


# -- references: each is a case of the registry ---------------------------------------------------------


def _codes(inputs, codebook):
    return codebook[jnp.argmin(((inputs[..., None, :] - codebook) ** 2).sum(-1), -1)]


VectorQuantize = case(
    lambda x, c: _codes(stop(x), c) + x - stop(x),
    X,
    grid(4, 3),
    call=lambda x, c: VectorQuantize.apply(x, c)[0],
)(after(ported.StraightThroughCode, __name__, "VectorQuantize"))


# -- calls beside real torch ----------------------------------------------------------------------------

PORTS = Table()
port = functools.partial(PORTS.port, layers)
Y = grid(2, 3, low=-0.9, high=1.1) + np.float32(0.05)


CODEBOOK = grid(4, 3)
port("NearestCode", X, CODEBOOK, wrt=(0,), call=lambda m, x, c: (m.NearestCode.apply(x, c), x * 2))
for wrt in ((0, 1), (0,), (1,)):
    port("StraightThroughCode", X, CODEBOOK, wrt=wrt, label=str(wrt))

port("AuxLossScaler", X, np.array(0.7, np.float32))
port("AuxLossScaler", X, np.array(0.7, np.float32), call=lambda m, x, a: m.AuxLossScaler.apply(x * 2, a), label="inner")

port("MulConstant", X, 2.5)
port("Cube", X)
port("Cube", X, used=(0,), label="first")
port("Cube", X, call=lambda m, x: m.Cube.apply(m.Cube.apply(x)[0] * 0.3), label="nested")
port("SinProduct", X, Y, 0.7)
port("Normalize", X)
