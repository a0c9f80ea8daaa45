"""Each ported Function against the real one: outputs, gradients of two orders, needs, errors, vmap, forward mode."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function

from . import ports as ported

# torch's own: its first use of forward mode compiles rules by what it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture
def torch(framework):
    return framework("torch")


@pytest.fixture
def original(torch):
    return importlib.import_module(".originals", __package__)


# -- cases ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Own:
    """An argument that each side has as its own object, by its name in the module."""

    name: str


def apply(name: str) -> Callable[..., Any]:
    return lambda module, *args: getattr(module, name).apply(*args)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    args: tuple[Any, ...]  # NumPy arrays, statics, and `Own`
    wrt: tuple[int, ...]  # the arguments that are differentiated
    call: Callable[..., Any]  # of the module and the arguments
    pick: tuple[int, ...] | None  # the outputs that enter the loss; None for all that are floats
    second: bool


CASES: list[Case] = []


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
    CASES.append(Case(f"{name}-{label}" if label else name, args, chosen, call or apply(name), pick, second))


def grid(*shape: int, low: float = -1.4, high: float = 1.7) -> np.ndarray:
    values = np.random.default_rng(sum(shape)).permutation(np.linspace(low, high, int(np.prod(shape))))
    return values.reshape(shape).astype(np.float32)


X = grid(2, 3)
UNEVEN = np.sin(2 * X)
Y = grid(2, 3, low=-0.9, high=1.1) + np.float32(0.05)
TARGET = np.array([2, 0], np.int32)
Q, K, V = grid(1, 2, 3, 4), grid(1, 2, 5, 4, low=-1, high=1.2), grid(1, 2, 5, 4, low=-2, high=1.5)
MASK = np.array([[True, True, False, True, False]])
HALF = [grid(2, 2, low=low, high=0.9) for low in (-0.8, -0.7, -0.6, -0.5)]
CODEBOOK = grid(4, 3)
IMAGES = grid(4, 3, 2)
STATS = np.zeros(3, np.float32), np.ones(3, np.float32)
NORM = (1e-5, 0.1, Own("ONE_RANK"), 1)
CLIP = np.array([0.9375], np.float32)  # one step is exact
# Above one step of the quantization: below it the changed input of the original says zero, as another test shows.
UNCLIPPED = np.array([-0.4, 0.31, 0.47, 0.83, 1.5], np.float32)
ACTS = grid(6, 3, 4)
LABELS = np.array([[1, 1], [2, 3], [3, 1]], np.int32)
LENGTHS = np.array([6, 4, 5], np.int32), np.array([2, 2, 1], np.int32)
ROW, COLUMN = grid(1, 3, low=0.3, high=0.6), grid(2, 1, low=0.3, high=0.6)
WEIGHT, BIAS = grid(4, 3), grid(4)

# What torch drops from second derivatives, or forbids, has tests of its own below.
case("VocabParallelCrossEntropy", X, TARGET, second=False)
case("VocabParallelCrossEntropy", X, TARGET, 0.2, Own("ONE_RANK"), second=False, label="smooth")
case("VocabParallelCrossEntropy", X, np.array([5, 1], np.int32), 0.0, Own("ONE_RANK"), second=False, label="outside")
case("Sparsemax", X, label="default")
case("Sparsemax", X, 1, label="last")
case("Sparsemax", X, call=lambda m, x: m.Sparsemax.apply(x, dim=1), label="keyword")
case("FlashAttention", Q, K, V, None, False, 2, 2, second=False)
case("FlashAttention", Q, K, V, None, True, 2, 2, second=False, label="causal")
case("FlashAttention", Q, K, V, None, True, 2, 2, wrt=(1,), second=False, label="keys")
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

EVERY = pytest.mark.parametrize("one", CASES, ids=[f"{i}-{c.name}" for i, c in enumerate(CASES)])
SECOND = pytest.mark.parametrize(
    "one", [c for c in CASES if c.second], ids=[f"{i}-{c.name}" for i, c in enumerate(CASES) if c.second]
)
MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])


# -- both sides -------------------------------------------------------------------------------------


def weights(shape: tuple[int, ...]) -> np.ndarray:
    return (1 + 0.5 * np.sin(np.arange(np.prod(shape)))).reshape(shape).astype(np.float32)


def direction(shape: tuple[int, ...]) -> np.ndarray:
    return np.cos(np.arange(np.prod(shape))).reshape(shape).astype(np.float32)


def picked(outputs: Any, pick: tuple[int, ...] | None) -> list[Any]:
    every = outputs if isinstance(outputs, tuple) else (outputs,)
    return [o for i, o in enumerate(every) if (pick is None or i in pick) and hasattr(o, "dtype")]


class Ours:
    def __init__(self, one: Case, module: Any = ported) -> None:
        self.one, self.module = one, module
        self.places = [i for i, a in enumerate(one.args) if isinstance(a, np.ndarray)]
        self.values = [jnp.asarray(one.args[i]) for i in self.places]
        self.wrt = tuple(self.places.index(i) for i in one.wrt)

    def call(self, *values: Any) -> Any:
        args = [getattr(self.module, a.name) if isinstance(a, Own) else a for a in self.one.args]
        for i, value in zip(self.places, values, strict=True):
            args[i] = value
        return self.one.call(self.module, *args)

    def loss(self, *values: Any) -> Any:
        total = jnp.zeros(())
        for y in picked(self.call(*values), self.one.pick):
            if jnp.issubdtype(y.dtype, jnp.floating):
                total += jnp.sum(weights(y.shape) * jnp.sin(y))
        return total

    def slope(self, *values: Any) -> Any:
        gradients = jax.grad(self.loss, self.wrt)(*values)
        return sum(jnp.sum(g * direction(g.shape)) for g in gradients)

    def outputs(self, mode: Callable[..., Any]) -> Any:
        rest: list[Any] = []

        def arrays(*values: Any) -> list[Any]:
            leaves, treedef = jax.tree_util.tree_flatten(self.call(*values), is_leaf=lambda x: x is None)
            rest[:] = [treedef, leaves]
            return [x for x in leaves if isinstance(x, jax.Array)]

        found = iter(mode(arrays)(*self.values))
        treedef, leaves = rest
        return treedef.unflatten([next(found) if isinstance(x, jax.Array) else x for x in leaves])

    def first(self, mode: Callable[..., Any]) -> Any:
        return mode(jax.grad(self.loss, self.wrt))(*self.values)

    def second(self, mode: Callable[..., Any]) -> Any:
        return mode(jax.grad(self.slope, self.wrt))(*self.values)


class Theirs:
    def __init__(self, torch: Any, one: Case, module: Any) -> None:
        self.torch, self.one = torch, one
        self.args = [getattr(module, a.name) if isinstance(a, Own) else a for a in one.args]
        for i, value in enumerate(one.args):
            if isinstance(value, np.ndarray):
                self.args[i] = torch.tensor(value.astype(np.int64) if value.dtype == np.int32 else value)
        self.wrt = [self.args[i].requires_grad_() for i in one.wrt]
        self.result = one.call(module, *self.args)

    def first(self, create_graph: bool = False) -> Any:
        torch, total = self.torch, self.torch.zeros(())
        for y in picked(self.result, self.one.pick):
            if y.dtype.is_floating_point:
                total = total + (torch.tensor(weights(tuple(y.shape))) * torch.sin(y)).sum()
        return self.gradient(total, create_graph)

    def second(self) -> Any:
        gradients = self.first(create_graph=True)
        return self.gradient(sum((g * self.torch.tensor(direction(tuple(g.shape)))).sum() for g in gradients))

    def gradient(self, total: Any, create_graph: bool = False) -> Any:
        return self.torch.autograd.grad(
            total, self.wrt, create_graph=create_graph, allow_unused=True, materialize_grads=True
        )


def assert_equal(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, (tuple, list)):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_equal(a, b)
    elif hasattr(theirs, "detach"):
        assert isinstance(ours, jax.Array)
        # JAX has 32 bits for integers unless asked.
        assert str(ours.dtype) == str(theirs.dtype).removeprefix("torch.").replace("int64", "int32")
        assert ours.shape == tuple(theirs.shape)
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=2e-4, atol=2e-5)
    else:
        assert ours is theirs or ours == theirs


# -- values and gradients ---------------------------------------------------------------------------


@EVERY
@MODES
def test_outputs(torch, original, one, mode):
    assert_equal(Ours(one).outputs(mode), Theirs(torch, one, original).result)


@EVERY
@MODES
def test_gradients(torch, original, one, mode):
    assert_equal(Ours(one).first(mode), Theirs(torch, one, original).first())


@SECOND
@MODES
def test_second_gradients(torch, original, one, mode):
    assert_equal(Ours(one).second(mode), Theirs(torch, one, original).second())


def test_the_comparison_can_fail(torch, original):
    class Wrong(ported.Exp):
        @staticmethod
        def backward(ctx, grad_output):
            return grad_output * 1.001 * ctx.saved_tensors[0]

    one = Case("Wrong", (X,), (0,), lambda m, x: m.Exp.apply(x), None, True)
    altered = type("altered", (), {"Exp": Wrong})
    assert_equal(Ours(one, altered).outputs(lambda f: f), Theirs(torch, one, original).result)
    for order in ("first", "second"):
        with pytest.raises(AssertionError):
            assert_equal(
                getattr(Ours(one, altered), order)(lambda f: f), getattr(Theirs(torch, one, original), order)()
            )


# -- what backward sees -----------------------------------------------------------------------------

NEEDS = {
    "two": ((X, 0.7, Y), [(0,), (2,), (0, 2)]),
    "three": ((X, 0.7, Y, X), [(0,), (3,), (0, 2, 3)]),
    "all": ((X, 0.7, Y, X, "named"), [(2,), (2, 3)]),
}


@pytest.mark.parametrize("name", ["SeenNeeds", "SeenNeedsSetup"])
@pytest.mark.parametrize("passed", NEEDS)
@MODES
def test_needs_input_grad(torch, original, name, passed, mode):
    args, subsets = NEEDS[passed]
    for subset in subsets:
        one = Case(name, args, subset, apply(name), None, False)
        theirs, ours = Theirs(torch, one, original), Ours(one)
        for module in (original, ported):
            getattr(module, name).seen.clear()
        assert_equal(ours.first(mode), theirs.first())
        seen = getattr(original, name).seen
        assert getattr(ported, name).seen[-1] == seen[0]
        # Defaults that were not passed count where the context is set up apart, and only there.
        assert len(seen[0]) == (5 if name == "SeenNeedsSetup" else len(args))


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("pick", [(0,), (1,), (0, 1)])
@MODES
def test_missing_cotangents(torch, original, monkeypatch, materialize, pick, mode):
    one = Case("SeenCotangents", (X,), (0,), apply("SeenCotangents"), pick, False)
    for module in (original, ported):
        monkeypatch.setattr(module.SeenCotangents, "materialize", materialize)
        monkeypatch.setattr(module.SeenCotangents, "seen", [])
    assert_equal(Ours(one).first(mode), Theirs(torch, one, original).first())
    assert ported.SeenCotangents.seen[-1] == original.SeenCotangents.seen[0]


@MODES
def test_statics_among_the_outputs(torch, original, monkeypatch, mode):
    one = Case("WithStatics", (X,), (0,), apply("WithStatics"), (0,), False)
    for module in (original, ported):
        monkeypatch.setattr(module.WithStatics, "seen", [])
    assert_equal(Ours(one).first(mode), Theirs(torch, one, original).first())
    assert ported.WithStatics.seen[-1] == original.WithStatics.seen[0] == (False, True, True, True, False)


def test_an_attribute_of_the_class_changed_between_calls(torch, original, monkeypatch):
    one = Case("AuxLossScaler", (X, np.array(0.7, np.float32)), (0, 1), apply("AuxLossScaler"), None, False)
    for scale in (None, 2, 5):
        for module in (original, ported):
            monkeypatch.setattr(module.AuxLossScaler, "scale", scale)
        found = Ours(one).first(lambda f: f)
        assert_equal(found, Theirs(torch, one, original).first())
        assert float(found[1]) == (scale or 1)


# -- errors -----------------------------------------------------------------------------------------

ERRORS = [
    # name, arguments, what torch raises, what we raise, what our message names
    ("TooFew", (X, Y), RuntimeError, ValueError, "TooFew"),
    ("SurplusGradient", (X,), RuntimeError, ValueError, "SurplusGradient"),
    ("ListOfGradients", (X, Y), RuntimeError, ValueError, "ListOfGradients"),
    ("WrongShape", (X,), RuntimeError, ValueError, "WrongShape"),
    ("GradientForStatic", (X, 2.0), RuntimeError, ValueError, "GradientForStatic"),
    ("SavedNumber", (X,), TypeError, TypeError, "save_for_backward"),
    ("DirtyAndLost", (X,), RuntimeError, ValueError, "mark_dirty"),
]


@pytest.mark.parametrize(("name", "args", "their_error", "our_error", "named"), ERRORS, ids=[e[0] for e in ERRORS])
@MODES
def test_errors(torch, original, name, args, their_error, our_error, named, mode):
    # A product of the input, as torch refuses to change a leaf in place before it looks at anything else.
    one = Case(name, args, (0,), lambda m, x, *rest: getattr(m, name).apply(x * 1, *rest), None, False)
    with pytest.raises(their_error):
        Theirs(torch, one, original).first()
    with pytest.raises(our_error, match=named):
        Ours(one).first(mode)


@pytest.mark.parametrize(
    ("name", "args"), [("OnceOnly", (X,)), ("CTC", (ACTS, LABELS, *LENGTHS))], ids=["OnceOnly", "CTC"]
)
@MODES
def test_second_derivative_of_once_differentiable(torch, original, name, args, mode):
    one = Case(name, args, (0,), apply(name), None, True)
    assert_equal(Ours(one).first(mode), Theirs(torch, one, original).first())
    # Of backward(), as torch.autograd.grad visits only what leads to its inputs, and the error is beside that way.
    slope = sum(g.sum() for g in Theirs(torch, one, original).first(create_graph=True))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.backward()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        Ours(one).second(mode)


def test_no_backward_at_all(torch):
    class Theirs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    class Ours(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    y = Theirs.apply(torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(NotImplementedError):
        y.backward()
    assert Ours.apply(jnp.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(NotImplementedError, match="Ours"):
        jax.grad(lambda x: Ours.apply(x).sum())(jnp.ones(2))


# -- NumPy inside, vmap -----------------------------------------------------------------------------

TABLE = grid(3, 4)
SWAP = np.array([1, 0, 3, 2])


def numpy_functions(torch, original):
    """Pairs of the same scalar function of a row: sorted, and taken."""

    def theirs_sorted(x):
        return (torch.sin(original.NumpySort.apply(x, -1)[0]) * torch.tensor(weights((4,)))).sum()

    def ours_sorted(x):
        return (jnp.sin(ported.NumpySort.apply(x, -1)[0]) * weights((4,))).sum()

    def theirs_taken(x):
        order = torch.tensor(SWAP)
        return (torch.sin(original.NumpyTake.apply(x, order, order, 0)) * torch.tensor(weights((4,)))).sum()

    def ours_taken(x):
        order = jnp.asarray(SWAP)
        return (jnp.sin(ported.NumpyTake.apply(x, order, order, 0)) * weights((4,))).sum()

    return {"sort": (theirs_sorted, ours_sorted), "take": (theirs_taken, ours_taken)}


@pytest.mark.parametrize("name", ["sort", "take"])
class TestNumpyInside:
    """Host code, so without jit, which would need a callback in forward."""

    @pytest.fixture
    def pair(self, torch, original, name):
        return numpy_functions(torch, original)[name]

    def test_plain(self, torch, pair, name):
        theirs, ours = pair
        assert_equal(ours(jnp.asarray(TABLE[0])), theirs(torch.tensor(TABLE[0])))

    def test_grad(self, torch, pair, name):
        theirs, ours = pair
        assert_equal(jax.grad(ours)(jnp.asarray(TABLE[0])), torch.func.grad(theirs)(torch.tensor(TABLE[0])))

    def test_grad_of_grad(self, torch, pair, name):
        theirs, ours = pair
        d = direction((4,))
        expected = torch.func.grad(lambda x: (torch.func.grad(theirs)(x) * torch.tensor(d)).sum())(
            torch.tensor(TABLE[0])
        )
        assert_equal(jax.grad(lambda x: (jax.grad(ours)(x) * d).sum())(jnp.asarray(TABLE[0])), expected)

    def test_vmap(self, torch, pair, name):
        theirs, ours = pair
        assert_equal(jax.vmap(ours)(jnp.asarray(TABLE)), torch.func.vmap(theirs)(torch.tensor(TABLE)))

    def test_vmap_over_another_axis(self, torch, pair, name):
        theirs, ours = pair
        expected = torch.func.vmap(theirs, in_dims=1)(torch.tensor(TABLE.T.copy()))
        assert_equal(jax.vmap(ours, in_axes=1)(jnp.asarray(TABLE.T)), expected)

    def test_vmap_of_grad(self, torch, pair, name):
        theirs, ours = pair
        expected = torch.func.vmap(torch.func.grad(theirs))(torch.tensor(TABLE))
        assert_equal(jax.vmap(jax.grad(ours))(jnp.asarray(TABLE)), expected)

    def test_grad_of_vmap(self, torch, pair, name):
        theirs, ours = pair
        expected = torch.func.grad(lambda x: torch.func.vmap(theirs)(x).sum())(torch.tensor(TABLE))
        assert_equal(jax.grad(lambda x: jax.vmap(ours)(x).sum())(jnp.asarray(TABLE)), expected)

    def test_jacrev(self, torch, pair, name):
        theirs, ours = pair
        expected = torch.func.jacrev(lambda x: torch.stack([theirs(x), theirs(x * 2)]))(torch.tensor(TABLE[0]))
        assert_equal(jax.jacrev(lambda x: jnp.stack([ours(x), ours(x * 2)]))(jnp.asarray(TABLE[0])), expected)

    def test_vmap_of_grad_of_grad(self, torch, pair, name):
        theirs, ours = pair
        func, d = torch.func, direction((4,))
        expected = func.vmap(func.grad(lambda x: (func.grad(theirs)(x) * torch.tensor(d)).sum()))(torch.tensor(TABLE))
        found = jax.vmap(jax.grad(lambda x: (jax.grad(ours)(x) * d).sum()))(jnp.asarray(TABLE))
        assert_equal(found, expected)

    def test_vmap_of_vmap(self, torch, pair, name):
        theirs, ours = pair
        twice = np.stack([TABLE, TABLE * np.float32(0.7)])
        expected = torch.func.vmap(torch.func.vmap(theirs))(torch.tensor(twice))
        assert_equal(jax.vmap(jax.vmap(ours))(jnp.asarray(twice)), expected)


def test_every_output_of_a_mapped_sort(torch, original):
    expected = torch.func.vmap(lambda x: original.NumpySort.apply(x, 0), in_dims=1)(torch.tensor(TABLE))
    assert_equal(jax.vmap(lambda x: ported.NumpySort.apply(x, 0), in_axes=1)(jnp.asarray(TABLE)), expected)


def test_order_mapped_alone(torch, original):
    orders, row = np.stack([SWAP, SWAP[::-1]]), TABLE[0]
    take = lambda m, x: lambda o: m.NumpyTake.apply(x, o, o, 0)  # noqa: E731
    expected = torch.func.vmap(take(original, torch.tensor(row)))(torch.tensor(orders))
    assert_equal(jax.vmap(take(ported, jnp.asarray(row)))(jnp.asarray(orders)), expected)


@pytest.mark.parametrize("in_dims", [(0, 0), (1, None), (None, 0), (1, 0)])
@MODES
def test_what_the_rule_for_vmap_gets(torch, original, monkeypatch, in_dims, mode):
    for module in (original, ported):
        monkeypatch.setattr(module.SeenVmap, "seen", [])
    x = {0: TABLE, 1: TABLE.T.copy(), None: TABLE[0]}[in_dims[0]]
    y = TABLE[0] * 2 if in_dims[1] is None else TABLE * 2
    theirs = torch.func.vmap(lambda x, y: original.SeenVmap.apply(x, y, 0.7), in_dims=in_dims)
    ours = mode(jax.vmap(lambda x, y: ported.SeenVmap.apply(x, y, 0.7), in_axes=in_dims))
    assert_equal(ours(jnp.asarray(x), jnp.asarray(y)), theirs(torch.tensor(x), torch.tensor(y)))
    assert original.SeenVmap.seen == [(3, (*in_dims, None))]
    assert ported.SeenVmap.seen[-1] == original.SeenVmap.seen[0]


@pytest.mark.parametrize("name", ["SeenVmap", "Normalize"])
@MODES
def test_gradients_through_vmap(torch, original, name, mode):
    def theirs(x):
        layer = getattr(original, name)
        return torch.sin(layer.apply(x, x, 0.7) if name == "SeenVmap" else layer.apply(x)[0]).sum()

    def ours(x):
        layer = getattr(ported, name)
        return jnp.sin(layer.apply(x, x, 0.7) if name == "SeenVmap" else layer.apply(x)[0]).sum()

    func, x, y = torch.func, torch.tensor(TABLE), jnp.asarray(TABLE)
    assert_equal(mode(jax.vmap(ours))(y), func.vmap(theirs)(x))
    assert_equal(mode(jax.vmap(jax.grad(ours)))(y), func.vmap(func.grad(theirs))(x))
    expected = func.grad(lambda x: func.vmap(theirs)(x).sum())(x)
    assert_equal(mode(jax.grad(lambda x: jax.vmap(ours)(x).sum()))(y), expected)
    expected = func.vmap(func.grad(lambda x: func.grad(theirs)(x).sum()))(x)
    assert_equal(mode(jax.vmap(jax.grad(lambda x: jax.grad(ours)(x).sum())))(y), expected)
    expected = func.vmap(func.jacrev(lambda x: torch.stack([theirs(x), theirs(x * 2)])))(x)
    assert_equal(mode(jax.vmap(jax.jacrev(lambda x: jnp.stack([ours(x), ours(x * 2)]))))(y), expected)


# -- forward mode -----------------------------------------------------------------------------------

DX, DY = direction(X.shape), weights(Y.shape)


@pytest.mark.parametrize("which", ["both", "first", "second"])
@MODES
def test_jvp(torch, original, which, mode):
    def functions(module, sin, x, y):
        free = {
            "both": lambda a, b: module.SinProduct.apply(a, b, 0.7)[0],
            "first": lambda a: module.SinProduct.apply(sin(a), y, 0.7)[0],
            "second": lambda b: module.SinProduct.apply(x, sin(b), 0.7)[0],
        }[which]
        return free, {"both": (x, y), "first": (x,), "second": (y,)}[which]

    tangents = {"both": (DX, DY), "first": (DX,), "second": (DY,)}[which]
    f, primals = functions(original, torch.sin, torch.tensor(X), torch.tensor(Y))
    expected = torch.func.jvp(f, primals, tuple(map(torch.tensor, tangents)))
    f, primals = functions(ported, jnp.sin, jnp.asarray(X), jnp.asarray(Y))
    tangents = tuple(map(jnp.asarray, tangents))
    assert_equal(jax.jvp(f, primals, tangents), expected)
    assert_equal(jax.jvp(jax.jit(f), primals, tangents), expected)
    assert_equal(mode(lambda p, t: jax.jvp(f, p, t))(primals, tangents), expected)


def test_jvp_with_a_context_that_forward_fills(torch, original):
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        x, y = (forward_ad.make_dual(torch.tensor(v), torch.tensor(t)) for v, t in ((X, DX), (Y, DY)))
        expected = tuple(forward_ad.unpack_dual(original.SinProductInCtx.apply(x, y, 0.7)))
    found = jax.jvp(lambda x, y: ported.SinProductInCtx.apply(x, y, 0.7), (X, Y), (DX, DY))
    assert_equal(found, expected)
    jitted = jax.jit(lambda x, y: ported.SinProductInCtx.apply(x, y, 0.7))
    assert_equal(jax.jvp(jitted, (X, Y), (DX, DY)), expected)


def test_statics_among_the_outputs_under_jvp(torch, original):
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.tensor(X), torch.tensor(DX))
        outputs = original.SinProduct.apply(dual, torch.tensor(Y), 0.7)
        expected = tuple(forward_ad.unpack_dual(outputs[0]))
    kept = []

    def first(x):
        y, *rest = ported.SinProduct.apply(x, jnp.asarray(Y), 0.7)
        kept[:] = rest
        return y

    assert_equal(jax.jvp(first, (jnp.asarray(X),), (jnp.asarray(DX),)), expected)
    assert tuple(kept) == outputs[1:] == (None, "units")


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_missing_tangents(torch, original, monkeypatch, materialize, which):
    for module in (original, ported):
        monkeypatch.setattr(module.SeenTangents, "materialize", materialize)
        monkeypatch.setattr(module.SeenTangents, "seen", [])

    def function(module, args):
        def of_one(v):
            return module.SeenTangents.apply(*(v if i == which else a for i, a in enumerate(args)), 0.7)

        return of_one

    x, t = (X, Y)[which], (DX, DY)[which]
    expected = torch.func.jvp(
        function(original, [torch.tensor(X), torch.tensor(Y)]), (torch.tensor(x),), (torch.tensor(t),)
    )
    found = jax.jvp(function(ported, [jnp.asarray(X), jnp.asarray(Y)]), (jnp.asarray(x),), (jnp.asarray(t),))
    assert_equal(found, expected)
    missing = "zeros" if materialize else None
    assert original.SeenTangents.seen == [("some", missing, None) if which == 0 else (missing, "some", None)]
    assert ported.SeenTangents.seen[-1] == original.SeenTangents.seen[0]


def test_what_is_saved_for_backward_and_for_jvp(torch, original):
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.tensor(X), torch.tensor(DX))
        expected = tuple(forward_ad.unpack_dual(original.SavedForEach.apply(dual)))
    assert_equal(jax.jvp(ported.SavedForEach.apply, (jnp.asarray(X),), (jnp.asarray(DX),)), expected)
    one = Case("SavedForEach", (X,), (0,), apply("SavedForEach"), None, False)
    assert_equal(Ours(one).first(jax.jit), Theirs(torch, one, original).first())


def test_a_tangent_too_many(torch, original):
    with pytest.raises(RuntimeError, match="expected 1 but got 2"):
        torch.func.jvp(original.SurplusTangent.apply, (torch.tensor(X),), (torch.tensor(DX),))
    with pytest.raises(ValueError, match=r"SurplusTangent.jvp returned 2 tangents; expected 1"):
        jax.jvp(ported.SurplusTangent.apply, (jnp.asarray(X),), (jnp.asarray(DX),))


# -- deliberate differences: what torch does, and what we do ----------------------------------------

DROPPED = {
    "SavedIntermediate": Case("SavedIntermediate", (X,), (0,), apply("SavedIntermediate"), None, True),
    "VocabParallelCrossEntropy": Case(
        "VocabParallelCrossEntropy",
        (X, np.array([1, 1], np.int32)),
        (0,),
        apply("VocabParallelCrossEntropy"),
        None,
        True,
    ),
    "SyncBatchNorm": Case(
        "SyncBatchNorm",
        (IMAGES, grid(3), grid(3), None, None, *NORM),
        (0, 1, 2),
        apply("SyncBatchNorm"),
        None,
        True,
    ),
    "FlashAttention": Case(
        "FlashAttention", (Q, K, V, None, True, 2, 2), (0, 1, 2), apply("FlashAttention"), None, True
    ),
    "Reversible": Case(
        "Reversible",
        (grid(2, 4), Own("BLOCKS"), {"gain": 0.7}, *HALF),
        (0, 3, 4, 5, 6),
        apply("Reversible"),
        None,
        True,
    ),
}


def _plain(name: str) -> Callable[..., Any]:
    """The forward of a layer, differentiated by JAX itself."""

    def call(module, *args):
        layer = getattr(ported, name)
        context = type("Anything", (), {"save_for_backward": lambda self, *tensors: None})()
        return layer.forward(context, *args)

    return call


@pytest.mark.parametrize(
    ("name", "mode"),
    # Operation by operation, a second derivative of the others takes long.
    [pytest.param(name, jax.jit, id=f"jit-{name}") for name in DROPPED]
    + [pytest.param("SavedIntermediate", lambda f: f, id="eager-SavedIntermediate")],
)
def test_torch_drops_a_second_derivative_through_intermediates(torch, original, name, mode):
    one = DROPPED[name]
    right = Ours(dataclasses.replace(one, call=_plain(name)))
    assert_close(Ours(one).first(mode), right.first(mode))
    ours, expected = Ours(one).second(mode), right.second(mode)
    assert_close(ours, expected)
    if name == "FlashAttention":  # its backward runs under no_grad, so that nothing is left to differentiate
        with pytest.raises(RuntimeError, match="does not require grad"):
            Theirs(torch, one, original).second()
        return
    theirs = Theirs(torch, one, original).second()
    distances = [np.abs(np.asarray(e) - t.detach().numpy()).max() for e, t in zip(expected, theirs, strict=True)]
    assert max(distances) > 0.1


def assert_close(ours: Any, expected: Any) -> None:
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_second_derivative_of_a_cube_that_saves_its_slope(torch, original):
    x = torch.tensor(0.5, requires_grad=True)
    (first,) = torch.autograd.grad(original.SavedIntermediate.apply(x) * 1, x, create_graph=True)
    assert float(first.detach()) == 0.75
    assert not first.requires_grad  # the slope is a number to torch: 0 instead of 6x
    second = jax.grad(jax.grad(ported.SavedIntermediate.apply))(0.5)
    np.testing.assert_allclose(second, 3.0)


def test_an_input_changed_in_place(torch, original):
    """torch keeps the changed values for backward, of which the lowest step has no gradient; ours keeps the old."""
    values = np.array([-1.0, 0.03, 0.3, 1.5], np.float32)
    x, c = torch.tensor(values, requires_grad=True), torch.ones(1, requires_grad=True)
    y = original.LearnedClip.apply(x * 1, c, 4, True, True)
    theirs = torch.autograd.grad(y.sum(), (x, c))
    ours = jax.grad(lambda x, c: ported.LearnedClip.apply(x * 1, c, 4, True, True).sum(), (0, 1))(values, jnp.ones(1))
    assert theirs[0].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert ours[0].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert theirs[1].tolist() == ours[1].tolist() == [1.0]


def test_a_leaf_changed_in_place(torch, original):
    x, c = torch.tensor(UNCLIPPED, requires_grad=True), torch.tensor(CLIP)
    with pytest.raises(RuntimeError, match="leaf"):
        original.LearnedClip.apply(x, c, 4, True, True)
    ours = jax.grad(lambda x: ported.LearnedClip.apply(x, jnp.asarray(CLIP), 4, True, True).sum())(UNCLIPPED)
    assert ours.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_running_statistics(torch, original):
    mean, var = torch.zeros(3), torch.ones(3)
    original.SyncBatchNorm.apply(torch.tensor(IMAGES), None, None, mean, var, 1e-5, 0.1, original.ONE_RANK, 1)
    np.testing.assert_allclose(mean, 0.1 * IMAGES.mean((0, 2)), atol=1e-6)
    np.testing.assert_allclose(var, 0.9 + 0.1 * IMAGES.var((0, 2), ddof=1), atol=1e-6)
    mean, var = jnp.zeros(3), jnp.ones(3)
    ported.SyncBatchNorm.apply(jnp.asarray(IMAGES), None, None, mean, var, 1e-5, 0.1, ported.ONE_RANK, 1)
    assert mean.tolist() == [0.0] * 3
    assert var.tolist() == [1.0] * 3


def test_an_attribute_of_the_class_read_under_jit(torch, original, monkeypatch):
    """A compiled gradient keeps the attribute of its first call, as everything that Python reads."""
    compiled = jax.jit(jax.grad(lambda x, a: ported.AuxLossScaler.apply(x, a).sum(), 1))
    found, expected = [], []
    for scale in (2, 5):
        for module in (original, ported):
            monkeypatch.setattr(module.AuxLossScaler, "scale", scale)
        loss = torch.tensor(0.7, requires_grad=True)
        original.AuxLossScaler.apply(torch.tensor(X, requires_grad=True), loss).sum().backward()
        expected.append(float(loss.grad))
        found.append(float(compiled(jnp.asarray(X), jnp.float32(0.7))))
    assert expected == [2.0, 5.0]
    assert found == [2.0, 2.0]


def _both_rules(base: Any) -> type:
    class BothRules(base):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output * 2

        @staticmethod
        def vmap(info, in_dims, x):
            return x * 2, in_dims[0]

    return BothRules


def test_both_rules_for_vmap(torch):
    """torch finds it out under vmap, ours where the class is defined."""
    theirs = _both_rules(torch.autograd.Function)
    assert theirs.apply(torch.ones(3)).tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="generate_vmap_rule"):
        torch.func.vmap(theirs.apply)(torch.ones(3))
    with pytest.raises(RuntimeError, match="generate_vmap_rule"):
        _both_rules(Function)


def _both_names(base: Any) -> type:
    class BothNames(base):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output * 2

        @staticmethod
        def vjp(ctx, grad_output):
            return grad_output * 2

    return BothNames


def test_both_names_of_backward(torch):
    """torch finds it out when it differentiates, ours where the class is defined."""
    y = _both_names(torch.autograd.Function).apply(torch.ones(3, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="vjp"):
        y.backward()
    with pytest.raises(RuntimeError, match="vjp"):
        _both_names(Function)


def test_tensors_in_a_list(torch):
    """torch does not see them; here they are tensors of the argument, with a gradient of their own."""

    def define(base):
        class FirstOfList(base):
            @staticmethod
            def forward(ctx, values):
                return values[0] * 2

            @staticmethod
            def backward(ctx, grad_output):
                return ([grad_output * 2],)

        return FirstOfList

    assert not define(torch.autograd.Function).apply([torch.ones(3, requires_grad=True)]).requires_grad
    layer = define(Function)
    assert jax.grad(lambda x: layer.apply([x]).sum())(jnp.ones(3)).tolist() == [2.0] * 3


def test_no_rule_for_vmap(torch, original):
    """torch asks for a rule; here forward and backward are traced, and need none."""
    with pytest.raises(RuntimeError, match="vmap support"):
        torch.func.vmap(original.Cube.apply)(torch.tensor(X))
    assert_equal(jax.vmap(ported.Cube.apply)(jnp.asarray(X)), original.Cube.apply(torch.tensor(X)))


def test_a_context_that_forward_fills_under_transforms(torch, original):
    """torch.func asks for setup_context; here both styles meet every transform."""
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: original.Exp.apply(x).sum())(torch.tensor(X))
    found = jax.vmap(jax.grad(lambda x: ported.Exp.apply(x).sum()))(jnp.asarray(X))
    assert_equal(found, original.Exp.apply(torch.tensor(X)))


def test_no_rule_for_forward_mode(torch, original):
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(original.WithoutJvp.apply, (torch.ones(2),), (torch.ones(2),))
    with pytest.raises(TypeError, match="WithoutJvp"):
        jax.jvp(ported.WithoutJvp.apply, (jnp.ones(2),), (jnp.ones(2),))


def test_keywords_of_a_class_method(torch, original):
    """torch counts the parameters of a class method wrongly, and finds one missing."""
    with pytest.raises(TypeError, match="num_bits"):
        original.UniformQuantize.apply(torch.tensor(UNEVEN), 3, name="static")
    expected = original.UniformQuantize.apply(torch.tensor(UNEVEN), 3, None, None, "static")
    assert_equal(ported.UniformQuantize.apply(jnp.asarray(UNEVEN), 3, name="static"), expected)


def test_a_second_derivative_that_torch_cuts_off_in_silence(torch, original):
    """torch.autograd.grad does not meet the error of once_differentiable where it may leave inputs out."""
    x = torch.tensor(X, requires_grad=True)
    (first,) = torch.autograd.grad(original.OnceOnly.apply(x).sin().sum(), x, create_graph=True)
    assert torch.autograd.grad(first.sum(), x, allow_unused=True) == (None,)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        jax.grad(lambda x: jax.grad(lambda x: jnp.sin(ported.OnceOnly.apply(x)).sum())(x).sum())(jnp.asarray(X))


def test_a_number_is_refused_though_nothing_is_differentiated(torch, original):
    """torch looks at what is saved only if it is needed; ours always."""
    assert original.SavedNumber.apply(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(TypeError, match="save_for_backward"):
        ported.SavedNumber.apply(jnp.ones(2))


def _tripled_by_vmap(base: Any) -> type:
    class TripledByVmap(base):
        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output * 2

        @staticmethod
        def vmap(info, in_dims, x):
            return x * 3, 0

    return TripledByVmap


def test_the_gradient_of_a_batch_is_that_of_backward(torch):
    """torch differentiates what vmap does, and so may lose the custom gradient; here it is backward, batched."""
    theirs, ours = _tripled_by_vmap(torch.autograd.Function), _tripled_by_vmap(Function)
    assert torch.func.vmap(theirs.apply)(torch.ones(3)).tolist() == [3.0] * 3
    assert jax.vmap(ours.apply)(jnp.ones(3)).tolist() == [3.0] * 3
    assert torch.func.grad(lambda x: torch.func.vmap(theirs.apply)(x).sum())(torch.ones(3)).tolist() == [3.0] * 3
    assert jax.grad(lambda x: jax.vmap(ours.apply)(x).sum())(jnp.ones(3)).tolist() == [2.0] * 3


def _one_of(base: Any, forward: Callable[..., Any], backward: Callable[..., Any] | None = None) -> type:
    rule = backward or (lambda ctx, grad_output: grad_output)
    return type("OneOf", (base,), {"forward": staticmethod(forward), "backward": staticmethod(rule)})


def test_what_torch_lets_pass(torch):
    """Each would leave the user with less than the code says."""

    def save_number_for_jvp(ctx, x):
        ctx.save_for_forward(3)
        return x * 2

    def mark_what_is_not_returned(ctx, x):
        ctx.mark_non_differentiable(x + 1)
        return x * 2

    def save_in_backward(ctx, grad_output):
        ctx.save_for_backward(grad_output)
        return grad_output

    theirs, x = torch.autograd.Function, torch.ones(2, requires_grad=True)
    with pytest.raises(AssertionError):
        _one_of(theirs, save_number_for_jvp).apply(x)
    assert _one_of(theirs, mark_what_is_not_returned).apply(x).requires_grad
    _one_of(theirs, lambda ctx, x: x * 2, save_in_backward).apply(x).sum().backward()
    assert _one_of(theirs, lambda ctx, x: "text").apply(x) == "text"

    def gradient(layer):
        return jax.grad(lambda x: layer.apply(x).sum())(jnp.ones(2))

    with pytest.raises(TypeError, match="save_for_forward"):
        gradient(_one_of(Function, save_number_for_jvp))
    with pytest.raises(ValueError, match="mark_non_differentiable"):
        gradient(_one_of(Function, mark_what_is_not_returned))
    with pytest.raises(RuntimeError, match="save_for_backward was called in backward"):
        gradient(_one_of(Function, lambda ctx, x: x * 2, save_in_backward))
    with pytest.raises(ValueError, match="expected at least one tensor"):
        gradient(_one_of(Function, lambda ctx, x: "text"))


def test_a_gradient_in_numpy(torch):
    """torch takes tensors alone; here NumPy arrays are tensors."""

    def in_numpy(ctx, grad_output):
        return np.ones(2, np.float32)

    with pytest.raises(RuntimeError, match="expected Variable or None"):
        _one_of(torch.autograd.Function, lambda ctx, x: x * 2, in_numpy).apply(
            torch.ones(2, requires_grad=True)
        ).sum().backward()
    layer = _one_of(Function, lambda ctx, x: x * 2, in_numpy)
    assert jax.grad(lambda x: layer.apply(x).sum())(jnp.ones(2)).tolist() == [1.0, 1.0]
