"""notebooks/recipes: each page prints what it shows, and its original in torch or Paddle prints the same."""

import concurrent.futures
import datetime as dt
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks" / "recipes"


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


class Recipe(NamedTuple):
    name: str
    code: list[str]  # blocks, to be run one after the other
    shown: str  # what they print
    original: str  # in torch or Paddle; prints what the first block prints. Empty if there is none


def read(path):
    text = path.read_text()
    (original,) = blocks(text, "py") or [""]
    return Recipe(path.stem, blocks(text, "python"), "".join(blocks(text, "text")), original)


RECIPES = [read(path) for path in sorted(FOLDER.glob("*.md")) if path.stem != "README"]
PORTS = [recipe for recipe in RECIPES if recipe.original]


def named(recipes):
    return pytest.mark.parametrize("recipe", recipes, ids=lambda recipe: recipe.name)


def run(text, **names):
    """Return the values that a text prints, in the types of Python, and the names that it defines."""
    printed = []
    names |= {"__name__": __name__, "print": lambda *values: printed.extend(values)}
    exec(text, names)
    return [x.tolist() if hasattr(x, "tolist") else x if x is True else str(x).split(".")[-1] for x in printed], names


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


def test_each_page_is_in_the_index_and_shows_what_it_prints():
    index = (FOLDER / "README.md").read_text()
    assert RECIPES
    for recipe in RECIPES:
        assert f"({recipe.name}.md)" in index
        assert recipe.code
        assert recipe.shown


@named(RECIPES)
def test_the_code_of_a_page_prints_what_is_shown(recipe, capsys):
    exec("".join(recipe.code), {"__name__": __name__})
    jax.effects_barrier()
    (numbers, text), (shown, around) = map(numbers_and_text, (capsys.readouterr().out, recipe.shown))
    assert text == around
    np.testing.assert_allclose(numbers, shown, rtol=1e-5)


@pytest.mark.frameworks
@named(PORTS)
def test_an_original_prints_the_same_as_its_port(recipe, framework, request):
    if "paddle." in recipe.original:
        theirs, _ = run(recipe.original, paddle=request.getfixturevalue("paddle"))
    elif "group" in recipe.original:
        theirs = run_on_two_ranks(recipe.original, framework("torch"))
    else:
        theirs, _ = run(recipe.original, torch=framework("torch"))
    ours, _ = run(recipe.code[0])
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
    (recipe,) = (recipe for recipe in RECIPES if recipe.name == "main_grad")
    linear = run(recipe.code[0])[1]["Linear"]
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
