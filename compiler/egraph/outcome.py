"""What extraction reports: costs of three ways to compile the program, and why each choice fell as
it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .explain import Choice, Explainer
from .plan import Draft


@dataclass(frozen=True, slots=True)
class Totals:
    """A whole program by the cost model: ns, kernels, dispatches, bytes moved, flops."""

    cost: float
    kernels: int
    launches: int
    nbytes: int
    flops: int

    def times(self, n: int) -> Totals:
        """Those of the program run n times: its kernels are the same ones."""
        return Totals(
            n * self.cost, self.kernels, n * self.launches, n * self.nbytes, n * self.flops
        )

    def plus(self, other: Totals) -> Totals:
        """Those of this program and another one."""
        return Totals(
            self.cost + other.cost,
            self.kernels + other.kernels,
            self.launches + other.launches,
            self.nbytes + other.nbytes,
            self.flops + other.flops,
        )


@dataclass(frozen=True, slots=True)
class ExtractionReport:
    """What extraction found. `str(report)` is a page of text, equal for equal programs."""

    name: str
    target: str
    nodes: int
    classes: int
    orbits: int
    how_traced: Callable[[], Totals] = field(compare=False, repr=False)
    greedy: Totals  # e-nodes chosen first, fused afterwards
    joint: Totals  # what was chosen
    stored: int  # classes
    inlined: int
    recomputed: int  # inlined in more than one kernel
    how_chosen: Callable[[], tuple[Choice, ...]] = field(compare=False, repr=False)
    explainer: Explainer | None = field(default=None, compare=False, repr=False)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Classes with alternatives and what these would cost; worked out when first asked."""
        return self.how_chosen()

    @property
    def traced(self) -> Totals:
        """The program with every op that computes its own kernel; worked out when first asked."""
        return self.how_traced()

    def __str__(self) -> str:
        return "\n".join(
            [
                f"extraction {self.name} for {self.target}: {self.nodes} e-nodes"
                f" in {self.classes} classes, {self.orbits} of them unlike",
                *_programs(self),
                f"  stored {self.stored} class{'es' * (self.stored != 1)}, inlined {self.inlined},"
                f" {self.recomputed} of these in several kernels",
                *_choices(self.choices),
            ]
        )


def totals(draft: Draft) -> Totals:
    """The sums over a draft's kernels."""
    all_kernels = [draft.kernels[k] for k in sorted(draft.kernels)]
    return Totals(
        cost=sum(k.cost for k in all_kernels),
        kernels=len(all_kernels),
        launches=sum(k.launches for k in all_kernels),
        nbytes=round(sum(k.nbytes for k in all_kernels)),
        flops=round(sum(k.flops for k in all_kernels)),
    )


def _programs(report: ExtractionReport) -> list[str]:
    rows = [("program", "kernels", "dispatches", "us", "MB", "MFLOP")]
    for name, t in (
        ("as traced", report.traced),
        ("greedy, then fused", report.greedy),
        ("joint", report.joint),
    ):
        numbers = (f"{t.cost / 1e3:.1f}", f"{t.nbytes / 1e6:.2f}", f"{t.flops / 1e6:.2f}")
        rows.append((name, str(t.kernels), str(t.launches), *numbers))
    return aligned(rows, left=1)


def _choices(choices: tuple[Choice, ...]) -> list[str]:
    if not choices:
        return []
    title = ("choice", "line", "times", "chosen", "instead of", "by", "us more", "why")
    rows: list[tuple[str, ...]] = [title]
    for choice in choices:
        at = ", ".join(choice.lines[:1]) + (", ..." if len(choice.lines) > 1 else "")
        head = (f"c{choice.cls} {choice.type}", at, str(choice.times), choice.chosen)
        for other in choice.others:
            lost = "-" if other.loss is None else f"{other.loss / 1e3:.1f}"
            rows.append((*head, other.text, other.rule, lost, other.why))
            head = ("", "", "", "")
    return aligned(rows, left=8, right=(2, 6))


def aligned(rows: list[tuple[str, ...]], left: int, right: tuple[int, ...] = ()) -> list[str]:
    """Rows as columns two spaces apart; the first `left` columns flush left but for `right`, the
    others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        ("  " + "  ".join(
            cell.ljust(w) if i < left and i not in right else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )).rstrip()
        for row in rows
    ]  # fmt: skip
