"""The rows of the contract that are Paddle's, asked of real Paddle.

Real Paddle 3.3 dies of a segmentation fault, and so is not asked, where an output is a list of several tensors, where a
list of one gets no cotangent, and where the backward of a layer runs twice in one graph.
"""

from __future__ import annotations

import pytest

from tests.frameworks.shared.agree import SHARED, noting_what_is_saved
from tests.frameworks.shared.hooks import HOOKS
from tests.kit.oracle import MODES, Ours, Row, Table, X, Y, compare

CASES = Table(SHARED + HOOKS)


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
        return noting_what_is_saved(of, save, lambda ctx: ctx.saved_tensor())


@CASES.add(X, Y)
def input_returned_beside_its_double(of):
    layer = of.layer(lambda ctx, x, y: (x, y * 2), lambda ctx, dx, dy: (dx * 3, dy * 5))
    return lambda x, y: layer.apply(x * 1, y)


@CASES.add()
def flag_of_an_output_that_paddle_ignores(of):
    def forward(ctx, x):
        y = of.sin(x)
        if not isinstance(of, Ours):
            y.stop_gradient = True
        return y

    return of.layer(forward, lambda ctx, dy: dy * 3).apply


@CASES.add()
def methods_that_are_plain_functions(of):
    forward, backward = lambda ctx, x: of.sin(x), lambda ctx, dy: dy * 3
    layer = of.layer(None, None, forward=forward, backward=backward)
    return lambda x: layer().apply(x)


@CASES.every()
def test_as_in_paddle(theirs, mode, one):
    compare(theirs, mode, one)


# What ours does otherwise than theirs.
WRONG = {
    "output": {"factor": 2.001},
    "container": {"container": list},
    "gradient": {"slope": 3.001},
    "cotangent": {"materialize": False},
    "second gradient": {"saved": 1.001},
}


@pytest.mark.parametrize("wrong", WRONG)
@MODES
def test_the_comparison_can_fail(theirs, mode, wrong):
    def build(of):
        traits = {"factor": 2.0, "container": tuple, "slope": 3.0, "materialize": True, "saved": 1.0}
        traits.update(WRONG[wrong] if isinstance(of, Ours) else {})

        def forward(ctx, x):
            ctx.set_materialize_grads(traits["materialize"])
            ctx.save_for_backward(x)
            return traits["container"]([x * traits["factor"], x * 1])

        def backward(ctx, dy, dz):
            (x,) = of.saved(ctx)
            x = x * traits["saved"] - of.detach(x) * (traits["saved"] - 1)
            return dy * traits["slope"] * x * x

        return of.layer(forward, backward).apply

    with pytest.raises(AssertionError):
        compare(theirs, mode, Row("wrong", build, (X,), (0,), used=(0,)))
