"""notebooks/comparison.md: every cell of its table is what running the code gives."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import checkify
from jax.interpreters import partial_eval

from tests.kit.oracle import Paddle, Torch

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


def checked(transform: Callable[[Any], Any]) -> Callable[[Way], str]:
    def run(way: Way) -> str:
        error, _ = checkify.checkify(transform(way.checked_log))(np.float32(-1))
        return yes("not positive" in (error.get() or ""))

    return lambda way: or_error(lambda: run(way))


def names_the_nan(way: Way) -> str:
    loss = jax.value_and_grad(lambda x: 2 * way.log(x))
    error, _ = checkify.checkify(loss, errors=checkify.nan_checks)(np.float32(-1))
    return yes("primitive: log" in (error.get() or ""))


def debug_nans(way: Way) -> str:
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\blog\b"):
        jax.jit(jax.grad(lambda x: way.log(x) ** 2))(np.float32(-1))
    return "yes"


def dead_code(way: Way) -> str:
    jaxpr = jax.make_jaxpr(lambda x: way.sin_and_exp(x)[0])(X).jaxpr
    return yes(" exp " not in str(partial_eval.dce_jaxpr(jaxpr, [True])[0]))


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
    "a dict with an array and a string as the argument": lambda way: or_error(
        lambda: yes(jax.grad(lambda w: way.doubled({"w": w, "name": "a text"}))(X) == 2)
    ),
    "runs of `forward` in one eager `jax.grad`, if `forward` saves an intermediate": runs,
    "cotangent of an output that the loss does not use": missing_cotangent,
    "getting values out of the backward pass": lambda way: (
        "no" if way.logs is None else or_error(lambda: yes(way.logs(X) == 1))
    ),
    "a `jax.checkpoint` policy that saves matrix products saves those inside the function too": saves_products(
        POLICIES.dots_saveable
    ),
    "the same with a policy that saves a name": saves_products(POLICIES.save_only_these_names("product")),
    "the same with a policy that moves a name to host memory": saves_products(
        POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["product"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    ),
    "`checkify.check` in the function": checked(lambda f: f),
    "`checkify.check` in the function, in a first derivative": checked(jax.grad),
    "`checkify` names the operation of a NaN, in a first derivative": lambda way: or_error(lambda: names_the_nan(way)),
    "`jax.debug_nans` names the operation, in a first derivative": lambda way: or_error(lambda: debug_nans(way)),
    "an output that nothing uses is dead code": lambda way: or_error(lambda: dead_code(way)),
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


def of_framework(of: Paddle | Torch, doubled: Callable[[Any], Any]) -> tuple[dict[str, str], Any]:
    """Return the cells that torch and Paddle have in common, and tanh with twice its gradient.

    `doubled` is the gradient that `backward` returns for the argument that is a dict, from its cotangent.
    """
    missing: list[Any] = []
    times: list[int] = []
    kept: list[Any] = []

    def round_and_copy(ctx, x):
        ctx.set_materialize_grads(False)
        return of.round(x), of.copy(x)

    def swish(ctx, x):
        times.append(1)
        s = of.sigmoid(x)
        ctx.save_for_backward(x, s)
        return x * s

    def swish_gradient(ctx, dy):
        x, s = of.saved(ctx)
        return dy * s * (1 + x * (1 - s))

    def tanh(ctx, x):
        y = of.tanh(x)
        ctx.save_for_backward(y)
        return y

    def second(f, value):
        x = of.leaf(np.float32(value))
        (first,) = of.slope(f(x), [x], create_graph=True)
        return shown(of.slope(first, [x], create_graph=True)[0])

    rounded = of.layer(round_and_copy, lambda ctx, dy, unused: missing.append(unused) or dy)
    steep_tanh = of.layer(tanh, lambda ctx, dy: 2 * dy * (1 - of.saved(ctx)[0] ** 2)).apply
    straight_through = second(lambda x: rounded.apply(x)[0] ** 3, 1.3)
    of.layer(swish, swish_gradient).apply(of.leaf(X)).backward()
    with of.hooks(lambda x: kept.append(x) or x, lambda x: x):
        steep_tanh(of.leaf(X)).backward()
    clipped = of.leaf(X)
    (5 * of.layer(lambda ctx, x: x * 1, lambda ctx, dy: dy.clip(-1, 1)).apply(clipped)).backward()
    of_tree = of.layer(lambda ctx, tree: 2 * tree["w"], lambda ctx, dy: doubled(dy)).apply
    has_gradient = of.differentiable(of_tree({"w": of.leaf(X), "name": "a text"}))
    return {
        "second derivative of `round(x)³` at 1.3, straight-through": straight_through,
        "second derivative of tanh at 0.3, slope doubled": second(steep_tanh, 0.3),
        "a rule that is not linear, such as clipping": yes(clipped.grad == 1),
        "a dict with an array and a string as the argument": "yes" if has_gradient else "no gradient, no error",
        "runs of `forward` in one eager `jax.grad`, if `forward` saves an intermediate": str(len(times)),
        "cotangent of an output that the loss does not use": "None" if missing[0] is None else "zeros",
        "packing saved tensors, under `jit` too": yes(kept),
    }, steep_tanh


def in_torch(torch: Any) -> dict[str, str]:
    of = Torch(torch)
    found, steep_tanh = of_framework(of, lambda dy: {"w": 2 * dy, "name": None})

    def setup(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    def rule(ctx, d):
        return 2 * d * (1 - ctx.saved_tensors[0] ** 2)

    def tanh(x):
        return of.tanh(x)

    def use(f, name, value):
        with pytest.raises(RuntimeError):
            f(of.function(tanh, rule, setup_context=setup).apply)
        f(of.function(tanh, rule, setup_context=setup, **{name: value}).apply)
        return f"with `{name}`"

    x = torch.full((3,), 0.3)
    return found | {
        "`vmap`": use(lambda f: torch.func.vmap(f)(x), "generate_vmap_rule", True),
        "`jax.hessian` of the same": shown(of.hessian(steep_tanh)(x[0])),
        "`jax.jvp`": use(lambda f: torch.func.jvp(f, (x,), (x,)), "jvp", rule),
    }


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")  # by the imports of torch and Paddle
@pytest.mark.parametrize("name", ["torch", "Paddle"])
def test_a_cell_of_a_framework(name, framework, request):
    if name == "torch":
        found = in_torch(framework("torch"))
    else:
        found, _ = of_framework(Paddle(request.getfixturevalue("paddle")), lambda dy: 2 * dy)
    for row, outcome in found.items():
        assert says(BESIDE[row, name], outcome), (row, outcome)
    for row in set(ROWS) - set(found):
        assert not BESIDE[row, name]
