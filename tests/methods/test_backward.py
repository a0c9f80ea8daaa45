"""What backward may return: every row of the table of entries, eager and under jit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer
from pylayer_jax.parallel import copy_to
from tests.kit.modes import MODES, modes

X = jnp.array([0.5, -1.0, 2.0])
runs = pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])


def layer(give, forward=lambda *args: args[0] * 2):
    """A layer whose backward returns `give(dy)`."""

    class Gives(PyLayer):
        @staticmethod
        def forward(ctx, *args):
            return forward(*args)

        @staticmethod
        def backward(ctx, dy):
            return give(dy)

    return Gives


def named(give):
    """The same with named parameters x, n, w and a default."""

    class Named(PyLayer):
        @staticmethod
        def forward(ctx, x, n, w, flag=True):
            return x * n + w

        @staticmethod
        def backward(ctx, dy):
            return give(dy)

    return Named


@runs
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "bool"])
def test_other_dtypes_are_cast(run, dtype):
    gradient = run(jax.grad(lambda x: layer(lambda dy: dy.astype(dtype)).apply(x).sum()))(X)
    assert gradient.dtype == jnp.float32
    assert gradient.tolist() == [1, 1, 1]


@runs
def test_numpy_gradients_are_arrays(run):
    assert run(jax.grad(lambda x: layer(lambda dy: np.full(3, 4.0)).apply(x).sum()))(X).tolist() == [4, 4, 4]


@runs
@pytest.mark.parametrize("shape", [(3,), (1, 3), (4, 3), (2, 4, 3)])
def test_larger_gradients_are_summed(run, shape):
    gradient = run(jax.grad(lambda x: layer(lambda dy: jnp.ones(shape)).apply(x).sum()))(X)
    assert gradient.tolist() == [np.prod(shape) / 3] * 3


@runs
def test_summed_over_stretched_axes(run):
    x = jnp.ones((2, 1, 3))
    gradient = run(jax.grad(lambda x: layer(lambda dy: jnp.ones((5, 2, 4, 3))).apply(x).sum()))(x)
    assert gradient.shape == x.shape
    assert gradient[0, 0, 0] == 20


@runs
@pytest.mark.parametrize("shape", [(), (2,), (3, 1), (3, 4)])
def test_shapes_that_do_not_fit(run, shape):
    with pytest.raises(ValueError, match=r"gradient of 'args\[0\]': expected shape \(3,\)") as caught:
        run(jax.grad(lambda x: layer(lambda dy: jnp.ones(shape)).apply(x).sum()))(X)
    assert f"got {shape}" in str(caught.value)


@runs
@pytest.mark.parametrize("value", [1, 2.5, "text", [], [1.0], {"a": 1}])
def test_what_is_not_an_array(run, value):
    with pytest.raises(ValueError, match=r"gradient of 'args\[0\]': expected an array of dtype float32"):
        run(jax.grad(lambda x: layer(lambda dy: value).apply(x).sum()))(X)


@runs
def test_a_list_around_a_lone_gradient_is_refused(run):
    # As Paddle and torch do.
    with pytest.raises(ValueError, match="or None for zero; got"):
        run(jax.grad(lambda x: layer(lambda dy: [dy]).apply(x).sum()))(X)


@runs
def test_complex_gradient_of_a_real_input(run):
    with pytest.raises(ValueError, match=r"expected a real array .* Return its real part"):
        run(jax.grad(lambda x: layer(lambda dy: jax.lax.complex(dy, dy)).apply(x).sum()))(X)


@runs
@pytest.mark.parametrize(
    ("give", "expected"),
    [
        (lambda dy: (dy, 3 * dy), (1, 3)),
        (lambda dy: [dy, 3 * dy], (1, 3)),
        (lambda dy: (dy, None, 3 * dy), (1, 3)),
        (lambda dy: (None, 3 * dy), (0, 3)),
        (lambda dy: (None, None, None), (0, 0)),
    ],
    ids=["per slot", "list", "per argument", "none first", "none"],
)
def test_both_conventions(run, give, expected):
    gradients = run(jax.grad(lambda x, w: named(give).apply(x, 2, w).sum(), (0, 1)))(X, X)
    assert [g.tolist() for g in gradients] == [[e] * 3 for e in expected]


@runs
@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_wrong_counts(run, count):
    f = named(lambda dy: (dy,) * count)
    with pytest.raises(
        ValueError, match=rf"Named\.backward returned {count} gradients?; expected 2, one per"
    ) as caught:
        run(jax.grad(lambda x, w: f.apply(x, 2, w).sum(), (0, 1)))(X, X)
    assert "(x, w), or 3, one per argument passed (x, n, w)" in str(caught.value)
    assert ("Missing" in str(caught.value)) == (count < 2)


@runs
def test_gradient_for_an_argument_without_tensors(run):
    with pytest.raises(ValueError, match=r"for argument .n., which holds no tensor"):
        run(jax.grad(lambda x: named(lambda dy: (dy, dy, dy)).apply(x, 2, X).sum()))(X)


@modes
@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_trailing_entries_may_be_left_out_where_no_gradient_is_needed(mode, forward_mode, reads):
    class Short(PyLayer):
        @staticmethod
        def forward(ctx, x, n, w):
            assert not reads or ctx.needs_input_grad
            return x * n + w

        @staticmethod
        def backward(ctx, dy):
            return 5 * dy

    Short.forward_mode = forward_mode
    assert MODES[mode](lambda x: Short.apply(x, 2, X).sum())(X).tolist() == [5, 5, 5]
    with pytest.raises(
        ValueError, match=r"returned 1 gradient; expected 2.* Missing: w; return None where the gradient"
    ):
        MODES[mode](lambda w: Short.apply(X, 2, w).sum())(X)


@runs
def test_what_needs_no_gradient_is_ignored(run):
    ignored = layer(lambda dy: (dy, "anything", object(), jnp.ones(77)), lambda x, i, k, y: x * 2)
    key = jax.random.key(0)
    assert run(jax.grad(lambda x: ignored.apply(x, jnp.arange(2), key, X).sum()))(X).tolist() == [1, 1, 1]


@runs
def test_a_list_argument_takes_a_list(run):
    one = layer(lambda dy: [dy, None], lambda xs: xs[0] * 2 + xs[1])
    gradients = run(jax.grad(lambda xs: one.apply(xs).sum()))([X, X])
    assert [g.tolist() for g in gradients] == [[1, 1, 1], [0, 0, 0]]
    with pytest.raises(ValueError, match="expected 2 entries, got 3"):
        run(jax.grad(lambda xs: layer(lambda dy: [dy] * 3, lambda xs: xs[0] + xs[1]).apply(xs).sum()))([X, X])


@runs
@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (lambda dy: {"a": dy, "b": (2 * dy, [3 * dy])}, [1, 2, 3]),
        (lambda dy: {"a": None, "b": (2 * dy, [None])}, [0, 2, 0]),
        (lambda dy: {"a": dy, "b": None}, [1, 0, 0]),
        (lambda dy: (None,), [0, 0, 0]),
    ],
)
def test_structures_with_none_anywhere(run, entry, expected):
    tree = {"a": X, "b": (X, [X])}
    f = layer(entry, lambda t: t["a"] + t["b"][0] + t["b"][1][0])
    leaves = jax.tree_util.tree_leaves(run(jax.grad(lambda t: f.apply(t).sum()))(tree))
    assert [leaf[0] for leaf in leaves] == expected


@runs
def test_structure_that_does_not_fit(run):
    f = layer(lambda dy: ({"z": dy},), lambda t: t["a"] * 2)
    with pytest.raises(
        ValueError, match=r"gradient of 'args\[0\]': .* keys .*, 'a'; got one without 'a' and with 'z',"
    ):
        run(jax.grad(lambda t: f.apply(t).sum()))({"a": X})


@runs
def test_shape_within_a_structure_is_named_by_its_path(run):
    f = layer(lambda dy: {"w": [jnp.ones(2)]}, lambda t: t["w"][0] * 2)
    with pytest.raises(ValueError, match=r"gradient of \"args\[0\]\['w'\]\[0\]\": expected shape \(3,\)"):
        run(jax.grad(lambda t: f.apply(t).sum()))({"w": [X]})


def test_tuple_for_a_lone_tuple_argument_says_how_to_return_it():
    f = layer(lambda dy: (dy, dy), lambda t: t[0] + t[1])
    with pytest.raises(ValueError, match=r"return its gradients as one entry: \(\(g0, g1\),\)"):
        jax.grad(lambda t: f.apply(t).sum())((X, X))


@runs
def test_variable_keywords_in_call_order(run):
    class Keyworded(PyLayer):
        @staticmethod
        def forward(ctx, x, *, first, **rest):
            return x + first + rest["z"] + rest["a"]

        @staticmethod
        def backward(ctx, dy):
            return dy, 2 * dy, 3 * dy, 4 * dy

    def f(x, z, a, first):
        return Keyworded.apply(x, z=z, a=a, first=first).sum()

    assert [g[0] for g in run(jax.grad(f, (0, 1, 2, 3)))(X, X, X, X)] == [1, 3, 4, 2]


@pytest.mark.parametrize("convention", ["jax", "paddle"])
@runs
def test_complex_conventions(run, convention):
    class Square(PyLayer):
        complex_convention = convention

        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return z**2

        @staticmethod
        def backward(ctx, dy):
            (z,) = ctx.saved_tensor()
            return dy * 2 * (z.conj() if convention == "paddle" else z)

    z = jnp.array([1 + 2j, -0.5j])
    loss = lambda square: lambda z: jnp.sum(jnp.abs(square(z) * (2 + 1j)) ** 2)  # noqa: E731
    np.testing.assert_allclose(run(jax.grad(loss(Square.apply)))(z), jax.grad(loss(lambda z: z**2))(z), rtol=1e-5)


@pytest.mark.parametrize(
    ("flag", "value", "error"),
    [
        ("complex_convention", "torch", "expected 'jax' or 'paddle', got 'torch'"),
        ("forward_mode", "yes", "expected True or False, got 'yes' of type str"),
        ("forward_mode", None, "expected True or False, got None"),
        ("generate_vmap_rule", 1, "expected True or False, got 1 of type int"),
        ("saved_names", "y", "expected a tuple of strings"),
    ],
)
def test_flags_of_the_wrong_kind(flag, value, error):
    with pytest.raises((TypeError, ValueError), match=rf"Odd\.{flag}: {error}"):
        type("Odd", (PyLayer,), {flag: value})


def test_replicated_input_in_shard_map_says_to_sum():
    class Product(PyLayer):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensor()
            return dy * w, dy * x

    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def gradient(apply):
        f = jax.shard_map(apply, mesh=mesh, in_specs=(spec("i"), spec()), out_specs=spec("i"))
        return jax.jit(jax.grad(lambda w: f(jnp.ones(4), w).sum()))(jnp.ones(1))

    with pytest.raises(ValueError, match=r"'w': .*psum\(value, 'i'\); or .*pylayer_jax\.parallel\.copy_to\(.*, 'i'\)"):
        gradient(Product.apply)
    assert gradient(lambda x, w: Product.apply(x, copy_to(w, "i"))) == 4


@pytest.mark.parametrize("forward_mode", [False, True], ids=["", "forward mode"])
@runs
def test_cotangents_that_are_python_numbers(run, forward_mode):
    class Two(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 2, jnp.sin(x)

        @staticmethod
        def backward(ctx, dy, dz):
            assert (dy.shape, dy.dtype, dz.shape, dz.dtype) == ((), jnp.float32, (), jnp.float32)
            return dy * 2 + dz * 3

    layer = type("Two", (Two,), {"forward_mode": forward_mode})
    pull = lambda x, dy, dz: jax.vjp(layer.apply, x)[1]((dy, dz))[0]  # noqa: E731
    assert run(lambda x: pull(x, 1.0, 2.0))(jnp.float32(0.5)) == 8
    mapped = jax.vmap(lambda x: pull(x, x, 2.0))
    assert run(mapped)(X).tolist() == (X * 2 + 6).tolist()


@runs
def test_gradients_that_are_yielded(run):
    def give(dy):
        yield dy

    with pytest.raises(ValueError, match=r"Gives\.backward returned generator; .* Return them: return g0, g1"):
        run(jax.grad(lambda x: layer(give).apply(x).sum()))(X)


@runs
def test_a_key_as_a_gradient(run):
    with pytest.raises(
        ValueError, match=r"Gives\.backward, gradient of 'args\[0\]': expected an array of dtype float32"
    ):
        run(jax.grad(lambda x: layer(lambda dy: jax.random.key(0)).apply(x).sum()))(X)


# -- containers of another kind -------------------------------------------------------------------


@pytest.mark.parametrize("given", [tuple, list])
@pytest.mark.parametrize("returned", [tuple, list])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_list_for_a_tuple_argument_and_the_reverse(given, returned, around):
    class Total(PyLayer):
        @staticmethod
        def forward(ctx, pair, scale):
            ctx.save_for_backward(*pair, scale)
            return (pair[0] + 2 * pair[1]) * scale

        @staticmethod
        def backward(ctx, dy):
            a, b, scale = ctx.saved_tensor()
            return returned([dy * scale, 2 * dy * scale]), dy * (a + 2 * b)

    x = jnp.arange(3.0)
    run = around(jax.grad(lambda pair, scale: Total.apply(pair, scale).sum(), (0, 1)))
    pair, scale = run(given([x, x + 1]), x)
    assert type(pair) is given
    np.testing.assert_allclose(pair[0], x)
    np.testing.assert_allclose(pair[1], 2 * x)
    np.testing.assert_allclose(scale, 3 * x + 2)
