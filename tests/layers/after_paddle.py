"""Ports layers of Paddle projects: their code, references in plain JAX, and rows that compare them with real Paddle.

A text is a function of `xp`, which has the names of JAX or of Paddle, and runs under both. P and a number name the
layer in the list of layers that they are taken from.
"""

import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from tests.kit import names
from tests.kit.case import W, X, after, case, ruled
from tests.kit.oracle import Table


def layers(xp):
    class Recompute(xp.PyLayer):
        """P8, shortened: backward differentiates, and a tuple of tensors is saved as one entry with one gradient."""

        @staticmethod
        def forward(ctx, run_function, preserve_rng_state, inputs):
            ctx.run_function = run_function
            ctx.save_for_backward(inputs)
            return run_function(*inputs)

        @staticmethod
        def backward(ctx, dy):
            (inputs,) = ctx.saved_tensor()
            return (xp.pull(ctx.run_function, inputs, dy)[1],)

    class RouterLoss(xp.PyLayer):
        """P19: the gradient of the loss does not depend on the cotangent."""

        @staticmethod
        def forward(ctx, x, router_loss, num_acc_steps, enable_delay_scale_loss):
            ctx.shape, ctx.dtype, ctx.steps = router_loss.shape, router_loss.dtype, num_acc_steps
            ctx.delay = enable_delay_scale_loss
            return x

        @staticmethod
        def backward(ctx, dy):
            return dy, xp.full(ctx.shape, 1.0 if ctx.delay else 1 / ctx.steps, ctx.dtype)

    class ClippedReversal(xp.PyLayer):
        """P28: saves a plain int, and clips the cotangent."""

        @staticmethod
        def forward(ctx, x, lambda_=1):
            ctx.save_for_backward(lambda_)
            return xp.copy(x)

        @staticmethod
        def backward(ctx, dy):
            (lambda_,) = ctx.saved_tensor()
            return xp.clip(-lambda_ * dy, -0.5, 0.5)

    return SimpleNamespace(**locals())


ported = names.text(layers, names.JAX)


# -- references: each is a case of the registry ---------------------------------------------------------

RouterLoss = case(
    # The term of zero makes the gradient depend on the cotangent, so that under vmap there is one for each example.
    ruled(lambda x, loss: x, lambda r, g: (g, 0.25 + 0 * jnp.sum(g))),
    X,
    0.7,
    linear_loss=True,
    call=lambda x, loss: RouterLoss.apply(x, loss, 4, False),
    forward_over_reverse=r"RouterLoss\.backward",
)(after(ported.RouterLoss, __name__))


ClippedReversal = case(
    ruled(lambda x: x, lambda r, g: (jnp.clip(-2.0 * g, -0.5, 0.5),)),
    X,
    linear_loss=True,
    call=lambda x: ClippedReversal.apply(x, lambda_=2),
    forward_over_reverse=r"(?s)ClippedReversal\.backward.*(max|min|clamp)",
)(after(ported.ClippedReversal, __name__))


def _block(x, w):
    return jnp.tanh(x @ w) * x


Recompute = case(_block, X, W, call=lambda x, w: Recompute.apply(_block, True, (x, w)))(
    after(ported.Recompute, __name__)
)


PORTS = Table()
port = functools.partial(PORTS.port, layers)
LOSS = np.array(0.7, np.float32)

# Paddle has no second derivative, since what backward differentiates is detached.
port("Recompute", X, W, call=lambda m, x, w: m.Recompute.apply(lambda x, w: (x @ w) ** 3 * x, True, (x, w)), plain=True)
for delayed in (False, True):
    call = lambda m, x, loss, delayed: m.RouterLoss.apply(x * 2, loss, 4, delayed)
    port("RouterLoss", X, LOSS, delayed, call=call, label=str(delayed))
port("ClippedReversal", X, call=lambda m, x: m.ClippedReversal.apply(x, lambda_=2))
port("ClippedReversal", X, label="default")
port("ClippedReversal", X, np.array(0.3, np.float32), wrt=(0,), label="tensor")
