"""Pairs one after another: gradients, kept bytes, caches, nesting, and which pair an error names."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import cast_saved, chain, quantize_saved, save_on_cpu, save_on_disk
from tests.hooks.spy import TRANSFORMS, Spy, in_block, tanh_slope, tanh_sum
from tests.kit.case import grid
from tests.kit.layers import Multiply, Tanh, text_of
from tests.kit.transforms import assert_same

X, W = grid(8, 64), grid(64, 64, low=-0.2, high=0.3)


def model(x, w):
    return jnp.sum(jnp.sin(Multiply.apply(Tanh.apply(x @ w), x)))


def doubled():
    def pack(x):
        return {"half": (x * 2, "a static"), "shape": x.shape}

    def unpack(packed):
        assert packed["half"][1] == "a static"
        return packed["half"][0].reshape(packed["shape"]) / 2

    return saved_tensors_hooks(pack, unpack)


def reversed_on_host():
    return saved_tensors_hooks(lambda x: [x[::-1].copy()], lambda packed: packed[0][::-1], host=True)


@functools.cache
def of_a_pair(transform, pair):
    return TRANSFORMS[transform](pair()(model), (X, W))


# A chain, and the one pair whose gradients it must have; the other pairs restore what they get exactly.
CHAINS = {
    "quantized, on CPU": (lambda folder: chain(quantize_saved(8), save_on_cpu()), quantize_saved),
    "cast, on disk": (lambda folder: chain(cast_saved(), save_on_disk(folder)), cast_saved),
    "of a user": (lambda folder: chain(doubled(), Spy().hooks), doubled),
    "of a user, on the host": (lambda folder: chain(doubled(), reversed_on_host()), doubled),
    "of chains": (lambda folder: chain(chain(doubled(), Spy().hooks), doubled()), doubled),
}


# To JAX a chain is one pair: two chains meet all of these transforms, the others two.
MANY = ("quantized, on CPU", "of a user, on the host")
MET = [(transform, name) for transform in ("grad", "jit_of_grad") for name in CHAINS]
MET += [
    (transform, name)
    for transform in ("grad_of_jit", "jit_of_scan", "vmap_of_grad", "jit_of_grad_of_grad")
    for name in MANY
]
MET += [("remat", "quantized, on CPU")]  # which hooks on the host refuse


@pytest.mark.parametrize(("transform", "name"), MET)
def test_gradients_are_those_of_the_pair_that_changes_values(transform, name, tmp_path):
    make, single = CHAINS[name]
    hooks, run = make(tmp_path), TRANSFORMS[transform]
    for hooked in (hooks(model), in_block(hooks, model)):
        assert_same(run(hooked, (X, W)), of_a_pair(transform, single))


# -- what is kept ---------------------------------------------------------------------------------


def test_integers_that_a_pair_made_go_to_disk(tmp_path):
    _, pullback = jax.vjp(chain(quantize_saved(8), save_on_disk(tmp_path))(tanh_sum), X)
    assert max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == 512
    del pullback
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_pair_packs_what_its_predicate_chooses():
    hooks = chain(quantize_saved(8), save_on_cpu(only=lambda x: x.dtype == jnp.uint8), only=lambda x: x.ndim == 2)
    report = saved_tensors_report(hooks(lambda x: tanh_sum(x) + tanh_sum(x[0])), X)
    two, one = report.rows
    assert two.packed_bytes < 0.3 * two.bytes
    assert "host" in two.note
    assert one.packed_bytes == one.bytes
    np.testing.assert_allclose(jax.grad(hooks(tanh_sum))(X), tanh_slope(X), atol=0.02)


def test_numpy_arrays_of_a_pair_are_packed_and_come_back_as_such():
    def unpack(packed):
        assert isinstance(packed, np.ndarray)
        return packed

    hooks = chain(saved_tensors_hooks(np.asarray, unpack), cast_saved())
    (gradient,) = jax.vjp(hooks(tanh_sum), X)[1](1.0)
    error = jnp.max(jnp.abs(gradient - tanh_slope(X)))
    assert 1e-4 < error < 0.02


# -- errors ---------------------------------------------------------------------------------------


def fails(x):
    raise OSError("no room")


@pytest.mark.parametrize(
    ("pair", "kind", "text"),
    [
        (saved_tensors_hooks(fails, abs), OSError, "pack_hook"),
        (saved_tensors_hooks(abs, fails), OSError, "unpack_hook"),
        (saved_tensors_hooks(abs, lambda x: x[:1]), ValueError, "unpack_hook"),
        (saved_tensors_hooks(lambda x: float(x[0, 0]), abs), TypeError, "pack_hook"),
        (saved_tensors_hooks(fails, abs, host=True), Exception, "pack_hook"),
        (cast_saved(only=lambda x: x.sum() > 0), TypeError, "only"),
    ],
)
def test_an_error_names_the_pair(pair, kind, text):
    jitted = jax.jit(jax.grad(chain(cast_saved(), pair)(tanh_sum)))
    with pytest.raises(kind) as caught:
        jax.block_until_ready(jitted(X))
    assert all(word in text_of(caught.value) for word in (text, type(pair).__name__))


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda folder: chain(), TypeError, "chain"),
        (lambda folder: chain(cast_saved(), 3), TypeError, "3"),
        (lambda folder: chain(cast_saved, save_on_cpu()), TypeError, "parentheses"),
        (lambda folder: chain(save_on_disk(folder), cast_saved()), ValueError, "last"),
        (lambda folder: chain(save_on_cpu(), cast_saved()), ValueError, "last"),
        (lambda folder: chain(cast_saved(), cast_saved(), only=3), TypeError, "only"),
        (lambda folder: chain(chain(cast_saved(), cast_saved(), only=bool), save_on_cpu()), ValueError, "only"),
    ],
)
def test_chains_that_cannot_be(make, kind, text, tmp_path):
    with pytest.raises(kind, match=text):
        make(tmp_path)
