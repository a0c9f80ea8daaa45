"""The context: what it keeps, what it is told, and what reaches backward under every transform."""

from __future__ import annotations

import collections
import copy
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer, saved_tensors_hooks
from tests.kit.modes import EAGER_AND_JIT, MODES, X, modes


def layer(forward, backward=lambda ctx, *dys: dys[0]):
    return type("Made", (PyLayer,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


# -- saving ---------------------------------------------------------------------------------------


def test_nothing_saved_reads_none_as_in_paddle_and_empty_as_in_torch():
    seen = []
    made = layer(lambda ctx, x: x * 1, lambda ctx, dy: (seen.append((ctx.saved_tensor(), ctx.saved_tensors)),))
    jax.grad(lambda x: made.apply(x).sum())(X)
    assert seen == [(None, ())]


@modes
def test_saved_values_keep_order_and_structure(mode):
    def forward(ctx, x):
        ctx.save_for_backward(x, None, 3, {"deep": [x * 2, "text"]}, x)
        return x * 1

    def backward(ctx, dy):
        a, none, three, tree, again = ctx.saved_tensor()
        assert (none, three, tree["deep"][1]) == (None, 3, "text")
        return dy * (a + tree["deep"][0] + again)

    np.testing.assert_allclose(MODES[mode](lambda x: layer(forward, backward).apply(x).sum())(X), 4 * X)


@modes
@pytest.mark.parametrize("keep", ["saved", "attribute"])
def test_every_run_of_backward_starts_from_the_containers_that_forward_left(mode, keep):
    def forward(ctx, x):
        factors = [2.0, {"deep": [3.0]}]
        if keep == "saved":
            ctx.save_for_backward(factors)
        else:
            ctx.factors = factors
        return x * 6

    def backward(ctx, dy):
        factors = ctx.saved_tensors[0] if keep == "saved" else ctx.factors
        return dy * factors.pop()["deep"].pop() * factors.pop()

    made = layer(forward, backward)

    def both_runs(x):
        y, pullback = jax.vjp(made.apply, x)
        first, second = pullback(y)[0], pullback(y)[0]
        return jnp.sum(first + second)

    np.testing.assert_allclose(both_runs(X), 72 * X.sum(), rtol=1e-5)
    np.testing.assert_allclose(MODES[mode](lambda x: made.apply(x).sum())(X), jnp.full_like(X, 6), rtol=1e-5)


@pytest.mark.parametrize(
    ("container", "change"),
    [
        ({"n": 0, 3: 1, None: 2}, lambda c: c.update(n=c["n"] + 1)),  # keys that cannot be sorted
        (collections.defaultdict(list), lambda c: c["new"].append(1)),
        ({}, lambda c: c.update(new=1)),
        ({1, 2}, lambda c: c.add(len(c) + 1)),
        (collections.deque([1]), lambda c: c.append(1)),
        (bytearray(b"a"), lambda c: c.append(1)),
        ([[{"deep": [1]}]], lambda c: c[0][0]["deep"].append(1)),
    ],
)
def test_what_one_run_changes_in_a_container_the_next_does_not_see(container, change):
    seen = []

    def backward(ctx, dy):
        seen.append(copy.deepcopy(ctx.container))
        change(ctx.container)
        return dy

    made = layer(lambda ctx, x: setattr(ctx, "container", copy.deepcopy(container)) or x * 1, backward)
    _, pullback = jax.vjp(made.apply, X)
    pullback(X)
    pullback(X)
    assert seen == [container, container]


def test_other_objects_on_ctx_are_shared():
    class Solver:
        runs = 0

    solver = Solver()
    made = layer(lambda ctx, x: setattr(ctx, "solver", solver) or x * 1, lambda ctx, dy: count(ctx.solver) or dy)

    def count(solver):
        solver.runs += 1

    _, pullback = jax.vjp(made.apply, X)
    pullback(X)
    pullback(X)
    assert solver.runs == 2


@modes
@pytest.mark.parametrize("keep", ["saved", "attribute", "in a list"])
def test_numpy_arrays_are_copied_when_they_are_kept(mode, keep):
    def forward(ctx, x):
        scale = np.ones(3, np.float32)
        if keep == "saved":
            ctx.save_for_backward(scale)
        elif keep == "attribute":
            ctx.scale = scale
        else:
            ctx.scale = [scale]
        scale[:] = 100.0
        return x * 1

    def backward(ctx, dy):
        scale = ctx.saved_tensors[0] if keep == "saved" else ctx.scale[0] if keep == "in a list" else ctx.scale
        assert isinstance(scale, jax.Array)
        return dy * scale

    assert MODES[mode](lambda x: layer(forward, backward).apply(x).sum())(X).tolist() == [1, 1, 1]


def test_containers_without_arrays_arrive_as_forward_left_them():
    config = {"a": [1, 2]}

    def forward(ctx, x):
        ctx.config = config
        assert ctx.config is config
        ctx.config["late"] = True
        return x * 1

    def backward(ctx, dy):
        assert ctx.config == {"a": [1, 2], "late": True}
        ctx.note = "further attributes may be set here"
        return dy

    assert jax.grad(lambda x: layer(forward, backward).apply(x).sum())(X).tolist() == [1, 1, 1]


@pytest.mark.parametrize("run", [lambda f: f, jax.grad, lambda f: jax.jit(jax.grad(f))])
@pytest.mark.parametrize("keep", ["save", "attribute"])
def test_a_ref_that_forward_made_is_not_kept(run, keep):
    def forward(ctx, x):
        ref = jax.new_ref(jnp.zeros(3))
        if keep == "save":
            ctx.save_for_backward(ref)
        else:
            ctx.ref = [ref]
        return x * 1

    with pytest.raises(ValueError, match=r"no jax\.Ref for backward but an argument of forward.*ref\[\.\.\.\]"):
        run(lambda x: layer(forward).apply(x).sum())(X)


# -- phases ---------------------------------------------------------------------------------------

CALLS = {
    "save_for_backward": lambda ctx, x: ctx.save_for_backward(x),
    "mark_non_differentiable": lambda ctx, x: ctx.mark_non_differentiable(x),
    "mark_not_inplace": lambda ctx, x: ctx.mark_not_inplace(x),
    "set_materialize_grads": lambda ctx, x: ctx.set_materialize_grads(False),
}


@pytest.mark.parametrize("run", [jax.grad, lambda f: jax.jit(jax.grad(f))])
@pytest.mark.parametrize("call", CALLS)
def test_recording_in_backward_is_refused(run, call):
    made = layer(lambda ctx, x: x * 1, lambda ctx, dy: CALLS[call](ctx, dy))
    with pytest.raises(
        RuntimeError, match=rf"ctx\.{call} was called in backward of Made; it works only inside forward"
    ):
        run(lambda x: made.apply(x).sum())(X)


@pytest.mark.parametrize("run", [lambda f: f, jax.grad, jax.jit])
@pytest.mark.parametrize("call", CALLS)
def test_recording_after_forward_returned_is_refused(run, call):
    kept = []
    made = layer(lambda ctx, x: kept.append(ctx) or x * 1)
    run(lambda x: made.apply(x).sum())(X)
    with pytest.raises(RuntimeError, match=rf"ctx\.{call} was called in code that ran after forward had returned"):
        CALLS[call](kept[0], X)


@pytest.mark.parametrize("run", [lambda f: f, jax.grad, lambda f: jax.jit(jax.grad(f))])
def test_saving_twice_is_refused(run):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_backward(x)
        return x

    with pytest.raises(RuntimeError, match=r"called twice in Made\.forward"):
        run(lambda x: layer(forward).apply(x).sum())(X)


@pytest.mark.parametrize("run", [lambda f: f, jax.grad, lambda f: jax.jit(jax.grad(f))])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda ctx, x: ctx.mark_not_inplace(x * 2),
            r"mark_not_inplace in Made\.forward: argument 0 .* not a tensor input",
        ),
        (lambda ctx, x: ctx.mark_not_inplace(3), r"argument 0 \(3 of type int\) is not a tensor input"),
        (
            lambda ctx, x: ctx.mark_non_differentiable(x * 2),
            r"mark_non_differentiable in Made\.forward: .* is not an output",
        ),
        (lambda ctx, x: ctx.mark_non_differentiable(None), "None of type NoneType is not an output"),
    ],
)
def test_marks_of_the_wrong_values(run, call, message):
    with pytest.raises(ValueError, match=message):
        run(lambda x: layer(lambda ctx, x: (call(ctx, x), x * 1)[1]).apply(x).sum())(X)


@EAGER_AND_JIT
def test_the_dtype_of_a_cotangent_is_that_of_its_output(mode):
    def run(flag):
        made = layer(
            lambda ctx, x: (ctx.set_grad_in_dtype_consistent(flag), x.astype("float16"))[1], lambda ctx, dy: dy
        )
        return mode(jax.grad(lambda x: made.apply(x).astype("float32").sum()))(X)

    assert run(True).tolist() == [1, 1, 1]
    with pytest.raises(
        ValueError, match=r"\(False\) in Made\.forward: .* cotangent always has the dtype of its output"
    ):
        run(False)


def test_names_of_the_context_cannot_be_assigned():
    def forward(ctx, x):
        ctx.saved_tensors = (x,)
        return x

    with pytest.raises(AttributeError, match=r"keep tensors with ctx\.save_for_backward"):
        layer(forward).apply(X)


def test_unknown_attribute_says_what_forward_set():
    def forward(ctx, x):
        ctx.scale = 2
        return x * 1

    with pytest.raises(AttributeError, match=r"ctx\.scales does not exist: forward of Made .* it set \['scale'\]"):
        jax.grad(lambda x: layer(forward, lambda ctx, dy: dy * ctx.scales).apply(x).sum())(X)


@pytest.mark.parametrize("mode", [m for m in MODES if m not in ("grad", "vmap")])
def test_function_that_closes_over_traced_values_is_refused(mode):
    def forward(ctx, x):
        double = x * 2
        ctx.rules = {"pull": lambda dy: dy * double}
        return x * 1

    made = layer(forward, lambda ctx, dy: ctx.rules["pull"](dy))
    with pytest.raises(
        ValueError, match=r"ctx\.rules\['pull'\] in Made\.forward is a function that closes over traced"
    ) as e:
        MODES[mode](lambda x: made.apply(x).sum())(X)
    assert "(double)" in str(e.value)


# -- cotangents -----------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("materialize", [True, False])
def test_missing_cotangents(mode, materialize):
    seen = []

    def forward(ctx, x):
        ctx.set_materialize_grads(materialize)
        return x * 2, x[:2], jnp.arange(4), {"a": x, "n": 1}

    def backward(ctx, *dys):
        seen.append(dys)
        return dys[0] * 2

    gradient = MODES[mode](lambda x: layer(forward, backward).apply(x)[0].sum())(X)
    assert gradient.tolist() == [2, 2, 2]
    for _, part, integers, tree in seen:
        if materialize:
            assert (part.shape, part.dtype) == ((2,), jnp.float32)
            assert (integers.shape, integers.dtype) == ((4,), jnp.int32)
            assert tree["a"].shape == (3,)
        else:
            assert (part, integers, tree["a"]) == (None, None, None)
        assert tree["n"] is None


@pytest.mark.parametrize("place", ["sharded", "another device", "anywhere"])
def test_zeros_lie_where_the_output_lies(place):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    x = (
        jnp.ones(8)
        if place == "anywhere"
        else jax.device_put(jnp.ones(8), sharded if place == "sharded" else jax.devices()[2])
    )
    seen = []
    made = layer(lambda ctx, x: (x * 1, x * 2), lambda ctx, a, b: (seen.append(b), a + b)[1])
    jax.grad(lambda x: made.apply(x)[0].sum())(x)
    if not jax.config.jax_custom_vjp3:
        assert seen[0].sharding.is_equivalent_to(x.sharding, 1)
        assert seen[0].committed == x.committed
    step = jax.grad(lambda x: made.apply(x)[0].sum())
    assert jax.vmap(step)(x[:, None]).tolist() == jax.jit(step)(x)[:, None].tolist() == [[1]] * 8


@modes
def test_marked_outputs_pass_no_gradient(mode):
    def forward(ctx, x):
        marked = x * 100
        ctx.mark_non_differentiable(marked)
        return x * 2, marked

    made = layer(forward, lambda ctx, a, b: 2 * a + 50 * b)
    assert MODES[mode](lambda x: sum(y.sum() for y in made.apply(x)))(X).tolist() == [2, 2, 2]


@modes
def test_backward_is_not_called_without_a_cotangent(mode):
    def backward(ctx, *dys):
        raise AssertionError("backward was called")

    def forward(ctx, x):
        marked = x * 2
        ctx.mark_non_differentiable(marked)
        return marked, x * 3

    made = layer(forward, backward)
    assert MODES[mode](lambda x: made.apply(x)[0].sum() + x.sum())(X).tolist() == [1, 1, 1]


# -- needs_input_grad -----------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [lambda g: g, jax.jit])
@pytest.mark.parametrize("argnums", [0, 2, (0, 2)])
def test_needs_input_grad_is_exact(transform, argnums):
    seen = []

    def forward(ctx, x, n, w, index):
        seen.append(ctx.needs_input_grad)
        return x * w

    def backward(ctx, dy):
        seen.append(ctx.needs_input_grad)
        return dy, None, dy, None

    made = layer(forward, backward)

    def f(x, n, w):
        return made.apply(x, 7, w, index=jnp.arange(2)).sum()

    transform(jax.grad(f, argnums))(X, 7.0, X)
    wanted = argnums if isinstance(argnums, tuple) else (argnums,)
    expected = (0 in wanted, False, 2 in wanted, False)
    assert seen[-1] == expected
    if not jax.config.jax_custom_vjp3:
        assert seen == [expected, expected]
    seen.clear()
    jax.grad(jax.jit(f), argnums)(X, 7.0, X)
    assert seen[-1] == seen[-2] == expected


def test_needs_input_grad_is_false_where_nothing_is_differentiated():
    seen = []
    layer(lambda ctx, x, flag=None: seen.append(ctx.needs_input_grad) or x).apply(X, flag=1)
    assert seen == [(False, False)]


def test_one_jitted_function_differentiated_for_each_argument_in_turn():
    def forward(ctx, x, w):
        ctx.save_for_backward(w if ctx.needs_input_grad[0] else None, x if ctx.needs_input_grad[1] else None)
        return x * w

    def backward(ctx, dy):
        w, x = ctx.saved_tensor()
        return dy * w if ctx.needs_input_grad[0] else None, dy * x if ctx.needs_input_grad[1] else None

    made = layer(forward, backward)
    jitted = jax.jit(lambda x, w: made.apply(x, w).sum())
    x, w = X, X + 5
    _, pull_x = jax.vjp(lambda x: jitted(x, w), x)
    _, pull_w = jax.vjp(lambda w: jitted(x, w), w)
    np.testing.assert_allclose(pull_x(1.0)[0], w)
    np.testing.assert_allclose(pull_w(1.0)[0], x)
    np.testing.assert_allclose(pull_x(2.0)[0], 2 * w)
    np.testing.assert_allclose(jax.grad(jitted, (0, 1))(x, w)[1], x)
    np.testing.assert_allclose(pull_x(1.0)[0], w)


def test_different_numbers_of_saved_tensors_are_never_mixed_up():
    def forward(ctx, x, w):
        ctx.save_for_backward(*([w, w + 1] if ctx.needs_input_grad[0] else [x]))
        return x * w

    def backward(ctx, dy):
        saved = ctx.saved_tensor()
        return (dy * saved[0], None) if ctx.needs_input_grad[0] else (None, dy * saved[0])

    made = layer(forward, backward)
    jitted = jax.jit(lambda x, w: made.apply(x, w).sum())
    x, w = X, X + 5
    _, pull_x = jax.vjp(lambda x: jitted(x, w), x)
    try:
        _, pull_w = jax.vjp(lambda w: jitted(x, w), w)
        results = [(pull_w(1.0)[0], x), (pull_x(1.0)[0], w)]
    except (RuntimeError, AssertionError):
        return  # said, not silent
    for got, expected in results:
        np.testing.assert_allclose(got, expected)


def test_threads_do_not_meet():
    class Kept(PyLayer):
        @staticmethod
        def forward(ctx, x, value):
            ctx.value = value
            return x * value

        @staticmethod
        def backward(ctx, dy):
            return dy * ctx.value, None

    wrong = []

    def work(value):
        found = [jax.grad(lambda x: Kept.apply(x, value).sum())(X).tolist() for _ in range(20)]
        wrong.extend(g for g in found if g != [value] * 3)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "meant"), [("saved_tensrs", "saved_tensors"), ("factr", "factor"), ("other", None)])
def test_a_name_one_letter_off_is_named(name, meant):
    def forward(ctx, x):
        ctx.factor = 2
        return x * 2

    made = layer(forward, lambda ctx, dy: dy * getattr(ctx, name))
    with pytest.raises(AttributeError, match=rf"ctx.{name} does not exist") as caught:
        jax.grad(lambda x: made.apply(x).sum())(X)
    assert (f"Did you mean ctx.{meant}?" in str(caught.value)) == (meant is not None)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_saved_names_of_another_number(around):
    made = layer(lambda ctx, x: ctx.save_for_backward(x) or x * 2)
    made.saved_names = ("x", "y")
    message = r"Made.saved_names has 2 names .*saved 1 value. Give one name for each value"
    with pytest.raises(ValueError, match=message):
        around(jax.grad(lambda x: made.apply(x).sum()))(X)


# -- NumPy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [">f4", ">i4", ">f8", ">c8"])
def test_numpy_arrays_of_foreign_byte_order(dtype):
    value = np.asarray([1, 2, 3], dtype)
    native = jnp.asarray(value.astype(value.dtype.newbyteorder("=")))

    def forward(ctx, x, y):
        ctx.save_for_backward(np.asarray(value))
        ctx.kept = [value]
        return x * jnp.real(y).astype(x.dtype), np.asarray(value)

    def backward(ctx, dy, dz):
        (saved,) = ctx.saved_tensor()
        np.testing.assert_array_equal(saved, native)
        np.testing.assert_array_equal(ctx.kept[0], native)
        return (dy * 2).astype(jnp.float32), np.asarray(np.real(dy), ">f4")

    made = layer(forward, backward)
    np.testing.assert_array_equal(made.apply(X, value)[1], native)
    (product, kept), pullback = jax.vjp(lambda x: made.apply(x, value), X)
    np.testing.assert_allclose(product, X * np.real(native).astype(np.float32))
    np.testing.assert_array_equal(kept, native)
    np.testing.assert_allclose(pullback((jnp.ones(3), jnp.zeros_like(kept)))[0], [2, 2, 2])


needs_values = pytest.mark.skipif(jax.config.jax_custom_vjp3, reason="under it forward must be traceable")


@needs_values
@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("kept", [lambda ctx, y: ctx.save_for_backward(y), lambda ctx, y: setattr(ctx, "y", {"y": y})])
def test_a_numpy_output_that_is_kept_is_that_output(shape, kept):
    def backward(ctx, dy):
        y = ctx.y["y"] if hasattr(ctx, "y") else ctx.saved_tensor()[0]
        return 2 * dy * (1 - y**2)

    def forward(ctx, x):
        y = np.tanh(np.asarray(x))
        kept(ctx, y)
        return y

    made = layer(forward, backward)
    x = jnp.full(shape, 0.3)
    second = jax.grad(lambda x: jax.grad(lambda x: made.apply(x).sum())(x).sum())(x)
    np.testing.assert_allclose(second, np.full(shape, -2.1327276), rtol=1e-5)


@needs_values
def test_a_numpy_output_that_changed_after_it_was_kept_is_an_intermediate():
    def forward(ctx, x):
        y = np.tanh(np.asarray(x))
        ctx.save_for_backward(y)
        y *= 3
        return y

    made = layer(forward, lambda ctx, dy: 3 * dy * (1 - ctx.saved_tensor()[0] ** 2))
    np.testing.assert_allclose(jax.grad(lambda x: made.apply(x).sum())(X), 3 - 3 * jnp.tanh(X) ** 2, rtol=1e-5)
    with pytest.raises(TypeError, match="saved a tensor that is neither an input nor an output"):
        jax.grad(lambda x: jax.grad(lambda x: made.apply(x).sum())(x).sum())(X)


def test_a_numpy_value_may_change_as_soon_as_apply_returns():
    # JAX reads large arrays in another thread.
    made = layer(lambda ctx, x: x * 1)
    for _ in range(60):
        x = np.ones(1 << 20, np.float32)
        y = made.apply(x)
        x[:] = 5
        assert float(y.max()) == 1


def test_a_function_saves_none_beside_tensors():
    class Add(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(None, x, None)
            ctx.save_for_backward(None, x)  # the last call counts
            return x + y

        @staticmethod
        def backward(ctx, dy):
            nothing, x = ctx.saved_tensors
            assert nothing is None
            return dy * x, dy

    for run in (lambda f: f, jax.jit):
        np.testing.assert_allclose(run(jax.grad(lambda x: Add.apply(x, x + 1).sum()))(X), X + 1)
    wrong = type("Wrong", (Add,), {"forward": staticmethod(lambda ctx, x: ctx.save_for_backward(None, 3))})
    with pytest.raises(TypeError, match=r"ctx\.save_for_backward in Wrong: expected tensors or None, .* 1 is 3"):
        wrong.apply(X)


# -- how a context shows itself -------------------------------------------------------------------


def shown_by(layer, x):
    """The context as it shows itself in forward, after it, and in backward before and after the saved tensors are read.

    `dir` of the context comes with each.
    """
    seen, kept = [], []

    class Shown(layer):
        @staticmethod
        def forward(ctx, x):
            seen.append((repr(ctx), dir(ctx)))
            ctx.save_for_backward(x, None)
            ctx.scale = 2.0
            seen.append((repr(ctx), dir(ctx)))
            kept.append(ctx)
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            seen.append((repr(ctx), dir(ctx)))
            assert len(ctx.saved_tensors) == 2
            seen.append((repr(ctx), dir(ctx)))
            return dy * 2

    _, pull = jax.vjp(Shown.apply, x)
    seen.append((repr(kept[0]), dir(kept[0])))
    pull(x)
    return seen


@pytest.mark.parametrize("layer", [PyLayer, Function])
def test_repr_of_a_context_says_in_one_line_what_it_holds(layer):
    kind = "PyLayerContext" if layer is PyLayer else "FunctionCtx"
    name = "shown_by.<locals>.Shown"
    # Under JAX_CUSTOM_VJP3 forward runs twice.
    assert list(dict.fromkeys(text for text, _ in shown_by(layer, jnp.ones(2)))) == [
        f"<{kind} of {name}, in forward: 0 values saved>",
        f"<{kind} of {name}, in forward: 2 values saved, ctx.scale>",
        f"<{kind} of {name}, after forward: 2 values saved, ctx.scale>",
        f"<{kind} of {name}, in backward: ctx.scale>",
        f"<{kind} of {name}, in backward: 2 values saved, ctx.scale>",
    ]


def test_repr_does_not_unpack():
    unpacked = []

    class Shown(PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            assert "Shown, in backward>" in repr(ctx)
            assert "saved_tensors" in dir(ctx)
            return dy

    with saved_tensors_hooks(lambda x: x, lambda x: unpacked.append(x) or x):
        jax.grad(lambda x: Shown.apply(x).sum())(jnp.ones(2))
    assert not unpacked


@pytest.mark.parametrize("layer", [PyLayer, Function])
def test_dir_of_a_context_lists_what_users_use(layer):
    first, *_, last = (names for _, names in shown_by(layer, jnp.ones(2)))
    expected = {
        *("mark_non_differentiable", "mark_not_inplace", "needs_input_grad", "save_for_backward", "saved_tensor"),
        *("saved_tensors", "set_grad_in_dtype_consistent", "set_materialize_grads"),
        *(() if layer is PyLayer else ("mark_dirty", "save_for_forward")),
    }
    assert set(first) == expected
    assert set(last) == expected | {"scale"}
