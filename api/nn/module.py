"""Modules: frozen dataclasses of arrays and settings, with their parameters as dotted names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from eggpu.compiler import pytree
from eggpu.compiler.errors import EggpuError
from eggpu.compiler.tracing import Array, array

STATE = {"state": True}  # metadata of a field that is saved, but no parameter to train
SETTING = {"static": True}  # metadata of a field of numbers that are no arrays
_SHOWN = 10  # names in an error before "and 3 more"


class StateError(EggpuError, ValueError):
    """A state dict does not fit a module."""


class Module:
    """The base of modules. Subclasses are frozen dataclasses, so they are pytrees of their arrays.

    Numbers, strings and functions among the fields are settings, not parameters. A module of your
    own is a plain frozen dataclass:

    >>> @dataclass(frozen=True)
    ... class Classifier(nn.Module):
    ...     hidden: nn.Linear
    ...     out: nn.Linear
    ...     def __call__(self, x):
    ...         return self.out(nn.relu(self.hidden(x)))

    Calling a module evaluates it. `y, module = module.train(x, key=key)` is the call in training:
    random numbers come from `key`, and the module comes back with its states moved on.
    """

    def train(self, x: Array, *, key: Array | None = None) -> tuple[Array, Self]:
        """The result in training, and the module after it; most modules are the same as before."""
        return self(x), self  # type: ignore[operator]

    def _set(self, **fields: Any) -> None:
        """Give the fields their values; only for a subclass's __init__."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def replace(self, **fields: Any) -> Self:
        """A copy with other values for some fields."""
        known = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        if wrong := sorted(set(fields) - set(known)):
            name, fields_ = type(self).__name__, ", ".join(known)
            raise StateError(f"{name} has no field {', '.join(wrong)}; it has {fields_}")
        out = object.__new__(type(self))
        out._set(**(known | fields))
        return out

    def __repr__(self) -> str:
        return f"{type(self).__name__}({count_parameters(self):,} parameters)"

    def __str__(self) -> str:
        return summary(self)


def states(structure: pytree.Structure) -> list[bool]:
    """For each leaf of a structure whether it is a state, not a parameter."""
    return _states(structure, False)


def _states(structure: pytree.Structure, inside: bool) -> list[bool]:
    if structure.kind == "leaf":
        return [inside]
    marked = [inside] * len(structure.children)
    if dataclasses.is_dataclass(structure.kind):
        fields = dataclasses.fields(structure.kind)  # type: ignore[arg-type]
        marked = [inside or bool(f.metadata.get("state")) for f in fields]
    each = zip(structure.children, marked, strict=True)
    return [mark for child, state in each for mark in _states(child, state)]


def named_parameters(model: Any) -> dict[str, Array]:
    """Every parameter of a module or other pytree by name: `blocks.0.attention.query.weight`."""
    kept = states(pytree.flatten(model)[1])
    return {n: v for (n, v), s in zip(state_dict(model).items(), kept, strict=True) if not s}


def state_dict(model: Any) -> dict[str, Array]:
    """The arrays to save by dotted name: parameters, and states such as running statistics."""
    leaves, structure = pytree.flatten(model)
    return {name: array(v) for name, v in zip(pytree.paths(structure), leaves, strict=True)}


def load_state_dict(model: Any, state: Mapping[str, Any]) -> Any:
    """A copy of `model` with the arrays of `state`: Arrays or NumPy arrays by dotted name.

    Raises StateError, which lists missing and unexpected names, and wrong shapes or dtypes.
    """
    leaves, structure = pytree.flatten(model)
    names = pytree.paths(structure)
    problems = []
    if missing := [n for n in names if n not in state]:
        problems.append(f"missing: {_listed(missing)}")
    if unexpected := sorted(set(state) - set(names)):
        problems.append(f"not expected: {_listed(unexpected)}")
    found: list[Array] = []
    for name, leaf in zip(names, leaves, strict=True):
        if name not in state:
            continue
        value, wanted = array(state[name]), array(leaf).type
        if value.type != wanted:
            problems.append(f"{name} needs {wanted}, got {value.type}")
        found.append(value)
    if problems:
        name = "what it is loaded into" if isinstance(model, dict) else type(model).__name__
        raise StateError(f"the state does not fit {name}\n  " + _lines(problems))
    return pytree.unflatten(structure, found)


def count_parameters(model: Any) -> int:
    """The number of elements of all parameters of a module or other pytree."""
    return sum(v.size for v in named_parameters(model).values())


def summary(model: Any) -> str:
    """A table of parameters: name, type, count ("state" for what is no parameter)."""
    trained, arrays = named_parameters(model), state_dict(model)
    rows = [
        (n, repr(v.type), f"{v.size:,}" if n in trained else "state") for n, v in arrays.items()
    ]
    nbytes = sum(v.type.nbytes for v in arrays.values())
    total = ("total", f"{nbytes / 2**20:.2f} MiB", f"{count_parameters(model):,}")
    head = (type(model).__name__, "type", "parameters")
    wide = [max(len(row[k]) for row in (head, *rows, total)) for k in range(3)]
    return "\n".join(
        f"{name:<{wide[0]}}  {kind:<{wide[1]}}  {count:>{wide[2]}}"
        for name, kind, count in (head, *rows, total)
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _lines(problems: list[str]) -> str:
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return "\n  ".join(problems[:_SHOWN] + more)
