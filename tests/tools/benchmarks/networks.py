"""A model whose activation, norm and loss are layers: time to the first step, time of a step, and memory."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import jax

from .models import WAYS, Transformer
from .results import BY_HAND, MODEL, MODELS, PYLAYER, Results
from .timing import Effort, measure

STAGES = ("trace", "lower", "compile")
UNITS = {"memory": "MiB", "step": "ms"}  # of the others: s


def report(effort: Effort, results: Results) -> None:
    print("\nA model whose activation, norm and loss have gradients of their own: what PyLayer takes, and how many")
    print(f"times that {BY_HAND} takes.")
    model = Transformer(max(2, 12 // effort.shrink), batch=32 // effort.shrink)
    for loop in ("Python loop", "scan"):
        rows = _measured(model, loop == "scan", effort)
        for row, values in rows.items():
            unit = UNITS.get(row, "s")
            for way, value in values.items():
                results.add(MODELS, f"{MODEL}, {loop}: {row}", way, value, unit)
            own, other = values[PYLAYER], values[BY_HAND]
            print(f"{f'{MODEL}, {loop}: {row}':44}{own:10.2f} {unit:3}{other / own:18.2f}", flush=True)
        more = (rows["trace"][PYLAYER] - rows["trace"][BY_HAND]) / rows["first step"][PYLAYER]
        print(f"{'':4}tracing PyLayer rather than {BY_HAND}: {100 * more:.1f} % of the time to the first step")


def _measured(model: Transformer, scan: bool, effort: Effort) -> dict[str, dict[str, float]]:
    params, data = model.init(), model.data()
    times: dict[str, dict[str, list[float]]] = {stage: defaultdict(list) for stage in STAGES}
    rows: dict[str, dict[str, float]] = {"memory": {}}
    steps: dict[str, Any] = {}
    for _ in range(1 if effort.shrink > 1 else 4):
        for name, way in WAYS.items():
            staged: Any = jax.jit(jax.value_and_grad(model.loss(way(), scan)))
            for stage, arguments in (("trace", (params, data)), ("lower", ()), ("compile", ())):
                start = time.perf_counter()
                staged = getattr(staged, stage)(*arguments)
                times[stage][name].append(time.perf_counter() - start)
            rows["memory"][name] = staged.memory_analysis().temp_size_in_bytes / 2**20
            steps[name] = lambda run=staged: jax.block_until_ready(run(params, data))
    run = measure(steps, effort._replace(rounds=max(3, effort.rounds // 4)))
    # The first of several rounds also fills caches of JAX.
    rows |= {stage: {name: statistics.median(t[1:] or t) for name, t in times[stage].items()} for stage in STAGES}
    step = {name: statistics.median(t) for name, t in run.items()}
    rows["first step"] = {name: sum(rows[stage][name] for stage in STAGES) + step[name] for name in WAYS}
    rows["step"] = {name: 1e3 * seconds for name, seconds in step.items()}
    return rows
