"""A Function's own batching, and NumPy inside of it, here and in real torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit.case import numpy_grid as grid
from tests.kit.modes import EAGER_AND_JIT as MODES

from .layers import ported
from .sides import (
    assert_equal,
    direction,
    weights,
)

# torch's own: its first use of forward mode compiles rules by what it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
TABLE = grid(3, 4)
SWAP = np.array([1, 0, 3, 2])


def numpy_functions(torch, original):
    """Pairs of the same scalar function of a row: sorted, and taken."""

    def theirs_sorted(x):
        return (torch.sin(original.NumpySort.apply(x, -1)[0]) * torch.tensor(weights((4,)))).sum()

    def ours_sorted(x):
        return (jnp.sin(ported.NumpySort.apply(x, -1)[0]) * weights((4,))).sum()

    def theirs_taken(x):
        order = torch.tensor(SWAP)
        return (torch.sin(original.NumpyTake.apply(x, order, order, 0)) * torch.tensor(weights((4,)))).sum()

    def ours_taken(x):
        order = jnp.asarray(SWAP)
        return (jnp.sin(ported.NumpyTake.apply(x, order, order, 0)) * weights((4,))).sum()

    return {"sort": (theirs_sorted, ours_sorted), "take": (theirs_taken, ours_taken)}


@pytest.mark.parametrize("name", ["sort", "take"])
class TestNumpyInside:
    """Host code, so without jit, which would need a callback in forward."""

    @pytest.fixture
    def pair(self, torch, original, name):
        return numpy_functions(torch, original)[name]

    def test_plain(self, torch, pair, name):
        theirs, ours = pair
        assert_equal(ours(jnp.asarray(TABLE[0])), theirs(torch.tensor(TABLE[0])))

    def test_grad(self, torch, pair, name):
        theirs, ours = pair
        assert_equal(jax.grad(ours)(jnp.asarray(TABLE[0])), torch.func.grad(theirs)(torch.tensor(TABLE[0])))

    def test_grad_of_grad(self, torch, pair, name):
        theirs, ours = pair
        d = direction((4,))
        expected = torch.func.grad(lambda x: (torch.func.grad(theirs)(x) * torch.tensor(d)).sum())(
            torch.tensor(TABLE[0])
        )
        assert_equal(jax.grad(lambda x: (jax.grad(ours)(x) * d).sum())(jnp.asarray(TABLE[0])), expected)

    def test_vmap(self, torch, pair, name):
        theirs, ours = pair
        assert_equal(jax.vmap(ours)(jnp.asarray(TABLE)), torch.func.vmap(theirs)(torch.tensor(TABLE)))

    def test_vmap_over_another_axis(self, torch, pair, name):
        theirs, ours = pair
        expected = torch.func.vmap(theirs, in_dims=1)(torch.tensor(TABLE.T.copy()))
        assert_equal(jax.vmap(ours, in_axes=1)(jnp.asarray(TABLE.T)), expected)

    def test_vmap_of_grad(self, torch, pair, name):
        theirs, ours = pair
        expected = torch.func.vmap(torch.func.grad(theirs))(torch.tensor(TABLE))
        assert_equal(jax.vmap(jax.grad(ours))(jnp.asarray(TABLE)), expected)

    def test_grad_of_vmap(self, torch, pair, name):
        theirs, ours = pair
        expected = torch.func.grad(lambda x: torch.func.vmap(theirs)(x).sum())(torch.tensor(TABLE))
        assert_equal(jax.grad(lambda x: jax.vmap(ours)(x).sum())(jnp.asarray(TABLE)), expected)

    def test_jacrev(self, torch, pair, name):
        theirs, ours = pair
        expected = torch.func.jacrev(lambda x: torch.stack([theirs(x), theirs(x * 2)]))(torch.tensor(TABLE[0]))
        assert_equal(jax.jacrev(lambda x: jnp.stack([ours(x), ours(x * 2)]))(jnp.asarray(TABLE[0])), expected)

    def test_vmap_of_grad_of_grad(self, torch, pair, name):
        theirs, ours = pair
        func, d = torch.func, direction((4,))
        expected = func.vmap(func.grad(lambda x: (func.grad(theirs)(x) * torch.tensor(d)).sum()))(torch.tensor(TABLE))
        found = jax.vmap(jax.grad(lambda x: (jax.grad(ours)(x) * d).sum()))(jnp.asarray(TABLE))
        assert_equal(found, expected)

    def test_vmap_of_vmap(self, torch, pair, name):
        theirs, ours = pair
        twice = np.stack([TABLE, TABLE * np.float32(0.7)])
        expected = torch.func.vmap(torch.func.vmap(theirs))(torch.tensor(twice))
        assert_equal(jax.vmap(jax.vmap(ours))(jnp.asarray(twice)), expected)


def test_every_output_of_a_mapped_sort(torch, original):
    expected = torch.func.vmap(lambda x: original.NumpySort.apply(x, 0), in_dims=1)(torch.tensor(TABLE))
    assert_equal(jax.vmap(lambda x: ported.NumpySort.apply(x, 0), in_axes=1)(jnp.asarray(TABLE)), expected)


def test_order_mapped_alone(torch, original):
    orders, row = np.stack([SWAP, SWAP[::-1]]), TABLE[0]
    take = lambda m, x: lambda o: m.NumpyTake.apply(x, o, o, 0)  # noqa: E731
    expected = torch.func.vmap(take(original, torch.tensor(row)))(torch.tensor(orders))
    assert_equal(jax.vmap(take(ported, jnp.asarray(row)))(jnp.asarray(orders)), expected)


@pytest.mark.parametrize("in_dims", [(0, 0), (1, None), (None, 0), (1, 0)])
@MODES
def test_what_the_rule_for_vmap_gets(torch, original, monkeypatch, in_dims, mode):
    for module in (original, ported):
        monkeypatch.setattr(module.SeenVmap, "seen", [])
    x = {0: TABLE, 1: TABLE.T.copy(), None: TABLE[0]}[in_dims[0]]
    y = TABLE[0] * 2 if in_dims[1] is None else TABLE * 2
    theirs = torch.func.vmap(lambda x, y: original.SeenVmap.apply(x, y, 0.7), in_dims=in_dims)
    ours = mode(jax.vmap(lambda x, y: ported.SeenVmap.apply(x, y, 0.7), in_axes=in_dims))
    assert_equal(ours(jnp.asarray(x), jnp.asarray(y)), theirs(torch.tensor(x), torch.tensor(y)))
    assert original.SeenVmap.seen == [(3, (*in_dims, None))]
    assert ported.SeenVmap.seen[-1] == original.SeenVmap.seen[0]


@pytest.mark.parametrize("name", ["SeenVmap", "Normalize"])
@MODES
def test_gradients_through_vmap(torch, original, name, mode):
    def theirs(x):
        layer = getattr(original, name)
        return torch.sin(layer.apply(x, x, 0.7) if name == "SeenVmap" else layer.apply(x)[0]).sum()

    def ours(x):
        layer = getattr(ported, name)
        return jnp.sin(layer.apply(x, x, 0.7) if name == "SeenVmap" else layer.apply(x)[0]).sum()

    func, x, y = torch.func, torch.tensor(TABLE), jnp.asarray(TABLE)
    assert_equal(mode(jax.vmap(ours))(y), func.vmap(theirs)(x))
    assert_equal(mode(jax.vmap(jax.grad(ours)))(y), func.vmap(func.grad(theirs))(x))
    expected = func.grad(lambda x: func.vmap(theirs)(x).sum())(x)
    assert_equal(mode(jax.grad(lambda x: jax.vmap(ours)(x).sum()))(y), expected)
    expected = func.vmap(func.grad(lambda x: func.grad(theirs)(x).sum()))(x)
    assert_equal(mode(jax.vmap(jax.grad(lambda x: jax.grad(ours)(x).sum())))(y), expected)
    expected = func.vmap(func.jacrev(lambda x: torch.stack([theirs(x), theirs(x * 2)])))(x)
    assert_equal(mode(jax.vmap(jax.jacrev(lambda x: jnp.stack([ours(x), ours(x * 2)]))))(y), expected)
