"""After torch's pages on extending autograd and torch.func."""

from __future__ import annotations

import numpy as np


def define(xp):
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
