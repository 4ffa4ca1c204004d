"""The cost of the one heavy op of a kernel: a product, scatter, scan, sort, attention."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ..ir import Kind
from ..ops.decode import DecodeBase
from ..ops.fused import Attention, AttentionBias, GradientBase
from ..schedule.target import Target
from ..schedule.tile import candidates
from ..schedule.tile_attention import Pass, Scores, attention_candidates, scores_of
from ..schedule.tile_decode import FORMS, decode_ns, decode_shape, decode_tile
from ..schedule.tile_rows import ROWS
from ..types import Type
from .graph import Problem

LARGE_PRODUCT = (1, 4096, 4096, 4096)  # batch, m, n, k
LARGE_ATTENTION = (96, 4096, 4096, 64, 64)  # heads, queries, keys, sizes of a head
CONVOLUTION = 0.5  # rate of a convolution, of that of a contraction
DIRECT = 1 << 18  # comparisons of positions that cost less than two kernels more
RUN = 16  # elements of a row that one step sorts


CAUSAL = 0.57  # time of causal attention over that of all scores, on GPUs: hidden ones are skipped


class Anchor(NamedTuple):
    """An e-node as a kernel uses it: which operands are read transposed, which results it gives,
    and of a product the words in memory that an element of each operand takes."""

    node: int
    a_moved: bool = False
    b_moved: bool = False
    results: tuple[int, ...] = ()
    words: tuple[float, float] = (1.0, 1.0)
    rows: bool = False  # a product with few rows that shares its kernel


class AnchorCost(NamedTuple):
    """ns of arithmetic, dispatches beyond the first, and bytes and flops beyond the op's own."""

    busy: float
    launches: int
    nbytes: float
    flops: float


def anchor_cost(p: Problem, target: Target, a: Anchor) -> AnchorCost | None:
    """What an anchor costs on a target; None when there is no kernel for its shape."""
    op, flops = p.snapshot.ops[a.node], p.weight[a.node]
    result = p.snapshot.types[p.snapshot.cls[a.node]]
    types = [t for k in p.snapshot.kids[a.node] if isinstance(t := p.snapshot.types[k], Type)]
    profile = target.profile
    match op.kind:
        case Kind.CONTRACT if flops:
            assert isinstance(result, Type)
            return _contraction(target, result, types[0].shape[-1], flops, a)
        case Kind.SCATTER:
            assert isinstance(result, Type)
            return _scatter(target, result.size, types[-1].size, flops)
        case Kind.WINDOW:
            return AnchorCost(flops / (CONVOLUTION * profile.contract), 0, 0.0, flops)
        case Kind.SORT:
            assert isinstance(result, Type)
            steps = 1 + math.ceil(math.log2(max(1, result.shape[-1] / RUN)))
            compared = float(result.size * (min(RUN, result.shape[-1]) + steps * 32))
            moved = 16.0 * result.size * steps
            return AnchorCost(compared / profile.elementwise, steps, moved, compared)
        case Kind.TUPLE if isinstance(op, DecodeBase):
            return _decode(target, op, types)
        case Kind.TUPLE if len(types) >= 3:
            assert isinstance(op, Attention | GradientBase)
            return _attention(target, op, types, a.results)
        case _:
            return AnchorCost(flops / profile.elementwise, 0, 0.0, flops)


def _contraction(target: Target, out: Type, k: int, flops: float, a: Anchor) -> AnchorCost:
    shape = (math.prod(out.shape[:-2]), out.shape[-2], out.shape[-1], k)
    efficiency, splits = _tiling(target, *shape, a.a_moved, a.b_moved, a.words, a.rows)
    busy = flops / target.profile.contract / efficiency
    if splits == 1 or target.kind == "cpu":  # whose efficiencies count the kernel that adds up
        return AnchorCost(busy, splits > 1, 0.0, flops)
    return AnchorCost(busy, 1, 8.0 * splits * out.size, flops)


@lru_cache(maxsize=4096)
def _tiling(
    target: Target,
    batch: int,
    m: int,
    n: int,
    k: int,
    a_moved: bool,
    b_moved: bool,
    words: tuple[float, float],
    rows: bool,
) -> tuple[float, int]:
    axes = "m" if a_moved else "k", "k" if b_moved else "n"
    found = candidates(target, batch, m, n, k, *axes, 200 if rows else 1, words)
    alone = [t for t in found if t.template == ROWS and t.splits == 1 and not t.swap]
    tile = alone[0] if rows and alone else found[0]
    return max(1e-3, tile.efficiency / _best_product(target.rated())), tile.splits


@lru_cache(maxsize=64)
def _best_product(target: Target) -> float:
    """The efficiency at which a profile's rate of large products is reached."""
    return candidates(target, *LARGE_PRODUCT, count=1)[0].efficiency


def _scatter(target: Target, size: int, positions: int, flops: float) -> AnchorCost:
    """Every result looks at all positions, or at a list of its own that two kernels make."""
    direct = positions * size <= DIRECT
    compared = positions * size if direct else positions * positions / 2
    busy = (flops + compared) / target.profile.elementwise
    return AnchorCost(busy, 0 if direct else 2, 0.0, flops + compared)


def _attention(
    target: Target, op: Attention | GradientBase, types: list[Type], results: tuple[int, ...]
) -> AnchorCost | None:
    """Attention is one kernel, its gradients are one for q and one for k and v, that of a bias is
    one.
    """
    summed = op.axes if isinstance(op, AttentionBias) else None
    scores = scores_of(op)
    (*batch, queries, d), (*_, keys, _), (*_, dv) = (t.shape for t in types[:3])
    empty = [t.size == 0 for t in types[:3]]
    if all(empty) if len(types) >= 6 else not math.prod(batch) * queries:
        return AnchorCost(0.0, 0, 0.0, 0.0)  # nothing to compute
    steps: list[Pass] = ["forward"]
    kept = math.prod(batch)
    if summed is not None:
        steps = ["bias"]
        kept = math.prod(n for axis, n in enumerate(batch) if axis not in summed)
    elif len(types) >= 6:
        steps = [s for s, given in (("q", {0}), ("kv", {1, 2})) if given & set(results)]  # type: ignore[misc]
    busy = total = 0.0
    # hidden keys are skipped where they give nothing; tilings of CPUs count that themselves
    counted = target.kind == "cpu" and target.subgroup and summed is None
    skips = scores.causal and (scores.empty == "zero" or summed is not None)
    share = CAUSAL if skips and not counted else 1.0
    for step in steps:
        shape = (math.prod(batch), queries, keys, d, dv)
        efficiency = _fused(target, step, *shape, kept, scores)
        if efficiency is None:
            return None
        work = {"forward": d + dv, "q": 2 * d + dv, "kv": 2 * d + 2 * dv, "bias": d + dv}[step]
        flops = 2.0 * math.prod(batch) * queries * keys * work
        busy += flops / target.profile.attention / efficiency
        total += flops / 2 if scores.causal else flops  # as the op counts them
    return AnchorCost(share * busy, max(0, len(steps) - 1), 0.0, total)


def _decode(target: Target, op: DecodeBase, types: list[Type]) -> AnchorCost | None:
    """Attention of a few rows is one kernel; of split keys, one more that joins the parts."""
    q, k, v = types[:3]
    if not math.prod(q.shape[:-1]) or not v.shape[-1]:
        return AnchorCost(0.0, 0, 0.0, 0.0)
    shape = decode_shape(q.shape, k.shape, v.shape)
    form = FORMS[op.name]
    tile = decode_tile(target, form, shape)
    if tile is None:
        return None
    share = op.read_share
    flops = 2.0 * shape.heads * shape.rows * shape.keys * (shape.d + shape.dv) * share
    busy = decode_ns(target, form, shape, tile, share, copied=not op.bounded)
    lines = shape.heads * shape.rows
    nbytes = 8.0 * lines * shape.keys * share if form == "phases" else 0.0
    if tile.splits > 1:
        nbytes = 8.0 * tile.splits * lines * (shape.dv + 2)
    return AnchorCost(busy, tile.splits > 1, nbytes, flops)


@lru_cache(maxsize=1024)
def _fused(
    target: Target,
    step: Pass,
    heads: int,
    queries: int,
    keys: int,
    d: int,
    dv: int,
    kept: int,
    scores: Scores,
) -> float | None:
    if min(heads, queries, keys, d, dv) < 1:
        return None
    tiles = attention_candidates(target, step, heads, queries, keys, d, dv, 1, kept, scores)
    return max(1e-3, tiles[0].efficiency / _best_attention(target.rated())) if tiles else None


@lru_cache(maxsize=64)
def _best_attention(target: Target) -> float:
    """The efficiency at which a profile's rate of attention is reached."""
    tiles = attention_candidates(target, "forward", *LARGE_ATTENTION, 1)
    return tiles[0].efficiency if tiles else 1.0
