"""The rows of the contract that are Paddle's, asked of real Paddle; and each difference, from both sides.

Real Paddle 3.3 dies of a segmentation fault, and so is not asked, where an output is a list of several tensors, where a
list of one gets no cotangent, and where the backward of a layer runs twice in one graph.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

import pylayer_jax
from tests.frameworks.shared_layers import (
    DIFFERENCES,
    DOCUMENTED,
    FAILING_HOOKS,
    HOOKS,
    SHARED,
    exception_in_backward,
    hooks_that_are_not_callable,
    packs_without_differentiation,
    product,
    unknown_attribute,
)
from tests.kit.oracle import (
    HALVES,
    MODES,
    Case,
    Cases,
    Mine,
    Ours,
    Paddle,
    X,
    Y,
    Z,
    assert_same,
    compare,
    compare_higher_orders,
    compare_hooks,
    compare_undifferentiated,
    compare_with_table,
    fail,
)

CASES, TABLE, COUNTS = Cases(SHARED), Cases(DOCUMENTED + DIFFERENCES), Cases(HOOKS)


@pytest.fixture
def theirs(paddle):
    yield Paddle(paddle)
    paddle.set_grad_enabled(True)  # which an exception in a hook of an operation leaves off


# -- what both do -----------------------------------------------------------------------------------


@CASES.add()
def statics_among_the_outputs(of):
    return of.layer(lambda ctx, x: (1, x * 2, None, of.sin(x), "text"), lambda ctx, dy, dz: dy * 3 + dz * 5).apply


@CASES.add()
def list_of_outputs(of):
    return of.layer(lambda ctx, x: [x * 2, of.sin(x)], lambda ctx, dy, dz: dy * 3 + dz * 5).apply


@CASES.add()
def list_of_one_output(of):
    return of.layer(lambda ctx, x: [of.sin(x)], lambda ctx, dy: dy * 3).apply


@CASES.add()
def list_among_the_outputs(of):
    layer = of.layer(lambda ctx, x: (x * 2, [of.sin(x)], [], [1, "text"]), lambda ctx, dy, dz: dy * 3 + dz[0] * 5)
    return layer.apply


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


@CASES.add(X, Y)
def list_argument_with_none_in_its_gradient(of):
    layer = of.layer(lambda ctx, both: both[0] + 2 * both[1], lambda ctx, dy: [None, dy * 5])
    return lambda x, y: layer.apply([x, y])


@CASES.add(X, Y, X)
def tuple_argument_beside_a_tensor(of):
    layer = of.layer(lambda ctx, both, z: both[0] + 2 * both[1] + z, lambda ctx, dy: ((dy * 3, dy * 5), dy * 7))
    return lambda x, y, z: layer.apply((x, y), z)


@CASES.add(X, Y)
def one_entry_per_tensor_argument(of):
    layer = of.layer(lambda ctx, a, scale, b, word=None: a * scale + b, lambda ctx, dy: (dy * 3, dy * 5))
    return lambda x, y: layer.apply(x, 2.0, y, word="text")


@CASES.add()
def defaults(of):
    layer = of.layer(lambda ctx, x, bias=None, scale=3.0: x * scale, lambda ctx, dy: dy * 3)
    return lambda x: layer.apply(x) + layer.apply(x, None) + layer.apply(x, scale=2.0)


@CASES.add(X, Y, X)
def variable_arguments(of):
    return of.layer(lambda ctx, *xs: of.sin(xs[0]) + xs[1] * xs[2], lambda ctx, dy: (dy, dy * 3, dy * 5)).apply


@CASES.add(X, Y, X)
def variable_keywords_follow_the_call(of):
    layer = of.layer(lambda ctx, x, **rest: x + 2 * rest["b"] + rest["a"], lambda ctx, dy: (dy, dy * 3, dy * 5))
    return lambda x, y, z: layer.apply(x, b=y, a=z)


@CASES.add(X, Y)
def keyword_only_argument(of):
    layer = of.layer(lambda ctx, x, scale=1.0, *, bias: x * scale + bias, lambda ctx, dy: (dy * 3, dy * 5))
    return lambda x, y: layer.apply(x, scale=2.0, bias=y)


@CASES.add(X, Y, wrt=(0,))
def trailing_entry_left_out(of):
    return of.layer(lambda ctx, x, y: of.sin(x) + y, lambda ctx, dy: dy * 3).apply


@CASES.add(X, Y, wrt=(1,))
def none_where_no_gradient_is_needed(of):
    return of.layer(lambda ctx, x, y: x + of.sin(y), lambda ctx, dy: (None, dy * 3)).apply


SAVED = {
    "no call": None,
    "empty": lambda x: (),
    "tensors": lambda x: (x, x + 1),
    "anything": lambda x: (1, "text", None, [x, {"key": x}]),
}

for what, save in SAVED.items():

    @CASES.add(label=what, orders=1)
    def what_saved_tensor_returns(of, save=save):
        """The log compares it: None where nothing was saved, else a tuple."""

        def forward(ctx, x):
            if save is not None:
                ctx.save_for_backward(*save(x))
            return x * 2

        def backward(ctx, dy):
            of.note(ctx.saved_tensor())
            return dy * 3

        return of.layer(forward, backward).apply


@CASES.add(X, Y)
def input_returned_beside_its_double(of):
    layer = of.layer(lambda ctx, x, y: (x, y * 2), lambda ctx, dx, dy: (dx * 3, dy * 5))
    return lambda x, y: layer.apply(x * 1, y)


@CASES.add()
def methods_that_are_plain_functions(of):
    forward, backward = lambda ctx, x: of.sin(x), lambda ctx, dy: dy * 3
    layer = of.layer(None, None, forward=forward, backward=backward)
    return lambda x: layer().apply(x)


@MODES
@CASES.every()
def test_outputs_gradients_and_cotangents(theirs, mode, one):
    compare(theirs, mode, one)


@MODES
@CASES.every(higher=True)
def test_higher_derivatives(theirs, mode, one):
    compare_higher_orders(theirs, mode, one)


WRONG = {
    "output": {"factor": 2.001},
    "container": {"container": list},
    "gradient": {"slope": 3.001},
    "cotangent": {"materialize": False},
}


@pytest.mark.parametrize("wrong", WRONG)
@MODES
def test_the_comparison_can_fail(theirs, mode, wrong):
    def build(of):
        traits = {"factor": 2.0, "container": tuple, "slope": 3.0, "materialize": True}
        traits.update(WRONG[wrong] if isinstance(of, Ours) else {})

        def forward(ctx, x):
            ctx.set_materialize_grads(traits["materialize"])
            return traits["container"]([x * traits["factor"], x * 1])

        return of.layer(forward, lambda ctx, dy, dz: dy * traits["slope"]).apply

    with pytest.raises(AssertionError):
        compare(theirs, mode, Case("wrong", build, (X,), (0,), used=(0,)))


@CASES.every()
def test_without_differentiation(theirs, one):
    compare_undifferentiated(theirs, one)


# -- what both refuse, and what one alone refuses ---------------------------------------------------


for name, value in {"number": 3, "None": None, "statics": (1, "text"), "empty": ()}.items():

    @TABLE.differ(label=name, theirs=ValueError, ours=ValueError, match="at least one tensor")
    def no_tensor_among_the_outputs(of, value=value):
        return of.layer(lambda ctx, x: value, lambda ctx, dy: dy).apply


# What backward gives for x and y.
GIVEN = {
    "one for two": (ValueError, ValueError, "1 gradient; expected 2", lambda dy: dy),
    "three for two": (ValueError, ValueError, "3 gradients; expected 2", lambda dy: (dy, dy, dy)),
    "None too many": (ValueError, ValueError, "3 gradients; expected 2", lambda dy: (dy, dy, None)),
    "number": (ValueError, ValueError, "gradient of 'y'", lambda dy: (dy, 1.0)),
    "text": (ValueError, ValueError, "gradient of 'y'", lambda dy: (dy, "text")),
    "dict": (ValueError, ValueError, "gradient of 'y'", lambda dy: (dy, {"y": dy})),
    "list": (ValueError, ValueError, "gradient of 'y'", lambda dy: (dy, [dy])),
    # Paddle takes a tuple alone.
    "list of two": (ValueError, [3, 5], "", lambda dy: [dy * 3, dy * 5]),
    # Here NumPy arrays are tensors.
    "NumPy": (ValueError, [3, 5], "", lambda dy: (dy * 3, np.full(2, 5, np.float32))),
}

for name, (their, our, match, give) in GIVEN.items():

    @TABLE.differ(X, Y, label=name, theirs=their, ours=our, match=match)
    def given_for_two(of, give=give):
        return of.layer(lambda ctx, x, y: x + y, lambda ctx, dy: give(dy)).apply


GIVEN_FOR_ONE = {
    "number": (ValueError, ValueError, lambda dy: 1),
    "list": (ValueError, ValueError, lambda dy: [dy]),
    "two": (ValueError, ValueError, lambda dy: (dy, dy)),
}

for name, (their, our, give) in GIVEN_FOR_ONE.items():

    @TABLE.differ(label=name, theirs=their, ours=our)
    def given_for_one(of, give=give):
        return of.layer(lambda ctx, x: x * 2, lambda ctx, dy: give(dy)).apply


GIVEN_FOR_A_LIST = {
    "tensor": (ValueError, ValueError, lambda dy: dy),
    "two entries": (ValueError, ValueError, lambda dy: (dy, dy)),
    "one too few": (SystemError, ValueError, lambda dy: [dy]),
    # None is zero for the whole argument here.
    "None": (ValueError, [0, 0], lambda dy: None),
}

for name, (their, our, give) in GIVEN_FOR_A_LIST.items():

    @TABLE.differ(X, Y, label=name, theirs=their, ours=our)
    def given_for_a_list(of, give=give):
        layer = of.layer(lambda ctx, both: both[0] + both[1], lambda ctx, dy: give(dy))
        return lambda x, y: layer.apply([x, y])


# The entry for a list has one gradient per tensor there, and the structure of the list here.
for name, their, our, give in (
    ("per tensor", [3, 5], ValueError, lambda dy: [dy * 3, dy * 5]),
    ("per place", [3, 0], [3, 5], lambda dy: [dy * 3, None, dy * 5]),
):

    @TABLE.differ(X, Y, label=name, theirs=their, ours=our, match="expected 3 entries, got 2")
    def list_with_a_static(of, give=give):
        layer = of.layer(lambda ctx, parts: parts[0] * parts[1] + parts[2], lambda ctx, dy: give(dy))
        return lambda x, y: layer.apply([x, 2.0, y])


# One entry per argument passed is taken too, as torch has it.
@TABLE.differ(X, Y, theirs=ValueError, ours=[3, 5])
def one_entry_per_argument(of):
    layer = of.layer(lambda ctx, x, scale, y: x * scale + y, lambda ctx, dy: (dy * 3, None, dy * 5))
    return lambda x, y: layer.apply(x, 2.0, y)


@TABLE.differ(X, Y, wrt=(1,), theirs=ValueError, ours=ValueError, match="Missing: y")
def leading_entry_left_out(of):
    return of.layer(lambda ctx, x, y: x + y, lambda ctx, dy: dy * 5).apply


# Paddle wants None there, here it is ignored, whatever it is.
for name, entry in {"tensor": lambda dy: dy, "text": lambda dy: "text"}.items():

    @TABLE.differ(X, Y, label=name, wrt=(1,), theirs=ValueError, ours=[5])
    def entry_where_no_gradient_is_needed(of, entry=entry):
        return of.layer(lambda ctx, x, y: x + y, lambda ctx, dy: (entry(dy), dy * 5)).apply


@TABLE.differ(X, np.array([2, 3], np.int32), theirs=ValueError, ours=[3])
def entry_for_an_integer_input(of):
    return of.layer(lambda ctx, x, n: x * 2, lambda ctx, dy: (dy * 3, dy)).apply


# Gradients follow the order of the call in Paddle, the order of the parameters here.
@TABLE.differ(X, Y, theirs=[5, 3], ours=[3, 5])
def keywords_in_another_order(of):
    layer = of.layer(lambda ctx, a, b: a + b, lambda ctx, dy: (dy * 3, dy * 5))
    return lambda x, y: layer.apply(b=y, a=x)


# NumPy arrays are statics in Paddle, tensors here.
@TABLE.differ(theirs=[3], ours=ValueError, match="1 gradient; expected 2")
def numpy_argument_before_a_tensor(of):
    layer = of.layer(lambda ctx, array, x: x * 2, lambda ctx, dy: dy * 3)
    return lambda x: layer.apply(np.ones(2, np.float32), x)


@TABLE.differ(theirs=[0 + 1], ours=[3 + 1])
def dict_among_the_outputs(of):
    layer = of.layer(lambda ctx, x: (x * 2, {"key": x * 2}), lambda ctx, dy, *dz: dz[0]["key"] * 3 if dz else dy * 0)
    return lambda x: (*layer.apply(x), x)


@TABLE.differ(theirs=ValueError, ours=[3])
def dict_as_the_output(of):
    return of.layer(lambda ctx, x: {"key": x * 2}, lambda ctx, dy: dy["key"] * 3).apply


# Paddle looks one list deep.
@TABLE.differ(theirs=[5], ours=[3 + 5])
def list_within_a_list_among_the_outputs(of):
    def backward(ctx, both):
        return (both[0][0] * 3 if len(both) == 2 else 0) + both[-1] * 5

    return of.layer(lambda ctx, x: ([[x * 2], x * 2],), backward).apply


# A leaf returned as it is would be changed in place there, which Paddle refuses.
@TABLE.differ(theirs=ValueError, ours=[3])
def leaf_returned(of):
    return of.layer(lambda ctx, x: x, lambda ctx, dy: dy * 3).apply


# Paddle copies it, and loses the gradient.
@TABLE.differ(theirs=[1], ours=[3 + 1])
def input_marked_not_inplace_returned(of):
    def forward(ctx, x):
        ctx.mark_not_inplace(x)
        return x

    layer = of.layer(forward, lambda ctx, dy: dy * 3)
    return lambda x: (layer.apply(x * 1), x)


# The input is the output from there on, so that what is computed from it later goes through the layer in Paddle.
@TABLE.differ(theirs=[3], ours=[1])
def input_used_after_it_was_returned(of):
    layer = of.layer(lambda ctx, x: x, lambda ctx, dy: dy * 3)

    def apply(x):
        before = x * 1
        layer.apply(before)
        return before * 1

    return apply


for name, mark in {
    "not an input": lambda ctx, x: ctx.mark_not_inplace(x + 1),
    "static": lambda ctx, x: ctx.mark_not_inplace(3),
}.items():

    @TABLE.differ(label=name, theirs=[3], ours=ValueError, match="mark_not_inplace")
    def mark_not_inplace_of(of, mark=mark):
        def forward(ctx, x):
            mark(ctx, x)
            return x * 2

        return of.layer(forward, lambda ctx, dy: dy * 3).apply


@TABLE.differ(theirs=[3], ours=RuntimeError, match="mark_not_inplace was called in backward")
def mark_not_inplace_in_backward(of):
    def backward(ctx, dy):
        ctx.mark_not_inplace(dy)
        return dy * 3

    return of.layer(lambda ctx, x: x * 2, backward).apply


# Cotangents always have the dtype of the output here.
@TABLE.differ(theirs=[3], ours=AttributeError, match="set_grad_in_dtype_consistent")
def cotangents_of_another_dtype(of):
    def forward(ctx, x):
        ctx.set_grad_in_dtype_consistent(False)
        return x * 2

    return of.layer(forward, lambda ctx, dy: dy * 3).apply


# Paddle's context has neither, and reports it as an OSError, as every exception in backward.
for name, read in {"saved_tensors": lambda ctx: ctx.saved_tensors, "needs": lambda ctx: ctx.needs_input_grad}.items():

    @TABLE.differ(label=name, theirs=OSError, ours=[3])
    def what_torch_has_on_its_context(of, read=read):
        def backward(ctx, dy):
            read(ctx)
            return dy * 3

        return of.layer(lambda ctx, x: x * 2, backward).apply


TABLE.differ(theirs=OSError, ours=AttributeError, match="nothing_set")(unknown_attribute)
TABLE.differ(theirs=OSError, ours=Mine, match="on purpose")(exception_in_backward)


@TABLE.differ(theirs=OSError, ours=NotImplementedError)
def no_backward(of):
    return type("Layer", (of.base,), {"forward": staticmethod(lambda ctx, x: x * 2)}).apply


for name, call in {
    "nothing": lambda layer, x: layer.apply(),
    "too many": lambda layer, x: layer.apply(x, x),
    "keyword": lambda layer, x: layer.apply(x, other=x),
}.items():

    @TABLE.differ(label=name, theirs=TypeError, ours=TypeError)
    def call_that_does_not_fit(of, call=call):
        layer = of.layer(lambda ctx, x: x * 2, lambda ctx, dy: dy * 3)
        return lambda x: call(layer, x)


# A gradient is not looked at there, where it arrives at a leaf; elsewhere Paddle casts it.
GRADIENTS = {
    "half": (np.full(2, 3, np.float16), 3, lambda of, dy: of.cast(dy * 3, "float16")),
    "integer": (np.full(2, 3, np.int32), 3, lambda of, dy: of.cast(dy * 3, "int32")),
    "bool": (np.full(2, True), 1, lambda of, dy: of.cast(dy, "bool")),
    "complex": (np.full(2, 3 + 3j, np.complex64), ValueError, lambda of, dy: of.cast(dy, "complex64") * (3 + 3j)),
    "wider": (np.full((1, 2), 3, np.float32), 3, lambda of, dy: of.reshape(dy * 3, (1, 2))),
    "stacked": (np.full((2, 2), 3, np.float32), 6, lambda of, dy: of.stack([dy, dy]) * 3),
    "scalar": (np.full((), 6, np.float32), ValueError, lambda of, dy: dy.sum() * 3),
    "other": (np.full(4, 3, np.float32), ValueError, lambda of, dy: of.reshape(of.stack([dy, dy]) * 3, (4,))),
}

for name, (their, our, give) in GRADIENTS.items():

    @TABLE.differ(label=name, theirs=[their], ours=our if our is ValueError else [our], match="gradient of 'x'")
    def gradient_that_does_not_fit(of, give=give):
        return of.layer(lambda ctx, x: x * 2, lambda ctx, dy: give(of, dy)).apply


@TABLE.differ(Z, theirs=[np.full(2, 3, np.float32)], ours=[3])
def real_gradient_of_a_complex_input(of):
    return of.layer(lambda ctx, z: of.abs(z), lambda ctx, dy: dy * 3).apply


# Each container of outputs gets a list there, without its statics; its own structure here.
@TABLE.differ(theirs=[3], ours=[5])
def tuple_among_the_outputs(of):
    layer = of.layer(lambda ctx, x: (x * 2, (x * 2,)), lambda ctx, dy, dz: dy * (3 if isinstance(dz, list) else 5))
    return layer.apply


@TABLE.differ(theirs=[1], ours=[2])
def list_with_a_static_among_the_outputs(of):
    layer = of.layer(lambda ctx, x: (x * 2, [x * 2, 1]), lambda ctx, dy, dz: dy * len(dz))
    return layer.apply


# NumPy arrays are statics there.
@TABLE.differ(theirs=[1], ours=[2], used=(0,))
def numpy_array_among_the_outputs(of):
    return of.layer(lambda ctx, x: (x * 2, np.ones(2, np.float32)), lambda ctx, *dys: dys[0] * len(dys)).apply


# Paddle lets a gradient through integers; under JAX there is none.
@TABLE.differ(theirs=[200 + 3], ours=[3])
def gradient_through_an_integer_output(of):
    def backward(ctx, di, dy):
        return of.cast(di, "float32") * 100 + dy * 3

    layer = of.layer(lambda ctx, x: (of.cast(x * 10, "int32"), x * 2), backward)

    def apply(x):
        i, y = layer.apply(x)
        return of.cast(i, "float32") * 2, y

    return apply


# Paddle drops what a saved intermediate owes to the input.
@TABLE.differ(theirs=[4 * X**2], ours=[12 * X**2], orders=2)
def second_derivative_through_an_intermediate(of):
    def forward(ctx, x):
        square = x * x
        ctx.save_for_backward(square, x)
        return square * square

    def backward(ctx, dy):
        square, x = ctx.saved_tensor()
        return 4 * dy * square * x

    return of.layer(forward, backward).apply


# Paddle's is not public, and cuts the second derivative off in silence.
@TABLE.differ(theirs=[2 * X], ours=RuntimeError, orders=2, match="once_differentiable")
def second_derivative_of_once_differentiable(of):
    once = pylayer_jax.once_differentiable if isinstance(of, Ours) else of.autograd.py_layer.once_differentiable

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    def backward(ctx, dy):
        return 2 * dy * ctx.saved_tensor()[0]

    layer = of.layer(forward, once(backward))
    return lambda x: layer.apply(x) * x


# Hooks: every exception in them is an OSError there.
for name, build in FAILING_HOOKS:
    TABLE.differ(X, Y, label=name, theirs=OSError, ours=Mine, match="on purpose")(build)
TABLE.differ(X, Y, theirs=OSError, ours=TypeError, match="pack_hook")(hooks_that_are_not_callable)


@TABLE.differ(X, Y, theirs=ValueError, ours=[Y, X])
def a_block_within_a_block(of):
    return of.hooked(of.hooked(of.multiply))


# What unpack returns in place of a tensor.
UNPACKED = {
    "number": (ValueError, ValueError, lambda of, x: 3),
    "nothing": (ValueError, ValueError, lambda of, x: None),
    # Paddle computes with whatever comes.
    "shape": ([np.full(2, 1, np.float32)] * 2, ValueError, lambda of, x: of.ones((3, 3))),
}

for name, (their, our, unpacked) in UNPACKED.items():

    @TABLE.differ(X, Y, label=name, theirs=their, ours=our, match="unpack_hook")
    def unpacked_for_an_operation(of, unpacked=unpacked):
        return of.hooked(of.multiply, unpack=lambda kept: unpacked(of, kept["hidden"]))


@TABLE.differ(X, Y, theirs=HALVES, ours=ValueError, match="unpack_hook")
def unpacked_in_another_dtype_for_a_layer(of):
    return of.hooked(product(of).apply, unpack=lambda kept: of.cast(kept["hidden"], "float16"))


# Paddle takes a tuple or list that pack returns apart, and unpacks each of its parts.
@TABLE.differ(X, Y, theirs=OSError, ours=[Y, X])
def tuple_packed_for_a_layer(of):
    return of.hooked(product(of).apply, pack=lambda x: (x, 1), unpack=lambda kept: kept[0])


@TABLE.differ(theirs=ValueError, ours=[3])
def none_and_statics_saved_under_hooks(of):
    def forward(ctx, x):
        ctx.save_for_backward(None, 3, x)
        return x * 2

    return of.hooked(of.layer(forward, lambda ctx, dy: dy * ctx.saved_tensor()[1]).apply)


# Under hooks that copy, Paddle loses what a saved tensor owes to the input.
@TABLE.differ(theirs=[0], ours=[6 * X], orders=2)
def second_derivative_of_a_layer_under_hooks(of):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    layer = of.layer(forward, lambda ctx, dy: 3 * dy * ctx.saved_tensor()[0] ** 2)
    return of.hooked(
        layer.apply,
        unpack=lambda kept: kept,
        pack=jax.lax.stop_gradient if isinstance(of, Ours) else lambda x: x.detach(),
    )


@MODES
@TABLE.every()
def test_errors_and_differences(theirs, mode, one):
    compare_with_table(theirs, mode, one)


@MODES
def test_a_complex_rule_in_the_convention_of_jax(theirs, mode):
    """Without `complex_convention`, cotangents are the conjugates of Paddle's, and so is the rule."""

    def square(of):
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return z * z

        def backward(ctx, dy):
            (z,) = ctx.saved_tensor()
            return 2 * dy * (z if of is ours else of.conj(z))

        return of.layer(forward, backward).apply

    ours, one = Ours(mode), Case("square", square, (Z,), (0,))
    mine, other = ours.run(one), theirs.run(one)
    assert_same(mine.gradients, other.gradients)
    if mode == "eager":
        assert_same(mine.cotangents, [(dy.conj(),) for (dy,) in other.cotangents])


@MODES
def test_hessian_and_jacobian(theirs, mode):
    def build(of):
        layer = product(of)
        return lambda x: layer.apply(x, of.sin(x))

    ours, x, paddle = Ours(mode), theirs.leaf(X), theirs.module
    f, y = build(ours), build(theirs)(x)
    assert_same(np.asarray(ours.mode(jax.jacrev(f))(X)), paddle.autograd.jacobian(y, x)[:].numpy())
    assert_same(
        np.asarray(ours.mode(jax.hessian(lambda x: f(x).sum()))(X)), paddle.autograd.hessian(y.sum(), x)[:].numpy()
    )


# -- saved-tensor hooks -----------------------------------------------------------------------------


@COUNTS.add(X, Y, wrt=(0,), theirs=(2, 2), ours=(1, 1))
def one_factor_needs_a_gradient(of):
    return of.hooked(of.multiply)


# Operations inside forward save nothing that anyone could ask for, but Paddle packs them.
@COUNTS.add(theirs=(3, 1), ours=(1, 1))
def layer_inside_a_layer(of):
    inner = product(of)

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return inner.apply(x, x) * 1

    return of.hooked(of.layer(forward, lambda ctx, dy: 2 * dy * ctx.saved_tensor()[0]).apply)


@MODES
@COUNTS.every()
def test_hooks(theirs, mode, one):
    compare_hooks(theirs, mode, one)


@MODES
def test_hooks_without_differentiation(theirs, mode):
    """Paddle packs all the same."""
    assert packs_without_differentiation(theirs, mode) == {"ours": 0, "theirs": 2}


@MODES
def test_a_block_left_by_an_exception(theirs, mode):
    for of in (ours := Ours(mode), theirs):
        with pytest.raises(Mine):
            of.hooked(fail)()
    one = Case("product", lambda of: of.multiply, (X, Y), (0, 1))
    assert_same(ours.run(one).gradients, theirs.run(one).gradients)
    assert (ours.packs, theirs.packs) == (0, 0)
