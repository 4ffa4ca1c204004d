"""Plans as text: the table of kernels, the map of memory, and WGSL with the plan's names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .kernel import identifiers
from .plan import Binding, Buffer, Kernel, Plan
from .rounds import Loops

COMPUTES = 96  # characters of "computes" in the table
ROWS, COLUMNS = 24, 96  # of the picture of a block
_MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_BINDING = re.compile(r"@binding\((\d+)\) var(?:<storage, \w+>)? (\w+)\s*:")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; numbers stand on the right."""

    title: str
    cells: list[str]
    right: bool = False

    def lines(self) -> list[str]:
        """Title and cells, padded to one width."""
        texts = [self.title, *self.cells]
        width = max(map(len, texts))
        return [t.rjust(width) if self.right else t.ljust(width) for t in texts]


def plan_text(plan: Plan, measured_ns: Sequence[float] | None = None) -> str:
    """The kernels of a plan as a table with totals; measured times add their rates and shares.

    Of a kernel in a loop, times, bytes and flops are those of all its runs.
    """
    kernels, runs = plan.kernels, Loops(plan).runs()
    pairs = list(zip(kernels, runs, strict=True))
    columns = [
        Column("#", [str(k) for k in range(len(kernels))], right=True),
        Column("kernel", [k.name for k in kernels]),
        Column("template", [k.template for k in kernels]),
        Column("grid", [_by(k.grid) for k in kernels]),
        Column("workgroup", [_by(k.workgroup) for k in kernels]),
        Column("reads -> writes", [_flow(plan, k) for k in kernels]),
        Column("predicted us", [f"{n * k.predicted_ns / 1e3:.1f}" for k, n in pairs], right=True),
        Column("MB", [f"{n * _moved(k) / 1e6:.3f}" for k, n in pairs], right=True),
        Column("MFLOP", [f"{n * k.flops / 1e6:.3f}" for k, n in pairs], right=True),
    ]
    if plan.loops:
        columns.insert(1, Column("runs", [str(n) for n in runs], right=True))
    if measured_ns is not None:
        columns += _measured(pairs, measured_ns)
    columns.append(Column("computes", [_computes(k) for k in kernels]))
    return "\n".join([_headline(plan, measured_ns), *_table(columns), *_totals(plan)]) + "\n"


def _headline(plan: Plan, measured_ns: Sequence[float] | None) -> str:
    kernels = list(zip(plan.kernels, Loops(plan).runs(), strict=True))
    flops, moved = (sum(n * of(k) for k, n in kernels) for of in (_flops, _moved))
    predicted = sum(n * k.predicted_ns for k, n in kernels)
    dispatches = sum(n for _, n in kernels)
    parts = [
        _count(len(kernels), "kernel"),
        *([f"{dispatches} dispatches"] if plan.loops else []),
        f"{flops / 1e6:.2f} MFLOP",
        f"{moved / 1e6:.2f} MB moved",
        f"{predicted / 1e3:.1f} us predicted",
    ]
    if measured_ns is not None:
        parts.append(f"{sum(measured_ns) / 1e3:.1f} us measured")
    return f"plan {plan.name}: {', '.join(parts)}"


def _measured(kernels: Sequence[tuple[Kernel, int]], ns: Sequence[float]) -> list[Column]:
    if len(ns) != len(kernels):
        raise ValueError(f"needs one time for each of {len(kernels)} kernels, got {len(ns)}")
    total = sum(ns) or 1.0
    pairs = [(k, n, t) for (k, n), t in zip(kernels, ns, strict=True)]
    flops = [f"{n * k.flops / t:.2f}" if t else "-" for k, n, t in pairs]
    moved = [f"{n * _moved(k) / t:.2f}" if t else "-" for k, n, t in pairs]
    return [
        Column("us", [f"{t / 1e3:.1f}" for t in ns], right=True),
        Column("GFLOP/s", flops, right=True),
        Column("GB/s", moved, right=True),
        Column("share", [f"{100 * t / total:.1f}%" for t in ns], right=True),
    ]


def _totals(plan: Plan) -> list[str]:
    scratch = sum(b.role == "scratch" for b in plan.buffers)
    over = sum(_written_over(plan, b) is not None for b in plan.buffers)
    blocks = f" in {len(plan.arena)} blocks" if len(plan.arena) > 1 else ""
    lines = [
        f"  loop {r}: kernels {loop.start} to {loop.stop - 1} run {loop.count} times, with "
        f"{_count(len(loop.carries), 'carry', 'carries')} and {_count(len(loop.rows), 'stack')}"
        for r, loop in enumerate(plan.loops)
    ]
    lines += [
        f"  arena {_size(sum(plan.arena))}{blocks} holds {_count(scratch, 'scratch buffer')} "
        f"({_size(plan.scratch_bytes)} without reuse)"
    ]
    if plan.donated:
        donated = _count(len(plan.donated), "donated input")
        lines.append(f"  {_count(over, 'result')} written over {donated}")
    lines.append(f"  {_size(plan.peak_bytes)} on the device during a call")
    return lines


def _table(columns: Sequence[Column]) -> list[str]:
    rows = zip(*(c.lines() for c in columns), strict=True)
    return [("  " + "  ".join(row)).rstrip() for row in rows]


def _flow(plan: Plan, kernel: Kernel) -> str:
    names = [_bound(plan, b) for b in kernel.bindings]
    reads, writes = names[kernel.writes :], names[: kernel.writes]
    return f"{', '.join(reads)} -> {', '.join(writes)}".strip()


def _bound(plan: Plan, binding: Binding) -> str:
    name = plan.buffers[binding.buffer].name
    return f"{name} and {len(binding.more)} more" if binding.more else name


def _computes(kernel: Kernel) -> str:
    text = kernel.computes
    if len(text) > COMPUTES:
        text = text[: COMPUTES - 3] + "..."
    lines = ", ".join(kernel.source[:3]) + (", ..." if len(kernel.source) > 3 else "")
    return f"{text}  # {lines}" if lines else text


def _moved(kernel: Kernel) -> int:
    return kernel.bytes_read + kernel.bytes_written


def _by(sizes: tuple[int, int, int]) -> str:
    return "x".join(map(str, sizes))


def _flops(kernel: Kernel) -> int:
    return kernel.flops


def _count(n: int, what: str, several: str = "") -> str:
    return f"{n} {what if n == 1 else several or what + 's'}"


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def _written_over(plan: Plan, buffer: Buffer) -> Buffer | None:
    """The input whose memory a result takes, if any."""
    if buffer.role == "input" or buffer.place[0] not in ("input", "pack"):
        return None
    over = (n for n in plan.inputs if plan.buffers[n].place == buffer.place)
    return plan.buffers[next(over)]


def lifetimes(plan: Plan) -> list[tuple[int, int] | None]:
    """The first and last kernel that binds each buffer; None when none does.

    What a loop reads or writes by its views is in use as long as the loop runs.
    """
    found: list[tuple[int, int] | None] = [None] * len(plan.buffers)

    def use(buffer: int, first: int, last: int) -> None:
        start, end = found[buffer] or (first, last)
        found[buffer] = min(start, first), max(end, last)

    for k, kernel in enumerate(plan.kernels):
        for number in (n for binding in kernel.bindings for n in binding.buffers):
            use(number, k, k)
    for loop in reversed(plan.loops):
        stacks = [row.stack for row in loop.rows]
        for buffer in (*stacks, *(b for c in loop.carries for b in (c.first, c.even, c.odd))):
            use(buffer, loop.start, loop.stop - 1)
    return found


def memory_map(plan: Plan) -> str:
    """Every buffer with its place, bytes and lifetime, and a picture of each block of scratch."""
    lives = lifetimes(plan)
    marks = _marks(plan)
    columns = [
        Column("", [marks.get(n, "") for n in range(len(plan.buffers))]),
        Column("buffer", [b.name for b in plan.buffers]),
        Column("type", [f"{b.dtype}[{', '.join(map(str, b.shape))}]" for b in plan.buffers]),
        Column("place", [_place(plan, b) for b in plan.buffers]),
        Column(
            "offset", [str(b.place[2]) if len(b.place) == 3 else "" for b in plan.buffers], True
        ),
        Column("bytes", [str(b.nbytes) for b in plan.buffers], True),
        Column("kernels", [f"{x[0]}-{x[1]}" if x else "" for x in lives]),
    ]
    lines = [
        f"memory of {plan.name}: {_size(plan.peak_bytes)} during a call",
        *_totals_by_role(plan),
    ]
    lines += _table(columns)
    for block in range(len(plan.arena)):
        lines += _picture(plan, block, lives, marks)
    return "\n".join(lines) + "\n"


def _totals_by_role(plan: Plan) -> list[str]:
    own = {b.place: b for b in plan.buffers if b.place[0] not in ("arena", "loop")}.values()
    names = {
        "input": "arguments",
        "pack": "arguments side by side",
        "output": "results of their own",
        "constant": "constants",
    }
    lines: list[str] = []
    for kind, name in names.items():
        sizes = [b.nbytes for b in own if b.place[0] == kind]
        if sizes:
            lines.append(f"  {name}: {_size(sum(sizes))} in {_count(len(sizes), 'buffer')}")
    blocks = _count(len(plan.arena), "block")
    lines.append(f"  arena: {_size(sum(plan.arena))} in {blocks}")
    return lines


def _marks(plan: Plan) -> dict[int, str]:
    scratch = [n for n, b in enumerate(plan.buffers) if b.role == "scratch"]
    return {n: _MARKS[i % len(_MARKS)] for i, n in enumerate(scratch)}


def _place(plan: Plan, buffer: Buffer) -> str:
    over = _written_over(plan, buffer)
    if over is not None:
        return f"over {over.name}"
    kind, number = buffer.place[:2]
    return f"{'block' if kind == 'arena' else kind} {number}"


def _picture(
    plan: Plan, block: int, lives: Sequence[tuple[int, int] | None], marks: dict[int, str]
) -> list[str]:
    """Kernels from left to right, bytes from bottom to top; small buffers lie before large ones."""
    size, count = plan.arena[block], len(plan.kernels)
    columns = min(count, COLUMNS)
    inside = [n for n, b in enumerate(plan.buffers) if b.place[:2] == ("arena", block)]
    edges = _edges([_range(plan.buffers[n]) for n in inside], size)
    rows = [["."] * columns for _ in edges]
    for n in sorted(inside, key=lambda n: (-plan.buffers[n].nbytes, n)):
        life, (start, end) = lives[n], _range(plan.buffers[n])
        if life is None:
            continue
        first, last = life[0] * columns // count, max(0, (life[1] + 1) * columns - 1) // count
        for low, high, row in zip(edges, [*edges[1:], size], rows, strict=True):
            if low < end and start < high:
                row[first : last + 1] = marks[n] * (last + 1 - first)
    width = len(str(size))
    picture = [f"  {low:>{width}} |{''.join(row)}" for low, row in zip(edges, rows, strict=True)]
    each = f", {-(-count // columns)} kernels a column" if count > columns else ""
    return [f"block {block}: {_size(size)}, kernels 0 to {count - 1}{each}", *reversed(picture)]


def _edges(ranges: Sequence[tuple[int, int]], size: int) -> list[int]:
    """Where the rows of a picture begin: at the buffers' ends, or evenly when those are many."""
    ends = sorted({0, *(x for r in ranges for x in r if x < size)})
    return ends if len(ends) <= ROWS else [size * row // ROWS for row in range(ROWS)]


def _range(buffer: Buffer) -> tuple[int, int]:
    start = buffer.place[2] if len(buffer.place) == 3 else 0
    return start, start + buffer.nbytes


def kernel_wgsl(plan: Plan, number: int) -> str:
    """The WGSL of a kernel with the plan's names for its buffers, to be read beside the plan."""
    kernel = plan.kernels[number]
    bound = {int(k): name for k, name in _BINDING.findall(kernel.wgsl)}
    names = [plan.buffers[b.buffer].name for b in kernel.bindings]
    words = identifiers(names, kernel.wgsl)
    new = {old: words[k] for k, old in bound.items() if k < len(words)}
    text = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: new.get(m[0], m[0]), kernel.wgsl)
    lines = [f"// kernel {number} of {plan.name} ({kernel.template}): {_flow(plan, kernel)}"]
    lines += [f"// from {', '.join(kernel.source)}"] if kernel.source else []
    return "\n".join([*lines, text])
