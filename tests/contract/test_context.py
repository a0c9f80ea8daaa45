"""`backward` gets what `forward` saved or set on the context, under every transform; misuse is an error."""

import collections
import copy
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer
from pylayer_jax.packers import cast_saved
from tests.kit.layers import layer, loss, text_of
from tests.kit.modes import EAGER_AND_JIT, MODES, RUNS, X, gradients, modes, runs


def then(call, result=lambda x: x * 1):
    """Return a forward that first calls `call(ctx, x)`."""
    return lambda ctx, x: (call(ctx, x), result(x))[1]


CONTAINERS = {
    "keys that cannot be sorted": ({"n": 0, 3: 1, None: 2}, lambda c: c.update(n=c["n"] + 1)),
    "defaultdict": (collections.defaultdict(list), lambda c: c["new"].append(1)),
    "empty dict": ({}, lambda c: c.update(new=1)),
    "set": ({1}, lambda c: c.add(2)),
    "nested": ([[{"deep": [1]}]], lambda c: c[0][0]["deep"].append(1)),
}


@pytest.mark.parametrize(("container", "change"), CONTAINERS.values(), ids=CONTAINERS)
def test_what_one_run_of_backward_changes_in_a_container_the_next_does_not_see(container, change):
    seen = []

    def forward(ctx, x):
        ctx.save_for_backward(copy.deepcopy(container))
        ctx.container = copy.deepcopy(container)
        return x * 1

    def backward(ctx, dy):
        for found in (*ctx.saved_tensors, ctx.container):
            seen.append(copy.deepcopy(found))
            change(found)
        return dy

    made = layer(forward, backward)
    _, pullback = jax.vjp(made.apply, X)
    pullback(X)
    pullback(X)
    jax.jit(jax.grad(loss(made)))(X)
    assert seen == [container] * 6


def test_what_holds_no_array_arrives_as_forward_left_it():
    config, solver = {"a": [1, 2]}, types.SimpleNamespace(runs=[])

    def forward(ctx, x):
        ctx.config, ctx.solver = config, solver
        assert ctx.config is config
        ctx.config["late"] = True
        ctx.save_for_backwards = x  # a name like that of a method
        return x * 1

    def backward(ctx, dy):
        assert ctx.config == {"a": [1, 2], "late": True}
        ctx.note = "further attributes may be set here"
        ctx.solver.runs.append(1)  # other objects are shared
        return dy * ctx.save_for_backwards

    _, pullback = jax.vjp(layer(forward, backward).apply, X)
    for _ in range(2):
        np.testing.assert_allclose(pullback(jnp.ones(3))[0], X)
    assert solver.runs == [1, 1]


CALLS = {
    "save_for_backward": lambda ctx, x: ctx.save_for_backward(x),
    "mark_non_differentiable": lambda ctx, x: ctx.mark_non_differentiable(x),
    "mark_not_inplace": lambda ctx, x: ctx.mark_not_inplace(x),
    "set_materialize_grads": lambda ctx, x: ctx.set_materialize_grads(False),
}


@gradients
@pytest.mark.parametrize("call", CALLS)
def test_recording_outside_of_forward_is_refused(run, call):
    kept = []
    made = layer(then(lambda ctx, x: kept.append(ctx)), CALLS[call])
    with pytest.raises(RuntimeError, match=rf"ctx\.{call}"):
        run(loss(made))(X)
    made.apply(X)
    for ctx in (kept[0], kept[-1]):
        with pytest.raises(RuntimeError, match=rf"ctx\.{call}"):
            CALLS[call](ctx, X)


MISUSES = {
    "saving twice": (RuntimeError, "save_for_backward", lambda ctx, x: [ctx.save_for_backward(x) for _ in range(2)]),
    "no input": (ValueError, "mark_not_inplace", lambda ctx, x: ctx.mark_not_inplace(x * 2)),
    "a number as an input": (ValueError, "mark_not_inplace", lambda ctx, x: ctx.mark_not_inplace(3)),
    "no output": (ValueError, "mark_non_differentiable", lambda ctx, x: ctx.mark_non_differentiable(x * 2)),
    "None as an output": (ValueError, "mark_non_differentiable", lambda ctx, x: ctx.mark_non_differentiable(None)),
    "a saved Ref": (ValueError, "Ref", lambda ctx, x: ctx.save_for_backward(jax.new_ref(x))),
    "a Ref on ctx": (ValueError, "Ref", lambda ctx, x: setattr(ctx, "ref", [jax.new_ref(x)])),
    "assigned": (AttributeError, "saved_tensors", lambda ctx, x: setattr(ctx, "saved_tensors", (x,))),
}


@pytest.mark.parametrize("run", [RUNS["eager"], RUNS["jit-grad"]])
@pytest.mark.parametrize(("error", "word", "call"), MISUSES.values(), ids=MISUSES)
def test_misuse_in_forward(run, error, word, call):
    with pytest.raises(error, match=word):
        run(loss(layer(then(call))))(X)


@pytest.mark.parametrize("mode", [m for m in MODES if m not in ("grad", "vmap")])
def test_function_that_closes_over_traced_values_is_refused(mode):
    def forward(ctx, x):
        double = x * 2
        ctx.rules = {"pull": lambda dy: dy * double}
        return x * 1

    made = layer(forward, lambda ctx, dy: ctx.rules["pull"](dy))
    with pytest.raises(ValueError, match=r"ctx\.rules(?s:.*)closes over"):
        MODES[mode](loss(made))(X)


@pytest.mark.parametrize(("base", "transform"), [(PyLayer, jax.jit), (Function, jax.checkpoint)])
@pytest.mark.parametrize("method", ["forward", "backward"])
@runs
def test_a_transformation_that_decorates_a_method(run, base, method, transform):
    methods = {
        "forward": then(lambda ctx, x: ctx.save_for_backward(x * 2)),
        "backward": lambda ctx, dy: dy * ctx.saved_tensors[0],
    }
    made = layer(base=base, **methods | {method: staticmethod(transform(methods[method]))})
    if method == "backward" and run in (RUNS["eager"], RUNS["jit"]):
        return
    with pytest.raises(TypeError) as caught:
        run(loss(made))(X)
    assert re.search(rf"(?s)Made\.{method}.*jax\.jit\(Made\.apply\).*setup_context", text_of(caught.value))


@gradients
@pytest.mark.parametrize("call", ["save_for_backward", "kept", "mark_non_differentiable"])
def test_a_value_of_a_jitted_function_that_forward_calls(run, call):
    def forward(ctx, x):
        @jax.jit
        def inner(x):
            y = x * 2
            setattr(ctx, call, y) if call == "kept" else getattr(ctx, call)(y)
            return y

        return inner(x)

    with pytest.raises(ValueError, match=rf"ctx\.{call}(?s:.*)Made\.forward(?s:.*)has returned"):
        run(loss(layer(forward)))(X)


@EAGER_AND_JIT
@pytest.mark.parametrize("around", [lambda f: f, cast_saved(arguments=True)], ids=["plain", "block"])
@pytest.mark.parametrize("names", [(None,) * 2, (None,) * 4], ids=len)
def test_saved_names_of_another_number(names, around, mode):
    made = layer(lambda ctx, x: ctx.save_for_backward(x, x * 2, x * 3) or x, saved_names=names)
    with pytest.raises(ValueError, match=r"Made\.saved_names"):
        mode(jax.grad(around(loss(made))))(X)


@pytest.mark.parametrize("place", ["sharded", "another device", "anywhere"])
def test_zeros_lie_where_the_output_lies(place):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    x, where = jnp.ones(8), {"sharded": sharded, "another device": jax.devices()[2]}
    x = jax.device_put(x, where[place]) if place in where else x
    seen = []
    made = layer(lambda ctx, x: (x * 1, x * 2), lambda ctx, a, b: seen.append(b) or a + b)
    step = jax.grad(lambda x: made.apply(x)[0].sum())
    step(x)
    assert seen[0].sharding.is_equivalent_to(x.sharding, 1)
    assert seen[0].committed == x.committed
    assert jax.vmap(step)(x[:, None]).tolist() == jax.jit(step)(x)[:, None].tolist() == [[1]] * 8


@pytest.mark.parametrize("argnums", [(0,), (2,), (0, 2)])
def test_needs_input_grad_is_exact_but_in_a_traced_forward(argnums):
    seen = []
    made = layer(
        lambda ctx, x, n, w, index: seen.append(ctx.needs_input_grad) or x * w,
        lambda ctx, dy: seen.append(ctx.needs_input_grad) or (dy, None, dy, None),
    )
    f = lambda x, n, w: made.apply(x, 7, w, index=jnp.arange(2)).sum()
    expected = (0 in argnums, False, 2 in argnums, False)
    f(X, 7.0, X)
    jax.grad(f, argnums)(X, 7.0, X)
    assert seen == [(False,) * 4, expected, expected]
    for run in (jax.jit(jax.grad(f, argnums)), jax.grad(jax.jit(f), argnums)):
        seen.clear()
        run(X, 7.0, X)
        *in_forward, in_backward = seen
        assert set(in_forward) == {(True, False, True, False)}
        assert in_backward == expected


@modes
def test_numpy_arrays_are_copied_when_they_are_kept(mode):
    def forward(ctx, x):
        scale, tanh = np.ones(3, np.float32), np.full(3, 2, np.float32)
        ctx.save_for_backward(scale, tanh)
        ctx.scale, ctx.scales = scale, [scale]
        scale[:], tanh[:] = 100.0, 100.0
        return x * 1, tanh  # an output that changed after it was kept is no saved output

    def backward(ctx, dy, dz):
        kept = [*ctx.saved_tensors, ctx.scale, *ctx.scales]
        assert all(isinstance(array, jax.Array) for array in kept)
        return dy * sum(kept)

    made = layer(forward, backward)
    assert MODES[mode](lambda x: made.apply(x)[0].sum())(X).tolist() == [1 + 2 + 1 + 1] * 3
    assert made.apply(X)[1].tolist() == [100] * 3


NOT_IN_JAX = {"structured": np.zeros(1, [("f", "f8")]), "longdouble": np.ones(2, np.longdouble)}


@pytest.mark.parametrize("dtype", [">f4", ">i4"])
def test_numpy_arrays_of_foreign_byte_order(dtype):
    value, seen = np.asarray([1, 2, 3], dtype), []

    def backward(ctx, dy, dz):
        seen.append(ctx.saved_tensor()[0])
        return np.asarray(2 * dy, ">f8"), None

    made = layer(lambda ctx, x, y: (ctx.save_for_backward(value), x * y.astype(x.dtype), value)[1:], backward)
    product, kept = made.apply(X, value)
    assert product.tolist() == (X * jnp.arange(1.0, 4.0)).tolist()
    assert jax.grad(lambda x: made.apply(x, value)[0].sum())(X).tolist() == [2] * 3
    assert kept.tolist() == seen[0].tolist() == [1, 2, 3]


@EAGER_AND_JIT
@pytest.mark.parametrize("value", NOT_IN_JAX.values(), ids=NOT_IN_JAX)
def test_numpy_values_that_jax_lacks_are_carried_as_they_are(value, mode):
    def forward(ctx, x, argument):
        ctx.kept = argument
        ctx.save_for_backward(argument)
        return x * 1, argument

    def backward(ctx, dy):
        for kept in (ctx.kept, *ctx.saved_tensors):
            assert (type(kept), kept.dtype, kept.tobytes()) == (type(value), value.dtype, value.tobytes())
        return dy * 2

    made = layer(forward, backward)
    assert made.apply(X, value)[1] is value
    assert mode(jax.grad(lambda x: made.apply(x, value)[0].sum()))(X).tolist() == [2] * len(X)


def test_a_numpy_value_may_change_as_soon_as_apply_returns():
    # JAX reads large arrays in another thread.
    made = layer(lambda ctx, x: x * 1)
    for _ in range(60):
        x = np.ones(1 << 20, np.float32)
        y = made.apply(x)
        x[:] = 5
        assert float(y.max()) == 1
