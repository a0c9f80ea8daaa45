"""Each ported Function against the real one: outputs, and gradients of two orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit.case import numpy_grid as grid
from tests.kit.modes import EAGER_AND_JIT as MODES

from .layers import ported
from .sides import (
    ACTS,
    BIAS,
    CLIP,
    CODEBOOK,
    COLUMN,
    HALF,
    IMAGES,
    LABELS,
    LENGTHS,
    MASK,
    NORM,
    ROW,
    STATS,
    TARGET,
    UNCLIPPED,
    UNEVEN,
    WEIGHT,
    K,
    Ours,
    Own,
    Port,
    Q,
    Theirs,
    V,
    X,
    Y,
    apply,
    assert_equal,
)

# torch's own: its first use of forward mode compiles rules by what it calls deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning",
    "ignore:.*NoGradient.backward returned None:UserWarning",  # as the original does, on purpose
)
CASES: list[Port] = []


def case(
    name: str,
    *args: Any,
    wrt: tuple[int, ...] | None = None,
    call: Callable[..., Any] | None = None,
    pick: tuple[int, ...] | None = None,
    second: bool = True,
    label: str = "",
) -> None:
    floats = tuple(i for i, a in enumerate(args) if isinstance(a, np.ndarray) and a.dtype == np.float32)
    chosen = floats if wrt is None else wrt
    CASES.append(Port(f"{name}-{label}" if label else name, args, chosen, call or apply(name), pick, second))


# What torch drops from second derivatives, or forbids, has tests of its own below.
case("VocabParallelCrossEntropy", X, TARGET, second=False)
case("VocabParallelCrossEntropy", X, TARGET, 0.2, Own("ONE_RANK"), second=False, label="smooth")
case("VocabParallelCrossEntropy", X, np.array([5, 1], np.int32), 0.0, Own("ONE_RANK"), second=False, label="outside")
case("Sparsemax", X, label="default")
case("Sparsemax", X, 1, label="last")
case("Sparsemax", X, call=lambda m, x: m.Sparsemax.apply(x, dim=1), label="keyword")
# Equal buckets, whose operations JAX compiles once; the next has shorter ones too.
case("FlashAttention", grid(1, 2, 4, 4), K[:, :, :4], V[:, :, :4], None, False, 2, 2, second=False)
case("FlashAttention", Q, K, V, None, True, 2, 2, second=False, label="causal")
case("FlashAttention", Q, K, V, MASK, False, 8, 8, second=False, label="masked")
case("Reversible", grid(2, 4), Own("BLOCKS"), {"gain": 0.7}, *HALF, second=False)
case("NearestCode", X, CODEBOOK, wrt=(0,), call=lambda m, x, c: (m.NearestCode.apply(x, c), x * 2))
case("StraightThroughCode", X, CODEBOOK)
case("StraightThroughCode", X, CODEBOOK, wrt=(0,), label="inputs")
case("StraightThroughCode", X, CODEBOOK, wrt=(1,), label="codebook")
case("SyncBatchNorm", IMAGES, grid(3), grid(3) * 2, None, None, *NORM, second=False)
case("SyncBatchNorm", IMAGES, None, None, None, None, *NORM, second=False, label="plain")
case("SyncBatchNorm", IMAGES, grid(3), None, *STATS, *NORM, wrt=(0, 1), second=False, label="unbiased")
case("SyncBatchNorm", IMAGES, grid(3), grid(3), *STATS, *NORM, wrt=(2,), second=False, label="bias")
case("LearnedClip", UNCLIPPED, CLIP, 4, True, False)
case("LearnedClip", UNCLIPPED, CLIP, 4, False, False, label="quantized")
case("LearnedClip", UNCLIPPED, CLIP, call=lambda m, x, c: m.LearnedClip.apply(x * 1, c, 4, True, True), label="inplace")
case("UniformQuantize", UNEVEN)
case("UniformQuantize", UNEVEN, 3, np.array(-0.5, np.float32), np.array(0.9, np.float32), wrt=(0,), label="ranged")
case("UniformQuantize", UNEVEN, 3, None, None, "static", label="static")
case("SignedQuantize", UNEVEN, 1.5)
case("SignedQuantize", UNEVEN, 1.5, 3, label="bits")

for activation in ("Swish", "Mish", "HardSigmoid", "HardSwish", "HardMish"):
    case(activation, X * 3 + np.float32(0.01))
case("AuxLossScaler", X, np.array(0.7, np.float32))
case("AuxLossScaler", X, np.array(0.7, np.float32), call=lambda m, x, a: m.AuxLossScaler.apply(x * 2, a), label="inner")
case("CTC", ACTS, LABELS, *LENGTHS, second=False)
case("LearnedSteps", X, ROW, pick=(0,))
case("LearnedSteps", X, COLUMN, -1, 2, pick=(0,), label="columns")
case("LearnedSteps", X, ROW, -2, 2, False, wrt=(0,), label="frozen")
case("LearnedSteps", X, ROW, label="every-output")
case("JumpReLU", X, grid(3, low=0.2, high=1.1), 0.8)

for linear in ("Linear", "LinearSetup"):
    case(linear, X, WEIGHT, BIAS)
    case(linear, X, WEIGHT, label="default")
    case(linear, X, WEIGHT, None, label="none")
    case(linear, X, WEIGHT, BIAS, wrt=(1,), label="weight")
    case(linear, X, WEIGHT, BIAS, wrt=(0, 2), label="others")
    call = lambda m, x, w, b, name=linear: getattr(m, name).apply(x, w, bias=b)  # noqa: E731
    case(linear, X, WEIGHT, BIAS, call=call, label="keyword")
case("MulConstant", X, 2.5)
case("MulConstant", X, call=lambda m, x: m.NoGradient.apply(m.MulConstant.apply(x, 2.5)) + x, label="no-gradient")
case("Cube", X)
case("Cube", X, pick=(0,), label="first")
case("Cube", X, call=lambda m, x: m.Cube.apply(m.Cube.apply(x)[0] * 0.3), label="nested")
case("Exp", X)
case("Exp", X, call=lambda m, x: m.Exp.apply(m.Exp.apply(x)), label="nested")
case("SinProduct", X, Y, 0.7)
case("SinProductInCtx", X, Y, 0.7)
case("Normalize", X)
case("SeenVmap", X, Y, 0.7)
case("SeenNeeds", X, 0.7, Y)
case("SeenNeeds", X, 0.7, Y, X * 2)
case("SeenNeedsSetup", X, 0.7, Y, X * 2, "named")
case("SeenCotangents", X)
case("SeenCotangents", X, pick=(1,))
case("WithStatics", X)
case("SavedTwice", X, Y)
case("SurplusNones", X, Y)
case("CalledVjp", X)
case("SavedIntermediate", X, second=False)
case("OnceOnly", X, second=False)
EVERY = pytest.mark.parametrize("one", CASES, ids=[f"{i}-{c.name}" for i, c in enumerate(CASES)])


@EVERY
@MODES
def test_outputs_and_gradients(torch, original, one, mode):
    assert_equal(Ours(one).everything(mode), Theirs(torch, one, original).everything())


# Layers that have no closed form.
IN_A_SCAN = "LearnedClip-inplace LearnedSteps LearnedSteps-frozen UniformQuantize UniformQuantize-ranged SignedQuantize"


@pytest.mark.parametrize("name", IN_A_SCAN.split())
def test_second_gradients_in_a_scan(torch, original, name):
    one = next(c for c in CASES if c.name == name)
    ours = Ours(one)
    once = ours.loss
    ours.loss = lambda *args: jax.lax.scan(lambda total, _: (total + once(*args), None), jnp.zeros(()), None, length=1)[
        0
    ]
    assert_equal(ours.second(jax.jit), Theirs(torch, one, original).second())


def test_the_comparison_can_fail(torch, original):
    class Wrong(ported.Exp):
        @staticmethod
        def backward(ctx, grad_output):
            return grad_output * 1.001 * ctx.saved_tensors[0]

    one = Port("Wrong", (X,), (0,), lambda m, x: m.Exp.apply(x), None, True)
    altered = type("altered", (), {"Exp": Wrong})
    ours, theirs = Ours(one, altered).everything(lambda f: f), Theirs(torch, one, original).everything()
    assert_equal(ours[0], theirs[0])
    for i in (1, 2):
        with pytest.raises(AssertionError):
            assert_equal(ours[i], theirs[i])
