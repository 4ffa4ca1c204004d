"""Runs groups of nodes on the device and compares with NumPy in float64, for tests of code
generation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from eggpu.compiler.codegen import lower
from eggpu.compiler.ir import Graph, Node
from eggpu.compiler.ops import (
    broadcast,
    input_node,
    reduce,
)
from eggpu.compiler.ops import elementwise as E
from eggpu.compiler.reference import evaluate
from eggpu.compiler.schedule.assemble import assemble
from eggpu.compiler.schedule.kernel import KernelSource
from eggpu.compiler.schedule.plan import Plan
from eggpu.compiler.schedule.selection import Group, Selection, separate
from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE, Target
from eggpu.compiler.types import Type, f32
from eggpu.runtime import Device, Executable

# The templates for GPUs run on llvmpipe as well, slowly, and must keep its bound on loops.
GPU = replace(FLOOR, max_bindings=16, loop_limit=65535)
GPU_SUBGROUPS = replace(GPU, subgroup=8, features=("subgroup",))
TARGETS = {"cpu": LLVMPIPE, "gpu": GPU, "gpu-subgroups": GPU_SUBGROUPS}


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


def sources(
    outputs: Sequence[Node], inputs: Sequence[Node], target: Target = LLVMPIPE
) -> list[KernelSource]:
    """The kernels of one group."""
    return lower(Group(tuple(outputs), tuple(inputs)), target)


def run(
    device: Device, graph: Graph, groups: Sequence[Group] | None, args, target: Target
) -> tuple[list, Plan]:
    selection = separate(graph) if groups is None else Selection(graph, tuple(groups))
    plan = assemble(selection, target, lower)
    buffers = Executable(plan, device)([device.upload(np.asarray(a)) for a in args])
    return [device.download(b, o.shape, o.dtype.name) for b, o in zip(buffers, graph.outputs)], plan


def check(
    device,
    target,
    inputs,
    outputs,
    args=None,
    tol=2e-6,
    groups: Sequence[Group] | None = (),
    kernels=None,
):
    """One group with all outputs (or the given groups) gives what NumPy gives; sizes of errors
    relative to the largest."""
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
        np.testing.assert_allclose(
            mine[finite] / scale, want[finite] / scale, atol=tol, rtol=0, err_msg=repr(out)
        )
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


def layer_norm(rows: int, width: int) -> tuple[list[Node], list[Node]]:
    x, ct, gain, bias = (
        given(0, (rows, width)),
        given(1, (rows, width)),
        given(2, (width,)),
        given(3, (width,)),
    )
    shape = (rows, width)
    xhat, scale, mu = normalized(x, (1,))
    dxhat = ct * spread(gain, shape)
    inner = spread(mean(dxhat, (1,)), shape) + xhat * spread(mean(dxhat * xhat, (1,)), shape)
    dx = (dxhat - inner) * spread(scale, shape)
    y = xhat * spread(gain, shape) + spread(bias, shape)
    return [x, ct, gain, bias], [
        y,
        mu,
        scale,
        dx,
        reduce("sum", ct * xhat, (0,)),
        reduce("sum", ct, (0,)),
    ]
