"""notebooks/recipes: each page prints what it shows, and its original in torch or Paddle prints the same."""

import concurrent.futures
import datetime as dt
import re
from pathlib import Path
from typing import NamedTuple

import jax
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


def marks(recipe):
    text = "".join(recipe.code)
    marks = {"from flax": pytest.mark.ecosystem, "jax.clear_caches()": pytest.mark.clears_caches}
    return [mark for part, mark in marks.items() if part in text]


def named(recipes):
    return pytest.mark.parametrize("recipe", [pytest.param(r, marks=marks(r), id=r.name) for r in recipes])


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


@pytest.mark.filterwarnings("ignore:.* 0 tensors packed:UserWarning")  # which the page hooks_block announces
@named(RECIPES)
def test_the_code_of_a_page_prints_what_is_shown(recipe, capsys, request):
    if pytest.mark.ecosystem in marks(recipe) and not request.config.getoption("--require-ecosystem"):
        pytest.importorskip("flax")
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
