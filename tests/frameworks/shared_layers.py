"""Layers for Paddle, torch and this library: where all agree, and where both do otherwise."""

from __future__ import annotations

import numpy as np

from tests.kit.oracle import Cases, Mine, Ours, Theirs, X, Y, Z, assert_same, fail

# -- layers that Paddle, torch and this library agree on --------------------------------------------

SHARED = Cases()


@SHARED.add()
def straight_through(of):
    return of.layer(lambda ctx, x: of.round(x * 3), lambda ctx, dy: dy).apply


def doubled_tanh(of):
    def forward(ctx, x):
        y = of.tanh(x)
        ctx.save_for_backward(y)
        return y

    def backward(ctx, dy):
        (y,) = of.saved(ctx)
        return 2 * dy * (1 - y * y)

    return of.layer(forward, backward)


@SHARED.add(orders=3)
def saved_output(of):
    return doubled_tanh(of).apply


def doubled_sine(of):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return of.sin(x)

    def backward(ctx, dy):
        (x,) = of.saved(ctx)
        return 2 * dy * of.cos(x)

    return of.layer(forward, backward)


@SHARED.add(orders=3)
def saved_input(of):
    return doubled_sine(of).apply


@SHARED.add()
def applied_to_its_output(of):
    layer = doubled_tanh(of)
    return lambda x: layer.apply(layer.apply(x))


@SHARED.add()
def gradients_add_up(of):
    layer = doubled_tanh(of)
    return lambda x: layer.apply(x) + layer.apply(x * 1) + x


@SHARED.add(X, Y)
def input_and_output_on_attributes(of):
    def forward(ctx, x, y):
        z = of.tanh(x) * y
        ctx.factor, ctx.kept = 3, {"input": (x, None), "output": [z]}
        return z

    def backward(ctx, dz):
        x, z = ctx.kept["input"][0], ctx.kept["output"][0]
        return dz * z * ctx.factor, dz * of.sin(x)

    return of.layer(forward, backward).apply


@SHARED.add()
def function_on_an_attribute(of):
    def forward(ctx, x):
        ctx.power = lambda v: v**3
        ctx.save_for_backward(x)
        return x * 2

    return of.layer(forward, lambda ctx, dy: dy * ctx.power(*of.saved(ctx))).apply


@SHARED.add()
def attribute_set_in_backward(of):
    def backward(ctx, dy):
        ctx.scale, ctx.more = 5, 1
        return dy * (ctx.scale + ctx.more)

    return of.layer(lambda ctx, x: x * 3, backward).apply


@SHARED.add()
def square_of_the_cotangent(of):
    return of.layer(lambda ctx, x: of.sin(x), lambda ctx, dy: dy * dy).apply


@SHARED.add()
def clipped_cotangent(of):
    return of.layer(lambda ctx, x: x * x, lambda ctx, dy: of.clip(dy * 2, -1.7, 1.7)).apply


@SHARED.add()
def gradient_without_the_cotangent(of):
    return of.layer(lambda ctx, x: x * 2, lambda ctx, dy: of.ones_like(dy)).apply


@SHARED.add(X, Y)
def two_inputs(of):
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    def backward(ctx, dy):
        a, b = of.saved(ctx)
        return dy * b * 2, dy * a * 3

    return of.layer(forward, backward).apply


@SHARED.add()
def one_tensor_passed_twice(of):
    layer = two_inputs(of)
    return lambda x: layer(x, x)


@SHARED.add(X, Y)
def none_for_an_input(of):
    def forward(ctx, a, b):
        ctx.save_for_backward(a)
        return a * b

    return of.layer(forward, lambda ctx, dy: (None, dy * of.saved(ctx)[0])).apply


@SHARED.add()
def none_for_the_only_input(of):
    layer = of.layer(lambda ctx, x: x * 2, lambda ctx, dy: None)
    return lambda x: layer.apply(x) + x


@SHARED.add(X, Y)
def unused_input(of):
    return of.layer(lambda ctx, a, b: a * 2, lambda ctx, dy: (dy * 2, dy * 0)).apply


for used in ((0,), (1,), (0, 1)):

    @SHARED.add(label=str(used), used=used)
    def two_outputs(of):
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x, of.cast(of.stack([x, x]), "float16")

        def backward(ctx, dy, dz):
            (x,) = of.saved(ctx)
            return dy * x * 2 + of.cast(dz, "float32").sum(0) * 3

        return of.layer(forward, backward).apply

    @SHARED.add(label=str(used), used=used)
    def two_outputs_not_materialized(of):
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return x * x, of.sin(x)

        def backward(ctx, dy, dz):
            return (0 if dy is None else dy * 2) + (0 if dz is None else dz * 3)

        return of.layer(forward, backward).apply


def marked(of, materialize=True):
    """The first output is marked; backward gives itself away by a gradient that needs no cotangent."""

    def forward(ctx, x):
        ctx.set_materialize_grads(materialize)
        y, z = x * 2, of.sin(x)
        ctx.mark_non_differentiable(y)
        return y, z

    layer = of.layer(forward, lambda ctx, dy, dz: of.ones_like(dz) * 7 + dz)
    return lambda x: (*layer.apply(x), x * 3)


@SHARED.add()
@SHARED.add(label="alone", used=(0, 2))
def marked_output(of):
    return marked(of)


@SHARED.add()
def marked_output_not_materialized(of):
    return marked(of, materialize=False)


@SHARED.add(label="constant", used=(1,))
def no_output_used(of):
    layer = of.layer(lambda ctx, x: x * 2, lambda ctx, dy: of.ones_like(dy))
    return lambda x: (layer.apply(x), x * 3)


@SHARED.add()
def every_output_marked(of):
    def forward(ctx, x):
        y = x * 2
        ctx.mark_non_differentiable(y)
        return y

    layer = of.layer(forward, lambda ctx, dy: of.ones_like(dy))
    return lambda x: (layer.apply(x), x * 3)


@SHARED.add()
@SHARED.add(label="alone", used=(1,))
def integer_and_bool_outputs(of):
    layer = of.layer(lambda ctx, x: (of.cast(x * 10, "int32"), x * 2, x > 0), lambda ctx, di, dy, db: dy * 2)
    return lambda x: (*layer.apply(x), x * 3)


@SHARED.add()
def integer_output_not_materialized(of):
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return of.cast(x * 10, "int32"), x * 2

    return of.layer(forward, lambda ctx, di, dy: dy * 2).apply


@SHARED.add()
def tuple_of_one(of):
    return of.layer(lambda ctx, x: (of.sin(x),), lambda ctx, dy: dy * 3).apply


@SHARED.add()
def layer_inside_forward(of):
    inner = doubled_sine(of)

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return inner.apply(x) * 2

    return of.layer(forward, lambda ctx, dy: dy * 5 * of.saved(ctx)[0]).apply


@SHARED.add()
def layer_inside_backward(of):
    inner = doubled_sine(of)

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    return of.layer(forward, lambda ctx, dy: inner.apply(dy * 3) * of.saved(ctx)[0]).apply


@SHARED.add(orders=3)
def itself_inside_backward(of):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return of.sin(x)

    layer = of.layer(forward, lambda ctx, dy: dy * layer.apply(of.saved(ctx)[0]))
    return layer.apply


@SHARED.add()
def backward_overridden(of):
    base = doubled_tanh(of)

    class Tripled(base):
        @staticmethod
        def backward(ctx, dy):
            return base.backward(ctx, dy) * 3

    return lambda x: base.apply(x) * Tripled.apply(x)


@SHARED.add()
def class_methods(of):
    def forward(cls, ctx, x):
        ctx.save_for_backward(x)
        return of.sin(x) * cls.scale

    def backward(cls, ctx, dy):
        return dy * of.saved(ctx)[0] * cls.scale

    return of.layer(None, None, forward=classmethod(forward), backward=classmethod(backward), scale=3.0).apply


@SHARED.add(X, Y, wrt=(0,))
def input_that_needs_no_gradient_returned_beside(of):
    return of.layer(lambda ctx, x, y: (of.sin(x), y * 1), lambda ctx, dx, dy: (dx * 2, None)).apply


@SHARED.add(X, np.array([2, 3], np.int32))
def integer_input(of):
    return of.layer(lambda ctx, x, n: x * of.cast(n, "float32"), lambda ctx, dy: (dy * 2, None)).apply


@SHARED.add(np.float32(0.7).reshape(()), np.zeros((0, 2), np.float32))
def scalars_and_empty_tensors(of):
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        return of.sin(x), y * 2

    return of.layer(forward, lambda ctx, dx, dy: (dx * of.saved(ctx)[0], dy * 3)).apply


def complex_square(of, **members):
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z

    def backward(ctx, dy):
        (z,) = of.saved(ctx)
        return dy * 2 * of.conj(z)

    return of.layer(forward, backward, **members).apply


@SHARED.add(Z, orders=1)
def complex_numbers(of):
    return complex_square(of, complex_convention="paddle")


# -- what is written down of both -------------------------------------------------------------------

DOCUMENTED = Cases()


@DOCUMENTED.differ(np.array([1.3], np.float32), theirs=[6.0], ours=[6.0], orders=2)
def cube_of_straight_through_round(of):
    layer = of.layer(lambda ctx, x: of.round(x), lambda ctx, dy: dy)
    return lambda x: layer.apply(x) ** 3


@DOCUMENTED.differ(np.array([0.3], np.float32), theirs=[-2.132728], ours=[-2.132728], orders=2)
def doubled_tanh_once(of):
    return doubled_tanh(of).apply


@DOCUMENTED.differ(np.array([0.3], np.float32), theirs=[-10.906823], ours=[-10.906823], orders=2)
def doubled_tanh_twice(of):
    layer = doubled_tanh(of)
    return lambda x: layer.apply(layer.apply(x))


# -- what Paddle and torch both do otherwise --------------------------------------------------------

DIFFERENCES = Cases()


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


# -- saved-tensor hooks -----------------------------------------------------------------------------

# How many times the hooks are called: packs and unpacks.
HOOKS = Cases()


def packs_without_differentiation(theirs: Theirs, mode: str) -> dict[str, int]:
    ours, constant = Ours(mode), theirs.leaf(X, needs=False)
    assert_same(np.asarray(ours.mode(fourth_power(ours))(X)), theirs.numpy(fourth_power(theirs)(constant)))
    return {"ours": ours.packs, "theirs": theirs.packs}


def fourth_power(of):
    """Of a layer and a plain product."""
    layer = product(of)

    def apply(x):
        square = layer.apply(x, x)
        return square * square

    return of.hooked(apply)


def product(of):
    """Saves its inputs, and reads them once."""

    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    def backward(ctx, dy):
        a, b = of.saved(ctx)
        return dy * b, dy * a

    return of.layer(forward, backward)


@HOOKS.add(X, Y, theirs=(2, 2), ours=(2, 2))
def plain_product(of):
    return of.hooked(of.multiply)


@HOOKS.add(X.reshape(1, 2), Y.reshape(2, 1), theirs=(2, 2), ours=(2, 2))
def plain_matmul(of):
    return of.hooked(of.matmul)


@HOOKS.add(theirs=(1, 1), ours=(1, 1))
def plain_exp(of):
    return of.hooked(of.exp)


# JAX keeps y and 1 - y.
@HOOKS.add(theirs=(1, 1), ours=(2, 2))
def plain_tanh(of):
    return of.hooked(of.tanh)


@HOOKS.add(X, Y, theirs=(2, 2), ours=(2, 2))
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


@HOOKS.add(theirs=(1, 1), ours=(1, 1))
def layer_that_saves_its_output(of):
    return of.hooked(doubled_tanh(of).apply)


@HOOKS.add(theirs=(1, 0), ours=(1, 0))
def layer_that_does_not_ask(of):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    return of.hooked(of.layer(forward, lambda ctx, dy: dy * 3).apply)


@HOOKS.add(theirs=(0, 0), ours=(0, 0))
def tensor_on_an_attribute(of):
    def forward(ctx, x):
        ctx.x = x
        return of.sin(x)

    return of.hooked(of.layer(forward, lambda ctx, dy: dy * ctx.x).apply)


@HOOKS.add(theirs=(1, 1), ours=(1, 1))
def integers_saved(of):
    def forward(ctx, x):
        ctx.save_for_backward(of.cast(x * 10, "int32"))
        return x * 2

    return of.hooked(of.layer(forward, lambda ctx, dy: dy * of.cast(of.saved(ctx)[0], "float32")).apply)


@HOOKS.add(X, Y, theirs=(2, 2), ours=(2, 2))
def backward_uses_what_unpack_returns(of):
    return of.hooked(product(of).apply, unpack=lambda kept: kept["hidden"] * 10)


@HOOKS.add(X, Y, theirs=(2, 2), ours=(2, 2))
def operation_uses_what_unpack_returns(of):
    return of.hooked(of.multiply, unpack=lambda kept: kept["hidden"] * 10)


# The same tensor is packed once here, and once per use there.
@HOOKS.add(theirs=(2, 2), ours=(1, 1))
def square(of):
    return of.hooked(lambda x: x * x)


@HOOKS.add(X, Y, theirs=(4, 4), ours=(2, 4))
def tensor_kept_by_two_operations(of):
    return of.hooked(lambda x, y: (x * y, y * x))


@HOOKS.add(theirs=(2, 2), ours=(1, 1))
def layer_of_one_tensor_twice(of):
    layer = product(of)
    return of.hooked(lambda x: layer.apply(x, x))


# JAX keeps the factor, a tensor to it.
@HOOKS.add(theirs=(0, 0), ours=(1, 1))
def product_with_a_number(of):
    return of.hooked(lambda x: x * 2)


# Asking twice unpacks once here.
@HOOKS.add(X, Y, theirs=(2, 4), ours=(2, 2))
def saved_tensors_read_twice(of):
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    return of.hooked(of.layer(forward, lambda ctx, dy: (dy * of.saved(ctx)[1], dy * of.saved(ctx)[0])).apply)


@DIFFERENCES.differ(X, Y, theirs=TypeError, ours=[Y, X])
def hooks_as_a_decorator(of):
    hooks = of.hooks(lambda x: x, lambda x: x)
    return lambda x, y: hooks(of.multiply)(x, y)


# -- what is refused --------------------------------------------------------------------------------


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
