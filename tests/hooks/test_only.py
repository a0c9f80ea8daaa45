"""`only` chooses what is packed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from pylayer_jax import saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import cast_saved, chain, quantize_saved, save_on_cpu, save_on_disk
from tests.kit.layers import Multiply, Tanh
from tests.kit.modes import EAGER_AND_JIT

from .spy import counted_step, tanh_sum

X, W = jnp.linspace(-1.0, 1.0, 64 * 64).reshape(64, 64), jnp.linspace(0.5, 1.0, 64)


def loss(w, x):
    return jnp.sum(jnp.sin(Multiply.apply(Tanh.apply(x), w * jnp.ones((64, 1)))) * w)


def is_wide(x):
    return x.ndim > 1


@EAGER_AND_JIT
@pytest.mark.parametrize("host", [False, True], ids=["traced", "host"])
def test_what_the_predicate_is_false_for_is_not_packed(host, mode):
    seen = []
    hooks = saved_tensors_hooks(lambda x: seen.append(x.shape) or x, lambda x: x, host=host, only=is_wide)
    found = mode(jax.grad(hooks(loss)))(W, X)
    np.testing.assert_allclose(found, jax.grad(loss)(W, X), rtol=1e-5, atol=1e-4)
    assert seen
    assert all(len(shape) > 1 for shape in seen)


@pytest.mark.parametrize("packer", [save_on_cpu, cast_saved, quantize_saved, save_on_disk])
def test_every_ready_pair_takes_it(packer, tmp_path):
    arguments = (tmp_path,) if packer is save_on_disk else ()
    nothing, wide = (packer(*arguments, only=only) for only in (lambda x: False, is_wide))
    expected = jax.grad(loss)(W, X)
    np.testing.assert_array_equal(jax.grad(nothing(loss))(W, X), expected)
    np.testing.assert_allclose(jax.jit(jax.grad(wide(loss)))(W, X), expected, atol=0.2)


class NamedTanh(Tanh):
    saved_names = ("y",)


@EAGER_AND_JIT
def test_a_predicate_may_ask_where_a_tensor_is_from(mode):
    seen, packed = [], []

    def only(x, info):
        seen.append(info)
        return info.layer == "NamedTanh"

    hooks = saved_tensors_hooks(lambda x: packed.append(x.shape) or x, lambda x: x, only=only)
    function = lambda x: jnp.sum(jnp.sin(NamedTanh.apply(x)))  # noqa: E731
    np.testing.assert_allclose(mode(jax.grad(hooks(function)))(X), jax.grad(function)(X), rtol=1e-6)
    assert packed == [X.shape]
    assert {"y"} == {info.name for info in seen if info.layer == "NamedTanh"}
    assert "sin" in {info.operation for info in seen if not info.layer}


# -- by name --------------------------------------------------------------------------------------


def noting(kept, only):
    def pack(x):
        kept.append(x.shape)
        return (x,)

    return saved_tensors_hooks(pack, lambda packed: packed[0], only=only)


@EAGER_AND_JIT
def test_a_chain_packs_each_tensor_with_the_pair_that_its_name_chooses(mode):
    layers, squares, f = [], [], lambda x: jnp.sum(NamedTanh.apply(x) * checkpoint_name(jnp.exp(x), "exponential"))
    hooks = chain(
        noting(layers, lambda x, info: info.name == "y"), noting(squares, lambda x, info: info.name == "exponential")
    )
    np.testing.assert_allclose(mode(jax.grad(hooks(f)))(X), jax.grad(f)(X), rtol=1e-5, atol=1e-6)
    assert layers == squares == [X.shape]


def test_another_predicate_is_another_program():
    step, traced = counted_step()
    for only in (None, is_wide, is_wide):
        with cast_saved(only=only):
            step(X)
    assert len(traced) == 2


def test_the_report_shows_it():
    with cast_saved(only=is_wide):
        report = saved_tensors_report(lambda x, y: tanh_sum(x) + tanh_sum(y), X, W)
    wide, narrow = report.rows
    assert (wide.packed_bytes, narrow.packed_bytes) == (X.nbytes // 2, W.nbytes)


def test_a_predicate_that_is_not_callable_or_asks_for_values():
    with pytest.raises(TypeError, match="only"):
        cast_saved(only=3)
    with pytest.raises(TypeError, match=r"only(?s:.*)Tanh"):
        jax.jit(jax.grad(cast_saved(only=lambda x: x.max() > 0)(tanh_sum)))(X)
