"""From a traced graph to a plan: every pass in order, each of them visible in the result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .ir import Graph
from .rule import Rule
from .schedule.plan import Plan
from .schedule.selection import Selection
from .schedule.target import Target

if TYPE_CHECKING:
    from .egraph.near import NearMiss
    from .egraph.outcome import ExtractionReport
    from .egraph.report import EGraphReport
    from .egraph.saturate import Options as Saturation


@dataclass(frozen=True)
class Options:
    """How to compile. All of it counts for the plan; nothing is read from the environment.

    optimize: saturate the e-graph and search; off, every op is its own kernel (for tests and comparison).
    relaxed: also rules that change float32 results by more than rounding.
    without: names of rules that are not used (eggpu.rules.list() has them all).
    rules: rules to add to eggpu's own (eggpu.rules.Rule); eggpu.testing.check_rule finds out whether they are right.
    max_rows, max_seconds: bounds of saturation; one that is hit still gives a right plan.
    effort: rounds of the extraction search.
    """

    optimize: bool = True
    relaxed: bool = False
    without: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    max_rows: int = 400_000
    max_seconds: float = 60.0
    effort: int = 6


@dataclass
class Compilation:
    """What each pass gave. `egraph` and `extraction` are reports, None for an unoptimized program."""

    trace: Graph  # before differentiation
    graph: Graph  # forward, backward and update
    target: Target
    options: Options
    selection: Selection
    plan: Plan
    egraph: EGraphReport | None = None
    extraction: ExtractionReport | None = None
    near_misses: tuple[NearMiss, ...] = ()  # attention that was almost found or almost chosen
    seconds: dict[str, float] = field(default_factory=dict)


def compile_graph(
    graph: Graph, target: Target, options: Options | None = None, *, trace: Graph | None = None
) -> Compilation:
    """Compile a graph for a target. Raises CompileError when the target cannot hold it."""
    from .codegen import lower
    from .codegen.repeated import Repeated
    from .expand import expand
    from .schedule.assemble import assemble
    from .schedule.selection import separate
    from .schedule.verify import verify_plan
    from .verify import verify_graph

    options = options or Options()
    seconds: dict[str, float] = {}
    egraph = extraction = None
    near_misses: tuple[NearMiss, ...] = ()
    with timed(seconds, "verify"):
        verify_graph(graph)
    program = expand(graph)
    if options.optimize:
        # equal programs, as many as the rules find
        from .egraph import saturate_graph
        from .egraph.extract import extract
        from .egraph.near import near

        with timed(seconds, "saturate"):
            snapshot, egraph = saturate_graph(program, saturation(options))
        # the cheapest of them: e-nodes, stored values and kernels chosen together
        with timed(seconds, "extract"):
            selection, extraction = extract(snapshot, target, program, effort=options.effort)
            near_misses = near(egraph, extraction, snapshot, selection)
    else:
        selection = separate(program)
    # kernels in WGSL, memory, and a last check of every hazard and limit
    with timed(seconds, "lower"):
        plan = assemble(selection, target, Repeated(lower))
    with timed(seconds, "check"):
        verify_plan(plan, target)
    return Compilation(
        trace or graph,
        graph,
        target,
        options,
        selection,
        plan,
        egraph,
        extraction,
        near_misses,
        seconds,
    )


def saturation(options: Options) -> Saturation:
    """The options of saturation. Raises RuleError for an unknown name in `without` and for a rule that is not well formed."""
    from .egraph.saturate import Options as Kind
    from .egraph.validate import validate_choice

    validate_choice(options.without, options.rules)
    return Kind(
        max_rows=options.max_rows, max_seconds=options.max_seconds, relaxed=options.relaxed, disabled=options.without,
        extra=options.rules,
    )  # fmt: skip


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of a block to `seconds[name]`."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
