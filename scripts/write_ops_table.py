"""Writes docs/ops.md, the table of all ops and functions, from their declarations: `python
scripts/write_ops_table.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import eggpu
from eggpu import nn
from eggpu.compiler.errors import TypeMismatch
from eggpu.compiler.ir import Kind, Op, make
from eggpu.compiler.ops import input_node
from eggpu.compiler.ops.elementwise import ELEMENTWISE, Elementwise
from eggpu.compiler.ops.reduce import COMBINES, Reduce
from eggpu.compiler.ops.samples import Sample
from eggpu.compiler.ops.scan import Scan
from eggpu.compiler.types import DTYPES, Type, dtype

PATH = Path(__file__).parents[1] / "docs" / "ops.md"

HEAD = """# Ops and functions

Written by `python scripts/write_ops_table.py` from the declarations; a test keeps it fresh.

## Ops

What a traced program consists of. A call shows operands, then attributes. "gradient" has the operands that get one:
docs/gradients.md says which is chosen where mathematics leaves it open. Ops of a kind are lowered in the same way.

| op | call | dtypes | gradient | kind |
|---|---|---|---|---|
"""

FUNCTIONS = """
Kernels with several results (kind tuple) are made by rewrite rules only. `get` takes one of their results, or one of a
loop's. `loop` is what `scan` and `fori_loop` trace to (docs/loops.md).

## Functions

What a user calls: NumPy's names and rules, PyTorch's where NumPy has none. They trace to the ops above. How dtypes meet is
told in docs/dtypes.md. Operators and methods of arrays are these functions too.
"""


def op_classes(base: type[Op] = Op) -> Iterator[type[Op]]:
    """The op classes but for those with a table of their own, in the order of their modules."""
    for cls in base.__subclasses__():
        if cls.__subclasses__():
            yield from op_classes(cls)
        elif cls.__module__.startswith("eggpu.compiler.ops.") and cls not in (
            Elementwise,
            Reduce,
            Scan,
        ):
            yield cls


def nodes_of(sample: Sample, change: dict[int, str] | None = None) -> list[Type]:
    """The types of a sample's operands, some of them with another dtype."""
    types = [Type(x.shape, dtype(x.dtype)) for x in sample.operands]
    return [Type(t.shape, DTYPES[(change or {}).get(k, t.dtype.name)]) for k, t in enumerate(types)]


def dtypes_of(sample: Sample) -> str:
    """The dtypes that the first operand may have, with all others that have its dtype."""
    if not sample.operands or sample.op.kind is Kind.LOOP:
        return "all"
    types = nodes_of(sample)
    alike = [k for k, t in enumerate(types) if t.dtype is types[0].dtype]
    found = []
    for name in DTYPES:
        try:
            sample.op.infer(*nodes_of(sample, dict.fromkeys(alike, name)))
        except TypeMismatch:
            continue
        found.append(name)
    return "all" if len(found) == len(DTYPES) else " ".join(found)


def parameters(op: Op, count: int) -> list[str]:
    """Names of operands."""
    if isinstance(op, Elementwise):
        return ["c", "a", "b"] if op.masking else ["x"] if count == 1 else ["x", "y", "z"][:count]
    given = inspect.signature(type(op).infer).parameters.values()
    names = [f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name for p in given]
    return names[1:]


def gradient(sample: Sample) -> str:
    """The operands that get a gradient."""
    if sample.op.kind in (Kind.TUPLE, Kind.GET):
        return "made by rules"
    if sample.op.kind is Kind.LOOP:
        return "all"
    if isinstance(sample.op, Elementwise) and sample.op.gradient is None:
        return "-"
    nodes = [input_node(k, f"x{k}", t) for k, t in enumerate(nodes_of(sample))]
    result = make(sample.op, *nodes)
    if not nodes or result.dtype.kind != "f":
        return "-"
    parts = sample.op.vjp(result, result, *nodes)
    names = parameters(sample.op, len(nodes))
    if names and names[0].startswith("*"):
        return "all"
    return ", ".join(n for n, p in zip(names, parts, strict=False) if p is not None) or "0"


def call(op: Op, label: str, count: int) -> str:
    """`pad(x, value; low, high, interior)`."""
    attributes = [f.name for f in fields(op) if f.compare and f.name not in ("combine", "digest")]
    if isinstance(op, Elementwise):
        attributes = []
    text = ", ".join(parameters(op, count))
    return f"{label}({'; '.join(filter(None, (text, ', '.join(attributes))))})"


def line(label: str, sample: Sample, kinds: str | None = None) -> str:
    op = sample.op
    cells = (
        label,
        f"`{call(op, label, len(sample.operands))}`",
        kinds or dtypes_of(sample),
        gradient(sample),
        op.kind.value,
    )
    return "| " + " | ".join(cells) + " |"


def smooth(found: list[Sample]) -> Sample:
    """The sample that shows most: of floats, where there is one."""
    return max(
        found,
        key=lambda s: (
            s.smooth,
            bool(s.operands) and s.operands[0].dtype.kind == "f",
            len(s.operands),
        ),
    )


def op_lines() -> Iterator[str]:
    for name, op in ELEMENTWISE.items():
        if not op.mark:
            kinds = [n for n, d in DTYPES.items() if d.kind in op.takes]
            yield line(
                name,
                smooth(list(op.samples())),
                "all" if len(kinds) == len(DTYPES) else " ".join(kinds),
            )
    for cls, combines in ((Reduce, list(COMBINES)), (Scan, ["sum", "prod", "max", "min"])):
        for combine in combines:
            mine = [s for s in cls.samples() if s.op.combine == combine]  # type: ignore[attr-defined]
            yield line(mine[0].op.name, smooth(mine))
    for cls in op_classes():
        if cls.__name__ not in ("Input", "Get"):
            yield line(object.__new__(cls).name, smooth(list(cls.samples())))
    yield "| get | `get(x; index)` | all | made by rules | get |"


def functions(
    module: ModuleType, home: str | tuple[str, ...]
) -> Iterator[tuple[str, Callable[..., object]]]:
    """The functions of a module that come from `home`, by name."""
    for name, value in sorted(vars(module).items()):
        if (
            callable(value)
            and not name.startswith("_")
            and getattr(value, "__module__", "").startswith(home)
        ):
            yield name, value


def function_lines(
    title: str, module: ModuleType, home: str | tuple[str, ...], skip: set[str]
) -> Iterator[str]:
    yield f"\n### {title}\n\n| function | what it gives |\n|---|---|"
    for name, value in functions(module, home):
        if name in skip:
            continue
        text = (
            inspect.cleandoc(value.__doc__ or "")
            .split("\n\n")[0]
            .replace("\n", " ")
            .replace("|", "\\|")
        )
        yield f"| `{name}{signature(value)}` | {text} |"


def signature(function: Callable[..., object]) -> str:
    """Parameters and defaults, without types."""
    given = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in given.parameters.values()]
    return str(given.replace(parameters=plain, return_annotation=inspect.Signature.empty)).replace(
        "|", "\\|"
    )


def table() -> str:
    """The text of docs/ops.md."""
    here = {name for name, _ in functions(eggpu, "eggpu.compiler.library.")}
    parts = [HEAD + "\n".join(op_lines()) + "\n" + FUNCTIONS.rstrip("\n")]
    parts += function_lines(
        "eggpu: gradients", eggpu, ("eggpu.compiler.autodiff", "eggpu.compiler.custom"), set()
    )
    parts += function_lines("eggpu", eggpu, "eggpu.compiler.library.", set())
    parts += function_lines("eggpu.nn", nn, "eggpu.compiler.library.", here)
    parts += function_lines("eggpu.random", eggpu.random, "eggpu.compiler.library.random", set())
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PATH.write_text(table(), encoding="utf-8")
    print(f"wrote {PATH.relative_to(Path.cwd()) if PATH.is_relative_to(Path.cwd()) else PATH}")
