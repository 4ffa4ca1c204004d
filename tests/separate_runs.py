"""Functions compiled as a whole, and op by op."""

from __future__ import annotations

import numpy as np
import pytest

import eggpu as eg


@pytest.fixture(name="run", params=[True, False], ids=["optimized", "separate"])
def both_ways(request):
    """Compile a function, call it, give NumPy arrays."""

    def call(function, *args):
        out = eg.compile(function, optimize=request.param)(*args)
        return eg.tree_map(np.asarray, out)

    return call


def f32(*values):
    return np.array(values, np.float32)
