"""Forward mode: by the transpose of backward, and by a jvp of the layer's own."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer, once_differentiable, saved_tensors_hooks
from tests.kit.layers import Multiply, Square, Tanh, bits
from tests.kit.transforms import (
    FIRST_ORDER,
    FORWARD,
    FORWARD_OVER_REVERSE,
    MAIN_CASES,
    SECOND_ORDER,
    SLOW,
    along,
    assert_same,
    marks,
    pushed,
    scalar,
)
from tests.registry import CASES

pytestmark = pytest.mark.own_primitive

X = jnp.array([0.3, 0.7])

LINEAR = [c for c in CASES if c.is_linear]


@pytest.mark.parametrize(
    ("transform", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case.name}", marks=marks(name, case.name))
        for name in FORWARD
        for case in LINEAR
        if name not in SLOW or case.name in MAIN_CASES
    ],
)
def test_forward_mode_is_reverse_mode(case, transform, monkeypatch):
    ours = case.in_forward_mode(monkeypatch)
    found = FORWARD[transform](scalar(ours.layer, case.linear_loss), case.args, pushed)
    assert_same(found, FORWARD[transform](scalar(case.reference, case.linear_loss), case.args, along))


@pytest.mark.parametrize(
    ("table", "name", "case"),
    [
        pytest.param(table, name, case, id=f"{name}-{case.name}", marks=marks(name, case.name))
        for table in (FIRST_ORDER, SECOND_ORDER, FORWARD_OVER_REVERSE)
        for name in table
        for case in CASES
        if case.name in {"DoubledTanh", "Trees", "AskedLinear", "AutoScaler", "BackwardApplies"}
        if name not in SLOW or case.name == "Trees"
        if case.is_linear or table is not FORWARD_OVER_REVERSE
    ],
)
def test_everything_else_is_as_without_it(table, name, case, monkeypatch):
    ours = case.in_forward_mode(monkeypatch)
    found = table[name](scalar(ours.layer, case.linear_loss), case.args)
    assert_same(found, table[name](scalar(case.reference, case.linear_loss), case.args))


@pytest.mark.parametrize("case", [c for c in CASES if not c.is_linear], ids=lambda case: case.name)
def test_a_backward_that_is_not_linear_is_refused(case, monkeypatch):
    ours = case.in_forward_mode(monkeypatch)
    with pytest.raises(TypeError, match=rf"{case.forward_over_reverse}.*forward_mode = True.*jvp\(ctx, \*tangents\)"):
        pushed(scalar(ours.layer, case.linear_loss), case.args)(*case.args)


def forward_layer(backward, forward=jnp.sin):
    class Layer(PyLayer):
        forward_mode = True

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return forward(x)

    Layer.backward = staticmethod(backward)
    return Layer


@pytest.mark.parametrize(
    ("backward", "names"),
    [
        (lambda ctx, dy: jnp.clip(dy, -0.5, 0.5), "the operation 'max'"),
        (lambda ctx, dy: jnp.exp(dy), "the operation 'exp'"),
        (lambda ctx, dy: jnp.sort(dy), "the operation 'sort'"),
        (lambda ctx, dy: jax.nn.relu(dy), "the operation 'max'"),
        (lambda ctx, dy: jnp.where(dy > 0, dy, 0.0), "the operation 'gt'"),
        (lambda ctx, dy: dy * dy, r"a product of two terms that depend on them \(mul\)"),
        (lambda ctx, dy: 1 / dy, "the operation 'div', whose divisor depends on them"),
        (lambda ctx, dy: dy + 1, r"adds a term that does not depend on them \(add\)"),
        (lambda ctx, dy: jnp.ones_like(dy), "returns a gradient that does not depend on them"),
        (lambda ctx, dy: jax.lax.scan(lambda c, _: (jnp.sin(c), None), dy, None, length=2)[0], "for 'sin' not impl"),
        (lambda ctx, dy: Multiply.apply(dy, dy), r"Forward mode .*forward mode of Multiply"),
        (lambda ctx, dy: Square.apply(dy), "applies the layer Square, whose forward is not, as it has a product"),
        (lambda ctx, dy: Shift.apply(dy), "applies the layer Shift, whose forward is not, as it adds a term"),
    ],
)
@pytest.mark.parametrize("run", [jax.jvp, jax.jit(jax.jvp, static_argnums=0)], ids=["eager", "jit"])
def test_the_error_names_what_is_not_linear(backward, names, run):
    with pytest.raises(TypeError, match=rf"Layer.backward .*{names}"):
        run(forward_layer(backward).apply, (X,), (X,))


def test_an_operation_that_is_linear_in_one_operand_is_fine():
    def backward(ctx, dy):
        (x,) = ctx.saved_tensor()
        mixed = jnp.where(x > 0.5, dy * x, dy) / x + jnp.pad(jnp.flip(dy)[:1], (0, 1)) - jnp.cumsum(dy)
        return mixed + jax.jit(lambda d: jnp.tile(d, 2)[1:3] @ jnp.outer(x, x))(dy)

    layer = forward_layer(backward)
    jacobian = jax.jacrev(layer.apply)(X)
    assert abs(jacobian).min() > 0
    np.testing.assert_allclose(jax.jacfwd(layer.apply)(X), jacobian, rtol=1e-5)


def test_reverse_mode_still_calls_backward():
    layer = forward_layer(lambda ctx, dy: jnp.clip(dy, -0.5, 0.5))
    assert jax.grad(lambda x: layer.apply(x).sum())(X).tolist() == [0.5, 0.5]
    assert jax.jit(jax.grad(lambda x: layer.apply(x).sum()))(X).tolist() == [0.5, 0.5]


def test_eager_forward_mode_sees_numbers_and_runs_forward_once():
    seen = []

    class Seen(PyLayer):
        forward_mode = True

        @staticmethod
        def forward(ctx, x):
            seen.append(float(x[0]))
            ctx.scale = 2.0 if x[0] > 0 else 3.0
            return jnp.asarray(np.asarray(x) * ctx.scale)

        @staticmethod
        def backward(ctx, dy):
            return dy * ctx.scale

    assert jax.jvp(Seen.apply, (X,), (X,))[1].tolist() == (2 * X).tolist()
    assert jax.grad(lambda x: Seen.apply(x).sum())(-X).tolist() == [3, 3]
    np.testing.assert_allclose(jax.jacfwd(Seen.apply)(X), 2 * jnp.eye(2))
    assert jax.jacfwd(jax.jacfwd(Seen.apply))(X).shape == (2, 2, 2)
    assert len(seen) == 4
    assert all(isinstance(s, float) for s in seen)


def test_forward_is_staged_once_under_jit():
    runs = []

    class Counted(Tanh):
        forward_mode = True

        @staticmethod
        def forward(ctx, x):
            runs.append(ctx.needs_input_grad)
            return Tanh.forward(ctx, x)

    jax.jit(jax.grad(lambda x: Counted.apply(x).sum()))(X)
    jax.jit(lambda x: jax.jvp(Counted.apply, (x,), (x,)))(X)
    assert runs == [(True,), (True,)]


class Shift(PyLayer):
    forward_mode = True

    @staticmethod
    def forward(ctx, x):
        return x + 1

    @staticmethod
    def backward(ctx, dy):
        return dy


class Flip(PyLayer):
    """Linear: its backward is itself, as that of an exchange between devices is."""

    forward_mode = True

    @staticmethod
    def forward(ctx, x, times):
        ctx.times = times
        return jnp.flip(x) * times

    @staticmethod
    def backward(ctx, dy):
        return Flip.apply(dy, ctx.times), None


class Product(PyLayer):
    """Linear in each argument: its backward applies itself to the cotangent and a saved input."""

    forward_mode = True

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return Product.apply(dy, b), Product.apply(a, dy)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"])
def test_a_backward_that_applies_its_own_layer(around):
    def ours(x):
        y = around(lambda x: Flip.apply(Product.apply(x, jnp.cos(x)), 3.0))(x)
        return jnp.sum(jnp.sin(y) * jnp.array([1, 2.0]))

    def plain(x):
        return jnp.sum(jnp.sin(jnp.flip(x * jnp.cos(x)) * 3.0) * jnp.array([1, 2.0]))

    twice = [jax.hessian, lambda f: jax.jacfwd(jax.jacfwd(f)), lambda f: jax.jacrev(jax.jacfwd(f))]
    for derivative in (jax.jacfwd, jax.grad, *twice):
        np.testing.assert_allclose(derivative(ours)(X), derivative(plain)(X), rtol=1e-4, atol=1e-5)
    third = jax.jacfwd(jax.grad(jax.jacfwd(lambda x: ours(x * X))))(0.5)
    np.testing.assert_allclose(third, jax.jacfwd(jax.grad(jax.jacfwd(lambda x: plain(x * X))))(0.5), rtol=1e-4)


def test_complex_tangents():
    class Power(PyLayer):
        forward_mode = True
        complex_convention = "paddle"

        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return z**2 * (1 + 2j)

        @staticmethod
        def backward(ctx, dy):
            return dy * jnp.conj(2 * ctx.saved_tensors[0] * (1 + 2j))

    z, t = jnp.array(0.3 - 0.8j), jnp.array(1.5 + 0.2j)
    expected = jax.jvp(lambda z: z**2 * (1 + 2j), (z,), (t,))
    np.testing.assert_allclose(jax.jvp(Power.apply, (z,), (t,)), expected, rtol=1e-5)


def test_under_shard_map():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    x = jnp.arange(8.0) / 8

    class Forward(Tanh):
        forward_mode = True

    def sharded(f):
        return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)

    for run in (lambda f: f, jax.jit):
        ours, expected = run(sharded(Forward.apply)), run(sharded(jnp.tanh))
        np.testing.assert_allclose(jax.jvp(ours, (x,), (x,)), jax.jvp(expected, (x,), (x,)), rtol=1e-5)
        np.testing.assert_allclose(jax.vjp(ours, x)[1](x)[0], jax.vjp(expected, x)[1](x)[0], rtol=1e-5)


def test_under_export():
    class Forward(Tanh):
        forward_mode = True

    exported = jax.export.export(jax.jit(Forward.apply))(X)
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    np.testing.assert_allclose(jax.grad(lambda x: loaded.call(x).sum())(X), 1 - jnp.tanh(X) ** 2, rtol=1e-5)


def test_no_hidden_gradient_of_what_forward_closes_over():
    class Forward(Tanh):
        forward_mode = True

    def outer(scale):
        class Scaled(PyLayer):
            forward_mode = True

            @staticmethod
            def forward(ctx, x):
                return x * scale

            @staticmethod
            def backward(ctx, dy):
                return dy

        return Scaled.apply(X).sum()

    for derivative in (jax.grad(outer), jax.jacfwd(outer), jax.jit(jax.grad(outer)), jax.jit(jax.jacfwd(outer))):
        with pytest.raises(jax.errors.UnexpectedTracerError, match=r"closes over \(scale\).*Pass it as an argument"):
            derivative(2.0)
    assert jax.vmap(outer)(jnp.array([1.0, 2.0])).tolist() == [float(X.sum()), 2 * float(X.sum())]


def test_once_differentiable():
    class Once(Tanh):
        forward_mode = True
        backward = staticmethod(once_differentiable(Tanh.backward))

    np.testing.assert_allclose(jax.jvp(Once.apply, (X,), (X,)), jax.jvp(jnp.tanh, (X,), (X,)), rtol=1e-5)

    def total(x):
        return Once.apply(x).sum()

    for second in (jax.hessian, lambda f: jax.jacfwd(jax.jacfwd(f)), lambda f: jax.jacrev(jax.jacfwd(f))):
        for around in (lambda f: f, jax.jit):
            with pytest.raises(RuntimeError, match="marked @once_differentiable, but a second derivative"):
                around(second(total))(X)


@pytest.mark.parametrize("name", [n for n in FIRST_ORDER if n not in SLOW])
@pytest.mark.parametrize("place", ["inside", "around"])
def test_under_hooks(name, place, monkeypatch):
    (case,) = (c for c in CASES if c.name == "DoubledTanh")
    ours, hooks = case.in_forward_mode(monkeypatch), bits()
    expected = FIRST_ORDER[name](scalar(case.reference, linear=False), case.args)
    with contextlib.nullcontext() if place == "inside" else hooks:
        layer = hooks(ours.layer) if place == "inside" else ours.layer
        assert_same(FIRST_ORDER[name](scalar(layer, linear=False), case.args), expected)


@pytest.mark.parametrize("name", [n for n in FORWARD if n not in SLOW])
def test_forward_mode_under_hooks(name, monkeypatch):
    (case,) = (c for c in CASES if c.name == "DoubledTanh")
    ours = case.in_forward_mode(monkeypatch)
    expected = FORWARD[name](scalar(case.reference, linear=False), case.args, along)
    with bits():
        assert_same(FORWARD[name](scalar(ours.layer, linear=False), case.args, pushed), expected)


def test_jacobian_under_hooks():
    jacobian = jax.jacfwd(lambda a, b: ForwardMultiply.apply(a, b), (0, 1))
    with bits():  # the tangents are mapped, and what was packed is not
        for run in (jacobian, jax.jit(jacobian)):
            np.testing.assert_allclose(run(X, X + 1), [jnp.diag(X + 1), jnp.diag(X)], rtol=1e-6)


class ForwardMultiply(Multiply):
    forward_mode = True


class SetUpMultiply(Function):
    forward_mode = True

    @staticmethod
    def forward(a, b):
        return a * b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return dy * b, dy * a


def noting():
    log = []

    def note(what):
        return lambda x: log.append(what) or x

    return log, saved_tensors_hooks(note("pack"), note("unpack"))


@pytest.mark.parametrize("layer", [ForwardMultiply, SetUpMultiply])
def test_hooks_pack_once_what_forward_mode_keeps(layer):
    def loss(x):
        return layer.apply(x, x + 1).sum()

    for run in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        log, hooks = noting()
        with hooks:
            np.testing.assert_allclose(run(X), 2 * X + 1, rtol=1e-6)
        assert log == ["pack", "pack", "unpack", "unpack"]
    for run in (lambda f: f, jax.jit):
        log, hooks = noting()
        with hooks:
            np.testing.assert_allclose(run(jax.grad(lambda x: jax.grad(loss)(x).sum()))(X), [2, 2], rtol=1e-6)
        assert log.count("pack") == 2  # a second derivative keeps the tensors themselves


def test_hooks_unpack_what_is_asked_for():
    class AsksForNothing(ForwardMultiply):
        @staticmethod
        def backward(ctx, dy):
            return dy, dy

    log, hooks = noting()
    with hooks:
        jax.grad(lambda x: AsksForNothing.apply(x, x).sum())(X)
        ForwardMultiply.apply(X, X)
    assert log == ["pack"]  # one tensor in two places


# -- a jvp of its own -----------------------------------------------------------------------------


class OwnMap(PyLayer):
    """Its tangent map is not the transpose of its backward, so that each shows which one ran."""

    @staticmethod
    def forward(ctx, x, n, y):
        ctx.save_for_backward(x, y)
        ctx.n = n
        return x * y, n, jnp.sin(x)

    @staticmethod
    def backward(ctx, dxy, dsin):
        x, y = ctx.saved_tensor()
        return 10 * dxy * y + dsin * jnp.cos(x), 10 * dxy * x

    @staticmethod
    def jvp(ctx, dx, dn, dy):
        assert dn is None
        x, y = ctx.saved_tensor()
        assert ctx.n == 3
        return dx * y + dy * x, None, dx * jnp.cos(x)


def own(x, y):
    return OwnMap.apply(x, 3, y)[::2]


def plain(x, y):
    return x * y, jnp.sin(x)


@pytest.mark.parametrize(
    "run",
    [
        lambda f: jax.jvp(f, (X, X * 2), (X, X + 1)),
        lambda f: jax.jvp(lambda x: f(x, X), (X,), (X,)),
        lambda f: jax.jit(lambda x: jax.jvp(f, (x, x * 2), (x, x + 1)))(X),
        lambda f: jax.jvp(jax.jit(f), (X, X * 2), (X, X + 1)),
        lambda f: jax.jacfwd(f, (0, 1))(X, X * 2),
        lambda f: jax.linearize(f, X, X * 2)[1](X, X + 1),
        lambda f: jax.vmap(lambda x, t: jax.jvp(f, (x, X[0]), (t, t)))(X, X + 1),
        lambda f: jax.vmap(lambda t: jax.jvp(f, (X, X), (t, X)))(jnp.eye(2)),
        lambda f: jax.jvp(jax.vmap(f, (0, None)), (X, X[0]), (X, X[1])),
        lambda f: jax.jacfwd(jax.jacfwd(f))(X, X * 2),
        lambda f: jax.jacrev(jax.jacfwd(f))(X, X * 2),
        lambda f: jax.jvp(lambda x: jax.lax.scan(lambda c, _: (f(c, c)[0], f(c, c)[1]), x, None, length=3), (X,), (X,)),
    ],
)
def test_jvp_is_the_tangent_map(run):
    assert_same(run(own), run(plain))


def test_a_batch_of_which_the_tangents_see_nothing():
    class Sum(PyLayer):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def jvp(ctx, dx, dy):
            return dx + dy

    for around in (lambda f: f, jax.jit):
        pushed = around(jax.vmap(lambda x: jax.jvp(lambda y: Sum.apply(x, y), (X[0],), (X[1],))))(X)
        np.testing.assert_allclose(pushed, [X + X[0], [X[1], X[1]]], rtol=1e-6)


def test_reverse_mode_does_not_call_jvp():
    assert jax.grad(lambda x: own(x, X)[0].sum())(X).tolist() == (10 * X).tolist()
    assert jax.jit(jax.grad(lambda x: own(x, X)[0].sum()))(X).tolist() == (10 * X).tolist()


@pytest.mark.parametrize("materialize", [True, False])
def test_missing_tangents_are_zeros_or_none(materialize):
    seen = []

    class Layer(PyLayer):
        @staticmethod
        def forward(ctx, a, tree, index):
            ctx.set_materialize_grads(materialize)
            return a + tree["b"] + tree["c"] + index.astype(jnp.float32)

        @staticmethod
        def jvp(ctx, da, dtree, dindex):
            seen.append((da, dtree, dindex))
            assert ctx.needs_input_grad == (False, True, False)
            return dtree["b"]

    out, tangent = jax.jvp(
        lambda b: Layer.apply(X, {"b": b, "c": X, "n": 3}, jnp.array([0, 1])), (X,), (jnp.array([2.0, 3.0]),)
    )
    assert tangent.tolist() == [2, 3]
    assert out.shape == (2,)
    ((da, dtree, dindex),) = seen
    assert dtree["n"] is None
    if materialize:
        assert da.tolist() == [0, 0]
        assert dtree["c"].tolist() == [0, 0]
        assert (dindex.dtype, dindex.tolist()) == (jnp.int32, [0, 0])
    else:
        assert da is None
        assert dtree["c"] is None
        assert dindex is None


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda dx: dx, r"Layer.jvp returned 1 tangents; expected 3, one per output"),
        (lambda dx: (dx, dx, None, dx), r"Layer.jvp returned 4 tangents; expected 3"),
        (lambda dx: (dx[:1], None, None), r"Layer.jvp, tangent of output\[0\]: expected .* \(2,\).*got .* \(1,\)"),
        (lambda dx: (dx, None, dx), r"Layer.jvp, tangent of output 1: expected the structure"),
        (lambda dx: (dx, None, {"k": 1}), r"Layer.jvp, tangent of output\[2\]\['k'\]: expected .* got 1 of type int"),
        (lambda dx: (jax.lax.complex(dx, dx), None, None), r"Layer.jvp, tangent of output\[0\]: expected a real array"),
    ],
)
def test_what_jvp_must_return(returned, message):
    class Layer(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 2, "static", {"k": x * 3}

        @staticmethod
        def jvp(ctx, dx):
            return returned(dx)

    with pytest.raises(ValueError, match=message):
        jax.jvp(lambda x: Layer.apply(x)[::2], (X,), (X,))


def test_none_and_other_dtypes_from_jvp():
    class Layer(PyLayer):
        @staticmethod
        def forward(ctx, x):
            marked = x * 3
            ctx.mark_non_differentiable(marked)
            return x * 2, marked, x.astype(jnp.bfloat16), x * 4

        @staticmethod
        def jvp(ctx, dx):
            return None, dx, dx, np.asarray(dx) * 4

    zero, marked, low, number = jax.jvp(Layer.apply, (X,), (X,))[1]
    assert zero.tolist() == marked.tolist() == [0, 0]
    assert low.dtype == jnp.bfloat16
    assert number.tolist() == (X * 4).tolist()


def test_an_error_in_jvp_says_where():
    class Layer(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def jvp(ctx, dx):
            return dx / undefined  # noqa: F821

    with pytest.raises(NameError) as caught:
        jax.jvp(Layer.apply, (X,), (X,))
    assert "This happened in test_an_error_in_jvp_says_where.<locals>.Layer.jvp." in caught.value.__notes__
    with pytest.raises(NotImplementedError, match=r"Layer.backward is not defined"):
        jax.grad(lambda x: Layer.apply(x).sum())(X)


def test_forward_mode_of_a_function_that_saves_for_forward():
    class Cube(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.save_for_forward(3 * x**2)
            return x**3

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            return 3 * dy * x**2

        @staticmethod
        def jvp(ctx, dx):
            (slope,) = ctx.saved_tensors
            return slope * dx

    assert_same(jax.jacfwd(Cube.apply)(X), jnp.diag(3 * X**2))
    assert_same(jax.jacrev(Cube.apply)(X), jnp.diag(3 * X**2))
    assert_same(jax.jit(jax.hessian(lambda x: Cube.apply(x).sum()))(X), jnp.diag(6 * X))
    assert_same(jax.jacfwd(jax.jacfwd(lambda x: Cube.apply(x).sum()))(X), jnp.diag(6 * X))


def test_a_batched_cond_in_backward():
    # JAX turns it into selections, and stops the gradients of the branch that is not taken.
    class Branches(PyLayer):
        forward_mode = True

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensor()
            inner = lambda g: jax.lax.cond(x > 2, lambda g: g, lambda g: g * 2 * x, g)  # noqa: E731
            return jax.lax.cond(x > 0, inner, lambda g: 2 * g * x, dy)

    batch = jnp.array([1.0, -2.0])
    plain = lambda x: x**2  # noqa: E731
    for over in (jax.jacfwd, jax.hessian, lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]):
        assert_same(jax.vmap(over(Branches.apply))(batch), jax.vmap(over(plain))(batch))
    assert_same(jax.jvp(jax.vmap(Branches.apply), (batch,), (batch,)), (batch**2, 2 * batch**2))

    class Stopped(Branches):
        @staticmethod
        def backward(ctx, dy):
            return jax.lax.stop_gradient(dy)

    with pytest.raises(TypeError, match="the operation 'stop_gradient'"):
        jax.jacfwd(Stopped.apply)(1.0)


def test_what_jax_cannot_transpose_is_not_called_nonlinear():
    class Largest(PyLayer):
        @staticmethod
        def forward(ctx, x, unique):
            y, ctx.places = jax.lax.top_k(x, 2)
            ctx.size, ctx.unique = x.shape[0], unique
            return y

        @staticmethod
        def backward(ctx, dy):
            return jnp.zeros(ctx.size).at[ctx.places].set(dy, unique_indices=ctx.unique)

    f = lambda unique: lambda x: (Largest.apply(x, unique) ** 2).sum()  # noqa: E731
    x = jnp.array([0.1, 2.0, 1.0])
    assert_same(jax.hessian(f(True))(x), jnp.diag(jnp.array([0.0, 2, 2])))
    with pytest.raises(TypeError, match=r"Largest\.backward cannot be transposed by JAX \(.*unique_indices=True"):
        jax.hessian(f(False))(x)


def test_tangents_that_are_python_numbers():
    class Add(PyLayer):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, dy):
            return dy, dy

        @staticmethod
        def jvp(ctx, dx, dy):
            assert (dx.shape, dx.dtype) == ((), jnp.float32)
            return dx + dy

    assert jax.jvp(Add.apply, (2.0, 3.0), (1.0, 1.0)) == (5, 2)
    assert jax.jit(lambda x: jax.jvp(Add.apply, (x, 3.0), (1.0, 1.0)))(2.0) == (5, 2)
