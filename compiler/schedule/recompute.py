"""Values computed twice instead of kept: under a limit on memory kernels run again.

Where too much is alive at once, a value that is used before and after is let go after the last use
before, and its kernel, with those whose results it needs and that are gone too, runs again before
the next use. Of the values to let go, the one with the most bytes for the time is taken first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .kernel import Scratch
from .order import Step
from .program import Program

MOST_AGAIN = 12  # kernels that run again for one value
TRIED = 12  # values tried at one place
MOST_ROUNDS = 400


@dataclass(frozen=True, slots=True)
class _Lives:
    """By value: the steps that write it and that use it. `alive` are bytes by step."""

    writes: dict[int, int]
    uses: dict[int, list[int]]
    alive: list[int]

    def over(self, budget: int) -> int:
        """Bytes by which `alive` is above a budget, added up over all steps."""
        return sum(max(0, n - budget) for n in self.alive)


def recomputed(
    program: Program, steps: Sequence[Step], budget: int, time: Callable[[Step], float]
) -> tuple[Program, list[Step]]:
    """The program and its steps in order, with as much run again as scratch of `budget` needs.

    Where that is not enough, with as little scratch as was reached.
    """
    work = _Work(program, list(steps), budget, time)
    for _ in range(MOST_ROUNDS):
        if work.over == 0 or not work.improve():
            break
    return work.program, work.steps


class _Work:
    """A program while values are let go."""

    def __init__(
        self, program: Program, steps: list[Step], budget: int, time: Callable[[Step], float]
    ) -> None:
        self.program = program.copy()
        self.steps, self.budget, self.time = steps, budget, time
        self.lives = self._lives(steps)
        self.over = self.lives.over(budget)
        self.kept_until = self._kept_until()

    def improve(self) -> bool:
        """Let one value go so that less is above the budget; False when none does."""
        worst = max(range(len(self.steps)), key=lambda k: (self.lives.alive[k], -k))
        for value, at, again in self._candidates(worst)[:TRIED]:
            steps, count = self._without(value, at, again), len(self.program.values)
            lives = self._lives(steps)
            over = lives.over(self.budget)
            if over < self.over:
                self.steps, self.lives, self.over = steps, lives, over
                return True
            assert count <= len(self.program.values)
        return False

    def _lives(self, steps: Sequence[Step]) -> _Lives:
        writes: dict[int, int] = {}
        uses: dict[int, list[int]] = {}
        for k, step in enumerate(steps):
            for value in step.writes:
                writes.setdefault(value, k)
            for value in dict.fromkeys((*step.writes, *step.reads)):
                uses.setdefault(value, []).append(k)
        changes = [0] * (len(steps) + 1)
        for value, at in uses.items():
            if self.program.values[value].role == "scratch":
                changes[at[0]] += self.program.values[value].nbytes
                changes[at[-1] + 1] -= self.program.values[value].nbytes
        alive: list[int] = []
        for change in changes[:-1]:
            alive.append((alive[-1] if alive else 0) + change)
        return _Lives(writes, uses, alive)

    def _kept_until(self) -> dict[int, Step]:
        """The step that writes over each donated argument, as far as can be told."""
        pairs = self.program.pairs(lambda output, input_: True)
        written = {v: step for step in reversed(self.steps) for v in step.writes}
        return {input_: written[out] for out, input_ in pairs.items() if out in written}

    def _candidates(self, worst: int) -> list[tuple[int, int, list[Step]]]:
        """(value, step before which it is computed again, steps for that), the best first."""
        found: list[tuple[float, int, int, list[Step]]] = []
        order = {id(step): k for k, step in enumerate(self.steps)}
        for value, uses in self.lives.uses.items():
            array = self.program.values[value]
            if array.role != "scratch" or not uses[0] < worst < uses[-1] or worst in uses:
                continue
            at = next(k for k in uses if k > worst)
            again = self._again(value, at, order)
            if again:
                cost = sum(self.time(step) for step in again)
                found.append((-array.nbytes / max(cost, 1.0), value, at, again))
        found.sort(key=lambda f: f[:3])
        return [(value, at, again) for _, value, at, again in found]

    def _again(self, value: int, at: int, order: dict[int, int]) -> list[Step] | None:
        """The steps that make a value from what is there at step `at`, in order."""
        needed: dict[int, Step] = {}
        stack = [value]
        while stack:
            v = stack.pop()
            k = self.lives.writes.get(v)
            if k is None or k in needed:
                continue
            step = self.steps[k]
            if self.program.values[v].role != "scratch" or not _repeatable(step, self.program):
                return None
            needed[k] = step
            if len(needed) > MOST_AGAIN:
                return None
            for read in step.reads:
                role = self.program.values[read].role
                if role == "input":
                    until = self.kept_until.get(read)
                    if until is not None and order.get(id(until), -1) < at:
                        return None
                elif role == "output":
                    continue
                elif role == "scratch" and self.lives.uses[read][-1] < at:
                    stack.append(read)
        return [needed[k] for k in sorted(needed)]

    def _without(self, value: int, at: int, again: Sequence[Step]) -> list[Step]:
        """The steps with `again` once more before step `at`, whose results later steps use."""
        new: dict[int, int] = {}
        clones: list[Step] = []
        for step in again:
            for written in step.writes:
                new[written] = self._twin(written)
            writes = tuple(new[v] for v in step.writes)
            clones.append(
                replace(step, writes=writes, reads=tuple(new.get(v, v) for v in step.reads))
            )
        gone = {v for step in again for v in step.writes}
        after = [self._renamed(step, {v: new[v] for v in gone}) for step in self.steps[at:]]
        return [*self.steps[:at], *clones, *after]

    def _renamed(self, step: Step, new: dict[int, int]) -> Step:
        if not any(v in new for v in step.reads):
            return step
        return replace(step, reads=tuple(new.get(v, v) for v in step.reads))

    def _twin(self, value: int) -> int:
        array = self.program.values[value]
        key = Scratch("again", array.shape, array.dtype)
        self.program.values.append(replace(array, key=key, name="", role="scratch"))
        return len(self.program.values) - 1


def _repeatable(step: Step, program: Program) -> bool:
    """Whether a step can run twice: all that it writes is scratch, and none of it in place."""
    source = step.source
    whole = not source.updates and not source.copies and hasattr(source, "text")
    return whole and all(program.values[v].role == "scratch" for v in step.writes)
