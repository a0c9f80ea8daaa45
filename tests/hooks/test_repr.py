"""A pair of hooks as an object: in one line, with the arguments that it was made with, and copied."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from pylayer_jax.packers import cast_saved, chain, quantize_saved, recompute_saved, save_on_cpu, save_on_disk

from .spy import IDLE


def twice(x):
    return x * 2


def half(x):
    return x / 2


def is_vector(x):
    return x.ndim == 1


class Scaled(saved_tensors_hooks):
    def __init__(self, scale, *, table=None):
        super().__init__(lambda x: x * scale, lambda x: x / scale)


@IDLE
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda hooks: pickle.loads(pickle.dumps(hooks))])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda _: saved_tensors_hooks(twice, half, host=True), "saved_tensors_hooks(twice, half, host=True)"),
        (
            lambda _: saved_tensors_hooks(twice, functools.partial(half)),
            "saved_tensors_hooks(twice, functools.partial(<function half ",
        ),
        (lambda _: cast_saved(), "cast_saved()"),
        (lambda _: cast_saved(np.dtype("float16"), only=is_vector), "cast_saved(float16, only=is_vector)"),
        (lambda _: quantize_saved(bits=4), "quantize_saved(bits=4)"),
        (lambda _: save_on_cpu(True), "save_on_cpu(True)"),
        (save_on_disk, "save_on_disk('FOLDER')"),
        (
            lambda folder: chain(cast_saved(), save_on_disk(folder), only=None),
            "chain(cast_saved(), save_on_disk('FOLDER'), only=None)",
        ),
        (lambda _: Scaled(0.5, table=np.eye(2)), "Scaled(0.5, table=array([[1., 0.], [0., 1.]]))"),
    ],
)
def test_a_pair_shows_its_arguments_and_a_copy_is_a_pair_of_its_own(make, text, copied, tmp_path):
    hooks = make(str(tmp_path))
    assert repr(hooks).replace(str(tmp_path), "FOLDER").startswith(text)
    shown = repr(hooks)
    with hooks:  # an open block is not copied
        other = copied(hooks)
    assert other is not hooks
    assert type(other) is type(hooks)
    assert repr(other) == shown
    hooks.close()
    with other:
        _, pullback = jax.vjp(jnp.sin, jnp.ones(64))
    np.testing.assert_allclose(pullback(jnp.ones(64))[0], np.full(64, np.cos(1.0)), rtol=0.01)


def test_a_pair_that_was_entered_tells_how_many_tensors_it_has_packed():
    hooks, f = save_on_cpu(recompute=False), lambda x: jnp.sin(x).sum()
    jax.grad(hooks(f))(jnp.ones(3))
    assert "1 tensor" in repr(hooks)
    step = jax.jit(jax.grad(hooks(f)))
    for _ in range(2):
        step(jnp.ones(3))
    assert "2 tensors" in repr(hooks)
    assert "1 of them traced" in repr(hooks)


def test_a_pair_tells_how_many_tensors_backward_computes_again():
    hooks = recompute_saved()
    jax.grad(hooks(lambda x: jnp.sin(x).sum()))(jnp.ones(3))
    assert "1 computed again" in repr(hooks)


class Fails(saved_tensors_hooks):
    made = None

    def __init__(self):
        Fails.made = self
        raise ValueError("of the user")


def test_the_repr_of_a_pair_whose_constructor_raised_has_the_class():
    with pytest.raises(ValueError, match="of the user"):
        Fails()
    assert repr(Fails.made) == "Fails()"
