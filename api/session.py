"""The only code that holds a compiler and a device: compiled functions, and arrays in device
memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eggpu import cache
from eggpu.compiler import pytree
from eggpu.compiler.errors import CompileError, TraceError
from eggpu.compiler.ir import Graph
from eggpu.compiler.pipeline import Compilation, Options, compile_graph, timed
from eggpu.compiler.tracing import (
    Array,
    Traced,
    array,
    host_value,
    is_traced,
    leaf_type,
    parameter_names,
    trace_call,
)
from eggpu.compiler.types import Type
from eggpu.leaves import buffer_of, buffers_of, not_on_devices, types_of
from eggpu.profiles import measured
from eggpu.runtime import Device, DeviceBuffer, Executable, open_device
from eggpu.runtime import synchronize as synchronize_device
from eggpu.steps import Arguments, Results

if TYPE_CHECKING:
    from eggpu.profiling import Profile
    from eggpu.report import Report
    from eggpu.tuning import Tuning

_current: list[Device] = []
_inside: ContextVar[Device | None] = ContextVar("eggpu_device", default=None)  # a block of `using`


def device(name: str | int | None = None, backend: str | None = None) -> Device:
    """The device that compiled functions run on; with arguments, open another one and use it from
    now on.

    `name` is a part of an adapter's name or its number in `eggpu devices`; the environment variable
    EGGPU_DEVICE is used when nothing was chosen. Raises DeviceError, which says what to install,
    when there is none.
    """
    if name is None and backend is None and (inside := _inside.get()) is not None:
        return inside
    if name is not None or backend is not None or not _current:
        chosen = name if name is not None else os.environ.get("EGGPU_DEVICE")
        opened = open_device(None if chosen is None else str(chosen), backend)
        opened.target = measured(opened.target)
        if _inside.get() is not None:
            _inside.set(opened)
            return opened
        _current[:] = [opened]
    return _current[0]


@contextmanager
def using(other: Device) -> Iterator[Device]:
    """Inside the block this thread's compiled functions run on a device that is open already."""
    before = _inside.set(other)
    try:
        yield other
    finally:
        _inside.reset(before)


def synchronize() -> None:
    """Wait until the device has done all that was asked of it."""
    if (opened := _inside.get() or next(iter(_current), None)) is not None:
        synchronize_device(opened)


def put(value: Any) -> Array:
    """`value` as an array in device memory. Raises DonatedError for one that is gone."""
    found = array(value)
    _ = buffer_of(found, device()).storage
    return found


def _tuning(options: Options) -> Tuning | None:
    """What times tilings, if that is asked for."""
    if not options.tune:
        return None
    from eggpu.tuning import Tuning

    return Tuning()


@dataclass
class _Version:
    """One signature's program. `passes` is there when it was compiled in this process, not taken
    from the cache."""

    traced: Traced
    graph: Graph
    executable: Executable
    passes: Compilation | None
    options: Options
    seconds: dict[str, float]
    takes: Any = None  # structure and types of the arguments
    fetch: tuple[int, ...] = ()  # leaves of the result that the host reads

    def __call__(self, buffers: Sequence[DeviceBuffer]) -> Any:
        """What the function returns for arguments in these buffers."""
        return self.results.handed(self.executable, self.executable(buffers, self.fetch))

    def again(self, args: Sequence[Any], leaves: Mapping[int, Any]) -> Any:
        """The same for arguments that the last call returned, and leaves after them; None for
        others."""
        executable = self.executable
        assert self.arguments is not None
        handed = self.arguments.handed(args, executable.cycle)
        if handed is None:
            return None
        others = [buffer_of(v, executable.device, self.takes[1][k]) for k, v in leaves.items()]
        done = executable.again(handed, others, self.fetch)
        return None if done is None else self.results(*done)

    def check(self, leaves: Mapping[int, Any]) -> None:
        """Raise OutOfRange where the host has an argument that is not as the function needs it;
        `leaves` are those that it may have, by position."""
        for position, expected in self.traced.expected.items():
            if position not in leaves:
                continue
            leaf = leaves[position]
            value = host_value(leaf) if isinstance(leaf, Array) else np.asarray(leaf)
            if value is not None:
                for one in expected:
                    one.check(value, self.graph.input_names[position])

    @functools.cached_property
    def types(self) -> list[Type]:
        return [n.type for n in self.graph.outputs]

    @functools.cached_property
    def results(self) -> Results:
        return Results(self.traced.results, self.types, self.executable.cycle, self.fetch)

    @functools.cached_property
    def arguments(self) -> Arguments | None:
        """None for a signature with keywords."""
        (positional, keywords), types = self.takes[0].children, self.takes[1]
        return None if keywords.children else Arguments(positional, types)

    def compilation(self) -> Compilation:
        """What each pass gave; compiled for its reports when the plan came from the cache."""
        if self.passes is None:
            target = self.executable.device.target
            self.passes = compile_graph(
                self.graph,
                target,
                self.options,
                trace=self.traced.primal,
                tuner=_tuning(self.options),
            )
        return self.passes


class Compiled:
    """A function compiled once for each signature: the structure, shapes and dtypes of its
    arguments.

    Call it like the function. The stages of the latest signature are `.graph`, `.report`, `.plan`,
    `.wgsl` and `.memory`; `explain(*args)`, `profile(*args)` and `dump(folder, *args)` compile for
    the arguments when needed.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        donate: Sequence[str | int],
        name: str | None,
        options: Options,
        cached: bool,
        fetch: Sequence[int] = (),
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = name or getattr(function, "__name__", "program")
        self.options = options
        self._cached = cached
        self._fetch = tuple(fetch)
        self._parameters = parameter_names(function)
        self.donated = tuple(self._position(d) for d in donate)
        self._versions: dict[Any, _Version] = {}
        self._latest: _Version | None = None
        self.recompilations: list[
            str
        ] = []  # why each further signature needed a program of its own

    @property
    def programs(self) -> int:
        """How many programs it has compiled: one a signature and device."""
        return len(self._versions)

    def _position(self, argument: str | int) -> int:
        if isinstance(argument, int) and argument >= 0:
            return argument
        if argument not in self._parameters:
            raise TraceError(
                f"donate names {argument!r}, but {self.name} has the parameters "
                f"{', '.join(self._parameters)}"
            )
        return self._parameters.index(argument)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and (done := self._again(args)) is not None:
            return done[0]
        leaves, structure = pytree.flatten_call(args, kwargs)
        others = not_on_devices(leaves)
        if any(isinstance(v := leaves[i], Array) and is_traced(v) for i in others):
            return self.function(*args, **kwargs)  # inside another trace: part of that program
        version = self._version(leaves, structure)
        version.check(dict(enumerate(leaves)))
        return version(buffers_of(leaves, version.executable.device, others))

    def _again(self, args: Sequence[Any]) -> tuple[Any] | None:
        """What the latest program returns, where it takes `args` as far as is known of them without
        looking into them."""
        latest, on = self._latest, device()
        if latest is None or latest.executable.device is not on or latest.arguments is None:
            return None
        if not latest.traced.expected:
            direct = latest.arguments.direct(args, on)
            if direct is not None:
                return (latest(direct),)
        leaves = latest.arguments.leaves(args)
        if leaves is None:
            return None
        latest.check(leaves)
        if (done := latest.again(args, leaves)) is not None:
            return (done,)
        buffers = latest.arguments.buffers(args, on)
        return None if buffers is None else (latest(buffers),)

    def _version(self, leaves: Sequence[Any], structure: pytree.Structure) -> _Version:
        on, types = device(), types_of(leaves)
        latest = self._latest
        if (
            latest is not None
            and latest.executable.device is on
            and latest.takes == (structure, types)
        ):
            latest.takes = (
                structure,
                types,
            )  # the same objects as in the next call: compared in no time
            return latest
        key = (structure, tuple(types), id(on))
        found = self._versions.get(key)
        if found is None:
            if self._versions:
                self.recompilations.append(self._difference(key))
            found = self._versions[key] = self._compile(leaves, structure, on)
            found.takes = (structure, types)
        self._latest = found
        return found

    def _difference(self, key: Any) -> str:
        structure, types, _ = key
        known = [k for k in self._versions if k[0] == structure and len(k[1]) == len(types)]
        if not known:
            return "the arguments have another structure or other static values"
        changed = [
            (i, a, b) for i, (a, b) in enumerate(zip(known[-1][1], types, strict=True)) if a != b
        ]
        if not changed:
            return "another device"
        names = self._latest.graph.input_names if self._latest else ()
        shown = [f"{names[i] if i < len(names) else i}: {a} -> {b}" for i, a, b in changed[:4]]
        return ", ".join(shown) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")

    def _compile(self, leaves: Sequence[Any], structure: pytree.Structure, on: Device) -> _Version:
        on.check()
        seconds: dict[str, float] = {}
        with timed(seconds, "trace"):
            args, kwargs = pytree.unflatten(
                structure, [Array(storage=_TypeOnly(leaf_type(v))) for v in leaves]
            )
            traced = trace_call(self.function, args, kwargs, names=self._parameters, name=self.name)
            graph = traced.graph.replace(donated=self._donated(structure))
        with timed(seconds, "look up"):
            name = cache.key(graph, on.target, self.options) if self._cached else ""
            plan = cache.load(name) if name else None
        passes = None
        if plan is None:
            tuner = _tuning(self.options)
            passes = compile_graph(graph, on.target, self.options, trace=traced.primal, tuner=tuner)
            plan = passes.plan
            seconds |= passes.seconds
            if name and (tuner is None or tuner.complete):
                with timed(seconds, "keep"):
                    cache.store(name, plan)
        with timed(seconds, "load"):
            executable = Executable(plan, on)
        told = self._fetched(traced.results)
        return _Version(traced, graph, executable, passes, self.options, seconds, fetch=told)

    def _fetched(self, results: pytree.Structure) -> tuple[int, ...]:
        """The leaves of the results that `fetch` names."""
        parts = results.children if results.kind in (tuple, list) else (results,)
        out: list[int] = []
        for k in self._fetch:
            if not isinstance(k, int) or not 0 <= k < len(parts):
                raise TraceError(f"fetch names result {k!r}, but {self.name} has {len(parts)}")
            at = sum(p.leaves for p in parts[:k])
            out += range(at, at + parts[k].leaves)
        return tuple(out)

    def _donated(self, structure: pytree.Structure) -> tuple[int, ...]:
        """The leaves of the arguments that `donate` names."""
        most = max(len(structure.children[0].children), len(self._parameters))
        if (last := max(self.donated, default=-1)) >= most:
            raise TraceError(f"donate names argument {last}, but {self.name} has {most}")
        out, at = [], 0
        for k, child in enumerate(structure.children[0].children):
            if k in self.donated:
                out += range(at, at + child.leaves)
            at += child.leaves
        for key, child in zip(
            structure.children[1].keys, structure.children[1].children, strict=True
        ):
            if key in self._parameters and self._parameters.index(key) in self.donated:
                out += range(at, at + child.leaves)
            at += child.leaves
        return tuple(out)

    def compile(self, *args: Any, **kwargs: Any) -> Compilation:
        """Compile for arguments of these types without running; what each pass gave."""
        return self._version(*pytree.flatten((args, kwargs))).compilation()

    def _current(self) -> _Version:
        if self._latest is None:
            raise TraceError(
                f"{self.name} has not been compiled yet: call it, or {self.name}.compile(*args)"
            )
        return self._latest

    @property
    def graph(self):  # noqa: ANN201
        """The traced program: forward, backward and update."""
        return self._current().graph

    @property
    def plan(self):  # noqa: ANN201
        """The kernels and buffers of the latest signature."""
        return self._current().executable.plan

    @property
    def report(self) -> Report:
        """What the e-graph found and chose, and why; see `eggpu.report.Report`."""
        from eggpu.report import report

        return report(self._current().compilation())

    @property
    def wgsl(self) -> dict[str, str]:
        """Each kernel's shader, by a name with its place in the plan."""
        from eggpu.compiler.schedule.show import kernel_wgsl

        return {
            f"{i:03d}-{k.name}": kernel_wgsl(self.plan, i) for i, k in enumerate(self.plan.kernels)
        }

    @property
    def memory(self) -> str:
        """The memory map."""
        from eggpu.compiler.schedule.show import memory_map

        return memory_map(self.plan)

    @property
    def compile_seconds(self) -> float:
        """Seconds of tracing, compiling and loading the latest signature; `seconds` has them by
        stage."""
        return sum(self._current().seconds.values())

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage for the latest signature."""
        return dict(self._current().seconds)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """All stages as text: program, e-graph report with choices, plan and memory."""
        from eggpu.dump import stages

        compilation = self.compile(*args, **kwargs)
        return "\n\n".join(
            f"==== {name} ====\n{text.rstrip()}" for name, text in stages(compilation).items()
        )

    def dump(self, folder: str | Path, *args: Any, **kwargs: Any) -> Path:
        """Write every stage and every kernel to numbered files in a folder; the latest signature
        without arguments."""
        from eggpu.dump import write

        compilation = (
            self.compile(*args, **kwargs) if args or kwargs else self._current().compilation()
        )
        return write(compilation, Path(folder))

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Run with a timestamp around every kernel; arguments keep their values, also donated ones.

        Printed it is a table of times, GFLOP/s, GB/s and parts of the device's roof; `.kernels` has
        them as data and `.save(path)` writes a trace for ui.perfetto.dev. Raises DeviceError on a
        device without timestamps.
        """
        from eggpu.profiling import Profile

        leaves, structure = pytree.flatten((args, kwargs))
        version = self._version(leaves, structure)
        on = version.executable.device
        times = version.executable.profile(buffers_of(leaves, on))
        return Profile(version.executable.plan, tuple(times), on.target)

    def save(self, path: str | Path) -> None:
        """Write the latest plan so that `eggpu.load` runs it without the compiler."""
        from eggpu.saved import save

        version = self._current()
        save(path, version.executable.plan, version.types)


class _TypeOnly:
    """Stands for a value of which only the type may be asked during tracing."""

    def __init__(self, type_: Type) -> None:
        self.type, self.gone = type_, False

    def numpy(self) -> np.ndarray:
        raise TraceError("a traced value was asked for")


def compile(
    function: Callable[..., Any] | None = None,
    *,
    donate: Sequence[str | int] | str = (),
    name: str | None = None,
    options: Options | None = None,
    cache: bool = True,
    fetch: Sequence[int] | int = (),
    **changes: Any,
) -> Any:
    """Compile a function of arrays, numbers and pytrees of them; works as a call and as a
    decorator.

    donate: parameters (names or positions) whose memory results may take over; a donated array must
    not be used again. options, or its fields as keywords (optimize=, relaxed=, without= ...): see
    Options.
    cache: take the plan from disk when this program was compiled before (see eggpu.cache).
    fetch: results (by position, 0 for the only one) that the host reads after each call. The call
    copies them for it, so reading one waits for that call only, not for later ones, also for one
    that it was donated to.

    >>> @eggpu.compile(donate=("model",))
    ... def step(model, x): ...
    """
    if function is None:
        return functools.partial(
            compile, donate=donate, name=name, options=options, cache=cache, fetch=fetch, **changes
        )
    from dataclasses import fields, replace

    known = [f.name for f in fields(Options)]
    if unknown := sorted(set(changes) - set(known)):
        raise CompileError(f"compile has no option {unknown[0]}; there are {', '.join(known)}")
    given = replace(options or Options(), **changes)
    donated = (donate,) if isinstance(donate, (str, int)) else donate
    fetched = (fetch,) if isinstance(fetch, int) else fetch
    return Compiled(function, donated, name, given, cache, fetched)
