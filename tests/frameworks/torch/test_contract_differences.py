"""What this library and real torch both refuse, and each difference between them, from both sides."""

from __future__ import annotations

from tests.frameworks.shared.agree import product
from tests.frameworks.shared.differences import DIFFERENCES
from tests.kit.oracle import HALVES, Table, X, Y, compare

TABLE = Table(DIFFERENCES)

GRADIENTS = {
    "complex": lambda of, dy: of.cast(dy, "complex64") * (3 + 3j),
    "scalar": lambda of, dy: dy.sum(),
    "smaller": lambda of, dy: of.ones((1,)),
    "other": lambda of, dy: of.ones((5,)),
}

for name, give in GRADIENTS.items():

    @TABLE.differ(label=name, theirs=RuntimeError, ours=ValueError, match="'x'")
    def gradient_that_does_not_fit(of, give=give):
        return of.layer(lambda ctx, x: x * 2, lambda ctx, dy: give(of, dy)).apply


# One entry per tensor argument is taken too, as Paddle has it.
@TABLE.differ(X, Y, theirs=RuntimeError, ours=[3, 5])
def one_entry_per_tensor_argument(of):
    layer = of.layer(lambda ctx, x, scale, y: x * scale + y, lambda ctx, dy: (dy * 3, dy * 5))
    return lambda x, y: layer.apply(x, 2.0, y)


@TABLE.differ(X, Y, wrt=(0,), theirs=RuntimeError, ours=[3])
def trailing_entry_left_out(of):
    return of.layer(lambda ctx, x, y: x + y, lambda ctx, dy: dy * 3).apply


@TABLE.differ(X, Y, wrt=(1,), theirs=RuntimeError, ours=[5])
def text_where_no_gradient_is_needed(of):
    return of.layer(lambda ctx, x, y: x + y, lambda ctx, dy: ("text", dy * 5)).apply


# Statics have a cotangent of None there, and none at all here.
@TABLE.differ(theirs=[3], ours=[1])
def statics_among_the_outputs(of):
    layer = of.layer(lambda ctx, x: (x * 2, 1, "text"), lambda ctx, *dys: dys[0] * len(dys))
    return layer.apply


# A list is a static there, whatever it holds.
@TABLE.differ(theirs=[5], ours=[3 + 5])
def list_among_the_outputs(of):
    def backward(ctx, dy, dz):
        return dy * 5 if dz is None else dz[0] * 3 + dy * 5

    return of.layer(lambda ctx, x: (x * 2, [x * 2, x * 2]), backward).apply


@TABLE.differ(theirs=[1], ours=[3 + 5 + 1])
def list_of_outputs(of):
    layer = of.layer(lambda ctx, x: [x * 2, x * 2], lambda ctx, dy, dz: dy * 3 + dz * 5)
    return lambda x: (*layer.apply(x), x)


for name, value in {"number": 3, "list": [X]}.items():

    @TABLE.differ(label=name, theirs=TypeError, ours=[3])
    def saving_what_is_no_tensor(of, value=value):
        def forward(ctx, x):
            ctx.save_for_backward(value)
            return x * 2

        return of.layer(forward, lambda ctx, dy: dy * 3).apply


@TABLE.differ(theirs=AttributeError, ours=AttributeError, match="saved_tensors")
def saved_tensors_assigned(of):
    def forward(ctx, x):
        ctx.saved_tensors = (x,)
        return x * 2

    return of.layer(forward, lambda ctx, dy: dy * 3).apply


# What unpack returns in place of a tensor.
UNPACKED = {
    # torch computes with another dtype, and broadcasts.
    "dtype": (HALVES, lambda of, x: of.cast(x, "float16")),
    "scalar": ([6, 6], lambda of, x: of.ones(()) * 6),
}

for name, (their, unpacked) in UNPACKED.items():

    @TABLE.differ(X, Y, label=name, theirs=their, ours=ValueError, match="unpack_hook")
    def unpacked_for_an_operation(of, unpacked=unpacked):
        return of.hooked(of.multiply, unpack=lambda kept: unpacked(of, kept["hidden"]))


@TABLE.differ(X, Y, theirs=RuntimeError, ours=ValueError, match="unpack_hook")
def unpacked_in_another_shape_for_a_layer(of):
    return of.hooked(product(of).apply, unpack=lambda kept: of.ones((3, 3)))


@TABLE.every()
def test_errors_and_differences(theirs, mode, one):
    compare(theirs, mode, one)
