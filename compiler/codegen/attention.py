"""Attention and its gradients: the templates' loads and stores with what is computed on the way and
after."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import CompileError
from ..index import Index
from ..ir import Node
from ..ops.decode import DecodeBase
from ..ops.fused import Attention, AttentionBackward, AttentionBias, Get
from ..schedule.kernel import KernelSource
from ..schedule.space import Analysis
from ..schedule.target import Target
from ..schedule.tile import Tile
from ..schedule.tile_attention import Pass, attention_candidates, copied, rows_of, scores_of
from .contract import Operand, load_cost, load_function, store_function, stores_fours, write_tile
from .decode import lower_decode
from .emitter import Emitter
from .source import Job, finish
from .statements import Value

_FORWARD = ("q", "k", "v")
_BACKWARD = ("q", "k", "v", "stats", "delta", "do")
# a pass: the results that it gives, with the names of their stores and of their vector flags
_RESULTS: dict[Pass, dict[int, str]] = {
    "forward": {0: "o", 1: "stats"},
    "q": {0: "dq"},
    "kv": {1: "dk", 2: "dv"},
    "bias": {0: "ds"},
}
_ROWS = ("stats", "delta")


def lower_attention(job: Job, analysis: Analysis) -> list[KernelSource]:
    """The kernels of a group around attention (one) or its gradients (one for q, one for k and
    v)."""
    node = analysis.anchor
    assert node is not None
    if isinstance(node.op, DecodeBase):
        return lower_decode(job, analysis)
    outputs = [o for o in job.group.outputs if o.type.size]
    passes: tuple[Pass, ...] = ("forward",)
    if isinstance(node.op, AttentionBias):
        passes = ("bias",)
    elif isinstance(node.op, AttentionBackward):
        passes = ("q", "kv")
    kernels: list[KernelSource] = []
    wanted: dict[Pass, list[Node]] = {
        step: [o for o in outputs if _item(analysis, o) in _RESULTS[step]] for step in passes
    }
    both = all(wanted.values())
    for step, mine in wanted.items():
        if mine:
            kernels.append(_Attention(job.part(mine), analysis, node, step, both).kernel())
    return kernels


def attention_tiles(node: Node, step: Pass, target: Target, count: int) -> list[Tile]:
    """The `count` best tilings of a pass of attention, or of its gradients."""
    scores = scores_of(_attributes(node))
    return attention_candidates(target, step, *_heads(node), count, _kept(node), scores)


def _heads(node: Node) -> tuple[int, int, int, int, int]:
    """(heads in all, queries, keys, size of a head of q and k, of v)."""
    q, k, v = (o.shape for o in node.operands[:3])
    return math.prod(q[:-2]), q[-2], k[-2], q[-1], v[-1]


def _kept(node: Node) -> int:
    """How many biases have a gradient: heads, less those that are summed."""
    summed = node.op.axes if isinstance(node.op, AttentionBias) else ()
    return math.prod(n for a, n in enumerate(node.operands[0].shape[:-2]) if a not in summed)


def _attributes(node: Node) -> Attention | AttentionBackward | AttentionBias:
    op = node.op
    assert isinstance(op, Attention | AttentionBackward | AttentionBias), f"no template: {node!r}"
    return op


def _item(analysis: Analysis, output: Node) -> int:
    space = analysis.space[output]
    return space.item if space.kind == "item" else 0


@dataclass(frozen=True, slots=True)
class _Attention:
    job: Job
    a: Analysis
    node: Node
    step: Pass
    both: bool  # whether all passes run: the rows of one gradient are the columns of the other

    @property
    def heads(self) -> tuple[int, int, int, int, int]:
        """(heads in all, queries, keys, size of a head of q and k, of v)."""
        return _heads(self.node)

    @property
    def kept(self) -> int:
        """How many biases have a gradient."""
        return _kept(self.node)

    def kernel(self) -> KernelSource:
        tile = self._tile()
        emitter = Emitter(
            [self.job.held_by(o) for o in self.job.group.outputs], dict(self.job.memory)
        )
        operands = self._operands()
        reused = self._reused(tile)

        def load(
            name: str, result: str, coords: tuple[str, ...], vec: int = 1, axis: int | None = None
        ) -> str:
            where = (*coords, "0u") if name == "delta" else coords
            lanes = axis if vec == 4 else None
            function = load_function(emitter, f"load_{name}", operands[name], lanes, name in reused)
            return f"let {result} = {function}({', '.join(where)});"

        values = {**self._attributes(), **self._vectors(operands), "load": load}
        for item, name in _RESULTS[self.step].items():
            values[f"store_{name}"] = self._store(emitter, item)
        for k, out in enumerate(self.job.group.outputs):
            name = _RESULTS[self.step][_item(self.a, out)]
            fours = name != "stats" and stores_fours(self.a.space[out], out, *self._places(name))
            emitter.accesses[k].vector = bool(values.get(f"{name}_vec")) and fours
        features = ("subgroup",) if "L" in tile.values or tile.values.get("shuffle") else ()
        return finish(
            self.job,
            emitter,
            tile.template,
            {**values, **tile.values},
            tile.grid,
            tile.workgroup,
            features=features,
        )

    def _reused(self, tile: Tile) -> tuple[str, ...]:
        """Operands that every tile loads whole: worth copies in images when tiles are many. A
        gradient's rows come from those of the other one's columns, if there are any."""
        if "L" not in tile.values or not self.job.target.images:
            return ()
        bh, tq, tk, d, dv = self.heads
        rows, columns = (tk, tq) if self.step == "kv" else (tq, tk)
        lanes = tile.values["L"]
        assert isinstance(lanes, int)
        height = rows_of(tile)
        if not copied(lanes, -(-rows // height), bh, columns, d + dv):
            return ()
        if self.step == "forward":
            return ("q", "k", "v") if "TM" in tile.values else ("k", "v")
        if self.both and copied(lanes, -(-columns // height), bh, rows, d + dv):
            return ("q", "k", "v", "do")
        return ("q", "do") if self.step == "kv" else ("k", "v")

    def _places(self, name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The coordinates of a result, and their extents."""
        bh, tq, tk, d, dv = self.heads
        extents = {
            "o": (bh, tq, dv), "stats": (bh, tq, 2),
            "dq": (bh, tq, d), "dk": (bh, tk, d), "dv": (bh, tk, dv), "ds": (self.kept, tq, tk),
        }  # fmt: skip
        if name == "ds":
            return ("kept", "query", "key"), extents[name]
        axes = ("bh", "key" if name in ("dk", "dv") else "query", "d")
        return axes, extents[name]

    def _tile(self) -> Tile:
        hint = self.job.hints.get(f"tile_{self.step}")
        if isinstance(hint, Tile):
            return hint
        found = attention_tiles(self.node, self.step, self.job.target, self.job.count)
        if not found:
            raise CompileError(
                f"illegal kernel: no template of {self.job.target.name} holds {self.node!r}"
            )
        return self.job.ranked(found)

    def _operands(self) -> dict[str, Operand]:
        bh, tq, tk, d, dv = self.heads
        plain = len(self.node.operands) < len(_BACKWARD)
        names = [*(_FORWARD if plain else _BACKWARD), *_attributes(self.node).extras]
        extents = {
            "q": (bh, tq, d), "k": (bh, tk, d), "v": (bh, tk, dv), "do": (bh, tq, dv),
            "stats": (bh, tq, 2), "delta": (bh, tq, 1), "mask": (bh, tq, tk), "bias": (bh, tq, tk),
        }  # fmt: skip
        axes = {"k": ("bh", "key", "d"), "v": ("bh", "key", "d"), "mask": ("bh", "query", "key")}
        axes["bias"] = axes["mask"]
        return {
            name: Operand(node, axes.get(name, ("bh", "query", "d")), extents[name])
            for name, node in zip(names, self.node.operands, strict=True)
        }

    def _attributes(self) -> dict[str, object]:
        bh, tq, tk, d, dv = self.heads
        op = _attributes(self.node)
        window, softcap = op.window, op.softcap
        return {
            "BH": bh, "TQ": tq, "TK": tk, "D": d, "DV": dv,
            "scale": op.scale, "causal": op.causal, "offset": op.offset,
            "window": window or None, "softcap": softcap or None,
            "has_mask": "mask" in op.extras, "has_bias": "bias" in op.extras, "empty": op.empty,
            **(self._summed(op) if isinstance(op, AttentionBias) else {}),
        }  # fmt: skip

    def _summed(self, op: AttentionBias) -> dict[str, object]:
        """Which head the `each`-th one of those is that share bias `kept`."""
        lead = self.node.operands[0].shape[:-2]
        at = {"kept": math.prod(n for a, n in enumerate(lead) if a not in op.axes)}
        at["each"] = math.prod(lead) // max(1, at["kept"])
        sizes, terms, stride = {"KEPT": at["kept"], "SUMMED": at["each"]}, [], math.prod(lead)
        for a, n in enumerate(lead):
            name = "each" if a in op.axes else "kept"
            at[name], stride = at[name] // n, stride // n
            if n > 1:
                terms.append(f"{name} / {at[name]}u % {n}u * {stride}u")
        return {**sizes, "head": " + ".join(terms) or "0u"}

    def _vectors(self, operands: dict[str, Operand]) -> dict[str, bool]:
        """Which operands and results are accessed four elements at a time along a head."""
        _, _, _, d, dv = self.heads
        flags = {
            f"{name}_vec": o.extents[2] % 4 == 0 and load_cost(self.job, o, 2) < 52.0
            for name, o in operands.items()
            if name not in (*_ROWS, "mask", "bias")
        }
        sizes = {"o": dv, "dq": d, "dk": d, "dv": dv, "ds": self.heads[2]}
        return flags | {f"{name}_vec": size % 4 == 0 for name, size in sizes.items()}

    def _store(self, emitter: Emitter, item: int) -> Callable[..., str] | None:
        """The store of one result with all that follows it; None when it is not wanted."""
        outputs = [(k, o) for k, o in enumerate(self.job.group.outputs) if _item(self.a, o) == item]
        if not outputs and self.step == "forward" and item == 1:
            return None
        got = next((n for n in self.a.body if isinstance(n.op, Get) and n.op.index == item), None)
        name = _RESULTS[self.step][item]
        axes, extents = self._places(name)

        def write(em: Emitter, flat: Index, value: Value) -> None:
            if got is not None:
                em.bound[got] = value
            write_tile(em, self.a, outputs, flat)

        def store(coords: Sequence[str], value: str, vec: int = 1) -> str:
            function = store_function(emitter, f"store_{name}", axes, extents, vec == 4, write)
            return f"{function}({', '.join((*coords, value))});"

        return store
