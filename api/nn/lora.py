"""Low-rank adapters (Hu et al., 2021): fine-tuning by a few numbers beside a model's weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np

from eggpu.compiler.errors import ShapeMismatch, TraceError
from eggpu.compiler.library import math as M
from eggpu.compiler.pytree import tree_map
from eggpu.compiler.tracing import Array, array
from eggpu.nn import initial
from eggpu.nn.initial import Key
from eggpu.nn.layers import Linear
from eggpu.nn.module import STATE, Module

Model = TypeVar("Model")
ADAPTERS = "*lora_*"  # the names of what is trained, for `optim.groups`


@dataclass(frozen=True, init=False, repr=False, eq=False)
class LoRA(Module):
    """base(x) + x @ lora_down @ lora_up * alpha / rank; the base is saved but never trained.

    `lora_up` starts as zeros, so that nothing changes at first; `lora_down` uniform in
    ±1/sqrt(inputs). `merged()` is one Linear with the same results.
    """

    base: Linear = field(metadata=STATE)
    lora_down: Array
    lora_up: Array
    alpha: float

    def __init__(self, base: Linear, rank: int, alpha: float | None = None, *, key: Key) -> None:
        inputs, outputs = base.weight.shape
        if not 1 <= rank <= min(inputs, outputs):
            most = min(inputs, outputs)
            raise ShapeMismatch(f"LoRA of {inputs} to {outputs} needs a rank of 1 to {most}, "
                                f"got {rank}")  # fmt: skip
        self._set(
            base=base,
            lora_down=initial.uniform(key, (inputs, rank), inputs**-0.5),
            lora_up=initial.zeros((rank, outputs)),
            alpha=float(rank if alpha is None else alpha),
        )

    @property
    def rank(self) -> int:
        """Columns of `lora_down`."""
        return self.lora_down.shape[1]

    def __call__(self, x: Array) -> Array:
        base = tree_map(M.stop_gradient, self.base)
        return base(x) + (x @ self.lora_down) @ self.lora_up * (self.alpha / self.rank)

    def merged(self) -> Linear:
        """The base with the adapter added to its weight."""
        more = self.lora_down.numpy() @ self.lora_up.numpy() * np.float32(self.alpha / self.rank)
        return self.base.replace(weight=array(self.base.weight.numpy() + more))


def add_lora(
    model: Model, rank: int, names: Sequence[str] = ("*",), alpha: float | None = None, *, key: Key
) -> Model:
    """A copy of `model` with a LoRA around each Linear whose dotted name matches a pattern.

    >>> tuned = nn.add_lora(model, 4, ("*.query", "*.value"), key=0)
    >>> opt = optim.groups(optim.frozen(), {nn.ADAPTERS: optim.adamw(1e-3)})

    With such an optimizer all other parameters stay as they are. Raises TraceError when no layer
    has a name like that.
    """
    found: list[str] = []

    def noted(layer: Any, name: str) -> Any:
        if isinstance(layer, Linear) and any(fnmatchcase(name, p) for p in names):
            found.append(name)
        return layer

    map_modules(noted, model, stop=(Linear, LoRA))
    if not found:
        raise TraceError(f"no Linear layer's name matches {' or '.join(names)}")
    own = dict(zip(found, initial.keys(key, len(found)), strict=True))

    def wrapped(layer: Any, name: str) -> Any:
        return LoRA(layer, rank, alpha, key=own[name]) if name in own else layer

    return map_modules(wrapped, model, stop=(Linear, LoRA))


def merge_lora(model: Model) -> Model:
    """A copy of `model` with every LoRA merged into one Linear: the names of the base again."""

    def merged(layer: Any, name: str) -> Any:
        return layer.merged() if isinstance(layer, LoRA) else layer

    return map_modules(merged, model, stop=(LoRA,))


def map_modules(
    function: Callable[[Any, str], Any], model: Model, *, stop: tuple[type, ...] = ()
) -> Model:
    """`function(module, dotted name)` in place of every module, from the leaves to the root.

    What is inside modules of the classes `stop` is left alone.
    """
    return _mapped(function, model, "", stop)


def _mapped(function: Any, value: Any, name: str, stop: tuple[type, ...]) -> Any:
    def inner(part: Any, key: object) -> Any:
        return _mapped(function, part, f"{name}.{key}" if name else str(key), stop)

    if isinstance(value, (tuple, list)):
        return type(value)(inner(v, i) for i, v in enumerate(value))
    if isinstance(value, dict):
        return {k: inner(v, k) for k, v in value.items()}
    if not isinstance(value, Module):
        return value
    if not isinstance(value, stop):
        fields = [f.name for f in dataclasses.fields(value) if not f.metadata.get("static")]  # type: ignore[arg-type]
        before = {f: getattr(value, f) for f in fields}
        after = {f: inner(v, f) for f, v in before.items()}
        changed = {f: v for f, v in after.items() if v is not before[f]}
        value = value.replace(**changed) if changed else value
    return function(value, name)
