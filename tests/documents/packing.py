"""When packing saved tensors pays: memory, time and error of small models, as tables of notebooks/packing.md.

    python -m tests.documents.packing --json FILE [--memory]        measure with this version of JAX
    python -m tests.documents.packing --write NEW [OLD]             put figures of two versions into the pages

A program is a model, and the place of the block: around the whole loss, around each layer, or in the body of a scan
over the layers. Everything is compared with the same program without a block, round by round.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pylayer_jax.packers import cast_saved, quantize_saved

ROOT = Path(__file__).parents[2]
README, PAGE = ROOT / "README.md", ROOT / "notebooks" / "packing.md"
Layer = Callable[[Any, Any], Any]


def _same(f: Any) -> Any:
    return f


PACKERS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "cast": cast_saved,
    "8 bits": lambda: quantize_saved(8),
    "4 bits": lambda: quantize_saved(4),
}


class Model(NamedTuple):
    init: Callable[[], Any]
    batch: Callable[[jax.Array], tuple[Any, Any]]  # from a key
    loss: Callable[..., Any]  # (params, x, y, around a layer, in a scan)


def chained(layer: Layer, params: Any, x: Any, around: Callable[[Any], Any], scans: bool) -> Any:
    """Apply a layer once per entry of the stacked parameters; `around` puts each application in a block."""

    def in_block(p: Any, x: Any) -> Any:
        return around(layer)(p, x)

    if scans:
        return jax.lax.scan(lambda x, p: (in_block(p, x), None), x, params)[0]
    for i in range(len(jax.tree.leaves(params)[0])):
        x = in_block(jax.tree.map(lambda leaf, i=i: leaf[i], params), x)
    return x


def mlp(activation: Any, width: int, batch: int, depth: int = 4, dtype: Any = None, cast_at: str = "") -> Model:
    """Return layers of one width. With `cast_at="inside"`, each layer casts its weights to the dtype."""

    def layer(w: Any, x: Any) -> Any:
        return activation(x @ (w.astype(dtype) if cast_at == "inside" else w))

    def loss(ws: Any, x: Any, y: Any, around: Any = _same, scans: bool = False) -> Any:
        x = x if dtype is None else x.astype(dtype)
        return jnp.mean((chained(layer, ws, x, around, scans).astype(jnp.float32) - y) ** 2)

    def init() -> Any:
        return jax.random.normal(jax.random.key(0), (depth, width, width)) * (2 / width) ** 0.5

    def data(key: Any) -> Any:
        x = jax.random.normal(key, (batch, width))
        return x, jnp.tanh(jnp.roll(x, 1, -1))

    return Model(init, data, loss)


def convolutions(channels: int = 16, size: int = 32, batch: int = 16, depth: int = 3) -> Model:
    def layer(w: Any, x: Any) -> Any:
        return jax.nn.relu(jax.lax.conv(x, w, (1, 1), "SAME"))

    def loss(ws: Any, x: Any, y: Any, around: Any = _same, scans: bool = False) -> Any:
        return jnp.mean((chained(layer, ws, x, around, scans).mean((2, 3)) - y) ** 2)

    def init() -> Any:
        return jax.random.normal(jax.random.key(0), (depth, channels, channels, 3, 3)) * (2 / (9 * channels)) ** 0.5

    def data(key: Any) -> Any:
        x = jax.random.normal(key, (batch, channels, size, size))
        return x, jnp.max(x, (2, 3))

    return Model(init, data, loss)


def transformer(width: int = 128, length: int = 128, batch: int = 8, depth: int = 2) -> Model:
    heads = width // 32

    def norm(x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)

    def layer(p: Any, x: Any) -> Any:
        q, k, v = jnp.split(norm(x) @ p["qkv"], 3, -1)
        q, k, v = (a.reshape(*a.shape[:-1], heads, 32) for a in (q, k, v))
        weights = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k) / 32**0.5)
        x = x + jnp.einsum("bhij,bjhd->bihd", weights, v).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    def loss(ps: Any, x: Any, y: Any, around: Any = _same, scans: bool = False) -> Any:
        return jnp.mean((norm(chained(layer, ps, x, around, scans)) - y) ** 2)

    def init() -> Any:
        shapes = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return {
            n: jax.random.normal(k, (depth, *s)) / (2 * s[0] ** 0.5)
            for k, (n, s) in zip(keys, shapes.items(), strict=True)
        }

    def data(key: Any) -> Any:
        x = jax.random.normal(key, (batch, length, width))
        return x, norm(jnp.tanh(x) + x.mean(1, keepdims=True))

    return Model(init, data, loss)


def stored_narrow(model: Model) -> Model:
    """Return the model with weights that the caller has cast to bfloat16 before the block begins."""
    return model._replace(init=lambda: model.init().astype(jnp.bfloat16))


BF16 = jnp.bfloat16
MODELS: dict[str, Callable[[], Model]] = {
    "transformer": transformer,
    "gelu, batch 4096": lambda: mlp(jax.nn.gelu, 128, 4096),
    "relu, batch 4096": lambda: mlp(jax.nn.relu, 128, 4096),
    "convolutions": convolutions,
    "gelu, bf16, weights cast inside": lambda: mlp(jax.nn.gelu, 128, 4096, dtype=BF16, cast_at="inside"),
    "gelu, bf16, weights cast before": lambda: stored_narrow(mlp(jax.nn.gelu, 128, 4096, dtype=BF16)),
    "gelu, 1024 wide, batch 16": lambda: mlp(jax.nn.gelu, 1024, 16),
}
IN_PROGRAMS = ("cast", "8 bits")  # 4 bits take long to compile, and are measured in training only
PLACES = {
    "loss": "around the loss",
    "layer": "around each layer",
    "body": "in a scan's body",
}
PROGRAMS = [
    ("transformer", "loss"),
    ("transformer", "layer"),
    ("transformer", "body"),
    ("gelu, batch 4096", "loss"),
    ("gelu, batch 4096", "layer"),
    ("relu, batch 4096", "loss"),
    ("convolutions", "loss"),
    ("gelu, bf16, weights cast inside", "loss"),
    ("gelu, bf16, weights cast before", "loss"),
    ("gelu, 1024 wide, batch 16", "loss"),
]
IN_README = {
    "transformer": "transformer",
    "gelu, batch 4096": "gelu network, batch 4096",
    "convolutions": "convolutions and relu",
    "gelu, 1024 wide, batch 16": "**weights dominate**: gelu network, 1024 wide, batch 16",
}
# What the error of gradients does to training is measured on smaller ones.
TRAINED: dict[str, Callable[[], Model]] = {
    "transformer": lambda: transformer(width=64, length=32, batch=4, depth=2),
    "gelu": lambda: mlp(jax.nn.gelu, 64, 256),
    "relu": lambda: mlp(jax.nn.relu, 64, 256),
    "convolutions": lambda: convolutions(channels=8, size=16, batch=8, depth=3),
}


def program(model: Model, place: str, around: Callable[[Any], Any] | None) -> Callable[..., Any]:
    """Return the loss with a block (or `jax.checkpoint`) at a place; the same program without it where it is None."""
    scans = place == "body"
    if around is None:
        return lambda p, x, y: model.loss(p, x, y, scans=scans)
    if place in ("layer", "body"):
        return lambda p, x, y: model.loss(p, x, y, around=around, scans=scans)
    return around(lambda p, x, y: model.loss(p, x, y, scans=scans))


def relative_error(got: Any, expected: Any) -> float:
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
    wide = [(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)) for a, b in pairs]
    return float((sum(jnp.sum((a - b) ** 2) for a, b in wide) / sum(jnp.sum(b**2) for _, b in wide)) ** 0.5)


def held(loss: Any, params: Any, x: Any, y: Any) -> int:
    """Bytes of the function that a jitted `jax.vjp` returns, beside its inputs."""
    pull = jax.jit(lambda p, x, y: jax.vjp(lambda p: loss(p, x, y), p)[1])(params, x, y)
    inputs = jax.tree.leaves((params, x, y))
    total = 0
    for leaf in jax.tree.leaves(pull):
        same = any(leaf.shape == i.shape and leaf.dtype == i.dtype and bool(jnp.array_equal(leaf, i)) for i in inputs)
        total += 0 if same else leaf.nbytes
    return total


def measure(name: str, place: str, rounds: int) -> dict[str, Any]:
    model = MODELS[name]()
    params = model.init()
    x, y = model.batch(jax.random.key(1))
    arounds: dict[str, Any] = {"plain": None} | {n: PACKERS[n]() for n in IN_PROGRAMS}
    losses = {n: program(model, place, around) for n, around in arounds.items()}
    layers = "body" if place == "body" else "layer"
    losses["checkpoint"] = program(model, layers, jax.checkpoint)
    steps = {n: jax.jit(jax.value_and_grad(f)).lower(params, x, y).compile() for n, f in losses.items()}
    gradients = {n: step(params, x, y)[1] for n, step in steps.items()}
    times: dict[str, list[float]] = {n: [] for n in steps}
    for _ in range(rounds):
        for n, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(params, x, y))
            times[n].append(time.perf_counter() - start)
    memory = {n: step.memory_analysis().temp_size_in_bytes / 2**20 for n, step in steps.items()}
    kept = {n: held(f, params, x, y) / 2**20 for n, f in losses.items()}
    found: dict[str, Any] = {}
    for n in steps:
        ratios = [a / b for a, b in zip(times[n], times["plain"], strict=True)] or [0.0, 0.0]
        found[n] = {
            "temp": memory[n],
            "held": kept[n],
            "time": statistics.quantiles(ratios, n=4, method="inclusive"),
            "error": relative_error(gradients[n], gradients["plain"]),
        }
    return found


def train(name: str, seeds: int, n_steps: int) -> dict[str, list[float]]:
    """Return least, median and largest over seeds of the loss (of the last 20 steps) above that of plain training."""
    import optax

    model, adam = TRAINED[name](), optax.adam(3e-3)
    found: dict[str, list[float]] = {}
    losses = {"plain": program(model, "loss", None)} | {n: program(model, "loss", p()) for n, p in PACKERS.items()}
    results: dict[str, list[float]] = {n: [] for n in losses}
    for n, loss in losses.items():

        @jax.jit
        def run(params: Any, keys: Any, loss: Any = loss) -> Any:
            def step(trained: Any, key: Any) -> Any:
                params, state = trained
                value, gradient = jax.value_and_grad(loss)(params, *model.batch(key))
                changes, state = adam.update(gradient, state)
                return (optax.apply_updates(params, changes), state), value

            return jax.lax.scan(step, (params, adam.init(params)), keys)[1]

        for seed in range(seeds):
            values = run(model.init(), jax.random.split(jax.random.key(seed), n_steps))
            results[n].append(float(values[-20:].mean()))
    gradients = {
        n: jax.jit(jax.grad(loss))(model.init(), *model.batch(jax.random.key(9))) for n, loss in losses.items()
    }
    for n in PACKERS:
        found[f"error of {n}"] = [relative_error(gradients[n], gradients["plain"])]
        above = [a - b for a, b in zip(results[n], results["plain"], strict=True)]
        found[n] = [min(above), statistics.median(above), max(above)]
    first = jax.jit(losses["plain"])(model.init(), *model.batch(jax.random.key(9)))
    found["first"] = [float(first)]
    found["plain"] = [min(results["plain"]), statistics.median(results["plain"]), max(results["plain"])]
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.documents.packing", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", metavar="FILE", help="measure, and write the figures")
    parser.add_argument("--memory", action="store_true", help="only memory, which needs no repetition")
    parser.add_argument("--training", action="store_true", help="only training")
    parser.add_argument("--write", metavar="FILE", nargs="+", help="write tables of these figures into the page")
    options = parser.parse_args(arguments)
    if options.write:
        write_pages([json.loads(Path(file).read_text()) for file in options.write])
        return
    found: dict[str, Any] = {"jax": jax.__version__, "programs": {}, "training": {}}
    write = Path(options.json).write_text if options.json else len
    for name, place in [] if options.training else PROGRAMS:
        found["programs"][f"{name} | {PLACES[place]}"] = figures = measure(name, place, 0 if options.memory else 9)
        print(name, place, {n: {k: v for k, v in f.items() if k != "time"} for n, f in figures.items()}, flush=True)
        write(json.dumps(found, indent=1))
    for name in [] if options.memory else TRAINED:
        found["training"][name] = train(name, 3, 300)
        print(name, found["training"][name], flush=True)
        write(json.dumps(found, indent=1))


def write_pages(found: list[dict[str, Any]]) -> None:
    """Replace the tables between the marks of the page and of the README."""
    for title, table in tables(found).items():
        page = README if title == "packing" else PAGE
        text, mark = page.read_text(), re.escape(f"<!-- table: {title} -->")
        text, count = re.subn(
            rf"({mark}\n).*?(<!-- end -->)", lambda m, t=table: m[1] + t + m[2], text, flags=re.DOTALL
        )
        assert count == 1, title
        page.write_text(text)


def ratio(figure: float, plain: float) -> str:
    return f"{figure / plain:.2f}"


def tables(found: list[dict[str, Any]]) -> dict[str, str]:
    newest, *others = found
    columns = [*IN_PROGRAMS, "checkpoint"]
    memory = "| model | block | plain, MiB | " + " | ".join(columns) + " |\n|" + "---|" * (3 + len(columns)) + "\n"
    times = "| model | block | " + " | ".join(columns) + " |\n|" + "---|" * (2 + len(columns)) + "\n"
    for key, figures in newest["programs"].items():
        name, place = key.split(" | ")
        plain = figures["plain"]
        cells = [
            f"{ratio(figures[c]['temp'], plain['temp'])}; {ratio(figures[c]['held'], plain['held'])}"
            if c in figures
            else ""
            for c in columns
        ]
        memory += f"| {name} | {place} | {plain['temp']:.0f}; {plain['held']:.0f} | " + " | ".join(cells) + " |\n"
        low_middle_high = [figures[c]["time"] for c in columns]
        cells = [f"{t[1]:.2f} [{t[0]:.2f}, {t[2]:.2f}]" for t in low_middle_high]
        times += f"| {name} | {place} | " + " | ".join(cells) + " |\n"
    errors = "| model | error of the gradient: cast; 8 bits; 4 bits | loss of plain: before; after "
    errors += "| loss above plain: cast | 8 bits | 4 bits |\n"
    errors += "|---|---|---|---|---|---|\n"
    for name, losses in newest["training"].items():
        error = "; ".join(f"{losses[f'error of {n}'][0]:.1e}" for n in PACKERS)
        cells = [f"{m:+.0e} [{low:+.0e}, {high:+.0e}]" for low, m, high in (losses[n] for n in PACKERS)]
        errors += (
            f"| {name} | {error} | {losses['first'][0]:.2f}; {losses['plain'][1]:.4f} | " + " | ".join(cells) + " |\n"
        )
    result = {"memory": memory, "times": times, "errors": errors, "packing": in_short(newest["programs"])}
    if others:
        (old,) = others
        table = "| model | block | plain, MiB | " + " | ".join(columns) + " |\n|" + "---|" * (3 + len(columns)) + "\n"
        for key, figures in old["programs"].items():
            name, place = key.split(" | ")
            plain = figures["plain"]
            cells = [ratio(figures[c]["temp"], plain["temp"]) for c in columns]
            table += f"| {name} | {place} | {plain['temp']:.0f} | " + " | ".join(cells) + " |\n"
        result["older"] = table
    return {title: re.sub(r"\|  (?=\|)", "| ", text) for title, text in result.items()}


def in_short(programs: dict[str, Any]) -> str:
    """Return the table of the README: memory, and time with quartiles, of some programs."""
    columns = {
        "cast": "`cast_saved()`",
        "8 bits": "`quantize_saved(8)`",
        "checkpoint": "`jax.checkpoint` of each layer",
    }
    table = "| | plain | " + " | ".join(columns.values()) + " |\n|" + "---|" * (2 + len(columns)) + "\n"
    for name, shown in IN_README.items():
        figures = programs[f"{name} | {PLACES['loss']}"]
        plain = figures["plain"]["temp"]
        cells = [
            f"{ratio(figures[c]['temp'], plain)}; {{1:.2f}} [{{0:.2f}}, {{2:.2f}}]".format(*figures[c]["time"])
            for c in columns
        ]
        table += f"| {shown} | {plain:.0f} MiB | " + " | ".join(cells) + " |\n"
    return table


if __name__ == "__main__":
    main()
