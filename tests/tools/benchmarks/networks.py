"""Models whose activations, norms and losses are layers: time to the first step, time of a step, and memory."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import jax

from .models import MLP, WAYS, Transformer
from .results import BY_HAND, MODELS, PYLAYER, Results
from .timing import Effort, measure

STAGES = ("trace", "lower", "compile")


def report(effort: Effort, results: Results) -> None:
    print("\nModels whose activations, norms and losses have gradients of their own. The first column is PyLayer's,")
    print("the others are how many times that the other ways take.")
    ways = {name: way for name, way in WAYS.items() if _is_there(way)}
    batch = 32 // effort.shrink
    models = {
        "12-layer transformer": Transformer(max(2, 12 // effort.shrink), batch=batch),
        "50-layer MLP": MLP(max(2, 50 // effort.shrink), batch=16 * batch),
    }
    base, *others = ways
    print(f"{'':44}{base:>14}" + "".join(f"{name:>18}" for name in others))
    for name, model in models.items():
        for loop in ("Python loop", "scan"):
            rows = _measured(model, loop == "scan", ways, effort)
            for row, values in rows.items():
                unit = {"memory": "MiB", "step": "ms"}.get(row, "s")
                for way, value in values.items():
                    results.add(MODELS, f"{name}, {loop}: {row}", way, value, unit)
                own = values[base]
                cells = "".join(f"{values[other] / own:18.2f}" for other in others)
                print(f"{f'{name}, {loop}: {row}':44}{own:10.2f} {unit:3}{cells}", flush=True)
            more = (rows["trace"][PYLAYER] - rows["trace"][BY_HAND]) / rows["first step"][PYLAYER]
            print(f"{'':4}tracing PyLayer rather than {BY_HAND}: {100 * more:.1f} % of the time to the first step")


def _is_there(way: Any) -> bool:
    try:
        way()
    except ImportError:
        return False
    return True


def _measured(model: Any, scan: bool, ways: dict[str, Any], effort: Effort) -> dict[str, dict[str, float]]:
    params, data = model.init(), model.data()
    times: dict[str, dict[str, list[float]]] = {stage: defaultdict(list) for stage in STAGES}
    memory: dict[str, float] = {}
    steps: dict[str, Any] = {}
    for _ in range(1 if effort.shrink > 1 else 4):
        for name, way in ways.items():
            loss = model.loss(way(), scan)  # new functions, which no cache of JAX has seen
            staged: Any = jax.jit(jax.value_and_grad(loss))
            for stage, arguments in (("trace", (params, data)), ("lower", ()), ("compile", ())):
                start = time.perf_counter()
                staged = getattr(staged, stage)(*arguments)
                times[stage][name].append(time.perf_counter() - start)
            memory[name] = staged.memory_analysis().temp_size_in_bytes / 2**20
            steps[name] = lambda run=staged: jax.block_until_ready(run(params, data))
    run = measure(steps, effort._replace(rounds=max(3, effort.rounds // 4)))
    # The first of several rounds also fills caches of JAX.
    rows = {stage: {name: statistics.median(t[1:] or t) for name, t in times[stage].items()} for stage in STAGES}
    rows["first step"] = {
        name: sum(rows[stage][name] for stage in STAGES) + statistics.median(run[name]) for name in ways
    }
    rows["step"] = {name: 1e3 * statistics.median(t) for name, t in run.items()}
    rows["memory"] = memory
    return rows
