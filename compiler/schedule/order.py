"""The order of kernels: what must come before what, and orders that need less memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .kernel import KernelSource


@dataclass(frozen=True, slots=True)
class Step:
    """A kernel with its values as numbers; `group` is the group that it belongs to."""

    source: KernelSource
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


class _Given:
    """Every step is as good as another."""

    def cost(self, step: int) -> int:
        return 0

    def ran(self, step: int) -> Iterable[int]:
        return ()


class _Memory:
    """Bytes that a step adds to the live memory, kept up to date as steps run."""

    def __init__(self, steps: Sequence[Step], scratch: Mapping[int, int]) -> None:
        self._scratch = scratch
        self._made = [[v for v in s.writes if v in scratch] for s in steps]
        self._used = [
            list(dict.fromkeys(v for v in (*s.reads, *s.writes) if v in scratch)) for s in steps
        ]
        self._users: dict[int, set[int]] = {}
        for k, used in enumerate(self._used):
            for value in used:
                self._users.setdefault(value, set()).add(k)
        self._alive: set[int] = set()

    def cost(self, step: int) -> int:
        made = sum(self._scratch[v] for v in self._made[step] if v not in self._alive)
        freed = sum(self._scratch[v] for v in self._used[step] if len(self._users[v]) == 1)
        return made - freed

    def ran(self, step: int) -> Iterable[int]:
        """Notes that `step` ran; gives the steps whose cost changed."""
        self._alive.update(self._made[step])
        changed: set[int] = set()
        for value in self._used[step]:
            users = self._users[value]
            users.discard(step)
            if len(users) == 1 or value in self._made[step]:
                changed |= users
        return changed


def _run(before: Before, costs: _Given | _Memory) -> list[int]:
    after: list[list[int]] = [[] for _ in before]
    waits = [len(b) for b in before]
    for k, earlier in enumerate(before):
        for j in earlier:
            after[j].append(k)
    ready = [(costs.cost(k), k) for k, n in enumerate(waits) if n == 0]
    heapq.heapify(ready)
    done, order = [False] * len(before), []
    while ready:
        cost, k = heapq.heappop(ready)
        now = 0 if done[k] else costs.cost(k)
        if not done[k] and cost != now:
            heapq.heappush(ready, (now, k))
        if done[k] or cost != now:
            continue
        done[k] = True
        order.append(k)
        changed = [j for j in costs.ran(k) if waits[j] == 0 and not done[j]]
        for j in after[k]:
            waits[j] -= 1
            if waits[j] == 0:
                changed.append(j)
        for j in dict.fromkeys(changed):
            heapq.heappush(ready, (costs.cost(j), j))
    return order
