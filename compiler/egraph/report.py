"""What saturation found, as data and as text. Extraction adds costs and choices."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Round:
    """The e-graph after a phase, and the rules that matched in it."""

    phase: str
    steps: int
    nodes: int
    classes: int
    fired: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """An e-class where extraction chose among e-nodes: costs in us, and the reason in words."""

    place: str
    chosen: str
    cost: float
    others: tuple[tuple[str, float], ...]
    why: str = ""


@dataclass(slots=True)
class EGraphReport:
    """The report of one e-graph. `recognized` maps a pattern's name to (found, candidates)."""

    name: str
    rounds: list[Round] = field(default_factory=list)
    matches: dict[str, int] = field(default_factory=dict)
    stop: str = ""
    recognized: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    cost_before: float | None = None  # us
    cost_after: float | None = None
    kernels_before: int | None = None
    kernels_after: int | None = None
    choices: list[Choice] = field(default_factory=list)

    def text(self, times: bool = False) -> str:
        """The dump; the same for equal programs unless `times` are asked for."""
        last = self.rounds[-1] if self.rounds else Round("", 0, 0, 0, ())
        steps = sum(r.steps for r in self.rounds)
        lines = [
            f"e-graph {self.name}: {self.stop} after {steps} rounds, {last.nodes} nodes in {last.classes} classes"
        ]
        lines += _table(
            ("phase", "rounds", "nodes", "classes", "fired"), [_round(r) for r in self.rounds]
        )
        if self.recognized:
            found = ", ".join(_found(n, *c) for n, c in self.recognized.items())
            lines.append(f"  recognized: {found}")
        counts = sorted(self.matches.items(), key=lambda item: (-item[1], item[0]))
        lines += _table(("rule", "matches"), [(n, str(c)) for n, c in counts])
        if self.cost_before is not None and self.cost_after is not None:
            lines.append(self._cost())
        lines += _table(
            ("choice", "takes", "us", "over", "why"), [_choice(c) for c in self.choices]
        )
        if times:
            lines += [f"  {stage} {1e3 * s:.1f} ms" for stage, s in self.seconds.items()]
        return "\n".join(lines) + "\n"

    def _cost(self) -> str:
        assert self.cost_before is not None and self.cost_after is not None
        ratio = self.cost_before / self.cost_after if self.cost_after else 1.0
        text = f"  cost {self.cost_before:.0f} -> {self.cost_after:.0f} us ({ratio:.1f}x less, shared nodes counted once)"
        if self.kernels_before is not None and self.kernels_after is not None:
            text += f", {self.kernels_before} -> {self.kernels_after} kernels"
        return text


def _found(name: str, found: int, candidates: int) -> str:
    return f"{name} {found}/{candidates}" if candidates else f"{name} x{found}"


def _round(r: Round) -> tuple[str, ...]:
    fired = ", ".join(r.fired[:6]) + (f" and {len(r.fired) - 6} more" if len(r.fired) > 6 else "")
    return (r.phase, str(r.steps), str(r.nodes), str(r.classes), fired)


def _choice(c: Choice) -> tuple[str, ...]:
    others = ", ".join(f"{name} {cost:.1f}" for name, cost in c.others)
    return (c.place, c.chosen, f"{c.cost:.1f}", others, c.why)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Aligned columns: numbers to the right, the last column as it is."""
    if not rows:
        return []
    every = [head, *rows]
    width = [max(len(r[k]) for r in every) for k in range(len(head))]
    right = [all(_numeric(r[k]) for r in rows) for k in range(len(head))]
    return [
        (
            "  "
            + "  ".join(
                c.rjust(w) if n else c.ljust(w) for c, w, n in zip(r, width, right, strict=True)
            )
        ).rstrip()
        for r in every
    ]


def _numeric(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
