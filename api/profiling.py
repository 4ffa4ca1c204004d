"""Measured times of a plan's kernels: as a table, as data, and as a trace for ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eggpu.compiler.schedule.plan import Kernel, Plan
from eggpu.compiler.schedule.rounds import Loops
from eggpu.compiler.schedule.show import Column
from eggpu.compiler.schedule.target import Profile as Rates
from eggpu.compiler.schedule.target import Target

_COMPUTES = 80  # characters of what a kernel computes
_PROCESS, _THREAD = 1, 1  # of the trace: the device, and the kernels on it


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel of a call: when it began and how long it took (us), what it moved and computed.

    Of a kernel in a loop these are sums over its `runs`, as if they followed one another.

    `roof` is the part of the device's best rate that it reached, at its bytes or at its arithmetic,
    whichever takes longer by the device's profile (`bound` says which).
    """

    number: int
    name: str
    template: str
    start_us: float
    us: float
    flops: int
    nbytes: int
    gflops: float  # GFLOP/s
    gbytes: float  # GB/s
    roof: float
    bound: str  # "memory" or "arithmetic"
    predicted_us: float
    computes: str
    lines: tuple[str, ...]
    runs: int = 1


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured time of each kernel of a plan, in ns; printing it shows a table.

    >>> profile = step.profile(*args)
    >>> print(profile)                    # the table
    >>> slow = max(profile.kernels, key=lambda k: k.us)
    >>> profile.save("step.json")         # open it in ui.perfetto.dev
    """

    plan: Plan
    ns: tuple[int, ...]
    target: Target

    @property
    def kernels(self) -> tuple[KernelTime, ...]:
        """Each kernel with its rates; they follow one another without the gaps between them."""
        found: list[KernelTime] = []
        start = 0
        each = zip(self.plan.kernels, self.ns, Loops(self.plan).runs(), strict=True)
        for number, (kernel, ns, runs) in enumerate(each):
            found.append(_timed(number, kernel, runs, start, ns, self.target.profile))
            start += ns
        return tuple(found)

    @property
    def us(self) -> float:
        """The time of all kernels."""
        return sum(self.ns) / 1e3

    @property
    def roof(self) -> float:
        """The part of the device's best rates that the call as a whole reached."""
        return sum(k.roof * k.us for k in self.kernels) / self.us if self.us else 0.0

    def __str__(self) -> str:
        kernels, total = self.kernels, self.us or 1.0
        columns = [
            Column("#", [str(k.number) for k in kernels], right=True),
            Column("kernel", [k.name for k in kernels]),
            Column("template", [k.template for k in kernels]),
            Column("us", [f"{k.us:.1f}" for k in kernels], right=True),
            Column("share", [f"{100 * k.us / total:.1f}%" for k in kernels], right=True),
            Column("GFLOP/s", [f"{k.gflops:.2f}" for k in kernels], right=True),
            Column("GB/s", [f"{k.gbytes:.2f}" for k in kernels], right=True),
            Column("roof", [f"{100 * k.roof:.0f}%" for k in kernels], right=True),
            Column("bound by", [k.bound for k in kernels]),
            Column("predicted us", [f"{k.predicted_us:.1f}" for k in kernels], right=True),
            Column("computes", [_short(k) for k in kernels]),
        ]
        rows = zip(*(c.lines() for c in columns), strict=True)
        head = (
            f"profile of {self.plan.name} on {self.target.name}: "
            f"{len(kernels)} kernel{'s' * (len(kernels) != 1)}, "
            f"{self.us:.1f} us measured, {100 * self.roof:.0f}% of the roof"
        )
        return "\n".join([head, *(("  " + "  ".join(row)).rstrip() for row in rows)]) + "\n"

    def data(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "plan": self.plan.name,
            "device": self.target.name,
            "driver": self.target.driver,
            "us": self.us,
            "roof": self.roof,
            "kernels": [asdict(k) for k in self.kernels],
        }

    def trace(self) -> dict[str, Any]:
        """The call in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

        One complete event a kernel; counters for GFLOP/s, GB/s and the part of the roof.
        """
        events = [
            _named("process_name", self.target.name),
            _named("thread_name", f"kernels of {self.plan.name}"),
        ]
        for kernel in self.kernels:
            events += _events(kernel)
        end = {"GFLOP/s": 0.0, "GB/s": 0.0, "roof %": 0.0}
        events += [_counter(name, self.us, value) for name, value in end.items()]
        other = {"plan": self.plan.name, "driver": self.target.driver}
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}

    def save(self, path: str | Path) -> Path:
        """Write the trace as JSON, to be opened in ui.perfetto.dev."""
        where = Path(path)
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(json.dumps(self.trace()), encoding="utf-8")
        return where


def _short(kernel: KernelTime) -> str:
    text = kernel.computes
    text = text if len(text) <= _COMPUTES else text[: _COMPUTES - 3] + "..."
    return f"{text}  # {', '.join(kernel.lines[:3])}" if kernel.lines else text


def _timed(number: int, kernel: Kernel, runs: int, start: int, ns: int, rates: Rates) -> KernelTime:
    nbytes, flops = runs * (kernel.bytes_read + kernel.bytes_written), runs * kernel.flops
    memory, arithmetic = nbytes / rates.bandwidth, flops / _rate(kernel, rates)
    return KernelTime(
        number=number,
        name=kernel.name,
        template=kernel.template,
        start_us=start / 1e3,
        us=ns / 1e3,
        flops=flops,
        nbytes=nbytes,
        gflops=flops / ns if ns else 0.0,
        gbytes=nbytes / ns if ns else 0.0,
        roof=max(memory, arithmetic) / ns if ns else 0.0,
        bound="memory" if memory >= arithmetic else "arithmetic",
        predicted_us=runs * kernel.predicted_ns / 1e3,
        computes=kernel.computes,
        lines=kernel.source,
        runs=runs,
    )


def _rate(kernel: Kernel, rates: Rates) -> float:
    """The best flop rate (GFLOP/s) for kernels of a family."""
    family = kernel.template.partition("_")[0]
    return {"contract": rates.contract, "attention": rates.attention}.get(family, rates.elementwise)


def _named(what: str, name: str) -> dict[str, Any]:
    args = {"name": name}
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": _THREAD, "ts": 0, "args": args}


def _counter(name: str, at: float, value: float) -> dict[str, Any]:
    args = {name: round(value, 3)}
    return {"name": name, "ph": "C", "pid": _PROCESS, "tid": _THREAD, "ts": at, "args": args}


def _events(kernel: KernelTime) -> Sequence[dict[str, Any]]:
    args = {
        "kernel": kernel.number,
        "GFLOP/s": round(kernel.gflops, 3),
        "GB/s": round(kernel.gbytes, 3),
        "roof %": round(100 * kernel.roof, 2),
        "bound": kernel.bound,
        "predicted us": round(kernel.predicted_us, 3),
        "computes": kernel.computes,
        "lines": ", ".join(kernel.lines),
    }
    whole = {
        "name": kernel.name,
        "cat": kernel.template,
        "ph": "X",
        "pid": _PROCESS,
        "tid": _THREAD,
        "ts": kernel.start_us,
        "dur": kernel.us,
        "args": args,
    }
    rates = {"GFLOP/s": kernel.gflops, "GB/s": kernel.gbytes, "roof %": 100 * kernel.roof}
    return [whole, *(_counter(name, kernel.start_us, v) for name, v in rates.items())]
