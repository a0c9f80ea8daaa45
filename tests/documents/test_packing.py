"""notebooks/packing.md: what it says of memory holds for the programs of its tables."""

import jax
import pytest

from notebooks.tools.packing import CHECKPOINT, compare, deep_programs, measure
from pylayer_jax.packers import recompute_saved

pytestmark = pytest.mark.slow


def memory(figures, packer, kind="temp_bytes"):
    return figures[packer][kind] / figures["plain"][kind]


@pytest.mark.skipif(jax.__version__ < "0.12", reason="the compiler of jax 0.10 gains little")
def test_packing_pays_where_activations_dominate():
    figures = measure("relu, batch 4096", "loss", rounds=0)
    assert memory(figures, "8 bits") < 0.65
    assert memory(figures, "8 bits", "held_bytes") < 0.2
    assert memory(figures, "cast") < 0.75
    assert figures["8 bits"]["error"] < 1e-3


def test_packing_does_not_pay_where_weights_dominate():
    figures = measure("gelu, 1024 wide, batch 16", "loss", rounds=0)
    assert 0.9 < memory(figures, "8 bits") < 1.05


def test_a_block_around_each_layer_holds_more_than_one_around_the_loss():
    around_loss, around_each = (measure("gelu, batch 4096", place, rounds=0) for place in ("loss", "layer"))
    for packer in ("cast", "8 bits"):
        assert around_each[packer]["held_bytes"] > 1.15 * around_loss[packer]["held_bytes"]


@pytest.mark.skipif(jax.__version__ < "0.12", reason="the compiler of jax 0.10 gains little")
def test_a_limit_takes_less_memory_and_fewer_operations_than_checkpoints():
    losses, args = deep_programs(6, scans=False)
    policy = "the same, `dots_with_no_batch_dims_saveable`"
    losses = {name: losses[name] for name in ("plain", CHECKPOINT, policy)}
    losses |= {size: recompute_saved(limit=f"{size} MiB")(losses["plain"]) for size in (12, 36)}
    rows = compare(losses, *args, rounds=0)
    for size, other in (("12", CHECKPOINT), ("36", policy)):
        assert rows[size]["temp_bytes"] < 1.02 * rows[other]["temp_bytes"]
        assert rows[size]["operations"] < rows[other]["operations"]
        assert rows[size]["error"] < 1e-5
