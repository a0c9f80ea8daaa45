"""The ported Functions against closed forms and plain automatic differentiation; torch is not needed.

The registry does so for the layers that it shares, in every transform.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit.case import Case, case_of
from tests.kit.case import numpy_grid as grid
from tests.kit.closed_forms import compare_outputs
from tests.kit.transforms import FIRST_ORDER, SECOND_ORDER, assert_same, scalar

from .layers import ported

CASES: list[Case] = []


def case(name: str, *args: Any, layer: Callable[..., Any] | None = None, label: str = "") -> Any:
    """Enter a reference for a ported class; `layer` is how it is applied, if that is not `apply(*args)`."""
    call = layer or getattr(ported, name).apply
    return case_of(CASES, f"{name}-{label}" if label else name, call, *args)


X = grid(2, 3)
Y = grid(2, 3, low=-0.9, high=1.1)

# -- closed forms -----------------------------------------------------------------------------------

TARGET = jnp.array([2, 0])
cross_entropy = ported.VocabParallelCrossEntropy.apply


def _own(logp):
    return jnp.take_along_axis(logp, TARGET[:, None], 1)[:, 0]


@case("VocabParallelCrossEntropy", X, layer=lambda z: cross_entropy(z, TARGET, 0.2, None), label="smooth")
def _smoothed_cross_entropy(z):
    logp = jax.nn.log_softmax(z)
    return -(1 - 0.3) * _own(logp) - 0.3 * logp.mean(-1)  # 0.3 = 0.2 * 3 / (3 - 1)


QKV = grid(1, 2, 3, 4), grid(1, 2, 5, 4, low=-1, high=1.2), grid(1, 2, 5, 4, low=-2, high=1.5)
KEYS = jnp.array([[True, True, False, True, False]])


@case("FlashAttention", *QKV, layer=lambda *a: ported.FlashAttention.apply(*a, KEYS, False, 8, 8), label="masked")
def _attention(q, k, v):
    scores = jnp.where(KEYS[:, None, None, :], q @ jnp.swapaxes(k, -1, -2) / 2, -1e9)
    return jax.nn.softmax(scores) @ v


@case(
    "NearestCode",
    X,
    grid(4, 3),
    layer=lambda x, c: (ported.NearestCode.apply(x, c), x * c[ported.NearestCode.apply(x, c)]),
)
def _indices(inputs, codebook):
    index = jnp.argmin(((inputs[..., None, :] - codebook) ** 2).sum(-1), -1)
    return index, inputs * codebook[index]


def _batch_norm(x, weight=None, bias=None):
    shape = (1, 3, 1)
    mean, var = x.mean((0, 2), keepdims=True), x.var((0, 2), keepdims=True)
    y = (x - mean) / jnp.sqrt(var + 1e-5)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


NORM = (None, None, 1e-5, 0.1, ported.ONE_RANK, 1)
batch_norm = ported.SyncBatchNorm.apply
IMAGES = grid(4, 3, 2)
case("SyncBatchNorm", IMAGES, grid(3), grid(3) * 2, layer=lambda x, w, b: batch_norm(x, w, b, *NORM))(_batch_norm)
case("SyncBatchNorm", IMAGES, layer=lambda x: batch_norm(x, None, None, *NORM), label="plain")(_batch_norm)
WIDE = X * 3 + np.float32(0.01)
case("Swish", WIDE)(jax.nn.swish)
case("HardSigmoid", WIDE)(lambda x: jax.nn.relu6(x + 3) / 6)
case("HardMish", WIDE)(lambda x: x * jnp.clip(x + 2, 0, 2) / 2)


for linear in ("Linear", "LinearSetup"):
    case(linear, X, grid(4, 3), grid(4))(lambda x, w, b: x @ w.T + b)
case("MulConstant", X, layer=lambda x: ported.MulConstant.apply(x, 2.5))(lambda x: 2.5 * x)
case("Cube", X)(lambda x: (x**3, 3 * x**2))
case("Exp", X)(jnp.exp)
case("SinProduct", X, Y, layer=lambda x, y: ported.SinProduct.apply(x, y, 0.7)[0])(lambda x, y: 0.7 * jnp.sin(x) * y)
case("SinProductInCtx", X, Y, layer=lambda x, y: ported.SinProductInCtx.apply(x, y, 0.7))(
    lambda x, y: 0.7 * jnp.sin(x) * y
)
case("Normalize", X)(lambda x: (x / jnp.sqrt((x * x).sum()), jnp.sqrt((x * x).sum())))
case("SeenVmap", X, Y, layer=lambda x, y: ported.SeenVmap.apply(x, y, 0.7))(lambda x, y: 0.7 * x * y)
case("SavedIntermediate", X)(lambda x: x**3)
case("SavedTwice", X, Y)(lambda x, y: x * y)
case("SurplusNones", X, Y)(lambda x, y: x * y)
case("CalledVjp", X)(lambda x: x * x)
case("WithStatics", X, layer=lambda x: ported.WithStatics.apply(x)[::4])(lambda x: (x * x, jnp.sin(x)))

EVERY = pytest.mark.parametrize("one", CASES, ids=[f"{i}-{c.name}" for i, c in enumerate(CASES)])
TRANSFORMS = [
    FIRST_ORDER["grad"],
    SECOND_ORDER["jit_of_grad_of_grad"],
    SECOND_ORDER["second_order_in_scan"],  # and the first, on the way
]


@EVERY
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.__name__)
def test_gradients(one, transform):
    ours, expected = scalar(one.layer, linear=False), scalar(one.reference, linear=False)
    assert_same(transform(ours, one.args), jax.jit(lambda *args: transform(expected, args))(*one.args))


@EVERY
def test_outputs(one):
    compare_outputs(one)


# -- layers whose rule no function has --------------------------------------------------------------


def test_auxiliary_loss_in_a_scan(monkeypatch):
    monkeypatch.setattr(ported.AuxLossScaler, "scale", 5)

    def loss(x, aux):
        step = lambda x, _: (ported.AuxLossScaler.apply(x * 0.5, aux), None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=3)[0].sum()

    dx, daux = jax.jit(jax.grad(loss, (0, 1)))(X, jnp.float32(0.7))
    np.testing.assert_allclose(dx, np.full_like(X, 0.125))
    assert float(daux) == 15


def _collapsed(path):
    return [k for k, _ in itertools.groupby(path) if k != 0]


def _every_alignment(acts, labels):
    """Minus the log of the summed probabilities of all paths that collapse to the labels."""
    logp = jax.nn.log_softmax(acts)
    steps = jnp.arange(len(acts))
    paths = [p for p in itertools.product(range(acts.shape[1]), repeat=len(acts)) if _collapsed(p) == labels]
    return -jax.nn.logsumexp(logp[steps, jnp.array(paths)].sum(-1))


ACTS = jnp.asarray(grid(3, 2, 3))
LABELS = [[1, 1], [2]]
LENGTHS = [3, 2]


def _ctc(acts):
    padded = jnp.array([row + [0] * (2 - len(row)) for row in LABELS])
    return ported.CTC.apply(acts, padded, jnp.array(LENGTHS), jnp.array([len(row) for row in LABELS]))


def _ctc_reference(acts):
    every = enumerate(zip(LENGTHS, LABELS, strict=True))
    return jnp.stack([_every_alignment(acts[:length, i], labels) for i, (length, labels) in every])


def test_ctc():
    ours, expected = (jax.value_and_grad(scalar(f, linear=False)) for f in (_ctc, _ctc_reference))
    assert_same(ours(ACTS), jax.jit(expected)(ACTS))


@pytest.mark.parametrize("transform", TRANSFORMS[1:], ids=lambda transform: transform.__name__)
@pytest.mark.parametrize("name", ["CTC", "OnceOnly"])
def test_once_differentiable(name, transform):
    layer = {"CTC": _ctc, "OnceOnly": ported.OnceOnly.apply}[name]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        transform(scalar(layer, linear=False), (ACTS,))


FORWARD = [c for c in CASES if c.name.startswith("SinProduct")]


@pytest.mark.parametrize("one", FORWARD, ids=[c.name for c in FORWARD])
def test_forward_mode(one):
    tangents = tuple(jnp.cos(3 * x) for x in one.args)
    expected = jax.jvp(one.reference, one.args, tangents)
    assert_same(jax.jvp(one.layer, one.args, tangents), expected)
    assert_same(jax.jvp(jax.jit(one.layer), one.args, tangents), expected)
    assert_same(jax.jit(lambda p, t: jax.jvp(one.layer, p, t))(one.args, tangents), expected)
    assert_same(jax.jacfwd(one.layer)(*one.args), jax.jacfwd(one.reference)(*one.args))
