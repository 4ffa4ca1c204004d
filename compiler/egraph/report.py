"""What saturation found, as data and as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .near import NearMiss, Possible


@dataclass(frozen=True, slots=True)
class Round:
    """The e-graph after a phase of some rounds, and the rules that matched in it."""

    phase: str
    steps: int
    nodes: int
    classes: int
    fired: tuple[str, ...]


@dataclass(slots=True)
class EGraphReport:
    """The report of one e-graph.

    `matches` counts them by rule. `recognized` maps a pattern's name to (found, candidates), where
    0 candidates means that nobody counted them. `near_misses` are patterns that the program almost
    is, `possible` the fused kernels of which extraction may choose another form. `seconds` are wall
    times by stage.
    """

    name: str
    rounds: list[Round] = field(default_factory=list)
    matches: dict[str, int] = field(default_factory=dict)
    stop: str = ""
    recognized: dict[str, tuple[int, int]] = field(default_factory=dict)
    near_misses: list[NearMiss] = field(default_factory=list)
    possible: list[Possible] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def text(self, times: bool = False) -> str:
        """The dump; the same for equal programs unless `times` are asked for."""
        last = self.rounds[-1] if self.rounds else Round("", 0, 0, 0, ())
        steps = sum(r.steps for r in self.rounds)
        size = f"{last.nodes} nodes in {last.classes} classes"
        lines = [f"e-graph {self.name}: {self.stop} after {steps} rounds, {size}"]
        lines += _table(("phase", "rounds", "nodes", "classes", "fired"), map(_row, self.rounds))
        if self.recognized:
            found = ", ".join(_found(n, *c) for n, c in self.recognized.items())
            lines.append(f"  recognized: {found}")
        counts = sorted(self.matches.items(), key=lambda item: (-item[1], item[0]))
        lines += _table(("rule", "matches"), [(n, str(c)) for n, c in counts])
        if times:
            lines += [f"  {stage} {1e3 * s:.1f} ms" for stage, s in self.seconds.items()]
        return "\n".join(lines) + "\n"


def _found(name: str, found: int, candidates: int) -> str:
    return f"{name} {found}/{candidates}" if candidates else f"{name} x{found}"


def _row(r: Round) -> tuple[str, ...]:
    more = f" and {len(r.fired) - 6} more" if len(r.fired) > 6 else ""
    return (r.phase, str(r.steps), str(r.nodes), str(r.classes), ", ".join(r.fired[:6]) + more)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Aligned columns, numbers to the right; nothing without rows."""
    body = list(rows)
    if not body:
        return []
    width = [max(len(r[k]) for r in (head, *body)) for k in range(len(head))]
    right = [all(r[k].isdigit() for r in body) for k in range(len(head))]
    lines = []
    for row in (head, *body):
        cells = zip(row, width, right, strict=True)
        lines.append("  ".join(c.rjust(w) if number else c.ljust(w) for c, w, number in cells))
    return [f"  {line}".rstrip() for line in lines]
