"""Hooks on the host where arrays lie on several devices: right numbers, in the shardings that they had."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from tests.kit.layers import Multiply, Tanh

from .sharded_transformer import entered, mesh_of, random


class Host:
    """A pair that runs on the host, and the shapes that it packed."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.hooks = saved_tensors_hooks(self.pack, lambda packed: packed[0] / 2, host=True)

    def pack(self, x):
        assert type(x) is np.ndarray
        self.shapes.append(x.shape)
        return (x * 2,)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        *(("explicit", spec) for spec in [("data", "model"), ("data", None), (None, None), (None, ("data", "model"))]),
        *(("automatic", spec) for spec in [("data", "model"), (None, None)]),
    ],
    ids=str,
)
def test_gradients(kind, spec):
    mesh, host = mesh_of(kind), Host()
    with entered(mesh):
        x = random(mesh, (4, 4, 8), None, *spec)
        for transformed in (jnp.tanh, jax.vmap(Tanh.apply), lambda x: jax.lax.map(Tanh.apply, x)):
            hooked = host.hooks(transformed)
            y, pullback = jax.jit(lambda x, hooked=hooked: jax.vjp(hooked, x))(x)
            (gradient,) = pullback(jnp.ones_like(y))
            np.testing.assert_allclose(gradient, 1 - np.tanh(x) ** 2, rtol=1e-5, atol=1e-6)
            if kind == "explicit":
                assert gradient.sharding.is_equivalent_to(x.sharding, 3)


def test_eager_mode_packs_a_whole_tensor_of_one_process():
    mesh, host = mesh_of("automatic"), Host()
    x = random(mesh, (4, 8), "data", "model")
    gradient = jax.grad(host.hooks(lambda x: jnp.sum(Tanh.apply(x))))(x)
    assert host.shapes == [(4, 8)]
    assert gradient.sharding.is_equivalent_to(x.sharding, 2)
    np.testing.assert_allclose(gradient, 1 - np.tanh(x) ** 2, rtol=1e-5)


@pytest.mark.parametrize("kind", ["explicit", "automatic"])
def test_as_many_large_tensors_at_once_as_there_are_threads(kind):
    # JAX's own callbacks stop for ever here: each waits for a copy that needs a thread, and they hold all of these.
    mesh, host = mesh_of(kind), Host()
    with entered(mesh):
        x = random(mesh, (512, 512), "data", "model")
        loss = host.hooks(lambda x: sum(jnp.sum(jnp.tanh(x * i)) for i in range(1, 9)))
        gradient = []
        thread = threading.Thread(target=lambda: gradient.append(jax.jit(jax.grad(loss))(x)), daemon=True)
        thread.start()
        thread.join(120)
    expected = sum(i * (1 - np.tanh(np.asarray(x) * i) ** 2) for i in range(1, 9))
    np.testing.assert_allclose(gradient[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["explicit", "automatic"])
def test_the_sign_of_a_zero_comes_back(kind):
    mesh, host = mesh_of(kind), Host()
    with entered(mesh):
        x = random(mesh, (4, 8), "data", "model")
        gradient = jax.jit(jax.grad(host.hooks(lambda x, w: jnp.sum(Multiply.apply(x, w)))))(x, jnp.zeros_like(x) * -1)
    assert np.signbit(gradient).all()
    assert (4, 8) in host.shapes
