"""Nested containers of arrays: dicts, lists, tuples, named tuples and dataclasses, taken apart and put together.

Leaves are arrays and Python numbers. Inside a dataclass, Python numbers, strings, functions and None are static:
they belong to the structure, so that a module's `heads: int` is never traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import TraceError

_STATIC = (int, float, bool, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Structure:
    """The shape of a tree without its leaves; hashable, compared by value."""

    kind: Any  # a class, or "leaf", or "static"
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    static: Any = None

    @property
    def leaves(self) -> int:
        return 1 if self.kind == "leaf" else sum(c.leaves for c in self.children)


LEAF = Structure("leaf")


def is_leaf(value: object) -> bool:
    """True for arrays and numbers."""
    return isinstance(value, (int, float, np.generic, np.ndarray)) or hasattr(value, "__eggpu_array__")


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a tree in order, and its structure."""
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, "")


def _flatten(tree: Any, leaves: list[Any], path: str) -> Structure:
    if is_leaf(tree):
        leaves.append(tree)
        return LEAF
    if tree is None or isinstance(tree, (str, bytes)):
        return Structure("static", static=tree)
    if isinstance(tree, dict):
        keys = tuple(tree)
        return Structure(dict, keys, tuple(_flatten(tree[k], leaves, f"{path}.{k}") for k in keys))
    if isinstance(tree, (list, tuple)):
        return Structure(type(tree), (), tuple(_flatten(v, leaves, f"{path}.{i}") for i, v in enumerate(tree)))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        keys, children = [], []
        for f in dataclasses.fields(tree):
            value = getattr(tree, f.name)
            keys.append(f.name)
            static = f.metadata.get("static", isinstance(value, _STATIC) or _is_function(value))
            children.append(Structure("static", static=value) if static else _flatten(value, leaves, f"{path}.{f.name}"))
        return Structure(type(tree), tuple(keys), tuple(children))
    if callable(tree):
        return Structure("static", static=tree)
    where = path.lstrip(".") or "argument"
    raise TraceError(f"{where} is a {type(tree).__name__}; arrays, numbers, dicts, lists, tuples and dataclasses can be traced")


def _is_function(value: object) -> bool:
    return callable(value) and not dataclasses.is_dataclass(value) and not hasattr(value, "__eggpu_array__")


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """The tree of a structure with the given leaves."""
    return _unflatten(structure, iter(leaves))


def _unflatten(s: Structure, leaves: Iterator[Any]) -> Any:
    if s.kind == "leaf":
        return next(leaves)
    if s.kind == "static":
        return s.static
    values = [_unflatten(c, leaves) for c in s.children]
    if s.kind is dict:
        return dict(zip(s.keys, values, strict=True))
    if dataclasses.is_dataclass(s.kind):
        out = object.__new__(s.kind)
        for key, value in zip(s.keys, values, strict=True):
            object.__setattr__(out, key, value)
        return out
    if hasattr(s.kind, "_fields"):
        return s.kind(*values)
    return s.kind(values)


def paths(structure: Structure, prefix: str = "") -> list[str]:
    """A dotted name for each leaf: `blocks.0.attn.q.weight`."""
    if structure.kind == "leaf":
        return [prefix]
    names = structure.keys or range(len(structure.children))
    out: list[str] = []
    for name, child in zip(names, structure.children, strict=True):
        out += paths(child, f"{prefix}.{name}" if prefix else str(name))
    return out


def tree_map(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`function` over the leaves of trees of one structure."""
    leaves, structure = flatten(tree)
    others = []
    for other in rest:
        more, same = flatten(other)
        if same != structure:
            raise TraceError("tree_map needs trees of one structure")
        others.append(more)
    return unflatten(structure, [function(*vs) for vs in zip(leaves, *others, strict=True)])
