"""Layers in a batch: their own `vmap`, what info and dims it gets, and the name of a mapped axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer
from tests.kit.case import Case
from tests.kit.layers import Tanh, layer, text_of
from tests.kit.modes import EAGER_AND_JIT, STAGED
from tests.kit.transforms import TRANSFORMS, assert_same, compare

X = jnp.array([0.3, -0.2, 1.2, 0.5])
MANY = jnp.stack([X, X[::-1] * 0.5, X * X])
WEIGHTS = jnp.arange(1.0, 5.0)

calls: list[str] = []


class HostSine(PyLayer):
    """Host code, which JAX cannot batch. It returns a marked output and a static too, and saves intermediates."""

    forward_mode = True

    @staticmethod
    def forward(ctx, x, n):
        square, sign = x * x, jnp.sign(x)
        y = jax.pure_callback(np.sin, jax.typeof(square), square)
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


def in_plain_jax(x):
    return jnp.sin(x * x) + jnp.sign(x)


# Transforms with a vmap, around a layer as it is and in staged code; and others around a layer in a vmap.
VMAPS = [(name, within) for name in TRANSFORMS if "vmap" in name for within in ("", *STAGED)]
VMAPS += [(name, "vmap") for name in ("grad", "jit_of_grad", "grad_of_vmap", "grad_of_grad", "hessian")]


@pytest.mark.parametrize(("transform", "within"), VMAPS)
def test_vmap_calls_the_layers_own(transform, within):
    calls.clear()
    # A function of its own, which nothing has staged.
    layer = (STAGED | {"": lambda f: f, "vmap": jax.vmap})[within](lambda x: sine_and_sign(x))
    compare(Case("HostSine", layer, in_plain_jax, (MANY,)), transform)
    assert "HostSine" in calls


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
    x, a = ({0: MANY, 1: MANY.T, None: X}[axis] for axis in axes)
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
        total = lambda x, name=name: made.apply(x)[name].sum()
        assert_same(mode(jax.vmap(jax.grad(total)))(square), jnp.full_like(square, factor))
        assert_same(mode(jax.grad(lambda x, f=total: jax.vmap(f)(x).sum()))(square), jnp.full_like(square, factor))


def test_what_the_examples_share_is_kept_once():
    scale = layer(
        jnp.multiply,
        lambda x, w, dy: (dy * w, dy * x),
        plain=True,
        vmap=lambda info, in_dims, x, w: (front(x, in_dims[0], info.batch_size) * front(w, in_dims[1], 1), 0),
    )
    _, pull = jax.vjp(lambda x: jax.vmap(scale.apply, (0, None))(x, X), MANY)
    shapes = [leaf.shape for leaf in jax.tree.leaves(pull)]
    assert X.shape in shapes
    assert shapes.count(MANY.shape) == 1


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


# Layers, and the functions that they are.
OF_RANK = {
    "of rank": (
        of_rank,
        lambda ctx, dy: jnp.where(ctx.mask, dy * ctx.saved_tensor()[0], 0),
        lambda x: x * rank_like(x),
    ),
    "sum of ranks": (
        lambda ctx, x: sum_of_ranks(x),
        lambda ctx, dy: jax.lax.psum(dy, "b") * rank_like(dy),
        sum_of_ranks,
    ),
}


@pytest.mark.parametrize("forward_mode", [False, True], ids=["", "forward mode"])
@EAGER_AND_JIT
@pytest.mark.parametrize("name", OF_RANK)
def test_what_depends_on_the_index_along_a_mapped_axis(name, mode, forward_mode):
    def total(f):
        # A collective of a value that all examples share is JAX's error.
        shared = f if name == "of rank" else jnp.cos
        mapped = jax.vmap(lambda x, w: jnp.sin(f(x)) * shared(w), (0, None), axis_name="b")
        return lambda x, w: (mapped(x, w) ** 2).sum()

    forward, backward, plain = OF_RANK[name]
    ours = total(layer(forward, backward, forward_mode=forward_mode).apply)
    args = jnp.array([0.5, -1.0, 2.0]), jnp.float32(0.5)
    for derivative in (lambda f: jax.grad(f, (0, 1)), lambda f: jax.jacrev(jax.grad(f)), jax.hessian):
        assert_same(mode(derivative(ours))(*args), jax.jit(derivative(total(plain)))(*args))


# -- a value that all examples of a named axis share: its gradient counts once, or each example's part -----


OUTER, SHARED_BY_ALL = jnp.array([1.0, 2.0, 3.0]), jnp.float32(0.3)
FUNCTIONS = {
    "psum": lambda x: jax.lax.psum(jnp.sin(x), "i"),
    "axis_index": lambda x: x * jax.lax.axis_index("i").astype(x.dtype),
    "all_gather": lambda x: jax.lax.all_gather(x * x, "i").sum(0),
    "none": jnp.sin,
    "layers": lambda x: jnp.tanh(jnp.tanh(x)),  # in forward and in backward
    "layers with a vmap": lambda x: jnp.tanh(jnp.tanh(x)),
}


def layer_of(name, forward_mode):
    """Return a layer of one of these functions, whose backward is its derivative."""
    f = FUNCTIONS[name]
    if "layers" not in name:
        return layer(f, lambda x, dy: jax.vjp(f, x)[1](dy)[0], plain=True, forward_mode=forward_mode).apply
    batch = lambda info, in_dims, x: (jnp.tanh(front(x, in_dims[0], info.batch_size)), 0)
    inner = layer(base=Tanh, forward_mode=forward_mode, **({"vmap": batch} if "vmap" in name else {}))

    def backward(x, dy):
        y = inner.apply(x)
        return dy * (1 - inner.apply(y) ** 2) * (1 - inner.apply(x) ** 2)

    return layer(lambda x: inner.apply(inner.apply(x)), backward, plain=True).apply


def shared(f, out_axes=0):
    """Return a function of `(xs, y)` that maps over xs, and applies f to y, which all examples share."""
    return jax.vmap(lambda x, y: f(y) if out_axes is None else f(y) * x, (0, None), out_axes, axis_name="i")


def nested(f):
    return lambda xs, y: jax.vmap(lambda z: shared(f)(xs, y * z) + shared(f)(xs, y) * z)(xs)


def around_a_map(f):
    return shared(lambda y: jax.vmap(lambda z: f(y * z) * z)(OUTER).sum())


def in_a_scan(f):
    return shared(lambda y: jax.lax.scan(lambda c, _: (jnp.sin(f(c)), f(y)), y, None, length=2)[1].sum())


def gradient(g, argnums=1):
    return jax.grad(lambda xs, y: jnp.sum(jnp.sin(g(xs, y))), argnums)


SHARED = {
    "out_axes None": lambda f: shared(f, None),
    "out_axes 0": shared,
    "in an unnamed map": nested,
    "in a named map": lambda f: lambda xs, y: jax.vmap(lambda z: shared(f)(xs, y * z), axis_name="j")(xs),
    "in a scan": in_a_scan,
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x, y: x * f(y), (0, 1)), (0, None), axis_name="i"),
}
# In reverse mode these are an error of JAX for a custom_vjp function of a collective, whose backward runs outside of
# the map.
GRADIENTS_OF_SHARED = {
    "grad of vmap": lambda f: gradient(shared(f), (0, 1)),
    "grad of a shared output": lambda f: gradient(shared(f, None)),
    "grad of nested maps": lambda f: gradient(nested(f)),
    "grad of grad of vmap": lambda f: gradient(gradient(shared(f))),
    "grad of grad of a scan in a map": lambda f: gradient(gradient(in_a_scan(f))),
    "grad of grad of a map in a map": lambda f: gradient(gradient(around_a_map(f))),
    "grad of checkpoint of vmap": lambda f: gradient(jax.checkpoint(shared(f))),
}


@functools.cache
def without_a_layer(name, way):
    return jax.jit((SHARED | GRADIENTS_OF_SHARED)[way](FUNCTIONS[name]))(OUTER, SHARED_BY_ALL)


EAGER = [(name, lambda f: f) for name in ("psum", "layers")]
COMPILED = [pytest.param(name, jax.jit, marks=pytest.mark.slow) for name in FUNCTIONS]


@pytest.mark.parametrize("way", SHARED | GRADIENTS_OF_SHARED)
@pytest.mark.parametrize(("name", "mode"), [*EAGER, *COMPILED])
@pytest.mark.parametrize("forward_mode", [False, True], ids=["", "forward mode"])
def test_a_function_of_a_value_that_all_examples_share(name, mode, way, forward_mode):
    if name == "axis_index" and way in ("out_axes None", "grad of a shared output"):
        return  # plain code fails too
    function = (SHARED | GRADIENTS_OF_SHARED)[way](layer_of(name, forward_mode))
    try:
        found = mode(function)(OUTER, SHARED_BY_ALL)
    except (NameError, ValueError) as error:  # of JAX, as for a hand-written custom_vjp: another number would be worse
        of_collective = isinstance(error, NameError) and "layers" not in name and not forward_mode
        assert way in GRADIENTS_OF_SHARED
        assert of_collective or name == "layers with a vmap"
        return
    assert_same(found, without_a_layer(name, way))


@EAGER_AND_JIT
@pytest.mark.parametrize("axis_name", [{}, {"axis_name": "i"}], ids=["unnamed", "named"])
@pytest.mark.parametrize("forward_mode", [False, True])
def test_backward_gets_the_cotangent_of_each_example_for_a_shared_argument(forward_mode, axis_name, mode):
    """A backward that is not linear has another gradient for the sum of the cotangents."""
    rule = lambda a, b, dy: (dy, jnp.tanh(dy) * 2 * b)
    made, b = layer(lambda a, b: a + b * b, rule, plain=True, forward_mode=forward_mode), jnp.float32(0.7)
    gradient = jax.grad(lambda b: jnp.vdot(WEIGHTS, jax.vmap(made.apply, (0, None), **axis_name)(X, b)))
    expected = 2 * jnp.sum(jnp.tanh(WEIGHTS))
    np.testing.assert_allclose(mode(gradient)(b), expected * b, rtol=1e-5)
    np.testing.assert_allclose(mode(jax.grad(gradient))(b), expected, rtol=1e-5)


@EAGER_AND_JIT
def test_a_gradient_that_one_of_two_maps_batches_counts_once_for_each_example_of_both(mode):
    made = layer(lambda a, b: a * b, lambda a, b, dy: (a, b), plain=True)
    gradient = jax.grad(lambda a, b: jax.vmap(lambda x: jax.vmap(lambda y: made.apply(x, y))(b))(a).sum(), (0, 1))
    np.testing.assert_allclose(jnp.concatenate(mode(gradient)(X, X[:3])), jnp.concatenate([3 * X, 4 * X[:3]]))


@EAGER_AND_JIT
@pytest.mark.parametrize("value", [np.float32(2), jnp.float32(2)])
def test_the_sum_of_a_scalar_that_all_examples_share(mode, value):
    made = layer(lambda ctx, x: jax.lax.psum(x, "i"))
    for out_axes, expected in ((None, 8), (0, [8] * 4)):
        f = jax.vmap(lambda _, x: mode(made.apply)(x), (0, None), out_axes, axis_name="i")
        assert f(jnp.arange(4.0), value).tolist() == expected
    with pytest.raises(ValueError, match="at least one tensor"):
        jax.vmap(layer(lambda ctx, x: 2.0).apply)(X)


def test_the_error_of_an_intermediate_that_jax_cannot_batch_names_forward():
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
        assert "Sorts.forward" in text_of(caught.value)
