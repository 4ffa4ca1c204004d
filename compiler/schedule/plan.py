"""What the runtime executes: frozen data that can be saved, compared and run without the compiler.

A `Plan` lists buffers, kernels in order, and which buffers are the inputs and outputs of a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["input", "output", "scratch", "constant", "view"]
LAYERED = "[]"  # marks a binding of several layers
Access = Literal["read", "read_write", "image1", "image4", "image1u", "image4u"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """One value in memory during a call.

    `nbytes` is the bound size: at least 4, a multiple of 4. `place` says where it lies:
    ("input", i)            the i-th argument's own buffer (also an output written over a donated
    input) ("output", j)           a buffer allocated for the j-th result of each call ("arena",
    block, offset) a range of a scratch block that lives as long as the loaded plan ("pack", p,
    offset)     a range of a buffer that holds several arguments which the call writes
                            over; it holds the results afterwards, and is the next call's argument
    ("constant", k)         the plan's k-th constant, uploaded once
    ("loop", r)             somewhere else in each round of the plan's r-th loop (role "view")
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # f32, f16, i32, u32 or bool; bool is stored as u32 0 or 1
    nbytes: int
    role: Role
    place: tuple[str, int] | tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Binding:
    """A kernel's binding number is its position in `Kernel.bindings` (group 0).

    With access "image1" or "image4" the kernel reads a copy of the buffer in one of the plan's
    images, of f32 or of vec4<f32>; with "image1u" or "image4u" their bits are those of u32. A
    binding of several buffers, which lie in one block or pack, is of the least range that holds
    them all; in an image each has a layer, from `layer` on.
    """

    buffer: int  # index into Plan.buffers
    access: Access
    image: int = -1  # index into Plan.images
    more: tuple[int, ...] = ()  # further buffers
    layer: int = 0

    @property
    def buffers(self) -> tuple[int, ...]:
        """All buffers of the binding."""
        return (self.buffer, *self.more)

    @property
    def layout(self) -> str:
        """What a bind-group layout must know: the access, with "[]" where layers are."""
        return self.access + (LAYERED if self.image >= 0 and self.more else "")


@dataclass(frozen=True, slots=True)
class Image:
    """Layers of f32 or vec4<f32> in device memory, each for the copy of a buffer."""

    texel: int  # bytes: 4 or 16
    width: int  # texels in a row
    rows: int
    layers: int = 1

    @property
    def nbytes(self) -> int:
        return self.texel * self.width * self.rows * self.layers


@dataclass(frozen=True, slots=True)
class Copy:
    """A buffer is copied into a layer of an image before a kernel runs, `width` texels to each row.

    Inside loops it is copied each time that the kernel runs, or only before the first time. A copy
    of an argument that is `kept` is made before all kernels, and only when the argument is another
    array than in the call before.
    """

    kernel: int  # index into Plan.kernels
    buffer: int
    image: int
    width: int
    once: bool = False
    layer: int = 0
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A buffer that lies at byte `start` + t * `step` of another one in round t."""

    buffer: int
    stack: int
    start: int
    step: int


@dataclass(frozen=True, slots=True)
class Carry:
    """What a round reads (`value`) and leaves for the next one (`after`).

    `after` lies in `even` in even rounds and in `odd` in odd ones; `value` lies in `first` in round
    0, then where the round before left it. `even` and `odd` may be one buffer.
    """

    value: int
    after: int
    first: int
    even: int
    odd: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """Kernels `start` to `stop` - 1 run `count` times in a row; loops of a plan nest or lie
    apart."""

    start: int
    stop: int
    count: int
    rows: tuple[Row, ...] = ()
    carries: tuple[Carry, ...] = ()


@dataclass(frozen=True, slots=True)
class Kernel:
    """One dispatch: `wgsl` has the entry point `main`; `grid` is a number of workgroups."""

    name: str  # after the ops it runs, e.g. "dot_add_gelu"
    template: str  # "contract.wgsl.j2"
    wgsl: str
    bindings: tuple[Binding, ...]
    grid: tuple[int, int, int]
    workgroup: tuple[int, int, int]
    flops: int
    bytes_read: int
    bytes_written: int
    predicted_ns: float  # by the cost model
    computes: str  # one line in the IR's notation
    source: tuple[str, ...] = ()  # the user's lines ("model.py:31") that it computes
    trusted: bool = False  # indices proved in bounds: run without bounds checks on gpu targets
    writes: int = 1  # the kernel writes its first `writes` bindings and only reads the others
    rules: tuple[str, ...] = ()  # the rewrite rules that made what it computes
    # (k, b): binding k gets a part written over, of the value of buffer b that is there
    updates: tuple[tuple[int, int], ...] = ()


def has_immediates(wgsl: str) -> bool:
    """Whether a kernel reads numbers from immediates, for addresses that lanes share."""
    return "var<immediate>" in wgsl


@dataclass(frozen=True, slots=True)
class Constant:
    """An array that the plan carries: little-endian bytes as stored on the device."""

    shape: tuple[int, ...]
    dtype: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """A program for one target. `inputs[i]` and `outputs[j]` are indices into `buffers`.

    Several outputs may name one buffer, and an output may name an input's buffer (passed through,
    or written over because it was donated: then `i` is in `donated`).
    """

    name: str
    buffers: tuple[Buffer, ...]
    kernels: tuple[Kernel, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]  # argument positions whose buffers the call overwrites or frees
    constants: tuple[Constant, ...]
    arena: tuple[int, ...]  # bytes of each scratch block
    scratch_bytes: int  # what the scratch buffers would take without reuse
    features: tuple[str, ...]  # device features the kernels need, e.g. "subgroup"
    images: tuple[Image, ...] = ()
    copies: tuple[Copy, ...] = ()  # in the order of their kernels
    loops: tuple[Repeat, ...] = ()  # an outer loop before those inside it
    packs: tuple[int, ...] = ()  # bytes of each pack

    def __str__(self) -> str:
        """The kernels as a table."""
        from .show import plan_text

        return plan_text(self)

    @property
    def peak_bytes(self) -> int:
        """Bytes on the device during a call: arguments, results, constants, arena and images."""
        apart = ("arena", "loop", "pack")
        placed = {b.place: b.nbytes for b in self.buffers if b.place[0] not in apart}
        images = sum(image.nbytes for image in self.images)
        return sum(placed.values()) + sum(self.arena) + sum(self.packs) + images

    @property
    def total_bytes(self) -> int:
        """What a call would take if no memory were used twice."""
        return self.peak_bytes - sum(self.arena) + self.scratch_bytes
