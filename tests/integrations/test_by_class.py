"""The tensors of a module are chosen by its class, in equinox and in flax.nnx: packed under jit, or a warning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_report
from pylayer_jax.packers import by_name, quantize_saved
from tests.hooks.spy import noting
from tests.integrations.blocks import library
from tests.kit.modes import EAGER_AND_JIT

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:flax")

WIDTH = 16
X = jnp.linspace(-1.0, 1.0, 8 * WIDTH).reshape(8, WIDTH)


def attend(q, k, v, x):
    return jax.nn.softmax(q(x) @ k(x).T) @ v(x)


def equinox_loss():
    eqx = library("equinox")
    keys = jax.random.split(jax.random.key(0), 3)

    class Attention(eqx.Module):
        projections: list

        def __call__(self, x):
            return attend(*map(jax.vmap, self.projections), x)

    class Model(eqx.Module):
        attention: Attention

        def __call__(self, x):
            return jnp.tanh(x + self.attention(x))

    model = Model(Attention([eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys]))
    return lambda model, x: jnp.sum(model(x) ** 2), model


def nnx_loss():
    nnx = library("flax.nnx")

    class Attention(nnx.Module):
        def __init__(self, rngs):
            self.q, self.k, self.v = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))

        def __call__(self, x):
            return attend(self.q, self.k, self.v, x)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.attention = Attention(rngs)

        def __call__(self, x):
            return jnp.tanh(x + self.attention(x))

    graph, state = nnx.split(Model(nnx.Rngs(0)))
    return lambda state, x: jnp.sum(nnx.merge(graph, state)(x) ** 2), state


@EAGER_AND_JIT
@pytest.mark.parametrize("make", [equinox_loss, nnx_loss])
def test_the_tensors_of_a_class(make, mode):
    loss, model = make()
    want = jax.tree.leaves(mode(jax.grad(loss))(model, X))
    counts = {}
    for key in ("Attention", "Model", "Linear"):
        kept = []
        got = jax.tree.leaves(mode(jax.grad(by_name({key: noting(kept), ...: None})(loss)))(model, X))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
        counts[key] = len(kept)
    assert 0 < counts["Linear"] < counts["Attention"] < counts["Model"]
    with pytest.warns(UserWarning, match="Attenton"):
        mode(jax.grad(by_name({"Attenton": quantize_saved(8), ...: None})(loss)))(model, X)


@pytest.mark.parametrize("make", [equinox_loss, nnx_loss])
def test_the_report_shows_what_a_class_saves(make):
    loss, model = make()
    hooked = by_name({"Attention": quantize_saved(8), ...: None})(loss)
    plain, report = (saved_tensors_report(f, model, X) for f in (loss, hooked))
    assert report.total_unpacked_bytes == plain.total_bytes
    assert report.total_bytes < plain.total_bytes
    held = jax.jit(lambda model, x: jax.vjp(hooked, model, x)[1])(model, X)
    inputs = {id(x) for x in jax.tree.leaves((model, X))}
    bytes_held = sum({id(x): x.nbytes for x in jax.tree.leaves(held) if id(x) not in inputs}.values())
    assert bytes_held == report.total_bytes + report.input_bytes
