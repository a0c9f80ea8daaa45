"""The rows of the contract that are torch's and hold for PyLayer, asked of real torch; and each difference, from both
sides. The torch dialect, `Function`, has its own tests in test_ports.py.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pylayer_jax
from pylayer_jax import packers
from tests.frameworks.shared_layers import (
    DIFFERENCES,
    DOCUMENTED,
    FAILING_HOOKS,
    HOOKS,
    SHARED,
    complex_numbers,
    doubled_sine,
    doubled_tanh,
    exception_in_backward,
    hooks_that_are_not_callable,
    itself_inside_backward,
    packs_without_differentiation,
    product,
    two_inputs,
    unknown_attribute,
)
from tests.kit.oracle import (
    HALVES,
    MODES,
    Case,
    Cases,
    Mine,
    Ours,
    Torch,
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
def theirs(framework):
    return Torch(framework("torch"))


# -- what both do -----------------------------------------------------------------------------------

# Beyond what Paddle can do: an entry for an input that needs none, complex numbers and sines of high order.
CASES.add(X, Y, label="first", wrt=(0,))(two_inputs)
CASES.add(X, Y, label="second", wrt=(1,))(two_inputs)
CASES.add(Z, label="twice")(complex_numbers)
CASES.add(label="four times", orders=4)(itself_inside_backward)


@CASES.add(X, Y)
@CASES.add(X, Y, label="second", wrt=(1,))
def one_entry_per_argument(of):
    layer = of.layer(lambda ctx, a, scale, b, word: a * scale + of.sin(b), lambda ctx, dy: (dy * 3, None, dy * 5, None))
    return lambda x, y: layer.apply(x, 2.0, y, "text")


@CASES.add()
def defaults(of):
    layer = of.layer(lambda ctx, x, bias=None, scale=3.0: of.sin(x) * scale, lambda ctx, dy: dy * 3)
    return layer.apply


@CASES.add(X, Y)
def keywords_in_another_order(of):
    layer = of.layer(lambda ctx, a, b: a + b, lambda ctx, dy: (dy * 3, dy * 5))
    return lambda x, y: layer.apply(b=y, a=x)


GRADIENTS = {
    "half": lambda of, dy: of.cast(dy * 3, "float16"),
    "bfloat16": lambda of, dy: of.cast(dy * 3, "bfloat16"),
    "integer": lambda of, dy: of.cast(dy * 3, "int32"),
    "bool": lambda of, dy: of.cast(dy, "bool"),
    "wider": lambda of, dy: of.stack([dy, dy * 3, dy * 5]),
    "half and wider": lambda of, dy: of.cast(of.stack([dy, dy * 3, dy * 5]), "float16"),
}

for name, give in GRADIENTS.items():

    @CASES.add(label=name, orders=1)
    def gradient_cast_and_summed(of, give=give):
        return of.layer(lambda ctx, x: x * 2, lambda ctx, dy: give(of, dy)).apply


@CASES.add(X.reshape(2, 1), orders=1)
def gradient_summed_over_stretched_axes(of):
    return of.layer(lambda ctx, x: x * 2, lambda ctx, dy: of.broadcast_to(dy * 3, (3, 2, 4))).apply


@CASES.add(X, Y, wrt=(1,), orders=1)
def entry_of_any_shape_where_no_gradient_is_needed(of):
    return of.layer(lambda ctx, x, y: x + of.sin(y), lambda ctx, dy: (of.ones((5,)), dy * 3)).apply


@CASES.add(X, np.array([2, 3], np.int32), orders=1)
def entry_for_an_integer_input(of):
    return of.layer(lambda ctx, x, n: of.sin(x), lambda ctx, dy: (dy * 3, dy)).apply


@CASES.add(Z, orders=1)
def real_gradient_of_a_complex_input(of):
    return of.layer(lambda ctx, z: of.abs(z), lambda ctx, dy: dy * 3, complex_convention="paddle").apply


SAVED = {"no call": None, "empty": lambda x: (), "None": lambda x: (None, x, None), "tensors": lambda x: (x, x + 1)}

for name, save in SAVED.items():

    @CASES.add(label=name, orders=1)
    def what_saved_tensors_holds(of, save=save):
        """The log compares it."""

        def forward(ctx, x):
            if save is not None:
                ctx.save_for_backward(*save(x))
            return x * 2

        def backward(ctx, dy):
            of.note(ctx.saved_tensors)
            return dy * 3

        return of.layer(forward, backward).apply


@CASES.add(X, Y, orders=1)
@CASES.add(X, Y, label="first", wrt=(0,), orders=1)
@CASES.add(X, Y, label="second", wrt=(1,), orders=1)
def needs_input_grad(of):
    def forward(ctx, x, scale, y, n):
        of.note(ctx.needs_input_grad)
        return x * scale + y

    def backward(ctx, dy):
        of.note(ctx.needs_input_grad)
        return dy * 3, None, dy * 5, None

    layer = of.layer(forward, backward)
    return lambda x, y: layer.apply(x, 2.0, y, of.ones((2,), dtype=of.int32))


@CASES.add()
def input_returned(of):
    layer = of.layer(lambda ctx, x: x, lambda ctx, dy: dy * 3)

    def apply(x):
        y = layer.apply(x)
        return y * y, x * x

    return apply


@CASES.add(X, Y)
def input_returned_beside_its_double(of):
    return of.layer(lambda ctx, x, y: (x, y * 2), lambda ctx, dx, dy: (dx * 3, dy * 5)).apply


def held(of):
    return packers.save_on_cpu() if isinstance(of, Ours) else of.autograd.graph.save_on_cpu()


@CASES.add()
def save_on_cpu(of):
    layer = doubled_sine(of)

    def apply(x):
        with held(of):
            return layer.apply(x) * x

    return apply


# What is taken for the gradients of higher order is what was packed, whatever packing did.
@CASES.add()
def layer_under_hooks(of):
    return of.hooked(doubled_tanh(of).apply)


@CASES.add()
def operations_under_hooks(of):
    return of.hooked(lambda x: of.exp(x) * x)


@MODES
@CASES.every()
def test_outputs_gradients_and_cotangents(theirs, mode, one):
    compare(theirs, mode, one)


@MODES
@CASES.every(higher=True)
def test_higher_derivatives(theirs, mode, one):
    compare_higher_orders(theirs, mode, one)


@CASES.every()
def test_without_differentiation(theirs, one):
    compare_undifferentiated(theirs, one)


# -- what both refuse, and what one alone refuses ---------------------------------------------------

# What backward gives for x and y.
GIVEN = {
    "one for two": (RuntimeError, ValueError, "1 gradient; expected 2", lambda dy: dy),
    "three for two": (RuntimeError, ValueError, "3 gradients; expected 2", lambda dy: (dy, dy, dy)),
    "number": (RuntimeError, ValueError, "gradient of 'y'", lambda dy: (dy, 1.0)),
    "list": (RuntimeError, ValueError, "gradient of 'y'", lambda dy: (dy, [dy])),
    # `Function` takes surplus Nones.
    "None too many": ([3, 5], ValueError, "3 gradients; expected 2", lambda dy: (dy * 3, dy * 5, None)),
    "list of two": (RuntimeError, [3, 5], "", lambda dy: [dy * 3, dy * 5]),
}

for name, (their, our, match, give) in GIVEN.items():

    @TABLE.differ(X, Y, label=name, theirs=their, ours=our, match=match)
    def given_for_two(of, give=give):
        return of.layer(lambda ctx, x, y: x + y, lambda ctx, dy: give(dy)).apply


GIVEN_FOR_ONE = {
    "number": lambda of, dy: 1,
    "list": lambda of, dy: [dy],
    "complex": lambda of, dy: of.cast(dy, "complex64") * (3 + 3j),
    "scalar": lambda of, dy: dy.sum(),
    "smaller": lambda of, dy: of.ones((1,)),
    "other": lambda of, dy: of.ones((5,)),
}

for name, give in GIVEN_FOR_ONE.items():

    @TABLE.differ(label=name, theirs=RuntimeError, ours=ValueError, match="gradient of 'x'")
    def given_for_one(of, give=give):
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


TABLE.differ(theirs=Mine, ours=Mine, match="on purpose")(exception_in_backward)
TABLE.differ(theirs=AttributeError, ours=AttributeError, match="nothing_set")(unknown_attribute)
for name, build in FAILING_HOOKS:
    TABLE.differ(X, Y, label=name, theirs=Mine, ours=Mine, match="on purpose")(build)
TABLE.differ(X, Y, theirs=TypeError, ours=TypeError, match="pack_hook")(hooks_that_are_not_callable)


# What unpack returns in place of a tensor.
UNPACKED = {
    "number": (TypeError, lambda of, x: 3),
    "nothing": (TypeError, lambda of, x: None),
    "shape": (RuntimeError, lambda of, x: of.ones((3, 3))),
    # torch computes with another dtype, and broadcasts.
    "dtype": (HALVES, lambda of, x: of.cast(x, "float16")),
    "scalar": ([6, 6], lambda of, x: of.ones(()) * 6),
}

for name, (their, unpacked) in UNPACKED.items():

    @TABLE.differ(X, Y, label=name, theirs=their, ours=ValueError, match="unpack_hook")
    def unpacked_for_an_operation(of, unpacked=unpacked):
        return of.hooked(of.multiply, unpack=lambda kept: unpacked(of, kept["hidden"]))

    @TABLE.differ(X, Y, label=name, theirs=their, ours=ValueError, match="unpack_hook")
    def unpacked_for_a_layer(of, unpacked=unpacked):
        return of.hooked(product(of).apply, unpack=lambda kept: unpacked(of, kept["hidden"]))


@MODES
@TABLE.every()
def test_errors_and_differences(theirs, mode, one):
    compare_with_table(theirs, mode, one)


@MODES
def test_hessian_and_jacobian(theirs, mode):
    def build(of):
        layer = product(of)
        return lambda x: layer.apply(x, of.sin(x))

    ours, functional = Ours(mode), theirs.autograd.functional
    f, g, x = build(ours), build(theirs), theirs.leaf(X)
    assert_same(np.asarray(ours.mode(jax.jacrev(f))(X)), functional.jacobian(g, x).numpy())
    expected = functional.hessian(lambda x: g(x).sum(), x).numpy()
    assert_same(np.asarray(ours.mode(jax.hessian(lambda x: f(x).sum()))(X)), expected)


@MODES
def test_one_graph_differentiated_twice(theirs, mode):
    """The context is the same in torch, so that the second run sees what the first one set."""

    def build(of):
        def backward(ctx, dy):
            ctx.runs = getattr(ctx, "runs", 0) + 1
            of.note(ctx.runs)
            return dy * ctx.runs

        return of.layer(lambda ctx, x: x * 2, backward).apply

    def twice(x):
        _, gradient = jax.vjp(build(ours), x)
        return gradient(jnp.ones(2))[0] + gradient(jnp.ones(2))[0]

    ours, x = Ours(mode), theirs.leaf(X)
    y = build(theirs)(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert ours.mode(twice)(X).tolist() == [2, 2]
    assert x.grad.tolist() == [3, 3]


# -- saved-tensor hooks -----------------------------------------------------------------------------


@COUNTS.add(X, Y, wrt=(0,), theirs=(1, 1), ours=(1, 1))
def one_factor_needs_a_gradient(of):
    return of.hooked(of.multiply)


@COUNTS.add(X, Y, wrt=(0,), theirs=(2, 2), ours=(2, 2))
def one_input_of_a_layer_needs_a_gradient(of):
    return of.hooked(product(of).apply)


@COUNTS.add(theirs=(1, 1), ours=(1, 1))
def layer_inside_a_layer(of):
    inner = product(of)

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return inner.apply(x, x) * x

    return of.hooked(of.layer(forward, lambda ctx, dy: 3 * dy * ctx.saved_tensors[0] ** 2).apply)


@COUNTS.add(theirs=(1, 1), ours=(1, 1))
def none_saved(of):
    def forward(ctx, x):
        ctx.save_for_backward(None, x)
        return x * 2

    return of.hooked(of.layer(forward, lambda ctx, dy: dy * ctx.saved_tensors[1]).apply)


@MODES
@COUNTS.every()
def test_hooks(theirs, mode, one):
    compare_hooks(theirs, mode, one)


@MODES
def test_hooks_without_differentiation(theirs, mode):
    assert packs_without_differentiation(theirs, mode) == {"ours": 0, "theirs": 0}


@MODES
@pytest.mark.parametrize("fails", [False, True], ids=["left", "left by an exception"])
def test_the_innermost_pair_alone_applies(theirs, mode, fails):
    """And the outer one again behind it."""
    calls = {}

    def build(of):
        layer, events = product(of), calls.setdefault(of, [])

        def pair(name):
            return of.hooks(
                lambda x: events.append(f"{name} packs") or {"hidden": x},
                lambda kept: events.append(f"{name} unpacks") or kept["hidden"],
            )

        def nested(x, y):
            with pair("outer"):
                with contextlib.suppress(Mine), pair("inner"):
                    z = layer.apply(x, y)
                    if fails:
                        fail()
                return z, layer.apply(y, x)

        return nested

    ours, one = Ours(mode), Case("nested", build, (X, Y), (0, 1))
    assert_same(ours.run(one).gradients, theirs.run(one).gradients)
    assert sorted(calls[ours]) == sorted(calls[theirs])
    assert calls[ours][:4] == calls[theirs][:4] == ["inner packs"] * 2 + ["outer packs"] * 2


@MODES
def test_disabled_hooks(theirs, mode):
    """Layers and operations go on inside; a block that ends restores the message of the one around it."""
    pair = lambda x: x, lambda x: x

    def build(of):
        layer = product(of)
        disable = (pylayer_jax if of is ours else of.autograd.graph).disable_saved_tensors_hooks

        def inside(x):
            with disable("outer"):
                with disable("inner"):
                    y = layer.apply(x, x) * x
                with pytest.raises(RuntimeError, match=r"^outer$"), of.hooks(*pair):
                    pass
            with of.hooks(*pair):
                return y

        return inside

    ours, one = Ours(mode), Case("disabled", build, (X,), (0,))
    assert_same(ours.run(one).gradients, theirs.run(one).gradients)
