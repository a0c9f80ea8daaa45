"""Layers of one device against closed forms, and the Paddle ones against real Paddle."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer
from tests.devices import collective_layers
from tests.devices.collective_layers import GatherEach
from tests.kit.case import grid, once, ruled, straight_through
from tests.kit.transforms import FIRST_ORDER, SECOND_ORDER, assert_same, scalar
from tests.registry import after_paddle as registered

from . import ports as layers

stop = jax.lax.stop_gradient


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    layer: Callable[..., Any]
    reference: Callable[..., Any]
    args: tuple[jax.Array, ...]
    linear: bool = False  # whether the loss is, for references that are a plain custom_vjp
    second: bool = True


CASES: list[Case] = []
MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])


def case(name: str, layer: Callable[..., Any], *args: Any, **flags: bool) -> Any:
    """Enter a reference, whose gradients of both orders are those that the layer means."""

    def enter(reference: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(Case(name, layer, reference, tuple(jnp.asarray(a, jnp.float32) for a in args), **flags))
        return reference

    return enter


X, W = grid(2, 3), grid(3, 3, low=-0.8, high=0.9)

# -- P8 ---------------------------------------------------------------------------------------------

KEY, NOTHING = jax.random.key(7), (None, None, None)


def block(x, pair, key, frozen, rate, text, *, gain=1.0, bent=True):
    """Several outputs, one of integers; a tuple of parameters, random state, a frozen tuple, and statics."""
    w, b = pair
    kept = jax.random.bernoulli(key, rate, x.shape).astype(x.dtype)
    h = kept * x @ w * gain + b[frozen[0]]
    y = jnp.tanh(h) if bent else h
    return y, jnp.argmax(h, -1), y * x + len(text)


def recomputed(run):
    def layer(x, w, b):
        y, _, z = run(x, (w, b), KEY, (jnp.array([2, 0, 1]),), 0.6, "text", gain=0.7)
        return y, z

    return layer


def recompute(*args, **kwargs):
    return layers.Recompute.apply(block, False, *NOTHING, *args, **kwargs)


case("P8", recomputed(recompute), X, W, W[0])(recomputed(block))


def test_recompute_is_jax_checkpoint():
    args = X, W, W[0]

    def gradient(layer):
        return jax.jit(jax.grad(scalar(layer, linear=False), (0, 1, 2)))(*args)

    assert_same(gradient(recomputed(recompute)), gradient(jax.checkpoint(recomputed(block))))


def test_recompute_restores_the_state_that_it_is_told_of():
    states = []

    def run(x, pair):
        return x * pair[0] + pair[1]

    def loss(x, w, b):
        get, put = lambda: "state", states.append
        return layers.Recompute.apply(run, True, None, get, put, x, (w, b)).sum()

    dx, dw, db = jax.grad(loss, (0, 1, 2))(X, X * 2, X * 3)
    assert states == ["state"]
    assert_same((dx, dw, db), (X * 2, X, jnp.ones_like(X)))


@pytest.mark.parametrize(
    ("pair", "message"), [((X, 2.0), "mixes tensors and other values"), ((X, jnp.arange(3)), "with and without")]
)
def test_recompute_refuses_mixed_tuples(pair, message):
    with pytest.raises(ValueError, match=message):
        layers.Recompute.apply(lambda x, pair: x, False, *NOTHING, X, pair)


def test_recompute_without_a_differentiable_output():
    def loss(x):
        index = layers.Recompute.apply(lambda x: jnp.argmax(x), False, *NOTHING, x)
        return x.sum() * index.astype(jnp.float32)

    # No gradient arrives, so that backward, which would refuse, is not asked.
    assert_same(jax.grad(loss)(X), jnp.full_like(X, jnp.argmax(X)))


# -- P9, P10 ----------------------------------------------------------------------------------------

COUNTS = jnp.array([3])
UNIQUE, REPEATED = jnp.array([3, 0, 2]), jnp.array([1, 3, 1])


def gathered(pos, size=4):
    return lambda buf: layers.MoEGather.apply(buf, pos, COUNTS, COUNTS, size, world_size=1)


case("P10-unique", gathered(UNIQUE), grid(3, 2))(lambda buf: jnp.zeros((4, 2)).at[UNIQUE].set(buf))


# Of rows that go to one place the last stays, yet backward gives each of them the gradient of that place.
@case("P10-repeated", gathered(REPEATED), grid(3, 2))
def _last_stays(buf):
    value = jnp.zeros((4, 2)).at[jnp.array([3, 1])].set(buf[1:])
    moved = jnp.zeros((4, 2)).at[REPEATED].add(buf)
    return stop(value - moved) + moved


def dispatched(x):
    """Each token to a row, and back: the two layers around an expert."""
    order = jnp.array([3, 0, 2, 1])
    rows = registered.MoEScatter.apply(x, order, COUNTS, COUNTS, 4, 1)
    return layers.MoEGather.apply(jnp.sin(rows), order, COUNTS, COUNTS, 4, 1)


case("P9-P10", dispatched, grid(4, 2))(jnp.sin)


@MODES
def test_no_rows_to_scatter(mode):
    nowhere = jnp.zeros(0, jnp.int32)
    layer = lambda x: registered.MoEScatter.apply(x, nowhere, COUNTS, COUNTS, 0, 1)  # noqa: E731
    assert mode(layer)(X).shape == (0, 3)
    assert_same(mode(jax.grad(lambda x: layer(x).sum()))(X), jnp.zeros_like(X))


# -- P14, P15 ---------------------------------------------------------------------------------------

WEIGHT = grid(3, 4, low=-2.3, high=2.6)
G = jnp.float32(0.25)


def lsq(w, alpha):
    return layers.LSQ.apply(w, alpha, G, -2, 3)


def lsq_plus(x, alpha, beta):
    return layers.LSQPlus.apply(x, alpha, beta, G, -2, 3)


def per_channel(axis):
    return lambda w, alpha: layers.LSQ.apply(w, alpha, G, -2, 3, per_channel=True, quant_axis=axis)


def scaled(x):
    """The same value with a quarter of the gradient."""
    return 0.25 * x + stop(0.75 * x)


def quantized(q):
    # In this order: rounding before clipping has another gradient where a rounded value is at an end.
    return straight_through(layers.half_away)(jnp.clip(q, -2, 3))


def learned(w, alpha):
    return quantized(w / scaled(alpha)) * scaled(alpha)


def learned_with_offset(x, alpha, beta):
    return quantized((x - scaled(beta)) / scaled(alpha)) * scaled(alpha) + scaled(beta)


CHANNELS = jnp.array([0.5, 0.6, 0.9]), jnp.array([0.5, 0.6, 0.9, 0.3])
# The gradients are those of a straight-through round, which is another function once they are differentiated.
case("P14", lsq, WEIGHT, 0.6, second=False)(learned)
case("P14-rows", per_channel(0), WEIGHT, CHANNELS[0], second=False)(jax.vmap(learned))
case("P14-columns", per_channel(1), WEIGHT, CHANNELS[1], second=False)(jax.vmap(learned, (1, 0), 1))
case("P15", lsq_plus, WEIGHT, 0.6, 0.2, second=False)(learned_with_offset)


def _step_rule(residuals, g):
    x, alpha, beta = residuals
    q = (x - beta) / alpha
    inside = (q >= -2) & (q <= 3)
    change = jnp.clip(layers.half_away(q), -2, 3) - jnp.where(inside, q, 0)
    return jnp.where(inside, g, 0), jnp.sum(change * g) / 4, jnp.sum(jnp.where(inside, 0, g)) / 4


_step = ruled(lambda x, a, b: jnp.clip(layers.half_away((x - b) / a), -2, 3) * a + b, _step_rule)
case("P14-rule", per_channel(0), WEIGHT, CHANNELS[0], linear=True)(jax.vmap(lambda w, a: _step(w, a, jnp.zeros(()))))
case("P15-rule", lsq_plus, WEIGHT, 0.6, 0.2, linear=True)(_step)


def test_rounding_first_has_another_gradient():
    x, alpha = jnp.array([1.9, -1.3]), jnp.float32(0.6)  # 1.9 / 0.6 is above 3, and rounds to it
    first = lambda a: jnp.sum(jnp.clip(straight_through(layers.half_away)(x / scaled(a)), -2, 3) * scaled(a))  # noqa: E731
    ours = lambda a: lsq(x, a).sum()  # noqa: E731
    (ours, dours), (first, dfirst) = (jax.jit(jax.value_and_grad(f))(alpha) for f in (ours, first))
    assert_same((ours, dours), (first, jnp.float32(0.25)))
    assert abs(dfirst - 0.25) > 0.1


# -- P24 --------------------------------------------------------------------------------------------


def auxiliary(x, loss):
    return layers.AuxiliaryLoss.apply(jnp.sin(x), loss)


def with_auxiliary(x, loss):
    return ruled(lambda x, _: x, lambda _, g: (g, once(1.0, g).reshape(loss.shape)))(jnp.sin(x), loss)


case("P24-scalar", auxiliary, X, 0.7, linear=True)(with_auxiliary)
case("P24-vector", auxiliary, X, [0.7], linear=True)(with_auxiliary)


@pytest.mark.parametrize("layer", [layers.AuxiliaryLoss, registered.AuxiliaryLoss], ids=["B", "A"])
@MODES
def test_auxiliary_loss_that_is_frozen(layer, mode):
    asked = []

    class Seen(layer):
        @staticmethod
        def backward(ctx, dy):
            asked.append(layer.backward(ctx, dy))
            return asked[-1]

    dx = mode(jax.grad(lambda x, loss: jnp.sum(jnp.sin(Seen.apply(x, loss)))))(X, jnp.float32(0.7))
    assert_same(dx, jnp.cos(X))
    ((_, dloss),) = asked
    assert dloss is None


# -- P28, P29 ---------------------------------------------------------------------------------------

case("P28-default", registered.ClippedReversal.apply, X, linear=True)(
    ruled(lambda x: x, lambda _, g: (jnp.clip(-g, -0.5, 0.5),))
)
case("P28-tensor", lambda x: registered.ClippedReversal.apply(x, jnp.float32(0.3)), X, linear=True)(
    ruled(lambda x: x, lambda _, g: (jnp.clip(-0.3 * g, -0.5, 0.5),))
)

# -- T13, T14, T15 ----------------------------------------------------------------------------------

# Supports of one, two and four entries, of which two are searched at first.
ROWS = jnp.array([[3.0, 0.1, 0.4, -0.2], [0.9, 1.1, -2, -3], [0.1, 0.2, 0.05, 0.15]])


def sparsemax(x):
    ordered = jnp.sort(x)[..., ::-1]
    sums = jnp.cumsum(ordered, -1) - 1
    size = (jnp.arange(1.0, x.shape[-1] + 1) * ordered > sums).sum(-1, keepdims=True)
    return jnp.maximum(x - jnp.take_along_axis(sums, size - 1, -1) / size.astype(x.dtype), 0)


def entmax15(x):
    """The threshold by bisection, and its derivatives by Newton's method."""

    def total(z, tau):
        return (jnp.maximum(z - tau, 0) ** 2).sum(-1, keepdims=True)

    def halve(_, ends):
        middle = sum(ends) / 2
        above = total(stop(z), middle) > 1
        return jnp.where(above, middle, ends[0]), jnp.where(above, ends[1], middle)

    z = x / 2
    top = stop(z.max(-1, keepdims=True))
    tau, _ = jax.lax.fori_loop(0, 20, halve, (top - 1, top))
    for _ in range(2):  # as many as there are derivatives
        tau = tau + (total(z, tau) - 1) / (2 * jnp.maximum(z - tau, 0).sum(-1, keepdims=True))
    return jnp.maximum(z - tau, 0) ** 2


case("T13", lambda x: layers.SparsemaxTopK.apply(x, -1, 2), ROWS)(sparsemax)
case("T13-default", layers.SparsemaxTopK.apply, ROWS.T)(lambda x: sparsemax(x.T).T)
case("T14", lambda x: layers.Entmax15.apply(x, dim=1), ROWS)(entmax15)
case("T15", lambda x: layers.Entmax15TopK.apply(x, 1, 2), ROWS)(entmax15)


# -- T38, T69, T70 ----------------------------------------------------------------------------------

SCALE, ZERO = jnp.float32(7.5), jnp.float32(1.0)
for dequantize in (True, False):
    value = lambda x, d=dequantize: (jnp.round(7.5 * x - 1) + (1 if d else 0)) / (7.5 if d else 1)  # noqa: E731
    case(
        f"T38-{'dequantized' if dequantize else 'inplace'}",
        lambda x, d=dequantize: layers.LinearQuantize.apply(x, SCALE, ZERO, d, not d),
        X,
    )(straight_through(value))

MATRIX, RIGHT = W + 2 * jnp.eye(3), X[0]
case("T69", lambda a, b: layers.FactorAndSolve.apply(a, b)[1], MATRIX, RIGHT)(jnp.linalg.solve)


def reused(a, b):
    solver, x = layers.FactorOnceAndSolve.apply(a, b)
    return x, solver.solve(jnp.sin(b))


case("T69-reused", reused, MATRIX, RIGHT, second=False)(
    lambda a, b: (jnp.linalg.solve(a, b), jnp.linalg.solve(stop(a), jnp.sin(b)))
)


def test_solver_comes_out_as_it_is():
    solvers = []

    def made():
        solvers.append(layers.DenseSolver())
        return solvers[-1]

    def loss(a, b):
        solver, x = layers.FactorAndSolve.apply(a, b, made)
        assert solver is solvers[-1]
        return x.sum()

    for f in (loss, jax.grad(loss), jax.jit(jax.grad(loss))):
        solvers.clear()
        f(MATRIX, RIGHT)
        assert len(solvers) == 1


def test_second_derivative_through_a_solver_that_is_reused():
    f = scalar(reused, linear=False)
    with pytest.raises(RuntimeError, match="FactorOnceAndSolve"):
        jax.grad(lambda a: jax.grad(f)(a, RIGHT).sum())(MATRIX)


case("T70", layers.MyLinear.apply, X, grid(4, 3), grid(4))(lambda x, w, b: x @ w.T + b)

# -- every case -------------------------------------------------------------------------------------


# Operation by operation, second derivatives of many operations take seconds.
EAGER_TWICE = {"P9-P10", "P15-rule", "P24-scalar", "P28-tensor", "T15", "T38-dequantized", "T70"}


def ways(one):
    """Eager, under vmap, and under jit of scan; each way of the second order has the first on its way."""
    yield "grad_of_grad" if one.name in EAGER_TWICE else "grad"
    yield "vmap_of_grad"
    yield "second_order_in_scan" if one.second else "jit_of_scan"


WAYS = [(one, way) for one in CASES for way in ways(one)]


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_outputs(one):
    expected = jax.jit(one.reference)(*one.args)
    assert_same(one.layer(*one.args), expected)
    assert_same(jax.jit(one.layer)(*one.args), expected)


@pytest.mark.parametrize(("one", "way"), WAYS, ids=[f"{way}-{c.name}" for c, way in WAYS])
def test_gradients(one, way):
    transform = {**FIRST_ORDER, **SECOND_ORDER}[way]
    ours, plain = scalar(one.layer, one.linear), scalar(one.reference, one.linear)
    assert_same(transform(ours, one.args), jax.jit(lambda *args: transform(plain, args))(*one.args))


# -- the Paddle ones against real Paddle --------------------------------------------------------------


@pytest.fixture
def original(paddle):
    return importlib.import_module(".originals", __package__)


@dataclasses.dataclass(frozen=True)
class Port:
    label: str
    name: str  # of the class in originals.py
    ours: type[PyLayer]
    # Of apply, of what makes tensors of other arrays, and of the arguments that are differentiated.
    call: Callable[..., Any]
    args: tuple[Any, ...]
    plain: Callable[..., Any] | None = None  # what has our second derivatives, where Paddle has others

    def place(self, module: Any, tensor: Callable[[Any], Any]) -> Callable[..., Any]:
        layer = self.ours if module is None else getattr(module, self.name)
        return lambda *args: self.call(layer.apply, tensor, *args)


PORTS: list[Port] = []


def port(label: str, ours: type[PyLayer], call: Callable[..., Any], *args: Any, name: str = "", plain: Any = None):
    arrays = tuple(jnp.asarray(a, jnp.float32) for a in args)
    PORTS.append(Port(label, name or ours.__name__, ours, call, arrays, plain))


def moe(pos, size):
    return lambda apply, tensor, x: apply(x, tensor(pos), tensor([3]), tensor([3]), size, world_size=1)


def with_steps(*statics, **named):
    return lambda apply, tensor, *args: apply(*args, tensor(0.25), -2, 3, *statics, **named)


def cubed(x, w):
    return (x @ w) ** 3 * x


def layer_norm(x, weight, bias):
    mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5) * weight[:, None, None] + bias[:, None, None]


TOKENS, ROW3 = grid(4, 2), grid(3, 2)
port(
    "P8",
    registered.Recompute,
    lambda apply, _, x, w: apply(cubed, True, (x, w)),
    X,
    W,
    plain=cubed,  # Paddle has none: what backward differentiates is detached
)
port("P9", registered.MoEScatter, moe([3, 0, 2], 3), TOKENS)
port("P9-repeated", registered.MoEScatter, moe([1, 1, 2], 3), TOKENS)  # the last of the rows overwrites the others
port("P9-empty", registered.MoEScatter, moe(np.zeros(0, int), 0), TOKENS)
port("P10", layers.MoEGather, moe([3, 0, 2], 4), ROW3)
port("P10-repeated", layers.MoEGather, moe([1, 3, 1], 4), ROW3)
port("P14", registered.LSQ, with_steps(per_channel=False), WEIGHT, 0.6)
port("P14-rows", layers.LSQ, with_steps(True), WEIGHT, CHANNELS[0])
port("P14-columns", layers.LSQ, with_steps(quant_axis=1, per_channel=True), WEIGHT, CHANNELS[1])
port("P15", layers.LSQPlus, with_steps(), WEIGHT, 0.6, 0.2)
port("P19", registered.RouterLoss, lambda apply, _, x, loss: apply(x * 2, loss, 4, False), X, 0.7)
port("P19-delayed", registered.RouterLoss, lambda apply, _, x, loss: apply(x * 2, loss, 4, True), X, 0.7)
port("P24-A", registered.AuxiliaryLoss, lambda apply, _, x, loss: apply(x * 2, loss), X, np.array([0.7]))
port("P24-B", layers.AuxiliaryLoss, lambda apply, _, x, loss: apply(x, loss), X, 0.7, name="SavedAuxiliaryLoss")
port("P24-frozen", registered.AuxiliaryLoss, lambda apply, tensor, x: apply(x * 2, tensor(0.7)), X)
port("P25", GatherEach, lambda apply, _, x: apply(x * 2)[0], X)
port(
    "P26",
    registered.LayerNorm2d,
    lambda apply, _, *args: apply(*args, 1e-5),
    grid(2, 3, 1, 2),
    grid(3),
    grid(3) * 2,
    plain=layer_norm,  # Paddle takes saved intermediates for constants
)
port("P28", registered.ClippedReversal, lambda apply, _, x: apply(x, lambda_=2), X)
port("P28-default", registered.ClippedReversal, lambda apply, _, x: apply(x), X)
port("P28-tensor", registered.ClippedReversal, lambda apply, tensor, x: apply(x, tensor(0.3)), X)


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
    "P19": (registered.RouterLoss, (4, True)),
    "P24": (registered.AuxiliaryLoss, ()),
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
    assert_same(jax.grad(lambda x: jnp.sum(jnp.sin(registered.Reversal.apply(x, 0.3))))(X), -0.3 * jnp.cos(X))


def test_ones_of_shape_one_for_a_loss_without_dimensions(paddle, original):
    """P24, variant A: Paddle hands on the shape that backward gave, and here it becomes that of the loss."""
    x, loss = (paddle.to_tensor(np.asarray(a), stop_gradient=False) for a in (X, np.float32(0.7)))
    original.AuxiliaryLoss.apply(x * 2, loss).sum().backward()
    ours = jax.grad(lambda loss: registered.AuxiliaryLoss.apply(X, loss).sum())(jnp.float32(0.7))
    assert (loss.grad.shape, loss.grad.tolist()) == ([1], [1.0])
    assert (ours.shape, ours.tolist()) == ((), 1.0)


def test_the_comparison_with_paddle_can_fail(paddle, original):
    class Wrong(registered.ClippedReversal):
        @staticmethod
        def backward(ctx, dy):
            return 1.01 * registered.ClippedReversal.backward(ctx, dy)

    ours = derivatives_here(Wrong.apply, [X])
    theirs = derivatives_there(paddle, original.ClippedReversal.apply, [X])
    assert_same(ours[0], theirs[0])
    for i in (1, 2):
        with pytest.raises(AssertionError):
            assert_same(ours[i], theirs[i])
