"""Random programs under pairs of hooks have the gradients that they have without: see programs.py."""

import pytest

from .programs import failure

pytestmark = [pytest.mark.generated, pytest.mark.slow]


@pytest.mark.parametrize("seed", range(5000, 5026))
def test_a_program_under_a_pair(seed):
    assert failure(seed, in_block=seed % 7 == 0) is None
