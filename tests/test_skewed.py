"""Products whose operands' rows begin anywhere: whole vec4s are loaded, values are right."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.codegen import lower
from eggpu.compiler.codegen.contract import product_tiles
from eggpu.compiler.codegen.source import Job
from eggpu.compiler.ir import Graph, Kind
from eggpu.compiler.reference import evaluate
from eggpu.compiler.schedule import tile as tilings
from eggpu.compiler.schedule.assemble import assemble
from eggpu.compiler.schedule.plan import Plan
from eggpu.compiler.schedule.selection import Group, Selection, body
from eggpu.compiler.schedule.target import LLVMPIPE
from eggpu.compiler.schedule.tile import Tile
from eggpu.compiler.schedule.verify import verify_plan
from eggpu.compiler.tracing import trace
from eggpu.compiler.types import parse_type
from eggpu.runtime import Device, Executable, open_device

sys.path.insert(0, str(Path(__file__).parent))
from lowering import values

FORMS = {
    "nn": lambda a, b: a @ b,
    "tn": lambda a, b: a.T @ b,
    "nt": lambda a, b: a @ b.T,
    "tt": lambda a, b: a.T @ b.T,
}


@pytest.fixture(scope="module")
def device() -> Device:
    """No device fails the tests: nothing here skips."""
    return open_device()


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilings, "_WORTH_TEXT", 0)


def of(function, *types: str) -> Graph:
    return trace(function, *map(parse_type, types))


def skewed_tiles(graph: Graph) -> list[Tile]:
    group = Group(graph.outputs, graph.inputs)
    product = next(n for n in body(group) if n.kind is Kind.CONTRACT)
    tiles = product_tiles(Job(group, LLVMPIPE, {o: o for o in group.operands}), product, 200)
    return [t for t in tiles if t.values.get("skew")]


def right(device: Device, graph: Graph, tile: Tile) -> Plan:
    """A group in a tiling gives what NumPy gives in float64."""
    groups = (Group(graph.outputs, graph.inputs),)
    plan = assemble(
        Selection(graph, groups), LLVMPIPE, lambda g, t: lower(g, t, hints={"tile": tile})
    )
    verify_plan(plan, LLVMPIPE)
    args = [values(i) for i in graph.inputs]
    found = Executable(plan, device)([device.upload(a) for a in args])
    for buffer, out, want in zip(found, graph.outputs, evaluate(graph, args, np.float64)):
        got = device.download(buffer, out.shape, out.dtype.name)
        scale = np.abs(want).max()
        np.testing.assert_allclose(got / scale, want / scale, atol=3e-6, rtol=0, err_msg=str(tile))
    return plan


def varied(tiles: Sequence[Tile]) -> list[Tile]:
    """The best tiling of each way to load and each number of parts, and that with fewest rows."""
    found: dict[object, Tile] = {}
    for tile in tiles:
        found.setdefault((tile.swap, tile.splits), tile)
        found[tile.swap] = tile
    return list(dict.fromkeys(found.values()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("m", "n", "k"), [(33, 65, 29), (30, 35, 514), (61, 33, 7)])
def test_odd_sizes_in_every_layout(device: Device, form: str, m: int, n: int, k: int) -> None:
    a, b = (m, k) if form[0] == "n" else (k, m), (k, n) if form[1] == "n" else (n, k)
    graph = of(FORMS[form], f"f32[{a[0]}, {a[1]}]", f"f32[{b[0]}, {b[1]}]")
    tiles = varied(skewed_tiles(graph))
    assert len(tiles) >= 2
    for tile in tiles:
        plan = right(device, graph, tile)
        accesses = [b.access for b in plan.kernels[0].bindings[1:]]
        assert all(accesses[i] == "image4" for i, name in enumerate("ab") if name in tile.images)


@pytest.mark.parametrize("k", [1, 2, 5, 21])
def test_batches_that_begin_at_multiples_of_four(device: Device, k: int) -> None:
    graph = of(lambda a, b: a @ b, f"f32[2, 3, 36, {k}]", f"f32[2, 3, {k}, 44]")
    for tile in varied(skewed_tiles(graph)):
        right(device, graph, tile)


def test_batches_that_begin_anywhere_are_not_skewed() -> None:
    graph = of(lambda a, b: a @ b, "f32[3, 35, 21]", "f32[3, 21, 33]")
    assert skewed_tiles(graph) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a[:, 1:34] @ b,  # rows begin at 1
        lambda a, b: a[2:, :33] @ b,
        lambda a, b: eg.exp(a[:33, :33] * -1.0) @ b,  # a is computed: only b is skewed
        lambda a, b: (a[:33, :33] @ b) * 0.5 + b,  # what is skewed is read afterwards too
        lambda a, b: b @ b.T + 1.0,
    ],
)
def test_parts_of_arrays_and_what_is_computed(device: Device, function) -> None:
    graph = of(function, "f32[37, 39]", "f32[33, 33]")
    inputs = {n for n in body(Group(graph.outputs, graph.inputs)) for n in n.operands}
    graph = Graph("f", tuple(i for i in graph.inputs if i in inputs), graph.outputs)
    tiles = varied(skewed_tiles(graph))
    assert tiles
    for tile in tiles:
        right(device, graph, tile)


def test_small_products_are_not_worth_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    small = of(lambda a, b: a @ b, "f32[65, 127]", "f32[127, 513]")
    large = of(lambda a, b: a @ b, "f32[513, 513]", "f32[513, 513]")
    assert not skewed_tiles(small)
    assert skewed_tiles(large)


def test_padded_operands_are_not_skewed() -> None:
    graph = of(lambda a, b: eg.pad(a, ((0, 0), (0, 2))) @ b, "f32[33, 33]", "f32[35, 35]")
    assert {t.values["skew"] for t in skewed_tiles(graph) if not t.swap} == {"b"}


def test_nan_past_a_row_stays_out(device: Device) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((257, 257)).astype(np.float32) for _ in range(2))
    want = a.astype(np.float64) @ b
    a[5] = np.nan
    b[:, 7] = np.inf
    got = eg.compile(lambda a, b: a @ b)(a, b).numpy()
    keep = np.delete(np.delete(got, 5, 0), 7, 1)
    np.testing.assert_allclose(keep, np.delete(np.delete(want, 5, 0), 7, 1), atol=1e-3)
    assert np.isnan(got[5]).all()
    assert not np.isfinite(got[:, 7]).any()


def test_large_odd_products_are_skewed() -> None:
    for n in (511, 513, 1025):
        graph = of(lambda a, b: a @ b, f"f32[{n}, {n}]", f"f32[{n}, {n}]")
        group = Group(graph.outputs, graph.inputs)
        job = Job(group, LLVMPIPE, {o: o for o in group.operands})
        (best,) = product_tiles(job, graph.outputs[0], 1)
        assert best.values["skew"] == "ab"
        assert best.images == "ab"


def test_tiles_of_odd_products_are_as_high_as_leaves_few_rows_over() -> None:
    graph = of(lambda a, b: a @ b, "f32[513, 513]", "f32[513, 513]")
    best = skewed_tiles(graph)[0].values
    assert -(-513 // int(best["TM"])) * int(best["TM"]) == 520
