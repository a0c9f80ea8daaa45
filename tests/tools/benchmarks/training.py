"""Training a transformer with packed activations, and with jax.checkpoint, to tell which one to pick."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pylayer_jax.packers import cast_saved, quantize_saved

from .models import Transformer, autodiff
from .results import TRAINING, Results
from .timing import Effort, measure

Block = Callable[[Any], Any]


def variants() -> dict[str, tuple[Block, Block]]:
    """What is around the loss, and what is around each block."""

    def is_activation(x: Any) -> bool:
        return x.ndim > 2  # the parameters of a block are matrices

    def same(function: Any) -> Any:
        return function

    def keeping_products(block: Any) -> Any:
        return jax.checkpoint(block, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)

    return {
        "plain": (same, same),
        "cast_saved()": (cast_saved(), same),
        "quantize_saved(8)": (quantize_saved(8), same),
        "the same, only=activations": (quantize_saved(8, only=is_activation), same),
        "quantize_saved(4)": (quantize_saved(4), same),
        "jax.checkpoint": (same, jax.checkpoint),
        "checkpoint keeping products": (same, keeping_products),
        "checkpoint and cast_saved()": (cast_saved(), keeping_products),
    }


def report(effort: Effort, results: Results) -> None:
    count = 120 // effort.shrink**2
    model = Transformer(4) if effort.shrink == 1 else Transformer(1, batch=2)
    text = model.data(count)
    print(f"\nA {model.depth}-layer transformer of plain operations, {count} steps on English text. Memory: temporary,")
    print("of a training step; error: of the first gradients, relative, 2-norm; loss: mean of the last ten.")
    headings = ("memory", "compile", "step", "error", "loss above plain")
    units = ("MiB", "s", "ms", "", "")
    for loop in ("Python loop", "scan"):
        rows = _trained(model, loop == "scan", text, effort)
        print(f"{loop:32}" + "".join(f"{f'{h}, {u}' if u else h:>18}" for h, u in zip(headings, units, strict=True)))
        for name, row in rows.items():
            for heading, unit, value in zip(headings, units, row, strict=True):
                results.add(TRAINING, f"{loop}: {heading}", name, value, unit)
            memory, compiling, step, error, loss = row
            print(f"{name:32}{memory:18.1f}{compiling:18.2f}{step:18.1f}{error:18.1e}{loss:+18.4f}", flush=True)


def _trained(model: Transformer, scan: bool, text: Any, effort: Effort) -> dict[str, tuple[float, ...]]:
    optimizer = optax.adam(3e-3)
    params = model.init()
    state = optimizer.init(params)
    steps, gradients, rows = {}, {}, {}
    chosen = effort.chosen(variants(), "plain", "quantize_saved(8)")
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    for again in range(1 if effort.shrink > 1 else 3):
        for name, (around, block) in chosen.items():
            loss = around(model.loss(autodiff(), scan, block))  # new functions, which no cache of JAX has seen

            def step(params: Any, state: Any, characters: Any, loss: Any = loss) -> Any:
                value, gradient = jax.value_and_grad(loss)(params, characters)
                with jax.numpy_dtype_promotion("standard"):  # optax multiplies its count by numbers
                    updates, state = optimizer.update(gradient, state)
                return optax.apply_updates(params, updates), state, value

            start = time.perf_counter()
            compiled = jax.jit(step).lower(params, state, text[0]).compile()
            seconds[name].append(time.perf_counter() - start)
            if again:
                continue
            steps[name] = lambda run=compiled: jax.block_until_ready(run(params, state, text[0]))
            gradients[name] = jax.jit(jax.grad(loss))(params, text[0])
            now, values = (params, state), []
            for characters in text:
                *now, value = compiled(*now, characters)
                values.append(float(value))
            rows[name] = (compiled.memory_analysis().temp_size_in_bytes / 2**20, statistics.mean(values[-10:]))
    times = measure(steps, effort._replace(rounds=max(3, effort.rounds // 4)))
    expected, final = gradients["plain"], rows["plain"][1]
    return {
        name: (
            memory,
            statistics.median(seconds[name]),
            1e3 * statistics.median(times[name]),
            relative_error(gradients[name], expected),
            loss - final,
        )
        for name, (memory, loss) in rows.items()
    }


def relative_error(got: Any, expected: Any) -> float:
    """Of trees of arrays, in the 2-norm."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
    return float((sum(jnp.sum((a - b) ** 2) for a, b in pairs) / sum(jnp.sum(b**2) for _, b in pairs)) ** 0.5)
