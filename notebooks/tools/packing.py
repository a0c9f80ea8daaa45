"""When packing saved tensors pays: memory, time and error of small models, as tables of notebooks/packing.md.

    python -m notebooks.tools.packing --json FILE [--memory]    measure with this version of JAX
    python -m notebooks.tools.packing --write NEW [OLD]         put figures of two versions into the pages
    python -m notebooks.tools.packing --deep                    measure deep transformers, and put them into the pages

A program is a model, and the place of the block: around the whole loss, around each layer, or in the body of a scan
over the layers. Everything is compared with the same program without a block, round by round. The deep transformers
also have `jax.checkpoint` of each layer, with and without a block around the loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pylayer_jax import compare_programs
from pylayer_jax._compare_programs import ComparedProgram, ProgramComparison
from pylayer_jax.packers import cast_saved, quantize_saved, recompute_saved

from .draw_pictures import save

ROOT = Path(__file__).parents[2]
README, PAGE = ROOT / "README.md", ROOT / "notebooks" / "packing.md"
IN_THE_README = ("packing", "deep", "fact")  # tables
PICTURE = ROOT / "notebooks" / "deep_memory.svg"
Layer = Callable[[Any, Any], Any]


def _same(f: Any) -> Any:
    return f


PACKERS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "exact": recompute_saved,
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
            for of_layer in params if isinstance(params, list) else unstacked(params):
                x = in_block(of_layer, x)
        return jnp.mean((self.after(x) - y) ** 2)


def unstacked(params: Any) -> list[Any]:
    """Return the parameters of each layer."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], params) for i in range(len(jax.tree.leaves(params)[0]))]


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
    "gelu, 1024 wide, batch 16": lambda: mlp(jax.nn.gelu, 1024, 16),
}
IN_PROGRAMS = ("exact", "cast", "8 bits")  # 4 bits take long to compile, and are measured in training only
PLACES = {"loss": "around the loss", "layer": "around each layer", "body": "in a scan's body"}
MORE_PLACES = {"transformer": ("layer", "body")}
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


DEEP_MODELS = {"12 layers": (12, False), "24 layers": (24, False)}  # the depth, and whether it is a scan
DEEP_MODELS |= {f"{title} in a scan": (depth, True) for title, (depth, _) in DEEP_MODELS.items()}


def checkpointed(policy: Any) -> Callable[[Layer], Layer]:
    return lambda layer: jax.checkpoint(layer, policy=policy)


# What is around each layer, and around the loss.
CHECKPOINT, LIMITED = "`jax.checkpoint` of each layer", '`recompute_saved(limit="32 MiB")`'
POLICIES = jax.checkpoint_policies
DEEP: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "plain": (_same, _same),
    "`recompute_saved()`": (_same, recompute_saved()),
    '`recompute_saved(limit="64 MiB")`': (_same, recompute_saved(limit="64 MiB")),
    LIMITED: (_same, recompute_saved(limit="32 MiB")),
    "checkpoint of each layer, `dots_saveable`": (checkpointed(POLICIES.dots_saveable), _same),
    "the same, `dots_with_no_batch_dims_saveable`": (checkpointed(POLICIES.dots_with_no_batch_dims_saveable), _same),
    CHECKPOINT: (jax.checkpoint, _same),
    "`cast_saved()`": (_same, cast_saved()),
    "`quantize_saved(8)`": (_same, quantize_saved(8)),
}


ERRORS = ["model", "error of the gradient: exact; cast; 8 bits; 4 bits", "loss of plain: before; after"]
ERRORS += ["loss above plain: cast", "8 bits", "4 bits"]  # an exact gradient trains as plain does


def program(model: Model, place: str, around: Callable[[Any], Any] | None) -> Callable[..., Any]:
    """Return the loss with a block (or `jax.checkpoint`) at a place; the same program without it where it is None."""
    loss = functools.partial(model.loss, scans=place == "body")
    if around is None:
        return loss
    return around(loss) if place == "loss" else functools.partial(loss, around=around)


def compare(losses: dict[str, Any], params: Any, x: Any, y: Any, rounds: int) -> dict[str, Any]:
    """Return the figures of `compare_programs` for gradients in the parameters, by name."""

    def of_parameters(loss: Any) -> Any:
        return lambda params, x, y: loss(params, jax.lax.stop_gradient(x), jax.lax.stop_gradient(y))

    programs = {name: of_parameters(loss) for name, loss in losses.items()}
    comparison = compare_programs(programs, params, x, y, rounds=rounds)
    print(comparison, flush=True)
    return {row.name: dataclasses.asdict(dataclasses.replace(row, program=None)) for row in comparison.rows}


def measure(name: str, place: str, rounds: int) -> dict[str, Any]:
    model = MODELS[name]()
    arounds: dict[str, Any] = {"plain": None} | {n: PACKERS[n]() for n in IN_PROGRAMS}
    losses = {n: program(model, place, around) for n, around in arounds.items()}
    losses["checkpoint"] = program(model, "body" if place == "body" else "layer", jax.checkpoint)
    return compare(losses, model.init(), *model.batch(jax.random.key(1)), rounds)


def measure_deep(depth: int, scans: bool) -> dict[str, Any]:
    losses, args = deep_programs(depth, scans)
    found = compare(losses, *args, rounds=0)
    for name, loss in losses.items():
        found[name]["cpu_seconds"] = cpu_seconds_to_compile(loss, *args)
    return found


def deep_programs(depth: int, scans: bool) -> tuple[dict[str, Any], Any]:
    """Return the losses of a transformer by what is around its layers and its loss, and their arguments."""
    model = transformer(depth=depth)
    losses = {
        name: around_loss(functools.partial(model.loss, around=around_layer, scans=scans))
        for name, (around_layer, around_loss) in DEEP.items()
    }
    # A loop over stacked parameters would also hold the slice of each layer.
    params = model.init()
    return losses, (params if scans else unstacked(params), *model.batch(jax.random.key(1)))


def cpu_seconds_to_compile(loss: Any, *args: Any) -> float:
    """Return the CPU time for tracing and compiling a gradient, which other programs disturb less than the seconds."""
    start = time.process_time()
    jax.jit(jax.grad(loss)).lower(*args).compile()
    return time.process_time() - start


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
    compared = compare(losses, *first, rounds=0)
    found = {"first": [float(jax.jit(losses["plain"])(*first))], "plain": spread(results["plain"])}
    for n in PACKERS:
        found[f"error of {n}"] = [compared[n]["error"]]
        found[n] = spread([a - b for a, b in zip(results[n], results["plain"], strict=True)])
    return found


def spread(values: list[float]) -> list[float]:
    return [min(values), statistics.median(values), max(values)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m notebooks.tools.packing", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="measure, and write the figures")
    parser.add_argument("--memory", action="store_true", help="only memory, which needs no repetition")
    parser.add_argument("--write", metavar="FILE", nargs="+", help="write tables of these figures into the page")
    parser.add_argument("--deep", action="store_true", help="only deep transformers; write them into the pages at once")
    options = parser.parse_args(arguments)
    if options.write:
        write_pages([json.loads(Path(file).read_text()) for file in options.write])
        return
    found: dict[str, Any] = {"jax": jax.__version__, "deep": {}, "programs": {}, "training": {}}
    write = Path(options.json).write_text if options.json else len
    for title, (depth, scans) in DEEP_MODELS.items():
        print(title)
        found["deep"][title] = measure_deep(depth, scans)
        write(json.dumps(found, indent=1))
    if options.deep:
        write_pages([found])
        return
    for name, place in PROGRAMS:
        print(name, place)
        found["programs"][f"{name} | {PLACES[place]}"] = measure(name, place, 0 if options.memory else 5)
        write(json.dumps(found, indent=1))
    for name in [] if options.memory else TRAINED:
        found["training"][name] = train(name, 3, 300)
        print(name, found["training"][name], flush=True)
        write(json.dumps(found, indent=1))


def write_pages(found: list[dict[str, Any]]) -> None:
    """Replace the tables between the marks of the page and of the README, and the picture."""
    for title, table in tables(found).items():
        page = README if title in IN_THE_README else PAGE
        text, mark = page.read_text(), re.escape(f"<!-- table: {title} -->")
        text, count = re.subn(rf"(?s)({mark}\n).*?(<!-- end -->)", lambda m, t=table: m[1] + t + m[2], text)
        assert count == 1, title
        page.write_text(text)
    save(draw_deep(found[0]["deep"]), PICTURE)


def draw_deep(deep: dict[str, Any]) -> Any:
    """Draw memory against operations, with a panel for each model; return the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.4), layout="constrained")
    every = figure.subplots(2, 2).flat
    for axes, (title, programs) in zip(every, deep.items(), strict=True):
        fields = [field.name for field in dataclasses.fields(ComparedProgram)]
        rows = [ComparedProgram(**{n: row[n] for n in fields}) for row in programs.values()]
        ProgramComparison(rows).plot(axes)
        axes.set_title(f"Transformer of {title}", fontsize=10)
        axes.get_legend().remove()
    handles, labels = every[0].get_legend_handles_labels()
    labels = [label.replace("`", "").replace(" (a loop: more operations)", "") for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    head, *lines = (
        "|".join(["", *(f" {cell} " if cell else " " for cell in cells), "\n"]) for cells in (columns, *rows)
    )
    return "".join([head, "|" + "---|" * len(columns) + "\n", *lines])


def tables(found: list[dict[str, Any]]) -> dict[str, str]:
    newest, *others = found
    columns = [*IN_PROGRAMS, "checkpoint"]

    def of_programs(figures: dict[str, Any], cells: Callable[[Any, str], str], plain: list[str], *kinds: str) -> str:
        """A row for each program; `plain` heads a column of the figures of these kinds without a block."""
        rows = []
        for key, of_way in figures["programs"].items():
            without = "; ".join(f"{mib(of_way['plain'][kind]):.0f}" for kind in kinds)
            program = key.removesuffix(f" | {PLACES['loss']}").replace(" |", ",")
            rows.append([program, *([without] if kinds else []), *(cells(of_way, c) for c in columns)])
        return markdown(["", *plain, *columns], rows)

    def ratios(*kinds: str) -> Callable[[Any, str], str]:
        return lambda of_way, c: "; ".join(f"{of_way[c][kind] / of_way['plain'][kind]:.2f}" for kind in kinds)

    errors = []
    for name, losses in newest["training"].items():
        error = "; ".join(f"{losses[f'error of {n}'][0]:.1e}" for n in PACKERS)
        above = [f"{m:+.0e} [{low:+.0e}, {high:+.0e}]" for low, m, high in (losses[n] for n in PACKERS if n != "exact")]
        errors.append([name, error, f"{losses['first'][0]:.2f}; {losses['plain'][1]:.4f}", *above])
    result: dict[str, str] = {}
    if newest["deep"]:
        loops, scanned = ({k: v for k, v in newest["deep"].items() if ("scan" in k) == x} for x in (False, True))
        result |= {"fact": fact(loops), "deep": deep_in_short(loops)}
        result["deep scans"] = deep_in_short(scanned, errors=False)
        result["12 layers"] = deep_table(loops["12 layers"])
    if newest["programs"]:
        kinds = "temp_bytes", "held_bytes"
        result["memory"] = of_programs(newest, ratios(*kinds), ["plain, MiB"], *kinds)
    if newest["training"]:  # times were measured too
        result["packing"] = in_short(newest["programs"])
        in_readme = {f"{name} | {PLACES['loss']}" for name in IN_README}
        not_there = {key: of_way for key, of_way in newest["programs"].items() if key not in in_readme}
        result["times"] = of_programs({"programs": not_there}, relative_time, [])
        result["errors"] = markdown(ERRORS, errors)
    for older in others:
        result["older"] = of_programs(older, ratios("temp_bytes"), ["plain, MiB"], "temp_bytes")
    return result


def mib(n_bytes: float) -> float:
    return n_bytes / 2**20


def relative_time(of_way: dict[str, Any], way: str) -> str:
    """Return the median of the time relative to the plain program in the same round, with the quartiles."""
    pairs = zip(of_way[way]["step_seconds"], of_way["plain"]["step_seconds"], strict=True)
    low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4, method="inclusive")
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def fact(deep: dict[str, Any]) -> str:
    """Return the first sentences of the README about memory."""

    def taken(name: str) -> str:
        memory = " and ".join(f"{mib(programs[name]['temp_bytes']):.0f}" for programs in deep.values())
        more = max(programs[name]["operations"] / programs["plain"]["operations"] - 1 for programs in deep.values())
        count = f"{more:.0%} more" if more >= 0.01 else "hardly more"
        return f"{memory} MiB" + ("" if name == "plain" else f", with {count} operations")

    error = max(programs["`quantize_saved(8)`"]["error"] for programs in deep.values())
    depths = " and ".join(title.split()[0] for title in deep)
    return (
        f"The gradients of transformers of {depths} layers take {taken('plain')} of temporary memory\n"
        "(XLA's figure, on CPU).\n"
        f"`recompute_saved()` around the loss, with the exact gradient: **{taken('`recompute_saved()`')}**;\n"
        f"{LIMITED}: **{taken(LIMITED)}**.\n"
        f"`quantize_saved(8)`: {taken('`quantize_saved(8)`')} and an error of the gradient of {error:.1g}.\n"
        f"`jax.checkpoint` of each layer: {taken(CHECKPOINT)} ([all figures](#less-memory-for-saved-tensors)).\n"
    ).replace("%", " %")


def shown_error(row: dict[str, Any]) -> str:
    return f"{row['error']:.1g}" if row["error"] else "0"


def more_operations(row: dict[str, Any], plain: dict[str, Any]) -> str:
    more = f"{row['operations'] / plain['operations'] - 1:+.0%}"
    return more.replace("-0%", "+0%").replace("%", " %")


def deep_table(programs: dict[str, Any]) -> str:
    """Return the table of the page for one model. The README has the errors."""
    plain, rows = programs["plain"], []
    for name, row in programs.items():
        cells = [f"{mib(row['temp_bytes']):.1f} MiB", f"{mib(row['held_bytes']):.1f} MiB"]
        cells += [f"{row['operations'] / 1e9:.1f} G"]
        cells += [f"{row[kind] / plain[kind]:.2f}" for kind in ("transcendentals", "accessed_bytes")]
        rows.append([name, *cells, f"{row['cpu_seconds'] / plain['cpu_seconds']:.1f}"])
    figures = ["temporary memory", "held", "operations", "transcendental", "bytes accessed", "CPU time to compile"]
    return markdown(["", *figures], rows)


def deep_in_short(deep: dict[str, Any], errors: bool = True) -> str:
    """Return a table with memory and operations of all depths, and with the errors for the README."""
    rows = []
    for name in DEEP:
        cells: list[str] = []
        for programs in deep.values():
            row, plain = programs[name], programs["plain"]
            cells += [f"{mib(row['temp_bytes']):.0f} MiB", "" if name == "plain" else more_operations(row, plain)]
        if errors:
            largest = max((programs[name] for programs in deep.values()), key=lambda row: row["error"])
            cells.append("" if name == "plain" else shown_error(largest))
        rows.append([name, *cells])
    columns = [title for each in deep for title in (each.removesuffix(" in a scan"), "operations")]
    return markdown(["", *columns, *(["error of the gradient"] if errors else [])], rows)


def in_short(programs: dict[str, Any]) -> str:
    """Return the table of the README: memory, and time with quartiles, of some programs."""
    ways = {
        "exact": "`recompute_saved()`",
        "cast": "`cast_saved()`",
        "8 bits": "`quantize_saved(8)`",
        "checkpoint": "`jax.checkpoint` of each layer",
    }
    rows = []
    for name, shown in IN_README.items():
        figures = programs[f"{name} | {PLACES['loss']}"]
        plain = figures["plain"]["temp_bytes"]
        cells = [f"{figures[way]['temp_bytes'] / plain:.2f}; {relative_time(figures, way)}" for way in ways]
        rows.append([shown, f"{mib(plain):.0f} MiB", *cells])
    return markdown(["", "plain", *ways.values()], rows)


if __name__ == "__main__":
    main()
