"""Saturation in phases: rules to their end, within bounds on rounds, rows and time that are checked
between rounds.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import CompileError
from . import analysis
from .engine import Engine
from .language import SORTS, Form, families
from .patterns import ProgramRule, Rule, able_to_match, forms_in, translate
from .rules import PHASES, Phase, all_rules, program_rules
from .rules.masks import FACTS
from .rules.named import NAMED

ROWS_A_NODE = 12  # the row bound grows with the program, up to HARD_ROWS
HARD_ROWS = 400_000
KEPT = 3  # e-graphs with rules that a thread keeps, of up to 25 MB each
AT_ONCE = 600  # characters of commands in a call; the engine copies them for each place in them


@dataclass(frozen=True)
class Options:
    """Bounds and rules of a saturation. `relaxed` turns on rules that change rounding beyond the
    order of sums.
    """

    max_rows: int = 50_000
    max_seconds: float = 20.0
    relaxed: bool = False
    disabled: tuple[str, ...] = ()
    extra: tuple[Rule, ...] = ()
    phases: tuple[Phase, ...] = PHASES

    def rules(self) -> list[Rule]:
        """The rules that are on."""
        every = (*all_rules(), *self.extra)
        return [r for r in every if (self.relaxed or not r.relaxed) and r.base not in self.disabled]

    def program_rules(self) -> list[ProgramRule]:
        """The rules about whole programs that are on."""
        return [
            r
            for r in program_rules()
            if (self.relaxed or not r.relaxed) and r.base not in self.disabled
        ]

    def row_bound(self, nodes: int) -> int:
        return min(max(self.max_rows, ROWS_A_NODE * nodes), HARD_ROWS)


@dataclass(slots=True)
class Run:
    """The record of one phase."""

    phase: str
    steps: int = 0
    matches: Counter[str] = field(default_factory=Counter)
    nodes: int = 0
    classes: int = 0
    stop: str = "saturated"


MADE = ("Literal", "Reshape", "Broadcast")  # by the analysis, in any program
ALWAYS = (*MADE, "Select", "And", "Not", "Add")  # what the analysis and the facts of rules name


def language_of(program: Sequence[Form], rules: Sequence[Rule]) -> tuple[list[Form], list[Rule]]:
    """The constructors that a program and the rules on it may need, in a fixed order, and the rules
    that can match.
    """
    base = {families()[name].form(families()[name].least) for name in ALWAYS}
    active, names = able_to_match(rules, {f.name for f in program} | {*MADE, "Full"})
    made = {form for form in forms_in(active) if form.name in names}
    return sorted({*program, *base, *made}, key=lambda f: f.name), active


_threads = threading.local()  # the engine belongs to the thread that made it


@contextmanager
def prepared(
    rules: Sequence[Rule], forms: Sequence[Form], perms: Sequence[tuple[int, ...]] = ()
) -> Iterator[Engine]:
    """What `prepare` gives, for the time of a block, at whose end all that was put in is gone.

    The last ones are kept: loading rules takes longer than to saturate a small program.
    """
    kept: dict[Hashable, Engine] = _threads.__dict__.setdefault("kept", {})
    key = (tuple(rules), tuple(forms), tuple(dict.fromkeys(perms)))
    engine = kept.pop(key, None) or prepare(rules, forms, perms)
    engine.run("(push)")
    yield engine  # one in which something failed is not used again
    engine.run("(pop)")
    kept[key] = engine
    while len(kept) > KEPT:
        del kept[next(iter(kept))]


def prepare(
    rules: Sequence[Rule], forms: Sequence[Form], perms: Iterable[tuple[int, ...]] = ()
) -> Engine:
    """An e-graph that knows the language and the rules."""
    names = {f.name for f in forms}
    themes = dict.fromkeys(
        (analysis.THEME, *(t for p in PHASES for t in p.themes), *(r.theme for r in rules))
    )
    texts = [*SORTS, "(function node (i64) T :no-merge)"]
    texts += [text for form in forms for text in form.declarations()]
    texts += [n.declaration() for n in NAMED.values()]
    texts += [
        *analysis.FUNCTIONS,
        *(f"(ruleset {t})" for t in themes),
        *analysis.facts(perms),
        *analysis.rules(names),
        *FACTS,
    ]
    texts += [text for rule in rules for text in translate(rule)]
    engine = Engine()
    try:
        for text in _together(texts):
            engine.run(text)
    except CompileError:  # one by one, to tell which command it is
        engine = Engine()
        for text in texts:
            engine.run(text)
    return engine


def _together(texts: Sequence[str]) -> Iterator[str]:
    """The texts joined up to AT_ONCE characters: a call costs more than a command."""
    part: list[str] = []
    for text in texts:
        if part and sum(map(len, part)) + len(text) > AT_ONCE:
            yield "\n".join(part)
            part = []
        part.append(text)
    yield "\n".join(part)


def run_phases(
    engine: Engine, options: Options, nodes: int, forms: Sequence[Form], rules: Sequence[Rule]
) -> list[Run]:
    """Run all phases; the record of each. A bound that is hit ends the saturation."""
    deadline = time.perf_counter() + options.max_seconds
    bound = options.row_bound(nodes)
    names = [f.name for f in forms]
    engine.step(f"(saturate (run {analysis.THEME}))")
    runs = []
    themes = {r.theme for r in rules}
    for phase in options.phases:
        if not themes.intersection(phase.themes):
            continue
        run = _phase(engine, phase, names, bound, deadline)
        run.nodes, run.classes = engine.count(names)
        runs.append(run)
        if run.stop not in ("saturated", "step bound reached"):
            break
    return runs


def _phase(engine: Engine, phase: Phase, names: Sequence[str], bound: int, deadline: float) -> Run:
    run = Run(phase.name)
    engine_text = phase.schedule(analysis.THEME)
    for _ in range(phase.steps):
        step = engine.step(engine_text)
        run.steps += 1
        for name, count in step.matches.items():
            rule, order, _ = name.rpartition("#")
            if order and count:
                run.matches[rule] += count
        sizes = engine.sizes()
        rows = sum(sizes.get(n, 0) for n in names)
        if not step.updated:
            return run
        if rows > bound:
            run.stop = f"row bound of {bound} reached"
            return run
        if time.perf_counter() > deadline:
            run.stop = "time bound reached"
            return run
    run.stop = "step bound reached"
    return run
