"""State dicts of PyTorch modules, in and out: names and layouts converted by the type of module.

torch itself is not needed: values may be tensors or NumPy arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from eggpu.compiler import pytree
from eggpu.nn.attention import MultiHeadAttention
from eggpu.nn.containers import Sequential
from eggpu.nn.layers import Linear
from eggpu.nn.module import load_state_dict, state_dict

M = TypeVar("M")
_PROJECTIONS = ("query", "key", "value")
_COUNTER = "num_batches_tracked"  # of PyTorch's batch norms; nothing is computed from it


@dataclass(frozen=True, slots=True)
class _Entry:
    """An array's name here and in PyTorch, and whether its two axes are swapped there."""

    name: str
    torch: str
    swapped: bool


def from_torch_state(model: M, state: Mapping[str, Any], names: Mapping[str, str] = {}) -> M:
    """A copy of `model` with the arrays of a PyTorch `state_dict()`.

    Linear weights (out, in) become (in, out), entries of a Sequential lose `layers.`, and
    nn.MultiheadAttention's fused projections are taken apart. `names` maps the beginnings of
    PyTorch's dotted names to those of `model`: {"wte": "tokens"}. Raises StateError, which lists
    missing and unexpected names, and wrong shapes or dtypes.
    """
    entries, attentions = _entries(model)
    given = {_renamed(k, names): _numpy(v) for k, v in state.items() if not k.endswith(_COUNTER)}
    for prefix in attentions:
        _take_apart(given, prefix)
    found: dict[str, np.ndarray] = {}
    for entry in entries:
        if entry.torch in given:
            value = given.pop(entry.torch)
            # a copy: PyTorch's optimizers change their tensors in place
            found[entry.name] = np.array(value.T if entry.swapped and value.ndim == 2 else value)
    return load_state_dict(model, found | given)


def to_torch_state(model: Any, *, fused_attention: bool = False) -> dict[str, np.ndarray]:
    """The arrays of `model` under PyTorch's names and in its layouts, as NumPy arrays.

    Load them with `module.load_state_dict({k: torch.tensor(v) for k, v in state.items()})`.
    `fused_attention` names projections as nn.MultiheadAttention does.
    """
    arrays = state_dict(model)
    entries, attentions = _entries(model)
    out: dict[str, np.ndarray] = {}
    for entry in entries:
        value = arrays[entry.name].numpy()
        out[entry.torch] = np.array(value.T if entry.swapped else value, order="C")
    for prefix in attentions if fused_attention else ():
        _put_together(out, prefix)
    return out


def _entries(model: Any) -> tuple[list[_Entry], list[str]]:
    """What is where, and PyTorch's prefixes of attention modules."""
    structure = pytree.flatten(model)[1]
    attentions: list[str] = []
    return list(_walk(structure, "", "", False, attentions)), attentions


def _walk(
    s: pytree.Structure, name: str, torch: str, swapped: bool, attentions: list[str]
) -> Iterator[_Entry]:
    if s.kind == "leaf":
        yield _Entry(name, torch, swapped)
        return
    is_module = isinstance(s.kind, type) and dataclasses.is_dataclass(s.kind)
    if is_module and issubclass(s.kind, MultiHeadAttention):
        attentions.append(torch)
    for key, child in zip(s.keys or range(len(s.children)), s.children, strict=True):
        hidden = is_module and issubclass(s.kind, Sequential)  # `layers` is not in PyTorch's name
        turned = is_module and issubclass(s.kind, Linear) and str(key) == "weight"
        inline = is_module and key == getattr(s.kind, "inline", None)  # in no name
        below = torch if hidden or inline else _joined(torch, key)
        here = name if inline else _joined(name, key)
        yield from _walk(child, here, below, turned, attentions)


def _joined(prefix: str, key: Any) -> str:
    return f"{prefix}.{key}" if prefix else str(key)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name


def _numpy(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
    return np.asarray(value)


def _take_apart(state: dict[str, np.ndarray], prefix: str) -> None:
    """nn.MultiheadAttention's projections as three layers."""
    for kind in ("weight", "bias"):
        whole = state.pop(_joined(prefix, f"in_proj_{kind}"), None)
        if whole is not None:
            for name, part in zip(_PROJECTIONS, np.split(whole, 3), strict=True):
                state[_joined(prefix, f"{name}.{kind}")] = part
        last = state.pop(_joined(prefix, f"out_proj.{kind}"), None)
        if last is not None:
            state[_joined(prefix, f"output.{kind}")] = last
    for name in _PROJECTIONS:  # of keys and values with a width of their own
        one = state.pop(_joined(prefix, f"{name[0]}_proj_weight"), None)
        if one is not None:
            state[_joined(prefix, f"{name}.weight")] = one


def _put_together(state: dict[str, np.ndarray], prefix: str) -> None:
    """Three layers as nn.MultiheadAttention's projections."""
    for kind in ("weight", "bias"):
        places = [_joined(prefix, f"{name}.{kind}") for name in _PROJECTIONS]
        if any(p not in state for p in places):
            continue
        parts = [state.pop(p) for p in places]
        if len({p.shape for p in parts}) == 1 or kind == "bias":
            state[_joined(prefix, f"in_proj_{kind}")] = np.concatenate(parts)
        else:
            for name, part in zip(_PROJECTIONS, parts, strict=True):
                state[_joined(prefix, f"{name[0]}_proj_weight")] = part
        state[_joined(prefix, f"out_proj.{kind}")] = state.pop(_joined(prefix, f"output.{kind}"))
