"""notebooks/packing.md: what it says of memory holds for the programs of its tables."""

import jax
import pytest

from .packing import PLACES, PROGRAMS, README, in_short, measure

pytestmark = pytest.mark.slow


def memory(figures, packer, kind="temp"):
    return figures[packer][kind] / figures["plain"][kind]


@pytest.mark.skipif(jax.__version__ < "0.12", reason="the compiler of jax 0.10 gains little")
def test_packing_pays_where_activations_dominate():
    figures = measure("relu, batch 4096", "loss", rounds=0)
    assert memory(figures, "8 bits") < 0.65
    assert memory(figures, "8 bits", "held") < 0.2
    assert memory(figures, "cast") < 0.75
    assert figures["8 bits"]["error"] < 1e-3


def test_packing_does_not_pay_where_weights_dominate():
    figures = measure("gelu, 1024 wide, batch 16", "loss", rounds=0)
    assert 0.9 < memory(figures, "8 bits") < 1.05


def test_a_block_around_each_layer_holds_more_than_one_around_the_loss():
    around_loss, around_each = (measure("gelu, batch 4096", place, rounds=0) for place in ("loss", "layer"))
    for packer in ("cast", "8 bits"):
        assert around_each[packer]["held"] > 1.15 * around_loss[packer]["held"]


def test_the_table_of_the_readme_is_as_the_script_writes_it():
    figures = {"temp": 1.0, "held": 1.0, "time": [0.5, 1.0, 1.5], "error": 0.01}
    every = dict.fromkeys(("plain", "cast", "8 bits", "checkpoint"), figures)
    written = in_short({f"{name} | {PLACES[place]}": every for name, place in PROGRAMS})
    shown = README.read_text().split("<!-- table: packing -->\n")[1].split("<!-- end -->")[0]
    first = [[row.split("|")[1] for row in table.splitlines()] for table in (written, shown)]
    assert first[0] == first[1]
