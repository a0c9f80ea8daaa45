"""Policies of `jax.checkpoint` decide about the operations in `forward`, and the rule holds at every order."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import partial_eval

from pylayer_jax.packers import quantize_saved
from tests.kit.jaxprs import equations
from tests.kit.layers import Matmul, Steep, SteepBothWays, layer

POLICIES = jax.checkpoint_policies
DOTS = POLICIES.dots_with_no_batch_dims_saveable
NAMES = POLICIES.save_only_these_names("product", "wave", "NamedSteep.saved[0]")
OFFLOAD = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=["wave"],
    names_which_can_be_offloaded=["product", "NamedSteep.saved[0]"],
    offload_src="device",
    offload_dst="pinned_host",
)
# jax.checkpoint without a policy is among the transforms of kit/transforms.py.
ALL_POLICIES = {
    "everything": POLICIES.everything_saveable,
    "products": DOTS,
    "elementwise operations": lambda primitive, *_, **__: primitive.name in ("sin", "tanh", "round"),
    "names": NAMES,
    "offload": OFFLOAD,
}


def _wave(ctx, x):
    wave = checkpoint_name(jnp.sin(x), "wave")
    ctx.save_for_backward(wave, x)
    return jnp.tanh(wave), wave * 2


def _of_wave(ctx, dy, dz):
    wave, x = ctx.saved_tensor()
    return 1.5 * dy * (1 - jnp.tanh(wave) ** 2) * jnp.cos(x) + dz * jnp.cos(x)


# Saves an intermediate; its rule is not the gradient of its first output.
Wave = layer(_wave, _of_wave, name="Wave")
NamedProduct = layer(
    lambda ctx, x, w: ctx.save_for_backward(x, w) or checkpoint_name(x @ w, "product"), base=Matmul, name="NamedProduct"
)
NamedSteep = layer(base=Steep, name="NamedSteep", saved_names=True)


OwnVmap = layer(base=Steep, vmap=lambda info, in_dims, x: (jnp.tanh(x), in_dims[0]))

X = jnp.linspace(-0.9, 1.1, 9, dtype=jnp.float32).reshape(3, 3)
W = X[::-1] * 0.7


def _of_one_argument(apply):
    return lambda x, w: jnp.sum(jnp.sin(apply(x @ w)) ** 2)


LAYERS = {
    "saves its inputs": lambda x, w: jnp.sum(jnp.sin(NamedProduct.apply(jnp.tanh(x), w)) ** 2),
    "saves its output": _of_one_argument(Steep.apply),
    "saves its output under a name": _of_one_argument(NamedSteep.apply),
    "saves an intermediate": _of_one_argument(lambda x: sum(Wave.apply(x))),
    "forward mode": _of_one_argument(SteepBothWays.apply),
    "a vmap of its own": _of_one_argument(OwnVmap.apply),
}


def _scanned(f):
    return lambda x, w: jax.lax.scan(lambda c, s: (c + f(x * s, w), None), 0.0, jnp.array([1.0, 0.8]))[0]


# generated/ has policies under other transforms, and at other orders.
PROGRAMS = {
    "gradient": lambda wrap, f: jax.grad(wrap(f), (0, 1)),
    "second derivative": lambda wrap, f: jax.jacrev(jax.grad(wrap(f))),
    "forward over reverse": lambda wrap, f: jax.hessian(wrap(f)),
    "vmap outside": lambda wrap, f: jax.grad(lambda x, w: jax.vmap(wrap(f), (1, None))(x[:, None], w).sum()),
    "second derivative of a scan": lambda wrap, f: jax.jacrev(jax.grad(_scanned(wrap(f)))),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_policy_changes_no_number(name, program):
    make, f = PROGRAMS[program], LAYERS[name]

    @jax.jit  # one program, which compiles faster than one for each policy
    def run(x, w):
        wraps = [lambda f, policy=policy: jax.checkpoint(f, policy=policy) for policy in ALL_POLICIES.values()]
        # For a tuple, JAX fails if the derivative of the checkpointed code has a constant.
        some_merged = functools.partial(jax.checkpoint, prevent_cse=(True, False))
        return [make(wrap, f)(x, w) for wrap in [lambda f: f, some_merged, *wraps]]

    plain, *under_policies = run(X, W)
    for got in under_policies:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, plain)


def _count(f, *args):
    return collections.Counter(e.primitive.name for e in equations(jax.make_jaxpr(f)(*args).jaxpr))


def _three_products(x, w):
    for _ in range(3):
        x = jnp.tanh(NamedProduct.apply(x, w))
    return x.sum()


@pytest.mark.parametrize(
    ("policy", "products"), [(None, 12), (DOTS, 9), (NAMES, 9), (OFFLOAD, 9), (POLICIES.everything_saveable, 9)]
)
def test_a_saved_product_in_forward_is_not_computed_again(policy, products):
    gradient = jax.grad(jax.checkpoint(_three_products, policy=policy), (0, 1))
    assert _count(gradient, X, W)["dot_general"] == products
    kept = jax.checkpoint(lambda x, w: jax.vmap(_three_products, (0, None))(x, w).sum(), policy=policy)
    assert _count(jax.grad(kept, (0, 1)), X[None], W)["dot_general"] == products


def test_a_scan_saves_products_too():
    def scanned(x, w):
        body = jax.checkpoint(lambda x, _: (jnp.tanh(NamedProduct.apply(x, w)), None), policy=DOTS)
        return jax.lax.scan(body, x, None, length=3)[0].sum()

    assert _count(jax.grad(scanned, (0, 1)), X, W)["dot_general"] == 3


@pytest.mark.parametrize("returns", ["the saved tensor", "a tensor behind it", "both"])
@pytest.mark.parametrize("members", [{"saved_names": ("y",)}, {"saved_names": True, "forward_mode": True}])
@pytest.mark.parametrize(("names", "rounds"), [(("y", "Made.saved[0]"), 1), (("another name",), 2)])
def test_a_residual_saved_by_its_name_spares_the_operations_before_it(names, rounds, members, returns):
    def forward(ctx, x):
        y = jnp.round(3 * x)
        ctx.save_for_backward(y)
        return {"the saved tensor": y, "a tensor behind it": jnp.sin(y), "both": (y, jnp.sin(y))}[returns]

    def backward(ctx, *dys):
        (y,) = ctx.saved_tensor()
        return sum(dys) * jnp.cos(y)

    made = layer(forward, backward, **members)

    def f(x):  # the derivative of `exp` needs the outputs
        return sum(jnp.exp(leaf).sum() for leaf in jax.tree.leaves(made.apply(x)))

    for function in (f, lambda x: jax.vmap(f)(x).sum()):
        kept = jax.checkpoint(function, policy=POLICIES.save_only_these_names(*names))
        assert _count(jax.grad(kept), X)["round"] == rounds


def test_what_a_policy_keeps_is_packed_by_a_block_around():
    kept = jax.checkpoint(_three_products, policy=DOTS)
    x, w = jnp.ones((40, 64)), jnp.eye(64) / 2
    _, pull = jax.vjp(quantize_saved(8)(lambda x, w: kept(jnp.sin(x), w)), x, w)
    kinds = [leaf.dtype for leaf in jax.tree.leaves(pull) if leaf.size == x.size and leaf is not x]
    assert len(kinds) >= 3  # the products; the argument of `kept` is computed again
    assert set(kinds) == {np.dtype(np.uint8)}


Both = layer(
    lambda x, y: (jnp.sin(x), x + jnp.cos(y)),
    lambda x, y, da, db: (2 * da * jnp.cos(x) + db, -db * jnp.sin(y)),
    name="Both",
    plain=True,
)


@pytest.mark.parametrize("kind", ["front", "forward mode"])
@pytest.mark.parametrize(("used", "present", "absent"), [((0,), "sin", "cos"), ((1,), "cos", "sin"), ((), "", "sin")])
def test_outputs_that_nothing_uses_are_not_computed(kind, used, present, absent):
    made = Both if kind == "front" else layer(base=Both, name="Both", forward_mode=True)

    jaxpr = jax.make_jaxpr(lambda x, y: [made.apply(x, y)[i] for i in used])(0.1, -1.3).jaxpr
    dced, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(used))
    assert f" {absent} " not in str(dced)
    assert not present or f" {present} " in str(dced)

    def scanned(x):  # JAX drops the dead code in the body of a scan when it differentiates the scan
        body = lambda carry, _: (carry + sum((made.apply(x, -1.3)[i] for i in used), 0.0 * x), None)
        return jax.lax.scan(body, x, None, length=2)[0]

    expected = sum(jax.grad(lambda x, i=i: made.apply(x, -1.3)[i])(0.1) for i in used)
    np.testing.assert_allclose(jax.grad(scanned)(0.1), 1 + 2 * expected, rtol=1e-6)


def test_the_operations_of_forward_but_not_what_only_a_derivative_needs_stand_in_the_jaxpr_of_a_layer():
    with_slope = layer(lambda ctx, x: ctx.save_for_backward(jnp.cos(x)) or jnp.sin(x))
    (layer_call,) = jax.make_jaxpr(with_slope.apply)(0.1).eqns
    assert layer_call.primitive.name == "custom_vjp_call"
    assert "sin" in [equation.primitive.name for equation in layer_call.params["call_jaxpr"].eqns]
    assert "cos" not in str(layer_call)
