"""notebooks/porting.md: names in its tables exist in torch and Paddle; the two columns of operations agree."""

import pkgutil
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import FunctionCtx

PAGE = Path(__file__).parents[2] / "notebooks" / "porting.md"


def section(title):
    (text,) = (part for part in re.split(r"^(?=## )", PAGE.read_text(), flags=re.MULTILINE) if part.startswith(title))
    return text


@pytest.mark.frameworks
def test_each_column_of_the_table_has_real_names(framework, paddle):
    torch = framework("torch")
    columns = (  # what ctx and x are
        {"ctx": paddle.autograd.PyLayerContext, "x": paddle.ones([1])},
        {"ctx": torch.autograd.Function, "x": torch.ones(1)},
        {"ctx": FunctionCtx},
    )
    for row in re.findall(r"^\| .*", section("## Name by name"), re.MULTILINE)[1:]:
        for stands_for, cell in zip(columns, re.split(r" *\| *", row)[1:], strict=False):
            # `y` is what `x` is, and `ctx.anything` is any name of the user's.
            for name in re.findall(r"`(?!ctx\.anything|y\.)([a-z_]+(?:\.\w+)+)", cell):
                first, _, rest = name.partition(".")
                assert hasattr(stands_for[first], rest) if first in stands_for else pkgutil.resolve_name(name), name


@pytest.mark.frameworks
def test_the_table_of_fleet_has_real_names(paddle):
    table = section("## Fleet, name by name")
    short = dict(re.findall(r"`(\w+)` is\s+`([\w.]+)`", table))
    names = re.findall(r"\b((?:paddle|jax|mp_ops|sp)(?:\.[a-zA-Z]\w*|\._\w+)+)", table)
    assert {"mp_ops._c_identity", "sp.AllGatherOp.apply", "jax.lax.pcast", "paddle.nn.SyncBatchNorm"} <= set(names)
    for name in names:
        first, _, rest = name.partition(".")
        pkgutil.resolve_name(f"{short.get(first, first)}.{rest}")


VALUES = {"x": np.array([[-1.3, 0.4, 0.9], [0.2, -0.6, 1.7]], np.float32), "i": np.array([1, 0])}


def rows_of(header, columns=2):
    """Return the code in each row of the table of operations whose header begins so."""
    (table,) = re.findall(rf"^\| {header} \|.*?\n\n", section("## Operations, name by name"), re.M | re.S)
    rows = re.findall(rf"^\| {'.*? [|] '.join(['`(.*?)`'] * columns)}.* \|$", table, re.M)
    assert len(rows) == table.count("\n| `") > 5
    return rows


def value_of(text, **names):
    """Return the value of the last of several statements."""
    *statements, last = text.split("; ")
    exec("\n".join(statements), names)
    return eval(last, names)


def in_jax(text, transform=lambda f: f):
    f = transform(lambda values: value_of(text, jax=jax, jnp=jnp, **values))
    return f(jax.tree.map(jnp.asarray, VALUES))


def in_torch(text, torch):
    return value_of(text, torch=torch, **jax.tree.map(torch.tensor, VALUES))


def in_paddle(text, paddle):
    return value_of(text, paddle=paddle, **jax.tree.map(paddle.to_tensor, VALUES))


def assert_same(got, expected, text):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        other = np.asarray(other)
        assert (one.shape if hasattr(one, "shape") else ()) == other.shape, text
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=text)


@pytest.mark.frameworks
def test_each_row_of_operations_gives_the_same(paddle):
    for theirs, ours in rows_of("Paddle"):
        assert_same(in_jax(ours), in_paddle(theirs, paddle), theirs)


@pytest.mark.frameworks
def test_what_is_an_error_in_jax_has_a_way_to_write_it_under_jit(framework, paddle):
    torch = framework("torch")
    for text, ours in rows_of("torch and Paddle"):
        for expected in in_torch(text, torch), in_paddle(text, paddle):
            assert_same(in_jax(ours, jax.jit), expected, text)
        with pytest.raises((AttributeError, IndexError)):
            in_jax(text, jax.jit)


@pytest.mark.frameworks
def test_each_silent_difference_to_torch_is_one_and_has_a_way_to_write_it(framework):
    torch = framework("torch")
    for theirs, same_text, right in rows_of("torch", 3):
        expected, silent = np.asarray(in_torch(theirs, torch)), np.asarray(in_jax(same_text))
        assert silent.shape != expected.shape or not np.allclose(silent, expected, rtol=1e-5), theirs
        assert_same(in_jax(right), expected, theirs)
