"""The order of kernels: what must come before what, and orders that need less memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .kernel import KernelSource
from .repeat import LoopSource


@dataclass(frozen=True, slots=True)
class Step:
    """A kernel with its values as numbers; `group` is the group that it belongs to."""

    source: KernelSource | LoopSource
    group: int
    writes: tuple[int, ...]
    reads: tuple[int, ...]


Before = list[set[int]]
"""`before[k]` are the steps that must run before step k."""


def dependencies(steps: Sequence[Step]) -> Before:
    """What each step waits for, given a legal order: a read for writes, a write for both."""
    before: Before = [set() for _ in steps]
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for k, step in enumerate(steps):
        for value in step.reads:
            if value in writer:
                before[k].add(writer[value])
            readers.setdefault(value, []).append(k)
        for value in step.writes:
            before[k].update(readers.pop(value, ()))
            if value in writer:
                before[k].add(writer[value])
            writer[value] = k
    return before


def free_early(before: Before, steps: Sequence[Step], pairs: Mapping[int, int]) -> Before:
    """`before` and, where no cycle arises, the reads of a pair's input before its output's write.

    `pairs` maps output values to the input values whose memory they should take.
    """
    before = [set(b) for b in before]
    readers: dict[int, list[int]] = {}
    writer: dict[int, int] = {}
    for k, step in enumerate(steps):
        for value in step.reads:
            readers.setdefault(value, []).append(k)
        for value in step.writes:
            writer.setdefault(value, k)
    wanted = [
        (reader, writer[output])
        for output, input_ in pairs.items()
        for reader in readers.get(input_, ())
        if output in writer and reader != writer[output]
    ]
    # Those that follow the given order never close a cycle; the others may.
    for reader, write in wanted:
        if reader < write:
            before[write].add(reader)
    for reader, write in wanted:
        if reader > write and not _comes_before(before, write, reader):
            before[write].add(reader)
    return before


def _comes_before(before: Before, first: int, second: int) -> bool:
    """Whether `first` must run before `second`."""
    seen, stack = {second}, [second]
    while stack:
        for k in before[stack.pop()]:
            if k == first:
                return True
            if k not in seen:
                seen.add(k)
                stack.append(k)
    return False


def stable(before: Before) -> list[int]:
    """The legal order closest to the given one: always the first step that may run."""
    return _run(before, _Given())


def frugal(before: Before, steps: Sequence[Step], scratch: Mapping[int, int]) -> list[int]:
    """A legal order that always runs the step that adds least to live memory, the first of equals.

    `scratch` maps the values that live only between steps to their bytes.
    """
    return _run(before, _Memory(steps, scratch))


def lazy(before: Before, steps: Sequence[Step], scratch: Mapping[int, int]) -> list[int]:
    """`frugal` from the end to the start; of equals, the step at the end of the longest path.

    So a step that only reads inputs runs as late as it can, and an update follows its gradient.
    """
    depth: dict[int, int] = {}
    for k in stable(before):
        depth[k] = 1 + max((depth[j] for j in before[k]), default=0)
    after: Before = [set() for _ in steps]
    for k, earlier in enumerate(before):
        for j in earlier:
            after[j].add(k)
    return _run(after, _Memory(steps, scratch), [(-depth[k], -k) for k in range(len(steps))])[::-1]


class _Given:
    """Every step is as good as another."""

    def cost(self, step: int) -> int:
        return 0

    def ran(self, step: int) -> Iterable[int]:
        return ()


class _Memory:
    """Bytes that a step adds to live memory, as steps run: a value lives from first to last use."""

    def __init__(self, steps: Sequence[Step], scratch: Mapping[int, int]) -> None:
        self._scratch = scratch
        used = [dict.fromkeys((*s.reads, *s.writes)) for s in steps]
        self._used = [[v for v in values if v in scratch] for values in used]
        self._users: dict[int, set[int]] = {}
        for k, values in enumerate(self._used):
            for value in values:
                self._users.setdefault(value, set()).add(k)
        self._alive: set[int] = set()

    def cost(self, step: int) -> int:
        made = sum(self._scratch[v] for v in self._used[step] if v not in self._alive)
        freed = sum(self._scratch[v] for v in self._used[step] if len(self._users[v]) == 1)
        return made - freed

    def ran(self, step: int) -> Iterable[int]:
        """Notes that `step` ran; gives the steps that cost less now."""
        changed: set[int] = set()
        for value in self._used[step]:
            users = self._users[value]
            users.discard(step)
            if len(users) == 1 or value not in self._alive:
                changed |= users
            self._alive.add(value)
        return changed


def _run(
    before: Before, costs: _Given | _Memory, ranks: Sequence[tuple[int, int]] | None = None
) -> list[int]:
    """A legal order: always the cheapest of the steps that may run; of equals the least in rank."""
    ranks = ranks or [(k, 0) for k in range(len(before))]
    after: list[list[int]] = [[] for _ in before]
    waits = [len(b) for b in before]
    for k, earlier in enumerate(before):
        for j in earlier:
            after[j].append(k)
    ready = [(costs.cost(k), ranks[k], k) for k, n in enumerate(waits) if n == 0]
    heapq.heapify(ready)
    done = [False] * len(before)
    order: list[int] = []
    while ready:
        cost, rank, k = heapq.heappop(ready)
        if done[k]:
            continue
        now = costs.cost(k)
        if cost != now:
            heapq.heappush(ready, (now, rank, k))
            continue
        done[k] = True
        order.append(k)
        changed = [j for j in costs.ran(k) if waits[j] == 0 and not done[j]]
        for j in after[k]:
            waits[j] -= 1
            if waits[j] == 0:
                changed.append(j)
        for j in changed:
            heapq.heappush(ready, (costs.cost(j), ranks[j], j))
    return order
