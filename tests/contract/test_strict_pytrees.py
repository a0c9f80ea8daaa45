"""A pytree class that accepts arrays only, and raises an error for anything else, works everywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import compare_programs, saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import by_name, cast_saved, quantize_saved
from pylayer_jax.testing import assert_equivalent, check_layer, gradgradcheck
from tests.checkers.wrong_layers import all_but
from tests.kit.layers import layer, text_of


@jax.tree_util.register_pytree_with_keys_class
class Matrix:
    """A matrix that checks its entries, as classes of users do."""

    def __init__(self, array):
        if not hasattr(array, "ndim"):
            raise TypeError(f"a matrix of {array!r}")
        self.array = array

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("array"), self.array)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


A, X = Matrix(jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)), jnp.linspace(0.5, 1.0, 6).reshape(3, 2)


def forward(ctx, a, x):
    ctx.save_for_backward(a, x)
    ctx.again = {"a": a}
    return Matrix(a.array @ x)


def backward(ctx, dy):
    a, x = ctx.saved_tensors
    return Matrix(dy.array @ x.T), ctx.again["a"].array.T @ dy.array


def pushed(ctx, da, dx):
    a, x = ctx.saved_tensors
    return Matrix(da.array @ x + a.array @ dx)


def in_batch(info, in_dims, a, x):
    assert in_dims == (None, 0)
    return Matrix(jnp.stack([a.array @ each for each in x])), 0


Product = layer(forward, backward, name="Product")


def loss(a, x, made=Product):
    return jnp.sum(made.apply(a, x).array ** 2)


def plain(a, x):
    return jnp.sum((a.array @ x) ** 2)


pair = saved_tensors_hooks(lambda x: x, lambda x: x)
with_vmap = layer(base=Product, vmap=in_batch)
MODES = {
    "jit": lambda f: jax.jit(jax.grad(f, (0, 1)))(A, X),
    "vmap": lambda f: jax.vmap(jax.grad(f, (0, 1)), (None, 0))(A, jnp.stack([X, 2 * X])),
    "grad of vmap": lambda f: jax.grad(lambda a: jax.vmap(functools.partial(f, a))(jnp.stack([X, 2 * X])).sum())(A),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f, (None, 0)))(A, jnp.stack([X, 2 * X])),
    "jvp": lambda f: jax.jvp(f, (A, X), (A, X)),
    "scan": lambda f: jax.grad(lambda a: jax.lax.scan(lambda c, x: (c + f(a, x), None), 0.0, X[None])[0])(A),
    "second order": lambda f: jax.jit(jax.grad(lambda a: jnp.sum(jax.grad(f, 1)(a, X) ** 2)))(A),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1))(A, X),
    "own pair": lambda f: jax.grad(pair(f), (0, 1))(A, X),
    "8 bits": lambda f: jax.jit(jax.grad(cast_saved(jnp.float32, arguments=True)(f), (0, 1)))(A, X),
    "by name": lambda f: jax.grad(by_name({"Product": pair, ...: pair})(f), (0, 1))(A, X),
}


MET = [(mode, Product) for mode in MODES if mode not in ("jvp", "jit of vmap")]
MET += [("jvp", layer(base=Product, forward_mode=True)), ("jvp", layer(base=Product, jvp=pushed))]
MET += [("jit of vmap", with_vmap), ("grad of vmap", with_vmap)]


@pytest.mark.filterwarnings("ignore:by_name. no tensor:UserWarning")
@pytest.mark.parametrize(("mode", "made"), MET)
def test_gradients(mode, made):
    found = MODES[mode](functools.partial(loss, made=made)), MODES[mode](plain)
    for got, expected in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_names_of_its_arrays():
    report = saved_tensors_report(quantize_saved(8)(loss), A, X)
    assert any("args[0].array" in str(row) for row in report.rows)
    with pytest.raises(ValueError, match=r"gradient of 'a\.array'"):
        jax.grad(functools.partial(loss, made=layer(base=Product, backward=lambda ctx, dy: (Matrix(X), None))))(A, X)


def test_a_missing_cotangent_is_none():
    given = []
    made = layer(
        lambda ctx, a, x: (ctx.set_materialize_grads(False), Matrix(a.array @ x), 2 * x)[1:],
        lambda ctx, dy, dx: (given.append(dy), (None, 2 * dx))[1],
    )
    assert jnp.all(jax.grad(lambda x: made.apply(A, x)[1].sum())(X) == 2)
    assert given == [None]


def test_host_layer():
    made = layer(
        lambda ctx, a, x: (ctx.save_for_backward(x), Matrix(np.asarray(a.array @ x)))[1],
        lambda ctx, dy: (Matrix(dy.array @ ctx.saved_tensors[0].T), None),
        host=True,
    )
    got = jax.jit(jax.grad(functools.partial(loss, made=made)))(A, X)
    np.testing.assert_allclose(got.array, jax.grad(plain)(A, X).array, rtol=1e-5)


def test_errors():
    closing = lambda t: layer(lambda ctx, a: a.array * t, lambda ctx, dy: Matrix(dy)).apply(A).sum()
    with pytest.raises(jax.errors.UnexpectedTracerError, match="closes over") as caught:
        jax.grad(closing)(2.0)
    assert "a matrix of" not in text_of(caught.value)


@pytest.mark.checkers
def test_checkers():
    assert check_layer(Product, A, X, skip=all_but("jit", "vmap", "arguments", "cotangents", "shard_map")).passed
    assert gradgradcheck(Product, (A, X))
    assert_equivalent(Product, lambda a, x: Matrix(a.array @ x), (A, X))
    assert compare_programs({"plain": plain, "layer": loss}, A, X).rows
