"""What the search expects of kernels on llvmpipe that read values of rows and columns again, and of
rows whose length is no multiple of four."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eggpu.compiler.pipeline import compile_graph
from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE, Target
from eggpu.compiler.tracing import trace
from eggpu.compiler.types import parse_type

ROWS = 1024


def predicted(target: Target, f: Callable[..., Any], *shapes: tuple[int, ...]) -> float:
    """us of the only kernel."""
    types = [parse_type(f"f32{[*shape]}") for shape in shapes]
    (kernel,) = compile_graph(trace(f, *types), target).plan.kernels
    return kernel.predicted_ns / 1e3


def scaled(x: Any, y: Any) -> Any:
    return x * y


@pytest.mark.parametrize("shared", [(ROWS, 1), (1, 1024)])
def test_values_that_are_read_again_take_time(shared: tuple[int, int]) -> None:
    shape = (ROWS, 1024)
    plain = predicted(LLVMPIPE, lambda x: x * 2.0, shape)
    again = predicted(LLVMPIPE, scaled, shape, shared)
    other = predicted(LLVMPIPE, scaled, shape, shape)
    assert plain < again < (plain + other) / 2


@pytest.mark.parametrize("columns", [1, 0])
def test_more_where_neighbours_are_no_four(columns: int) -> None:
    """On a GPU, neighbouring threads read neighbouring elements in any case."""

    def us(target: Target, length: int) -> float:
        shared = (1, length) if columns else (ROWS, 1)
        return predicted(target, scaled, (ROWS, length), shared)

    assert us(LLVMPIPE, 1021) > 1.2 * us(LLVMPIPE, 1024)
    assert us(FLOOR, 1021) < us(FLOOR, 1024)


def test_rows_in_single_elements_take_longer() -> None:
    def us(target: Target, length: int) -> float:
        return predicted(target, lambda x: x.sum(-1), (ROWS, length))

    assert us(LLVMPIPE, 333) > 1.2 * us(LLVMPIPE, 336)
    assert us(LLVMPIPE, 1021) < us(LLVMPIPE, 1024)  # vec4s but for both ends
    assert us(FLOOR, 333) < us(FLOOR, 336)
