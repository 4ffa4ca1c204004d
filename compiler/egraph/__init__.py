"""The e-graph: a program saturated with rewrite rules, from which extraction takes the cheapest form."""

from __future__ import annotations

import time
from collections import Counter

from ..ir import Graph, topological
from .analysis import derived
from .encode import encode
from .language import form_of
from .report import EGraphReport, Round
from .rules.named import NAMED
from .saturate import Options, Run, forms_needed, prepare, saturate
from .snapshot import Snapshot
from .terms import Frozen, freeze, snapshot


def saturate_graph(graph: Graph, options: Options | None = None) -> tuple[Snapshot, EGraphReport]:
    """All programs that the rules prove equal to `graph`, and what was found on the way."""
    options = options or Options()
    report = EGraphReport(graph.name)
    clock = _Clock(report)
    nodes = topological(graph.outputs)
    rules = options.rules()
    forms = forms_needed(rules, [form_of(n.op, len(n.operands)) for n in nodes])
    engine = prepare(rules, forms)
    clock("declare")
    number = encode(engine, nodes, derived())
    clock("insert")
    runs = saturate(engine, options, len(nodes), forms)
    clock("saturate")
    frozen = freeze(engine, forms, nodes, len(nodes), NAMED)
    found = snapshot(frozen, nodes, len(nodes), [number[o] for o in graph.outputs])
    clock("decode")
    _fill(report, runs, frozen)
    return found, report


class _Clock:
    """Notes how long each stage took."""

    def __init__(self, report: EGraphReport) -> None:
        self.report = report
        self.start = time.perf_counter()

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        self.report.seconds[stage] = now - self.start
        self.start = now


def _fill(report: EGraphReport, runs: list[Run], frozen: Frozen) -> None:
    total: Counter[str] = Counter()
    for run in runs:
        by_rule: Counter[str] = Counter()
        for name, count in run.matches.items():
            by_rule[name.partition("@")[0]] += count
        total += by_rule
        fired = tuple(n for n, _ in sorted(by_rule.items(), key=lambda item: (-item[1], item[0])))
        report.rounds.append(Round(run.phase, run.steps, run.nodes, run.classes, fired))
    report.recognized = recognized(frozen)
    report.matches = dict(sorted(total.items()))
    report.stop = runs[-1].stop if runs else "saturated"


def recognized(frozen: Frozen) -> dict[str, tuple[int, int]]:
    """How many values carry each name that is reported, and of how many candidates where that is known."""
    classes = {name: set(found) for name, found in frozen.named.items()}
    out: dict[str, tuple[int, int]] = {}
    for stone in NAMED.values():
        if stone.report and classes[stone.name]:
            before = out.get(stone.report, (0, 0))[0]
            out[stone.report] = (before + len(classes[stone.name]), 0)
    return out
