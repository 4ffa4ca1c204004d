"""Refuses kernels that a device cannot run before wgpu sees them: some would end the process."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from functools import lru_cache

from ..compiler.schedule.images import TEXELS
from ..compiler.schedule.plan import Kernel, Plan
from ..compiler.schedule.target import Target
from .errors import DeviceError, KernelError

MAX_NESTING = 500  # naga's parser overflows its stack near 3000
_SIZES = {"f16": 2, "f32": 4, "i32": 4, "u32": 4, "bool": 4, "f64": 8, "i64": 8, "u64": 8}
_WORKGROUP = re.compile(r"var<workgroup>\s+\w+\s*:\s*([^;]+);")
_CONST = re.compile(r"^\s*const\s+(\w+)\s*(?::\s*\w+)?\s*=\s*([^;]+);", re.MULTILINE)
_LITERAL = re.compile(r"\b(\d+)[ui]\b")
_ELEMENT = re.compile(r"(\b\w+\s*\(|,)\s*&\s*\w+\s*[\[.]")
_POINTER_BUILTIN = re.compile(r"(atomic\w+|arrayLength|workgroupUniformLoad)\s*\(")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}


def check_plan(plan: Plan, target: Target) -> None:
    """Raises when the target lacks a feature of the plan, or a buffer or kernel breaks a limit."""
    missing = sorted(set(plan.features) - set(target.features))
    if missing:
        raise DeviceError(
            f"plan {plan.name} needs the device features {', '.join(missing)}; "
            f"{target.name} has {', '.join(target.features) or 'none'}"
        )
    for buffer in plan.buffers:
        if buffer.nbytes < 4 or buffer.nbytes % 4:
            raise ValueError(
                f"buffer {buffer.name} of plan {plan.name} needs a multiple of 4 bytes, "
                f"at least 4, got {buffer.nbytes}"
            )
    for kernel in plan.kernels:
        check_kernel(kernel, plan, target)


def check_kernel(kernel: Kernel, plan: Plan, target: Target) -> None:
    """Raises KernelError when a kernel breaks a limit of the target."""
    _check_shape(kernel, target)
    _check_bindings(kernel, plan, target)
    _check_source(kernel, target)


def _refuse(kernel: Kernel, needed: str, got: str) -> KernelError:
    return KernelError(f"kernel {kernel.name} ({kernel.template}) needs {needed}, got {got}")


def _check_shape(kernel: Kernel, target: Target) -> None:
    if min(kernel.workgroup) < 1 or math.prod(kernel.workgroup) > target.max_invocations:
        raise _refuse(
            kernel,
            f"a workgroup of 1 to {target.max_invocations} invocations on {target.name}",
            "x".join(map(str, kernel.workgroup)),
        )
    if min(kernel.grid) < 0 or max(kernel.grid) > target.max_groups:
        raise _refuse(
            kernel,
            f"0 to {target.max_groups} workgroups in each dimension on {target.name}",
            "x".join(map(str, kernel.grid)),
        )


def _check_bindings(kernel: Kernel, plan: Plan, target: Target) -> None:
    if not 1 <= len(kernel.bindings) <= target.max_bindings:
        raise _refuse(
            kernel,
            f"1 to {target.max_bindings} storage buffers on {target.name}",
            str(len(kernel.bindings)),
        )
    for binding in kernel.bindings:
        held = [plan.buffers[b] for b in binding.buffers]
        if binding.access in TEXELS:
            held = held[:1]  # copies: each buffer is checked where it is made
        starts = [b.place[2] if len(b.place) == 3 else 0 for b in held]
        nbytes = max(s + b.nbytes for s, b in zip(starts, held)) - min(starts)
        if nbytes > target.max_binding_bytes:
            raise _refuse(
                kernel,
                f"bindings of at most {target.max_binding_bytes} bytes on {target.name}",
                f"{nbytes} bytes of {', '.join(b.name for b in held)}",
            )
        if len({b.place[:2] for b in held}) > 1 or (len(held) > 1 and len(held[0].place) < 3):
            raise _refuse(
                kernel,
                "the arrays of one binding in one block or pack",
                ", ".join(f"{b.name} at {b.place}" for b in held),
            )
        for buffer in held:
            if len(buffer.place) == 3:
                _check_range(kernel, buffer.name, buffer.place, buffer.nbytes, plan, target)


def _check_range(
    kernel: Kernel,
    name: str,
    place: tuple[str, int, int],
    nbytes: int,
    plan: Plan,
    target: Target,
) -> None:
    kind, number, offset = place
    block = (plan.packs if kind == "pack" else plan.arena)[number]
    if offset % target.offset_alignment:
        raise _refuse(
            kernel,
            f"offsets that are multiples of {target.offset_alignment} on {target.name}",
            f"{offset} of {name}",
        )
    if offset + nbytes > block:
        raise _refuse(
            kernel,
            f"a range inside {'block' if kind == 'arena' else kind} {number} of {block} bytes",
            f"{nbytes} bytes at {offset} of {name}",
        )


def _check_source(kernel: Kernel, target: Target) -> None:
    used, pointer, depth = _facts(kernel.wgsl)
    if used is not None and used > target.max_workgroup_bytes:
        raise _refuse(  # not checked by wgpu: NVIDIA's driver hangs
            kernel,
            f"at most {target.max_workgroup_bytes} bytes of workgroup memory on {target.name}",
            f"{used} bytes",
        )
    if pointer is not None:
        raise _refuse(  # naga panics
            kernel, "whole variables where pointers are passed to functions", f"`{pointer}`"
        )
    if depth > MAX_NESTING:
        raise _refuse(kernel, f"at most {MAX_NESTING} nested brackets", str(depth))


@lru_cache(maxsize=256)  # layers share texts
def _facts(wgsl: str) -> tuple[int | None, str | None, int]:
    """What `_check_source` asks of a text."""
    return workgroup_bytes(wgsl), element_pointer(wgsl), nesting(wgsl)


def nesting(wgsl: str) -> int:
    """The deepest nesting of parentheses, brackets and braces."""
    depth = deepest = 0
    for bracket in re.findall(r"[(){}\[\]]", wgsl):
        if bracket in "({[":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest


def element_pointer(wgsl: str) -> str | None:
    """A pointer to an element or member passed to a function other than a builtin, if any."""
    for match in _ELEMENT.finditer(wgsl):
        if not _POINTER_BUILTIN.match(match[1]):
            return match[0]
    return None


def workgroup_bytes(wgsl: str) -> int | None:
    """Bytes of workgroup memory that a module declares; None when a type is not understood."""
    constants: dict[str, int] = {}
    for name, text in _CONST.findall(wgsl):
        value = _integer(text, constants)
        if value is not None:
            constants[name] = value
    sizes = [_size(kind, constants) for kind in _WORKGROUP.findall(wgsl)]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _size(kind: str, constants: dict[str, int]) -> int | None:
    """Bytes of a scalar, atomic, vector, or array of these."""
    kind = kind.strip()
    head, _, inner = kind.partition("<")
    inner = inner.removesuffix(">").strip()
    vector = re.fullmatch(r"vec([234])(?:<(\w+)>|([fiuh]))", kind)
    if vector is not None:
        scalar = vector[2] or {"f": "f32", "i": "i32", "u": "u32", "h": "f16"}[vector[3]]
        lanes = 4 if vector[1] == "3" else int(vector[1])  # a vec3 is laid out as a vec4
        return lanes * _SIZES[scalar] if scalar in _SIZES else None
    if head.strip() == "atomic":
        return _size(inner, constants)
    if head.strip() != "array":
        return _SIZES.get(kind)
    element, _, count = inner.rpartition(",")
    size, length = _size(element, constants), _integer(count, constants)
    return None if size is None or length is None else size * length


def _integer(text: str, constants: dict[str, int]) -> int | None:
    """The value of a constant integer expression, or None."""
    try:
        tree = ast.parse(_LITERAL.sub(r"\1", text.strip()), mode="eval").body
        return _evaluate(tree, constants)
    except (SyntaxError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _evaluate(tree: ast.expr, constants: dict[str, int]) -> int:
    match tree:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return constants[name]
        case ast.BinOp(left=left, op=op, right=right):
            combine = _OPERATORS[type(op)]
            return combine(_evaluate(left, constants), _evaluate(right, constants))
        case _:
            raise ValueError(f"not a constant integer: {ast.dump(tree)}")
