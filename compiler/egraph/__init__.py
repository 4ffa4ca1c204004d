"""The e-graph: a program saturated with rewrite rules, from which extraction takes the cheapest
form.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from ..ir import Graph, Node, topological
from ..ops.contract import Dot
from ..ops.fused import Get
from ..ops.move import Transpose
from .analysis import derived
from .encode import encode
from .language import form_of
from .near import attention_results, look
from .report import EGraphReport, Round
from .rules import all_rules
from .rules.named import NAMED, WEIGHTS
from .saturate import Options, Run, language_of, prepared, run_phases
from .snapshot import Snapshot
from .terms import Class, Frozen, freeze, snapshot

ATTENTION = "attention"  # the theme of its rules


def saturate_graph(graph: Graph, options: Options | None = None) -> tuple[Snapshot, EGraphReport]:
    """All programs that the rules prove equal to `graph`, and what was found on the way."""
    options = options or Options()
    report = EGraphReport(graph.name)
    clock = _Clock(report)
    program = topological(graph.outputs)
    equations = [
        (rule.base, *pair) for rule in options.program_rules() for pair in rule.find(program)
    ]
    makers = _makers(program, equations)
    nodes = [*program, *makers]
    forms, rules = language_of([form_of(n.op, len(n.operands)) for n in nodes], options.rules())
    perms = [n.op.perm for n in nodes if isinstance(n.op, Transpose)]
    with prepared(rules, forms, perms) as engine:
        clock("declare")
        number = encode(engine, nodes, derived())
        for _, old, new in equations:
            engine.run(f"(union (node {number[old]}) (node {number[new]}))")
        clock("insert")
        runs = run_phases(engine, options, len(program), forms, rules)
        clock("saturate")
        frozen = freeze(engine, forms, nodes, NAMED.values(), makers)
        found = snapshot(frozen, nodes, len(program), [number[o] for o in graph.outputs])
        about = {rule.base for rule in all_rules() if rule.theme == ATTENTION}
        left_out = [name for name in options.disabled if name in about]
        report.near_misses, report.possible = look(
            frozen, program, graph, found.class_of, left_out, _stop(runs)
        )
        clock("decode")
    _fill(report, runs, frozen)
    return found, report


def _makers(
    program: Sequence[Node], equations: Sequence[tuple[str, Node, Node]]
) -> dict[Node, str]:
    """The nodes that rules about the whole program add, operands first, and the rule that made
    each.
    """
    known = set(program)
    made: dict[Node, str] = {}
    for rule, _, new in equations:
        stack = [(new, False)]
        while stack:
            node, ready = stack.pop()
            if node in known:
                continue
            if ready:
                known.add(node)
                made[node] = rule
            else:
                stack.append((node, True))
                stack.extend((o, False) for o in reversed(node.operands) if o not in known)
    return made


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
    report.stop = _stop(runs)


def _stop(runs: Sequence[Run]) -> str:
    """Why saturation ended: "saturated", or the bounds that were hit."""
    stops = [f"{run.stop} in {run.phase}" for run in runs if run.stop != "saturated"]
    return ", ".join(stops) or "saturated"


def recognized(frozen: Frozen) -> dict[str, tuple[int, int]]:
    """How many values carry each name that is reported, and of how many candidates where that is
    known.
    """
    found: dict[str, set[Class]] = {}
    for stone in NAMED.values():
        if stone.report:
            # a gradient is counted once for all the numbers that multiply it
            rows = frozen.named[stone.name]
            found.setdefault(stone.report, set()).update(
                kids[0] if stone.name == "SoftmaxGrad" else cls for kids, cls in rows
            )
    found["rms norm"] -= found["layer norm"]  # a layer norm is one of centered values
    out = {name: (len(classes), 0) for name, classes in found.items() if classes}
    return out | _attention(frozen, found["softmax"])


def _attention(frozen: Frozen, softmax: set[Class]) -> dict[str, tuple[int, int]]:
    """Kernels of attention against softmaxes that are the left operand of a product, and their
    gradients.
    """
    results: dict[Class, int] = {}
    for enode in frozen.enodes:
        if isinstance(enode.op, Get):
            results[enode.kids[0]] = results.get(enode.kids[0], 0) + 1
    products = [e for e in frozen.enodes if isinstance(e.op, Dot) and e.kids[0] in softmax]
    used, formed = {e.kids[0] for e in products}, attention_results(frozen)
    weights = {p for name in WEIGHTS for _, p in frozen.named[name]}
    forward = {e.kids[0] for e in products if e.cls in formed} & weights
    differentiated = {kids[0] for kids, _ in frozen.named["SoftmaxGrad"]} & used
    backward = {kids[3] for kids, _ in frozen.named["ScoreGrad"] if results.get(kids[0], 0)} & used
    counts = {
        "attention": (len(forward), len(used)),
        "attention backward": (len(backward), len(differentiated)),
    }
    return {name: count for name, count in counts.items() if count[1]}
