"""Random programs in blocks of hooks give the numbers that they give without: see programs.py."""

import pytest

from .programs import difference

pytestmark = [pytest.mark.generated, pytest.mark.slow]


@pytest.mark.parametrize("seed", range(7000, 7012))
def test_a_program_in_blocks(seed):
    assert difference(seed) is None
