"""What the ready pairs of saved-tensor hooks keep for backward, what they cost, and how far gradients move."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import jax

from pylayer_jax.packers import cast_saved, quantize_saved, save_on_cpu, save_on_disk

from .models import MLP, Transformer, autodiff, pylayer
from .results import SAVED, Results
from .timing import Effort, measure
from .training import relative_error

Loss = Callable[[Any, Any], Any]
HEADINGS = ("kept, eager", "kept, jit", "memory, jit", "error", "time, eager", "time, jit")


def report(effort: Effort, results: Results) -> None:
    small = min(effort.shrink, 8)
    mlp = MLP(12 // small, batch=4096 // small)
    transformer = Transformer(max(1, 4 // small), batch=16 // small, length=64 // small)
    models = {
        "12-layer MLP of layers": (mlp, mlp.loss(pylayer())),
        "4-layer transformer": (transformer, transformer.loss(autodiff())),
    }
    models = effort.chosen(models, "12-layer MLP of layers")
    with tempfile.TemporaryDirectory() as folder:
        pairs = {
            "cast_saved()": cast_saved(),
            "quantize_saved(8)": quantize_saved(8),
            "quantize_saved(4)": quantize_saved(4),
            "save_on_cpu()": save_on_cpu(),
            "save_on_disk(...)": save_on_disk(folder),
        }
        pairs = effort.chosen(pairs, "quantize_saved(8)", "save_on_disk(...)")
        print("\nSaved tensors, next to the same model without hooks: bytes kept by the function that jax.vjp returns,")
        print(
            "in eager mode and by a compiled program, temporary memory of the compiled gradient, error of the gradients"
        )
        print("(relative, 2-norm), and times.")
        for name, (model, loss) in models.items():
            params, data = model.init(), jax.tree.map(lambda x: x[0], model.data(1))
            plain, rows = _measured(loss, pairs, params, data, effort)
            print(f"{name:24}" + "".join(f"{h:>14}" for h in HEADINGS))
            print(f"{'plain':24}" + "".join(f"{size:10.2f} MiB" for size in plain))
            for pair, row in rows.items():
                kept, kept_jit, memory, error, eager, jitted = row
                cells = f"{kept:14.3f}{kept_jit:14.3f}{memory:14.3f}{error:14.1e}{eager:14.2f}{jitted:14.2f}"
                print(f"{pair:24}{cells}", flush=True)
                for heading, value in zip(HEADINGS, row, strict=True):
                    results.add(SAVED, f"{name}: {heading}", pair, value, "" if heading == "error" else "x")


def _measured(
    loss: Loss, pairs: dict[str, Any], params: Any, data: Any, effort: Effort
) -> tuple[list[float], dict[str, tuple[float, ...]]]:
    """The MiB that the plain model keeps, and the figures of each pair of hooks relative to it."""
    losses = {"plain": loss} | {pair: hooks(loss) for pair, hooks in pairs.items()}
    sizes: dict[str, list[float]] = {}
    compiled = {pair: jax.jit(jax.grad(f)).lower(params, data).compile() for pair, f in losses.items()}
    for pair, f in losses.items():
        eager = jax.vjp(lambda p, f=f: f(p, data), params)[1]
        kept_jit = jax.jit(lambda p, data, f=f: jax.vjp(lambda p: f(p, data), p)[1])(params, data)
        memory = compiled[pair].memory_analysis().temp_size_in_bytes
        sizes[pair] = [_kept(eager, params, data), _kept(kept_jit, params, data), memory]
    gradients = {pair: run(params, data) for pair, run in compiled.items()}
    short = effort._replace(rounds=max(3, effort.rounds // 4))
    eager_times = _times({pair: jax.grad(f) for pair, f in losses.items()}, params, data, short)
    jit_times = _times(compiled, params, data, short)
    rows = {
        pair: (
            *(size / plain for size, plain in zip(sizes[pair], sizes["plain"], strict=True)),
            relative_error(gradients[pair], gradients["plain"]),
            eager_times[pair],
            jit_times[pair],
        )
        for pair in pairs
    }
    return [size / 2**20 for size in sizes["plain"]], rows


def _kept(pullback: Any, *arguments: Any) -> int:
    """Bytes on the device that are held for backward, other than the arguments, which the caller holds anyway."""
    given = {id(leaf) for leaf in jax.tree.leaves(arguments)}
    held = {id(leaf): leaf for leaf in jax.tree.leaves(pullback) if id(leaf) not in given}
    return sum(x.nbytes for x in held.values() if x.sharding.memory_kind in (None, "device", _default_memory()))


def _default_memory() -> str:
    return jax.devices()[0].default_memory().kind


def _times(functions: dict[str, Any], params: Any, data: Any, effort: Effort) -> dict[str, float]:
    calls = {n: (lambda f=f: jax.block_until_ready(f(params, data))) for n, f in functions.items()}
    times = measure(calls, effort)
    return {n: statistics.median(a / b for a, b in zip(times[n], times["plain"], strict=True)) for n in functions}
