"""Delayed scaling in float8 with its state in Refs, beside flax's, which returns it as gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax import PyLayer
from tests.ecosystem.libraries import library

fp8_ops = library("flax.linen.fp8_ops")

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
STEPS, HISTORY = 200, 16


def rounded(x, dtype, meter):
    """`x` in steps of a float8 type, by the largest entry of earlier calls; `meter` keeps these and the scale."""
    largest, top = jnp.max(meter["history"][...]), float(jnp.finfo(dtype).max)
    factor = jnp.where(largest > 0, top / largest, 1 / meter["scale"][...])
    scale = meter["scale"][...] = 1 / factor
    meter["history"][...] = jnp.roll(meter["history"][...], -1).at[0].set(jnp.max(jnp.abs(x)))
    return jnp.clip(x / scale, -top, top).astype(dtype).astype(x.dtype) * scale


class Float8Matmul(PyLayer):
    @staticmethod
    def forward(ctx, meters, x, w):
        x, w = rounded(x, E4M3, meters["x"]), rounded(w, E4M3, meters["w"])
        ctx.save_for_backward(x, w)
        ctx.meter = meters["dy"]
        return x @ w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensor()
        dy = rounded(dy, E5M2, ctx.meter)
        return dy @ w.T, x.T @ dy


def flax_matmul(meters, x, w):
    def meter(name):
        return meters[name]["scale"], meters[name]["history"]

    x = fp8_ops.in_qdq(jnp.float32, E4M3, x, *meter("x"))
    w = fp8_ops.in_qdq(jnp.float32, E4M3, w, *meter("w"))
    return fp8_ops.out_qdq(jnp.float32, E5M2, x @ w, *meter("dy"))


def new_meters():
    return {name: {"scale": jnp.ones(()), "history": jnp.zeros(HISTORY)} for name in ("x", "w", "dy")}


def test_two_hundred_steps_are_those_of_flax():
    keys = jax.random.split(jax.random.key(0), 3)
    xs = jax.random.normal(keys[0], (STEPS, 16, 8)) * jnp.linspace(0.1, 10, STEPS)[:, None, None]
    targets = xs @ jax.random.normal(keys[1], (8, 4))
    w = jax.random.normal(keys[2], (8, 4))

    def loss(matmul, meters, w, x, target):
        return jnp.mean((matmul(meters, x, w) - target) ** 2)

    @jax.jit
    def ours(meters, w):
        def step(w, batch):
            value, dw = jax.value_and_grad(lambda w: loss(Float8Matmul.apply, meters, w, *batch))(w)
            return w - 0.01 * dw, value

        return jax.lax.scan(step, w, (xs, targets))

    @jax.jit
    def theirs(meters, w):
        def step(carry, batch):
            meters, w = carry
            value, (meters, dw) = jax.value_and_grad(lambda meters, w: loss(flax_matmul, meters, w, *batch), (0, 1))(
                meters, w
            )
            return (meters, w - 0.01 * dw), value

        return jax.lax.scan(step, (meters, w), (xs, targets))

    refs = jax.tree.map(jax.new_ref, new_meters())
    (expected_meters, expected_w), expected = theirs(new_meters(), w)
    found_w, found = ours(refs, w)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found_w, expected_w)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda ref: ref[...], refs), expected_meters)
