"""Five tests of every op, made from its samples: type rule, gradient, the e-graph's language, text,
and kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.autodiff import vjp_nodes
from eggpu.compiler.egraph import Options, saturate_graph
from eggpu.compiler.egraph.rules import program_rules
from eggpu.compiler.egraph.snapshot import from_nodes
from eggpu.compiler.ir import Graph, Kind, Node, Op
from eggpu.compiler.library.convert import wrap
from eggpu.compiler.ops import input_node
from eggpu.compiler.ops.elementwise import ELEMENTWISE
from eggpu.compiler.ops.samples import Sample, results
from eggpu.compiler.reference import evaluate
from eggpu.compiler.text import constant_table, parse_graph, print_graph
from eggpu.compiler.types import TupleType, Type, dtype

NO_RULES = Options(phases=(), disabled=tuple(r.base for r in program_rules()))
STEP = 1e-6


def op_classes(base: type[Op] = Op) -> list[type[Op]]:
    """Every op class that a program may hold; inputs and the elementwise table aside."""
    below = [c for s in base.__subclasses__() for c in op_classes(s)]
    return below or [base]


CLASSES = {
    c.__name__: c
    for c in op_classes()
    if c.__module__.startswith("eggpu.compiler.ops.") and c.__name__ not in ("Input", "Elementwise")
}
NAMES = [*ELEMENTWISE, *CLASSES]
# Kernels with several results, and one of them: rules put them into the e-graph, programs do not.
# Loops stand between the programs that the e-graph holds.
SEVERAL = {
    n for n, c in CLASSES.items() if object.__new__(c).kind in (Kind.TUPLE, Kind.GET, Kind.LOOP)
}


@cache
def samples(name: str) -> list[Sample]:
    return list(ELEMENTWISE[name].samples() if name in ELEMENTWISE else CLASSES[name].samples())


def inputs(operands: Sequence[np.ndarray], first: int = 0) -> list[Node]:
    types = [Type(x.shape, dtype(x.dtype)) for x in operands]
    return [input_node(first + k, f"x{first + k}", t) for k, t in enumerate(types)]


def program(given: Sequence[Sample]) -> tuple[Graph, list[np.ndarray]]:
    """All samples as one program, and its arguments."""
    nodes: list[Node] = []
    outputs: list[Node] = []
    values: list[np.ndarray] = []
    for sample in given:
        mine = inputs(sample.operands, len(nodes))
        nodes += mine
        values += sample.operands
        outputs += results(sample.op, mine)
    return Graph("samples", tuple(nodes), tuple(outputs)), values


def doubled(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if x.dtype.kind == "f" else x


@pytest.mark.parametrize("name", NAMES)
def test_type_is_numpy_s(name: str) -> None:
    assert samples(name), f"{name} has no samples"
    for sample in samples(name):
        found = sample.op.infer(*(n.type for n in inputs(sample.operands)))
        with np.errstate(all="ignore"):
            value = sample.op.evaluate(*sample.operands)
        types = found.items if isinstance(found, TupleType) else (found,)
        values = value if isinstance(found, TupleType) else (value,)
        got = [Type(np.shape(v), dtype(np.asarray(v).dtype)) for v in values]
        assert got == list(types), sample


def numeric(op: Op, xs: list[np.ndarray], k: int, weights: np.ndarray) -> np.ndarray:
    """The derivative of sum(op(xs) * weights) by xs[k], by central differences."""
    out = np.zeros(xs[k].shape)
    for i in np.ndindex(*xs[k].shape):
        ends = []
        for h in (STEP, -STEP):
            moved = [np.array(x) for x in xs]
            moved[k][i] += h
            with np.errstate(all="ignore"):
                ends.append((op.evaluate(*moved) * weights).sum())
        out[i] = (ends[0] - ends[1]) / (2 * STEP)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_the_finite_difference(name: str) -> None:
    for sample in samples(name):
        moving = [k for k, x in enumerate(sample.operands) if x.dtype == np.float32]
        if not sample.smooth or not moving:
            continue
        nodes = inputs(sample.operands)
        (result,) = results(sample.op, nodes)
        if result.dtype.kind != "f":
            continue
        weights = np.random.default_rng(1).uniform(-1, 1, result.shape)
        cotangent = input_node(len(nodes), "ct", result.type)
        grads = vjp_nodes([result], [cotangent], [nodes[k] for k in moving])
        arguments = [doubled(x) for x in sample.operands]
        graph = Graph("gradient", (*nodes, cotangent), tuple(grads))
        found = evaluate(graph, [*arguments, weights], np.float64)
        frozen = (
            getattr(sample.op, "gradient", True) is None
        )  # of no slope, or a constant to autodiff
        for k, got in zip(moving, found, strict=True):
            want = 0 * arguments[k] if frozen else numeric(sample.op, arguments, k, weights)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7, err_msg=str(sample))


@pytest.mark.parametrize("name", [n for n in NAMES if n not in SEVERAL])
def test_the_e_graph_gives_it_back(name: str) -> None:
    graph, _ = program(samples(name))
    snapshot, _ = saturate_graph(graph, NO_RULES)
    plain = from_nodes(list(graph.outputs))

    def content(s: Any) -> Counter[Any]:
        types = [tuple(s.types[k] for k in kids) for kids in s.kids]
        return Counter((op, s.types[c], t) for op, c, t in zip(s.ops, s.cls, types, strict=True))

    assert content(plain) - content(snapshot) == Counter()
    assert [snapshot.types[c] for c in snapshot.roots] == [n.type for n in graph.outputs]


@pytest.mark.parametrize("name", NAMES)
def test_text_gives_it_back(name: str) -> None:
    graph, _ = program(samples(name))
    again = parse_graph(print_graph(graph), constant_table(graph))
    assert [a is b for a, b in zip(again.outputs, graph.outputs, strict=True)] == [True] * len(
        graph.outputs
    )


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_numpy_s(name: str) -> None:
    given = samples(name)
    for first in range(0, len(given), 48):
        _check_kernels(given[first : first + 48])


def _check_kernels(given: Sequence[Sample]) -> None:
    graph, values = program(given)
    double = evaluate(graph, [doubled(v) for v in values], np.float64)
    single = evaluate(graph, values)
    shown = [(s.op, [x.shape for x in s.operands]) for s in given for _ in _results(s)]

    def call(*xs: Any) -> Any:
        nodes = iter([eg.array(x).node for x in xs])
        return [wrap(r) for s in given for r in results(s.op, [next(nodes) for _ in s.operands])]

    for optimize in (False,) if graph.outputs[0].kind is Kind.GET else (False, True):
        outputs = eg.compile(call, optimize=optimize)(*values)
        for got, want, near, what in zip(outputs, double, single, shown, strict=True):
            problem = difference(got.numpy(), want, near)
            assert problem is None, f"{what}, {'optimized' if optimize else 'separate'}: {problem}"


def _results(sample: Sample) -> range:
    found = sample.op.infer(*(n.type for n in inputs(sample.operands)))
    return range(len(found.items) if isinstance(found, TupleType) else 1)


def difference(got: np.ndarray, double: np.ndarray, single: np.ndarray) -> str | None:
    """What is wrong with a result: it is near NumPy's in double precision or, at the ends of single
    precision, in single."""
    if got.shape != single.shape or got.dtype != single.dtype:
        return f"{got.dtype}{list(got.shape)} for {single.dtype}{list(single.shape)}"
    if got.dtype.kind != "f":
        return None if np.array_equal(got, single) else f"{got.tolist()} for {single.tolist()}"
    tolerance = 2e-3 if got.dtype == np.float16 else 4e-6
    tiny = 1e-7 if got.dtype == np.float16 else 1.2e-38
    with np.errstate(all="ignore"):
        scale = np.max(np.abs(double), initial=0, where=np.isfinite(double))
        loose = tiny + 1e-6 * (scale if scale < 1e6 else 0)  # sums of many numbers cancel
        good = np.isclose(got, double.astype(got.dtype), tolerance, loose, equal_nan=True)
        good |= np.isclose(got, single, tolerance, loose, equal_nan=True)
    if good.all():
        return None
    at = np.unravel_index(int(np.argmin(good)), good.shape)
    return f"{got[at]!r} for {double[at]!r} at {[int(i) for i in at]} ({(~good).sum()} wrong)"


def test_an_op_without_samples_is_found() -> None:
    class Lonely(Op):
        name = "lonely"
        kind = Kind.MOVE

    try:
        with pytest.raises(NotImplementedError, match="Lonely needs samples"):
            Lonely.samples()
    finally:
        del Lonely
