"""Random programs under pairs that recompute tensors have the gradients that they have without: see recomputed.py."""

import pytest

from .recomputed import failure

pytestmark = [pytest.mark.generated, pytest.mark.slow]


@pytest.mark.parametrize("seed", range(5000, 5014))
def test_a_program_under_a_pair_that_recomputes(seed):
    assert failure(seed, in_block=seed % 7 == 0) is None
