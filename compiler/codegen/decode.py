"""Attention of a few rows: its templates' loads and stores, and the kernel that joins parts of the
keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import CompileError
from ..index import Index
from ..ir import Node
from ..ops import broadcast, full, reduce, reshape
from ..ops import elementwise as E
from ..ops.decode import DecodeBase
from ..ops.fused import Get
from ..schedule.kernel import KernelSource, Scratch
from ..schedule.space import Analysis
from ..schedule.tile import Tile
from ..schedule.tile_decode import FORMS, Shape, decode_shape, decode_tiles
from ..types import f32
from .contract import Operand, load_cost, load_function, store_function, stores_fours, write_tile
from .emitter import Emitter
from .rewrite import partial_input, replaced
from .rowwise import lower_job
from .source import Job, finish
from .statements import Value

_BOUNDS = ("first", "end")
_QKV = ("q", "k", "v")


def lower_decode(job: Job, analysis: Analysis) -> list[KernelSource]:
    """The kernel of a group around attention of a few rows; with split keys, one more."""
    node = analysis.anchor
    assert node is not None
    if not any(o.type.size for o in job.group.outputs):
        return []
    return _Decode(job, analysis, node).kernels()


@dataclass(frozen=True, slots=True)
class _Decode:
    job: Job
    a: Analysis
    node: Node

    @property
    def op(self) -> DecodeBase:
        assert isinstance(self.node.op, DecodeBase)
        return self.node.op

    @property
    def shape(self) -> Shape:
        q, k, v = (o.shape for o in self.node.operands[:3])
        return decode_shape(q, k, v)

    def kernels(self) -> list[KernelSource]:
        tile = self._tile()
        if tile.splits == 1:
            return [self._whole(tile)]
        s, count = self.shape, tile.splits
        lines = s.heads * s.rows
        parts = Scratch("parts", (count, lines, s.dv), "f32")
        tops, sums = (Scratch(n, (count, lines, 1), "f32") for n in ("maxima", "sums"))
        first = self._part(tile, [parts, tops, sums])
        return [first, *lower_job(self._joined(parts, tops, sums))]

    def _tile(self) -> Tile:
        hint = self.job.hints.get("tile_decode")
        if isinstance(hint, Tile):
            return hint
        form = FORMS[self.op.name]
        found = decode_tiles(self.job.target, form, self.shape)
        if not found:
            raise CompileError(
                f"illegal kernel: no template of {self.job.target.name} holds {self.node!r}"
            )
        return self.job.ranked(found)

    def _whole(self, tile: Tile) -> KernelSource:
        """The kernel that computes the results themselves."""
        s = self.shape
        stored = [self.job.held_by(o) for o in self.job.group.outputs]
        if self.op.name == "attention_phases":
            stored.append(Scratch("scores", (s.heads, s.rows, s.keys), "f32"))
        emitter = Emitter(stored, dict(self.job.memory))
        axes, extents = ("bh", "query", "d"), (s.heads, s.rows, s.dv)
        for k, out in enumerate(self.job.group.outputs):
            fours = stores_fours(self.a.space[out], out, axes, extents)
            emitter.accesses[k].vector = s.dv % 4 == 0 and fours
        outputs = list(enumerate(self.job.group.outputs))
        got = next(n for n in self.a.body if isinstance(n.op, Get))

        def write(em: Emitter, flat: Index, value: Value) -> None:
            em.bound[got] = value
            write_tile(em, self.a, outputs, flat)

        values = {
            "store_o": _store(emitter, "store_o", axes, extents, write),
            "scores": f"${len(outputs)}",
        }
        return self._finished(self.job, emitter, tile, values)

    def _part(self, tile: Tile, scratch: Sequence[Scratch]) -> KernelSource:
        """The kernel that gives the maximum, the sum and the output of each part of the keys."""
        s = self.shape
        emitter = Emitter(list(scratch), dict(self.job.memory))
        emitter.accesses[0].vector = s.dv % 4 == 0
        axes = ("split", "bh", "query")
        extents = (tile.splits, s.heads, s.rows)

        def writer(k: int) -> Callable[[Emitter, Index, Value], None]:
            return lambda em, flat, value: em.store(k, flat, value, f32)

        wide = ((*axes, "d"), (*extents, s.dv))
        values = {
            "store_part": _store(emitter, "store_part", *wide, writer(0)),
            "store_top": _store(emitter, "store_top", axes, extents, writer(1)),
            "store_sum": _store(emitter, "store_sum", axes, extents, writer(2)),
        }
        got = next(n for n in self.a.body if isinstance(n.op, Get))
        job = self.job.part([got], stores={got: scratch[0]})
        return self._finished(job, emitter, tile, values)

    def _joined(self, parts: Scratch, tops: Scratch, sums: Scratch) -> Job:
        """What follows, over the parts: each counts e^(its maximum - the largest)."""
        given = [partial_input(scratch, k) for k, scratch in enumerate((parts, tops, sums))]
        part, top, total = (broadcast(g, parts.shape) for g in given)
        share = E.exp(top - broadcast(reduce("max", top, (0,)), parts.shape))
        whole, sum_ = reduce("sum", share * part, (0,)), reduce("sum", share * total, (0,))
        zero = full(0, sum_.shape, sum_.dtype)
        got = next(n for n in self.a.body if isinstance(n.op, Get))
        out = whole / sum_  # NaN for a row without keys
        if self.op.empty != "nan":
            out = E.select(E.eq(sum_, zero), zero, out)
        out = reshape(out, got.shape)
        out = E.cast(out, got.dtype)
        memory = {**self.job.memory, **dict(zip(given, (parts, tops, sums), strict=True))}
        return replaced(self.job, self.job.group.outputs, {got: out}, memory)

    def _finished(
        self, job: Job, emitter: Emitter, tile: Tile, stores: Mapping[str, object]
    ) -> KernelSource:
        operands = self._operands()
        # llvmpipe reads copies in images several times faster, but the whole of them is copied
        reused = () if self.op.bounded else ("k", "v")

        def load(
            name: str, result: str, coords: tuple[str, ...], vec: int = 1, axis: int | None = None
        ) -> str:
            where = (*coords, "0u") if name in _BOUNDS else coords
            function = load_function(
                emitter, f"load_{name}", operands[name], axis if vec == 4 else None, name in reused
            )
            return f"let {result} = {function}({', '.join(where)});"

        values = {**self._attributes(), **self._vectors(operands), "load": load, **stores}
        features = ("subgroup",) if tile.values.get("shuffle") else ()
        return finish(
            job, emitter, tile.template, {**values, **tile.values}, tile.grid, tile.workgroup,
            features=features,
        )  # fmt: skip

    def _operands(self) -> dict[str, Operand]:
        s, op = self.shape, self.op
        names = [*_QKV, *(_BOUNDS if op.bounded else ()), *op.extras]
        rows, pairs = (s.heads, s.rows, 1), (s.heads, s.rows, s.keys)
        extents = {
            "q": (s.heads, s.rows, s.d), "k": (s.heads, s.keys, s.d), "v": (s.heads, s.keys, s.dv),
            "first": rows, "end": rows, "mask": pairs, "bias": pairs,
        }  # fmt: skip
        axes = {"k": "key", "v": "key"}
        last = {"mask": "key", "bias": "key"}
        return {
            name: Operand(node, ("bh", axes.get(name, "query"), last.get(name, "d")), extents[name])
            for name, node in zip(names, self.node.operands, strict=True)
        }

    def _attributes(self) -> dict[str, object]:
        s, op = self.shape, self.op
        return {
            "BH": s.heads, "TQ": s.rows, "TK": s.keys, "D": s.d, "DV": s.dv,
            "scale": op.scale, "causal": op.causal, "offset": op.offset,
            "window": op.window or None, "softcap": op.softcap or None,
            "has_mask": "mask" in op.extras, "has_bias": "bias" in op.extras,
            "group": op.group, "bounded": op.bounded, "empty": op.empty,
        }  # fmt: skip

    def _vectors(self, operands: dict[str, Operand]) -> dict[str, bool]:
        """Which operands and results are accessed four elements at a time along a head."""
        flags = {
            f"{name}_vec": operands[name].extents[2] % 4 == 0
            and load_cost(self.job, operands[name], 2) < 52.0
            for name in _QKV
        }
        return flags | {"o_vec": self.shape.dv % 4 == 0}


def _store(
    emitter: Emitter,
    name: str,
    axes: tuple[str, ...],
    extents: tuple[int, ...],
    write: Callable[[Emitter, Index, Value], None],
) -> Callable[..., str]:
    """How a template writes a result at coordinates."""

    def store(coords: Sequence[str], value: str, vec: int = 1) -> str:
        function = store_function(emitter, name, axes, extents, vec == 4, write)
        return f"{function}({', '.join((*coords, value))});"

    return store
