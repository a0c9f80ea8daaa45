"""Each layer after torch against the real one: outputs, gradients of two orders, and what differs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.kit.case import numpy_grid as grid
from tests.kit.oracle import Table, compare

from .layers import layers, ported

PORTS = Table()
port = functools.partial(PORTS.port, layers)
X = grid(2, 3)
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
for activation in ("Swish", "Mish", "HardSigmoid", "HardSwish", "HardMish"):
    port(activation, X * 3 + np.float32(0.01))
port("AuxLossScaler", X, np.array(0.7, np.float32))
port("AuxLossScaler", X, np.array(0.7, np.float32), call=lambda m, x, a: m.AuxLossScaler.apply(x * 2, a), label="inner")
# Operation by operation it takes seconds.
port("CTC", grid(4, 3, 4), i32([1, 1], [2, 3], [3, 1]), i32(4, 3, 2), i32(2, 2, 1), **FIRST, modes=("jit",))
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


@PORTS.every()
def test_as_in_torch(theirs, mode, one):
    compare(theirs, mode, one)


def test_an_attribute_of_the_class_changed_between_calls(theirs, monkeypatch):
    """A compiled gradient keeps the attribute of its first call, as everything that Python reads."""
    gradient = jax.grad(lambda x, a: ported.AuxLossScaler.apply(x, a).sum(), 1)
    original, found = theirs.text(layers), {"theirs": [], "eager": [], "jit": []}
    compiled = jax.jit(gradient)
    for scale in (2, 5):
        for module in (original, ported):
            monkeypatch.setattr(module.AuxLossScaler, "scale", scale)
        loss = theirs.leaf(f32(0.7))
        original.AuxLossScaler.apply(theirs.leaf(X), loss).sum().backward()
        found["theirs"].append(float(loss.grad))
        found["eager"].append(float(gradient(jnp.asarray(X), jnp.float32(0.7))))
        found["jit"].append(float(compiled(jnp.asarray(X), jnp.float32(0.7))))
    assert found == {"theirs": [2, 5], "eager": [2, 5], "jit": [2, 2]}
