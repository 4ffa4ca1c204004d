"""A kernel as code generation makes it: WGSL without buffer names, and what plan assembly must know
to place it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..ir import Node
from .images import TEXELS


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """A value that lives between the kernels of one group, such as the partial sums of a two-stage
    reduction."""

    label: str
    shape: tuple[int, ...]
    dtype: str  # f32, f16, i32, u32 or bool (stored as u32)

    @property
    def size(self) -> int:
        total = 1
        for n in self.shape:
            total *= n
        return total


Stored = Node | Scratch
"""What a binding holds: a node of the program, in row-major order, or scratch of this group."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One dispatch. Bindings are `writes`, then `reads`; binding k has WGSL element type
    `elements[k]`.

    An operand of element type "image4" or "image1" is read from a copy in an image, of vec4<f32>
    or of f32 (see `images`).
    `text` is WGSL without comment and bindings, in which `$k` stands for the name of binding k.
    """

    name: str  # after the ops it runs, e.g. "dot_add_gelu"
    template: str  # "elementwise.wgsl.j2"
    text: str
    writes: tuple[Stored, ...]
    reads: tuple[Stored, ...]
    elements: tuple[str, ...]
    grid: tuple[int, int, int]
    workgroup: tuple[int, int, int]
    flops: int
    bytes_read: int
    bytes_written: int
    computes: str  # one line in the IR's notation with `$k` for bindings
    in_place: frozenset[tuple[int, int]] = (
        frozenset()
    )  # (k, j): writes[k] may take the memory of reads[j]
    features: tuple[str, ...] = ()  # device features that it needs
    trusted: bool = False  # every index is proved in bounds
    # (k, value): writes[k] is `value` with a part written over, and holds it when the kernel runs
    updates: tuple[tuple[int, Stored], ...] = ()
    # only copies reads[0] to writes[0]: left out where both lie in one place
    copies: bool = False

    def source(
        self,
        names: Sequence[str],
        writable: frozenset[int] = frozenset(),
        layered: frozenset[int] = frozenset(),
    ) -> str:
        """The WGSL for bindings called `names`; `writable` are positions in `reads` bound as
        read_write, `layered` bindings of several layers of an image.

        (Of one buffer in a dispatch, either all bindings are `read` or all `read_write`.)
        """
        names = tuple(identifiers(names, self.text))
        lines = [
            f"// {self.name}: {_named(self.computes, names)}",
            f"// grid {_by(self.grid)} of {_by(self.workgroup)}, {self.flops} flop, "
            f"{self.bytes_read} bytes read, {self.bytes_written} written",
        ]
        for k, (name, element) in enumerate(zip(names, self.elements, strict=True)):
            written = k < len(self.writes) or k - len(self.writes) in writable
            place = "<storage, read_write>" if written else "<storage, read>"
            kind = f"array<{element}>"
            if element in TEXELS:
                array = "_array" if k in layered else ""
                place, kind = "", f"texture_storage_2d{array}<{TEXELS[element].format}, read>"
            lines.append(f"@group(0) @binding({k}) var{place} {name}: {kind};")
        enables = "enable f16;\n" if "shader-f16" in self.features else ""
        return enables + "\n".join(lines) + "\n\n" + _named(self.text, names)

    def describe(self, names: Sequence[str]) -> str:
        """`computes` with the names of the bindings."""
        return _named(self.computes, tuple(names))


@lru_cache(maxsize=256)
def _words(text: str) -> frozenset[str]:
    """The words of a text and those of WGSL; kernels of a model's layers share their texts."""
    return frozenset(re.findall(r"[A-Za-z_]\w*", text)) | _WORDS


def identifiers(names: Sequence[str], text: str) -> list[str]:
    """WGSL identifiers for buffers called `names` that clash neither with one another nor with
    words of `text`."""
    taken = set(_words(text))
    out: list[str] = []
    for name in names:
        word = re.sub(r"\W", "_", name).strip("_") or "buffer"
        if not word[0].isalpha():
            word = "b" + word
        while word in taken:
            word += "_b"
        taken.add(word)
        out.append(word)
    return out


@lru_cache(maxsize=256)
def _named(text: str, names: tuple[str, ...]) -> str:
    return re.sub(r"\$(\d+)", lambda m: names[int(m[1])], text)


def _by(sizes: tuple[int, int, int]) -> str:
    return "x".join(map(str, sizes))


_WORDS = frozenset(
    (  # noqa: SIM905
        "alias array asm atomic binding bitcast bool break builtin case compute const const_assert "
        "continue continuing default diagnostic discard do else enable enum export extends extern "
        "f16 f32 fallthrough false fn for from function goto group handle i32 i64 if impl import "
        "in let loop main mod module move mut new null override packed params pass private ptr pub "
        "read read_write ref requires resource return sampler self static storage struct super "
        "switch target template texture this trait true type typedef u32 u64 uniform union unsafe "
        "unorm use using var vec2 vec3 vec4 virtual void while with workgroup workgroup_size write "
        "yield"
    ).split()
)
