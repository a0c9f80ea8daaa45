"""What Paddle and torch both do otherwise, and what is refused."""

from __future__ import annotations

from tests.kit.oracle import Mine, Table, X, Y, fail

from .hooks import product

DIFFERENCES = Table()


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


@DIFFERENCES.differ(theirs=[3 + 1], ours=[1])
def second_call_of_mark_non_differentiable(of):
    def forward(ctx, x):
        y, z = x * 2, x * 3
        ctx.mark_non_differentiable(y)
        ctx.mark_non_differentiable(z)
        return y, z

    layer = of.layer(forward, lambda ctx, dy, dz: dy * 3 + dz * 5)
    return lambda x: (*layer.apply(x), x)


@DIFFERENCES.differ(theirs=[7], ours=RuntimeError, match="called twice")
def saving_twice(of):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_backward(x * 0, x * 0 + 7)
        return x * 2

    return of.layer(forward, lambda ctx, dy: dy * of.saved(ctx)[1]).apply


for call in ("save_for_backward", "mark_non_differentiable", "set_materialize_grads"):

    @DIFFERENCES.differ(label=call, theirs=[3], ours=RuntimeError, match=f"{call} was called in backward")
    def recording_in_backward(of, call=call):
        def backward(ctx, dy):
            getattr(ctx, call)(dy if call != "set_materialize_grads" else False)
            return dy * 3

        return of.layer(lambda ctx, x: x * 2, backward).apply

    @DIFFERENCES.differ(label=call, theirs=[3], ours=RuntimeError, match=f"{call} was called in code that ran after")
    def recording_after_forward(of, call=call):
        contexts = []

        def forward(ctx, x):
            contexts.append(ctx)
            return x * 2

        def apply(x):
            y = of.layer(forward, lambda ctx, dy: dy * 3).apply(x)
            getattr(contexts[-1], call)(y if call != "set_materialize_grads" else False)
            return y

        return apply


@DIFFERENCES.differ(theirs=[3], ours=ValueError, match="mark_non_differentiable")
def mark_what_is_not_returned(of):
    def forward(ctx, x):
        ctx.mark_non_differentiable(x + 1)
        return x * 2

    return of.layer(forward, lambda ctx, dy: dy * 3).apply


@DIFFERENCES.differ(theirs=[1], ours=[3])
def tensor_in_a_dict(of):
    layer = of.layer(lambda ctx, d: d["x"] * 2, lambda ctx, dy: {"x": dy * 2})
    return lambda x: (layer.apply({"x": x}), x)


@DIFFERENCES.differ(X, Y, theirs=TypeError, ours=[Y, X])
def hooks_as_a_decorator(of):
    hooks = of.hooks(lambda x: x, lambda x: x)
    return lambda x, y: hooks(of.multiply)(x, y)


@DIFFERENCES.differ(theirs=Mine, ours=Mine, match="on purpose")
def exception_in_forward(of):
    return of.layer(fail, lambda ctx, dy: dy).apply


@DIFFERENCES.differ(theirs=NotImplementedError, ours=NotImplementedError)
def no_forward(of):
    return type("Layer", (of.base,), {}).apply


# The sides raise what is written down where these are entered.
def exception_in_backward(of):
    return of.layer(lambda ctx, x: x * 2, fail).apply


def unknown_attribute(of):
    return of.layer(lambda ctx, x: x * 2, lambda ctx, dy: ctx.nothing_set).apply


def hooks_that_are_not_callable(of):
    def inside(x, y):
        with of.hooks(1, 2):
            return x * y

    return inside


FAILING_HOOKS = []

for name in ("pack", "unpack"):

    def exception_in_a_hook_of_an_operation(of, name=name):
        return of.hooked(of.multiply, **{name: fail})

    def exception_in_a_hook_of_a_layer(of, name=name):
        return of.hooked(product(of).apply, **{name: fail})

    FAILING_HOOKS += [(name, exception_in_a_hook_of_an_operation), (name, exception_in_a_hook_of_a_layer)]
