"""Extraction: the choice of e-nodes, of stored values and of kernels in one search for the least
total cost."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ..collector import no_collector
from ..ir import Graph, Node, make
from ..ops.fused import Get
from ..ops.move import reshape
from ..schedule.selection import Group, Selection, stored_base
from ..schedule.target import Target
from .explain import Explainer
from .graph import GET, TUP, VIEW, Problem, problem
from .greedy import NO_KERNEL, greedy, node_costs
from .moves import MoveKind
from .orbits import colors
from .outcome import ExtractionReport, Totals, totals
from .plan import Draft
from .price import Pricer
from .search import Effort, Search
from .snapshot import Snapshot, from_nodes
from .start import start

SMALL, TINY = 400, 60  # classes of programs that are searched more thoroughly


def extract(
    snapshot: Snapshot,
    target: Target,
    graph: Graph,
    effort: int = 6,
    explain: int = 60,
    dear: float = 1.0,
) -> tuple[Selection, ExtractionReport]:
    """The cheapest program found in `snapshot` for `graph`'s outputs, and its kernels.

    `effort` bounds the rounds of the search: one round makes no kicks, more than 6 end only when
    nothing is gained. `explain` is how many alternatives the report prices. With `dear` bytes cost
    so many times as much in the search, so that less is stored. Equal arguments give equal results.
    """
    with no_collector():
        p = problem(snapshot, target.max_bindings, donated=donated_classes(snapshot, graph))
        search, two_steps = improve(p, Pricer(p, _dearer(target, dear)), effort)
        if dear != 1.0:
            search.draft.priced_by(Pricer(p, target))
        selection = decode(search.draft, graph)
        report = _report(search, two_steps, graph, explain)
    return selection, report


def _dearer(target: Target, factor: float) -> Target:
    """The target with bytes that cost so many times as much."""
    bandwidth = target.profile.bandwidth / factor
    return replace(target, profile=replace(target.profile, bandwidth=bandwidth))


def donated_classes(snapshot: Snapshot, graph: Graph) -> list[int]:
    """The classes of the inputs that the program may write over."""
    nodes = [graph.inputs[i] for i in sorted(set(graph.donated))]
    return [snapshot.class_of[n] for n in nodes if n in snapshot.class_of]


def improve(p: Problem, pricer: Pricer, effort: int) -> tuple[Search, Totals]:
    """The finished search, and what choosing first and fusing afterwards would have cost."""
    bounds, color = _effort(effort, len(p.live)), colors(p)
    fused = two_step(p, pricer, color)
    two_steps = totals(fused)
    costs = node_costs(p, pricer, fused=True)
    choice = greedy(p, costs)
    found = [_searched(start(p, pricer, choice), b, color) for b in bounds]
    if len(bounds) > 1 and any(p.role[n] == GET for n in choice):
        # many moves lie between a kernel of several results, such as attention, and its parts
        apart = greedy(p, [c + NO_KERNEL * (p.role[n] == TUP) for n, c in enumerate(costs)])
        bounds = [replace(b, tuples=False) for b in bounds]
        found += [_searched(start(p, pricer, apart), b, color) for b in bounds]
    best = min(found, key=lambda s: s.draft.cost)  # the first of equals
    if fused.cost < best.draft.cost:
        best = _searched(fused, bounds[0], color)
    return best, two_steps


def _searched(draft: Draft, effort: Effort, color: list[int]) -> Search:
    search = Search(draft, effort, color)
    search.run()
    return search


def _report(search: Search, two_steps: Totals, graph: Graph, explain: int) -> ExtractionReport:
    p, d, target = search.p, search.draft, search.draft.pricer.target
    explainer = Explainer(search, graph.sources)
    computed = [c for c in p.live if d.inside[c] and d.kern[c] < 0]
    return ExtractionReport(
        name=graph.name,
        target=target.name,
        nodes=sum(len(p.candidates[c]) for c in p.live),
        classes=len(p.live),
        orbits=len(search.members),
        how_traced=cache(lambda: as_traced(graph, target)),
        greedy=two_steps,
        joint=totals(d),
        stored=sum(k >= 0 for k in d.kern),
        inlined=len(computed),
        recomputed=sum(len(d.inside[c]) > 1 for c in computed),
        how_chosen=lambda: tuple(choice for _, choice in explainer.choices(explain)),
        explainer=explainer,
    )


def _effort(rounds: int, classes: int) -> list[Effort]:
    """How to search: programs that are not large in two ways, of which the better one counts."""
    kicks: tuple[MoveKind, ...] = ("tuple", "flip", "store", "split", "stage")
    if rounds > 6:
        return [Effort(rounds, kicks, 8, descent=120, near_misses=1000, enough=1e-6)]
    if rounds < 2:
        return [Effort(rounds, kicks=())]
    if classes >= SMALL:
        return [Effort(rounds, kicks[:3], again=False, hope=0.5)]
    tiny = classes < TINY
    return [
        Effort(rounds, kicks, steepest=tiny, slack=0.5 if tiny else 0.01),
        Effort(rounds, kicks[:4], steepest=tiny, wide=False),
    ]


@no_collector()
def as_traced(graph: Graph, target: Target) -> Totals:
    """What the program costs when each op that computes is a kernel."""
    snapshot = from_nodes(list(graph.outputs))
    donated = donated_classes(snapshot, graph)
    p = problem(snapshot, target.max_bindings, condense=False, donated=donated)
    return totals(separated(p, Pricer(p, target)))


def separated(p: Problem, pricer: Pricer) -> Draft:
    """Every value that an op computes stored."""
    return start(p, pricer, greedy(p, node_costs(p, pricer, fused=False)), everything=True)


def two_step(p: Problem, pricer: Pricer, color: list[int]) -> Draft:
    """The usual way: e-nodes first, then one pass of fusion."""
    draft = start(p, pricer, greedy(p, node_costs(p, pricer, fused=False)))
    search = Search(draft, Effort(kicks=()), color)
    for kind in ("inline", "merge", "sibling"):
        search.sweep(kind)
    return draft


def decode(draft: Draft, graph: Graph) -> Selection:
    """The draft's program as nodes, its kernels as groups."""
    nodes = _nodes(draft)
    sources = _sources(draft, graph, nodes)
    groups: list[Group] = []
    written: set[Node] = set()
    for k in _depth_first(draft):
        priced = draft.kernels[k]
        outs = dict.fromkeys(stored_base(nodes[c]) for c in priced.outs)
        new = tuple(
            n for n in outs if n not in written
        )  # equal values that the e-graph did not know to be equal
        written.update(new)
        if new:
            operands = dict.fromkeys(nodes[c] for c in priced.operands)
            groups.append(Group(_in_order(new), tuple(operands), priced.cost))
    outputs = tuple(nodes[r] for r in draft.p.snapshot.roots)
    return Selection(
        graph.replace(outputs=outputs, sources=sources),
        tuple(groups),
        classes={node: c for c, node in nodes.items()},
        made_by={node: draft.p.snapshot.rule[draft.choice[c]] for c, node in nodes.items()},
    )


def _in_order(outputs: tuple[Node, ...]) -> tuple[Node, ...]:
    """Results of one op as it numbers them, so that kernels of such groups have one text."""
    numbers = {n: n.op.index for n in outputs if isinstance(n.op, Get)}
    if len(numbers) < len(outputs):
        return outputs
    return tuple(sorted(outputs, key=numbers.__getitem__))


def _nodes(draft: Draft) -> dict[int, Node]:
    """The node of each class that the program uses; views become reshapes, so that they name stored
    memory."""
    p = draft.p
    snapshot = p.snapshot
    nodes: dict[int, Node] = {}
    for root in snapshot.roots:
        stack = [root]
        while stack:
            c = stack[-1]
            n = draft.choice[c]
            missing = [k for k in snapshot.kids[n] if k not in nodes] if c not in nodes else []
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if c in nodes:
                continue
            operands = [nodes[k] for k in snapshot.kids[n]]
            if p.role[n] == VIEW:
                nodes[c] = reshape(operands[0], snapshot.types[c].shape)  # type: ignore[union-attr]
            else:
                nodes[c] = make(snapshot.ops[n], *operands)
    return nodes


def _sources(draft: Draft, graph: Graph, nodes: dict[int, Node]) -> dict[Node, str]:
    """The user's line of each node: that of a traced node of its class, else that of a reader."""
    snapshot = draft.p.snapshot
    lines: dict[int, str] = {}
    for node, line in graph.sources.items():
        c = snapshot.class_of.get(node)
        if c is not None and line:
            lines.setdefault(c, line)
    for c in reversed(nodes):
        if c in lines:
            for k in snapshot.kids[draft.choice[c]]:
                lines.setdefault(k, lines[c])
    sources = dict(graph.sources)
    for c, node in nodes.items():
        if c in lines:
            sources.setdefault(node, lines[c])
    return sources


def _depth_first(draft: Draft) -> list[int]:
    """Kernels in the order in which the program's results need them."""
    p, out, seen = draft.p, dict[int, None](), set[int]()
    for c in p.roots:
        while p.role[draft.choice[c]] == VIEW:
            c = p.kids[draft.choice[c]][0]
        stack = [(draft.kern[c], False)]
        while stack:
            k, left = stack.pop()
            if left:
                out[k] = None
            elif k >= 0 and k not in seen:
                seen.add(k)
                stack.append((k, True))
                stack.extend((draft.kern[o], False) for o in reversed(draft.kernels[k].operands))
    return list(out)
