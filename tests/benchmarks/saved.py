"""What the ready pairs of saved-tensor hooks keep for backward, what they cost, and how far gradients move."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax.packers import cast_saved, quantize_saved, save_on_cpu, save_on_disk
from tests.kit.layers import Tanh

from .timing import Effort, measure

NAME = "saved"

Loss = Callable[[Any, Any], Any]


def mlp(weights: Any, x: Any) -> Any:
    for w in weights:
        x = Tanh.apply(x @ w)
    return jnp.mean(x**2)


def transformer(layers: Any, x: Any) -> Any:
    heads = 4
    for w in layers:
        h = _normalized(x)
        q, k, v = (_split(h @ w[name], heads) for name in ("q", "k", "v"))
        scores = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k) / jnp.sqrt(q.shape[-1]), axis=-1)
        mixed = jnp.einsum("bhqk,bhkd->bhqd", scores, v).swapaxes(1, 2).reshape(x.shape)
        x = x + mixed @ w["out"]
        x = x + jax.nn.gelu(_normalized(x) @ w["up"]) @ w["down"]
    return jnp.mean(x**2)


def _normalized(x: Any) -> Any:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-6)


def _split(x: Any, heads: int) -> Any:
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).swapaxes(1, 2)


def models(shrink: int) -> dict[str, tuple[Loss, Any, Any]]:
    key = jax.random.key(0)

    def matrix(i: int, rows: int, columns: int) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, i), (rows, columns)) / rows**0.5

    wide, long = 64, 64 // min(shrink, 8)
    sizes = {"q": (wide, wide), "k": (wide, wide), "v": (wide, wide), "out": (wide, wide)}
    sizes |= {"up": (wide, 4 * wide), "down": (4 * wide, wide)}
    layers = [{n: matrix(10 * i + j, *s) for j, (n, s) in enumerate(sizes.items())} for i in range(4)]
    weights = [matrix(100 + i, 128, 128) for i in range(12)]
    batch = 4096 // shrink
    return {
        "12-layer MLP": (mlp, weights, jax.random.normal(key, (batch, 128))),
        "4-layer transformer": (transformer, layers, jax.random.normal(key, (16, long, wide))),
    }


def report(effort: Effort) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pairs = {
            "cast_saved()": cast_saved(),
            "quantize_saved(8)": quantize_saved(8),
            "quantize_saved(4)": quantize_saved(4),
            "save_on_cpu()": save_on_cpu(),
            "save_on_disk(...)": save_on_disk(folder),
        }
        print("\nSaved tensors, next to the same model without hooks: bytes kept by the function that jax.vjp returns,")
        print("temporary memory of the compiled gradient, error of the gradients (relative, 2-norm), and times.")
        heading = ("kept, eager", "memory, jit", "error", "time, eager", "time, jit")
        for name, (loss, weights, x) in models(effort.shrink).items():
            losses = {"plain": loss} | {pair: hooks(loss) for pair, hooks in pairs.items()}
            kept = {pair: _kept(f, weights, x) for pair, f in losses.items()}
            compiled = {pair: jax.jit(jax.grad(f)).lower(weights, x).compile() for pair, f in losses.items()}
            memory = {pair: c.memory_analysis().temp_size_in_bytes for pair, c in compiled.items()}
            gradients = {pair: c(weights, x) for pair, c in compiled.items()}
            short = effort._replace(rounds=max(3, effort.rounds // 4))
            eager = _times({pair: jax.grad(f) for pair, f in losses.items()}, weights, x, short)
            jitted = _times(compiled, weights, x, short)
            print(f"{name:20}" + "".join(f"{h:>14}" for h in heading))
            print(f"{'plain':20}{kept['plain'] / 2**20:10.2f} MiB{memory['plain'] / 2**20:10.2f} MiB")
            for pair in pairs:
                row = (
                    kept[pair] / kept["plain"],
                    memory[pair] / memory["plain"],
                    _error(gradients[pair], gradients["plain"]),
                    eager[pair],
                    jitted[pair],
                )
                print(f"{pair:20}{row[0]:14.3f}{row[1]:14.3f}{row[2]:14.1e}{row[3]:14.2f}{row[4]:14.2f}", flush=True)


def _kept(loss: Loss, weights: Any, x: Any) -> int:
    """Bytes that are held for backward, other than the arguments, which the caller holds anyway."""
    _, pullback = jax.vjp(loss, weights, x)
    arguments = {id(leaf) for leaf in jax.tree_util.tree_leaves((weights, x))}
    held = {id(leaf): leaf.nbytes for leaf in jax.tree_util.tree_leaves(pullback)}
    return sum(size for leaf, size in held.items() if leaf not in arguments)


def _error(got: Any, expected: Any) -> float:
    pairs = list(zip(jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(expected), strict=True))
    return float((sum(jnp.sum((a - b) ** 2) for a, b in pairs) / sum(jnp.sum(b**2) for _, b in pairs)) ** 0.5)


def _times(functions: dict[str, Any], weights: Any, x: Any, effort: Effort) -> dict[str, float]:
    calls = {n: (lambda f=f: jax.block_until_ready(f(weights, x))) for n, f in functions.items()}
    times = measure(calls, effort)
    return {n: statistics.median(a / b for a, b in zip(times[n], times["plain"], strict=True)) for n in functions}
