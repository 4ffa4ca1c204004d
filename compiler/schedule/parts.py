"""The WGSL of one dispatch that does the work of several kernels which differ only in numbers and
in where their arrays lie.

Each workgroup finds out which part it belongs to. What differs between parts is a private variable:
a linear function of the part's number where that fits, else a column of a table that the kernel
reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from .images import TEXELS
from .kernel import KernelSource
from .plan import has_immediates

ELEMENT_BYTES = {"f16": 2, "f32": 4, "i32": 4, "u32": 4}
TABLE = "table"  # the name of the binding that holds a table
_NUMBER = re.compile(r"\b(\d+)u\b")
_MAIN = re.compile(r"^fn main\((.*)\) \{$", re.MULTILINE)
_BUILTIN = re.compile(r"@builtin\((\w+)\) (\w+): [\w<>]+")
_FIXED = ("const ", "var<", "alias ", "struct ", "@")  # lines whose numbers the compiler must know
_HOLE = "\0"

Column = tuple[int, ...]  # a number for each part


def element_bytes(element: str) -> int:
    """Bytes of one element of a binding: of f32, vec4<f32>, atomic<u32> ..."""
    inner = re.fullmatch(r"(vec4|atomic)<(\w+)>", element)
    if inner is None:
        return ELEMENT_BYTES[element]
    return ELEMENT_BYTES[inner[2]] * (4 if inner[1] == "vec4" else 1)


@lru_cache(maxsize=512)
def form(text: str) -> tuple[str, Column]:
    """A kernel's text without the numbers in its functions, and these numbers."""
    numbers: list[int] = []
    lines: list[str] = []
    for line in text.split("\n"):
        if not line.lstrip().startswith(_FIXED):
            numbers += map(int, _NUMBER.findall(line))
            line = _NUMBER.sub(_HOLE, line)
        lines.append(line)
    return "\n".join(lines), tuple(numbers)


def mergeable(text: str) -> bool:
    """Whether a text is of a form that can be one part of several."""
    main = _MAIN.search(text)
    known = {"global_invocation_id", "workgroup_id", "local_invocation_index"}
    alone = has_immediates(text)  # what its lanes share, they share outside of all conditions
    return main is not None and not alone and {b for b, _ in _BUILTIN.findall(main[1])} <= known


@dataclass(slots=True)
class _Columns:
    """The private variables of a merged kernel, and the table behind some of them."""

    parts: int
    names: dict[Column, str] = field(default_factory=dict[Column, str])
    table: list[Column] = field(default_factory=list[Column])
    lines: list[str] = field(default_factory=list[str])

    def name(self, column: Column) -> str:
        """What stands for a number of each part in the text."""
        if len(set(column)) == 1:
            return f"{column[0]}u"
        if column not in self.names:
            self.names[column] = f"part_{len(self.names)}"
            self.lines.append(f"{self.names[column]} = {self._value(column)};")
        return self.names[column]

    def _value(self, column: Column) -> str:
        step = column[1] - column[0]
        if _is_linear(column):
            sign = "+" if step > 0 else "-"
            return f"{column[0]}u {sign} part * {abs(step)}u"
        return self.entry(column)

    def entry(self, column: Column, part: str = "part") -> str:
        """The entry of a part in a column of the table."""
        if column not in self.table:
            self.table.append(column)
        return f"${TABLE}[{self.table.index(column) * self.parts}u + {part}]"


def loads(columns: Sequence[Column]) -> int:
    """How many entries of a table an invocation reads for these columns."""
    return sum(not _is_linear(column) for column in set(columns))


def _is_linear(column: Column) -> bool:
    return len({b - a for a, b in pairwise(column)}) < 2


def merged(
    sources: Sequence[KernelSource], offsets: Sequence[Column | None], grid: tuple[int, int, int]
) -> tuple[str, list[int]]:
    """The text for parts of one form, and the numbers of the table that it reads, if any.

    `offsets[k]` are bytes from the start of binding k to each part's array, its layer where it is
    an image; None where all parts bind the same. `grid` is that of the merged kernel, of two axes.
    """
    first = sources[0]
    columns = _Columns(len(sources))
    text = _with_numbers([s.text for s in sources], columns)
    for k, column in enumerate(offsets):
        if column is not None and first.elements[k] in TEXELS:
            text = _layered(text, k, columns.name(column))
        elif column is not None:
            unit = element_bytes(first.elements[k])
            name = columns.name(tuple(at // unit for at in column))
            text = text if name == "0u" else _shifted(text, k, name)
    prelude = _prelude(sources, columns, grid)
    main = _MAIN.search(text)
    assert main is not None
    arguments, names = _arguments(main[1], first)
    private = [f"var<private> {name}: u32;" for name in columns.names.values()]
    body = "\n  ".join([*prelude, *columns.lines, *names])
    opening = f"fn main({arguments}) {{\n  {body}"
    text = "\n".join([*private, text[: main.start()] + opening + text[main.end() :]])
    return text, [n for column in columns.table for n in column]


def _with_numbers(texts: Sequence[str], columns: _Columns) -> str:
    forms = [form(text) for text in texts]
    pieces = forms[0][0].split(_HOLE)
    names = [columns.name(column) for column in zip(*(numbers for _, numbers in forms))]
    out = [pieces[0]]
    for name, piece in zip(names, pieces[1:], strict=True):
        out += name, piece
    return "".join(out)


def _shifted(text: str, k: int, name: str) -> str:
    """`text` with each `$k[at]` as `$k[name + (at)]`."""
    out: list[str] = []
    at, mark = 0, f"${k}["
    while (found := text.find(mark, at)) >= 0:
        start = end = found + len(mark)
        depth = 1
        while depth:
            depth += {"[": 1, "]": -1}.get(text[end], 0)
            end += 1
        inner = _shifted(text[start : end - 1], k, name)
        out += text[at:start], f"{name} + ({inner})]"
        at = end
    return "".join([*out, text[at:]])


def _layered(text: str, k: int, name: str) -> str:
    """`text` with each `textureLoad($k, place)` as `textureLoad($k, place, name)`."""
    out: list[str] = []
    at, mark = 0, f"textureLoad(${k}, "
    while (found := text.find(mark, at)) >= 0:
        start = end = found + len(mark)
        depth = 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        place = _layered(text[start : end - 1], k, name)
        out += text[at:start], f"{place}, {name})"
        at = end
    return "".join([*out, text[at:]])


def _prelude(
    sources: Sequence[KernelSource], columns: _Columns, grid: tuple[int, int, int]
) -> list[str]:
    """Statements that find a workgroup's part, and its number within the part."""
    groups = [_size(s.grid) for s in sources]
    folded = grid[1] > 1
    lines = ["let part_all = part_at.x" + (f" + part_at.y * {grid[0]}u;" if folded else ";")]
    if folded:
        lines.append(f"if (part_all >= {sum(groups)}u) {{ return; }}")
    if len(set(groups)) == 1:
        lines.append(f"let part = part_all / {groups[0]}u;")
        lines.append(f"let part_group = part_all - part * {groups[0]}u;")
        return lines
    starts = tuple(sum(groups[:i]) for i in range(len(groups)))
    lines.append("var part = 0u;")
    step = 1 << (len(groups) - 1).bit_length() - 1
    while step:
        guess = f"min(part + {step}u, {len(groups) - 1}u)"
        lines.append(f"part = select(part, {guess}, part_all >= {columns.entry(starts, guess)});")
        step //= 2
    lines.append(f"let part_group = part_all - {columns.entry(starts)};")
    return lines


def _arguments(given: str, source: KernelSource) -> tuple[str, list[str]]:
    """The arguments of the merged main, and statements for those of the parts'."""
    arguments, names = ["@builtin(workgroup_id) part_at: vec3<u32>"], list[str]()
    width, height, _ = source.grid
    x, y = (
        ("part_group", "0u")
        if height == 1
        else (f"part_group % {width}u", f"part_group / {width}u")
    )
    for builtin, name in _BUILTIN.findall(given):
        if builtin == "workgroup_id":
            names.append(f"let {name} = vec3<u32>({x}, {y}, 0u);")
        elif builtin == "global_invocation_id":
            arguments.append("@builtin(local_invocation_index) part_lane: u32")
            lane = f"({x}) * {source.workgroup[0]}u + part_lane"
            names.append(f"let {name} = vec3<u32>({lane}, {y}, 0u);")
        else:
            arguments.append(f"@builtin({builtin}) {name}: u32")
    return ", ".join(arguments), names


def _size(grid: tuple[int, int, int]) -> int:
    return grid[0] * grid[1] * grid[2]
