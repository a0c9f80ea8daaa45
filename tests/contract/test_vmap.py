"""Layers in a batch: their own `vmap`, what info and dims it gets, and the name of a mapped axis."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer
from tests.kit.layers import ForwardTanh, Tanh, layer, text_of
from tests.kit.modes import EAGER_AND_JIT, SECOND
from tests.kit.modes import X as RANKED
from tests.kit.transforms import assert_same
from tests.tools.benchmarks.timing import python_calls

X = jnp.array([0.3, -0.2, 1.2, 0.5])
MANY = jnp.stack([X, X[::-1] * 0.5, X * X])
WEIGHTS = jnp.arange(1.0, 5.0)

calls: list[str] = []


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


def on_host(function, x):
    return jax.pure_callback(lambda v: function(np.asarray(v)), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


class HostSine(PyLayer):
    """Host code, which JAX cannot batch. It returns a marked output and a static too, and saves intermediates."""

    forward_mode = True

    @staticmethod
    def forward(ctx, x, n):
        square, sign = x * x, jnp.sign(x)
        y = on_host(np.sin, square)
        ctx.save_for_backward(square, x, y * 2)
        ctx.mark_non_differentiable(sign)
        return {"y": y, "sign": sign, "n": n}

    @staticmethod
    def backward(ctx, g):
        square, x, double = ctx.saved_tensor()
        nothing = double / 2 - jnp.sin(square)  # and its derivative too, if double has that of the output
        return g["y"] * (jnp.cos(square) + nothing) * 2 * x + 7 * g["sign"]

    @staticmethod
    def vmap(info, in_dims, x, n):
        calls.append("HostSine")
        assert in_dims[1] is None
        assert info.randomness == "error"
        assert x.shape[in_dims[0]] == info.batch_size
        x = jnp.moveaxis(x, in_dims[0], -1)
        return HostSine.apply(x, n), {"y": -1, "sign": -1, "n": None}


def sine_and_sign(x):
    outputs = HostSine.apply(x, 3)
    return outputs["y"] + outputs["sign"]


def noting(name, vmap):
    return lambda info, in_dims, *args: (calls.append(name), vmap(in_dims, *args))[1]


# As in torch: what is kept is told by setup_context, an intermediate that comes from the output among it.
HostCube = layer(
    lambda x: on_host(lambda v: v**3, x),
    lambda ctx, dy: dy * (1.5 * ctx.saved_tensors[1] / ctx.saved_tensors[0]),
    Function,
    "HostCube",
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output * 2),
    vmap=noting("HostCube", lambda in_dims, x: (HostCube.apply(x), in_dims[0])),
)


LAYERS = {
    "HostSine": (sine_and_sign, lambda x: jnp.sin(x * x) + jnp.sign(x)),
    "HostCube": (HostCube.apply, lambda x: x**3),
}


def loss(layer):
    return lambda x: jnp.sum(jnp.sin(layer(x)) * WEIGHTS)


def mapped(f):
    return lambda xs: jnp.sum(jax.vmap(f)(xs) ** 2)


def along(f):
    return lambda x: jnp.sum(jax.grad(f)(x) * jnp.cos(x))


def scanned(f):
    return lambda x: jax.lax.scan(lambda c, _: (c + f(c), f(c)), x, None, length=2)[1].sum()


TWICE = jnp.stack([MANY, MANY * 2])
# From a function of X to numbers.
TRANSFORMS = {
    "vmap of axis 1": lambda f: jax.vmap(f, in_axes=1)(MANY.T),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(MANY),
    "grad of vmap": lambda f: jax.grad(mapped(f))(MANY),
    "vmap of grad of grad": lambda f: jax.vmap(jax.grad(along(f)))(MANY),
    "grad of grad of vmap": lambda f: jax.grad(along(mapped(f)))(MANY),
    "grad of vmap of grad": lambda f: jax.grad(mapped(jax.grad(f)))(MANY),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f))(TWICE),
    "grad of vmap of vmap": lambda f: jax.grad(mapped(mapped(f)))(TWICE),
    "grad of vmap of jit": lambda f: jax.grad(mapped(jax.jit(f)))(MANY),
    "vmap of jit of grad": lambda f: jax.vmap(jax.jit(jax.grad(f)))(MANY),
    "vmap of scan": lambda f: jax.vmap(scanned(f))(MANY),
    "grad of vmap of scan": lambda f: jax.grad(mapped(scanned(f)))(MANY),
    "vmap of remat": lambda f: jax.vmap(jax.grad(jax.checkpoint(f)))(MANY),
}
FORWARD = {
    "jvp of vmap": lambda f: jax.jvp(jax.vmap(f), (MANY,), (MANY,)),
    "vmap of jvp": lambda f: jax.vmap(lambda x: jax.jvp(f, (x,), (x,)))(MANY),
    "vmap of hessian": lambda f: jax.vmap(jax.hessian(f))(MANY),
}
FEW = ("grad of vmap", "vmap of grad of grad", "vmap of vmap", "vmap of scan")
MEETINGS = [("HostSine", t) for t in TRANSFORMS | FORWARD] + [("HostCube", t) for t in FEW]


@functools.cache
def without_layer(name, transform):
    return jax.jit(lambda: (TRANSFORMS | FORWARD)[transform](loss(LAYERS[name][1])))()


@EAGER_AND_JIT
@pytest.mark.parametrize(("name", "transform"), MEETINGS)
def test_vmap_calls_the_layers_own(name, transform, mode):
    ours = functools.partial((TRANSFORMS | FORWARD)[transform], loss(LAYERS[name][0]))
    assert_same(mode(ours)(), without_layer(name, transform))
    assert name in calls


def front(value, dim, size):
    return jnp.broadcast_to(value, (size, *value.shape)) if dim is None else jnp.moveaxis(value, dim, 0)


class Shares(PyLayer):
    """Tells what arrives; `vmap` of one argument alone, a pytree, a static, keywords."""

    seen: list = []

    @staticmethod
    def forward(ctx, x, tree, n, *, scale):
        ctx.save_for_backward(x, tree["a"], scale)
        return x * tree["a"] * n * scale, tree["a"].sum()

    @staticmethod
    def backward(ctx, dy, ds):
        x, a, scale = ctx.saved_tensor()
        return dy * a * 2 * scale, {"a": dy * x * 2 * scale + ds, "s": None}, (dy * x * a * 2).sum()

    @staticmethod
    def vmap(info, in_dims, x, tree, n, *, scale):
        Shares.seen.append((info.batch_size, in_dims, x.shape, tree["a"].shape, n))
        x_dim, a_dim = in_dims[0], in_dims[1]["a"]
        a = front(tree["a"], a_dim, info.batch_size)
        total = (tree["a"].sum(), None) if a_dim is None else (a.sum(-1), 0)
        return (front(x, x_dim, info.batch_size) * a * n * scale, total[0]), (0, total[1])


def arrays(axes):
    return [MANY.T if axis == 1 else MANY if axis == 0 else X for axis in axes]


@EAGER_AND_JIT
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 0)])
def test_what_vmap_gets(mode, axes):
    def ours(x, a, s):
        return sum(jnp.sum(v) for v in Shares.apply(x, {"a": a, "s": "static"}, 2, scale=s))

    def plain(x, a, s):
        return jnp.sum(x * a * 2 * s) + a.sum()

    def gradients(f):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(jax.vmap(f, (*axes, None))(*a))), (0, 1, 2))

    Shares.seen.clear()
    x, a = arrays(axes)
    assert_same(mode(gradients(ours))(x, a, 0.5), jax.jit(gradients(plain))(x, a, 0.5))
    dims = axes[0], {"a": axes[1], "s": None}, None, None
    assert Shares.seen[0] == (3, dims, x.shape, a.shape, 2)


@EAGER_AND_JIT
def test_a_dict_of_vmap_and_its_dims_may_have_another_order_of_keys(mode):
    def rule(info, in_dims, x):
        return {"a": 2 * x.T, "static": None, "b": x}, {"static": None, "b": 0, "a": 1}

    made = layer(lambda ctx, x: {"b": x * 1, "a": 2 * x, "static": None}, lambda ctx, d: d["b"] + 2 * d["a"], vmap=rule)
    square = jnp.arange(9.0).reshape(3, 3)
    assert_same(mode(jax.vmap(lambda x: made.apply(x)["b"] + 3 * made.apply(x)["a"]))(square), 7 * square)
    for name, factor in (("b", 1), ("a", 2)):
        total = lambda x, name=name: made.apply(x)[name].sum()  # noqa: E731
        assert_same(mode(jax.vmap(jax.grad(total)))(square), jnp.full_like(square, factor))
        assert_same(mode(jax.grad(lambda x, f=total: jax.vmap(f)(x).sum()))(square), jnp.full_like(square, factor))


def scaled_in_numpy(in_dims, x, w):
    x, w = (np.moveaxis(np.asarray(v), d, 0) if d is not None else v for v, d in zip((x, w), in_dims, strict=True))
    return x * np.asarray(w), 0


def gradients_of_scaled(ctx, dy):
    x, w, total = ctx.saved_tensors
    return dy * w, dy * x + 0 * total


# Saves an argument that the examples share, and needs numbers.
NumpyScale = layer(
    lambda x, w: np.asarray(x) * np.asarray(w),
    gradients_of_scaled,
    Function,
    "NumpyScale",
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, np.sum(inputs[1])),
    host=True,
    vmap=noting("NumpyScale", scaled_in_numpy),
)


def test_what_the_examples_share_is_kept_once():
    pull = jax.vjp(lambda x: jax.vmap(NumpyScale.apply, (0, None))(x, X), MANY)[1]
    shapes = [leaf.shape for leaf in jax.tree_util.tree_leaves(pull)]
    assert X.shape in shapes
    assert shapes.count(MANY.shape) == 1


@EAGER_AND_JIT
def test_the_custom_gradient_holds_whatever_vmap_does(mode):
    # torch differentiates the body of vmap instead, which would lose the rule here.
    made = layer(lambda ctx, x: jnp.round(x), vmap=lambda info, in_dims, x: (jnp.round(x), in_dims[0]))
    assert mode(jax.grad(lambda x: jax.vmap(made.apply)(x).sum()))(X).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_vmap_method_of_numpy(transform):
    ours = functools.partial(TRANSFORMS[transform], loss(lambda x: NumpyScale.apply(x, X)))
    if transform.count("grad") > 1:
        with pytest.raises(RuntimeError, match="NumpyScale"):
            ours()
        return
    assert_same(ours(), jax.jit(lambda: TRANSFORMS[transform](loss(lambda x: x * X)))())
    assert "NumpyScale" in calls


def test_numpy_in_a_class_with_vmap_needs_host():
    made = layer(lambda ctx, x: np.asarray(x) * 2, vmap=lambda info, dims, x: (np.asarray(x) * 2, 0))
    with pytest.raises(jax.errors.TracerArrayConversionError) as caught:
        jax.vmap(made.apply)(MANY)
    assert "host = True" in text_of(caught.value)


WRONG = {
    "no pair": lambda info, dims, x: x,
    "one dim": lambda info, dims, x: ((x, x.sum(-1)), (0,)),
    "text": lambda info, dims, x: ((x, x.sum(-1)), (0, "first")),
    "another dim": lambda info, dims, x: ((x, x.sum(-1)), (1, 0)),
    "shape": lambda info, dims, x: ((x, x), 0),
    "one output": lambda info, dims, x: (x, 0),
    "a dict": lambda info, dims, x: ({"y": x, "sum": x.sum(-1)}, 0),
}


@pytest.mark.parametrize("vmap", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("around", [jax.jit, lambda f: jax.grad(lambda x: f(x)[0].sum())])
def test_what_vmap_must_return(vmap, around):
    made = layer(lambda ctx, x: (x * 2, x.sum()), lambda ctx, dy, ds: dy * 2 + ds, vmap=vmap)
    with pytest.raises(ValueError, match=r"Made\.vmap"):
        around(jax.vmap(made.apply))(MANY)


def test_an_empty_batch_goes_to_vmap():
    made = layer(lambda ctx, x: x * 2, vmap=lambda info, dims, x: (x * 2, 0))
    assert jax.vmap(made.apply)(MANY[:0]).shape == (0, 4)


def test_both_rules_are_refused():
    with pytest.raises(RuntimeError, match=r"Both.*generate_vmap_rule"):
        type("Both", (HostCube,), {"generate_vmap_rule": True})


def test_generate_vmap_rule_is_jaxs_own_batching():
    made = layer(lambda x: x**3, lambda x, dy: 3 * dy * x**2, Function, plain=True, generate_vmap_rule=True)
    ours, plain = (jax.vmap(jax.grad(loss(f)))(MANY) for f in (made.apply, lambda x: x**3))
    assert_same(ours, plain)


def test_forward_mode_of_a_layer_with_vmap_alone_is_an_error():
    with pytest.raises(TypeError, match=r"HostCube.*forward_mode"):
        jax.jvp(HostCube.apply, (X,), (X,))


# -- the name of a mapped axis ---------------------------------------------------------------------


def rank_like(x):
    return jax.lax.axis_index("b").astype(x.dtype)


def of_rank(ctx, x):
    """Keeps what only the place in the batch tells."""
    rank = rank_like(x)
    ctx.save_for_backward(rank)
    ctx.mask = rank > 0
    return x * rank


def sum_of_ranks(x):
    return jax.lax.psum(x * rank_like(x), "b")


OF_RANK = {
    "of rank": (of_rank, lambda ctx, dy: jnp.where(ctx.mask, dy * ctx.saved_tensor()[0], 0)),
    "sum of ranks": (lambda ctx, x: sum_of_ranks(x), lambda ctx, dy: jax.lax.psum(dy, "b") * rank_like(dy)),
}


def over(f, *axes):
    return jax.vmap(f, axes or 0, axis_name="b")


def over_both(name, g):
    # Mapped, and shared by all examples: a collective over an axis that no operand has is JAX's error.
    shared = g if name == "of rank" else jnp.cos
    return lambda x, w: (over(lambda x, w: jnp.sin(g(x)) * shared(w), 0, None)(x, w) ** 2).sum()


RANK_WAYS = {
    "vmap of grad": lambda g, _: over(jax.grad(lambda x: g(jnp.sin(jax.checkpoint(g)(x)))))(RANKED),
    "grad of vmap": lambda g, f: jax.grad(f, (0, 1))(RANKED, RANKED[0]),
    "second order": lambda g, f: jax.grad(lambda x, w: (jax.grad(f)(x, w) ** 2).sum(), (0, 1))(RANKED, RANKED[0]),
}
FORWARD_RANK_WAYS = {
    "vmap of jvp": lambda g, _: over(lambda x: jax.jvp(g, (RANKED[0],), (RANKED[0],))[1] * x)(RANKED),
    "hessian": lambda g, f: jax.jacfwd(jax.grad(f))(RANKED, RANKED[0]),
}


@functools.cache
def of_plain_ranks(name, way):
    plain = (lambda x: x * rank_like(x)) if name == "of rank" else sum_of_ranks
    return jax.jit(lambda: (RANK_WAYS | FORWARD_RANK_WAYS)[way](plain, over_both(name, plain)))()


@pytest.mark.parametrize("forward_mode", [False, True], ids=["", "forward mode"])
@EAGER_AND_JIT
@pytest.mark.parametrize("name", OF_RANK)
def test_what_depends_on_the_index_along_a_mapped_axis(name, mode, forward_mode):
    made = layer(*OF_RANK[name], forward_mode=forward_mode).apply
    for way, of in (RANK_WAYS | (FORWARD_RANK_WAYS if forward_mode else {})).items():
        assert_same(mode(functools.partial(of, made, over_both(name, made)))(), of_plain_ranks(name, way))


# -- a named axis, of which the examples share the operands of a layer -----------------------------


MappedTanh = layer(
    base=Tanh,
    name="MappedTanh",
    vmap=lambda info, in_dims, x: (jnp.tanh(front(x, in_dims[0], info.batch_size)), 0),
)


def applying(inner):
    """tanh(tanh(x)), by layers in both methods."""

    def backward(x, dy):
        y = inner.apply(x)
        return dy * (1 - inner.apply(y) ** 2) * (1 - inner.apply(x) ** 2)

    return layer(lambda x: inner.apply(inner.apply(x)), backward, plain=True).apply


OUTER, INNER = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 0.7])


def over_outer(f):
    return jax.vmap(f, axis_name="i")(OUTER).sum()


SHARING = {
    "one map": lambda f, b: over_outer(lambda x: x * f(b)),
    "the outer map": lambda f, b: over_outer(lambda x: x * jax.vmap(lambda z: f(z * b))(INNER)),
    "the inner map": lambda f, b: over_outer(lambda x: jax.vmap(lambda z: z * f(x * b), axis_name="j")(INNER)),
    "a scan in a map": lambda f, b: over_outer(
        lambda x: x * jax.lax.scan(lambda c, _: (f(c), f(b)), b, None, length=2)[1].sum()
    ),
}


ORDERS = jax.grad, SECOND["grad of grad"]
SHARED_BY_ALL = jnp.float32(0.3)


@functools.cache
def without_layers(sharing):
    plain = functools.partial(SHARING[sharing], lambda x: jnp.tanh(jnp.tanh(x)))
    return [jax.jit(order(plain))(SHARED_BY_ALL) for order in ORDERS]


@pytest.mark.parametrize(
    ("around", "within"),
    [(lambda f: f, lambda f: f), (jax.jit, jax.jit), (jax.checkpoint, lambda f: f)],
    ids=["eager", "jitted layer in jit", "remat"],
)
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("inner", [Tanh, ForwardTanh, MappedTanh])
def test_layers_in_methods_never_count_twice_where_examples_share_their_operands(inner, sharing, within, around):
    found = around(functools.partial(SHARING[sharing], within(applying(inner))))
    for order, right in zip(ORDERS, without_layers(sharing), strict=True):
        try:
            gradient = order(found)(SHARED_BY_ALL)
        except ValueError:  # of JAX, where the layer has a `vmap` of its own: another number would be worse
            assert inner is MappedTanh
            continue
        np.testing.assert_allclose(gradient, right, rtol=1e-4)


def test_backward_runs_once_in_maps_without_a_name():
    counts = layer(base=Tanh, backward=lambda ctx, dy: calls.append("backward") or Tanh.backward(ctx, dy))
    f = lambda b: jax.vmap(lambda x: x * jax.vmap(lambda z: counts.apply(z * b))(INNER))(OUTER).sum()  # noqa: E731
    jax.grad(f)(jnp.float32(0.3))
    assert calls == ["backward"]


@EAGER_AND_JIT
@pytest.mark.parametrize("axis_name", [{}, {"axis_name": "i"}], ids=["unnamed", "named"])
@pytest.mark.parametrize("forward_mode", [False, True])
def test_backward_gets_the_cotangent_of_each_example_for_a_shared_argument(forward_mode, axis_name, mode):
    """A backward that is not linear has another gradient for the sum of the cotangents."""
    rule = lambda a, b, dy: (dy, jnp.tanh(dy) * 2 * b)  # noqa: E731
    made, b = layer(lambda a, b: a + b * b, rule, plain=True, forward_mode=forward_mode), jnp.float32(0.7)
    gradient = jax.grad(lambda b: jnp.vdot(WEIGHTS, jax.vmap(made.apply, (0, None), **axis_name)(X, b)))
    expected = 2 * jnp.sum(jnp.tanh(WEIGHTS))
    np.testing.assert_allclose(mode(gradient)(b), expected * b, rtol=1e-5)
    np.testing.assert_allclose(mode(jax.grad(gradient))(b), expected, rtol=1e-5)


# -- collectives of a value that all examples share --------------------------------------------------------


COLLECTIVES = {
    "psum": lambda x: jax.lax.psum(jnp.sin(x), "i"),
    "axis_index": lambda x: x * jax.lax.axis_index("i").astype(x.dtype),
    "all_gather": lambda x: jax.lax.all_gather(x * x, "i").sum(0),
    "none": jnp.sin,
}


def with_rule_of(f, **members):
    """Return a layer whose backward is the derivative of its forward."""
    return layer(f, lambda x, dy: jax.vjp(f, x)[1](dy)[0], plain=True, **members).apply


def shared(f, out_axes=0):
    """Return a function of `(xs, y)` that maps over xs, and applies f to y, which all examples share."""
    return jax.vmap(lambda x, y: f(y) if out_axes is None else f(y) * x, (0, None), out_axes, axis_name="i")


SHARED = {
    "out_axes None": lambda f: shared(f, None),
    "out_axes 0": shared,
    "jitted layer": lambda f: shared(jax.jit(f)),
    "in an unnamed map": lambda f: lambda xs, y: jax.vmap(lambda z: shared(f)(xs, y * z) + shared(f)(xs, y) * z)(xs),
    "in a named map": lambda f: lambda xs, y: jax.vmap(lambda z: shared(f)(xs, y * z), axis_name="j")(xs),
    "around an unnamed map": lambda f: shared(lambda y: jax.vmap(lambda z: f(y) * z)(OUTER).sum()),
    "around a named map": lambda f: shared(lambda y: jax.vmap(lambda z: f(y) * z, axis_name="j")(OUTER).sum()),
    "in a scan": lambda f: shared(lambda y: jax.lax.scan(lambda c, _: (jnp.sin(f(c)), None), y, None, length=2)[0]),
    "vmap of grad": lambda f: jax.vmap(
        jax.grad(lambda x, y: x * f(y), (0, 1)), (0, None), axis_name="i"
    ),
}  # fmt: skip
# In reverse mode these are an error of JAX for a custom_vjp function, whose backward runs outside of the map.
GRADIENTS_OF_SHARED = {
    "grad of vmap": lambda f: jax.grad(lambda xs, y: jnp.sum(shared(f)(xs, y) ** 2), (0, 1)),
    "grad of a shared output": lambda f: jax.grad(lambda xs, y: jnp.sin(jnp.sum(shared(f, None)(xs, y))), 1),
    "grad of nested maps": lambda f: jax.grad(lambda xs, y: jnp.sum(SHARED["in an unnamed map"](f)(xs, y) ** 2), 1),
}


@functools.cache
def without_a_layer(name, way):
    return jax.jit((SHARED | GRADIENTS_OF_SHARED)[way](COLLECTIVES[name]))(OUTER, SHARED_BY_ALL)


@pytest.mark.parametrize("way", [*SHARED, *GRADIENTS_OF_SHARED])
@pytest.mark.parametrize(
    ("name", "mode"),
    [("psum", lambda f: f), *(pytest.param(name, jax.jit, marks=pytest.mark.slow) for name in COLLECTIVES)],
)
@pytest.mark.parametrize("forward_mode", [False, True], ids=["", "forward mode"])
def test_a_collective_of_a_value_that_all_examples_share(name, mode, way, forward_mode):
    if name == "axis_index" and way in ("out_axes None", "grad of a shared output", "in a scan"):
        return  # plain code fails too
    made = with_rule_of(COLLECTIVES[name], forward_mode=forward_mode)
    try:
        found = mode((SHARED | GRADIENTS_OF_SHARED)[way](made))(OUTER, SHARED_BY_ALL)
    except NameError:  # of JAX, as for a hand-written custom_vjp: another number would be worse
        assert way in GRADIENTS_OF_SHARED
        assert not forward_mode
        return
    assert_same(found, without_a_layer(name, way))


@EAGER_AND_JIT
@pytest.mark.parametrize("value", [2.0, 2, np.float32(2), jnp.float32(2)])
def test_the_sum_of_a_number_that_all_examples_share(mode, value):
    made = layer(lambda ctx, x: jax.lax.psum(x, "i"))
    for out_axes, expected in ((None, 8), (0, [8] * 4)):
        f = jax.vmap(lambda _, x: mode(made.apply)(x), (0, None), out_axes, axis_name="i")
        assert f(jnp.arange(4.0), value).tolist() == expected
    with pytest.raises(ValueError, match="at least one tensor"):
        jax.vmap(layer(lambda ctx, x: 2.0).apply)(X)


def test_an_intermediate_that_jax_cannot_batch_is_told_to_be_an_output():
    def host_order(x):
        return jax.pure_callback(lambda v: np.argsort(v).astype(np.int32), jax.ShapeDtypeStruct(x.shape, jnp.int32), x)

    def forward(ctx, x):
        order = host_order(x)
        ctx.save_for_backward(order)
        return x[order]

    def backward(ctx, dy):
        return dy[jnp.argsort(ctx.saved_tensors[0])]

    sorts = layer(forward, backward, name="Sorts", vmap=lambda info, in_dims, x: (jnp.sort(x), in_dims[0]))
    for mode in jax.jit(jax.vmap(sorts.apply)), jax.vmap(jax.grad(lambda x: sorts.apply(x)[0])):
        with pytest.raises(NotImplementedError, match="pure_callback") as caught:
            mode(MANY)
        assert re.search(r"Sorts\.forward.*one more output", text_of(caught.value))


WITHOUT_GRADIENT = {
    "one": lambda f: f,
    "vmap of another axis": lambda f: jax.vmap(f, 1),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f, 1), 2),
    "vmap of jit of vmap": lambda f: jax.vmap(jax.jit(jax.vmap(f, 1)), 2),
}


@pytest.mark.parametrize("way", WITHOUT_GRADIENT)
def test_a_program_that_is_not_differentiated_is_traced_about_as_fast_as_by_hand(way):
    """Count the calls, JAX's included, and compare values and a later gradient, for a square shape."""
    by_hand = jax.custom_vjp(jnp.tanh)
    by_hand.defvjp(lambda x: (jnp.tanh(x),) * 2, lambda y, dy: (dy * (1 - y**2),))
    x = jnp.linspace(-1.0, 1.0, 4**5).reshape((4,) * 5)

    def chain(f, between=lambda x: x.T):
        return WITHOUT_GRADIENT[way](lambda x: functools.reduce(lambda x, _: between(f(x)), range(10), x))

    def calls_of(f):
        return python_calls(lambda: jax.jit(chain(f, lambda y: y)).trace(x))

    if "of jit" not in way:  # an inner jit is traced once, and its cache answers then
        assert calls_of(Tanh.apply) <= 1.45 * calls_of(by_hand)
    gradients = [jax.grad(lambda x, f=f: jnp.sum(jax.jit(chain(f))(x) ** 2))(x) for f in (Tanh.apply, jnp.tanh)]
    assert_same(jax.jit(chain(Tanh.apply))(x), chain(jnp.tanh)(x))
    assert_same(*gradients)
