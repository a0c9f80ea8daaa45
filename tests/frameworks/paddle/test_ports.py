"""Each layer after Paddle against the real one: outputs, gradients of two orders, and what differs."""

from __future__ import annotations

import functools

import numpy as np

from tests.kit.case import numpy_grid as grid
from tests.kit.oracle import Table, compare

from .layers import layers

PORTS = Table()
port = functools.partial(PORTS.port, layers)
X, W, WEIGHT = grid(2, 3), grid(3, 3, low=-0.8, high=0.9), grid(3, 4, low=-2.3, high=2.6)
STEP, LOSS, THREE = np.array(0.25, np.float32), np.array(0.7, np.float32), np.array([3], np.int32)


def f32(*values):
    return np.array(values, np.float32)


# Paddle has no second derivative, since what backward differentiates is detached.
port("Recompute", X, W, call=lambda m, x, w: m.Recompute.apply(lambda x, w: (x @ w) ** 3 * x, True, (x, w)), plain=True)
for name, rows, positions, size in (
    ("MoEScatter", grid(4, 2), [3, 0, 2], 3),
    ("MoEScatter", grid(4, 2), [1, 1, 2], 3),  # the last of the rows overwrites the others
    ("MoEScatter", grid(4, 2), [], 0),
    ("MoEGather", grid(3, 2), [3, 0, 2], 4),
    ("MoEGather", grid(3, 2), [1, 3, 1], 4),
):
    call = lambda m, *args, name=name: getattr(m, name).apply(*args, world_size=1)  # noqa: E731
    port(name, rows, np.array(positions, np.int32), THREE, THREE, size, call=call, label=str(positions))
by_name = {"call": lambda m, w, alpha, g, axis: m.LSQ.apply(w, alpha, g, -2, 3, quant_axis=axis, per_channel=True)}
port("LSQ", WEIGHT, np.array(0.6, np.float32), STEP, -2, 3, False, wrt=(0, 1))
port("LSQ", WEIGHT, f32(0.5, 0.6, 0.9), STEP, -2, 3, True, wrt=(0, 1), label="rows")
port("LSQ", WEIGHT, f32(0.5, 0.6, 0.9, 0.3), STEP, 1, **by_name, wrt=(0, 1), label="columns")
port("LSQPlus", WEIGHT, np.array(0.6, np.float32), np.array(0.2, np.float32), STEP, -2, 3, wrt=(0, 1, 2))
for delayed in (False, True):
    call = lambda m, x, loss, delayed: m.RouterLoss.apply(x * 2, loss, 4, delayed)  # noqa: E731
    port("RouterLoss", X, LOSS, delayed, call=call, label=str(delayed))
doubled = {"call": lambda m, x, loss: m.AuxiliaryLoss.apply(x * 2, loss)}
port("AuxiliaryLoss", X, f32(0.7), **doubled)
port("AuxiliaryLoss", X, LOSS, **doubled, wrt=(0,), label="frozen")
port("SavedAuxiliaryLoss", X, LOSS)
port("GatherEach", X, call=lambda m, x: m.GatherEach.apply(x * 2))
port("LayerNorm2d", grid(2, 3, 1, 2), grid(3), grid(3) * 2, 1e-5, plain=True)
port("ClippedReversal", X, call=lambda m, x: m.ClippedReversal.apply(x, lambda_=2))
port("ClippedReversal", X, label="default")
port("ClippedReversal", X, np.array(0.3, np.float32), wrt=(0,), label="tensor")

# Backward has the slots of torch, one too many for Paddle.
differ = {"orders": 1, "summed": True}
port("Reversal", X, 0.3, theirs=ValueError, ours=[-0.3], **differ)
# Paddle hands on the shape that backward gave; here it becomes that of the loss.
port("AuxiliaryLoss", X, LOSS, **doubled, theirs=[2, f32(1)], ours=[2, 1], **differ, label="without-dimensions")


@PORTS.every()
def test_as_in_paddle(theirs, mode, one):
    compare(theirs, mode, one)
