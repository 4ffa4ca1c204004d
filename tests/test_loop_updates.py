"""State that loops update in place: windows, sums into rows, carries that change places, in arrays
that are donated from call to call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import eggpu as eg

Carry = tuple[Any, ...]


class Host:
    """The operations of a body in NumPy."""

    @staticmethod
    def update(x: np.ndarray, part: np.ndarray, row: int) -> np.ndarray:
        at, out = min(row, len(x) - len(part)), x.copy()
        out[at : at + len(part), : part.shape[1]] = part
        return out

    @staticmethod
    def row(x: np.ndarray, row: int) -> np.ndarray:
        at = min(row, len(x) - 1)
        return x[at : at + 1]

    @staticmethod
    def add_rows(x: np.ndarray, rows: np.ndarray, parts: np.ndarray) -> np.ndarray:
        out = x.copy()
        np.add.at(out, rows, parts)
        return out

    tanh, where, roll = np.tanh, np.where, np.roll


class Traced:
    """The same in eggpu."""

    @staticmethod
    def update(x: Any, part: Any, row: Any) -> Any:
        return eg.dynamic_update_slice(x, part, (row, 0))

    @staticmethod
    def row(x: Any, row: Any) -> Any:
        return eg.dynamic_slice(x, (row, 0), (1, x.shape[1]))

    @staticmethod
    def add_rows(x: Any, rows: Any, parts: Any) -> Any:
        return eg.scatter_add(x, 0, rows, parts)

    tanh, where, roll = eg.tanh, eg.where, eg.roll


def body(seed: int, lib: Any, carry: Carry, x: Any, i: Any) -> tuple[Carry, Carry]:
    """A random run of the loop: the next carry, and a row of results."""
    rng, c, rows = np.random.default_rng(seed), list(carry), []
    for _ in range(rng.integers(2, 8)):
        k, j = (int(n) for n in rng.integers(len(c), size=2))
        match rng.integers(9):
            case 0:
                c[k], c[j] = c[j], c[k]
            case 1:
                c[k] = lib.update(c[k], lib.row(c[j], i % 3) * 0.9 + x[None], (i * 2) % 4)
            case 2:
                c[k] = lib.update(c[k], x[None, :2] + c[j][:1, :2] * 0.1, i)
            case 3:
                c[k] = lib.tanh(c[j] * 0.5 + x[None])
            case 4:
                c[k] = c[j]
            case 5:
                c[k] = lib.roll(c[k], 1, 0)
            case 6:
                c[k] = lib.where(c[k] > c[j], c[k], c[j] * 0.3)
            case 7:
                c[k] = lib.add_rows(c[k], np.array([1, 0, 1], np.int32), c[j][:3] * 0.1)
            case _:
                c[k] = lib.update(c[k], c[k][::-1][:2] * 1.0, 1)  # read where it is written
        if rng.random() < 0.2:
            rows.append(c[k][0] * 1.0)
    return tuple(c), tuple(rows) or (c[0][0] + x,)


def looped(seed: int, carry: Carry, xs: np.ndarray, reverse: bool) -> tuple[Carry, Carry]:
    """The loop in NumPy."""
    steps, rows = range(len(xs)), []
    for i in reversed(steps) if reverse else steps:
        carry, row = body(seed, Host, carry, xs[i], i)
        rows.append(row)
    ordered = rows[::-1] if reverse else rows
    return carry, tuple(np.stack(parts) for parts in zip(*ordered, strict=True))


@pytest.mark.parametrize("donate", [(), ("carry",)], ids=["kept", "donated"])
@pytest.mark.parametrize("seed", range(12))
def test_random_updates_in_a_loop(seed: int, donate: tuple[str, ...]) -> None:
    rng = np.random.default_rng(seed + 100)
    rows, columns, runs, arrays = (
        int(rng.choice(n)) for n in ((3, 4, 7), (2, 3, 8), (1, 3, 6), (1, 2, 3))
    )
    reverse, xs = bool(rng.integers(2)), rng.standard_normal((runs, columns), np.float32)
    want = tuple(rng.standard_normal((arrays, rows, columns), np.float32))

    @eg.compile(donate=donate, optimize=bool(seed % 4), cache=False)
    def step(carry: Carry, xs: Any) -> Any:
        def run(carry: Carry, given: Any) -> tuple[Carry, Carry]:
            return body(seed, Traced, carry, *given)

        numbers = eg.arange(runs)
        return (*eg.scan(run, carry, (xs, numbers), reverse=reverse), sum(c.sum() for c in carry))

    state = tuple(map(eg.put, want))
    for _ in range(3):
        before, total = want, sum(c.sum() for c in want)
        want, expected = looped(seed, want, xs, reverse)
        given = state
        state, results, first = step(given, xs)
        for got, value in zip((*state, *results, first), (*want, *expected, total), strict=True):
            np.testing.assert_allclose(got.numpy(), value, rtol=1e-3, atol=1e-4)
        if not donate:  # arguments stay what they were, on the device too
            for got, value in zip(eg.copy(given), before, strict=True):
                np.testing.assert_allclose(got.numpy(), value, rtol=1e-3, atol=1e-4)
