"""Notebook 03: the two texts of each recipe print the same, and its tables have names of real torch and Paddle."""

import concurrent.futures
import dataclasses
import datetime as dt
import json
import pkgutil
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, FunctionCtx, PyLayer, saved_tensors_hooks

CELLS = json.loads((Path(__file__).parents[2] / "notebooks" / "03_porting.ipynb").read_text())["cells"]
TEXTS = ["".join(cell["source"]) for cell in CELLS]
JAX = {"jax": jax, "jnp": jnp, "np": np, "dataclasses": dataclasses}
JAX |= {x.__name__: x for x in (Function, PyLayer, saved_tensors_hooks)}


class Recipe(NamedTuple):
    title: str
    original: str
    port: str
    shown: str  # by the notebook, below the port


RECIPES = [
    Recipe(
        text.splitlines()[0].removeprefix("### "),
        re.search("```python\n(.*?)```", text, re.DOTALL)[1],
        port,
        "".join("".join(output["text"]) for output in cell["outputs"]),
    )
    for text, port, cell in zip(TEXTS, TEXTS[1:], CELLS[1:], strict=False)
    if text.startswith("### ")
]
EACH = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)


def run(text, **names):
    """The values that a text prints, in the types of Python, and the names that it defines."""
    printed = []
    names |= {"__name__": __name__, "print": lambda *values: printed.extend(values)}
    exec(text, names)
    return [x.tolist() if hasattr(x, "tolist") else x if x is True else str(x).split(".")[-1] for x in printed], names


def run_in_torch(text, torch):
    return run(text, torch=torch)[0]


def run_on_two_ranks(text, torch):
    store, wait = torch.distributed.HashStore(), dt.timedelta(seconds=60)

    def one(rank):
        group = torch.distributed.ProcessGroupGloo(store, rank, 2, wait)
        return run(text, torch=torch, rank=rank, group=group)[0]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, range(2))
    assert first == second
    return first


def numbers_and_text(shown):
    number = r"-?\d+\.?\d*"
    return np.array(re.findall(number, shown), float), "".join(re.sub(number, "", shown).split())


@pytest.mark.slow  # the next test runs each port too, where torch and Paddle are installed
@EACH
def test_a_port_prints_what_is_shown(recipe, capsys):
    exec(recipe.port, JAX | {"__name__": __name__})
    (numbers, text), (shown, around) = map(numbers_and_text, (capsys.readouterr().out, recipe.shown))
    np.testing.assert_allclose(numbers, shown, rtol=1e-5)
    assert text == around


@pytest.mark.frameworks
@EACH
def test_an_original_prints_the_same_as_its_port(recipe, framework, request):
    if "paddle." in recipe.original:
        theirs, _ = run(recipe.original, paddle=request.getfixturevalue("paddle"))
    else:
        on_ranks = "group" in recipe.original
        theirs = (run_on_two_ranks if on_ranks else run_in_torch)(recipe.original, framework("torch"))
    ours, _ = run(recipe.port, **JAX)
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(other, str):
            assert mine == other
        else:
            np.testing.assert_allclose(mine, other, rtol=1e-5)


# The gradient of a sink, of a loss that takes the sink and the examples.
WITH_A_SINK = {
    "eager": lambda loss: jax.grad(loss),
    "jit": lambda loss: jax.jit(jax.grad(loss)),
    "grad of jit": lambda loss: jax.grad(jax.jit(loss)),
    "scan": lambda loss: jax.grad(
        lambda sink, xs: jax.lax.scan(lambda total, x: (total + loss(sink, x), None), jnp.float32(0), xs)[0]
    ),
    "vmap": lambda loss: jax.grad(lambda sink, xs: jax.vmap(loss, (None, 0))(sink, xs).sum()),
    "remat": lambda loss: jax.grad(jax.checkpoint(loss)),
}


@pytest.mark.parametrize("how", WITH_A_SINK)
def test_a_sink_keeps_the_gradient_in_float32(how):
    (text,) = (recipe.port for recipe in RECIPES if "main_grad" in recipe.title)
    linear = run(text, **JAX)[1]["Linear"]
    weight = jnp.array([[1.0], [0.5]], jnp.bfloat16)
    xs = 11 * jnp.arange(24, dtype=jnp.bfloat16).reshape(4, 3, 2)
    x = xs if how in ("scan", "vmap") else xs[3]
    expected = np.asarray(x, np.float32).reshape(-1, 2).sum(0)[:, None]
    assert expected.astype(jnp.bfloat16).tolist() != expected.tolist()

    def loss(sink, x):
        return jnp.sum(linear.apply(x, weight, sink).astype(jnp.float32))

    gradient = WITH_A_SINK[how](loss)(jnp.zeros((2, 1), jnp.float32), x)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, expected)


@pytest.mark.frameworks
def test_each_column_of_the_table_has_real_names(framework, paddle):
    torch = framework("torch")
    columns = (  # what ctx and x are
        {"ctx": paddle.autograd.PyLayerContext, "x": paddle.ones([1])},
        {"ctx": torch.autograd.Function, "x": torch.ones(1)},
        {"ctx": FunctionCtx},
    )
    (table,) = (text for text in TEXTS if text.startswith("## Name by name"))
    for row in table.splitlines()[4:]:
        for stands_for, cell in zip(columns, re.split(r" *\| *", row)[1:], strict=False):
            # `y` is what `x` is, and `ctx.anything` is any name of the user's.
            for name in re.findall(r"`(?!ctx\.anything|y\.)([a-z_]+(?:\.\w+)+)", cell):
                first, _, rest = name.partition(".")
                assert hasattr(stands_for[first], rest) if first in stands_for else pkgutil.resolve_name(name), name


@pytest.mark.frameworks
def test_the_table_of_fleet_has_real_names(paddle):
    (table,) = (text for text in TEXTS if text.startswith("## Fleet, name by name"))
    short = dict(re.findall(r"`(\w+)` is\s+`([\w.]+)`", table))
    names = re.findall(r"\b((?:paddle|jax|mp_ops|sp)(?:\.[a-zA-Z]\w*|\._\w+)+)", table)
    assert {"mp_ops._c_identity", "sp.AllGatherOp.apply", "jax.lax.pcast", "paddle.nn.SyncBatchNorm"} <= set(names)
    for name in names:
        first, _, rest = name.partition(".")
        pkgutil.resolve_name(f"{short.get(first, first)}.{rest}")


@pytest.mark.frameworks
def test_each_row_of_operations_gives_the_same(paddle):
    (table,) = (text for text in TEXTS if text.startswith("## Operations, name by name"))
    rows = re.findall(r"^\| `(.*?)` \| `(.*?)`.* \|$", table, re.MULTILINE)
    assert len(rows) == table.count("\n| `")
    values = {"x": np.array([[-1.3, 0.4, 0.9], [0.2, -0.6, 1.7]], np.float32), "i": np.array([1, 0])}
    for theirs, ours in rows:
        expected = eval(theirs, {"paddle": paddle, **{k: paddle.to_tensor(v) for k, v in values.items()}})
        got = eval(ours, {"jax": jax, "jnp": jnp, **{k: jnp.asarray(v) for k, v in values.items()}})
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            other = np.asarray(other)
            assert (one.shape if hasattr(one, "shape") else ()) == other.shape, theirs
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=theirs)


def test_as_many_recipes_come_from_paddle_as_from_torch():
    from_paddle = ["paddle." in recipe.original for recipe in RECIPES]
    assert sum(from_paddle) >= len(RECIPES) / 2
