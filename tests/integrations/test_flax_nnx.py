"""Layers and blocks of hooks within flax.nnx modules."""

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax import saved_tensors_report
from tests.integrations.blocks import applied, doubled, library

nnx = library("flax.nnx")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:flax")

X = jax.random.normal(jax.random.key(0), (16, 8))
EAGER_AND_JIT = pytest.mark.parametrize("transform", [lambda f: f, nnx.jit], ids=["eager", "jit"])


class Module(nnx.Module):
    def __init__(self, activation, rngs=None):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.activation = activation

    def __call__(self, x):
        return self.dropout(self.activation(self.norm(self.linear(x))))


def stacked(activation):
    create = nnx.vmap(lambda rngs: Module(activation, rngs), in_axes=0, out_axes=0)
    return nnx.split_rngs(splits=3)(create)(nnx.Rngs(0))


def pure(tree):
    """Return the arrays of a tree, with key data in place of PRNG keys."""
    leaves = jax.tree.leaves(tree)
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]


def differentiated(run, model, transform=nnx.jit):
    """Return the loss of `run(model)`, the state after the run, and the gradient."""
    value, gradient = transform(nnx.value_and_grad(lambda model: jnp.mean(run(model) ** 2)))(model)
    return (value, pure(nnx.state(model, nnx.Not(nnx.Param)))), pure(nnx.state(gradient))


@EAGER_AND_JIT
def test_the_report_shows_the_line_that_applies_a_module(transform):
    norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))

    def model(x):
        return norm(x).sum()

    rows = [row for row in saved_tensors_report(transform(model), X).rows if row.kind == "operation"]
    assert rows
    assert {row.source for row in rows} == {f"test_flax_nnx.py:{model.__code__.co_firstlineno + 1}"}


@EAGER_AND_JIT
def test_dropout_and_batch_norm_in_a_block(block, transform):
    block.compare(lambda f, block: differentiated(block(lambda model: model(model(X))), Module(f), transform))


WAYS = {  # from a function of an input and a module to one of the module, or of three
    "scan": lambda f: lambda models: nnx.scan(nnx.remat(f), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(X, models),
    "vmap": lambda f: lambda models: nnx.vmap(f, in_axes=(None, 0))(X, models),
    "remat": lambda f: lambda model: nnx.remat(f)(X, model),
}


@pytest.mark.parametrize("way", WAYS)
def test_transformations(way, block):
    def run(activation, block):
        model = (Module if way == "remat" else stacked)(activation)
        return differentiated(WAYS[way](block(lambda x, model: model(x))), model)

    block.compare(run)


Applied = applied(jax.vjp)


@EAGER_AND_JIT
def test_a_module_as_an_argument(transform, block):
    def run(applied, block):
        @block
        def loss(linear):
            return jnp.mean(jnp.tanh(applied(linear, X)) ** 2)

        value, gradient = transform(nnx.value_and_grad(loss))(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
        return value, pure(nnx.state(gradient))

    block.compare(run, Applied.apply, doubled)


def test_a_state_change_that_would_be_lost_is_an_error():
    with pytest.raises(ValueError, match=r"Applied\.forward(?s:.*)linear"):
        differentiated(lambda model: Applied.apply(model, X), nnx.BatchNorm(8, rngs=nnx.Rngs(0)), lambda f: f)
