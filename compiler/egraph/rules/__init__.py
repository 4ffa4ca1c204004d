"""The rewrite rules by theme, and the phases in which they run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ..patterns import ProgramRule, Rule


@dataclass(frozen=True, slots=True)
class Phase:
    """Themes that run one after the other in each round, and at most how many steps of rounds.

    `backoff` (matches, rounds) is for rules that explode: one that matches more often than that in
    a round rests for some rounds. Its steps have a few rounds each, since the engine forgets
    between steps which rules rest.
    """

    name: str
    themes: tuple[str, ...]
    steps: int
    backoff: tuple[int, int] | None = None

    def schedule(self, analysis: str) -> str:
        """One step in the engine's language."""
        if self.backoff is None:
            runs = " ".join(f"(run {t})" for t in self.themes)
            return f"(seq {runs} (saturate (run {analysis})))"
        matches, rounds = self.backoff
        runs = " ".join(f"(run-with rest {t})" for t in self.themes)
        start = f"(let-scheduler rest (back-off :match-limit {matches} :ban-length {rounds}))"
        return f"(seq {start} (repeat {rounds} (seq {runs} (saturate (run {analysis})))))"


PHASES = (
    Phase("simplify", ("algebra", "movement"), 12),
    Phase("contract", ("contraction", "movement", "algebra"), 12),
    Phase("recognize", ("recognition", "masks", "facts"), 12),
    Phase("attend", ("attention", "movement", "algebra"), 12),
    Phase("extra", ("extra",), 6, backoff=(1000, 4)),  # rules that a user adds
)


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, in the order of themes."""
    from . import algebra, attention, attention_gradient, contraction, masks, movement, recognition

    modules = (algebra, movement, contraction, recognition, masks, attention, attention_gradient)
    return tuple(rule for module in modules for rule in module.RULES)


@cache
def program_rules() -> tuple[ProgramRule, ...]:
    """Every rule about whole programs."""
    from . import programs

    return programs.PROGRAM_RULES
