"""When packing saved tensors pays: memory, time and error of small models, as tables of notebooks/packing.md.

    python -m tests.documents.packing --json FILE [--memory]        measure with this version of JAX
    python -m tests.documents.packing --write NEW [OLD]             put figures of two versions into the pages

A program is a model, and the place of the block: around the whole loss, around each layer, or in the body of a scan
over the layers. Everything is compared with the same program without a block, round by round.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pylayer_jax.packers import cast_saved, quantize_saved
from tests.tools.benchmarks.timing import Effort
from tests.tools.benchmarks.timing import measure as measured

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
    init: Callable[[], Any]  # parameters, stacked over the layers
    batch: Callable[[jax.Array], tuple[Any, Any]]  # from a key
    layer: Layer  # of the parameters of one layer, and x
    before: Callable[[Any], Any] = _same  # what becomes of x before the layers, and of what they give
    after: Callable[[Any], Any] = _same

    def loss(self, params: Any, x: Any, y: Any, around: Any = _same, scans: bool = False) -> Any:
        """Return the loss; `around` puts each application of the layer in a block."""

        def in_block(p: Any, x: Any) -> Any:
            return around(self.layer)(p, x)

        x = self.before(x)
        if scans:
            x = jax.lax.scan(lambda x, p: (in_block(p, x), None), x, params)[0]
        else:
            for i in range(len(jax.tree.leaves(params)[0])):
                x = in_block(jax.tree.map(lambda leaf, i=i: leaf[i], params), x)
        return jnp.mean((self.after(x) - y) ** 2)


def normal(*shape: int, scale: float, key: Any = None) -> Any:
    return jax.random.normal(jax.random.key(0) if key is None else key, shape) * scale


def mlp(activation: Any, width: int, batch: int, depth: int = 4, dtype: Any = jnp.float32, cast_at: str = "") -> Model:
    """Return layers of one width, whose weights each layer (`cast_at="inside"`) or the caller ("before") casts."""

    def layer(w: Any, x: Any) -> Any:
        return activation(x @ (w.astype(dtype) if cast_at == "inside" else w))

    def data(key: Any) -> Any:
        x = jax.random.normal(key, (batch, width))
        return x, jnp.tanh(jnp.roll(x, 1, -1))

    def init() -> Any:
        weights = normal(depth, width, width, scale=(2 / width) ** 0.5)
        return weights.astype(dtype) if cast_at == "before" else weights

    return Model(init, data, layer, lambda x: x.astype(dtype), lambda x: x.astype(jnp.float32))


def convolutions(channels: int = 16, size: int = 32, batch: int = 16, depth: int = 3) -> Model:
    def layer(w: Any, x: Any) -> Any:
        return jax.nn.relu(jax.lax.conv(x, w, (1, 1), "SAME"))

    def data(key: Any) -> Any:
        x = jax.random.normal(key, (batch, channels, size, size))
        return x, jnp.max(x, (2, 3))

    def init() -> Any:
        return normal(depth, channels, channels, 3, 3, scale=(2 / (9 * channels)) ** 0.5)

    return Model(init, data, layer, after=lambda x: x.mean((2, 3)))


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

    def init() -> Any:
        sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        keys = dict(zip(sizes, jax.random.split(jax.random.key(0), len(sizes)), strict=True))
        return {n: normal(depth, *size, scale=0.5 / size[0] ** 0.5, key=keys[n]) for n, size in sizes.items()}

    def data(key: Any) -> Any:
        x = jax.random.normal(key, (batch, length, width))
        return x, norm(jnp.tanh(x) + x.mean(1, keepdims=True))

    return Model(init, data, layer, after=norm)


BF16 = jnp.bfloat16
MODELS: dict[str, Callable[[], Model]] = {
    "transformer": transformer,
    "gelu, batch 4096": lambda: mlp(jax.nn.gelu, 128, 4096),
    "relu, batch 4096": lambda: mlp(jax.nn.relu, 128, 4096),
    "convolutions": convolutions,
    "gelu, bf16, weights cast inside": lambda: mlp(jax.nn.gelu, 128, 4096, dtype=BF16, cast_at="inside"),
    "gelu, bf16, weights cast before": lambda: mlp(jax.nn.gelu, 128, 4096, dtype=BF16, cast_at="before"),
    "gelu, 1024 wide, batch 16": lambda: mlp(jax.nn.gelu, 1024, 16),
}
IN_PROGRAMS = ("cast", "8 bits")  # 4 bits take long to compile, and are measured in training only
PLACES = {"loss": "around the loss", "layer": "around each layer", "body": "in a scan's body"}
MORE_PLACES = {"transformer": ("layer", "body"), "gelu, batch 4096": ("layer",)}
PROGRAMS = [(name, place) for name in MODELS for place in ("loss", *MORE_PLACES.get(name, ()))]
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


ERRORS = ["model", "error of the gradient: cast; 8 bits; 4 bits", "loss of plain: before; after"]
ERRORS += ["loss above plain: cast", "8 bits", "4 bits"]


def program(model: Model, place: str, around: Callable[[Any], Any] | None) -> Callable[..., Any]:
    """Return the loss with a block (or `jax.checkpoint`) at a place; the same program without it where it is None."""
    loss = functools.partial(model.loss, scans=place == "body")
    if around is None:
        return loss
    return around(loss) if place == "loss" else functools.partial(loss, around=around)


def relative_error(got: Any, expected: Any) -> float:
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
    wide = [(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)) for a, b in pairs]
    return float((sum(jnp.sum((a - b) ** 2) for a, b in wide) / sum(jnp.sum(b**2) for _, b in wide)) ** 0.5)


def held(loss: Any, params: Any, x: Any, y: Any) -> int:
    """Bytes of the function that a jitted `jax.vjp` returns, beside its inputs."""
    pull = jax.jit(lambda p, x, y: jax.vjp(lambda p: loss(p, x, y), p)[1])(params, x, y)

    def is_input(leaf: Any) -> bool:
        return any(leaf.dtype == i.dtype and jnp.array_equal(leaf, i) for i in jax.tree.leaves((params, x, y)))

    return sum(0 if is_input(leaf) else leaf.nbytes for leaf in jax.tree.leaves(pull))


def measure(name: str, place: str, rounds: int) -> dict[str, Any]:
    model = MODELS[name]()
    params = model.init()
    x, y = model.batch(jax.random.key(1))
    arounds: dict[str, Any] = {"plain": None} | {n: PACKERS[n]() for n in IN_PROGRAMS}
    losses = {n: program(model, place, around) for n, around in arounds.items()}
    layers = "body" if place == "body" else "layer"
    losses["checkpoint"] = program(model, layers, jax.checkpoint)
    steps = {n: jax.jit(jax.value_and_grad(f)).lower(params, x, y).compile() for n, f in losses.items()}
    calls = {n: lambda step=step: jax.block_until_ready(step(params, x, y)) for n, step in steps.items()}
    times = measured(calls, Effort(rounds, 0.0))
    plain = steps["plain"](params, x, y)[1]
    found: dict[str, Any] = {}
    for n, step in steps.items():
        ratios = [a / b for a, b in zip(times[n], times["plain"], strict=True)] or [0.0, 0.0]
        found[n] = {
            "temp": step.memory_analysis().temp_size_in_bytes / 2**20,
            "held": held(losses[n], params, x, y) / 2**20,
            "time": statistics.quantiles(ratios, n=4, method="inclusive"),
            "error": relative_error(step(params, x, y)[1], plain),
        }
    return found


def train(name: str, seeds: int, n_steps: int) -> dict[str, list[float]]:
    """Return least, median and largest over seeds of the loss (of the last 20 steps) above that of plain training."""
    import optax

    model, adam = TRAINED[name](), optax.adam(3e-3)
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
    first = model.init(), *model.batch(jax.random.key(9))
    gradients = {n: jax.jit(jax.grad(loss))(*first) for n, loss in losses.items()}
    found = {"first": [float(jax.jit(losses["plain"])(*first))], "plain": spread(results["plain"])}
    for n in PACKERS:
        found[f"error of {n}"] = [relative_error(gradients[n], gradients["plain"])]
        found[n] = spread([a - b for a, b in zip(results[n], results["plain"], strict=True)])
    return found


def spread(values: list[float]) -> list[float]:
    return [min(values), statistics.median(values), max(values)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.documents.packing", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="measure, and write the figures")
    parser.add_argument("--memory", action="store_true", help="only memory, which needs no repetition")
    parser.add_argument("--write", metavar="FILE", nargs="+", help="write tables of these figures into the page")
    options = parser.parse_args(arguments)
    if options.write:
        write_pages([json.loads(Path(file).read_text()) for file in options.write])
        return
    found: dict[str, Any] = {"jax": jax.__version__, "programs": {}, "training": {}}
    write = Path(options.json).write_text if options.json else len
    for name, place in PROGRAMS:
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
        text, count = re.subn(rf"(?s)({mark}\n).*?(<!-- end -->)", lambda m, t=table: m[1] + t + m[2], text)
        assert count == 1, title
        page.write_text(text)


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    head, *lines = (f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in (columns, *rows))
    return "".join([head, "|" + "---|" * len(columns) + "\n", *lines])


def tables(found: list[dict[str, Any]]) -> dict[str, str]:
    newest, *others = found
    columns = [*IN_PROGRAMS, "checkpoint"]

    def of_programs(figures: dict[str, Any], cells: Callable[[Any, str], str], plain: list[str], *kinds: str) -> str:
        """A row for each program; `plain` heads a column of the figures of these kinds without a block."""
        rows = []
        for key, of_way in figures["programs"].items():
            without = "; ".join(f"{of_way['plain'][kind]:.0f}" for kind in kinds)
            rows.append([*key.split(" | "), *([without] if kinds else []), *(cells(of_way, c) for c in columns)])
        return markdown(["model", "block", *plain, *columns], rows)

    def ratios(*kinds: str) -> Callable[[Any, str], str]:
        return lambda of_way, c: "; ".join(f"{of_way[c][kind] / of_way['plain'][kind]:.2f}" for kind in kinds)

    errors = []
    for name, losses in newest["training"].items():
        error = "; ".join(f"{losses[f'error of {n}'][0]:.1e}" for n in PACKERS)
        above = [f"{m:+.0e} [{low:+.0e}, {high:+.0e}]" for low, m, high in (losses[n] for n in PACKERS)]
        errors.append([name, error, f"{losses['first'][0]:.2f}; {losses['plain'][1]:.4f}", *above])
    result = {
        "memory": of_programs(newest, ratios("temp", "held"), ["plain, MiB"], "temp", "held"),
        "times": of_programs(newest, lambda of_way, c: quartiles(of_way[c]["time"]), []),
        "errors": markdown(ERRORS, errors),
        "packing": in_short(newest["programs"]),
    }
    for older in others:
        result["older"] = of_programs(older, ratios("temp"), ["plain, MiB"], "temp")
    return result


def quartiles(time: list[float]) -> str:
    low, middle, high = time
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def in_short(programs: dict[str, Any]) -> str:
    """Return the table of the README: memory, and time with quartiles, of some programs."""
    ways = {"cast": "`cast_saved()`", "8 bits": "`quantize_saved(8)`", "checkpoint": "`jax.checkpoint` of each layer"}
    rows = []
    for name, shown in IN_README.items():
        figures = programs[f"{name} | {PLACES['loss']}"]
        plain = figures["plain"]["temp"]
        cells = [f"{figures[way]['temp'] / plain:.2f}; {quartiles(figures[way]['time'])}" for way in ways]
        rows.append([shown, f"{plain:.0f} MiB", *cells])
    return markdown(["", "plain", *ways.values()], rows)


if __name__ == "__main__":
    main()
