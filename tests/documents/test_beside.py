"""notebooks/beside.md: every cell of its table is what running the code gives."""

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


BESIDE, README = table(ROOT / "notebooks" / "beside.md"), table(ROOT / "README.md")


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


def hessian(way: Way) -> str:
    if way.for_hessian is None:
        return or_error(lambda: shown(jax.hessian(way.steep_tanh)(X)))
    with pytest.raises(NotImplementedError):
        jax.hessian(way.steep_tanh)(X)
    assert jax.hessian(way.for_hessian[1])(X) == pytest.approx(EXAMPLES[1].by_hand, rel=1e-5)
    return f"with {way.for_hessian[0]}"


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


def logs(way: Way) -> str:
    return "no" if way.logs is None else or_error(lambda: yes(way.logs(X) == 1))


SLOPE = 2 * (1 - np.tanh(X) ** 2)
ROWS: dict[str, Callable[[Way], str]] = {
    "`jit` of `grad`": lambda way: or_with(way.steep_tanh, None, lambda f: jax.jit(jax.grad(f))(X), SLOPE),
    "`vmap`": lambda way: or_with(way.steep_tanh, way.for_vmap, lambda f: jax.vmap(f)(np.full(3, X)), np.tanh(X)),
    "second derivative of `round(x)³` at 1.3, straight-through": second(EXAMPLES[0]),
    "second derivative of tanh at 0.3, slope doubled": second(EXAMPLES[1]),
    "`jax.hessian` of the same": hessian,
    "`jax.jvp`": lambda way: or_with(
        way.steep_tanh, way.for_jvp, lambda f: jax.jvp(f, (X,), (np.float32(1),))[1], SLOPE
    ),
    "a rule that is not linear, such as clipping": lambda way: or_with(
        way.clipped, None, lambda f: jax.grad(lambda x: 5 * f(x))(X), 1
    ),
    "a dict with an array and a string as the argument": of_a_dict,
    "runs of `forward` for an eager gradient, if it saves an intermediate": runs,
    "cotangent of an output that the loss does not use": missing_cotangent,
    "getting values out of the backward pass": logs,
    "packing saved tensors, under `jit` too": lambda way: yes(way.packs is not None and way.packs()),
}


def test_both_pages_have_the_rows_and_columns_that_are_run():
    frameworks = {"torch", "Paddle"}
    assert {row for row, _ in BESIDE} == set(ROWS)
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


# -- torch and Paddle --------------------------------------------------------------------------------------------


def shared_rows(
    base: Any, rounded: Any, sigmoid: Any, scalar: Any, grad: Any, hooks: Any, doubled: Any, steep_tanh: Any
) -> dict[str, str]:
    """Return the cells that torch and Paddle have in common.

    Args:
        base: the class of their custom gradients.
        rounded: their function that rounds.
        sigmoid: their sigmoid.
        scalar: from a number to a tensor that needs a gradient.
        grad: from y and x to the gradient, which can be differentiated again.
        hooks: their hooks on saved tensors.
        doubled: the gradient that `backward` returns for the argument that is a dict, from its cotangent.
        steep_tanh: tanh with twice its gradient.
    """

    class Round(base):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return rounded(x), x.clone()

        @staticmethod
        def backward(ctx, dy, unused):
            missing.append(unused)
            return dy

    class Swish(base):
        @staticmethod
        def forward(ctx, x):
            times.append(1)
            s = sigmoid(x)
            ctx.save_for_backward(x, s)
            return x * s

        @staticmethod
        def backward(ctx, dy):
            x, s = saved(ctx)
            return dy * s * (1 + x * (1 - s))

    class Clipped(base):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            return dy.clip(-1, 1)

    class Doubled(base):
        @staticmethod
        def forward(ctx, tree):
            return 2 * tree["w"]

        @staticmethod
        def backward(ctx, dy):
            return doubled(dy)

    missing: list[Any] = []
    times: list[int] = []
    kept: list[Any] = []

    def second(f, value):
        x = scalar(value)
        return shown(grad(grad(f(x), x), x))

    straight_through = second(lambda x: Round.apply(x)[0] ** 3, 1.3)
    Swish.apply(scalar(0.3)).backward()
    with hooks(lambda x: kept.append(x) or x, lambda x: x):
        steep_tanh(scalar(0.3)).backward()
    clipped = scalar(0.3)
    (5 * Clipped.apply(clipped)).backward()
    tree = Doubled.apply({"w": scalar(0.3), "name": "a text"})
    has_gradient = tree.requires_grad if hasattr(tree, "requires_grad") else not tree.stop_gradient
    return {
        "second derivative of `round(x)³` at 1.3, straight-through": straight_through,
        "second derivative of tanh at 0.3, slope doubled": second(steep_tanh, 0.3),
        "a rule that is not linear, such as clipping": yes(clipped.grad == 1),
        "a dict with an array and a string as the argument": "yes" if has_gradient else "no gradient, no error",
        "runs of `forward` for an eager gradient, if it saves an intermediate": str(len(times)),
        "cotangent of an output that the loss does not use": "None" if missing[0] is None else "zeros",
        "packing saved tensors, under `jit` too": yes(kept),
    }


def saved(ctx: Any) -> Any:
    return ctx.saved_tensors if hasattr(ctx, "saved_tensors") else ctx.saved_tensor()


def in_torch(torch: Any) -> dict[str, str]:
    class SteepTanh(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return torch.tanh(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)
            ctx.save_for_forward(output)

        @staticmethod
        def backward(ctx, dy):
            (y,) = ctx.saved_tensors
            return 2 * dy * (1 - y**2)

    class WithRules(SteepTanh):
        generate_vmap_rule = True

        @staticmethod
        def jvp(ctx, dx):
            (y,) = ctx.saved_tensors
            return 2 * dx * (1 - y**2)

    def use(f, rule):
        with pytest.raises(RuntimeError):
            f(SteepTanh.apply)
        f(WithRules.apply)
        return f"with {rule}"

    x = torch.full((3,), 0.3)
    return shared_rows(
        torch.autograd.Function,
        torch.round,
        torch.sigmoid,
        lambda value: torch.tensor(value, requires_grad=True),
        lambda y, x: torch.autograd.grad(y, x, create_graph=True)[0],
        torch.autograd.graph.saved_tensors_hooks,
        lambda dy: {"w": 2 * dy, "name": None},
        SteepTanh.apply,
    ) | {
        "`vmap`": use(lambda f: torch.func.vmap(f)(x), "`generate_vmap_rule`"),
        "`jax.hessian` of the same": shown(torch.autograd.functional.hessian(SteepTanh.apply, torch.tensor(0.3))),
        "`jax.jvp`": use(lambda f: torch.func.jvp(f, (x,), (x,)), "`jvp`"),
    }


def in_paddle(paddle: Any) -> dict[str, str]:
    class SteepTanh(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            y = paddle.tanh(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, dy):
            (y,) = ctx.saved_tensor()
            return 2 * dy * (1 - y**2)

    return shared_rows(
        paddle.autograd.PyLayer,
        paddle.round,
        paddle.nn.functional.sigmoid,
        lambda value: paddle.to_tensor(value, stop_gradient=False),
        lambda y, x: paddle.grad(y, x, create_graph=True)[0],
        paddle.autograd.saved_tensors_hooks,
        lambda dy: 2 * dy,
        SteepTanh.apply,
    )


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")  # by the imports of torch and Paddle
@pytest.mark.parametrize("name", ["torch", "Paddle"])
def test_a_cell_of_a_framework(name, framework, request):
    found = in_torch(framework("torch")) if name == "torch" else in_paddle(request.getfixturevalue("paddle"))
    for row, outcome in found.items():
        assert says(BESIDE[row, name], outcome), (row, outcome)
    for row in set(ROWS) - set(found):
        assert not BESIDE[row, name]
