"""What only the causal convolution has: a window that may be longer than a cell. Its laws are in test_recurrent.py."""

from __future__ import annotations

import pytest

from tests.support.kernels.causal_conv import make_rig


@pytest.mark.parametrize("cell", [2, 8, 64])
def test_windows_may_reach_behind_the_cell(cell):
    rig = make_rig([40, 31], cell=cell)
    rig.run([1, 2, 3])
