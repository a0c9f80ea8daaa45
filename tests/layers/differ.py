"""Defines layers with other results in Paddle or torch, and layers that this package refuses."""

import numpy as np

from tests.kit.oracle import Table, X, Y

DIFFERENCES = Table()
TWO = np.array([2], np.float32)
REFUSED = {"paddle": ValueError, "torch": RuntimeError}  # what they raise for a gradient that they do not take


# The real frameworks keep one context for every run of backward, here each run starts from what forward left.
@DIFFERENCES.differ(theirs=[1000], ours=[200], orders=2)
def attribute_changed_by_backward(of):
    def forward(ctx, x):
        ctx.scale = 2
        return x * 3

    def backward(ctx, dy):
        ctx.scale = ctx.scale * 5
        return dy * ctx.scale

    layer = of.layer(forward, backward)
    return lambda x: layer.apply(x) ** 2


# One tensor in two places is one output there, which gets the sum in the second place.
@DIFFERENCES.differ(theirs=[2 * 5], ours=[3 + 5])
def output_returned_twice(of):
    def forward(ctx, x):
        y = x * 2
        return y, y

    return of.layer(forward, lambda ctx, dy, dz: dy * 3 + dz * 5).apply


# torch raises an error only where a gradient of this output is asked for.
@DIFFERENCES.differ(theirs=[3], ours=UserWarning)
def only_an_integer_output(of):
    layer = of.layer(lambda ctx, x: of.cast(x * 10, "int32"), lambda ctx, dy: of.cast(dy, "float32") + 1)
    return lambda x: (layer.apply(x), x * 3)


@DIFFERENCES.differ(theirs=[3 + 1], ours=[1])
def second_call_of_mark_non_differentiable(of):
    def forward(ctx, x):
        y, z = x * 2, x * 3
        ctx.mark_non_differentiable(y)
        ctx.mark_non_differentiable(z)
        return y, z

    layer = of.layer(forward, lambda ctx, dy, dz: dy * 3 + dz * 5)
    return lambda x: (*layer.apply(x), x)


# The numbers of the notebook about porting: of x times the cube of x, whose second derivative at 2 is 48.
for dialect in ("layer", "function"):

    def times_a_cube(of, save, rule, dialect=dialect):
        def forward(ctx, x):
            ctx.save_for_backward(save(x))
            return x * x * x

        layer = getattr(of, dialect)(forward, rule)
        return lambda x: x * layer.apply(x)

    # The frameworks drop what a saved intermediate owes to the input.
    @DIFFERENCES.differ(TWO, label=dialect, theirs=[24], ours=[48], orders=2)
    def second_derivative_through_an_intermediate(of, times_a_cube=times_a_cube):
        return times_a_cube(of, lambda x: x * x, lambda ctx, dy: 3 * dy * of.saved(ctx)[0])

    # Paddle's is not public. Both cut the second derivative off in silence.
    @DIFFERENCES.differ(TWO, label=dialect, theirs=[12], ours=RuntimeError, orders=2, match="once_differentiable")
    def once_differentiable(of, times_a_cube=times_a_cube):
        return times_a_cube(of, lambda x: x, of.once_differentiable(lambda ctx, dy: 3 * dy * of.saved(ctx)[0] ** 2))


for call in ("save_for_backward", "mark_non_differentiable", "set_materialize_grads"):

    @DIFFERENCES.differ(label=call, theirs=[3], ours=RuntimeError, match=call)
    def recording_in_backward(of, call=call):
        def backward(ctx, dy):
            getattr(ctx, call)(dy if call != "set_materialize_grads" else False)
            return dy * 3

        return of.layer(lambda ctx, x: x * 2, backward).apply


@DIFFERENCES.differ(theirs=[3], ours=ValueError, match="mark_non_differentiable")
def mark_what_is_not_returned(of):
    def forward(ctx, x):
        ctx.mark_non_differentiable(x + 1)
        return x * 2

    return of.layer(forward, lambda ctx, dy: dy * 3).apply


# What backward gives for x and y.
GIVEN = {
    # `Function` takes surplus Nones.
    "None too many": (
        {"paddle": ValueError, "torch": [3, 5]},
        ValueError,
        "backward",
        lambda dy: (dy * 3, dy * 5, None),
    ),
    # Paddle and torch take a tuple alone.
    "list of two": (REFUSED, [3, 5], "", lambda dy: [dy * 3, dy * 5]),
    # Here NumPy arrays are tensors.
    "NumPy": (REFUSED, [3, 5], "", lambda dy: (dy * 3, np.full(2, 5, np.float32))),
}

for name, (their, our, match, give) in GIVEN.items():

    @DIFFERENCES.differ(X, Y, label=name, theirs=their, ours=our, match=match)
    def given_for_two(of, give=give):
        return of.layer(lambda ctx, x, y: x + y, lambda ctx, dy: give(dy)).apply


@DIFFERENCES.differ(theirs=[1], ours=[3])
def tensor_in_a_dict(of):
    layer = of.layer(lambda ctx, d: d["x"] * 2, lambda ctx, dy: {"x": dy * 2})
    return lambda x: (layer.apply({"x": x}), x)


@DIFFERENCES.differ(X, Y, theirs=TypeError, ours=[Y, X])
def hooks_as_a_decorator(of):
    hooks = of.hooks(lambda x: x, lambda x: x)
    return lambda x, y: hooks(of.multiply)(x, y)
