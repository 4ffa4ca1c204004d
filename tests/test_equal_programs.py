"""Complicated equal programs, built from the rules: one of left sides, one of right sides. What is
chosen for each of them, and what the device computes, agree.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.codegen import lower
from eggpu.compiler.egraph.check import Sample, samples
from eggpu.compiler.egraph.patterns import Rule
from eggpu.compiler.egraph.rules import all_rules
from eggpu.compiler.ir import Graph, Kind, Node, make, topological
from eggpu.compiler.ops import broadcast, input_node, reduce, reshape
from eggpu.compiler.ops.elementwise import tanh
from eggpu.compiler.pipeline import Options, compile_graph
from eggpu.compiler.reference import evaluate, evaluate_selection
from eggpu.compiler.schedule.assemble import assemble
from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE
from eggpu.compiler.types import f32
from eggpu.runtime import Executable

RULES = [rule for rule in all_rules() if not rule.relaxed]
STEPS = 5  # rules in one program


def test_there_are_many_rules() -> None:
    assert len({rule.base for rule in all_rules()}) >= 120


class Pair:
    """Two programs that rules make equal. `inputs` are those of both."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.inputs: list[Node] = []
        self.values: list[np.ndarray] = []
        self.sides: tuple[list[Node], list[Node]] = ([], [])
        self.names: list[str] = []

    def add(self, rule: Rule) -> None:
        """One more rule, one of whose operands is computed from what was there before."""
        every = list(samples(rule))
        one = every[int(self.rng.integers(len(every)))]
        roots = one.left().node, one.right().node
        seed = int(self.rng.integers(1000))
        if not self._usable(one, roots, seed):
            return
        fresh: dict[Node, Node] = {}
        for node, value in zip(one.inputs, one.arrays(seed), strict=True):
            fresh[node] = input_node(len(self.inputs), f"x{len(self.inputs)}", node.type)
            self.inputs.append(fresh[node])
            self.values.append(value.astype(node.dtype.numpy))
        joined = [n for n in one.inputs if n.dtype is f32 and n not in one.positive]
        chosen = joined[int(self.rng.integers(len(joined)))] if joined else None
        for side, root in zip(self.sides, roots, strict=True):
            given = dict(fresh)
            if chosen is not None and side:
                given[chosen] = near(fresh[chosen], side[-1])
            side.append(rebuilt(root, given))
        self.names.append(rule.name)

    def _usable(self, one: Sample, roots: tuple[Node, Node], seed: int) -> bool:
        fused = any(n.kind in (Kind.TUPLE, Kind.GET) for n in topological(roots))  # never traced
        if one.unmet or fused or any(r.dtype is not f32 for r in roots):
            return False
        graph = Graph("one", tuple(one.inputs), roots)
        found = evaluate(graph, one.arrays(seed), np.float64)
        return all(np.isfinite(f).all() and np.abs(f).max(initial=0.0) < 1e3 for f in found)

    def graphs(self) -> list[Graph]:
        return [Graph("equal", tuple(self.inputs), tuple(side)) for side in self.sides]


def near(x: Node, other: Node) -> Node:
    """x moved by a bounded number that `other` decides."""
    mean = reduce("sum", other, tuple(range(len(other.shape)))) if other.shape else other
    moved = tanh(reshape(mean, (1,) * len(x.shape)))
    return x + broadcast(moved, x.shape) if x.shape else x + tanh(reshape(mean, ()))


def rebuilt(root: Node, given: Mapping[Node, Node]) -> Node:
    """`root` over other inputs."""
    now = dict(given)
    for node in topological((root,)):
        if node not in now:
            assert node.kind is not Kind.INPUT
            now[node] = make(node.op, *(now[o] for o in node.operands))
    return now[root]


def pair(seed: int) -> Pair:
    rng = np.random.default_rng(seed)
    out = Pair(rng)
    while len(out.names) < STEPS:
        out.add(RULES[int(rng.integers(len(RULES)))])
    return out


@pytest.mark.parametrize("seed", range(16))
def test_chosen_programs_of_equal_programs_agree(seed: int) -> None:
    made = pair(seed)
    left, right = made.graphs()
    wanted = evaluate(left, made.values, np.float64)
    # in double precision but for constants, which rules fold in single precision
    close(evaluate(right, made.values, np.float64), wanted, 1e-6, made.names)
    target = (FLOOR, LLVMPIPE)[seed % 2]
    for graph in (left, right):
        selection = compile_graph(graph, target, Options()).selection
        close(evaluate_selection(selection, made.values, np.float64), wanted, 1e-6, made.names)


@pytest.mark.parametrize("seed", range(100, 104))
def test_the_device_computes_equal_programs_alike(seed: int) -> None:
    made = pair(seed)
    device = eg.device()
    left, right = made.graphs()
    wanted = evaluate(left, made.values, np.float64)
    for graph in (left, right):
        plan = assemble(compile_graph(graph, device.target).selection, device.target, lower)
        buffers = Executable(plan, device)([device.upload(v) for v in made.values])
        places = [plan.buffers[o] for o in plan.outputs]
        pairs = zip(buffers, places, strict=True)
        found = [device.download(b, p.shape, p.dtype) for b, p in pairs]
        close(found, wanted, 2e-4, made.names)


def close(found: list[np.ndarray], wanted: list[np.ndarray], most: float, names: list[str]) -> None:
    for name, a, b in zip(names, found, wanted, strict=True):
        gap = np.abs(np.asarray(a, np.float64).reshape(b.shape) - b).max(initial=0.0)
        assert gap <= most * (1 + np.abs(b).max(initial=0.0)), f"{name} of {names}: off by {gap}"
