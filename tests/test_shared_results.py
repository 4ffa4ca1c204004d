"""Two results of a plan that are one value, in the memory of a donated argument."""

import numpy as np

import eggpu as eg


def test_one_value_is_two_results_in_a_donated_argument():
    def both(x, y):
        z = x + y
        return z, z.reshape((2, 2)), y * 2

    f = eg.compile(both, donate=("x",), cache=False)
    x, y = np.arange(4, dtype=np.int32), np.ones(4, np.int32)
    flat, _, _ = f(x, y)
    again, _, _ = f(flat, y)
    np.testing.assert_array_equal(again.numpy(), x + 2)
