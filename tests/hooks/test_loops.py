"""In a loop, a value that stays the same is packed once, before the loop: it is not stacked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from pylayer_jax.packers import cast_saved, quantize_saved, save_on_cpu
from tests.kit.layers import Matmul, Tanh

SIZE = 64
PAIRS = {
    "identity": lambda: saved_tensors_hooks(lambda x: x, lambda x: x),
    "save_on_cpu": save_on_cpu,
    "cast_saved": cast_saved,
    "quantize_saved": quantize_saved,
}


def layers(h, w):
    return Tanh.apply(Matmul.apply(h, w))


def operations(h, w):
    return jnp.tanh(h @ w)


def recurrent(step, length):
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda h, _: (step(h, w), None), x, None, length=length)[0] ** 2)

    return loss


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("step", [layers, operations])
def test_a_weight_that_all_steps_share_is_not_stacked(step, pair):
    w, x = jnp.eye(SIZE) * 0.9, jnp.ones((2, SIZE))

    def compiled(length):
        return jax.jit(jax.grad(PAIRS[pair]()(recurrent(step, length)), (0, 1))).lower(w, x).compile()

    short, long = compiled(8), compiled(16)
    sizes = [program.memory_analysis().temp_size_in_bytes for program in (short, long)]
    assert sizes[1] - sizes[0] <= 8 * 3 * x.nbytes  # stacked, eight more would be 8 * w.nbytes / 4 or more
    for got, expected in zip(short(w, x), jax.grad(recurrent(operations, 8), (0, 1))(w, x), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0.05, atol=0.05)


def test_a_block_in_the_body_of_a_scan_keeps_as_little_as_one_around_it():
    # Several operations of the block keep the same tensor.
    w, x = jnp.eye(SIZE) * 0.9, jnp.ones((SIZE, SIZE))

    def step(h, w):
        return jnp.tanh(h @ w) * jnp.sin(h) + jax.nn.gelu(h)

    def step_in_block(h, w):
        with cast_saved(arguments=True):
            return step(h, w)

    around, within = (
        jax.jit(jax.grad(f)).lower(w, x).compile().memory_analysis().temp_size_in_bytes
        for f in (cast_saved(arguments=True)(recurrent(step, 16)), recurrent(step_in_block, 16))
    )
    assert within <= around * 1.02
