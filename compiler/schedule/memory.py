"""Where values lie: scratch memory shared by values that never live at once, and outputs written
over donated inputs."""

from __future__ import annotations

import re
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Item:
    """A value to place: its bytes, and the first and last kernel that touch it."""

    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`places[i]` is the (block, offset) of item i; `blocks` are bytes."""

    places: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.blocks)


def aligned(nbytes: int, alignment: int) -> int:
    """The next multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def lay_out(items: Sequence[Item], alignment: int, limit: int) -> Layout:
    """Blocks of at most `limit` bytes in which items whose lifetimes meet do not overlap.

    Items are placed one by one, each in the gap that it fills best; the better of two orders is
    kept: by size, and by size times lifetime. At most the sum of the items' aligned bytes is used.
    """
    numbers = range(len(items))
    by_size = sorted(numbers, key=lambda i: (-items[i].nbytes, items[i].first, i))
    layout = _place(items, by_size, alignment, limit)
    if layout.nbytes <= most_alive(items, alignment):
        return layout
    by_area = sorted(
        numbers, key=lambda i: (-items[i].nbytes * _lifetime(items[i]), items[i].first, i)
    )
    return min(layout, _place(items, by_area, alignment, limit), key=lambda x: x.nbytes)


def most_alive(items: Sequence[Item], alignment: int) -> int:
    """The most bytes alive at once: no layout takes less, but for the last item's padding."""
    changes: dict[int, int] = {}
    for item in items:
        changes[item.first] = changes.get(item.first, 0) + aligned(item.nbytes, alignment)
        changes[item.last + 1] = changes.get(item.last + 1, 0) - aligned(item.nbytes, alignment)
    most = now = 0
    for step in sorted(changes):
        now += changes[step]
        most = max(most, now)
    return most


@dataclass(slots=True)
class _Block:
    """A block while it fills: ranges (offset, aligned end, first and last kernel) by offset."""

    size: int = 0
    ranges: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])

    def fit(self, item: Item, limit: int) -> tuple[int, int, int] | None:
        """(growth of the block, bytes of the gap left over, offset): the best place for `item`."""
        best, at, nbytes, starts, ends = None, 0, item.nbytes, item.first, item.last
        for offset, end, first, last in self.ranges:
            if first > ends or last < starts:
                continue
            left_over = offset - at - nbytes
            if left_over >= 0 and (best is None or left_over < best[1]):
                best = (0, left_over, at)
            if end > at:
                at = end
        left_over = self.size - at - item.nbytes
        tail = (max(-left_over, 0), max(left_over, 0), at)
        if at + item.nbytes <= limit and (best is None or tail < best):
            best = tail
        return best


def _place(items: Sequence[Item], order: Sequence[int], alignment: int, limit: int) -> Layout:
    blocks: list[_Block] = []
    places: dict[int, tuple[int, int]] = {}
    for i in order:
        item = items[i]
        fits = [(*fit, b) for b, block in enumerate(blocks) if (fit := block.fit(item, limit))]
        _, _, offset, number = min(fits, default=(0, 0, 0, len(blocks)))
        if number == len(blocks):
            blocks.append(_Block())
        block, end = blocks[number], offset + item.nbytes
        insort(block.ranges, (offset, aligned(end, alignment), item.first, item.last))
        block.size = max(block.size, end)
        places[i] = (number, offset)
    return Layout(tuple(places[i] for i in range(len(items))), tuple(b.size for b in blocks))


def _lifetime(item: Item) -> int:
    return item.last - item.first + 1


@dataclass(frozen=True, slots=True)
class Named:
    """An input or an output that may share memory with one of the other kind."""

    value: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def path(self) -> tuple[str, ...]:
        return _path(self.name)


@lru_cache(maxsize=1 << 14)
def _path(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", name))


Key = tuple[str, int, tuple[str, ...], tuple[int, ...] | None]


def pair(
    outputs: Sequence[Named], inputs: Sequence[Named], legal: Callable[[int, int], bool]
) -> dict[int, int]:
    """Which output value goes into which input's memory: equal dtypes and bytes, each input once.

    The longest common end of names goes first (`0.layer.w` into `model.layer.w`), then equal
    shapes, then the order. `legal(output, input)` says whether the kernels allow it.
    """
    chosen: dict[int, int] = {}
    taken: set[int] = set()
    longest = max((len(x.path) for x in (*outputs, *inputs)), default=0)
    for length in range(longest, -1, -1):
        for same_shape in (True, False):
            free: dict[Key, list[int]] = {}
            for x in inputs:
                if x.value not in taken and len(x.path) >= length:
                    free.setdefault(_key(x, length, same_shape), []).append(x.value)
            for y in outputs:
                if y.value in chosen or len(y.path) < length:
                    continue
                for x in free.get(_key(y, length, same_shape), ()):
                    if x not in taken and legal(y.value, x):
                        chosen[y.value] = x
                        taken.add(x)
                        break
    return chosen


def _key(x: Named, length: int, same_shape: bool) -> Key:
    return (x.dtype, x.nbytes, x.path[len(x.path) - length :], x.shape if same_shape else None)
