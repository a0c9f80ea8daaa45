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


@pytest.mark.frameworks
def test_each_row_of_operations_gives_the_same(paddle):
    (table,) = re.findall(r"^\| Paddle \| here \|\n.*?\n\n", section("## Operations, name by name"), re.M | re.S)
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


@pytest.mark.frameworks
def test_each_silent_difference_to_torch_is_one_and_has_a_way_to_write_it(framework):
    torch = framework("torch")
    (table,) = re.findall(r"^\| torch \|.*?\n\n", section("## Operations, name by name"), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(.*?)` \| `(.*?)` \| `(.*?)`.* \|$", table, re.MULTILINE)
    assert len(rows) == table.count("\n| `") > 5
    x = np.array([[-1.3, 0.4, 0.9], [0.2, -0.6, 1.7]], np.float32)
    for theirs, same_text, right in rows:
        expected = np.asarray(eval(theirs, {"torch": torch, "x": torch.tensor(x)}))
        silent, got = (
            np.asarray(eval(text, {"jax": jax, "jnp": jnp, "x": jnp.asarray(x)})) for text in (same_text, right)
        )
        assert silent.shape != expected.shape or not np.allclose(silent, expected, rtol=1e-5), theirs
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6, err_msg=theirs)
