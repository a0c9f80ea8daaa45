"""`only` chooses what is packed."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from pylayer_jax import saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import by_name, cast_saved, chain, quantize_saved, save_on_cpu, save_on_disk
from tests.kit.layers import Multiply, Square, Tanh, layer
from tests.kit.modes import EAGER_AND_JIT, STAGED

from .spy import noting, tanh_sum

X, W = jnp.linspace(-1.0, 1.0, 64 * 64).reshape(64, 64), jnp.linspace(0.5, 1.0, 64)


def loss(w, x):
    return jnp.sum(jnp.sin(Multiply.apply(Tanh.apply(x), w * jnp.ones((64, 1)))) * w)


def is_wide(x):
    return x.ndim > 1


@EAGER_AND_JIT
@pytest.mark.parametrize("host", [False, True], ids=["traced", "host"])
def test_what_the_predicate_is_false_for_is_not_packed(host, mode):
    seen = []
    found = mode(jax.grad(noting(seen, host=host, only=is_wide)(loss)))(W, X)
    np.testing.assert_allclose(found, jax.grad(loss)(W, X), rtol=1e-5, atol=1e-4)
    assert seen
    assert all(len(shape) > 1 for shape in seen)


@pytest.mark.parametrize("packer", [save_on_cpu, cast_saved, quantize_saved, save_on_disk])
def test_every_ready_pair_takes_it(packer, tmp_path):
    arguments = (tmp_path,) if packer is save_on_disk else ()
    nothing, wide = (packer(*arguments, only=only) for only in (lambda x: False, is_wide))
    expected = jax.grad(loss)(W, X)
    with pytest.warns(UserWarning, match="only"):
        np.testing.assert_allclose(jax.grad(nothing(loss))(W, X), expected, rtol=1e-3)
    np.testing.assert_allclose(jax.jit(jax.grad(wide(loss)))(W, X), expected, atol=0.2)


NamedTanh = layer(base=Tanh, name="NamedTanh", saved_names=("y",))


def test_each_eager_gradient_asks_the_predicate_again():
    packed, is_on = [], {"only": False}
    loss = noting(packed, only=lambda x: is_on["only"])(lambda x: jnp.sum(Square.apply(x)))
    with pytest.warns(UserWarning, match="only"):
        jax.grad(loss)(X)
    assert not packed
    is_on["only"] = True
    jax.grad(loss)(X)
    assert packed == [X.shape]


# -- by name --------------------------------------------------------------------------------------


def wide(name):
    """Two layers and two operations, one of each with a name."""

    def f(x):
        y = checkpoint_name(jnp.exp(x) * 0.1, name)
        return jnp.sum(NamedTanh.apply(x)[:1]) + jnp.sum(Tanh.apply(x)[:2]) + jnp.sum(jnp.sin(y)[:3])

    return f


@EAGER_AND_JIT
@pytest.mark.parametrize(
    ("key", "n"),
    [("y", 1), ("Tanh", 1), ("NamedTanh", 1), ("saved[0]", 1), ("exp", 1), ("sin", 1), (..., 4)],
)
def test_a_tensor_is_packed_by_the_pair_of_its_name(key, n, mode):
    kept, rest, f = [], [], wide("exponential")
    for hooks in (by_name({key: noting(kept)}), by_name({key: None, ...: noting(rest)})):
        np.testing.assert_allclose(mode(jax.grad(hooks(f)))(X), jax.grad(f)(X), rtol=1e-6)
    assert len(kept) == n
    assert len(rest) == (4 if key is ... else 4 - n)


@EAGER_AND_JIT
def test_the_most_special_name_counts(mode):
    first, second, third = [], [], []
    hooks = by_name({"NamedTanh": noting(second), "y": noting(first), ...: noting(third)})
    mode(jax.grad(hooks(lambda x: jnp.sum(jnp.sin(NamedTanh.apply(x))))))(X)
    assert (len(first), len(second), len(third)) == (1, 0, 1)
    kept = []
    f = lambda x: jnp.sum(jnp.sin(checkpoint_name(x * x, "squares")))  # noqa: E731
    mode(jax.grad(by_name({"squares": noting(kept)})(lambda x: f(x) + jnp.sum(checkpoint_name(x, "squares") @ x))))(X)
    assert kept == [X.shape]


def test_ready_pairs_by_name():
    f = wide("exponential")
    hooks = by_name(
        {"y": save_on_cpu(), "Tanh": chain(quantize_saved(8), save_on_cpu()), "exp": None, ...: cast_saved()}
    )
    for run in (lambda f: f, jax.jit):
        np.testing.assert_allclose(run(jax.grad(hooks(f)))(X), jax.grad(f)(X), atol=0.02)
    assert "cast_saved" in repr(copy.copy(hooks))


@pytest.mark.parametrize(
    "make",
    [
        lambda: by_name({}),
        lambda: by_name([("y", None)]),
        lambda: by_name({3: None}),
        lambda: by_name({"y": jnp.sin}),
        lambda: by_name({"y": cast_saved}),
        lambda: by_name({"y": by_name({...: None})}),
        lambda: chain(by_name({...: cast_saved()}), save_on_cpu()),
    ],
)
def test_what_is_no_table_of_pairs(make):
    with pytest.raises((TypeError, ValueError), match="by_name"):
        make()


def test_a_predicate_that_is_not_callable_or_asks_for_values():
    with pytest.raises(TypeError, match="only"):
        cast_saved(only=3)
    with pytest.raises(TypeError, match=r"only(?s:.*)Tanh"):
        jax.jit(jax.grad(cast_saved(only=lambda x: x.max() > 0)(tanh_sum)))(X)


# Each computes a tensor with a name. Backward could keep an unnamed one instead, and compute the named one again.
NAMED = {
    "product": lambda x: checkpoint_name(x @ x.T, "hidden"),
    "reshaped": lambda x: checkpoint_name((x @ x.T).reshape(-1), "hidden"),
    "sum": lambda x: checkpoint_name(x @ x.T + 1, "hidden"),
    "kept before": lambda x: checkpoint_name(jnp.tanh(x @ x.T), "hidden"),
    "computed again": lambda x: checkpoint_name(jax.nn.gelu(x @ x.T), "hidden"),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("place", [None, *STAGED])
def test_a_named_tensor_is_kept_by_its_own_hooks(place, name):
    def make_loss():
        inner = lambda x: x + jnp.sum(jax.nn.gelu(NAMED[name](x)))  # noqa: E731
        if place == "checkpoint":
            return jax.checkpoint(
                lambda x: jnp.sum(inner(x)), policy=jax.checkpoint_policies.save_only_these_names("hidden")
            )
        staged = STAGED[place](inner) if place else inner
        return lambda x: jnp.sum(staged(x))

    recompute = name != "computed again"
    for make in (
        lambda: save_on_cpu(recompute=recompute, only=lambda x, info: info.name == "hidden"),
        lambda: by_name({"hidden": save_on_cpu(recompute=recompute), ...: None}),
    ):
        report = saved_tensors_report(make()(make_loss()), X)
        # A cond of jax 0.10 returns both, the tanh and the named tensor.
        assert report.host_bytes == X.nbytes or (place == "cond" and name == "kept before")
        for mode in (lambda f: f, jax.jit):
            pair = make()
            mode(jax.grad(pair(make_loss())))(X)
            assert pair._pair.n_packed.total() > 0


def test_a_tensor_of_an_earlier_operation_has_its_origin_where_another_keeps_it():
    pair = save_on_cpu(only=lambda x, info: info.operation == "matmul")
    report = saved_tensors_report(pair(lambda x: jnp.sum(jnp.tanh(2 * (x @ x.T)))), X)
    assert report.host_bytes == X.nbytes


@EAGER_AND_JIT
def test_a_key_whose_tensors_are_computed_again_warns(mode):
    loss = lambda x: jnp.sum((x @ x) * jnp.sin(x @ x))  # noqa: E731
    with pytest.warns(UserWarning, match="'sin'.*recompute=False"):
        mode(jax.grad(by_name({"sin": save_on_cpu(), ...: None})(loss)))(X)
    mode(jax.grad(by_name({"sin": save_on_cpu(recompute=False), ...: None})(loss)))(X)


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_what_is_excluded_is_not_computed_from_what_hooks_of_users_packed(mode):
    def loss(x):
        h = checkpoint_name(x @ x, "rounded")
        return jnp.sum(h * jnp.cos(x)) + jnp.sum(-h * jnp.sin(x))

    h, rounded = X @ X, lambda x: jnp.round(x * 4) / 4
    pair = by_name({"rounded": saved_tensors_hooks(rounded, lambda x: x), ...: None})
    expected = jax.grad(loss)(X) + (rounded(h) - h) * -jnp.sin(X)
    np.testing.assert_allclose(jax.grad(pair(mode(loss)))(X), expected, rtol=1e-5, atol=1e-5)
