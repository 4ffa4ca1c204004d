"""The plans of bench/choices.py: for each workload the chosen program and the alternatives to it,
each in a kernel of every tiling, written to a file that runs without compiler and e-graph.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from choices_work import Workload

from eggpu.compiler.codegen import lower
from eggpu.compiler.codegen.attention import attention_tiles
from eggpu.compiler.codegen.contract import product_tiles
from eggpu.compiler.codegen.source import Job
from eggpu.compiler.egraph import saturate_graph
from eggpu.compiler.egraph.force import Forced, forced
from eggpu.compiler.errors import CompileError, IRError
from eggpu.compiler.expand import expand
from eggpu.compiler.ir import Kind, Node
from eggpu.compiler.pipeline import Options, saturation
from eggpu.compiler.schedule.assemble import assemble
from eggpu.compiler.schedule.plan import Plan
from eggpu.compiler.schedule.selection import Group, Selection, body
from eggpu.compiler.schedule.serialize import plan_to_json
from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE, Target
from eggpu.compiler.schedule.target import H200 as H200_RATES
from eggpu.compiler.schedule.tile import Tile
from eggpu.compiler.schedule.tile_attention import Pass
from eggpu.compiler.schedule.verify import verify_plan
from eggpu.compiler.tracing import trace
from eggpu.compiler.types import parse_type

SLOWEST = 4.0  # an alternative predicted to take this many times the chosen one's time is left out
MOST_TILES = 16  # of one product, the best by the cost model
PASSES: dict[str, tuple[Pass, ...]] = {"attention": ("forward",), "attention_backward": ("q", "kv")}
MOST = 32  # alternatives of a workload, the best by the cost model
H200 = replace(
    FLOOR,
    name="NVIDIA H200",
    driver="580",
    backend="Vulkan",
    subgroup=32,
    features=("subgroup",),
    max_bindings=64,
    max_binding_bytes=(2 << 30) - 4,
    max_buffer_bytes=4 << 30,
    max_workgroup_bytes=48 << 10,
    max_invocations=1024,
    profile=H200_RATES,
)
TARGETS = {"h200": H200, "lavapipe": LLVMPIPE, "generic": FLOOR}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan by name, with its us by the cost model."""

    name: str
    plan: Plan
    predicted_us: float


def export(workload: Workload, target: Target, where: Path) -> int:
    """Write a workload's plans to a file; how many there are."""
    found = plans(workload, target)
    content = {
        "workload": workload.name,
        "types": workload.types,
        "below": workload.below,
        "target": target.name,
        "plans": [
            {"name": c.name, "predicted_us": c.predicted_us, "plan": plan_to_json(c.plan)}
            for c in found
        ],
    }
    where.parent.mkdir(parents=True, exist_ok=True)
    new = where.with_suffix(".new")
    new.write_bytes(lzma.compress(json.dumps(content).encode()))
    new.replace(where)
    return len(found)


def plans(workload: Workload, target: Target) -> list[Candidate]:
    """The chosen plan, then all others that differ from it and from one another."""
    graph = expand(trace(workload.function, *map(parse_type, workload.types)))
    snapshot, _ = saturate_graph(graph, saturation(Options()))
    choice = forced(snapshot, target, graph)
    known: set[Any] = set()
    out: list[Candidate] = []
    for name, predicted, selection, hints in _ordered(choice, target):
        if len(out) >= MOST:
            break
        try:
            plan = assemble(selection, target, _lower(hints))
            verify_plan(plan, target)
        except (CompileError, IRError):
            if name == "chosen":
                raise
            continue  # no legal kernels
        key = tuple((k.wgsl, k.grid, k.bindings) for k in plan.kernels)
        if key not in known:
            known.add(key)
            out.append(Candidate(name, plan, round(predicted / 1e3, 2)))
    return out


Hints = Mapping[Group, Mapping[str, object]]
Case = tuple[str, float, Selection, Hints]


def _ordered(choice: Forced, target: Target) -> list[Case]:
    """The chosen program, the plainest ones, then what the cost model likes best."""
    first, *plain = [("chosen", choice.chosen.predicted_ns, choice.chosen.selection, {})]
    others: list[Case] = []
    for other in choice.others(SLOWEST):
        case = (other.name, other.predicted_ns, other.selection, {})
        is_plain = other.name in ("greedy, then fused", "a kernel for each op")
        (plain if is_plain else others).append(case)
    for group in choice.chosen.selection.groups:
        for name, hints, predicted in _kernels_of(group, choice, target):
            others.append((name, predicted, choice.chosen.selection, {group: hints}))
    limit = SLOWEST * choice.chosen.predicted_ns
    others = [case for case in others if case[1] <= limit]
    return [first, *plain, *sorted(others, key=lambda case: (case[1], case[0]))]


def _lower(hints: Hints) -> Any:
    return lambda group, target: lower(group, target, hints=hints.get(group))


def _kernels_of(
    group: Group, choice: Forced, target: Target
) -> Iterator[tuple[str, Mapping[str, object], float]]:
    """The other kernels for a group: (name, hints for its lowering, predicted ns)."""
    nodes = body(group)
    product = next((n for n in nodes if n.kind is Kind.CONTRACT), None)
    tuple_op = next((n for n in nodes if n.kind is Kind.TUPLE), None)
    if product is not None and product.type.size and product.operands[0].shape[-1]:
        best, *rest = _product_tiles(group, product, target)
        for tile in rest:
            more = int(tile.splits > 1) - int(best.splits > 1)
            ns = choice.predicted(group, best.efficiency / tile.efficiency, more)
            yield _described(tile), {"tile": tile}, ns
    elif tuple_op is not None and tuple_op.op.name in PASSES:
        for step, tile, busy in _attention_tiles(tuple_op, target):
            ns = choice.predicted(group, busy)
            yield _described(tile), {f"tile_{step}": tile}, ns
    elif product is None and any(n.kind is Kind.REDUCE for n in nodes):
        for staged in (False, True):
            name = "rows in parts" if staged else "rows at once"
            yield name, {"staged": staged}, choice.predicted(group, staged=staged)


def _product_tiles(group: Group, product: Node, target: Target) -> list[Tile]:
    memory = {o: o for o in group.operands if o not in group.outputs}
    job = Job(group, target, memory)
    return product_tiles(job, product, MOST_TILES)


def _attention_tiles(node: Node, target: Target) -> Iterator[tuple[Pass, Tile, float]]:
    """The other tilings of each pass, with the time of all passes over that of the best ones."""
    d, dv = (o.shape[-1] for o in node.operands[1:3])
    work: dict[Pass, int] = {"forward": d + dv, "q": 2 * d + dv, "kv": 2 * d + 2 * dv}
    steps = PASSES[node.op.name]
    found = {step: attention_tiles(node, step, target, MOST_TILES) for step in steps}
    ns = {step: work[step] / found[step][0].efficiency for step in steps}
    for step in steps:
        best, *rest = found[step]
        for tile in rest:
            more = ns[step] * (best.efficiency / tile.efficiency - 1)
            yield step, tile, 1 + more / sum(ns.values())


def _described(tile: Tile) -> str:
    """`contract_cpu TM 8, CW 4, splits 2, swapped`: what tells a tile from others."""
    values = [f"{k} {v}" for k, v in tile.params if k not in ("grid", "L", "CV") and v is not False]
    words = [*values, *(["swapped"] if tile.swap else []), tile.images and f"images {tile.images}"]
    return f"{tile.template.partition('.')[0]} {', '.join(w for w in words if w)}"
