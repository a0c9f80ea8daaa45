"""Each layer after Paddle against the real one: outputs, gradients of two orders, and what differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer
from tests.devices import collective_layers
from tests.devices.collective_layers import GatherEach
from tests.kit.case import W, X, grid, stop
from tests.kit.transforms import assert_same
from tests.registry.after_paddle import layer_norm

from .layers import ported


@dataclasses.dataclass(frozen=True)
class Port:
    label: str
    ours: type[PyLayer]  # has the name of the original
    # Of apply, of what makes tensors of other arrays, and of the arguments that are differentiated.
    call: Callable[..., Any]
    args: tuple[Any, ...]
    plain: Callable[..., Any] | None = None  # what has our second derivatives, where Paddle has others

    def place(self, module: Any, tensor: Callable[[Any], Any]) -> Callable[..., Any]:
        layer = self.ours if module is None else getattr(module, self.ours.__name__)
        return lambda *args: self.call(layer.apply, tensor, *args)


PORTS: list[Port] = []


def port(label: str, ours: type[PyLayer], call: Callable[..., Any], *args: Any, plain: Any = None):
    arrays = tuple(jnp.asarray(a, jnp.float32) for a in args)
    PORTS.append(Port(label, ours, call, arrays, plain))


def moe(pos, size):
    return lambda apply, tensor, x: apply(x, tensor(pos), tensor([3]), tensor([3]), size, world_size=1)


def with_steps(*statics, **named):
    return lambda apply, tensor, *args: apply(*args, tensor(0.25), -2, 3, *statics, **named)


def cubed(x, w):
    return (x @ w) ** 3 * x


WEIGHT = grid(3, 4, low=-2.3, high=2.6)
CHANNELS = jnp.array([0.5, 0.6, 0.9]), jnp.array([0.5, 0.6, 0.9, 0.3])
TOKENS, ROW3 = grid(4, 2), grid(3, 2)
port(
    "P8",
    ported.Recompute,
    lambda apply, _, x, w: apply(cubed, True, (x, w)),
    X,
    W,
    plain=cubed,  # Paddle has none: what backward differentiates is detached
)
port("P9", ported.MoEScatter, moe([3, 0, 2], 3), TOKENS)
port("P9-repeated", ported.MoEScatter, moe([1, 1, 2], 3), TOKENS)  # the last of the rows overwrites the others
port("P9-empty", ported.MoEScatter, moe(np.zeros(0, int), 0), TOKENS)
port("P10", ported.MoEGather, moe([3, 0, 2], 4), ROW3)
port("P10-repeated", ported.MoEGather, moe([1, 3, 1], 4), ROW3)
port("P14", ported.LSQ, with_steps(per_channel=False), WEIGHT, 0.6)
port("P14-rows", ported.LSQ, with_steps(True), WEIGHT, CHANNELS[0])
port("P14-columns", ported.LSQ, with_steps(quant_axis=1, per_channel=True), WEIGHT, CHANNELS[1])
port("P15", ported.LSQPlus, with_steps(), WEIGHT, 0.6, 0.2)
port("P19", ported.RouterLoss, lambda apply, _, x, loss: apply(x * 2, loss, 4, False), X, 0.7)
port("P19-delayed", ported.RouterLoss, lambda apply, _, x, loss: apply(x * 2, loss, 4, True), X, 0.7)
port("P24-A", ported.AuxiliaryLoss, lambda apply, _, x, loss: apply(x * 2, loss), X, np.array([0.7]))
port("P24-B", ported.SavedAuxiliaryLoss, lambda apply, _, x, loss: apply(x, loss), X, 0.7)
port("P24-frozen", ported.AuxiliaryLoss, lambda apply, tensor, x: apply(x * 2, tensor(0.7)), X)
port("P25", GatherEach, lambda apply, _, x: apply(x * 2)[0], X)
port(
    "P26",
    ported.LayerNorm2d,
    lambda apply, _, *args: apply(*args, 1e-5),
    grid(2, 3, 1, 2),
    grid(3),
    grid(3) * 2,
    plain=layer_norm,  # Paddle takes saved intermediates for constants
)
port("P28", ported.ClippedReversal, lambda apply, _, x: apply(x, lambda_=2), X)
port("P28-default", ported.ClippedReversal, lambda apply, _, x: apply(x), X)
port("P28-tensor", ported.ClippedReversal, lambda apply, tensor, x: apply(x, tensor(0.3)), X)


def weights_of(y):
    return (1 + 0.5 * np.sin(np.arange(np.prod(y.shape)))).reshape(y.shape).astype(np.float32)


def derivatives_here(f, args):
    """The output, its gradients, and the second derivatives along themselves."""

    def loss(*args):
        y = f(*args)
        return jnp.sum(weights_of(y) * jnp.sin(y))

    places = tuple(range(len(args)))
    slopes = lambda *args: jax.grad(loss, places)(*args)  # noqa: E731
    second = jax.grad(lambda *args: sum(jnp.sum(g * stop(jnp.cos(g))) for g in slopes(*args)), places)
    return f(*args), slopes(*args), second(*args)


def derivatives_there(paddle, f, args):
    args = [paddle.to_tensor(np.asarray(a), stop_gradient=False) for a in args]
    y = f(*args)
    loss = (paddle.to_tensor(weights_of(y)) * paddle.sin(y)).sum()
    slopes = paddle.grad(loss, args, create_graph=True)
    second = paddle.grad(sum((g * paddle.cos(g.detach())).sum() for g in slopes), args, allow_unused=True)
    second = [paddle.zeros_like(a) if g is None else g for a, g in zip(args, second, strict=True)]
    return y.numpy(), tuple(g.numpy() for g in slopes), tuple(g.numpy() for g in second)


@pytest.mark.parametrize("one", PORTS, ids=lambda one: one.label)
def test_as_in_paddle(paddle, original, monkeypatch, one):
    monkeypatch.setattr(collective_layers, "WORLD", None)  # of P25

    def here(value):
        value = np.asarray(value)
        return jnp.asarray(value, jnp.float32 if value.dtype.kind == "f" else jnp.int32)

    ours = jax.jit(lambda *args: derivatives_here(one.place(None, here), args))(*one.args)
    theirs = derivatives_there(
        paddle, one.place(original, lambda value: paddle.to_tensor(np.asarray(here(value)))), one.args
    )
    if one.plain is None:
        assert_same(ours, theirs)
    else:
        assert_same(ours[:2], theirs[:2])
        assert_same(ours, jax.jit(lambda *args: derivatives_here(one.plain, args))(*one.args))
        assert not np.allclose(ours[2][0], theirs[2][0], atol=1e-2)


LEAVES = {
    "P19": (ported.RouterLoss, (4, True)),
    "P24": (ported.AuxiliaryLoss, ()),
    "P25": (GatherEach, None),
}


@pytest.mark.parametrize("label", LEAVES)
def test_returning_a_leaf_is_an_error_in_paddle_alone(paddle, original, monkeypatch, label):
    monkeypatch.setattr(collective_layers, "WORLD", None)
    ours, statics = LEAVES[label]
    theirs = getattr(original, ours.__name__)

    def call(apply, x, loss):
        return apply(x)[0] if statics is None else apply(x, loss, *statics)

    x, loss = (paddle.to_tensor(np.asarray(a), stop_gradient=False) for a in (X, np.ones(1, np.float32)))
    with pytest.raises(ValueError, match="IsLeafTensor"):
        call(theirs.apply, x, loss)
    dx = jax.grad(lambda x: jnp.sum(jnp.sin(call(ours.apply, x, jnp.ones(1)))))(X)
    assert_same(dx, jnp.cos(X))


def test_one_slot_too_many_is_an_error_in_paddle_alone(paddle, original):
    """P29, which has the slots of torch."""
    x = paddle.to_tensor(np.asarray(X), stop_gradient=False)
    loss = paddle.sin(original.Reversal.apply(x, 0.3)).sum()
    with pytest.raises(ValueError, match="should be 1, but received 2"):
        loss.backward()
    assert_same(jax.grad(lambda x: jnp.sum(jnp.sin(ported.Reversal.apply(x, 0.3))))(X), -0.3 * jnp.cos(X))


def test_ones_of_shape_one_for_a_loss_without_dimensions(paddle, original):
    """P24, variant A: Paddle hands on the shape that backward gave, and here it becomes that of the loss."""
    x, loss = (paddle.to_tensor(np.asarray(a), stop_gradient=False) for a in (X, np.float32(0.7)))
    original.AuxiliaryLoss.apply(x * 2, loss).sum().backward()
    ours = jax.grad(lambda loss: ported.AuxiliaryLoss.apply(X, loss).sum())(jnp.float32(0.7))
    assert (loss.grad.shape, loss.grad.tolist()) == ([1], [1.0])
    assert (ours.shape, ours.tolist()) == ((), 1.0)


def test_the_comparison_with_paddle_can_fail(paddle, original):
    class Wrong(ported.ClippedReversal):
        @staticmethod
        def backward(ctx, dy):
            return 1.01 * ported.ClippedReversal.backward(ctx, dy)

    ours = derivatives_here(Wrong.apply, [X])
    theirs = derivatives_there(paddle, original.ClippedReversal.apply, [X])
    assert_same(ours[0], theirs[0])
    for i in (1, 2):
        with pytest.raises(AssertionError):
            assert_same(ours[i], theirs[i])
