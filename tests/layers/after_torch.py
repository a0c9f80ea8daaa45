"""Ports functions of torch: their code, and rows that compare them with real torch.

A text is a function of `xp`, which has the names of JAX or of torch, and runs under both. T and a number name the layer
in the list of layers that they are taken from.
"""

import functools
from types import SimpleNamespace

import numpy as np

from tests.kit import names
from tests.kit.case import X, grid
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

    return SimpleNamespace(**locals())


ported = names.text(layers, names.JAX)


PORTS = Table()
port = functools.partial(PORTS.port, layers)
Y = grid(2, 3, low=-0.9, high=1.1) + np.float32(0.05)


port("AuxLossScaler", X, np.array(0.7, np.float32))
port("AuxLossScaler", X, np.array(0.7, np.float32), call=lambda m, x, a: m.AuxLossScaler.apply(x * 2, a), label="inner")

port("MulConstant", X, 2.5)
port("Cube", X)
port("Cube", X, used=(0,), label="first")
port("Cube", X, call=lambda m, x: m.Cube.apply(m.Cube.apply(x)[0] * 0.3), label="nested")
port("SinProduct", X, Y, 0.7)
port("Normalize", X)
