"""Layers and blocks of hooks with equinox: modules as arguments, filtered transformations, State, loops."""

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax import PyLayer
from pylayer_jax.packers import by_name, quantize_saved
from tests.hooks.spy import noting
from tests.integrations.blocks import NO_BLOCK, applied, assert_close, doubled, library

eqx = library("equinox")

X = jax.random.normal(jax.random.key(0), (6, 4))
WAYS = {
    "eager": eqx.filter_value_and_grad,
    "jit": lambda loss, **options: eqx.filter_jit(eqx.filter_value_and_grad(loss, **options)),
    "checkpoint": lambda loss: eqx.filter_jit(eqx.filter_value_and_grad(eqx.filter_checkpoint(loss))),
}
EAGER_AND_JIT = pytest.mark.parametrize("way", ["eager", "jit"])


def mlp(activation, key=None):
    # An activation that is an array leaf, or a lambda that equinox wraps, would hide how a layer is carried.
    return eqx.nn.MLP(4, 4, 8, 2, activation=activation, key=jax.random.key(1) if key is None else key)


@pytest.mark.parametrize("way", WAYS)
def test_an_activation_of_a_module(block, way):
    def run(activation, block):
        return WAYS[way](block(lambda model: jnp.mean(jax.vmap(model)(X) ** 2)))(mlp(activation))

    block.compare(run)


Applied = applied(eqx.filter_vjp)


def test_vmap_over_an_ensemble(block):
    models = eqx.filter_vmap(lambda key: mlp(jax.nn.softplus, key))(jax.random.split(jax.random.key(1), 3))

    def run(applied, block):
        one = eqx.filter_vmap(block(lambda model: jnp.mean(jnp.tanh(applied(model, X[0])))), in_axes=eqx.if_array(0))
        return WAYS["jit"](lambda models: one(models).sum())(models)

    block.compare(run, Applied.apply, doubled)


class Attention(eqx.Module):
    projections: list

    def __call__(self, x):
        q, k, v = (jax.vmap(linear)(x) for linear in self.projections)
        return jax.nn.softmax(q @ k.T) @ v


class Model(eqx.Module):
    attention: Attention

    def __call__(self, x):
        return jnp.tanh(x + self.attention(x))


def test_the_tensors_of_a_class():
    model = Model(Attention([eqx.nn.Linear(4, 4, key=key) for key in jax.random.split(jax.random.key(0), 3)]))

    def gradient(block):
        return WAYS["jit"](block(lambda model: jnp.sum(model(X) ** 2)))(model)[1]

    want, counts = gradient(NO_BLOCK), {}
    for key in ("Attention", "Model", "Linear"):
        kept = []
        assert_close(gradient(by_name({key: noting(kept), ...: None})), want)
        counts[key] = len(kept)
    assert 0 < counts["Linear"] < counts["Attention"] < counts["Model"]
    with pytest.warns(UserWarning, match="Attenton"):
        gradient(by_name({"Attenton": quantize_saved(8), ...: None}))


class Counter(eqx.Module):
    count: eqx.nn.StateIndex

    def __init__(self):
        self.count = eqx.nn.StateIndex(jnp.array(1.0))


class Counted(PyLayer):
    """Layer that takes an index and a state, and returns the new state as an output."""

    @staticmethod
    def forward(ctx, count, x, state):
        number = state.get(count)
        ctx.save_for_backward(number)
        return x * number, state.set(count, number + 1)

    @staticmethod
    def backward(ctx, dy, dstate):
        (number,) = ctx.saved_tensor()
        return None, 2 * dy * number, None


@EAGER_AND_JIT
def test_state_as_an_argument_and_an_output(way):
    # State may not be read any more once another was made from it.
    model, state = eqx.nn.make_with_state(Counter)()

    def loss(x, state):
        y, state = Counted.apply(model.count, x, state)
        y, state = Counted.apply(model.count, y, state)
        return y.sum(), state

    (_, state), gradient = WAYS[way](loss, has_aux=True)(X, state)
    assert_close(gradient, jnp.full_like(X, 2 * 1 * 2 * 2))
    assert_close(state.get(model.count), 3.0)
