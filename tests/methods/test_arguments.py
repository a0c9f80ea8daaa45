"""How a layer is called: arguments and statics of every kind, in every mode."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer
from tests.kit.modes import MODES, X, modes


class Scaled(PyLayer):
    @staticmethod
    def forward(ctx, x, factor=2.0, *, shift=0.0):
        ctx.factor = factor
        return x * factor + shift

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.factor


def test_class_and_instance_apply():
    assert Scaled.apply(X).tolist() == Scaled().apply(X).tolist() == (2 * X).tolist()
    assert jax.grad(lambda x: Scaled().apply(x, factor=3.0).sum())(X).tolist() == [3, 3, 3]


class Difference(PyLayer):
    @staticmethod
    def forward(ctx, a, b, c=None):
        ctx.save_for_backward(a, b)
        return a**2 - b

    @staticmethod
    def backward(ctx, dy):
        a, _ = ctx.saved_tensor()
        return 2 * a * dy, -dy


@modes
def test_gradients_follow_the_parameter_order(mode):
    for call in (lambda a, b: Difference.apply(b=b, a=a), lambda a, b: Difference.apply(a, b=b), Difference.apply):
        gradient = MODES[mode](lambda x, call=call: call(x, 3 * x).sum())
        np.testing.assert_allclose(gradient(X), 2 * X - 3)


@pytest.mark.parametrize(
    "static",
    [
        lambda: [1, {"a": {2, 3}}],
        lambda: {1: 2, "a": [3]},
        lambda: float("nan"),
        lambda: lambda v: v,
        lambda: functools.partial(max, 1),
        object,
        lambda: None,
    ],
    ids=["unhashable", "unsortable", "nan", "lambda", "partial", "object", "none"],
)
@modes
def test_fresh_statics_of_any_kind(mode, static):
    class Carries(PyLayer):
        @staticmethod
        def forward(ctx, x, value):
            ctx.value, ctx.made = value, (lambda v: v)
            ctx.save_for_backward(x, value)
            return x**2

        @staticmethod
        def backward(ctx, dy):
            x, saved = ctx.saved_tensor()
            assert type(saved) is type(ctx.value)
            return ctx.made(2 * x * dy), None

    np.testing.assert_allclose(MODES[mode](lambda x: Carries.apply(x, static()).sum())(X), 2 * X)


@modes
def test_partial_arguments_are_differentiated_through(mode):
    class Applies(PyLayer):
        @staticmethod
        def forward(ctx, function, x):
            ctx.kept = (function, x)
            return function(x)

        @staticmethod
        def backward(ctx, dy):
            function, x = ctx.kept
            return jax.vjp(lambda f, x: f(x), function, x)[1](dy)

    multiply = lambda w, v: w * v**2  # noqa: E731
    f = lambda x: Applies.apply(jax.tree_util.Partial(multiply, x), x).sum()  # noqa: E731
    np.testing.assert_allclose(MODES[mode](f)(X), 3 * X**2)


def test_methods_of_every_kind():
    class Plain(PyLayer):
        def forward(self, x):  # the context under another name, and no decorator
            return 2 * x

        def backward(self, dy):
            return 2 * dy

    class OfClass(PyLayer):
        factor = 3

        @classmethod
        def forward(cls, ctx, x):
            return cls.factor * x

        @classmethod
        def backward(cls, ctx, dy):
            return cls.factor * dy

    class Inherits(OfClass):
        factor = 5

    class OnlyBackward(Inherits):
        @classmethod
        def backward(cls, ctx, dy):
            return -super().backward(ctx, dy)

    class Starred(PyLayer):
        @staticmethod
        def forward(*args, **kwargs):
            ctx, x = args
            return kwargs["factor"] * x

        @staticmethod
        def backward(*args):
            return args[1] * 7

    for layer, factor in ((Plain, 2), (OfClass, 3), (Inherits, 5), (OnlyBackward, -5)):
        assert jax.jit(jax.grad(lambda x, layer=layer: layer.apply(x).sum()))(X).tolist() == [factor] * 3
    assert jax.jit(jax.grad(lambda x: Starred.apply(x, factor=7).sum()))(X).tolist() == [7] * 3


def test_layers_call_themselves():
    class Power(PyLayer):
        @staticmethod
        def forward(ctx, x, n):
            below = Power.apply(x, n - 1) if n > 1 else jnp.ones_like(x)
            ctx.save_for_backward(x, n)
            return below * x

        @staticmethod
        def backward(ctx, dy):
            x, n = ctx.saved_tensor()
            return dy * n * (Power.apply(x, n - 1) if n > 1 else 1.0), None

    for transform in (lambda f: f, jax.jit):
        np.testing.assert_allclose(transform(jax.grad(lambda x: Power.apply(x, 4).sum()))(X), 4 * X**3)
        second = transform(jax.grad(lambda x: jax.grad(lambda x: Power.apply(x, 4).sum())(x).sum()))
        np.testing.assert_allclose(second(X), 12 * X**2, rtol=1e-6)


def test_eager_mode_sees_concrete_values():
    seen = []

    class Looks(PyLayer):
        @staticmethod
        def forward(ctx, x):
            if x[0] > 0:
                seen.append(np.asarray(x).tolist())
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensor()
            if x[0] > 0:
                seen.append(np.asarray(dy).tolist())
            return dy * 2

    Looks.apply(X)
    assert seen == [X.tolist()]
    if not jax.config.jax_custom_vjp3:
        jax.grad(lambda x: Looks.apply(x).sum())(X)
        assert seen == [X.tolist(), X.tolist(), [1, 1, 1]]


def test_numpy_in_and_out():
    class OnHost(PyLayer):
        @staticmethod
        def forward(ctx, x):
            assert isinstance(x, jax.Array)
            return np.full(3, 2.0, np.float32), [np.float32(1.0)]

        @staticmethod
        def backward(ctx, dy, dz):
            return None

    y, (z,) = OnHost.apply(np.ones(3, np.float32))
    assert isinstance(y, jax.Array)
    assert isinstance(z, jax.Array)


def test_unsortable_dict_with_tensors_is_refused():
    for run in (lambda f: f, jax.grad):
        with pytest.raises(ValueError, match=r"a dict with keys \[1, 'a'\] holds tensors.*Use keys of one type"):
            run(lambda x: Scaled.apply({1: x, "a": 2}).sum())(X)


@pytest.mark.parametrize("base", [PyLayer, Function])
def test_apply_is_one_object_so_that_jit_compiles_it_once(base):
    traced = []

    class Traced(base):
        @staticmethod
        def forward(ctx, x):
            traced.append(x)
            return x * 2

    class Shifted(Traced):
        @classmethod
        def apply(cls, x):
            return super().apply(x) + 1

    class Tripled(Shifted):
        @staticmethod
        def forward(ctx, x):
            return x * 3

    for _ in range(3):
        jax.jit(Traced.apply)(X)
        jax.jit(Traced().apply)(X)
    assert len(traced) <= 2  # under JAX_CUSTOM_VJP3 JAX traces it once more
    assert Traced.apply is Traced.apply
    assert Tripled.apply(X).tolist() == (X * 3 + 1).tolist()
    assert pickle.loads(pickle.dumps(Scaled.apply)) is Scaled.apply


# -- changes in place -----------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    w: jax.Array
    calls: int = dataclasses.field(metadata={"static": True}, default=0)


def set_item(ctx, x, params):
    params["w"] = params["w"] * 2
    return x * params["w"]


def add_item(ctx, x, *, params):
    params["all"] = x
    return x * params["w"]


def pop_item(ctx, *args):
    return args[0] * args[1].pop("w")


def rename(ctx, x, **named):
    params = named["params"]
    params["v"] = params.pop("w")
    return x * params["v"]


def append(ctx, x, params):
    params["list"].append(3)
    return x * 2


def count(ctx, x, params):
    params["count"] += 1
    return x * 2


def count_calls(ctx, x, params):
    params["module"].calls += 1
    return x * params["module"].w


@pytest.mark.parametrize(
    ("forward", "path"),
    [
        (set_item, "params['w']"),
        (add_item, "params['all']"),
        (pop_item, "args[1]['w']"),
        (rename, "params['w']"),
        (append, "params['list'][1]"),
        (count, "params['count']"),
        (count_calls, "params"),
    ],
)
@pytest.mark.parametrize("around", ["eager", "grad", "jit", "vmap", "jit of grad", "with forward mode"])
def test_an_argument_that_changed_in_place(forward, path, around):
    members = {"forward": staticmethod(forward), "backward": staticmethod(lambda ctx, dy: dy)}
    if around == "with forward mode":
        members["forward_mode"] = True
    layer = type("Changes", (PyLayer,), members)
    params = {"w": X, "list": [X], "count": 0, "module": Module(X)}
    leaves, treedef = jax.tree.flatten(params)

    def run(x):
        if forward in (add_item, rename):
            return layer.apply(x, params=params).sum()
        return layer.apply(x, params).sum()

    transform = {
        "grad": jax.grad(run),
        "jit": jax.jit(run),
        "vmap": jax.vmap(run),
        "jit of grad": jax.jit(jax.grad(run)),
        "with forward mode": jax.grad(run),
    }.get(around, run)
    message = rf"Changes.forward changed its argument {re.escape(path)} in place.*Return the new value as an output"
    with pytest.raises(ValueError, match=message):
        transform(X)
    # Nothing reached the caller.
    found, found_treedef = jax.tree.flatten(params)
    assert found_treedef == treedef
    assert all(a is b for a, b in zip(found, leaves, strict=True))


@pytest.mark.parametrize("mode", ["eager", "vmap of eager", *MODES])
@pytest.mark.parametrize(("empty", "path"), [(list, "[0]"), (dict, "['h']"), (lambda: {"all": []}, "['all'][0]")])
def test_an_empty_container_that_forward_fills(mode, empty, path):
    def forward(ctx, x, hidden_states=None):
        inner = hidden_states.get("all", hidden_states) if isinstance(hidden_states, dict) else hidden_states
        if inner is not None:
            inner.append(x) if isinstance(inner, list) else inner.update(h=x)
        return x * 2

    layer = type("Fills", (PyLayer,), {"forward": staticmethod(forward), "backward": staticmethod(lambda ctx, dy: dy)})
    transform = {**MODES, "eager": lambda f: f, "vmap of eager": lambda f: lambda x: jax.vmap(f)(x[None])}[mode]
    with pytest.raises(
        ValueError, match=rf"Fills\.forward changed its argument hidden_states{re.escape(path)} in place"
    ):
        transform(lambda x: layer.apply(x, empty()).sum())(X)
    transform(lambda x: layer.apply(x, None).sum())(X)


@jax.tree_util.register_pytree_node_class
class NotComparable:
    def __init__(self, w):
        self.w = w

    def tree_flatten(self):
        return (self.w,), np.zeros(2)

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_container_that_cannot_be_compared_is_not_refused():
    layer = type("Scale", (PyLayer,), {"forward": staticmethod(lambda ctx, x, p: x * p.w)})
    np.testing.assert_allclose(layer.apply(X, NotComparable(X)), X * X)


def test_what_forward_makes_of_its_arguments_may_change():
    def forward(ctx, x, params):
        own = dict(params)
        own["w"] = own.pop("w") * 2
        return x * own["w"]

    layer = type("Scale", (PyLayer,), {"forward": staticmethod(forward)})
    np.testing.assert_allclose(layer.apply(X, {"w": X}), 2 * X * X)
