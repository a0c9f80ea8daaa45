"""The same layers have the same results and errors in real torch and here; each difference is tested for both."""

import jax
import numpy as np
import pytest

from tests.hooks.spy import IDLE
from tests.kit.oracle import Ours, Row, Table, Torch, X, Y, Z, compare
from tests.layers.agree import (
    HOOKS,
    SHARED,
    complex_numbers,
    doubled_tanh,
    itself_inside_backward,
    noting_what_is_saved,
    product,
    two_inputs,
)
from tests.layers.differ import DIFFERENCES

from . import function
from .after_torch import PORTS, layers, ported

pytestmark = [
    pytest.mark.frameworks,
    IDLE,
    # torch's own: its first use of forward mode compiles rules by what it calls deprecated.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
CASES = Table(SHARED + HOOKS + DIFFERENCES + PORTS + function.TABLE)


@pytest.fixture
def theirs(framework):
    return Torch(framework("torch"))


# Beyond what Paddle can do: an entry for an input that needs none, complex numbers and sines of high order.
CASES.add(X, Y, label="first", wrt=(0,))(two_inputs)
CASES.add(X, Y, label="second", wrt=(1,))(two_inputs)
CASES.add(Z, label="twice")(complex_numbers)
CASES.add(label="four times", orders=4)(itself_inside_backward)


@CASES.add(Z, orders=1)
def real_gradient_of_a_complex_input(of):
    return of.layer(lambda ctx, z: of.abs(z), lambda ctx, dy: dy * 3, complex_convention="paddle").apply


SAVED = {"no call": None, "empty": lambda x: (), "None": lambda x: (None, x, None), "tensors": lambda x: (x, x + 1)}

for name, save in SAVED.items():

    @CASES.add(label=name, orders=1)
    def what_saved_tensors_holds(of, save=save):
        return noting_what_is_saved(of, save, lambda ctx: ctx.saved_tensors)


@CASES.add()
def input_returned(of):
    layer = of.layer(lambda ctx, x: x, lambda ctx, dy: dy * 3)

    def apply(x):
        y = layer.apply(x)
        return y * y, x * x

    return apply


# What is taken for the gradients of higher order is what was packed, whatever packing did.
@CASES.add()
def layer_under_hooks(of):
    return of.hooked(doubled_tanh(of).apply)


@CASES.add()
def operations_under_hooks(of):
    return of.hooked(lambda x: of.exp(x) * x)


@CASES.count(X, Y, wrt=(0,), theirs=(2, 2), ours=(2, 2))
def one_input_of_a_layer_needs_a_gradient(of):
    return of.hooked(product(of).apply)


@CASES.count(theirs=(1, 1), ours=(1, 1))
def none_saved(of):
    def forward(ctx, x):
        ctx.save_for_backward(None, x)
        return x * 2

    return of.hooked(of.layer(forward, lambda ctx, dy: dy * ctx.saved_tensors[1]).apply)


@CASES.every()
def test_as_in_torch(theirs, mode, one):
    compare(theirs, mode, one)


def test_an_attribute_of_the_class_changed_between_calls(theirs, monkeypatch):
    """Change an attribute of a class after the first call: a compiled gradient uses the value at the first call."""
    args = X, np.array(0.7, np.float32)
    one = Row("scaled", lambda of: of.text(layers).AuxLossScaler.apply, args, wrt=(1,), orders=1, summed=True)
    compiled = jax.jit(jax.grad(lambda x, loss: ported.AuxLossScaler.apply(x, loss).sum(), 1))
    for scale in (2, 5):
        for module in (theirs.text(layers), ported):
            monkeypatch.setattr(module.AuxLossScaler, "scale", scale)
        for side in (theirs, Ours("eager")):
            assert side.run(one).gradients == [[scale]]
        assert compiled(*args) == 2
