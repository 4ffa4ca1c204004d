"""Groups lowered to WGSL and run on the device, for both classes of target, against NumPy in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from eggpu.compiler.codegen import lower
from eggpu.compiler.errors import CompileError, IRError
from eggpu.compiler.ir import Graph, Node, make
from eggpu.compiler.ops import (
    broadcast, cast, concat, dot, flip, full, gather, input_node, iota, literal, pad, reduce, reshape, scatter_add,
    slice_, swap, transpose,
)  # fmt: skip
from eggpu.compiler.ops import elementwise as E
from eggpu.compiler.ops.fused import Attention, AttentionBackward, get
from eggpu.compiler.ops.window import conv
from eggpu.compiler.reference import evaluate
from eggpu.compiler.schedule.assemble import assemble
from eggpu.compiler.schedule.kernel import KernelSource
from eggpu.compiler.schedule.plan import Plan
from eggpu.compiler.schedule.selection import Group, Selection, separate
from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE, Target
from eggpu.compiler.types import Type, bool_, f32, i32, u32
from eggpu.runtime import Device, Executable, open_device

# The templates for GPUs run on llvmpipe as well, slowly, and must keep its bound on loops.
GPU = replace(FLOOR, max_bindings=16, loop_limit=65535)
GPU_SUBGROUPS = replace(GPU, subgroup=8, features=("subgroup",))
TARGETS = {"cpu": LLVMPIPE, "gpu": GPU, "gpu-subgroups": GPU_SUBGROUPS}


@pytest.fixture(scope="module")
def device() -> Device:
    """No device fails the tests: nothing here skips."""
    return open_device()


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


def given(position: int, shape: Sequence[int], dtype=f32) -> Node:
    return input_node(position, f"x{position}", Type(tuple(shape), dtype))


def values(node: Node, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed + node.op.position)
    match node.dtype.kind:
        case "f":
            return rng.standard_normal(node.shape).astype(np.float32)
        case "b":
            return rng.random(node.shape) < 0.7
        case _:
            return rng.integers(0, 20, node.shape).astype(node.dtype.numpy)


def run(device: Device, graph: Graph, groups: Sequence[Group] | None, args, target: Target) -> tuple[list, Plan]:
    selection = separate(graph) if groups is None else Selection(graph, tuple(groups))
    plan = assemble(selection, target, lower)
    buffers = Executable(plan, device)([device.upload(np.asarray(a)) for a in args])
    return [device.download(b, o.shape, o.dtype.name) for b, o in zip(buffers, graph.outputs)], plan


def check(device, target, inputs, outputs, args=None, tol=2e-6, groups: Sequence[Group] | None = (), kernels=None):
    """One group with all outputs (or the given groups) gives what NumPy gives; sizes of errors relative to the largest."""
    graph = Graph("test", tuple(inputs), tuple(outputs))
    args = [values(i) for i in inputs] if args is None else args
    groups = [Group(tuple(outputs), tuple(inputs))] if groups == () else groups
    got, plan = run(device, graph, groups, args, target)
    for out, mine, want in zip(outputs, got, evaluate(graph, args, np.float64)):
        if want.dtype.kind != "f":
            np.testing.assert_array_equal(mine, want)
            continue
        finite = np.isfinite(want)
        np.testing.assert_array_equal(mine[~finite], want[~finite])
        scale = np.abs(want[finite]).max(initial=1e-30)
        np.testing.assert_allclose(mine[finite] / scale, want[finite] / scale, atol=tol, rtol=0, err_msg=repr(out))
    if kernels is not None:
        assert len(plan.kernels) == kernels
    return plan


def spread(x: Node, shape: Sequence[int]) -> Node:
    return broadcast(x, tuple(shape))


def mean(x: Node, axes: Sequence[int]) -> Node:
    n = math.prod(x.shape[a] for a in axes)
    return reduce("sum", x, axes) * (1 / n)


def softmax(x: Node, axis: int) -> Node:
    e = E.exp(x - spread(reduce("max", x, (axis,)), x.shape))
    return e / spread(reduce("sum", e, (axis,)), x.shape)


def normalized(x: Node, axes: Sequence[int]) -> tuple[Node, Node, Node]:
    centered = x - spread(mean(x, axes), x.shape)
    scale = E.rsqrt(mean(centered * centered, axes) + 1e-5)
    return centered * spread(scale, x.shape), scale, mean(x, axes)


# -- elementwise and movement


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4,), (6, 8), (5, 7), (2, 3, 4)])
def test_elementwise_chain_with_several_outputs(device, target, shape):
    x, y = given(0, shape), given(1, shape)
    z = x * y + 0.5
    check(device, target, [x, y], [z, E.maximum(z, full(0, shape, f32)), E.tanh(z - x)], kernels=1)


def test_broadcast_and_transposed_operands(device, target):
    x, b, t = given(0, (6, 8)), given(1, (8,)), given(2, (8, 6))
    plan = check(device, target, [x, b, t], [(x + spread(b, (6, 8))) * transpose(t, (1, 0))], kernels=1)
    wgsl = plan.kernels[0].wgsl
    assert "array<vec4<f32>>" in wgsl  # x, b and the result are accessed by four
    assert "= mul(add(" in wgsl.splitlines()[0]
    assert "let add_" in wgsl


def test_outputs_of_different_shapes_and_equal_size(device, target):
    x, y = given(0, (4, 6)), given(1, (3, 8))
    check(device, target, [x, y], [E.exp(x), y * y], kernels=1)


@pytest.mark.parametrize("n", [4_250_001, 16_800_000])
def test_grids_beyond_one_dimension(device, n):
    x = given(0, (n,))
    got, plan = run(device, Graph("big", (x,), (-x,)), None, [np.arange(n, dtype=np.float32)], LLVMPIPE)
    assert plan.kernels[0].grid[1] > 1
    np.testing.assert_array_equal(got[0], -np.arange(n, dtype=np.float32))


def moved(x: Node, choice: random.Random) -> Node:
    """A random movement of x."""
    shape, rank = x.shape, len(x.shape)
    match choice.randrange(8):
        case 0 if rank > 1:
            return transpose(x, choice.sample(range(rank), rank))
        case 1:
            sizes, left = [], x.type.size
            while left > 1:
                d = choice.choice([k for k in range(2, left + 1) if left % k == 0])
                sizes.append(d)
                left //= d
            return reshape(x, sizes or (1,))
        case 2:
            start = [choice.randrange(n) for n in shape]
            stop = [choice.randrange(a + 1, n + 1) for a, n in zip(start, shape)]
            return slice_(x, start, stop, [choice.choice((1, 1, 2, 3)) for _ in shape])
        case 3:
            amounts = [[choice.choice((0, 0, 1, 2)) for _ in shape] for _ in range(3)]
            return pad(x, literal(1.5, f32), *amounts)
        case 4:
            return flip(x, [a for a in range(rank) if choice.random() < 0.5])
        case 5 if rank:
            axis = choice.randrange(rank)
            return concat([x, -x, flip(x, (axis,))][: choice.choice((2, 3))], axis)
        case 6 if rank:
            places = iota((4, 2), choice.randrange(2), i32) * choice.choice((-1, 2, 3))
            return gather(x, places, choice.randrange(rank))
        case _:
            wide = reshape(x, (*shape, 1))
            return broadcast(wide, (*shape, choice.choice((1, 3, 4)))) if rank < 4 else x


@pytest.mark.parametrize("seed", range(60))
def test_random_movement_and_reductions(device, seed):
    choice = random.Random(seed)
    x = y = given(0, [choice.choice((1, 2, 3, 4, 6, 8, 12)) for _ in range(choice.randrange(1, 4))])
    for _ in range(choice.randrange(2, 7)):
        new = moved(y, choice)
        if new.type.size <= 20000:
            y = new + cast(iota(new.shape, 0, i32), f32) if choice.random() < 0.3 else new
    axes = tuple(k for k in range(len(y.shape)) if choice.random() < 0.5)
    outputs = [-y]
    top = reduce("max", y, axes)
    if top is not y:
        rest = y - spread(top, y.shape)
        turned = transpose(rest, choice.sample(range(len(y.shape)), len(y.shape)))
        outputs = list(dict.fromkeys([rest, reduce("sum", E.abs_(rest), axes), -turned]))
    args = [np.random.default_rng(seed).integers(-50, 50, x.shape).astype(np.float32)]
    check(device, TARGETS[("cpu", "gpu", "gpu-subgroups")[seed % 3]], [x], outputs, args)


def test_positions_from_data_wrap_and_clip(device, target):
    table, places = given(0, (9, 4, 3)), given(1, (5, 2), i32)
    args = [values(table), np.array([[0, 1], [8, -1], [-9, 3], [99, -99], [4, 4]], np.int32)]
    check(device, target, [table, places], [gather(table, places, 0)], args)
    check(device, target, [table, places], [gather(table, places, 1), -gather(table, places, 1)], args)


def test_numbers_that_wgsl_cannot_spell(device, target):
    floats = [math.inf, -math.inf, math.nan, -0.0, 1e-45, 3.4028234e38, 1e-38, 0.1]
    x, n = given(0, (1,)), given(1, (1,), i32)
    outputs = [spread(literal(v, f32), (1,)) * x for v in floats]
    outputs += [spread(literal(v, i32), (1,)) + n for v in (-(2**31), 2**31 - 1, 0)]
    outputs += [spread(literal(2**32 - 1, u32), (1,)) + cast(n, u32)]
    args = [np.ones(1, np.float32), np.zeros(1, np.int32)]
    got, _ = run(device, Graph("n", (x, n), tuple(outputs)), None, args, target)
    for mine, want in zip(got, evaluate(Graph("n", (x, n), tuple(outputs)), args)):
        np.testing.assert_array_equal(mine, want)
    assert np.signbit(got[3][0])


def test_infinities_are_not_simplified_away(device, target):
    x = given(0, (4,))
    args = [np.array([math.inf, math.nan, -2, 0], np.float32)]
    check(device, target, [x], [x * 0.0, x - x, x * math.inf, E.maximum(x, full(0, (4,), f32))], args)


def test_constants_alone_are_not_folded_into_errors(device, target):
    x = full(1e38, (3,), f32)
    zero = full(0, (3,), f32)
    got, _ = run(device, Graph("c", (), (x * x, zero / zero)), None, [], target)
    assert np.isinf(got[0]).all()
    assert np.isnan(got[1]).all()


def test_bools_are_words_in_memory(device, target):
    x, y = given(0, (5, 8), bool_), given(1, (5, 8))
    hot = E.and_(x, E.gt(y, full(0, y.shape, f32)))
    check(device, target, [x, y], [hot, E.select(hot, y, -y), cast(hot, i32)], kernels=1)
    check(device, target, [x], [reduce("any", x, (1,)), E.not_(reduce("all", x, (1,)))], kernels=1)


# -- rows

ROWS = [(6, 8), (5, 7), (33, 64), (20, 130), (3, 1001), (257, 100), (1, 5000), (60000, 2), (2, 60000)]


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("axis", [0, 1])
def test_softmax_is_one_kernel_unless_rows_are_few_and_long(device, target, shape, axis):
    x = given(0, shape)
    plan = check(device, target, [x], [softmax(x, axis)])
    rows, length = shape[1 - axis], shape[axis]
    if rows * length < 10_000 or (rows > 100 and length < 1000):
        assert len(plan.kernels) == 1
    if rows == 2 and length == 60000:
        assert len(plan.kernels) == 5  # segments and their combination for each reduction, then the result


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((4, 5, 6), (0, 2)), ((7, 4, 5, 8), (0, 2, 3)), ((64, 8, 16), (0, 2)), ((2, 3, 5), (0, 1, 2)), ((3, 70000, 4), (1,)),
     ((5, 9001, 3), (1,)), ((300007,), (0,)), ((1 << 20,), (0,))],
)  # fmt: skip
def test_sums_over_any_axes(device, target, shape, axes):
    x = given(0, shape)
    total = reduce("sum", x, axes)
    args = [np.random.default_rng(1).random(shape, np.float32)]
    check(device, target, [x], [total, reduce("max", E.abs_(x), axes)], args)
    check(device, target, [x], [x * spread(total, shape), total], args)


def test_sum_of_many_ones_is_exact(device, target):
    x = given(0, (1 << 24,))
    got, plan = run(device, Graph("s", (x,), (reduce("sum", x, (0,)),)), None, [np.ones(1 << 24, np.float32)], target)
    assert got[0][0] == 1 << 24
    assert len(plan.kernels) == 2


def test_sum_of_tenths_keeps_its_digits(device, target):
    x = given(0, (16, 30000))
    got, _ = run(device, Graph("s", (x,), (reduce("sum", x, (1,)),)), None, [np.full(x.shape, 0.1, np.float32)], target)
    np.testing.assert_allclose(got[0], 30000 * np.float64(np.float32(0.1)), rtol=2e-6)


@pytest.mark.parametrize(("combine", "dtype"), [("prod", f32), ("min", i32), ("max", u32), ("sum", i32), ("sum", u32)])
def test_combinations_of_other_dtypes(device, target, combine, dtype):
    x = given(0, (9, 37), dtype)
    args = [np.random.default_rng(2).integers(0 if dtype is u32 else -3, 4, x.shape).astype(dtype.numpy)]
    check(device, target, [x], [reduce(combine, x, (1,)), reduce(combine, x, (0,))], args, groups=None)


def layer_norm(rows: int, width: int) -> tuple[list[Node], list[Node]]:
    x, ct, gain, bias = given(0, (rows, width)), given(1, (rows, width)), given(2, (width,)), given(3, (width,))
    shape = (rows, width)
    xhat, scale, mu = normalized(x, (1,))
    dxhat = ct * spread(gain, shape)
    inner = spread(mean(dxhat, (1,)), shape) + xhat * spread(mean(dxhat * xhat, (1,)), shape)
    dx = (dxhat - inner) * spread(scale, shape)
    y = xhat * spread(gain, shape) + spread(bias, shape)
    return [x, ct, gain, bias], [y, mu, scale, dx, reduce("sum", ct * xhat, (0,)), reduce("sum", ct, (0,))]


@pytest.mark.parametrize(("rows", "width"), [(6, 8), (40, 130), (512, 96), (7, 4000), (300, 7)])
def test_layer_norm_and_its_gradients(device, target, rows, width):
    inputs, (y, mu, scale, dx, dgain, dbias) = layer_norm(rows, width)
    forward = [inputs[0], inputs[2], inputs[3]]
    check(device, target, forward, [y, mu, scale], [values(i) for i in forward], kernels=1)
    # rows and columns of one matrix: the columns' sums are finished by a second kernel
    check(device, target, inputs[:3], [dx, dgain, dbias], tol=1e-5, kernels=2)
    check(device, target, inputs, [y, dx, dgain], tol=1e-5, groups=[
        Group((y, mu, scale), tuple(forward)), Group((dx, dgain), (*inputs[:3], mu, scale)),
    ])  # fmt: skip


@pytest.mark.parametrize(("rows", "classes"), [(32, 10), (64, 257), (3, 50257)])
def test_cross_entropy_and_its_gradient(device, target, rows, classes):
    z, labels = given(0, (rows, classes)), given(1, (rows,), i32)
    top = reduce("max", z, (1,))
    e = E.exp(z - spread(top, z.shape))
    total = reduce("sum", e, (1,))
    hot = E.eq(iota(z.shape, 1, i32), spread(reshape(labels, (rows, 1)), z.shape))
    loss = E.log(total) + top - reduce("sum", E.select(hot, z, full(0, z.shape, f32)), (1,))
    dz = (e / spread(total, z.shape) - cast(hot, f32)) * (1 / rows)
    check(device, target, [z, labels], [loss, dz])


@pytest.mark.parametrize("shape", [(4, 3, 8, 8), (5, 6, 7, 7), (2, 16, 10, 10)])
def test_batch_norm_reduces_around_the_channels(device, target, shape):
    x = given(0, shape)
    y, scale, _ = normalized(x, (0, 2, 3))
    check(device, target, [x], [E.maximum(y, full(0, shape, f32)), scale], tol=5e-6, kernels=1)
    last = transpose(x, (0, 2, 3, 1))
    check(device, target, [x], [normalized(last, (0, 1, 2))[0]], tol=5e-6, kernels=1)


def test_transposed_stores(device, target):
    x = given(0, (33, 64))
    y = normalized(x, (1,))[0]
    check(device, target, [x], [transpose(y, (1, 0)) * 2.0, y], kernels=1)


def test_pure_outputs_beside_rows(device, target):
    x, w = given(0, (6, 8)), given(1, (6,))
    check(device, target, [x, w], [reduce("sum", x, (1,)), w * 2.0, x + 1.0], kernels=1)


@pytest.mark.parametrize("combine", ["sum", "prod"])
def test_empty_arrays(device, target, combine):
    x, y = given(0, (0, 4)), given(1, (3, 0))
    outputs = [reduce(combine, x, (0,)), reduce(combine, y, (1,)), reduce(combine, y, (0,)), x + x, reduce(combine, y, (0, 1)),
               pad(x, literal(2, f32), (1, 0), (1, 0)), dot(y, x), scatter_add(x, given(2, (0,), i32), 3)]  # fmt: skip
    check(device, target, [x, y, given(2, (0,), i32)], outputs, groups=None)


# -- products, convolutions, scatter-add, attention

PRODUCTS = [((), 5, 7, 3), ((2,), 33, 20, 17), ((2, 3), 16, 32, 24), ((), 1, 300, 500), ((), 300, 1, 64), ((), 4, 8, 5000)]


@pytest.mark.parametrize(("lead", "m", "n", "k"), PRODUCTS)
def test_products_in_every_layout(device, target, lead, m, n, k):
    for left in (given(0, (*lead, m, k)), swap(given(0, (*lead, k, m)))):
        for right in (given(1, (*lead, k, n)), swap(given(1, (*lead, n, k)))):
            inputs = [o.operands[0] if o.operands else o for o in (left, right)]
            check(device, target, inputs, [dot(left, right)], tol=3e-6)


@pytest.mark.parametrize(("lead", "m", "n", "k"), PRODUCTS)
def test_product_with_prologue_and_epilogue(device, target, lead, m, n, k):
    a, b, bias, row = given(0, (*lead, m, k)), given(1, (*lead, k, n)), given(2, (n,)), given(3, (m, 1))
    c = dot(E.maximum(a * spread(row, a.shape), full(0, a.shape, f32)), b * 0.25)
    y = E.sigmoid(c + spread(bias, c.shape))
    check(device, target, [a, b, bias, row], [c, y, swap(y) * 2.0], tol=5e-6)


def test_products_of_integers(device, target):
    a, b = given(0, (5, 6), i32), given(1, (6, 8), i32)
    check(device, target, [a, b], [dot(a, b) + 1])


@pytest.mark.parametrize(("stride", "dilation", "groups"), [((1, 1), (1, 1), 1), ((2, 1), (1, 2), 2)])
def test_convolution(device, target, stride, dilation, groups):
    x, w = given(0, (2, 4, 9, 10)), given(1, (6, 4 // groups, 3, 2))
    y = conv(x, w, stride, dilation, groups)
    check(device, target, [x, w], [E.maximum(y, full(0, y.shape, f32))], kernels=1)


@pytest.mark.parametrize(
    ("count", "rows", "width"), [(4, 50, 2), (513, 300, 6), (1000, 40, 4), (64, 1, 8), (2000, 3000, 1), (40000, 7, 4)]
)
def test_scatter_add_loses_no_update(device, target, count, rows, width):
    updates, places, w = given(0, (count, width)), given(1, (count,), i32), given(2, (rows, width))
    total = scatter_add(updates * 0.5, places, rows)
    args = [values(updates), np.random.default_rng(1).integers(-2 * rows, 2 * rows, count).astype(np.int32), values(w)]
    check(device, target, [updates, places, w], [w - total, transpose(total, (1, 0))], args, tol=5e-6)


@pytest.mark.parametrize(
    ("lead", "tq", "tk", "d", "dv", "causal", "window", "cap", "extra"),
    [((2, 3), 16, 16, 8, 8, True, 0, 0.0, "none"), ((2,), 13, 21, 7, 5, False, 0, 0.0, "mask"),
     ((2, 2), 40, 40, 16, 16, True, 9, 0.0, "bias"), ((1,), 33, 33, 64, 64, True, 0, 5.0, "none")],
)  # fmt: skip
def test_attention_and_its_gradients(device, target, lead, tq, tk, d, dv, causal, window, cap, extra):
    q, k, v = given(0, (*lead, d, tq)), given(1, (*lead, tk, d)), given(2, (*lead, tk, dv))
    row = [given(3, (tq, tk), f32 if extra == "bias" else bool_)] if extra != "none" else []
    more = [spread(r, (*lead, tq, tk)) for r in row]
    attributes = (d**-0.5, causal, tk - tq, window, cap, extra)
    both = make(Attention(*attributes), swap(q), k, v, *more)
    out, lse = get(both, 0), get(both, 1)
    check(device, target, [q, k, v, *row], [swap(out), lse], tol=3e-6, kernels=1)
    forward = Graph("f", (q, k, v, *row), (lse,))
    args = [values(i) for i in forward.inputs]
    given_lse, delta, ct = given(4, (*lead, tq, 1)), given(5, (*lead, tq, 1)), given(6, (*lead, tq, dv))
    grads = make(AttentionBackward(*attributes), swap(q), k, v, given_lse, delta, ct, *more)
    args += [evaluate(forward, args)[0], values(delta), values(ct)]
    outputs = [get(grads, 0) + swap(q), get(grads, 1), swap(get(grads, 2))]
    check(device, target, [q, k, v, *row, given_lse, delta, ct], outputs, args, tol=1e-5, kernels=2)


# -- kernels as data


def sources(outputs: Sequence[Node], inputs: Sequence[Node], target: Target = LLVMPIPE) -> list[KernelSource]:
    return lower(Group(tuple(outputs), tuple(inputs)), target)


def test_results_may_take_the_memory_of_operands_read_at_the_same_place():
    x, y = given(0, (8, 8)), given(1, (8, 8))
    assert sources([x * y], [x, y])[0].in_place == {(0, 0), (0, 1)}
    assert sources([x + transpose(y, (1, 0))], [x, y])[0].in_place == {(0, 0)}
    assert sources([softmax(given(0, (9, 400)), 1)], [given(0, (9, 400))])[0].in_place == {(0, 0)}
    # the sum is read again after x would be overwritten
    assert sources([x * 2.0, x - spread(reduce("sum", x, (1,)), x.shape)], [x])[0].in_place >= {(1, 0)}


def test_bindings_say_how_they_are_accessed():
    x, y = given(0, (3,)), given(1, (3,))
    kernel = sources([x + y], [x, y])[0]
    text = kernel.source(["t0", "weights", "new loop"], frozenset({1}))
    assert "@binding(0) var<storage, read_write> t0: array<f32>;" in text
    assert "@binding(1) var<storage, read> weights: array<f32>;" in text
    assert "@binding(2) var<storage, read_write> new_loop: array<f32>;" in text
    assert kernel.describe(["t0", "x", "y"]) == "t0 = add(x, y)"


def test_lowering_is_deterministic():
    inputs, outputs = layer_norm(40, 130)
    for target in TARGETS.values():
        once, again = (sources(outputs[3:], inputs[:3], target) for _ in range(2))
        assert [(k.text, k.grid, k.computes) for k in once] == [(k.text, k.grid, k.computes) for k in again]


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda x: dot(x, reshape(reduce("sum", x, (1,)), (8, 1))), "of values of rows"),
        (lambda x: dot(dot(x, x), x), "in one kernel"),
        (lambda x: reduce("sum", reduce("max", x, (1,)), (0,)), "reduces values of rows"),
        (lambda x: flip(reduce("sum", x, (1,)), (0,)), "moves values of rows"),
        (lambda x: spread(reshape(reduce("sum", x, (1,)), (1, 8)), (8, 8)) + x, "is not its row"),
    ],
)
def test_illegal_kernels(build, why):
    x = given(0, (8, 8))
    with pytest.raises(IRError, match=f"illegal kernel .*{why}"):
        sources([build(x)], [x])


def test_too_many_bindings_for_the_target():
    inputs = [given(k, (4,)) for k in range(9)]
    total = inputs[0]
    for x in inputs[1:]:
        total = total + x
    with pytest.raises(CompileError, match="binds 8 arrays, got 10"):
        sources([total], inputs, FLOOR)
