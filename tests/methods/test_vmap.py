"""A layer's own batching, and what info and dims it gets."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer
from tests.kit.transforms import assert_same

pytestmark = pytest.mark.own_primitive

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
    """Host code, which JAX cannot batch; a pytree and a static among the outputs, two intermediates among the saved."""

    forward_mode = True

    @staticmethod
    def forward(ctx, x, n):
        square = x * x
        y = on_host(np.sin, square)
        ctx.save_for_backward(square, x, y * 2)
        return {"y": y, "n": n}

    @staticmethod
    def backward(ctx, g):
        square, x, double = ctx.saved_tensor()
        nothing = double / 2 - jnp.sin(square)  # and its derivative too, if double has that of the output
        return g["y"] * (jnp.cos(square) + nothing) * 2 * x

    @staticmethod
    def vmap(info, in_dims, x, n):
        calls.append("HostSine")
        assert in_dims[1] is None
        assert info.randomness == "error"
        assert x.shape[in_dims[0]] == info.batch_size
        x = jnp.moveaxis(x, in_dims[0], -1)
        return {"y": HostSine.apply(x, n)["y"], "n": n}, {"y": -1, "n": None}


class HostCube(Function):
    """As in torch: what is kept is told by setup_context, an intermediate that comes from the output among it."""

    @staticmethod
    def forward(x):
        return on_host(lambda v: v**3, x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output * 2)

    @staticmethod
    def backward(ctx, dy):
        x, double = ctx.saved_tensors
        return dy * (1.5 * double / x)

    @staticmethod
    def vmap(info, in_dims, x):
        calls.append("HostCube")
        return HostCube.apply(x), in_dims[0]


LAYERS = {
    "HostSine": (lambda x: HostSine.apply(x, 3)["y"], lambda x: jnp.sin(x * x)),
    "HostCube": (HostCube.apply, lambda x: x**3),
}


def loss(layer):
    return lambda x: jnp.sum(jnp.sin(layer(x)) * WEIGHTS)


def mapped(f):
    return lambda xs: jnp.sum(jax.vmap(f)(xs) ** 2)


def along(f):
    return lambda x: jnp.sum(jax.grad(f)(x) * jnp.cos(x))


# From a function of X to numbers.
TRANSFORMS = {
    "vmap": lambda f: jax.vmap(f)(MANY),
    "vmap of axis 1": lambda f: jax.vmap(f, in_axes=1)(MANY.T),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(MANY),
    "grad of vmap": lambda f: jax.grad(mapped(f))(MANY),
    "vmap of grad of grad": lambda f: jax.vmap(jax.grad(along(f)))(MANY),
    "grad of grad of vmap": lambda f: jax.grad(along(mapped(f)))(MANY),
    "grad of vmap of grad": lambda f: jax.grad(lambda xs: jnp.sum(jax.vmap(jax.grad(f))(xs) ** 2))(MANY),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f))(jnp.stack([MANY, MANY * 2])),
    "grad of vmap of vmap": lambda f: jax.grad(mapped(mapped(f)))(jnp.stack([MANY, MANY * 2])),
    "vmap of grad of vmap": lambda f: jax.vmap(jax.grad(mapped(f)))(jnp.stack([MANY, MANY * 2])),
    "vmap of jit": lambda f: jax.vmap(jax.jit(f))(MANY),
    "grad of vmap of jit": lambda f: jax.grad(mapped(jax.jit(f)))(MANY),
    "grad of jit of vmap": lambda f: jax.grad(jax.jit(mapped(f)))(MANY),
    "vmap of jit of grad": lambda f: jax.vmap(jax.jit(jax.grad(f)))(MANY),
    "vmap of scan": lambda f: jax.vmap(_scanned(f))(MANY),
    "grad of vmap of scan": lambda f: jax.grad(mapped(_scanned(f)))(MANY),
    "vmap of remat": lambda f: jax.vmap(jax.grad(jax.checkpoint(f)))(MANY),
}

FORWARD = {
    "jvp of vmap": lambda f: jax.jvp(jax.vmap(f), (MANY,), (MANY,)),
    "vmap of jvp": lambda f: jax.vmap(lambda x: jax.jvp(f, (x,), (x,)))(MANY),
    "vmap of hessian": lambda f: jax.vmap(jax.hessian(f))(MANY),
}


def _scanned(f):
    return lambda x: jax.lax.scan(lambda c, _: (c + f(c), f(c)), x, None, length=2)[1].sum()


@functools.cache
def without_layer(name, transform):
    return jax.jit(lambda: TRANSFORMS[transform](loss(LAYERS[name][1])))()


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_vmap_calls_the_layers_own(name, transform, staged):
    ours = functools.partial(TRANSFORMS[transform], loss(LAYERS[name][0]))
    assert_same((jax.jit(ours) if staged else ours)(), without_layer(name, transform))
    assert name in calls


@pytest.mark.parametrize("transform", FORWARD)
def test_forward_mode_of_a_batch(transform):
    ours, plain = LAYERS["HostSine"]
    assert_same(FORWARD[transform](loss(ours)), jax.jit(lambda: FORWARD[transform](loss(plain)))())
    assert "HostSine" in calls


def test_without_vmap_the_layer_runs_as_it_is():
    ours, plain = LAYERS["HostSine"]
    assert_same(jax.jit(jax.grad(along(loss(ours))))(X), jax.jit(jax.grad(along(loss(plain))))(X))
    assert calls == []


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

        def front(value, dim):
            return (
                jnp.broadcast_to(value, (info.batch_size, *value.shape)) if dim is None else jnp.moveaxis(value, dim, 0)
            )

        a = front(tree["a"], in_dims[1]["a"])
        total = a.sum(-1) if in_dims[1]["a"] is not None else tree["a"].sum()
        return (front(x, in_dims[0]) * a * n * scale, total), (0, None if in_dims[1]["a"] is None else 0)


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
def test_what_vmap_gets(staged):
    def ours(x, a, s):
        return sum(jnp.sum(v) for v in Shares.apply(x, {"a": a, "s": "static"}, 2, scale=s))

    def plain(x, a, s):
        return jnp.sum(x * a * 2 * s) + a.sum()

    around = jax.jit if staged else lambda f: f
    for axes in [(0, None, None), (None, 0, None), (1, 0, None)]:
        args = [MANY.T if d == 1 else MANY if d == 0 else X for d in axes[:2]] + [jnp.array(0.5)]
        Shares.seen.clear()

        def of(f, axes=axes):
            return around(jax.grad(lambda *a: jnp.sum(jnp.sin(jax.vmap(f, axes)(*a))), (0, 1, 2)))

        assert_same(of(ours)(*args), of(plain)(*args))
        size, dims, x_shape, a_shape, n = Shares.seen[0]
        assert (size, n) == (3, 2)
        assert dims == (axes[0], {"a": axes[1], "s": None}, None, None)
        assert x_shape == args[0].shape
        assert a_shape == args[1].shape


class NumpyScale(Function):
    """Saves an argument that the examples share, and in eager mode needs numbers."""

    @staticmethod
    def forward(x, w):
        return np.asarray(x) * np.asarray(w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, jnp.sum(inputs[1]))

    @staticmethod
    def backward(ctx, dy):
        x, w, total = ctx.saved_tensors
        return dy * w, dy * x + 0 * total

    @staticmethod
    def vmap(info, in_dims, x, w):
        calls.append("NumpyScale")
        x, w = (np.moveaxis(np.asarray(v), d, 0) if d is not None else v for v, d in zip((x, w), in_dims, strict=True))
        return x * np.asarray(w), 0


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 0)])
def test_what_the_examples_share(axes):
    args = [MANY.T if d == 1 else MANY if d == 0 else X for d in axes]

    def value(layer):
        return lambda *a: jnp.sum(jnp.sin(jax.vmap(layer, axes)(*a)))

    assert_same(jax.grad(value(NumpyScale.apply), (0, 1))(*args), jax.grad(value(jnp.multiply), (0, 1))(*args))
    each = [
        jax.vmap(jax.grad(lambda x, w, f=f: jnp.sum(f(x, w)), (0, 1)), axes) for f in (NumpyScale.apply, jnp.multiply)
    ]
    assert_same(each[0](*args), each[1](*args))
    twice = [
        jax.grad(lambda a, f=f: jnp.sum(jnp.cos(jax.grad(value(f))(a, args[1]))))
        for f in (NumpyScale.apply, jnp.multiply)
    ]
    assert_same(twice[0](args[0]), twice[1](args[0]))
    assert "NumpyScale" in calls


def test_what_the_examples_share_is_kept_once():
    pull = jax.vjp(lambda x: jax.vmap(NumpyScale.apply, (0, None))(x, X), MANY)[1]
    shapes = [leaf.shape for leaf in jax.tree_util.tree_leaves(pull)]
    assert X.shape in shapes
    assert shapes.count(MANY.shape) == 1


def test_the_custom_gradient_holds_whatever_vmap_does():
    # torch differentiates the body of vmap instead, which would lose the rule here.
    class StraightThrough(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return jnp.round(x)

        @staticmethod
        def backward(ctx, dy):
            return dy

        @staticmethod
        def vmap(info, in_dims, x):
            return jnp.round(x), in_dims[0]

    for around in (lambda f: f, jax.jit):
        assert around(jax.grad(lambda x: jax.vmap(StraightThrough.apply)(x).sum()))(X).tolist() == [1, 1, 1, 1]


class NumpySort(Function):
    """Host code without a callback: in eager mode alone."""

    @staticmethod
    def forward(x):
        x = np.asarray(x)
        order = np.argsort(x)
        return np.sort(x), order

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx, dy, _):
        (order,) = ctx.saved_tensors
        return jnp.zeros_like(dy).at[order].set(dy, unique_indices=True)

    @staticmethod
    def vmap(info, in_dims, x):
        calls.append("NumpySort")
        x = jnp.moveaxis(x, in_dims[0], 0)
        order = np.argsort(np.asarray(x), -1)
        return (np.sort(np.asarray(x), -1), order), 0


@pytest.mark.parametrize(
    "transform", [t for t in TRANSFORMS if "jit" not in t and "scan" not in t and "remat" not in t]
)
def test_numpy_without_a_callback_in_eager_mode(transform):
    run = TRANSFORMS[transform]
    if transform.count("vmap") > 1:  # vmap itself is mapped, and NumPy is not
        with pytest.raises(jax.errors.TracerArrayConversionError) as caught:
            run(loss(lambda x: NumpySort.apply(x)[0]))
        assert any("NumpySort.vmap" in note for note in caught.value.__notes__)
        return
    assert_same(run(loss(lambda x: NumpySort.apply(x)[0])), run(loss(jnp.sort)))
    assert "NumpySort" in calls


def wrong(vmap):
    class Wrong(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 2, x.sum()

        @staticmethod
        def backward(ctx, dy, ds):
            return dy * 2 + ds

    Wrong.vmap = staticmethod(vmap)

    class Layer(Wrong):
        pass

    return Layer


@pytest.mark.parametrize(
    ("vmap", "message"),
    [
        (lambda info, dims, x: x, r"Layer.vmap returned .*expected a pair \(outputs, out_dims\)"),
        (
            lambda info, dims, x: ((x, x.sum(-1)), (0,)),
            r"Layer.vmap: expected out_dims of the structure of the outputs",
        ),
        (lambda info, dims, x: ((x, x.sum(-1)), (0, "first")), r"Layer.vmap: expected out_dims .* with an int or None"),
        (lambda info, dims, x: ((x, x.sum(-1)), (1, 0)), r"Layer.vmap: out_dims says that output 0, .* size 3 at 1"),
    ],
)
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_what_vmap_must_return(vmap, message, around):
    with pytest.raises(ValueError, match=message):
        around(jax.vmap(wrong(vmap).apply))(MANY)


@pytest.mark.parametrize(
    ("vmap", "message"),
    [
        (lambda info, dims, x: ((x, x), 0), r"Layer.vmap, output 1: expected dtype float32 and shape \(3,\).*\(3, 4\)"),
        (lambda info, dims, x: (x, 0), r"Layer.vmap returned 1 tensors, but forward returns 2"),
    ],
)
def test_outputs_unlike_those_of_forward(vmap, message):
    layer = wrong(vmap)
    with pytest.raises(ValueError, match=message):
        jax.vmap(layer.apply)(MANY)
    with pytest.raises(ValueError, match=message):
        jax.jit(jax.vmap(layer.apply))(MANY)
    with pytest.raises(ValueError, match=message):
        jax.grad(lambda x: jax.vmap(layer.apply)(x)[0].sum())(MANY)


def test_outputs_unlike_those_of_host_code():
    class Wrong(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return np.asarray(x) * 2

        @staticmethod
        def vmap(info, dims, x):
            return np.asarray(x).sum(-1), 0

    with pytest.raises(ValueError, match=r"Wrong.vmap, output 0: expected dtype float32 and shape \(3, 4\)"):
        jax.vmap(Wrong.apply)(MANY)


def test_an_empty_batch_goes_to_vmap():
    class Twice(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return np.asarray(x) * 2

        @staticmethod
        def vmap(info, dims, x):
            return np.asarray(x) * 2, 0

    assert jax.vmap(Twice.apply)(MANY[:0]).shape == (0, 4)


def test_both_rules_are_refused():
    with pytest.raises(RuntimeError, match=r"Both has both generate_vmap_rule = True and a vmap method.*Remove vmap"):

        class Both(HostCube):
            generate_vmap_rule = True


def test_generate_vmap_rule_is_jaxs_own_batching():
    class Generated(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, dy):
            return 3 * dy * ctx.saved_tensors[0] ** 2

    assert_same(jax.vmap(jax.grad(loss(Generated.apply)))(MANY), jax.vmap(jax.grad(loss(lambda x: x**3)))(MANY))


def test_forward_mode_of_a_layer_with_vmap_alone_is_an_error():
    with pytest.raises(TypeError, match=r"HostCube has no rule for forward-mode .*Add forward_mode = True"):
        jax.jvp(HostCube.apply, (X,), (X,))
