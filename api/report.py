"""Why a program became the kernels that it did: what `Compiled.report` returns and `eggpu inspect`
prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from eggpu.compiler.ir import Kind
from eggpu.compiler.pipeline import Compilation, MemoryPrice
from eggpu.compiler.schedule.plan import Binding, Buffer, Kernel, Plan
from eggpu.compiler.schedule.rounds import Loops
from eggpu.compiler.schedule.selection import Group, body

if TYPE_CHECKING:
    from eggpu.compiler.egraph.explain import Choice, Other
    from eggpu.compiler.egraph.near import NearMiss
    from eggpu.compiler.egraph.outcome import Totals


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One dispatch. `reads` and `writes` are the plan's buffers, `lines` the user's lines that it
    computes, `rules` the rewrite rules that made e-nodes of it (none: it is as it was written),
    `choices` what it computes in a form that had alternatives, and what each of these would cost
    the whole program (of up to 240 alternatives, matrix products and reductions first; none for a
    kernel inside a loop, whose choices are among the report's).
    """

    number: int
    name: str
    template: str
    computes: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    lines: tuple[str, ...]
    rules: tuple[str, ...]
    predicted_us: float
    nbytes: int  # read and written
    flops: int
    runs: int = 1  # in a call: more in a loop
    choices: tuple[Choice, ...] = ()

    def __str__(self) -> str:
        parts = [
            f"kernel {self.number} {self.name} ({self.template})",
            f"  computes   {self.computes}",
            f"  reads      {', '.join(self.reads) or 'nothing'}",
            f"  writes     {', '.join(self.writes)}",
            f"  lines      {', '.join(self.lines) or 'none'}",
            f"  rules      {', '.join(self.rules) or 'none: as it was written'}",
            f"  predicted  {self.predicted_us:.1f} us, {self.nbytes / 1e6:.3f} MB, "
            f"{self.flops / 1e6:.3f} MFLOP{f', {self.runs} times' if self.runs > 1 else ''}",
        ]
        for choice in self.choices:
            at = f" at {', '.join(choice.lines)}" if choice.lines else ""
            parts.append(f"  chosen     {choice.chosen} for {choice.type}{at}")
            parts += [f"    not      {_lost(other)}" for other in choice.others]
        return "\n".join(parts)


def _lost(other: Other) -> str:
    """`dot(div, input): 153.8 us more (+2 dispatches, +0.532 MB)`."""
    text = f"{other.text} by {other.rule}" if other.rule else other.text
    if other.loss is None:
        return f"{text}: {other.why}"
    if other.loss < 0:
        return f"{text}: {-other.loss / 1e3:.1f} us less, which the search missed ({other.why})"
    return f"{text}: {other.loss / 1e3:.1f} us more ({other.why})"


@dataclass(frozen=True, slots=True)
class ResultReport:
    """One result of the program. `kernel` is the number of the last kernel that writes it, None for
    what none does: an argument as it came, or a constant. `lines` are those that the kernel
    computes, without one the line of the result.
    """

    name: str
    type: str
    kernel: int | None
    told: str
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = self.name if self.name == "result" else f"result {self.name}"
        return f"{name} {self.type}: {self.told}"


@dataclass(frozen=True, slots=True)
class Report:
    """What the e-graph held, what was chosen of it, and why. Equal programs have equal reports.

    kernels: the plan's kernels in order.
    results: the program's results in order, each with its kernel or why it has none.
    choices: for classes with alternatives what was chosen, and each alternative with what the whole
        program would cost more and why (dispatches, bytes, flops, or no legal program).
    recognized: a pattern's name and (found, candidates); 0 candidates: nobody counted them.
    near_misses: attention that was almost found or almost chosen, the line, and the reason.
    rules: how often each rewrite rule matched.
    stop: why saturation ended: "saturated", or the bound that was hit.
    traced, greedy, joint: cost (ns), kernels, dispatches, bytes and flops of the program with a
        kernel for each op, of e-nodes chosen first and fused afterwards, and of what was chosen, as
        the search counts them: loads from far apart count more bytes, moves some flops.
    planned: the same of the plan, whose kernels alike share dispatches, as its table counts them
        (0 ns without optimization).
    stored, inlined, recomputed: classes that a kernel writes, that are computed inside kernels, and
        those of the latter that are in more than one kernel.

    A program with loops is chosen in parts, between loops and inside them. Numbers are sums over
    the parts, costs those of all runs; the texts of the parts follow one another.

    memory: with the option max_memory, what the limit costs.

    Without optimization there is no e-graph: `kernels`, `results` and `planned` say something.
    """

    name: str
    target: str
    kernels: tuple[KernelReport, ...]
    choices: tuple[Choice, ...] = ()
    recognized: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    near_misses: tuple[NearMiss, ...] = ()
    rules: Mapping[str, int] = field(default_factory=dict)
    stop: str = ""
    traced: Totals | None = None
    greedy: Totals | None = None
    joint: Totals | None = None
    stored: int = 0
    inlined: int = 0
    recomputed: int = 0
    egraph: str = ""  # the text of the dump file 2-egraph.txt
    memory: MemoryPrice | None = None  # what the option max_memory costs
    results: tuple[ResultReport, ...] = ()
    planned: Totals | None = None

    @property
    def bytes_before(self) -> int:
        """Bytes that the program moves as it was traced, a kernel an op; 0 without optimization."""
        return self.traced.nbytes if self.traced else 0

    @property
    def bytes_after(self) -> int:
        """Bytes that the chosen kernels move by the same count; 0 without optimization."""
        return self.joint.nbytes if self.joint else 0

    def data(self) -> dict[str, Any]:
        """The whole report in dicts, tuples, numbers and texts, as in a dump's report.json."""
        return {**asdict(self), "bytes_before": self.bytes_before, "bytes_after": self.bytes_after}

    def kernel(self, which: int | str) -> KernelReport:
        """The kernel of a number, or the last one that writes the buffer of that name: a result's
        ("result", or "0" of several) or a scratch value's ("t3"). Raises KeyError.
        """
        found = [k for k in self.kernels if which == k.number or which in k.writes]
        if not found:
            written = ", ".join(dict.fromkeys(w for k in self.kernels for w in k.writes))
            raise KeyError(
                f"no kernel {which!r}; there are 0 to {len(self.kernels) - 1}; "
                f"buffers that kernels write: {written}{self._unwritten(which)}"
            )
        return found[-1]

    def _unwritten(self, which: int | str) -> str:
        """What is to be said of a result that no kernel writes."""
        return next((f"; {r}" for r in self.results if r.name == which), "")

    def result(self, which: int | str) -> ResultReport:
        """The result of a name or number. Raises KeyError."""
        found = [r for k, r in enumerate(self.results) if which in (r.name, k)]
        if not found:
            names = ", ".join(r.name for r in self.results)
            raise KeyError(f"no result {which!r}; there are {names}")
        return found[0]

    def at(self, line: str) -> tuple[KernelReport, ...]:
        """The kernels that compute something of a user's line, such as "model.py:31"; folders
        before the file's name do not count."""
        line = line.replace("\\", "/").rpartition("/")[2]
        return tuple(k for k in self.kernels if line in k.lines)

    def __str__(self) -> str:
        price = f"{self.memory}\n\n" if self.memory else ""
        egraph = f"{self.egraph}\n\n" if self.egraph else ""
        return f"{egraph}{price}{kernels_text(self)}\n"


def kernels_text(report: Report) -> str:
    """The dump file 5-kernels.txt: totals, results, and each kernel with its reasons."""
    parts = [_planned(report)] if report.planned else []
    parts += map(str, report.results)
    return "\n".join([*parts, "", *map(str, report.kernels)])


def _planned(report: Report) -> str:
    """What the plan costs, and how that follows from what was chosen."""
    total, chosen = report.planned, report.joint
    assert total is not None
    text = f"plan {report.name}: {_counted(total.kernels, 'kernel')}"
    text += f", {total.cost / 1e3:.1f} us" if total.cost else ""
    saved = chosen.cost - total.cost if chosen else 0.0
    if chosen and abs(saved) >= 50:
        text += (
            f"; {_counted(chosen.kernels, 'kernel')} of {chosen.cost / 1e3:.1f} us were chosen, of "
            f"which kernels alike share dispatches ({-saved / 1e3:+.1f} us)"
        )
    return text


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def report(compilation: Compilation) -> Report:
    """The report of a compilation."""
    kernels = explained_kernels(compilation)
    name, target = compilation.plan.name, compilation.target.name
    results = result_reports(compilation, kernels)
    planned = _plan_totals(compilation.plan)
    parts = [(p.times, p.egraph, p.extraction) for p in compilation.parts]
    parts = [(n, found, chosen) for n, found, chosen in parts if found and chosen]
    if not parts:
        return Report(
            name, target, kernels, memory=compilation.memory_price, results=results, planned=planned
        )
    stops = [found.stop for _, found, _ in parts]
    return Report(
        name=name,
        target=target,
        kernels=kernels,
        choices=tuple(choice for _, _, chosen in parts for choice in chosen.choices),
        recognized=_recognized([found.recognized for _, found, _ in parts]),
        near_misses=compilation.near_misses,
        rules=dict(sum((Counter(found.matches) for _, found, _ in parts), Counter[str]())),
        stop=", ".join(dict.fromkeys(s for s in stops if s != "saturated")) or "saturated",
        traced=_sum([(n, chosen.traced) for n, _, chosen in parts]),
        greedy=_sum([(n, chosen.greedy) for n, _, chosen in parts]),
        joint=_sum([(n, chosen.joint) for n, _, chosen in parts]),
        stored=sum(chosen.stored for _, _, chosen in parts),
        inlined=sum(chosen.inlined for _, _, chosen in parts),
        recomputed=sum(chosen.recomputed for _, _, chosen in parts),
        egraph=egraph_text(compilation),
        memory=compilation.memory_price,
        results=results,
        planned=planned,
    )


def _plan_totals(plan: Plan) -> Totals:
    """The sums over a plan's kernels, with all their runs."""
    from eggpu.compiler.egraph.outcome import Totals

    each = list(zip(plan.kernels, Loops(plan).runs(), strict=True))
    return Totals(
        cost=sum(n * k.predicted_ns for k, n in each),
        kernels=len(each),
        launches=sum(n for _, n in each),
        nbytes=sum(n * (k.bytes_read + k.bytes_written) for k, n in each),
        flops=sum(n * k.flops for k, n in each),
    )


def result_reports(
    compilation: Compilation, kernels: Sequence[KernelReport]
) -> tuple[ResultReport, ...]:
    """Which kernel gives each result, or what a result is that no kernel gives."""
    plan, graph = compilation.plan, compilation.graph
    written = _written(plan)
    arguments = {plan.buffers[n].place: plan.buffers[n] for n in plan.inputs}
    found = []
    names = graph.output_names or tuple(str(k) for k in range(len(graph.outputs)))
    for name, node, number in zip(names, graph.outputs, plan.outputs, strict=True):
        leaf = node.kind in (Kind.INPUT, Kind.CONSTANT)
        line = "" if leaf else graph.sources.get(node, "")
        k = written.get(number)
        if k is not None:
            told = f"kernel {k} {plan.kernels[k].name}"
            buffer = plan.buffers[number].name
            told += f", as {buffer}" if buffer != name else ""
            lines = kernels[k].lines
        else:
            told = _given(plan, arguments, number) + (f", at {line}" if line else "")
            lines = (line,) if line else ()
        found.append(ResultReport(name, repr(node.type), k, told, lines))
    return tuple(found)


def _written(plan: Plan) -> dict[int, int]:
    """The last kernel that writes each buffer, also by what a loop leaves or stacks in it."""
    written = {
        n: k
        for k, kernel in enumerate(plan.kernels)
        for b in kernel.bindings[: kernel.writes]
        for n in b.buffers
    }
    for loop in reversed(plan.loops):
        pairs = [(row.stack, row.buffer) for row in loop.rows]
        pairs += [(n, c.after) for c in loop.carries for n in (c.even, c.odd)]
        for into, view in pairs:
            if view in written:
                written[into] = max(written[view], written.get(into, -1))
    return written


def _given(plan: Plan, arguments: Mapping[Any, Buffer], number: int) -> str:
    """What a result is that no kernel writes."""
    buffer = plan.buffers[number]
    argument = arguments.get(buffer.place)
    if argument is not None:
        return f"no kernel writes it: it is the argument {argument.name} as it came"
    if buffer.place[0] == "constant":
        return "no kernel writes it: it is a constant of the plan"
    return "no kernel writes it"


def _recognized(parts: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    total: dict[str, tuple[int, int]] = {}
    for part in parts:
        for name, (found, candidates) in part.items():
            before = total.get(name, (0, 0))
            total[name] = before[0] + found, before[1] + candidates
    return total


def _sum(parts: Sequence[tuple[int, Totals]]) -> Totals:
    """The costs of programs of which each runs some times."""
    (times, first), *rest = parts
    total = first if times == 1 else first.times(times)
    for times, more in rest:
        total = total.plus(more.times(times))
    return total


def egraph_text(compilation: Compilation) -> str:
    """The dump file 2-egraph.txt: saturation, near misses, costs and choices of each part."""
    texts: list[str] = []
    for part in compilation.parts:
        if part.egraph is not None:
            misses = "".join(f"  {miss}\n" for miss in part.near_misses)
            texts.append(f"{part.egraph.text().rstrip()}\n{misses}\n{part.extraction}")
    return "\n\n".join(texts)


def kernel_reports(plan: Plan) -> tuple[KernelReport, ...]:
    """What each kernel of a plan computes, from which lines and by which rules."""
    each = enumerate(zip(plan.kernels, Loops(plan).runs(), strict=True))
    return tuple(_kernel(plan, k, number, runs) for number, (k, runs) in each)


_MOST = 240  # alternatives that are tried for the kernels of a part


def explained_kernels(compilation: Compilation) -> tuple[KernelReport, ...]:
    """Kernels with all lines that they stand for, and the alternatives of what they compute."""
    kernels = list(kernel_reports(compilation.plan))
    for part in compilation.parts:
        explainer = part.extraction.explainer if part.extraction else None
        if explainer is None:
            continue
        class_of = part.selection.classes
        groups: dict[Group, list[int]] = {}
        for k, made in enumerate(compilation.made):
            for g in made:
                groups.setdefault(g, []).append(k)
        mine = [g for g in part.selection.groups if isinstance(g, Group) and g in groups]
        stored = {class_of[o] for g in mine for o in g.outputs if o in class_of}
        chosen: dict[int, list[Choice]] = {}
        for classes, choice in explainer.choices(_MOST):
            for c in classes:
                told = replace(choice, lines=explainer.line(c))
                chosen.setdefault(explainer.under_views(c), []).append(told)
        for group in mine:
            outs = [class_of[o] for o in group.outputs if o in class_of]
            lines = explainer.lines(part.graph, outs, stored)
            inside = [class_of[n] for n in body(group) if n in class_of]
            found = [choice for c in reversed(inside) for choice in chosen.get(c, ())]
            found += explainer.stored(outs)
            for k in groups[group]:
                kernels[k] = replace(
                    kernels[k],
                    lines=tuple(sorted({*kernels[k].lines, *lines}, key=_by_number)),
                    choices=tuple(dict.fromkeys((*kernels[k].choices, *found))),
                )
    return tuple(kernels)


def _by_number(line: str) -> tuple[str, int]:
    name, _, number = line.rpartition(":")
    return name, int(number) if number.isdecimal() else 0


def _kernel(plan: Plan, kernel: Kernel, number: int, runs: int) -> KernelReport:
    def names(bindings: Sequence[Binding]) -> tuple[str, ...]:
        return tuple(plan.buffers[n].name for b in bindings for n in b.buffers)

    return KernelReport(
        number=number,
        name=kernel.name,
        template=kernel.template,
        computes=kernel.computes,
        reads=names(kernel.bindings[kernel.writes :]),
        writes=names(kernel.bindings[: kernel.writes]),
        lines=kernel.source,
        rules=kernel.rules,
        predicted_us=kernel.predicted_ns / 1e3,
        nbytes=kernel.bytes_read + kernel.bytes_written,
        flops=kernel.flops,
        runs=runs,
    )
