"""Plans written by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from eggpu.compiler.schedule.plan import Binding, Buffer, Kernel, Plan


def buffer(name, shape, place):
    role = "scratch" if place[0] == "arena" else place[0]
    return Buffer(name, shape, "f32", max(4, 4 * math.prod(shape)), role, place)


def kernel(expression, operands, result, n, **changes):
    """`out[i] = expression` over n elements, where v0, v1, ... are the operands at i.

    Operands and result are (buffer index, access); an operand equal to the result is read in place.
    """
    bound = list(dict.fromkeys([*operands, result]))
    declared = "\n".join(
        f"@group(0) @binding({i}) var<storage, {access}> b{i}: array<f32>;"
        for i, (_, access) in enumerate(bound)
    )
    loads = "\n".join(f"  let v{i} = b{bound.index(o)}[i];" for i, o in enumerate(operands))
    wgsl = (
        f"{declared}\n@compute @workgroup_size(64)\n"
        "fn main(@builtin(global_invocation_id) id: vec3<u32>) {\n"
        f"  let i = id.x;\n  if (i >= {n}u) {{ return; }}\n{loads}\n"
        f"  b{bound.index(result)}[i] = {expression};\n}}\n"
    )
    made = Kernel(
        name="test",
        template="test.wgsl",
        wgsl=wgsl,
        bindings=tuple(Binding(b, access) for b, access in bound),
        grid=(-(-n // 64), 1, 1),
        workgroup=(64, 1, 1),
        flops=n,
        bytes_read=4 * n,
        bytes_written=4 * n,
        predicted_ns=0.0,
        computes=expression,
    )
    return replace(made, **changes)


def plan(buffers, kernels, inputs, outputs, donated=(), constants=(), arena=(), features=()):
    parts = map(tuple, (buffers, kernels, inputs, outputs, donated, constants, arena))
    return Plan("plan", *parts, 0, tuple(features))


def double(n=1000, **changes):
    """out = 2 x"""
    buffers = [buffer("x", (n,), ("input", 0)), buffer("out", (n,), ("output", 0))]
    made = kernel("v0 * 2.0", [(0, "read")], (1, "read_write"), n, **changes)
    return plan(buffers, [made], [0], [1])


def increment(n=1000):
    """x = x + y, where x is donated."""
    buffers = [buffer("x", (n,), ("input", 0)), buffer("y", (n,), ("input", 1))]
    made = kernel("v0 + v1", [(0, "read_write"), (1, "read")], (0, "read_write"), n)
    return plan(buffers, [made], [0, 1], [0], donated=[0])


def chain(n=1000, length=2):
    """x * 2 + 1 + 1 ..., through a scratch block that holds two values."""
    step = -(-4 * n // 256) * 256
    buffers = [
        buffer("x", (n,), ("input", 0)),
        buffer("t0", (n,), ("arena", 0, 0)),
        buffer("t1", (n,), ("arena", 0, step)),
        buffer("out", (n,), ("output", 0)),
    ]
    rw = "read_write"
    kernels = [kernel("v0 * 2.0", [(0, "read")], (1, rw), n)]
    kernels += [
        kernel("v0 + 1.0", [(1 + i % 2, rw)], (2 - i % 2, rw), n) for i in range(length - 2)
    ]
    kernels.append(kernel("v0 + 1.0", [(1 + length % 2, rw)], (3, rw), n))
    return plan(buffers, kernels, [0], [3], arena=[2 * step])


def values(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)
