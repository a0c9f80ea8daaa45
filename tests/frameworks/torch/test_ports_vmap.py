"""A Function's own batching, and NumPy inside of it, here and in real torch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kit.case import numpy_grid as grid
from tests.kit.modes import EAGER_AND_JIT as MODES

from .sides import compare, direction, seen, set_on_both

# torch's own: its first use of forward mode compiles rules by what it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
TABLE = grid(3, 4)
ROW, SWAP = TABLE[0], np.array([1, 0, 3, 2])


def slope(of, f):
    return lambda x: (of.func.grad(f)(x) * of.tensor(direction((4,)))).sum()


def pair(of, f):
    return lambda x: of.xp.stack([f(x), f(x * 2)])


# Of a scalar function of a row.
TRANSFORMS = {
    "plain": lambda of, f: f(of.tensor(ROW)),
    "grad": lambda of, f: of.func.grad(f)(of.tensor(ROW)),
    "grad_of_grad": lambda of, f: of.func.grad(slope(of, f))(of.tensor(ROW)),
    "vmap": lambda of, f: of.mode(of.func.vmap(f))(of.tensor(TABLE)),
    "vmap_over_another_axis": lambda of, f: of.func.vmap(f, 1)(of.tensor(TABLE.T.copy())),
    "vmap_of_grad": lambda of, f: of.mode(of.func.vmap(of.func.grad(f)))(of.tensor(TABLE)),
    "grad_of_vmap": lambda of, f: of.mode(of.func.grad(lambda x: of.func.vmap(f)(x).sum()))(of.tensor(TABLE)),
    "jacrev": lambda of, f: of.func.jacrev(pair(of, f))(of.tensor(ROW)),
    "vmap_of_grad_of_grad": lambda of, f: of.mode(of.func.vmap(of.func.grad(slope(of, f))))(of.tensor(TABLE)),
    "vmap_of_vmap": lambda of, f: of.func.vmap(of.func.vmap(f))(of.tensor(np.stack([TABLE, TABLE * 0.7]))),
    "vmap_of_jacrev": lambda of, f: of.mode(of.func.vmap(of.func.jacrev(pair(of, f))))(of.tensor(TABLE)),
}
LOSSES = {
    "sort": lambda of: of.sine("NumpySort", -1),
    "take": lambda of: lambda x: of.sine("NumpyTake", of.tensor(SWAP), of.tensor(SWAP), 0)(x),
    "SeenVmap": lambda of: lambda x: of.sine("SeenVmap", 0.7)(x, x),
    "Normalize": lambda of: of.sine("Normalize"),
}


@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if name != "vmap_of_jacrev"])
@pytest.mark.parametrize("name", ["sort", "take"])
def test_numpy_inside(both, name, transform):
    """Host code, so without jit, which would need a callback in forward."""
    compare(both, lambda of: TRANSFORMS[transform](of, LOSSES[name](of)))


@pytest.mark.parametrize("name", ["SeenVmap", "Normalize"])
@MODES
def test_gradients_through_vmap(both, name, mode):
    for transform in ("vmap", "vmap_of_grad", "grad_of_vmap", "vmap_of_grad_of_grad", "vmap_of_jacrev"):
        compare(both, lambda of, transform=transform: TRANSFORMS[transform](of, LOSSES[name](of)), mode)


def test_every_output_of_a_mapped_sort(both):
    compare(both, lambda of: of.func.vmap(lambda x: of.layers.NumpySort.apply(x, 0), 1)(of.tensor(TABLE)))


def test_order_mapped_alone(both):
    orders = np.stack([SWAP, SWAP[::-1]])
    compare(
        both, lambda of: of.func.vmap(lambda o: of.layers.NumpyTake.apply(of.tensor(ROW), o, o, 0))(of.tensor(orders))
    )


@pytest.mark.parametrize("in_dims", [(0, 0), (1, None), (None, 0), (1, 0)])
@MODES
def test_what_the_rule_for_vmap_gets(both, monkeypatch, in_dims, mode):
    set_on_both(monkeypatch, both, "SeenVmap", seen=[])
    x = {0: TABLE, 1: TABLE.T.copy(), None: ROW}[in_dims[0]]
    y = ROW * 2 if in_dims[1] is None else TABLE * 2

    def run(of):
        mapped = of.func.vmap(lambda x, y: of.layers.SeenVmap.apply(x, y, 0.7), in_dims)
        return of.mode(mapped)(of.tensor(x), of.tensor(y))

    compare(both, run, mode)
    theirs, ours = seen(both, "SeenVmap")
    assert theirs == [(3, (*in_dims, None))]
    assert ours == theirs[0]
