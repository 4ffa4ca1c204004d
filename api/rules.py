"""The rewrite rules of the e-graph: list them, leave some out, add your own.

>>> import eggpu as eg
>>> double = eg.rules.Rule("double", "(Add x x)", "(Mul x (const 2.0 x))")
>>> print(double)
double: (Add x x) = (Mul x (const 2.0 x))

`eg.compile(f, rules=(double,), without=("wide-product",))` uses them, and
`eg.testing.check_rule(double)` finds out whether both sides are equal. docs/egraph.md tells how
patterns are written.
"""

from __future__ import annotations

from dataclasses import dataclass

from eggpu.compiler.rule import Rule as Rule
from eggpu.compiler.rule import RuleError as RuleError


@dataclass(frozen=True, slots=True)
class Row:
    """A rule in the list. `equation` is `left = right when ...`, or, for a rule about whole
    programs, what it does.
    """

    name: str
    theme: str
    relaxed: bool  # changes rounding by more than the order of a sum; off unless relaxed=True
    equation: str


class Table(tuple[Row, ...]):
    """Rows that print as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return "no rules"
        name, theme = (max(len(getattr(r, k)) for r in self) for k in ("name", "theme"))
        lines = [
            f"{r.name:{name}}  {r.theme:{theme}}  {'relaxed' * r.relaxed:7}  {r.equation}"
            for r in self
        ]
        return "\n".join(lines)


def list(theme: str | None = None) -> Table:
    """Every rule, in the order of themes, or those of one theme.

    Raises RuleError for an unknown theme.
    """
    from eggpu.compiler.egraph.rules import all_rules, program_rules

    rows = [Row(r.name, r.theme, r.relaxed, r.equation) for r in all_rules()]
    rows += [Row(r.name, r.theme, r.relaxed, r.about) for r in program_rules()]
    themes = dict.fromkeys(r.theme for r in rows)
    rows.sort(key=lambda row: [*themes].index(row.theme))
    if theme is not None and theme not in themes:
        raise RuleError(f"theme {theme!r} is none of {', '.join(themes)}")
    return Table(r for r in rows if theme in (None, r.theme))
