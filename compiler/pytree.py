"""Nested containers of arrays: dicts, lists, tuples, named tuples and dataclasses, taken apart and
put together.

Leaves are arrays and Python numbers. Inside a dataclass, Python numbers, strings, functions and
None are static: they belong to the structure, so that a module's `heads: int` is never traced.

A training step takes and returns hundreds of leaves, so trees of frozen dataclasses and tuples
remember what they were
put together from: taking them apart again costs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    leaves: int = field(init=False, compare=False, repr=False)  # how many there are
    settled: bool = field(init=False, compare=False, repr=False)  # such a tree keeps its leaves
    _hash: int = field(default=0, init=False, compare=False, repr=False)  # once it was asked for

    def __post_init__(self) -> None:
        leaves = 1 if self.kind == "leaf" else sum(c.leaves for c in self.children)
        object.__setattr__(self, "leaves", leaves)
        own = self.kind in ("leaf", "static") or self.kind is tuple or remembers(self.kind)
        object.__setattr__(self, "settled", own and all(c.settled for c in self.children))

    def __hash__(self) -> int:
        if not self._hash:
            found = hash((self.kind, self.keys, self.children, self.static))
            object.__setattr__(self, "_hash", found or 1)
        return self._hash


_PARTS = "_eggpu_parts"  # attribute of a dataclass: its leaves and structure


def remembers(kind: Any) -> bool:
    """Whether instances of a class can hold their parts: frozen dataclasses with a __dict__."""
    frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return frozen and bool(getattr(kind, "__dictoffset__", 0))


LEAF = Structure("leaf")
_NONE = Structure("static")


_leaf_kinds: set[type] = set()  # those met so far


def is_leaf(value: object) -> bool:
    """True for arrays and numbers."""
    kind = type(value)
    if kind in _leaf_kinds:
        return True
    numbers = issubclass(kind, (int, float, np.generic, np.ndarray))
    if found := numbers or hasattr(kind, "__eggpu_array__"):
        _leaf_kinds.add(kind)
    return found


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a tree in order, and its structure."""
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, "")


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Structure]:
    """Those of (args, kwargs); at once where all are positional arguments that are leaves."""
    if not kwargs and _leaf_kinds.issuperset(map(type, args)):
        return list(args), _positional(len(args))
    return flatten((args, kwargs))


@functools.lru_cache(maxsize=256)
def _positional(count: int) -> Structure:
    """The structure of so many leaves as arguments of a call."""
    return flatten(((0.0,) * count, {}))[1]


def _flatten(tree: Any, leaves: list[Any], path: str) -> Structure:
    if is_leaf(tree):
        leaves.append(tree)
        return LEAF
    if (parts := parts_of(tree)) is not None:
        leaves += parts[0]
        return parts[1]
    if tree is None:
        return _NONE
    if isinstance(tree, (str, bytes)):
        return Structure("static", static=tree)
    if isinstance(tree, dict):
        keys = tuple(tree)
        return _container(dict, keys, tuple([_part(tree[k], leaves, path, k) for k in keys]))
    if isinstance(tree, (list, tuple)):
        parts = tuple([_part(v, leaves, path, i) for i, v in enumerate(tree)])
        return _container(type(tree), (), parts)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _flatten_dataclass(tree, leaves, path)
    if callable(tree):
        return Structure("static", static=tree)
    where = path.lstrip(".") or "argument"
    raise TraceError(
        f"{where} is a {type(tree).__name__}; arrays, numbers, dicts, lists, tuples and "
        "dataclasses can be traced"
    )


def parts_of(tree: Any) -> tuple[Sequence[Any], Structure] | None:
    """The leaves and the structure that a tree remembers, without putting a later one together."""
    if type(tree) in _later_kinds:
        return object.__getattribute__(tree, "__dict__").get(_PARTS)
    return getattr(tree, "__dict__", {}).get(_PARTS)


def _part(tree: Any, leaves: list[Any], path: str, key: object) -> Structure:
    """Of a part of a tree; most are leaves, which need no path for errors."""
    if is_leaf(tree):
        leaves.append(tree)
        return LEAF
    return _flatten(tree, leaves, f"{path}.{key}")


_containers: dict[tuple[Any, ...], Structure] = {}
_MOST_CONTAINERS = 1024


def _container(kind: Any, keys: tuple[Any, ...], children: tuple[Structure, ...]) -> Structure:
    """A structure of a container; the same object for the same children, as in the next call."""
    key = (kind, keys, *map(id, children))  # which are held, so that their ids stay theirs
    if (known := _containers.get(key)) is None:
        if len(_containers) >= _MOST_CONTAINERS:
            _containers.clear()
        known = _containers.setdefault(key, Structure(kind, keys, children))
    return known


def _flatten_dataclass(tree: Any, leaves: list[Any], path: str) -> Structure:
    start, keys, children = len(leaves), [], []
    for f in dataclasses.fields(tree):
        value = getattr(tree, f.name)
        keys.append(f.name)
        static = f.metadata.get("static", isinstance(value, _STATIC) or _is_function(value))
        children.append(
            Structure("static", static=value)
            if static
            else _flatten(value, leaves, f"{path}.{f.name}")
        )
    structure = Structure(type(tree), tuple(keys), tuple(children))
    if structure.settled:
        tree.__dict__[_PARTS] = (leaves[start:], structure)
    return structure


def _is_function(value: object) -> bool:
    return (
        callable(value)
        and not dataclasses.is_dataclass(value)
        and not hasattr(value, "__eggpu_array__")
    )


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """The tree of a structure with the given leaves."""
    return _unflatten(structure, leaves, 0)


def _unflatten(s: Structure, leaves: Sequence[Any], at: int) -> Any:
    """The tree of a structure with the leaves from `at` on."""
    if s.kind == "leaf":
        return leaves[at]
    if s.kind == "static":
        return s.static
    values = _values(s, leaves, at)
    if s.kind is tuple:
        return tuple(values)
    if s.kind is dict:
        return dict(zip(s.keys, values, strict=True))
    if s.settled:
        out = object.__new__(s.kind)
        out.__dict__.update(zip(s.keys, values))
        out.__dict__[_PARTS] = (leaves[at : at + s.leaves], s)
        return out
    if dataclasses.is_dataclass(s.kind):
        out = object.__new__(s.kind)  # type: ignore[call-overload]
        for key, value in zip(s.keys, values, strict=True):
            object.__setattr__(out, key, value)
        return out
    if hasattr(s.kind, "_fields"):
        return s.kind(*values)
    return s.kind(values)


def _values(s: Structure, leaves: Sequence[Any], at: int) -> list[Any]:
    """The children of a tree with the leaves from `at` on."""
    values = []
    for child in s.children:
        if child is LEAF:
            values.append(leaves[at])
            at += 1
        elif child.kind == "static":
            values.append(child.static)
        else:
            values.append(_unflatten(child, leaves, at))
            at += child.leaves
    return values


def later(structure: Structure, leaves: Sequence[Any]) -> Any:
    """The tree of a structure, put together when somebody looks into it where that is possible.

    A training step returns hundreds of leaves, which the next one takes back as they are: only the
    sequence of leaves is passed on then, of which nothing was asked.
    """
    kind = _later(structure.kind) if structure.settled and structure.keys else None
    if kind is None:
        return unflatten(structure, list(leaves))
    out = object.__new__(kind)
    object.__getattribute__(out, "__dict__")[_PARTS] = leaves, structure
    return out


_later_kinds: set[type] = set()


@functools.cache
def _later(kind: type) -> type | None:
    """A class of instances of `kind` that become what they are at the first look at them; None for
    a class of which no other one can be derived."""

    def look(self: Any, name: str) -> Any:
        if name == "__class__":  # isinstance asks for it
            return kind
        _settle(self, kind)
        return getattr(self, name)

    def change(self: Any, name: str, value: Any) -> None:
        _settle(self, kind)
        setattr(self, name, value)

    names = {n: getattr(kind, n) for n in ("__module__", "__qualname__", "__doc__")}
    hooks = {"__slots__": (), "__getattribute__": look, "__setattr__": change}
    try:
        made = type(kind)(kind.__name__, (kind,), names | hooks)
    except TypeError:
        return None
    _later_kinds.add(made)
    return made


def _settle(tree: Any, kind: type) -> None:
    """Gives a tree of `later` its fields and its class. Twice is as good as once."""
    fields = object.__getattribute__(tree, "__dict__")
    if (parts := fields.get(_PARTS)) is not None:
        leaves, structure = list(parts[0]), parts[1]
        fields.update(zip(structure.keys, _values(structure, leaves, 0)))
        fields[_PARTS] = leaves, structure
    object.__setattr__(tree, "__class__", kind)


def paths(structure: Structure, prefix: str = "") -> list[str]:
    """A dotted name for each leaf: `blocks.0.attn.q.weight`.

    A class may name one of its fields `inline`: the name of that field is left out.
    """
    if structure.kind == "leaf":
        return [prefix]
    names = structure.keys or range(len(structure.children))
    inline = getattr(structure.kind, "inline", None)
    out: list[str] = []
    for name, child in zip(names, structure.children, strict=True):
        inner = f"{prefix}.{name}" if prefix else str(name)
        out += paths(child, prefix if name == inline else inner)
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
