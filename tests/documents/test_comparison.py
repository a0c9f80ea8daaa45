"""notebooks/comparison.md: each cell of `ROWS` is what running the code gives.

What the other cells say of this package is tested in derivatives/ (test_checkify, test_checkpoint, test_refs) and in
hooks/, and what they say of torch and Paddle, in layers/.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from .ways import COLUMNS, EXAMPLES, Example, Way

ROOT = Path(__file__).parents[2]
HIJAX = hasattr(importlib.import_module("jax.experimental.hijax"), "HiPrim") if jax.__version__ >= "0.12" else False
NEEDS = {"hijax": HIJAX, "equinox": importlib.util.find_spec("equinox") is not None}
X = np.float32(0.3)


def table(page: Path) -> dict[tuple[str, str], str]:
    """Return the cells of the table that begins with "| what", by row and column."""
    (rows,) = re.findall(r"^\| what .*\n\|[-|]+\|\n(?:\|.*\n)+", page.read_text(), re.MULTILINE)
    (_, *columns), _, *cells = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines())
    return {(row, column): cell for row, *each in cells for column, cell in zip(columns, each, strict=True)}


BESIDE, README = table(ROOT / "notebooks" / "comparison.md"), table(ROOT / "README.md")


def shown(x: Any) -> str:
    return f"{float(x):.4f}".replace("-", "\N{MINUS SIGN}")


def says(cell: str, outcome: str) -> bool:
    """Return whether a cell is the outcome, perhaps with a remark in parentheses."""
    return cell == outcome or cell.startswith(f"{outcome} (")


def or_error(compute: Callable[[], Any]) -> str:
    try:
        return compute()
    except Exception as error:
        return f"`{type(error).__name__}`"


def yes(correct: Any) -> str:
    return "yes" if correct else "no"


def or_with(function: Callable[[Any], Any], variant: Any, use: Callable[[Any], Any], expected: Any) -> str:
    """Return "yes" if a use of the function is right, or what has to be added for that, or the error."""

    def outcome(function: Callable[[Any], Any]) -> str:
        return or_error(lambda: yes(np.allclose(use(function), expected, rtol=1e-5)))

    found = outcome(function)
    if variant is None or found == "yes":
        return found
    assert outcome(variant[1]) == "yes"
    return f"with {variant[0]}"


def second(example: Example) -> Callable[[Way], str]:
    return lambda way: or_error(lambda: shown(example.second(way)(np.float32(example.x))))


def runs(way: Way) -> str:
    times: list[int] = []
    jax.grad(lambda x: way.swish(x, lambda: times.append(1)))(X)
    return str(len(times))


def missing_cotangent(way: Way) -> str:
    if way.sin_of_two is None:
        return "no cotangents"
    seen: list[Any] = []
    jax.grad(lambda x: way.sin_of_two(x, seen))(X)
    (cotangent,) = seen
    return "None" if cotangent is None else "zeros"


def of_a_dict(way: Way) -> str:
    return or_error(lambda: yes(jax.grad(lambda w: way.doubled({"w": w, "name": "a text"}))(X) == 2))


POLICIES = jax.checkpoint_policies


def saves_products(policy: Callable[..., Any]) -> Callable[[Way], str]:
    """Return "yes" if a checkpoint with this policy saves a product that stands in the function with a rule."""
    x = np.eye(3, dtype=np.float32)

    def products(way: Way, policy: Any) -> int:
        def three(x: Any) -> Any:
            for _ in range(3):
                x = jax.numpy.tanh(way.product(jax.numpy.stack([x, x])))
            return x.sum()

        return str(jax.make_jaxpr(jax.grad(jax.checkpoint(three, policy=policy)))(x)).count("dot_general[")

    return lambda way: or_error(lambda: yes(products(way, policy) < products(way, POLICIES.nothing_saveable)))


SLOPE = 2 * (1 - np.tanh(X) ** 2)
ROWS: dict[str, Callable[[Way], str]] = {
    "`jit` of `grad`": lambda way: or_with(way.steep_tanh, None, lambda f: jax.jit(jax.grad(f))(X), SLOPE),
    "`vmap`": lambda way: or_with(way.steep_tanh, way.for_vmap, lambda f: jax.vmap(f)(np.full(3, X)), np.tanh(X)),
    "second derivative of `round(x)³` at 1.3, straight-through": second(EXAMPLES[0]),
    "second derivative of tanh at 0.3, slope doubled": second(EXAMPLES[1]),
    "`jax.hessian` of the same": lambda way: (
        or_with(way.steep_tanh, way.for_hessian, lambda f: jax.hessian(f)(X), EXAMPLES[1].by_hand)
        if way.for_hessian
        else or_error(lambda: shown(jax.hessian(way.steep_tanh)(X)))
    ),
    "`jax.jvp`": lambda way: or_with(
        way.steep_tanh, way.for_jvp, lambda f: jax.jvp(f, (X,), (np.float32(1),))[1], SLOPE
    ),
    "a rule that is not linear, such as clipping": lambda way: or_with(
        way.clipped, None, lambda f: jax.grad(lambda x: 5 * f(x))(X), 1
    ),
    "a dict with an array and a string as the argument": of_a_dict,
    "runs of `forward` in one eager `jax.grad`, if `forward` saves an intermediate": runs,
    "cotangent of an output that the loss does not use": missing_cotangent,
    "a `jax.checkpoint` policy that saves matrix products saves those inside the function too": saves_products(
        POLICIES.dots_saveable
    ),
    "the same with a policy that saves a name": saves_products(POLICIES.save_only_these_names("product")),
}


def test_both_pages_have_the_rows_and_columns_that_are_run():
    frameworks = {"torch", "Paddle"}
    assert {row for row, _ in BESIDE} > set(ROWS)
    assert {column for _, column in BESIDE} == {*COLUMNS, *frameworks}
    assert README
    for place, cell in README.items():
        assert BESIDE[place] == cell


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("column", COLUMNS)
def test_a_cell_is_what_running_the_code_gives(row, column):
    if not NEEDS.get(column, True):
        pytest.skip(f"{column} is not installed, or has another interface in this version")
    cell = BESIDE[row, column]
    if "from jax 0.12" in cell and jax.__version__ < "0.12":
        pytest.skip("needs jax 0.12")
    found = ROWS[row](COLUMNS[column]())
    assert says(cell, found), found
