"""The predicted times of a plan's kernels."""

from __future__ import annotations

from collections.abc import Sequence

from .horizontal import Merged
from .order import Step
from .selection import Group, LoopGroup


def parts_of(step: Step) -> tuple[Step, ...]:
    """The steps that were merged to one; a step alone is itself."""
    return step.parts if isinstance(step, Merged) else (step,)


class Times:
    """The predicted time of a step: its group's, shared among the steps by the bytes they move."""

    def __init__(
        self, groups: Sequence[Group | LoopGroup], steps: Sequence[Step], launch: float
    ) -> None:
        self._groups, self._launch = groups, launch
        self._moved: dict[int, int] = {}
        parts = {id(part.source): part for whole in steps for part in parts_of(whole)}
        for step in parts.values():  # one that runs again counts once
            self._moved[step.group] = self._moved.get(step.group, 0) + self._bytes(step)

    def _bytes(self, step: Step) -> int:
        return 1 + step.source.bytes_read + step.source.bytes_written

    def __call__(self, step: Step) -> float:
        parts = parts_of(step)
        saved = (len(parts) - 1) * self._launch
        return max(sum(map(self._one, parts)) - saved, self._launch if saved else 0.0)

    def _one(self, step: Step) -> float:
        group = self._groups[step.group]
        assert isinstance(group, Group)
        return group.predicted_ns * self._bytes(step) / self._moved[step.group]
