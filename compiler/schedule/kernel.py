"""A kernel before memory is laid out: what lowering gives and assembly makes `plan.Kernel`s of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import IRError
from ..ir import Node
from .plan import Access


@dataclass(frozen=True, slots=True)
class Scratch:
    """A value between two kernels of one group, such as the partial sums of a two-stage reduction.

    Equal names within one group are one value; other groups have their own.
    """

    name: str
    nbytes: int


Value = Node | Scratch
"""What a kernel binds."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One dispatch whose WGSL waits for the access of its bindings.

    Bindings are numbered `writes` first, then `reads`; no value stands there twice. `render` gets
    the access of each binding in that order: "read_write" for a write, and "read" for a read unless
    its memory lies in a buffer that the kernel also writes.
    """

    name: str  # after the ops it runs: "dot_add_gelu"
    template: str  # "contract_cpu.wgsl.j2"
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    grid: tuple[int, int, int]  # workgroups
    workgroup: tuple[int, int, int]  # invocations of one
    flops: int
    bytes_read: int
    bytes_written: int
    computes: str  # one line in the IR's notation
    render: Callable[[tuple[Access, ...]], str]
    in_place: tuple[tuple[int, int], ...] = ()
    """Pairs (i, j) such that writes[i] may lie in the very memory of reads[j]: an element of the read
    is read only by the invocation that overwrites it, and before it does."""
    trusted: bool = False  # every index is proved to be in bounds
    features: tuple[str, ...] = ()  # device features that the WGSL needs: "subgroup"

    def source(self, accesses: tuple[Access, ...]) -> str:
        """The WGSL with its bindings declared as `accesses` says."""
        need = len(self.writes) + len(self.reads)
        if len(accesses) != need:
            raise IRError(f"kernel {self.name} has {need} bindings, got {len(accesses)} accesses")
        return self.render(accesses)
