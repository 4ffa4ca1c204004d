"""How a heavy template reads operands and writes results: through callables that return WGSL lines.

The code generator inlines prologues, epilogues, transposes, broadcasts and masks in these
callables, so one template serves them all. Rules for the text they return:

* Coordinates are WGSL u32 expressions, mostly names, and in range: the template clamps and guards.
* `Load` ends by declaring `let {result}`. Further names it declares start with `{result}_`.
* `Store` text stands in a scope of its own; it may declare names other than its coordinates.
* Loads may stand in loops and in divergent branches: no barriers and no subgroup operations.
* Bindings, constants and functions that the text needs go into the render value `header`.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

Axis = Literal["none", "m", "n", "k"]
"""The axis of a contraction's operand along which four elements can be had by one load.

An axis may be named only when its extent is a multiple of 4; the template loads at multiples of 4.
"""


class Load(Protocol):
    def __call__(
        self, name: str, result: str, coords: tuple[str, ...], vec: int = 1, axis: int | None = None
    ) -> str:
        """WGSL lines that define `let {result}`: operand `name` at `coords`.

        With vec=4 the result is vec4<f32> of the four elements from `coords` on along coords[axis].
        With vec=1 it is f32, or bool for a mask.

        contraction   a (batch, m, k); b (batch, k, n)
        attention     q, o, do (bh, query, d); k, v (bh, key, d); mask, bias (bh, query, key);
                      stats (bh, query, 0: maximum, 1: reciprocal of the sum); delta (bh, query)
        """
        ...


class Store(Protocol):
    def __call__(self, coords: tuple[str, ...], value: str, vec: int = 1) -> str:
        """WGSL lines that apply the epilogue to `value` and write it.

        The value is f32, or with vec=4 vec4<f32> along the last axis.

        contraction   (batch, m, n); with split-K the value is a partial sum and the batch
                      coordinate is split * batch_count + batch
        attention     store_o, store_dq (bh, query, d); store_dk, store_dv (bh, key, d);
                      store_stats (bh, query, 0: maximum, 1: reciprocal of the sum)
        """
        ...


def swapped(values: dict[str, Any]) -> dict[str, Any]:
    """The render values of the transposed product c^T = b^T a^T: for few columns.

    Wraps `load` and `store`, exchanges M with N and the vector axes. Four results side by side then
    lie along m, so results are stored one by one.
    """
    load, store = values["load"], values["store"]
    other = {"m": "n", "n": "m", "k": "k", "none": "none"}

    def load_swapped(
        name: str, result: str, coords: tuple[str, ...], vec: int = 1, axis: int | None = None
    ) -> str:
        batch, row, column = coords
        flipped = None if axis is None else (0, 2, 1)[axis]
        return load({"a": "b", "b": "a"}[name], result, (batch, column, row), vec, flipped)

    def store_swapped(coords: tuple[str, ...], value: str, vec: int = 1) -> str:
        batch, row, column = coords
        return store((batch, column, row), value, vec)

    return values | {
        "load": load_swapped,
        "store": store_swapped,
        "M": values["N"],
        "N": values["M"],
        "a_vec_axis": other[values["b_vec_axis"]],
        "b_vec_axis": other[values["a_vec_axis"]],
        "store_vec": 1,
    }
