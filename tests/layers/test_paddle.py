"""The same layers have the same results and errors in real Paddle and here; each difference is tested for both.

Real Paddle 3.3 dies of a segmentation fault, and so is not asked, where an output is a list of several tensors, where a
list of one gets no cotangent, and where the backward of a layer runs twice in one graph.
"""

import numpy as np
import pytest

from tests.hooks.spy import IDLE
from tests.kit.oracle import Paddle, Table, X, Y, Z, compare
from tests.layers.agree import HOOKS, SHARED, noting_what_is_saved, product
from tests.layers.differ import DIFFERENCES

from .after_paddle import PORTS

pytestmark = [pytest.mark.frameworks, IDLE]
CASES = Table(SHARED + HOOKS + DIFFERENCES + PORTS)


@pytest.fixture
def theirs(paddle):
    yield Paddle(paddle)
    paddle.set_grad_enabled(True)  # which an exception in a hook of an operation leaves off


for name, outputs, give in (
    ("statics", lambda of, x: (1, x * 2, None, of.sin(x), "text"), lambda dy, dz: dy * 3 + dz * 5),
    ("a list", lambda of, x: [x * 2, of.sin(x)], lambda dy, dz: dy * 3 + dz * 5),
    ("lists", lambda of, x: (x * 2, [of.sin(x)], [], [1, "text"]), lambda dy, dz: dy * 3 + dz[0] * 5),
):

    @CASES.add(label=name)
    def statics_and_lists_among_the_outputs(of, outputs=outputs, give=give):
        return of.layer(lambda ctx, x: outputs(of, x), lambda ctx, dy, dz: give(dy, dz)).apply


@CASES.add(used=(0,))
def list_among_the_outputs_not_materialized(of):
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, [of.sin(x)]

    return of.layer(forward, lambda ctx, dy, dz: dy * 3).apply


@CASES.add(X, Y)
def list_argument(of):
    layer = of.layer(lambda ctx, both: both[0] + 2 * of.sin(both[1]), lambda ctx, dy: [dy * 3, dy * 5])
    return lambda x, y: layer.apply([x, y])


@CASES.add(X, Y, X)
def tuple_argument_beside_a_tensor(of):
    layer = of.layer(lambda ctx, both, z: both[0] + 2 * both[1] + z, lambda ctx, dy: ((dy * 3, dy * 5), dy * 7))
    return lambda x, y, z: layer.apply((x, y), z)


@CASES.add(X, Y)
def one_entry_per_tensor_argument(of):
    layer = of.layer(lambda ctx, a, scale, b, word=None: a * scale + b, lambda ctx, dy: (dy * 3, dy * 5))
    return lambda x, y: layer.apply(x, 2.0, y, word="text")


@CASES.add(X, Y, X)
def variable_keywords_follow_the_call(of):
    layer = of.layer(lambda ctx, x, **rest: x + 2 * rest["b"] + rest["a"], lambda ctx, dy: (dy, dy * 3, dy * 5))
    return lambda x, y, z: layer.apply(x, b=y, a=z)


@CASES.add(X, Y, wrt=(0,))
def trailing_entry_left_out(of):
    return of.layer(lambda ctx, x, y: of.sin(x) + y, lambda ctx, dy: dy * 3).apply


SAVED = {
    "no call": None,
    "empty": lambda x: (),
    "tensors": lambda x: (x, x + 1),
    "anything": lambda x: (1, "text", None, [x, {"key": x}]),
}

for what, save in SAVED.items():

    @CASES.add(label=what, orders=1)
    def what_saved_tensor_returns(of, save=save):
        return noting_what_is_saved(of, save, lambda ctx: ctx.saved_tensor())


# -- what both refuse, and each difference ---------------------------------------------------------


# A leaf returned as it is would be changed in place there, which Paddle refuses.
@CASES.differ(theirs=ValueError, ours=[3])
def leaf_returned(of):
    return of.layer(lambda ctx, x: x, lambda ctx, dy: dy * 3).apply


# The entry for a list has one gradient per tensor there, and the structure of the list here.
for name, their, our, give in (
    ("per tensor", [3, 5], ValueError, lambda dy: [dy * 3, dy * 5]),
    ("per place", [3, 0], [3, 5], lambda dy: [dy * 3, None, dy * 5]),
):

    @CASES.differ(X, Y, label=name, theirs=their, ours=our, match="Layer")
    def list_with_a_static(of, give=give):
        layer = of.layer(lambda ctx, parts: parts[0] * parts[1] + parts[2], lambda ctx, dy: give(dy))
        return lambda x, y: layer.apply([x, 2.0, y])


# Paddle wants None there, here it is ignored, whatever it is.
for name, entry in {"tensor": lambda dy: dy, "text": lambda dy: "text"}.items():

    @CASES.differ(X, Y, label=name, wrt=(1,), theirs=ValueError, ours=[5])
    def entry_where_no_gradient_is_needed(of, entry=entry):
        return of.layer(lambda ctx, x, y: x + y, lambda ctx, dy: (entry(dy), dy * 5)).apply


# Gradients follow the order of the call in Paddle, the order of the parameters here.
@CASES.differ(X, Y, theirs=[5, 3], ours=[3, 5])
def keywords_in_another_order(of):
    layer = of.layer(lambda ctx, a, b: a + b, lambda ctx, dy: (dy * 3, dy * 5))
    return lambda x, y: layer.apply(b=y, a=x)


# NumPy arrays are statics in Paddle, tensors here.
@CASES.differ(theirs=[3], ours=ValueError, match="backward")
def numpy_argument_before_a_tensor(of):
    layer = of.layer(lambda ctx, array, x: x * 2, lambda ctx, dy: dy * 3)
    return lambda x: layer.apply(np.ones(2, np.float32), x)


@CASES.differ(theirs=[0 + 1], ours=[3 + 1])
def dict_among_the_outputs(of):
    layer = of.layer(lambda ctx, x: (x * 2, {"key": x * 2}), lambda ctx, dy, *dz: dz[0]["key"] * 3 if dz else dy * 0)
    return lambda x: (*layer.apply(x), x)


# Paddle copies it, and loses the gradient.
@CASES.differ(theirs=[1], ours=[3 + 1])
def input_marked_not_inplace_returned(of):
    def forward(ctx, x):
        ctx.mark_not_inplace(x)
        return x

    layer = of.layer(forward, lambda ctx, dy: dy * 3)
    return lambda x: (layer.apply(x * 1), x)


# A gradient is not looked at there, where it arrives at a leaf; elsewhere Paddle casts it.
GRADIENTS = {
    "complex": (np.full(2, 3 + 3j, np.complex64), ValueError, lambda of, dy: of.cast(dy, "complex64") * (3 + 3j)),
    "wider": (np.full((1, 2), 3, np.float32), 3, lambda of, dy: of.reshape(dy * 3, (1, 2))),
    "other": (np.full(4, 3, np.float32), ValueError, lambda of, dy: of.reshape(of.stack([dy, dy]) * 3, (4,))),
}

for name, (their, our, give) in GRADIENTS.items():

    @CASES.differ(label=name, theirs=[their], ours=our if our is ValueError else [our], match="'x'")
    def gradient_that_does_not_fit(of, give=give):
        return of.layer(lambda ctx, x: x * 2, lambda ctx, dy: give(of, dy)).apply


# Of JAX's cotangents and gradients these are the conjugates; `complex_convention = "paddle"` translates.
@CASES.differ(Z, theirs=[2 * Z.conj()], ours=[2 * Z])
def complex_numbers_without_complex_convention(of):
    layer = of.layer(of.saving(lambda z: z * z), lambda ctx, dy: 2 * dy * of.conj(of.saved(ctx)[0]))
    return lambda z: of.real(layer.apply(z))


@CASES.differ(theirs=[1], ours=[2])
def list_with_a_static_among_the_outputs(of):
    layer = of.layer(lambda ctx, x: (x * 2, [x * 2, 1]), lambda ctx, dy, dz: dy * len(dz))
    return layer.apply


# NumPy arrays are statics there.
@CASES.differ(theirs=[1], ours=[2], used=(0,))
def numpy_array_among_the_outputs(of):
    return of.layer(lambda ctx, x: (x * 2, np.ones(2, np.float32)), lambda ctx, *dys: dys[0] * len(dys)).apply


# Paddle lets a gradient through integers; under JAX there is none.
@CASES.differ(theirs=[200 + 3], ours=[3])
def gradient_through_an_integer_output(of):
    def backward(ctx, di, dy):
        return of.cast(di, "float32") * 100 + dy * 3

    layer = of.layer(lambda ctx, x: (of.cast(x * 10, "int32"), x * 2), backward)

    def apply(x):
        i, y = layer.apply(x)
        return of.cast(i, "float32") * 2, y

    return apply


@CASES.differ(X, Y, theirs=ValueError, ours=[Y, X])
def a_block_within_a_block(of):
    return of.hooked(of.hooked(of.multiply))


# Paddle takes a tuple or list that pack returns apart, and unpacks each of its parts.
@CASES.differ(X, Y, theirs=OSError, ours=[Y, X])
def tuple_packed_for_a_layer(of):
    return of.hooked(product(of).apply, pack=lambda x: (x, 1), unpack=lambda kept: kept[0])


@CASES.every()
def test_as_in_paddle(theirs, mode, one):
    compare(theirs, mode, one)
