"""From a traced graph to a plan: every pass in order, each of them visible in the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Literal

from .collector import no_collector
from .errors import CompileError
from .ir import Graph, Kind, Node
from .ops.loop import Loop
from .rule import Rule
from .schedule.plan import Plan
from .schedule.selection import Group, LoopGroup, Selection
from .schedule.target import Target

if TYPE_CHECKING:
    from .egraph.near import NearMiss
    from .egraph.outcome import ExtractionReport
    from .egraph.report import EGraphReport
    from .egraph.saturate import Options as Saturation
    from .egraph.snapshot import Snapshot


Tuner = Callable[[Selection, Target], Mapping[str, int]]
"""Gives the rank of the fastest tiling by kernel (see compiler/variants.py)."""


MOST_KEPT = 1 << 30  # bytes of packed arguments, above which no copies of them are kept
WEIGHTS = 4096  # words of an argument, from where on it is no state of a generator


@dataclass(frozen=True)
class Options:
    """How to compile. All of it counts for the plan; nothing is read from the environment.

    optimize: saturate the e-graph and search; off, every op is its own kernel (for tests and
    comparison).
    relaxed: also rules that change float32 results by more than rounding.
    precision: "float32", or "mixed": activations and operands of products are kept as f16 (see
    compiler/mixed.py). Gradients of small losses vanish in f16: multiply the loss by a factor, as
    optim.scaled does.
    without: names of rules that are not used (eggpu.rules.list() has them all).
    force: names of kernels ("attention_split") that compute whatever they can, whatever they cost.
    rules: rules to add to eggpu's own (eggpu.rules.Rule); eggpu.testing.check_rule finds out
    whether they are right.
    max_rows, max_seconds: bounds of saturation; one that is hit still gives a right plan.
    effort: rounds of the extraction search.
    tune: time the predicted best tilings of each kernel on the device, once for a device and driver
    (see eggpu.tuning).
    max_memory: bytes on the device that a call may take, arguments and results among them; above it
    copies in images are made late or given up, and values are computed again instead of kept.

    Raises CompileError for values that no program can be compiled with.
    """

    optimize: bool = True
    relaxed: bool = False
    precision: Literal["float32", "mixed"] = "float32"
    without: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    max_rows: int = 400_000
    max_seconds: float = 60.0
    effort: int = 6
    tune: bool = False
    max_memory: int | None = None

    def __post_init__(self) -> None:
        if self.precision not in ("float32", "mixed"):
            raise CompileError(f"precision is 'float32' or 'mixed', got {self.precision!r}")
        for name in ("without", "force", "rules"):
            if isinstance(given := getattr(self, name), str):
                raise CompileError(f"{name} needs a tuple, such as ({given!r},), got {given!r}")
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise CompileError(f"rules needs objects of eggpu.rules.Rule, got {rule!r}")
        for name in ("optimize", "relaxed", "tune"):
            if not isinstance(given := getattr(self, name), bool):
                raise CompileError(f"{name} needs True or False, got {given!r}")
        most = self.max_memory
        if most is not None:
            if not isinstance(most, Integral) or isinstance(most, bool) or most <= 0:
                raise CompileError(f"max_memory needs a number of bytes above 0, got {most!r}")
            object.__setattr__(self, "max_memory", int(most))  # NumPy's would not be the same key


@dataclass(frozen=True)
class MemoryPrice:
    """What a limit on memory costs: bytes and predicted ns with and without it, kernels that run
    again, and whether copies in images were given up."""

    limit: int
    peak: int
    peak_without: int
    again: int
    ns: float
    ns_without: float
    spared: bool = False

    @classmethod
    def of(cls, limit: int, plan: Plan, without: Plan) -> MemoryPrice:
        """The price of `plan` within the limit, instead of the one without it."""
        return cls(
            limit=limit,
            peak=plan.peak_bytes,
            peak_without=without.peak_bytes,
            again=len(plan.kernels) - len(without.kernels),
            ns=_ns(plan),
            ns_without=_ns(without),
            spared=bool(without.images and not plan.images),
        )

    def __str__(self) -> str:
        more = self.ns - self.ns_without
        share = 100 * more / self.ns_without if self.ns_without else 0.0
        return (
            f"max_memory {self.limit} bytes: peak {self.peak} instead of {self.peak_without}, "
            f"{self.again} kernels more, {'no copies in images, ' if self.spared else ''}"
            f"{more / 1e3:+.1f} us predicted ({share:+.1f}%)"
        )


@dataclass(frozen=True)
class Chosen:
    """What was chosen for a part of the program without loops, which runs `times` times. Reports
    are None for an unoptimized program."""

    graph: Graph
    selection: Selection
    times: int = 1
    egraph: EGraphReport | None = None
    extraction: ExtractionReport | None = None
    near_misses: tuple[NearMiss, ...] = ()  # attention that was almost found or almost chosen


@dataclass
class Compilation:
    """What each pass gave. `parts` are the parts of the program between loops and the bodies of
    these, in order."""

    trace: Graph  # before differentiation
    graph: Graph  # forward, backward and update
    target: Target
    options: Options
    parts: tuple[Chosen, ...]
    plan: Plan
    seconds: dict[str, float] = field(default_factory=dict)
    memory_price: MemoryPrice | None = None  # of the option max_memory
    made: tuple[tuple[Group, ...], ...] = ()  # the groups of each kernel, see schedule.assemble

    @property
    def selection(self) -> Selection:
        """What was chosen for a program without loops, else for its first part."""
        return self.parts[0].selection

    @property
    def egraph(self) -> EGraphReport | None:
        """The report of the e-graph of a program without loops, else of its first part."""
        return self.parts[0].egraph

    @property
    def extraction(self) -> ExtractionReport | None:
        """The report of the choice for a program without loops, else for its first part."""
        return self.parts[0].extraction

    @property
    def near_misses(self) -> tuple[NearMiss, ...]:
        """Attention that was almost found or almost chosen, in any part."""
        return tuple(miss for part in self.parts for miss in part.near_misses)


@no_collector()
def compile_graph(
    graph: Graph,
    target: Target,
    options: Options | None = None,
    *,
    trace: Graph | None = None,
    merge: bool = True,
    tuner: Tuner | None = None,
) -> Compilation:
    """Compile a graph for a target. Raises CompileError when the target cannot hold it.

    Without `merge`, independent kernels of one form stay apart. `tuner` is asked which tilings are
    fastest.
    """
    from .expand import expand
    from .schedule.assemble import assemble
    from .schedule.verify import verify_plan
    from .verify import verify_graph

    options = options or Options()
    if target.keeps and not _keeps(graph, options):
        target = replace(target, keeps=False)
    passes = _Passes(target, options)
    seconds = passes.seconds
    with timed(seconds, "verify"):
        verify_graph(graph)
    # equal programs, as many as the rules find, and the cheapest of them
    program = _in_precision(graph, target, options)
    if not options.optimize or "expand" in options.without:
        program = expand(program)
    selection, price = passes.select(program), None
    if tuner is not None:
        from .variants import ranked

        with timed(seconds, "tune"):
            passes.lower = ranked(tuner(selection, target))
    # kernels in WGSL, memory, and a last check of every hazard and limit
    with timed(seconds, "lower"):
        plan = assemble(
            selection, target, passes.lower, merge and options.optimize, made=passes.made
        )
    parts = tuple(passes.parts)
    if merge and options.max_memory is not None:
        plan, parts, price = _within(options.max_memory, passes, program, selection, plan)
    with timed(seconds, "check"):
        verify_plan(plan, target)
    made = passes.made.get(id(plan), ())
    return Compilation(trace or graph, graph, target, options, parts, plan, seconds, price, made)


def _within(
    most: int, passes: _Passes, program: Graph, selection: Selection, plan: Plan
) -> tuple[Plan, tuple[Chosen, ...], MemoryPrice]:
    """The cheapest plan of at most so many bytes, what was chosen for it, and what the limit costs.

    Values are computed again instead of kept, in choices of kernels that store less and less; of
    those that read images, and of those that need no copies in images but take longer.
    """
    from .schedule.assemble import TooLittleMemory, assemble

    if plan.peak_bytes <= most:
        return plan, tuple(passes.parts), MemoryPrice.of(most, plan, plan)
    found: list[tuple[float, Plan, tuple[Chosen, ...]]] = []
    refused: list[TooLittleMemory] = []
    sparing, spared = passes.sparing() if plan.images else None, False
    dears = _DEAR if passes.options.optimize else _DEAR[:1]
    for one, dear in [(p, dear) for p in (passes, sparing) if p for dear in dears]:
        if any(f[0] <= _ns(plan) for f in found) or spared:
            break  # it costs nothing; without images, what stores less takes longer
        chosen = selection if one is passes and dear == 1.0 else one.select(program, dear)
        try:
            with timed(one.seconds, "lower"):
                less = assemble(chosen, one.target, one.lower, max_memory=most, made=one.made)
            found.append((_ns(less), less, tuple(one.parts)))
            spared = one is sparing
        except TooLittleMemory as error:
            refused.append(error)
    if not found:
        raise min(refused, key=lambda e: e.least)
    _, less, parts = min(found, key=lambda f: f[0])
    return less, parts, MemoryPrice.of(most, less, plan)


_DEAR = (1.0, 4.0, 16.0)  # what a byte costs in choices that store less


def _ns(plan: Plan) -> float:
    """The predicted time of a call."""
    from .schedule.rounds import Loops

    return sum(n * k.predicted_ns for k, n in zip(plan.kernels, Loops(plan).runs(), strict=True))


def _keeps(graph: Graph, options: Options) -> bool:
    """Whether copies of packed arguments may stay in images: there is memory for them, and calls do
    not write over what they copy."""
    words = {i: node.type.size for i, node in enumerate(graph.inputs) if node.dtype.name == "u32"}
    taken = [words[i] for i in graph.donated if words.get(i, 0) >= WEIGHTS]
    return options.max_memory is None and not taken and 4 * sum(words.values()) <= MOST_KEPT


def _in_precision(graph: Graph, target: Target, options: Options) -> Graph:
    """The graph in the precision of the options. Raises CompileError when the target lacks it."""
    from .mixed import mixed

    if options.precision == "float32":
        return graph
    if "shader-f16" not in target.features:
        raise CompileError(
            f"precision='mixed' needs a device with the feature shader-f16, which {target.name} "
            "lacks; "
            "precision='float32' runs everywhere"
        )
    return mixed(graph)


class _Passes:
    """Chooses programs for one target, and notes what was chosen and how long it took."""

    def __init__(self, target: Target, options: Options) -> None:
        from .codegen import lower
        from .codegen.repeated import Repeated

        self.target, self.options = target, options
        self.seconds: dict[str, float] = {}
        self.parts: list[Chosen] = []
        self.made: dict[int, tuple[tuple[Group, ...], ...]] = {}
        self.lower = Repeated(lower)
        self._dear = 1.0
        self._bodies: dict[Loop, Compilation] = {}
        self._saturated: dict[tuple[Node, ...], tuple[Snapshot, EGraphReport]] = {}

    def sparing(self) -> _Passes:
        """The same passes for a device on which nothing is copied to images."""
        other = _Passes(self.target.sparing(), self.options)
        other.seconds, other.made, other._saturated = self.seconds, self.made, self._saturated
        return other

    def select(self, program: Graph, dear: float = 1.0) -> Selection:
        """The kernels of a program; one with loops is cut at them. `dear`: see `extract`."""
        self.parts, self._dear = [], dear
        if not any(n.kind is Kind.LOOP for n in program.nodes()):
            return self._choose(program)
        from .parts import Segment, cut

        groups: list[Group | LoopGroup] = []
        aliases: dict[Node, Node] = {}
        made_by: dict[Node, str] = {}
        found = cut(program, self.target.offset_alignment)
        for part in found.parts:
            if isinstance(part, Segment):
                chosen = self._choose(part.graph)
                groups += _new(chosen.groups, groups)
                aliases |= dict(zip(part.names, chosen.graph.outputs, strict=True))
                made_by |= chosen.made_by
            else:
                plan = self._body(part.op, program)
                groups.append(LoopGroup(part.op, part.operands, part.results, plan))
        sources = {n: line for c in self.parts for n, line in c.selection.graph.sources.items()}
        graph = program.replace(outputs=found.outputs, sources={**program.sources, **sources})
        return Selection(graph, tuple(groups), made_by=made_by, aliases=aliases)

    def _choose(self, program: Graph) -> Selection:
        """The kernels of a program without loops."""
        from .schedule.selection import separate

        if not self.options.optimize:
            chosen = Chosen(program, separate(program))
        else:
            chosen = self._optimize(program)
        self.parts.append(chosen)
        return chosen.selection

    def _optimize(self, program: Graph) -> Chosen:
        from .egraph import saturate_graph
        from .egraph.extract import extract
        from .egraph.keep import forced_to
        from .egraph.near import near

        if program.outputs not in self._saturated:
            with timed(self.seconds, "saturate"):
                snapshot, egraph = saturate_graph(program, saturation(self.options))
            snapshot = forced_to(snapshot, self.options.force)
            self._saturated[program.outputs] = snapshot, egraph
        snapshot, egraph = self._saturated[program.outputs]
        # e-nodes, stored values and kernels are chosen together
        with timed(self.seconds, "extract"):
            selection, extraction = extract(
                snapshot, self.target, program, effort=self.options.effort, dear=self._dear
            )
            near_misses = near(egraph, extraction, snapshot, selection)
        return Chosen(program, selection, 1, egraph, extraction, near_misses)

    def _body(self, op: Loop, program: Graph) -> Plan:
        """The plan of a loop's body."""
        found = self._bodies.get(op)
        if found is None:
            found = self._bodies[op] = compile_body(op, program, self.target, self.options)
            for stage, seconds in found.seconds.items():
                self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.parts += [replace(part, times=part.times * op.count) for part in found.parts]
        return found.plan


def _new(
    more: Sequence[Group | LoopGroup], before: Sequence[Group | LoopGroup]
) -> Iterator[Group | LoopGroup]:
    """Groups of a part without what groups of earlier parts store too: movement of inputs, for
    one."""
    from .schedule.selection import Group, reads

    stored = {out for group in before for out in group.outputs}
    for group in more:
        if isinstance(group, LoopGroup):
            yield group
            continue
        outputs = tuple(out for out in group.outputs if out not in stored)
        if outputs == group.outputs:
            yield group
        elif outputs:
            yield Group(outputs, reads(outputs, group.operands), group.predicted_ns)


def compile_body(op: Loop, program: Graph, target: Target, options: Options) -> Compilation:
    """Compile a loop's body: carries may be written over, and each result has a buffer of its
    own."""
    from .ops.elementwise import barrier
    from .schedule.repeat import unfit

    first = len(op.body.inputs) - op.stacked - op.carries
    outputs, donated = op.body.outputs, set(range(op.carries))
    names = [f"h{k}" for k in range(op.carries)]
    rows = [f"y{k}" for k in range(len(outputs) - op.carries)]
    inputs = [f"c{k}" for k in range(first)] + names + [f"x{k}" for k in range(op.stacked)]
    while True:
        body = op.body.replace(
            outputs=outputs, input_names=tuple(inputs), output_names=(*names, *rows),
            donated=tuple(sorted(first + k for k in donated)), sources=program.sources,
        )  # fmt: skip
        once = replace(target, keeps=False)  # a round's rows are not those of the last
        found = compile_graph(body, once, options, merge=False)
        shared, kept = unfit(found.plan, first, op.carries)
        if not shared and not kept:
            return found
        donated -= kept
        outputs = tuple(barrier(o) if j in shared else o for j, o in enumerate(outputs))


def saturation(options: Options) -> Saturation:
    """The options of saturation. Raises RuleError for an unknown name in `without` or `force` and
    for a rule that is not well formed."""
    from .egraph.keep import validate_forced
    from .egraph.saturate import Options as Kind
    from .egraph.validate import validate_choice

    validate_choice(options.without, options.rules)
    validate_forced(options.force)
    return Kind(
        max_rows=options.max_rows,
        max_seconds=options.max_seconds,
        relaxed=options.relaxed,
        disabled=options.without,
        extra=options.rules,
    )


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of a block to `seconds[name]`."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
