"""A layer takes arguments of every kind, and returns outputs and statics of every kind, in every mode."""

import collections
import dataclasses
import functools
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer
from pylayer_jax.packers import cast_saved
from tests.kit.layers import Multiply, layer, loss
from tests.kit.modes import EAGER_AND_JIT, MODES, RUNS, X, modes


@modes
def test_partial_arguments_are_differentiated_through(mode):
    call = lambda function, x: function(x)
    applies = layer(call, lambda function, x, dy: jax.vjp(call, function, x)[1](dy), plain=True)
    f = lambda x: applies.apply(jax.tree_util.Partial(lambda w, v: w * v**2, x), x).sum()
    np.testing.assert_allclose(MODES[mode](f)(X), 3 * X**2)


def test_methods_of_every_kind():
    OfClass = layer(
        classmethod(lambda cls, ctx, x: cls.factor * x), classmethod(lambda cls, ctx, dy: cls.factor * dy), factor=3
    )

    class OnlyBackward(OfClass):
        factor = 5

        @classmethod
        def backward(cls, ctx, dy):
            return -super().backward(ctx, dy)

    class Undecorated(PyLayer):
        def forward(self, x):  # the context under another name
            return 2 * x

        def backward(self, dy):
            return 2 * dy

    starred = layer(lambda *args, **kwargs: args[1], lambda *args: 7 * args[1])
    for made, factor in ((OfClass, 3), (OnlyBackward, -5), (Undecorated, 2), (starred, 7)):
        assert jax.jit(jax.grad(loss(made)))(X).tolist() == [factor] * 3
    assert jax.jit(jax.grad(loss(starred, factor=7)))(X).tolist() == [7] * 3


# Decorators of forward(ctx, a, b, scale=1.0), and the parameters of what is called, in their order.
DECORATORS = {
    "any arguments": (lambda f: lambda ctx, *args, **kwargs: f(ctx, *args, **kwargs), "ab"),
    "another order": (lambda f: lambda ctx, b, a: f(ctx, a, b), "ba"),
    "more arguments": (lambda f: lambda ctx, *args, **kwargs: f(ctx, *args, scale=1.0, **kwargs), "ab"),
    "fewer arguments": (lambda f: lambda ctx, a: f(ctx, a, jnp.full_like(a, 10)), "a"),
}


@pytest.mark.parametrize("base", [PyLayer, Function])
@pytest.mark.parametrize(("decorator", "order"), DECORATORS.values(), ids=DECORATORS)
def test_a_decorated_forward_is_called_as_the_layer_is(decorator, order, base):
    def forward(ctx, a, b, scale=1.0):
        return (a - 2 * b) * scale

    partials = {"a": 1.0, "b": -2.0}
    decorated = functools.wraps(forward)(decorator(forward))
    made = layer(decorated, lambda ctx, dy: tuple(partials[name] * dy for name in order), base)
    f = lambda a, b: made.apply(**{name: x for name, x in {"b": b, "a": a}.items() if name in order})
    values = jnp.float32(1), jnp.float32(10)
    assert f(*values) == jax.jit(f)(*values) == -19
    expected = (1, -2 if "b" in order else 0)
    assert jax.grad(f, (0, 1))(*values) == jax.jit(jax.grad(f, (0, 1)))(*values) == expected


def test_vmap_of_a_layer_gets_keywords_by_position():
    made = layer(lambda ctx, x, w: x * w, vmap=lambda info, dims, a, b: (a * b, 0))
    assert jax.vmap(lambda x: made.apply(w=2.0, x=x))(X).tolist() == (2 * X).tolist()


def test_numpy_in_and_out():
    def forward(ctx, x):
        assert isinstance(x, jax.Array)
        return np.full(3, 2.0, np.float32), [np.float32(1.0)]

    y, (z,) = layer(forward).apply(np.ones(3, np.float32))
    assert isinstance(y, jax.Array)
    assert isinstance(z, jax.Array)


DEFAULT = functools.partial(collections.defaultdict, list)


@pytest.mark.parametrize("kind", [dict, DEFAULT, collections.OrderedDict], ids=["dict", "defaultdict", "OrderedDict"])
@pytest.mark.parametrize("statics", [{"static": None}, {}], ids=["", "left out"])  # a key that holds no tensor
def test_the_keys_of_a_dict_need_not_be_sortable(kind, statics):
    def forward(ctx, mixed):
        ctx.static = mixed["static"]
        return mixed["a"] * mixed[1]

    def backward(ctx, dy):
        assert ctx.static == {1: 2, "a": 3}
        return (dict if kind is DEFAULT else kind)({"a": dy, 1: 2 * dy} | statics)

    made, unsortable = layer(forward, backward), DEFAULT({1: 2, "a": 3})
    f = lambda x: made.apply(kind({"a": x, 1: x, "static": unsortable})).sum()
    assert jax.grad(f)(X).tolist() == [3, 3, 3]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    w: jax.Array
    calls: int = dataclasses.field(metadata={"static": True}, default=0)


def changing(change):
    """Return a forward that changes its argument `params` in place."""
    return lambda ctx, x, params: (change(params), x * 2)[1]


def full():
    return {"w": X, "list": [X], "count": 0, "module": Module(X), "one": {"w": X}, "two": [X, {"w": X}]}


# An argument, a forward that changes the argument in place, and the name of the argument.
CHANGES = {
    "set": (full, changing(lambda p: p.update(w=p["w"] * 2)), "params"),
    "add": (full, lambda ctx, x, *, params: params.update(all=x) or x, "params"),
    "pop": (full, lambda ctx, *args: args[0] * args[1].pop("w"), "args"),
    "rename": (full, lambda ctx, x, **named: named["params"].update(v=named["params"].pop("module")) or x, "params"),
    "append": (full, changing(lambda p: p["list"].append(3)), "params"),
    "unwrap": (full, changing(lambda p: p.update(one=p["one"]["w"])), "params"),
    "rewrap": (full, changing(lambda p: p.update(two=[{"w": p["two"][0]}, p["two"][1]["w"]])), "params"),
    "count": (full, changing(lambda p: p.update(count=1)), "params"),
    "module": (full, changing(lambda p: setattr(p["module"], "calls", 1)), "params"),
    "fill a list": (list, lambda ctx, x, states: states.append(x) or x * 2, "states"),
    "fill a list in a dict": (lambda: {"all": []}, lambda ctx, x, states: states["all"].append(x) or x * 2, "states"),
}
AROUND = {**RUNS, "vmap of eager": lambda f: lambda x: jax.vmap(f)(x[None]), "with forward mode": jax.grad}


@pytest.mark.parametrize(("make", "forward", "argument"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("around", AROUND)
def test_an_argument_that_changed_in_place(make, forward, argument, around):
    made, params = layer(forward, forward_mode=around == "with forward mode"), make()
    leaves, treedef = jax.tree.flatten(params)
    call = loss(made, params=params) if argument == "params" else loss(made, params)
    with pytest.raises(ValueError, match=rf"Made\.forward(?s:.*){argument}"):
        AROUND[around](call)(X)
    # Nothing reached the caller.
    found, found_treedef = jax.tree.flatten(params)
    assert found_treedef == treedef
    assert all(a is b for a, b in zip(found, leaves, strict=True))


@jax.tree_util.register_pytree_node_class
class NotComparable:
    def __init__(self, w):
        self.w = w

    def tree_flatten(self):
        return (self.w * 1.0,), np.zeros(2)

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_changes_that_are_not_refused():
    # Nodes that cannot be compared, or make new leaves, count as unchanged, and a new container is forward's own.
    np.testing.assert_allclose(layer(lambda ctx, x, p: x * p.w).apply(X, NotComparable(X)), X * X)
    np.testing.assert_allclose(layer(lambda ctx, x, p: x * dict(p).pop("w")).apply(X, {"w": X}), X * X)


@pytest.mark.parametrize("kind", [dict, DEFAULT], ids=["dict", "defaultdict"])
@pytest.mark.parametrize("run", [lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda *xs: jax.vmap(f)(*xs)])
def test_dicts_keep_the_order_of_their_keys(run, kind):
    # JAX sorts them; here `a, b = d.values()` is the same in both methods.
    seen = []

    def forward(ctx, x, params, **more):
        ctx.kept = kind({"x": x, "a": params["a"]})
        ctx.statics = kind({"x": 1, "a": 0})
        ctx.nested = [kind({"z": kind({"q": x, "b": 2.0}), "c": 3})]
        ctx.more = more
        ctx.save_for_backward(kind({"x": x, "a": params["a"]}))
        assert list(params) == ["w", "a"]
        return kind({"y": x * params["a"] ** 2, "k": x * params["w"], "static": 1})

    def backward(ctx, d):
        (saved,) = ctx.saved_tensor()
        found = (saved, ctx.kept, ctx.statics, ctx.nested[0], ctx.nested[0]["z"], ctx.more, d)
        seen.append([" ".join(keys) for keys in found])
        x, a = saved.values()
        dy, dk, _ = d.values()
        return dy * a**2, kind({"a": 2 * dy * x * a, "w": dk * x}), None, None

    made = layer(forward, backward)

    def outputs(x, a):
        return made.apply(x, kind({"w": x, "a": a}), second=x, first=a)

    x, a = jnp.array([2.0]), jnp.array([3.0])
    gradients = jax.grad(lambda x, a: run(lambda x, a: outputs(x, a)["y"])(x, a).sum(), (0, 1))(x, a)
    assert [float(g[0]) for g in gradients] == [9, 12]
    assert seen[-1] == ["x a", "x a", "x a", "z c", "q b", "second first", "y k static"]
    assert list(outputs(x, a)) == ["y", "k", "static"]
    assert type(outputs(x, a)) is type(kind())


Named = namedtuple("Named", "value label")
OBJECT = object()
FUNCTION = lambda: None
OUTPUTS = {
    "statics": lambda y: (y, 1, None, "text", OBJECT, FUNCTION, [3]),
    "1-tuple": lambda y: (y,),
    "list": lambda y: [y, None],
    "dict": lambda y: {"b": y, "a": {"c": OBJECT}},
    "named tuple": lambda y: Named(y, "label"),
    "nested": lambda y: ([y, (None, {"k": FUNCTION})], 2.5),
}


@pytest.mark.parametrize("outputs", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("mode", [None, "jit-grad", "scan", "vmap"])
def test_outputs_come_back_as_they_were(mode, outputs):
    made = layer(lambda ctx, x: outputs(x * 2), lambda ctx, *dys: 2 * jax.tree.leaves(dys)[0])
    found = []

    def f(x):
        found.append(made.apply(x))
        (y,) = [leaf for leaf in jax.tree.leaves(found[-1]) if isinstance(leaf, jax.Array)]
        return y.sum()

    if mode:
        assert MODES[mode](f)(X).tolist() == [2, 2, 2]
    else:
        assert f(X) == jax.jit(f)(X) == 2 * X.sum()
    for got in found:
        shown = jax.tree.map(lambda value: "array" if isinstance(value, jax.Array) else value, got)
        assert shown == outputs("array")
        assert type(got) is type(outputs("array"))


def test_output_without_a_tensor_is_an_error():
    made = layer(lambda ctx, x, result: result)
    for result in (None, (), 3, (None, "text"), [np.array(["text"])]):
        for run in (lambda f: f, jax.jit, jax.grad):
            with pytest.raises(ValueError, match=r"Made\.forward.*tensor"):
                run(lambda x, r=result: made.apply(x, r))(1.0)


@pytest.mark.parametrize("base", [PyLayer, Function])
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_entries_follow_the_signature_however_the_call_is_written(run, base):
    """Keyword-only arguments follow `*args`, and `**kwargs` come last, in the order of the call."""
    positional = layer(
        lambda ctx, a, b=0.0, *rest, c=0.0, **more: a + b + sum(rest) + c + sum(more.values()),
        lambda ctx, dy: tuple(number * dy for number in range(1, 8)),
        base,
    )
    named = layer(base=positional, backward=lambda ctx, dy: (dy, 2 * dy, 3 * dy, 4 * dy))
    x = dict(zip("abrscyx", jnp.arange(7.0), strict=True))

    def by_position(x):
        return positional.apply(x["a"], x["b"], x["r"], x["s"], y=x["y"], c=x["c"], x=x["x"])

    def by_name(x):
        return named.apply(y=x["y"], c=x["c"], b=x["b"], a=x["a"])

    assert run(jax.grad(by_position))(x) == {"a": 1, "b": 2, "r": 3, "s": 4, "c": 5, "y": 6, "x": 7}
    assert run(jax.grad(by_name))(x) == {"a": 1, "b": 2, "c": 3, "y": 4, "r": 0, "s": 0, "x": 0}


@EAGER_AND_JIT
@pytest.mark.parametrize("multiply", [Multiply.apply, cast_saved()(jnp.multiply)], ids=["layer", "pair"])
def test_a_number_stays_weakly_typed(multiply, mode):
    value, gradient = mode(jax.value_and_grad(lambda x: multiply(x, jnp.float16(2))))(2.0)
    assert (value.dtype, gradient.dtype) == (jnp.float16, jnp.float32)
    assert gradient.weak_type == (multiply != Multiply.apply)
