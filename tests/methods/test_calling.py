"""How a layer is called, and what comes back: arguments, statics and outputs of every kind, in every mode."""

from __future__ import annotations

import functools
import pickle
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer

X = jnp.array([0.5, -1.0, 2.0])

# Ways to get the gradient of a scalar function of one array.
MODES = {
    "grad": jax.grad,
    "jit-grad": lambda f: jax.jit(jax.grad(f)),
    "grad-jit": lambda f: jax.grad(jax.jit(f)),
    "scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=1)[0]),
    "cond": lambda f: jax.grad(lambda x: jax.lax.cond(x.sum() < 99, f, lambda x: x.sum(), x)),
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(f))(x[None])[0],
}
modes = pytest.mark.parametrize("mode", MODES)


class Scaled(PyLayer):
    @staticmethod
    def forward(ctx, x, factor=2.0, *, shift=0.0):
        ctx.factor = factor
        return x * factor + shift

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.factor


def test_class_and_instance_apply():
    assert Scaled.apply(X).tolist() == Scaled().apply(X).tolist() == (2 * X).tolist()
    assert jax.grad(lambda x: Scaled().apply(x, factor=3.0).sum())(X).tolist() == [3, 3, 3]


class Difference(PyLayer):
    @staticmethod
    def forward(ctx, a, b, c=None):
        ctx.save_for_backward(a, b)
        return a**2 - b

    @staticmethod
    def backward(ctx, dy):
        a, _ = ctx.saved_tensor()
        return 2 * a * dy, -dy


@modes
def test_gradients_follow_the_parameter_order(mode):
    for call in (lambda a, b: Difference.apply(b=b, a=a), lambda a, b: Difference.apply(a, b=b), Difference.apply):
        gradient = MODES[mode](lambda x, call=call: call(x, 3 * x).sum())
        np.testing.assert_allclose(gradient(X), 2 * X - 3)


@pytest.mark.parametrize(
    "static",
    [
        lambda: [1, {"a": {2, 3}}],
        lambda: {1: 2, "a": [3]},
        lambda: float("nan"),
        lambda: lambda v: v,
        lambda: functools.partial(max, 1),
        object,
        lambda: None,
    ],
    ids=["unhashable", "unsortable", "nan", "lambda", "partial", "object", "none"],
)
@modes
def test_fresh_statics_of_any_kind(mode, static):
    class Carries(PyLayer):
        @staticmethod
        def forward(ctx, x, value):
            ctx.value, ctx.made = value, (lambda v: v)
            ctx.save_for_backward(x, value)
            return x**2

        @staticmethod
        def backward(ctx, dy):
            x, saved = ctx.saved_tensor()
            assert type(saved) is type(ctx.value)
            return ctx.made(2 * x * dy), None

    np.testing.assert_allclose(MODES[mode](lambda x: Carries.apply(x, static()).sum())(X), 2 * X)


@modes
def test_partial_arguments_are_differentiated_through(mode):
    class Applies(PyLayer):
        @staticmethod
        def forward(ctx, function, x):
            ctx.kept = (function, x)
            return function(x)

        @staticmethod
        def backward(ctx, dy):
            function, x = ctx.kept
            return jax.vjp(lambda f, x: f(x), function, x)[1](dy)

    multiply = lambda w, v: w * v**2  # noqa: E731
    f = lambda x: Applies.apply(jax.tree_util.Partial(multiply, x), x).sum()  # noqa: E731
    np.testing.assert_allclose(MODES[mode](f)(X), 3 * X**2)


def test_methods_of_every_kind():
    class Plain(PyLayer):
        def forward(self, x):  # the context under another name, and no decorator
            return 2 * x

        def backward(self, dy):
            return 2 * dy

    class OfClass(PyLayer):
        factor = 3

        @classmethod
        def forward(cls, ctx, x):
            return cls.factor * x

        @classmethod
        def backward(cls, ctx, dy):
            return cls.factor * dy

    class Inherits(OfClass):
        factor = 5

    class OnlyBackward(Inherits):
        @classmethod
        def backward(cls, ctx, dy):
            return -super().backward(ctx, dy)

    class Starred(PyLayer):
        @staticmethod
        def forward(*args, **kwargs):
            ctx, x = args
            return kwargs["factor"] * x

        @staticmethod
        def backward(*args):
            return args[1] * 7

    for layer, factor in ((Plain, 2), (OfClass, 3), (Inherits, 5), (OnlyBackward, -5)):
        assert jax.jit(jax.grad(lambda x, layer=layer: layer.apply(x).sum()))(X).tolist() == [factor] * 3
    assert jax.jit(jax.grad(lambda x: Starred.apply(x, factor=7).sum()))(X).tolist() == [7] * 3


def test_layers_call_themselves():
    class Power(PyLayer):
        @staticmethod
        def forward(ctx, x, n):
            below = Power.apply(x, n - 1) if n > 1 else jnp.ones_like(x)
            ctx.save_for_backward(x, n)
            return below * x

        @staticmethod
        def backward(ctx, dy):
            x, n = ctx.saved_tensor()
            return dy * n * (Power.apply(x, n - 1) if n > 1 else 1.0), None

    for transform in (lambda f: f, jax.jit):
        np.testing.assert_allclose(transform(jax.grad(lambda x: Power.apply(x, 4).sum()))(X), 4 * X**3)
        second = transform(jax.grad(lambda x: jax.grad(lambda x: Power.apply(x, 4).sum())(x).sum()))
        np.testing.assert_allclose(second(X), 12 * X**2, rtol=1e-6)


def test_eager_mode_sees_concrete_values():
    seen = []

    class Looks(PyLayer):
        @staticmethod
        def forward(ctx, x):
            if x[0] > 0:
                seen.append(np.asarray(x).tolist())
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensor()
            if x[0] > 0:
                seen.append(np.asarray(dy).tolist())
            return dy * 2

    Looks.apply(X)
    assert seen == [X.tolist()]
    if not jax.config.jax_custom_vjp3:
        jax.grad(lambda x: Looks.apply(x).sum())(X)
        assert seen == [X.tolist(), X.tolist(), [1, 1, 1]]


def test_numpy_in_and_out():
    class OnHost(PyLayer):
        @staticmethod
        def forward(ctx, x):
            assert isinstance(x, jax.Array)
            return np.full(3, 2.0, np.float32), [np.float32(1.0)]

        @staticmethod
        def backward(ctx, dy, dz):
            return None

    y, (z,) = OnHost.apply(np.ones(3, np.float32))
    assert isinstance(y, jax.Array)
    assert isinstance(z, jax.Array)


# -- outputs --------------------------------------------------------------------------------------

Named = namedtuple("Named", "value label")
OBJECT = object()
FUNCTION = lambda: None  # noqa: E731
OUTPUTS = {
    "statics": lambda y: (y, 1, None, "text", OBJECT, FUNCTION, [3]),
    "1-tuple": lambda y: (y,),
    "list": lambda y: [y, None],
    "dict": lambda y: {"b": y, "a": {"c": OBJECT}},
    "named tuple": lambda y: Named(y, "label"),
    "nested": lambda y: ([y, (None, {"k": FUNCTION})], 2.5),
}


@pytest.mark.parametrize("shape", OUTPUTS)
@pytest.mark.parametrize("mode", ["eager", "jit", *MODES])
def test_outputs_come_back_as_they_were(mode, shape):
    class Returns(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return OUTPUTS[shape](x * 2)

        @staticmethod
        def backward(ctx, *dys):
            (dy,) = [d for d in jax.tree_util.tree_leaves(dys) if d is not None]
            return dy * 2

    found = []

    def f(x):
        out = Returns.apply(x)
        found.append(out)
        (y,) = [leaf for leaf in jax.tree_util.tree_leaves(out) if isinstance(leaf, jax.Array)]
        return y.sum()

    if mode in MODES:
        assert MODES[mode](f)(X).tolist() == [2, 2, 2]
    else:
        assert {"eager": f, "jit": jax.jit(f)}[mode](X) == 2 * X.sum()
    expected, treedef = jax.tree_util.tree_flatten(OUTPUTS[shape](None), is_leaf=lambda v: v is None)
    for out in found:
        leaves, got = jax.tree_util.tree_flatten(out, is_leaf=lambda v: v is None)
        assert got == treedef
        for a, b in zip(leaves, expected, strict=True):
            assert isinstance(a, jax.Array) or a is b or a == b


def test_output_without_a_tensor_is_an_error():
    class Empty(PyLayer):
        @staticmethod
        def forward(ctx, x, result):
            return result

    for result in (None, (), 3, (None, "text"), [np.array(["text"])]):
        for run in (lambda f: f, jax.jit, jax.grad):
            with pytest.raises(ValueError, match=r"Empty\.forward returned .* expected at least one tensor"):
                run(lambda x, r=result: Empty.apply(x, r))(1.0)


def test_input_returned_is_a_value_of_its_own():
    class Doubles(PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    # The derivative of x * layer(x) is x + 2 layer... with the layer's own factor on its path alone.
    np.testing.assert_allclose(jax.grad(lambda x: (x * Doubles.apply(x)).sum())(X), 3 * X)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: (x * Doubles.apply(x)).sum()))(X), 3 * X)


def test_shared_output_under_vmap_counts_once():
    class Shares(PyLayer):
        """One output that only the unmapped input reaches."""

        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w, 2 * w

        @staticmethod
        def backward(ctx, a, b):
            x, w = ctx.saved_tensor()
            return a * w, a * x + 2 * b

    def total(layer):
        return lambda w: sum(v.sum() for v in jax.vmap(layer, in_axes=(0, None))(X, w))

    plain = total(lambda x, w: (x * w, 2 * w))
    for order in (
        jax.grad,
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.grad(jax.jit(f)),
        lambda f: jax.grad(jax.grad(lambda w: f(w) ** 2)),
    ):
        np.testing.assert_allclose(order(total(Shares.apply))(3.0), order(plain)(3.0), rtol=1e-6)


def test_collectives_over_a_mapped_axis():
    class Sum(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return jax.lax.psum(x, "b")

        @staticmethod
        def backward(ctx, dy):
            return jax.lax.psum(dy, "b")

    def f(layer):
        return lambda x: (jax.vmap(lambda v: layer(v) ** 2, axis_name="b")(x)).sum()

    plain = f(lambda v: jax.lax.psum(v, "b"))
    np.testing.assert_allclose(jax.grad(f(Sum.apply))(X), jax.grad(plain)(X), rtol=1e-6)
    second = lambda g: jax.grad(lambda x: (jax.grad(g)(x) ** 2).sum())(X)  # noqa: E731
    np.testing.assert_allclose(second(f(Sum.apply)), second(plain), rtol=1e-6)


def test_unsortable_dict_with_tensors_is_refused():
    for run in (lambda f: f, jax.grad):
        with pytest.raises(ValueError, match=r"a dict with keys \[1, 'a'\] holds tensors.*Use keys of one type"):
            run(lambda x: Scaled.apply({1: x, "a": 2}).sum())(X)


def rank_like(x):
    return jax.lax.axis_index("b").astype(x.dtype)


class OfRank(PyLayer):
    """Keeps what only the place in the batch tells."""

    @staticmethod
    def forward(ctx, x):
        rank = rank_like(x)
        ctx.save_for_backward(rank)
        ctx.mask = rank > 0
        return x * rank

    @staticmethod
    def backward(ctx, dy):
        (rank,) = ctx.saved_tensor()
        return jnp.where(ctx.mask, dy * rank, 0)


class SumOfRanks(PyLayer):
    @staticmethod
    def forward(ctx, x):
        return jax.lax.psum(x * rank_like(x), "b")

    @staticmethod
    def backward(ctx, dy):
        return jax.lax.psum(dy, "b") * rank_like(dy)


@pytest.mark.parametrize("forward_mode", [False, True], ids=["", "forward mode"])
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("base", [OfRank, SumOfRanks])
def test_what_depends_on_the_index_along_a_mapped_axis(base, run, forward_mode):
    layer = type(base.__name__, (base,), {"forward_mode": forward_mode})

    def plain(x):
        ranked = x * rank_like(x)
        return ranked if base is OfRank else jax.lax.psum(ranked, "b")

    def over(f, *axes):
        return jax.vmap(f, axes or 0, axis_name="b")

    def f(layer):
        # Mapped, and shared by all examples: there a custom_vjp function has no right gradient over a named axis.
        shared = layer if forward_mode or base is OfRank else jnp.cos
        return lambda x, w: (over(lambda x, w: jnp.sin(layer(x)) * shared(w), 0, None)(x, w) ** 2).sum()

    def scanned(layer):
        return lambda c, _: (jnp.sin(jax.checkpoint(layer)(c)), None)

    w = jnp.float32(0.7)
    ways = [
        lambda g: over(jax.grad(lambda x: g(jnp.sin(x))))(X),
        lambda g: jax.grad(f(g), (0, 1))(X, w),
        lambda g: jax.grad(lambda x, w: (jax.grad(f(g))(x, w) ** 2).sum(), (0, 1))(X, w),
        lambda g: over(lambda x: jax.grad(lambda x: jax.lax.scan(scanned(g), x, None, length=2)[0])(x))(X),
    ]
    if forward_mode:
        ways += [
            lambda g: over(lambda x: jax.jvp(g, (w,), (w,))[1] * x)(X),
            lambda g: jax.jvp(f(g), (X, w), (X, w)),
            lambda g: jax.jacfwd(jax.grad(f(g)))(X, w),
        ]
    for way in ways:
        ours, expected = run(functools.partial(way, layer.apply))(), way(plain)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("base", [PyLayer, Function])
def test_apply_is_one_object_so_that_jit_compiles_it_once(base):
    traced = []

    class Traced(base):
        @staticmethod
        def forward(ctx, x):
            traced.append(x)
            return x * 2

    class Shifted(Traced):
        @classmethod
        def apply(cls, x):
            return super().apply(x) + 1

    class Tripled(Shifted):
        @staticmethod
        def forward(ctx, x):
            return x * 3

    for _ in range(3):
        jax.jit(Traced.apply)(X)
        jax.jit(Traced().apply)(X)
    assert len(traced) <= 2  # under JAX_CUSTOM_VJP3 JAX traces it once more
    assert Traced.apply is Traced.apply
    assert Tripled.apply(X).tolist() == (X * 3 + 1).tolist()
    assert pickle.loads(pickle.dumps(Scaled.apply)) is Scaled.apply
