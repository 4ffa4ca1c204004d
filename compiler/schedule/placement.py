"""Where the values of a program lie when its steps run in a given order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from .horizontal import Merged, Row, bound, rows
from .memory import Item, Layout, lay_out, most_alive
from .order import Step
from .program import Program
from .target import Target

Place = tuple[str, int] | tuple[str, int, int]


class Unplaceable(Exception):
    """The values of merged steps cannot lie together."""

    def __init__(self, steps: Sequence[Merged]) -> None:
        self.steps = steps


class Placement:
    """Where the values of a program lie when its steps run in a given order."""

    def __init__(self, program: Program, order: Sequence[int], target: Target) -> None:
        self._pairs: dict[int, list[tuple[int, int]]] = {}  # see _in_place
        self.program = program
        self.steps = [program.steps[k] for k in order]
        self.alignment, self.limit = target.offset_alignment, target.max_buffer_bytes
        self.launch = target.profile.launch
        self.first_write: dict[int, int] = {}
        self.last_read: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        for k, step in enumerate(self.steps):
            self.first_write = dict.fromkeys(step.writes, k) | self.first_write
            self.last_read |= dict.fromkeys(step.reads, k)
            self.last_use |= dict.fromkeys((*step.writes, *step.reads), k)
        self.over = program.pairs(self._may_overwrite)
        self.packs: list[int] = []  # bytes
        self.packed: dict[int, tuple[str, int, int]] = {}
        self.row_of: dict[int, Row] = {}  # of scratch
        self._place_rows(target)
        self.slots: list[Item] = []
        self.slot_of: dict[int, int] = {}
        for k in range(len(self.steps)):
            self._allocate(k)
        values = enumerate(program.values)
        self.made = sum(v.nbytes for i, v in values if v.role == "output" and i not in self.over)

    def _place_rows(self, target: Target) -> None:
        """Packs for the arguments that merged steps bind together; notes their rows of scratch."""
        steps = [step for step in self.steps if isinstance(step, Merged)]
        most = min(target.max_binding_bytes, self.limit)
        kept = set(self.over.values())
        for row in rows(steps, self.over, self.program, self.alignment):
            roles = {self.program.values[v].role for v in row.offsets}
            if roles == {"scratch"} and row.nbytes <= most:
                self.row_of |= dict.fromkeys(row.offsets, row)
            elif roles == {"input"} and row.offsets.keys() <= kept and row.nbytes <= most:
                if not self.packs or self.packs[-1] + row.nbytes > self.limit:
                    self.packs.append(0)
                for value, offset in row.offsets.items():
                    self.packed[value] = ("pack", len(self.packs) - 1, self.packs[-1] + offset)
                self.packs[-1] += row.nbytes
            else:
                values = row.offsets.keys()
                inside = [s for s in steps if any(self.over.get(v, v) in values for v in bound(s))]
                raise Unplaceable(inside)

    @cached_property
    def layout(self) -> Layout:
        return lay_out(self.slots, self.alignment, self.limit)

    @property
    def nbytes(self) -> int:
        """Bytes of scratch and of results that get memory of their own."""
        return self.layout.nbytes + self.made

    @property
    def alive(self) -> int:
        """`nbytes` for a layout without gaps."""
        return most_alive(self.slots, self.alignment) + self.made

    def _may_overwrite(self, output: int, input_: int) -> bool:
        write, read = self.first_write.get(output, -1), self.last_read.get(input_, -1)
        return write > read or (write == read >= 0 and (output, input_) in self._in_place(write))

    def _in_place(self, k: int) -> list[tuple[int, int]]:
        """Pairs of values (written, read) of step k that may share memory."""
        if k not in self._pairs:
            step, values = self.steps[k], self.program.values
            pairs = [(step.writes[i], step.reads[j]) for i, j in sorted(step.source.in_place)]
            self._pairs[k] = [(w, r) for w, r in pairs if values[w].size == values[r].size]
        return self._pairs[k]

    def _allocate(self, k: int) -> None:
        """Gives slots to the scratch of step k; a value that dies in place hands its slot on."""
        values = self.program.values
        heirs: dict[int, int] = {}  # the dying value -> the value that takes its memory
        for written, read in self._in_place(k):
            dies = read in self.slot_of and self.last_use[read] == k
            fresh = values[written].role == "scratch" and written not in self.slot_of
            if read in self.row_of or written in self.row_of:
                continue
            if dies and fresh and read not in heirs and written not in heirs.values():
                heirs[read] = written
                slot = self.slot_of[written] = self.slot_of[read]
                old = self.slots[slot]
                self.slots[slot] = Item(old.nbytes, old.first, self.last_use[written])
        for value in (*self.steps[k].writes, *self.steps[k].reads):
            if values[value].role == "scratch" and value not in self.slot_of:
                row = self.row_of.get(value)
                held = [value] if row is None else list(row.offsets)
                nbytes = values[value].nbytes if row is None else row.nbytes
                self.slot_of |= dict.fromkeys(held, len(self.slots))
                self.slots.append(Item(nbytes, k, max(self.last_use[v] for v in held)))

    def place(self, value: int) -> Place:
        """Where a value lies; a constant by its value's number."""
        match self.program.values[value].role:
            case "input" if value in self.packed:
                return self.packed[value]
            case "input":
                return ("input", self.program.argument[value])
            case "output" if value in self.over:
                return self.place(self.over[value])
            case "output":
                return ("output", self.program.result[value])
            case "constant":
                return ("constant", value)
            case _:
                block, offset = self.layout.places[self.slot_of[value]]
                row = self.row_of.get(value)
                return ("arena", block, offset + (row.offsets[value] if row else 0))

    @cached_property
    def kept(self) -> list[Step]:
        """The steps without copies of values to where they lie."""
        return [s for s in self.steps if not s.source.copies or not self._stays(s)]

    @cached_property
    def first_kept(self) -> dict[int, int]:
        """The number of the first kernel that writes each value."""
        found: dict[int, int] = {}
        for k, step in enumerate(self.kept):
            for value in step.writes:
                found.setdefault(value, k)
        return found

    def _stays(self, step: Step) -> bool:
        return self.place(step.writes[0]) == self.place(step.reads[0])
