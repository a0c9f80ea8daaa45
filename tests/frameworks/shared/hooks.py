"""Layers and operations under saved-tensor hooks, with the number of calls of each hook."""

from __future__ import annotations

import contextlib

from tests.kit.oracle import Mine, Table, X, Y, fail

from .agree import SHARED, doubled_tanh, product

# How many times the hooks are called: packs and unpacks.
HOOKS = Table()


# Paddle packs all the same.
@HOOKS.count(orders=0, wrt=(), theirs={"paddle": (2, 0), "torch": (0, 0)}, ours=(0, 0))
def without_differentiation(of):
    layer = product(of)

    def fourth_power(x):
        square = layer.apply(x, x)
        return square * square

    return of.hooked(fourth_power)


@HOOKS.count(X, Y, theirs=(0, 0), ours=(0, 0))
def behind_a_block_left_by_an_exception(of):
    layer = product(of)

    def apply(x, y):
        with contextlib.suppress(Mine):
            of.hooked(fail)()
        return layer.apply(x, y) * y

    return apply


@HOOKS.count(X, Y, theirs=(2, 2), ours=(2, 2))
def plain_product(of):
    return of.hooked(of.multiply)


@HOOKS.count(theirs=(1, 1), ours=(1, 1))
def plain_exp(of):
    return of.hooked(of.exp)


@HOOKS.count(X, Y, theirs=(2, 2), ours=(2, 2))
def layer_that_saves_its_inputs(of):
    return of.hooked(product(of).apply)


@SHARED.add(X, Y, orders=1)
def what_hooks_get_and_when(of):
    """The log compares it."""

    def pack(x):
        of.note(("pack", x))
        return {"hidden": x}

    def unpack(kept):
        of.note(("unpack", kept))
        return kept["hidden"]

    return of.hooked(product(of).apply, pack, unpack)


@HOOKS.count(theirs=(1, 1), ours=(1, 1))
def layer_that_saves_its_output(of):
    return of.hooked(doubled_tanh(of).apply)


@HOOKS.count(theirs=(1, 0), ours=(1, 0))
def layer_that_does_not_ask(of):
    return of.hooked(of.layer(of.saving(lambda x: x * 2), lambda ctx, dy: dy * 3).apply)


@HOOKS.count(theirs=(0, 0), ours=(0, 0))
def tensor_on_an_attribute(of):
    def forward(ctx, x):
        ctx.x = x
        return of.sin(x)

    return of.hooked(of.layer(forward, lambda ctx, dy: dy * ctx.x).apply)


@HOOKS.count(theirs=(1, 1), ours=(1, 1))
def integers_saved(of):
    def forward(ctx, x):
        ctx.save_for_backward(of.cast(x * 10, "int32"))
        return x * 2

    return of.hooked(of.layer(forward, lambda ctx, dy: dy * of.cast(of.saved(ctx)[0], "float32")).apply)


@HOOKS.count(X, Y, theirs=(2, 2), ours=(2, 2))
def backward_uses_what_unpack_returns(of):
    return of.hooked(product(of).apply, unpack=lambda kept: kept["hidden"] * 10)


@HOOKS.count(X, Y, theirs=(2, 2), ours=(2, 2))
def operation_uses_what_unpack_returns(of):
    return of.hooked(of.multiply, unpack=lambda kept: kept["hidden"] * 10)


# The same tensor is packed once here, and once per use there.
@HOOKS.count(theirs=(2, 2), ours=(1, 1))
def square(of):
    return of.hooked(lambda x: x * x)


@HOOKS.count(X, Y, theirs=(4, 4), ours=(2, 4))
def tensor_kept_by_two_operations(of):
    return of.hooked(lambda x, y: (x * y, y * x))


@HOOKS.count(theirs=(2, 2), ours=(1, 1))
def layer_of_one_tensor_twice(of):
    layer = product(of)
    return of.hooked(lambda x: layer.apply(x, x))


# Asking twice unpacks once here.
@HOOKS.count(X, Y, theirs=(2, 4), ours=(2, 2))
def saved_tensors_read_twice(of):
    return of.hooked(
        of.layer(of.saving(lambda a, b: a * b), lambda ctx, dy: (dy * of.saved(ctx)[1], dy * of.saved(ctx)[0])).apply
    )


@HOOKS.count(X, Y, wrt=(0,), theirs={"paddle": (2, 2), "torch": (1, 1)}, ours=(1, 1))
def one_factor_needs_a_gradient(of):
    return of.hooked(of.multiply)


# Operations inside forward save nothing that anyone could ask for, but Paddle packs them.
@HOOKS.count(theirs={"paddle": (3, 1), "torch": (1, 1)}, ours=(1, 1))
def layer_inside_a_layer(of):
    inner = product(of)

    return of.hooked(
        of.layer(of.saving(lambda x: inner.apply(x, x) * 1), lambda ctx, dy: 2 * dy * of.saved(ctx)[0]).apply
    )
