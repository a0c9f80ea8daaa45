"""saved_tensors_hooks: what they reach, when they run, what they cost, what they refuse."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer, disable_saved_tensors_hooks, once_differentiable, saved_tensors_hooks
from tests.kit.layers import Multiply, Square, Tanh, bits

A = jnp.linspace(0.5, 2.0, 6).reshape(2, 3)
B = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
X = jnp.array([0.2, -0.4, 0.9])


class Spy:
    """A pair that logs what it sees, and hides the values in between."""

    def __init__(self, **flags):
        self.log = []
        self.hooks = saved_tensors_hooks(self.pack, self.unpack, **flags)

    def pack(self, x):
        self.log.append("pack")
        return {"hidden": x * 2} if jnp.issubdtype(x.dtype, jnp.floating) else x

    def unpack(self, packed):
        self.log.append("unpack")
        return packed["hidden"] / 2 if isinstance(packed, dict) else packed

    def counts(self):
        return self.log.count("pack"), self.log.count("unpack")


# -- what is reached ------------------------------------------------------------------------------


OPERATIONS = {
    "plain operation": (jnp.multiply, 2),
    "layer": (Multiply.apply, 2),
    "jitted operation": (jax.jit(jnp.multiply), 2),
    "jitted layer": (jax.jit(Multiply.apply), 2),
    "operator": (lambda a, b: a * b, 2),
    "custom_jvp": (lambda a, b: jax.nn.relu(a) * b, 4),  # of relu, twice: the mask and its zeros
    "checkpoint": (jax.checkpoint(Multiply.apply), 2),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_numpy_arrays_stay_on_the_host(name):
    # The first example of Paddle's document, and its second.
    operation, packs = OPERATIONS[name]
    log = []

    def pack(x):
        log.append(x)
        return np.asarray(x)

    def unpack(x):
        assert type(x) is np.ndarray
        return jnp.asarray(x)

    def loss(a, b):
        with saved_tensors_hooks(pack, unpack):
            y = operation(a, b)
        return y.sum()

    value, pullback = jax.vjp(loss, A, B)
    np.testing.assert_allclose(value, (A * B).sum(), rtol=1e-6)
    assert len(log) == packs
    assert all(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in log)
    da, db = pullback(jnp.ones(()))
    np.testing.assert_allclose(da, B)
    np.testing.assert_allclose(db, A)


def test_only_what_is_needed_is_packed():
    spy = Spy()

    def loss(a):
        with spy.hooks:
            return jnp.sum(a * B)  # the gradient of a needs B alone

    jax.grad(loss)(A)
    assert spy.counts() == (1, 1)


def test_a_tensor_that_several_operations_keep_is_packed_once():
    spy = Spy()

    def loss(a, b):
        with spy.hooks:
            return jnp.sum(Multiply.apply(a, b) + a * b + Multiply.apply(a, a))

    for differentiate in (jax.grad, lambda f, i: jax.jit(jax.grad(f, i))):
        spy.log.clear()
        differentiate(loss, (0, 1))(A, B)
        assert spy.log.count("pack") == 2


def test_attributes_and_statics_are_not_packed():
    class Scale(PyLayer):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.attribute = x
            ctx.save_for_backward(None, "text", {"x": x}, factor)
            return x * factor

        @staticmethod
        def backward(ctx, dy):
            nothing, text, tree, factor = ctx.saved_tensor()
            assert nothing is None
            assert text == "text"
            np.testing.assert_array_equal(tree["x"], ctx.attribute)
            return dy * factor

    spy = Spy()
    with spy.hooks:
        np.testing.assert_array_equal(jax.grad(lambda x: Scale.apply(x, 3.0).sum())(X), [3, 3, 3])
    assert spy.counts() == (1, 1)


def test_layers_are_reached_by_a_block_around_the_differentiation():
    for differentiate in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        spy = Spy()
        with spy.hooks:
            got = differentiate(lambda x: Tanh.apply(x).sum())(X)
        np.testing.assert_allclose(got, 1 - jnp.tanh(X) ** 2, rtol=1e-6)
        assert spy.counts() == (1, 1)


def test_decorator_reaches_the_whole_function():
    spy = Spy()

    @spy.hooks
    def loss(x, scale=1.0):
        """Doc."""
        return jnp.sum(jnp.sin(Tanh.apply(x)) * scale)

    assert (loss.__name__, loss.__doc__) == ("loss", "Doc.")
    for differentiate in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        spy.log.clear()
        np.testing.assert_allclose(
            differentiate(loss)(X, 2.0), 2 * jnp.cos(jnp.tanh(X)) * (1 - jnp.tanh(X) ** 2), rtol=1e-5
        )
        assert spy.counts()[0] == spy.counts()[1] >= 2


def test_a_decorated_function_may_be_recursive_and_return_anything():
    spy = Spy()

    @spy.hooks
    def power(x, n):
        return (x, "one") if n == 1 else (x * power(x, n - 1)[0], n)

    def loss(x):
        value, tag = power(x, 3)
        assert tag == 3
        return value.sum()

    for differentiate in (jax.grad, lambda f: jax.grad(jax.jit(f))):
        np.testing.assert_allclose(differentiate(loss)(X), 3 * X**2, rtol=1e-5)


def test_a_scan_under_jit_packs_in_each_iteration():
    shapes = []

    def pack(x):
        shapes.append(x.shape)
        return x

    def loss(x):
        with saved_tensors_hooks(pack, lambda x: x):
            return jax.lax.scan(lambda c, _: (Tanh.apply(c), None), x, None, length=7)[0].sum()

    jax.jit(jax.grad(loss))(X)
    assert set(shapes) == {(3,)}
    shapes.clear()
    jax.grad(loss)(X)  # in eager mode it is one operation, with concrete stacked residuals
    assert set(shapes) == {(7, 3)}


def test_effects_in_a_block_still_happen():
    seen = []

    def loss(x):
        with bits():
            y = jax.jit(lambda x: (jax.debug.callback(seen.append, x), jnp.sin(x))[1])(x)
            return y.sum()

    for differentiate in (jax.grad, lambda f: jax.grad(jax.jit(f))):
        np.testing.assert_allclose(differentiate(loss)(X), jnp.cos(X), rtol=1e-6)
        jax.effects_barrier()
    assert len(seen) == 2


def test_random_numbers_and_integers_pass():
    key = jax.random.key(0)

    def loss(x):
        with bits():
            mask = jax.random.bernoulli(key, 0.5, x.shape)
            return jnp.sum(jnp.where(mask, x, 0.0) * jnp.take(x, jnp.array([2, 1, 0])))

    expected = jax.grad(lambda x: jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0) * x[::-1]))(X)
    np.testing.assert_allclose(jax.grad(loss)(X), expected)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(X), expected)


def test_forward_mode_is_not_packed():
    spy = Spy()

    def f(x):
        with spy.hooks:
            return jnp.sin(x) * x

    for run in (jax.jvp, jax.jit(lambda *a: jax.jvp(*a), static_argnums=0)):
        _, tangent = run(f, (X,), (X,))
        np.testing.assert_allclose(tangent, (jnp.cos(X) * X + jnp.sin(X)) * X, rtol=1e-6)
    assert spy.log == []


# -- when they run --------------------------------------------------------------------------------


def test_nothing_happens_without_differentiation():
    spy = Spy()

    def f(a, b):
        with spy.hooks:
            return Multiply.apply(a, b) * a

    for run in (f, jax.jit(f), jax.vmap(f), jax.jit(jax.vmap(f))):
        np.testing.assert_allclose(run(A, B), A * B * A, rtol=1e-6)
    assert spy.log == []


def test_unpack_waits_for_backward_to_ask():
    class Constant(PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 1)
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    spy = Spy()
    with spy.hooks:
        np.testing.assert_array_equal(jax.grad(lambda x: Constant.apply(x).sum())(X), [2, 2, 2])
    assert spy.counts() == (1, 0)


def test_asking_twice_unpacks_once():
    class Twice(PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, dy):
            assert ctx.saved_tensor()[0] is ctx.saved_tensors[0]
            return 2 * ctx.saved_tensors[0] * dy

    spy = Spy()
    with spy.hooks:
        np.testing.assert_allclose(jax.grad(lambda x: Twice.apply(x).sum())(X), 2 * X)
    assert spy.counts() == (1, 1)


def test_vjp_called_twice():
    spy = Spy()

    def f(x):
        with spy.hooks:
            return jnp.sin(Tanh.apply(x))

    y, pullback = jax.vjp(f, X)
    first, second = pullback(jnp.ones_like(y)), pullback(jnp.ones_like(y))
    np.testing.assert_array_equal(first[0], second[0])
    packs, unpacks = spy.counts()
    assert unpacks == 2 * packs


def test_the_pair_at_the_call_counts_not_the_one_at_the_differentiation():
    inner, outer = Spy(), Spy()

    @jax.jit
    def f(x):
        with inner.hooks:
            return jnp.sum(Tanh.apply(x))

    with outer.hooks:
        jax.grad(f)(X)
    assert inner.counts() == (1, 1)
    assert outer.counts() == (0, 0)


def test_objects_die_with_the_vjp_function():
    class Held:
        def __init__(self, x):
            self.x = np.asarray(x)

    alive = weakref.WeakSet()

    def pack(x):
        held = Held(x)
        alive.add(held)
        return held

    def f(a, b):
        with saved_tensors_hooks(pack, lambda held: jnp.asarray(held.x)):
            return jnp.sum(Multiply.apply(a, b) * jnp.sin(a))

    value, pullback = jax.vjp(f, A, B)
    assert len(alive) == 5  # a, b, and of the product and the sine a * b, sin(a), cos(a)
    pullback(value)
    assert len(alive) == 5
    del pullback
    gc.collect()
    assert len(alive) == 0


# -- nesting, exceptions, threads -----------------------------------------------------------------


def test_the_innermost_pair_alone_applies():
    outer, inner = Spy(), Spy()

    def loss(a, b):
        with outer.hooks:
            with inner.hooks:
                y = a * b
            with inner.hooks:
                y = Multiply.apply(y, b)
            return jnp.sum(y * a)

    jax.grad(loss, (0, 1))(A, B)
    assert inner.counts() == (3, 4)  # b is kept twice, and packed once
    assert outer.counts() == (2, 2)


STAGED = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "map": lambda f: lambda x: jax.lax.map(f, x[None])[0],
}


@pytest.mark.parametrize("stage", STAGED)
@pytest.mark.parametrize("decorate", [False, True])
@pytest.mark.parametrize("differentiate", [jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))])
def test_the_innermost_pair_alone_applies_within_staged_code(stage, decorate, differentiate):
    outer, inner = Spy(), Spy()

    def f(x):
        with inner.hooks:
            return jnp.sin(Tanh.apply(x))

    def block(x):
        with outer.hooks:
            return STAGED[stage](f)(x).sum()

    loss = outer.hooks(lambda x: STAGED[stage](f)(x).sum()) if decorate else block
    np.testing.assert_allclose(differentiate(loss)(X), jnp.cos(jnp.tanh(X)) * (1 - jnp.tanh(X) ** 2), rtol=1e-5)
    assert inner.log.count("unpack") == 2
    assert outer.log == []


def test_the_same_pair_may_be_entered_twice():
    spy = Spy()

    def loss(x):
        with spy.hooks, spy.hooks:
            return jnp.sum(x * x)

    jax.grad(loss)(X)
    assert spy.counts() == (1, 1)


@pytest.mark.parametrize("where", ["block", "decorated", "pack", "unpack"])
def test_the_previous_pair_is_restored_after_an_exception(where):
    spy = Spy()

    def fail(x):
        raise KeyError("mine")

    def broken(x):
        if where == "block":
            with saved_tensors_hooks(jnp.asarray, jnp.asarray):
                fail(x)
        if where == "decorated":
            saved_tensors_hooks(jnp.asarray, jnp.asarray)(fail)(x)
        pair = {"pack": (fail, jnp.asarray), "unpack": (jnp.asarray, fail)}[where]
        return jax.grad(lambda x: saved_tensors_hooks(*pair)(jnp.sin)(x).sum())(X)

    def loss(x):
        with spy.hooks:
            with pytest.raises(KeyError, match="mine"):
                broken(x)
            y = x * x
        return jnp.sum(jnp.sin(y))

    np.testing.assert_allclose(jax.grad(loss)(X), jnp.cos(X**2) * 2 * X, rtol=1e-6)
    assert spy.counts() == (1, 1)


def test_threads_do_not_see_each_others_hooks():
    spy, inside, done = Spy(), threading.Event(), threading.Event()
    results = []

    def other():
        inside.wait(60)
        results.append(jax.grad(lambda x: Tanh.apply(jnp.sin(x)).sum())(X))
        with pytest.raises(RuntimeError, match="not here"), disable_saved_tensors_hooks("not here"), spy.hooks:
            pass
        done.set()

    thread = threading.Thread(target=other)
    thread.start()

    def loss(x):
        with spy.hooks:
            inside.set()
            assert done.wait(60)
            return x.sum()

    jax.grad(loss)(X)
    thread.join()
    assert len(results) == 1
    assert spy.log == []


def test_one_hooks_object_in_many_threads():
    spy = Spy()

    def loss(x):
        with spy.hooks:
            return jnp.sum(jnp.sin(x))

    results = [None] * 8

    def run(i):
        results[i] = jax.grad(loss)(X + i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, result in enumerate(results):
        np.testing.assert_allclose(result, jnp.cos(X + i), rtol=1e-5)
    assert spy.counts() == (8, 8)


def test_disabled_hooks():
    hooks = bits()
    with disable_saved_tensors_hooks("no hooks here"), pytest.raises(RuntimeError, match=r"^no hooks here$"), hooks:
        pass
    with hooks, pytest.raises(RuntimeError, match=r"^inside$"), disable_saved_tensors_hooks("inside"):
        pass

    @disable_saved_tensors_hooks("decorated")
    def f(x):
        return hooks(jnp.sin)(x)

    for run in (f, jax.jit(f)):
        with pytest.raises(RuntimeError, match="decorated"):
            run(X)
    with hooks:  # enabled again
        pass


def test_disabled_hooks_as_torch_has_them(framework):
    graph = framework("torch").autograd.graph
    for ours, theirs in (
        (saved_tensors_hooks, graph.saved_tensors_hooks),
        (graph.saved_tensors_hooks, saved_tensors_hooks),
    ):
        del theirs
        disable = disable_saved_tensors_hooks if ours is saved_tensors_hooks else graph.disable_saved_tensors_hooks
        pair = (lambda x: x, lambda x: x)
        with disable("outer"), disable("inner"), pytest.raises(RuntimeError, match=r"^inner$"), ours(*pair):
            pass
        with ours(*pair), pytest.raises(RuntimeError, match=r"^late$"), disable("late"):
            pass


# -- jit's caches ---------------------------------------------------------------------------------


def test_jit_traces_again_for_other_hooks_and_not_for_the_same():
    traced = []

    @jax.jit
    @jax.grad
    def step(x):
        traced.append(1)
        return Tanh.apply(x).sum()

    one, two = Spy(), Spy()
    step(X)
    assert (len(traced), one.counts()) == (1, (0, 0))  # compiled without hooks
    for _ in range(3):
        with one.hooks:
            step(X)
    assert (len(traced), one.counts()) == (2, (1, 1))
    with saved_tensors_hooks(one.pack, one.unpack):  # an equal pair
        step(X)
    assert len(traced) == 2
    with two.hooks:
        step(X)
    assert (len(traced), two.counts()) == (3, (1, 1))
    step(X)
    assert len(traced) == 3


def test_a_lambda_in_a_function_is_one_pair_however_often_it_runs():
    traced = []

    @jax.jit
    @jax.grad
    def step(x):
        traced.append(1)
        return Tanh.apply(x).sum()

    def run(factor):
        with saved_tensors_hooks(lambda x: x * factor, lambda x: x / factor):
            return step(X)

    for _ in range(3):
        np.testing.assert_allclose(run(2.0), 1 - jnp.tanh(X) ** 2, rtol=1e-6)
    assert len(traced) == 1
    run(4.0)
    assert len(traced) == 2


def test_a_variable_that_a_hook_closes_over_may_change():
    factor = 1.0
    hooks = saved_tensors_hooks(lambda x: x, lambda x: x * factor)
    step = jax.jit(jax.grad(lambda x: Tanh.apply(x).sum()))
    for factor in (1.0, 0.0, 1.0):
        with hooks:
            np.testing.assert_allclose(step(X), 1 - (factor * jnp.tanh(X)) ** 2, rtol=1e-6)


def test_hooks_that_cannot_be_hashed():
    class Unhashable:
        __hash__ = None

        def __call__(self, x):
            return x

    with saved_tensors_hooks(Unhashable(), Unhashable()):
        np.testing.assert_allclose(jax.jit(jax.grad(lambda x: Tanh.apply(x).sum()))(X), 1 - jnp.tanh(X) ** 2, rtol=1e-6)


def test_without_hooks_nothing_is_left_of_a_block():
    def f(x):
        return jnp.sum(jnp.sin(Tanh.apply(x)) * x)

    def after(x):
        with bits():
            pass
        return f(x)

    programs = [jax.jit(jax.grad(g)).lower(X).as_text() for g in (f, after)]
    assert programs[0] == programs[1].replace("jit_after", "jit_f")


def test_compiled_forward_is_that_without_hooks():
    def f(x):
        return jnp.sum(jnp.sin(Tanh.apply(x)) * x)

    plain, hooked = (jax.jit(g).lower(X).compile() for g in (f, bits()(f)))
    assert plain.cost_analysis() == hooked.cost_analysis()


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        (lambda x: x[:1], r"shape \(1,\)"),
        (lambda x: x.astype(jnp.float16), "float16"),
        (lambda x: 3, "3 of type int"),
        (lambda x: None, "None"),
    ],
)
@pytest.mark.parametrize("operation", [Tanh.apply, jnp.exp])
def test_unpack_must_return_what_was_packed(bad, got, operation):
    def loss(x):
        with saved_tensors_hooks(lambda x: x, bad):
            return operation(x).sum()

    owner = "Tanh, saved tensor 0" if operation == Tanh.apply else "the operation (jit|exp), residual 0"
    message = rf"unpack_hook returned .*{got}.*{owner}: expected dtype float32 and shape \(3,\)"
    for differentiate in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        with pytest.raises(ValueError, match=message):
            differentiate(loss)(X)


def test_hooks_must_be_callable():
    for pair in ((1, abs), (abs, None)):
        with pytest.raises(TypeError, match=r"saved_tensors_hooks: (un)?pack_hook must be callable, got (1|None)"):
            saved_tensors_hooks(*pair)
    with pytest.raises(TypeError, match="saved_tensors_hooks decorates a function, got 3"):
        bits()(3)


@pytest.mark.parametrize("needy", [np.asarray, lambda x: x if x.sum() > 0 else -x, lambda x: float(x.sum())])
def test_a_hook_that_needs_values_under_jit_says_what_to_do(needy):
    def loss(x):
        with saved_tensors_hooks(needy, lambda x: x):
            return Tanh.apply(x).sum()

    for differentiate in (lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        with pytest.raises(TypeError, match=r"pack_hook needs concrete values, but Tanh, saved tensor 0.*host=True"):
            differentiate(loss)(X)


def test_a_packed_function_that_hides_traced_values_is_refused():
    def loss(x):
        with saved_tensors_hooks(lambda x: lambda: x, lambda f: f()):
            return Tanh.apply(x).sum()

    np.testing.assert_allclose(jax.grad(loss)(X), 1 - jnp.tanh(X) ** 2, rtol=1e-6)
    with pytest.raises(ValueError, match=r"function that closes over traced values .x."):
        jax.jit(jax.grad(loss))(X)


def test_an_exception_in_a_hook_says_where():
    def pack(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught, saved_tensors_hooks(pack, pack):
        jax.grad(lambda x: Tanh.apply(x).sum())(X)
    assert "This happened in pack_hook, for Tanh, saved tensor 0." in caught.value.__notes__


# -- higher orders --------------------------------------------------------------------------------


def test_once_differentiable_under_hooks():
    class Cube(PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @once_differentiable
        def backward(ctx, dy):
            (x,) = ctx.saved_tensor()
            return 3 * x**2 * dy

    with bits():
        np.testing.assert_allclose(jax.grad(lambda x: Cube.apply(x).sum())(X), 3 * X**2, rtol=1e-6)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            jax.grad(lambda x: jax.grad(lambda x: Cube.apply(x).sum())(x).sum())(X)


def test_a_second_derivative_of_staged_hooks_is_refused_unless_they_are_differentiable():
    def loss(hooks):
        def body(c, _):
            with hooks:
                return jnp.sin(Tanh.apply(c)), None

        return lambda x: jax.lax.scan(body, x, None, length=2)[0].sum()

    def second(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)))(X)

    with pytest.raises(TypeError, match=r"second derivative goes through Tanh, saved tensor 0.*differentiable=True"):
        second(loss(bits()))
    np.testing.assert_allclose(
        second(loss(Spy(differentiable=True).hooks)), second(loss(contextlib.nullcontext())), rtol=1e-5
    )


def test_weak_types_come_back():
    seen = []

    class Keep(PyLayer):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w.astype(x.dtype)

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensor()
            seen.append((jax.typeof(x).weak_type, w.dtype))
            return dy, None

    def loss(x):
        with saved_tensors_hooks(lambda x: np.asarray(x) if not isinstance(x, jax.core.Tracer) else x, jnp.asarray):
            return Keep.apply(x, jnp.ones((), jnp.bfloat16))

    weak = jnp.asarray(2.0)
    assert weak.weak_type
    for differentiate in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        differentiate(loss)(weak)
    assert seen == [(True, jnp.bfloat16)] * 2


def test_one_jitted_function_differentiated_for_different_arguments_in_turn():
    def plain(x, w):
        return jax.lax.scan(lambda c, _: (jnp.sin(c * w), None), x, None, length=3)[0].sum()

    @jax.jit
    def f(x, w):
        with bits():
            return plain(x, w)

    w = X + 2
    value, by_x = jax.vjp(lambda x: f(x, w), X)
    _, by_w = jax.vjp(lambda w: f(X, w), w)
    np.testing.assert_allclose(by_x(jnp.ones_like(value))[0], jax.grad(plain)(X, w), rtol=1e-5)
    np.testing.assert_allclose(by_w(jnp.ones_like(value))[0], jax.grad(plain, 1)(X, w), rtol=1e-5)


@pytest.mark.parametrize("f", [Square.apply, lambda x: jnp.sin(x) * x], ids=["layer", "operation"])
@pytest.mark.parametrize("order", [jax.grad, lambda f: jax.grad(jax.grad(f)), jax.hessian], ids=["1", "2", "hessian"])
def test_python_numbers_as_arguments_and_cotangents(f, order):
    seen = []
    hooks = saved_tensors_hooks(lambda x: seen.append(x.dtype) or (x, x.size), lambda kept: kept[0])
    np.testing.assert_allclose(order(hooks(f))(2.0), order(f)(2.0), rtol=1e-6)
    assert set(seen) == {jnp.dtype("float32")}
    np.testing.assert_allclose(jax.vjp(hooks(f), 2.0)[1](1.0), jax.vjp(f, 2.0)[1](1.0), rtol=1e-6)


def test_refs_inside_a_block():
    def f(x):
        ref = jax.new_ref(jnp.zeros(3))
        ref[...] = x * x
        return jnp.sum(ref[...])

    for run in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        np.testing.assert_allclose(run(bits()(f))(X), 2 * X, rtol=1e-6)


def test_functions_that_run_later_are_not_decorated():
    def generator():
        yield

    async def coroutine():
        pass

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match=r"saved_tensors_hooks decorates a function that runs when it is called"):
            bits()(function)


def test_blocks_that_end_in_another_order():
    packed = []

    def block(name):
        with saved_tensors_hooks(lambda x: packed.append(name) or x, lambda x: x):
            yield
            yield

    first, second = block("first"), block("second")
    next(first), next(second)
    first.close()
    jax.grad(Square.apply)(1.0)
    assert packed == ["second"]
    second.close()
    jax.grad(Square.apply)(1.0)
    assert packed == ["second"]
    with disable_saved_tensors_hooks("none is active"):
        pass
