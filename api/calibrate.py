"""Measures a device's profile: the rates with which the cost model predicts what its kernels take.

Each rate is fitted to a small program whose time it decides. The program is compiled and timed; the
rate is the one for which the model's prediction of the same kernels equals the measurement. So a
rate means what the cost model takes it for, whatever that is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

import eggpu as eg
from eggpu import nn
from eggpu.compiler.ir import Graph
from eggpu.compiler.pipeline import Options
from eggpu.compiler.schedule.target import Profile, Target
from eggpu.compiler.tracing import trace_call
from eggpu.runtime import Device, Executable

Values = tuple[Any, ...]
_STEPS = 12  # of the search for a rate
_WIDEST = 64.0  # a rate is looked for between 1/64 and 64 times the last guess
_BOUND = 1.02  # a rate is looked for where the prediction is this many times the least there is
_REPEAT = 6


@dataclass(frozen=True, slots=True)
class Probe:
    """A program that tells a rate. `bias` are rates with which the wanted kernels win; they decide
    which kernels are timed, and stay while the rate is fitted.
    """

    rate: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    bias: dict[str, float] = field(default_factory=dict[str, float])
    least: float = 0.0
    choices: tuple[float, ...] = ()  # the rate is one of these; else any number
    force: tuple[str, ...] = ()  # kernels that are taken whatever they cost


@dataclass(frozen=True, slots=True)
class Fit:
    """A rate as it was found, with the predicted and measured time of its probe in us."""

    rate: str
    value: float
    predicted_us: float
    measured_us: float


def calibrate(device: Device, budget: float = 55.0) -> Iterator[Fit]:
    """Fit each rate in turn; `budget` seconds end it early, at whole rates. See `profile_of`."""
    start = time.perf_counter()
    target = device.target
    found = launch(device)
    yield found
    profile = replace(target.profile, launch=found.value)
    for group in probes(target):
        if time.perf_counter() - start > budget:
            return
        fit = _fit(group, device, replace(target, profile=profile))
        if fit is not None:
            profile = _with(profile, {fit.rate: fit.value})
            yield fit


def profile_of(fits: Sequence[Fit], before: Profile) -> Profile:
    """The profile with what was found."""
    return _with(before, {fit.rate: fit.value for fit in fits})


def probes(target: Target) -> list[list[Probe]]:
    """The probes of each rate, in an order in which each needs only rates found before it."""
    cpu = target.kind == "cpu"
    n = min(1 << 22 if cpu else 1 << 26, target.max_binding_bytes // 8)
    side = 768 if cpu else 4096
    heads, length = (4, 512) if cpu else (96, 1024)
    few = 1 if cpu else 4
    matrix, rows = (1024, 1024) if cpu else (8192, 8192), 16384
    out = [
        [Probe("bandwidth", lambda x: x * 2.0, ((n,),))],
        [Probe("elementwise", _busy, ((n // 4,),))],
        [Probe("contract", eg.matmul, ((side, side), (side, side)))],
        [
            Probe(
                "attention",
                nn.scaled_dot_product_attention,
                ((1, heads, length, 64),) * 3,
                bias={"contract": target.profile.contract / 256},
            )
        ],
        [
            Probe(  # so few heads that each workgroup has its own pace
                "decode",
                nn.scaled_dot_product_attention,
                ((few, 1, 64), (few, 8192, 64), (few, 8192, 64)),
                force=("attention_online",),
            )
        ],
        [Probe("strided", lambda x: eg.transpose(x) * 2.0, (matrix,), least=1.0)],
        [
            Probe("rows", nn.softmax, ((r, rows),), choices=tuple(2.0**k for k in range(13)))
            for r in ((1, 4, 64) if cpu else (4, 64, 1024))
        ],
    ]
    if not cpu:  # the model asks what stays on chip for GPUs only
        lengths = (4096, 16384, 65536)
        sizes = tuple(2.0**k for k in range(10, 18))
        long = [Probe("onchip", nn.softmax, ((n // 2 // k, k),), choices=sizes) for k in lengths]
        out.append(long)
    return out


def _busy(x: eg.Array) -> eg.Array:
    """Much arithmetic for each element."""
    for k in range(12):
        x = eg.tanh(x * (1.0 + 0.01 * k)) + 0.1
    return x


def launch(device: Device) -> Fit:
    """ns of one more dispatch: the difference of a long and a short chain of tiny kernels."""
    few, many = 8, 136

    def chain(count: int) -> float:
        def program(x: eg.Array) -> eg.Array:
            for _ in range(count):
                x = eg.tanh(x)
            return x

        run = eg.compile(program, optimize=False, cache=False)
        x = eg.put(np.zeros(64, np.float32))
        run(x).numpy()
        times = []
        for _ in range(15):
            start = time.perf_counter()
            run(x).numpy()
            times.append(time.perf_counter() - start)
        return 1e9 * min(times)  # other programs only add

    ns = max(100.0, (chain(many) - chain(few)) / (many - few))
    return Fit("launch", ns, ns / 1e3, ns / 1e3)


@dataclass(slots=True)
class _Case:
    """A probe on a device: what the model predicts for a rate, and what was measured."""

    probe: Probe
    graph: Graph
    snapshot: Any
    target: Target
    measured: float = 0.0

    def predict(self, value: float) -> float:
        """ns of the program by the cost model."""
        return sum(g.predicted_ns for g in self.selection(value).groups)

    def selection(self, value: float) -> Any:
        from eggpu.compiler.egraph.extract import extract

        biased = _with(self.target.profile, {**self.probe.bias, self.probe.rate: value})
        target = replace(self.target, profile=biased)
        return extract(self.snapshot, target, self.graph, effort=1, explain=0)[0]


def _case(probe: Probe, device: Device, target: Target) -> _Case:
    from eggpu.compiler.codegen import lower
    from eggpu.compiler.egraph import saturate_graph
    from eggpu.compiler.egraph.keep import forced_to
    from eggpu.compiler.expand import expand
    from eggpu.compiler.pipeline import saturation
    from eggpu.compiler.schedule.assemble import assemble

    rng = np.random.default_rng(0)
    values = [rng.standard_normal(s, np.float32) for s in probe.shapes]
    graph = expand(trace_call(probe.function, values, name=probe.rate).graph)
    snapshot, _ = saturate_graph(graph, saturation(Options(force=probe.force)))
    snapshot = forced_to(snapshot, probe.force)
    case = _Case(probe, graph, snapshot, target)
    guess = getattr(target.profile, probe.rate)
    executable = Executable(assemble(case.selection(guess), target, lower), device)
    buffers = [device.upload(v) for v in values]
    executable(buffers)  # compiles, and shows what cannot run before it is timed
    device.synchronize()
    # the least, since other programs only add
    case.measured = float(executable.total(buffers, repeat=_REPEAT))
    return case


def _fit(group: Sequence[Probe], device: Device, target: Target) -> Fit | None:
    """The rate with the least error over a group of probes of it."""
    cases = [_case(probe, device, target) for probe in group]
    first = group[0]
    guess = float(getattr(target.profile, first.rate))
    # device time has no launch in it, the prediction has one for each dispatch
    wanted = [case.measured + target.profile.launch for case in cases]
    if first.choices:
        value = min(first.choices, key=lambda v: (_error(cases, wanted, v), v))
    else:
        value = max(first.least, _solved(cases[0].predict, wanted[0], guess))
    predicted = sum(case.predict(value) for case in cases)
    return Fit(first.rate, value, predicted / 1e3, sum(wanted) / 1e3)


def _error(cases: Sequence[_Case], wanted: Sequence[float], value: float) -> float:
    """The squared error of predictions, in logarithms."""
    pairs = zip(cases, wanted, strict=True)
    return round(sum(math.log(c.predict(value) / w) ** 2 for c, w in pairs), 3)


def _solved(predict: Callable[[float], float], wanted: float, guess: float) -> float:
    """The rate between 1/64 and 64 guesses for which the prediction is nearest: bisection. Where
    other rates bound the prediction, it is the rate from which on they do."""
    low, high = guess / _WIDEST, guess * _WIDEST
    first, last = predict(low), predict(high)
    rising = last > first
    wanted = max(wanted, _BOUND * min(first, last))
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        if (predict(middle) < wanted) == rising:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def _with(profile: Profile, rates: dict[str, float]) -> Profile:
    """The profile with other rates, whole numbers where it has them."""
    whole = {f.name for f in fields(Profile) if f.type == "int"}
    typed = {n: int(v) if n in whole else float(v) for n, v in rates.items()}
    return replace(profile, **typed)  # type: ignore[arg-type]
