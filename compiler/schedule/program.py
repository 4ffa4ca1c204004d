"""Groups lowered to kernels over numbered values, and the orders in which the kernels may run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import CompileError, IRError
from ..ir import Graph, Kind, Node
from ..ops.elementwise import barrier
from ..types import DTYPES
from .kernel import KernelSource, Scratch, Stored
from .memory import Named, aligned, pair
from .order import Step, dependencies, free_early, frugal, lazy, stable
from .plan import Role
from .repeat import LoopSource
from .selection import Group, LoopGroup, Selection
from .target import Target

if TYPE_CHECKING:
    from .horizontal import Merged

Lower = Callable[[Group, Target], Sequence[KernelSource]]


@dataclass(slots=True)
class Array:
    """A value in memory."""

    key: Stored
    name: str  # of an input, output or constant; "" for scratch
    shape: tuple[int, ...]
    dtype: str
    size: int  # bytes of its elements
    role: Role
    bound: bool = False  # by a kernel

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return max(4, aligned(self.size, 4))

    def __repr__(self) -> str:
        what = self.name or (self.key.op.name if isinstance(self.key, Node) else self.key.label)
        return f"{self.role} {what} {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Result:
    """One output of the program: its name and the value whose memory holds it."""

    value: int
    name: str


class Program:
    """Values by number (inputs, outputs, the rest by first use) and steps in the given order."""

    def __init__(self, selection: Selection, target: Target, lower: Lower) -> None:
        self.selection, self.graph = selection, selection.graph
        self.made_by = selection.made_by
        self.groups = list(selection.groups)
        self.values: list[Array] = []
        self.made: dict[int, tuple[tuple[Group, ...], ...]] | None = None  # see `assemble`
        self._number: dict[Stored, int] = {}
        self.inputs = self._inputs(self.graph)
        self.results = self._results(self.graph)
        self.argument = {value: i for i, value in enumerate(self.inputs)}
        self.result = {r.value: j for j, r in reversed(list(enumerate(self.results)))}
        self.steps = list(self._lower(lower, target))
        for value in self.values:
            self._check_size(value, target)
        self.before = dependencies(self.steps)

    def _inputs(self, graph: Graph) -> list[int]:
        names = graph.input_names or tuple(f"in{i}" for i in range(len(graph.inputs)))
        return [self._add(n, name, "input") for n, name in zip(graph.inputs, names, strict=True)]

    def _results(self, graph: Graph) -> list[Result]:
        names = graph.output_names or tuple(f"out{j}" for j in range(len(graph.outputs)))
        results: list[Result] = []
        for node, name in zip(graph.outputs, names, strict=True):
            base = self.selection.base(node)
            if base not in self._number:
                role = "constant" if base.kind is Kind.CONSTANT else "output"
                self.values[self._add(base, name, role)].shape = node.shape
            results.append(Result(self._number[base], name))
        return results

    def _add(self, key: Stored, name: str, role: Role) -> int:
        number = self._number[key] = len(self.values)
        dtype = key.dtype if isinstance(key, Scratch) else key.dtype.name
        size = math.prod(key.shape) * DTYPES[dtype].size
        self.values.append(Array(key, name, key.shape, dtype, size, role))
        return number

    def _lower(self, lower: Lower, target: Target) -> Iterator[Step]:
        for g, group in enumerate(self.selection.groups):
            if isinstance(group, LoopGroup):
                yield from self._loop(g, group, lower, target)
                continue
            for source in lower(group, target):
                if 0 in source.grid:
                    continue  # nothing to compute: every result is empty
                self._check_features(source, group, target)
                writes = tuple(self._bind(v, source) for v in source.writes)
                reads = tuple(self._bind(v, source) for v in source.reads)
                if len({*writes, *reads}) != len(writes) + len(reads):
                    raise IRError(f"kernel {source.name} binds a value twice")
                yield Step(source, g, writes, reads)

    def _loop(self, g: int, group: LoopGroup, lower: Lower, target: Target) -> Iterator[Step]:
        """A loop as one step, after copies of carries of which each round changes a part.

        Its body binds parts of what it reads and writes.
        """
        source = LoopSource(group, self._key)
        for k, init in source.seeds.items():
            result = source.results[k]
            nbytes = 2.0 * math.prod(init.shape) * 4
            cost = target.profile.launch + nbytes / target.profile.bandwidth
            same = Group((barrier(init),), (init,), cost)
            self.groups.append(same)
            for kernel in lower(same, target):
                if 0 not in kernel.grid:
                    copy = replace(kernel, writes=(result,), copies=True)
                    written = (self._bind(result, copy),)
                    yield Step(copy, len(self.groups) - 1, written, (self._bind(init, copy),))
        bound = [v.bound for v in self.values]
        writes = tuple(self._bind(v, source) for v in source.writes)
        reads = tuple(self._bind(v, source) for v in source.reads)
        for number in (*writes, *reads):
            self.values[number].bound = number < len(bound) and bound[number]
        yield Step(source, g, writes, reads)

    def number(self, value: Stored) -> int:
        """The number of a value that some kernel binds."""
        return self._number[self._key(value)]

    def _key(self, value: Stored) -> Stored:
        return self.selection.base(value) if isinstance(value, Node) else value

    def _bind(self, value: Stored, source: KernelSource | LoopSource) -> int:
        key = self._key(value)
        if key not in self._number:
            kind = key.kind if isinstance(key, Node) else None
            if kind is Kind.INPUT and value not in source.writes:
                raise IRError(
                    f"kernel {source.name} reads {key!r}, no input of graph {self.graph.name}"
                )
            self._add(key, "", "constant" if kind is Kind.CONSTANT else "scratch")
        self.values[self._number[key]].bound = True
        return self._number[key]

    def _check_features(self, source: KernelSource, group: Group, target: Target) -> None:
        for feature in source.features:
            if feature not in target.features:
                lines = [self.graph.sources.get(out, "") for out in group.outputs]
                what = "f16 needs" if feature == "shader-f16" else f"kernel {source.name} needs"
                raise CompileError(
                    f"{what} a device with the feature {feature}, which {target.name} lacks, "
                    f"for {group.outputs[0]!r}{' at ' + lines[0] if lines[0] else ''}"
                )

    def _check_size(self, value: Array, target: Target) -> None:
        limit = target.max_buffer_bytes
        if value.bound:
            limit = min(limit, target.max_binding_bytes)
        if value.nbytes > limit:
            node = value.key if isinstance(value.key, Node) else None
            line = self.graph.sources.get(node, "") if node is not None else ""
            raise CompileError(
                f"{value!r} needs {value.nbytes} bytes{' at ' + line if line else ''}, "
                f"{target.name} can bind at most {limit} as one array"
            )

    @cached_property
    def likely(self) -> set[int]:
        """Donated inputs and outputs that take their memory, if the order of kernels allows."""
        pairs = self.pairs(lambda output, input_: True)
        return {*pairs, *pairs.values()}

    def copy(self) -> Program:
        """A program whose values and steps can change without this one's."""
        program = copy.copy(self)
        program.values, program.steps = list(self.values), list(self.steps)
        return program

    def ordered(self, steps: Sequence[Step]) -> Program:
        """The program with other steps, in a legal order."""
        program = self.copy()
        program.steps, program.before = list(steps), dependencies(steps)
        return program

    def merged(self, found: Sequence[Merged]) -> Program:
        """The program with merged steps in place of their parts."""
        from .horizontal import contract

        return self.ordered(contract(self.steps, self.before, found))

    def orders(self) -> list[list[int]]:
        """Legal orders to choose from, the plainest first."""
        given = list(range(len(self.steps)))
        early = free_early(self.before, self.steps, self.pairs(lambda output, input_: True))
        scratch = {i: v.nbytes for i, v in enumerate(self.values) if v.role == "scratch"}
        found = [
            given,
            stable(early),
            frugal(early, self.steps, scratch),
            lazy(early, self.steps, scratch),
        ]
        return [order for k, order in enumerate(found) if order not in found[:k]]

    def pairs(self, legal: Callable[[int, int], bool]) -> dict[int, int]:
        """Output values and the donated inputs whose memory they take."""
        donated = [self.inputs[i] for i in sorted(set(self.graph.donated))]
        free = [self._named(i) for i in donated if i not in self.result]
        outputs = [self._named(i) for i, v in enumerate(self.values) if v.role == "output"]
        return pair(outputs, free, legal)

    def _named(self, number: int) -> Named:
        value = self.values[number]
        return Named(number, value.name, value.shape, value.dtype, value.nbytes)
