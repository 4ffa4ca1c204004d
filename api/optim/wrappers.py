"""Optimizers around optimizers: groups of parameters, accumulation, averages, scaled losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from eggpu.compiler import pytree
from eggpu.compiler.errors import TraceError
from eggpu.compiler.library import math as M
from eggpu.compiler.library.reductions import all as all_
from eggpu.compiler.tracing import Array, array
from eggpu.nn.initial import known
from eggpu.optim.trees import (
    Optimizer,
    as_float,
    choose,
    is_float,
    like,
    map_floats,
    moments,
    no_steps,
    trainable,
)

_REST = ""  # the group of what no pattern names


@dataclass(frozen=True)
class FrozenState:
    """Updates done."""

    step: Array


@dataclass(frozen=True)
class Frozen:
    """Changes nothing; made by `frozen`."""

    def init(self, model: Any) -> FrozenState:
        """The state before the first update."""
        return FrozenState(no_steps())

    def update(self, model: Any, state: FrozenState, grads: Any) -> tuple[Any, FrozenState]:
        """The model as it is."""
        return model, FrozenState(state.step + 1)


def frozen() -> Frozen:
    """An optimizer for groups of parameters that stay as they are."""
    return Frozen()


@dataclass(frozen=True)
class GroupsState:
    """Updates done, and the state of each group's optimizer by its pattern."""

    step: Array
    groups: dict[str, Any]


@dataclass(frozen=True)
class Groups:
    """An optimizer for each group of parameters; made by `groups`."""

    optimizers: tuple[tuple[str, Any], ...]

    def init(self, model: Any) -> GroupsState:
        """The state before the first update; raises TraceError for a pattern that names nothing."""
        parts = self._parts(model)
        for pattern, _ in self.optimizers:
            if pattern != _REST and not parts[pattern]:
                raise TraceError(f"no parameter's name matches the group {pattern!r}")
        states = {p: o.init(_named(model, parts[p])) for p, o in self.optimizers}
        return GroupsState(no_steps(), states)

    def update(self, model: Any, state: GroupsState, grads: Any) -> tuple[Any, GroupsState]:
        """The model after a step of each group's optimizer, and the next state."""
        leaves, structure = pytree.flatten(model)
        if pytree.flatten(grads)[1] != structure:
            raise TraceError("an update needs gradients in the structure of the model")
        parts, states = self._parts(model), dict(state.groups)
        for pattern, optimizer in self.optimizers:
            places = parts[pattern]
            part, slopes = _named(model, places), _named(grads, places)
            new, states[pattern] = optimizer.update(part, states[pattern], slopes)
            for at, name in places.items():
                leaves[at] = new[name]
        return pytree.unflatten(structure, leaves), GroupsState(state.step + 1, states)

    def _parts(self, model: Any) -> dict[str, dict[int, str]]:
        """The place and name of each trained leaf, by the first pattern that matches it."""
        leaves, structure = pytree.flatten(model)
        parts: dict[str, dict[int, str]] = {pattern: {} for pattern, _ in self.optimizers}
        trained = trainable(leaves, structure)
        for at, name in enumerate(pytree.paths(structure)):
            if trained[at]:
                fits = (p for p, _ in self.optimizers if p == _REST or fnmatchcase(name, p))
                parts[next(fits)][at] = name
        return parts


def groups(default: Optimizer, patterns: Mapping[str, Any]) -> Groups:
    """Another optimizer, or other settings of `default`, for parameters by dotted name.

    >>> groups(adamw(1e-3), {"*.bias": {"weight_decay": 0.0}, "tokens.*": frozen()})

    Of several patterns that match, the first counts; `default` has the rest.
    """
    out = []
    for pattern, what in patterns.items():
        changed = dataclasses.replace(default, **what) if isinstance(what, dict) else what  # type: ignore[type-var]
        out.append((pattern, changed))
    return Groups((*out, (_REST, default)))


def _named(tree: Any, places: Mapping[int, str]) -> dict[str, Any]:
    leaves = pytree.flatten(tree)[0]
    return {name: leaves[at] for at, name in places.items()}


@dataclass(frozen=True)
class AccumulationState:
    """Gradients seen, their sum since the last update, and the state of the optimizer within."""

    seen: Array
    total: Any
    inner: Any

    @property
    def step(self) -> Array:
        """Updates done."""
        return self.inner.step


@dataclass(frozen=True)
class Accumulated:
    """Updates once for several gradients, along their mean; made by `accumulate`."""

    inner: Optimizer
    every: int

    def init(self, model: Any) -> AccumulationState:
        """The state before the first update."""
        return AccumulationState(no_steps(), moments(model), self.inner.init(model))

    def update(self, model: Any, state: AccumulationState, grads: Any) -> tuple[Any, Any]:
        """The model, changed if these gradients complete a group, and the next state."""
        leaves, structure = pytree.flatten(grads)
        sums = pytree.flatten(state.total)[0]
        trained = trainable(leaves, structure)
        rows = list(zip(sums, leaves, trained, strict=True))
        total = [s + as_float(array(g)) if t else s for s, g, t in rows]
        means = [s * (1 / self.every) if t else g for s, (_, g, t) in zip(total, rows, strict=True)]
        seen = state.seen + 1
        full = seen % self.every == 0
        new, inner = self.inner.update(model, state.inner, pytree.unflatten(structure, means))
        left = [M.where(full, s * 0.0, s) for s in total]
        after = choose(full, (new, inner), (model, state.inner))
        return after[0], AccumulationState(seen, pytree.unflatten(structure, left), after[1])


def accumulate(inner: Optimizer, every: int) -> Accumulated:
    """`inner` once for `every` calls, along the mean of their gradients."""
    if every < 1:
        raise ValueError(f"accumulate needs at least 1 gradient an update, got {every}")
    return Accumulated(inner, every)


@dataclass(frozen=True)
class EMAState:
    """The averaged model, and the state of the optimizer within."""

    average: Any
    inner: Any

    @property
    def step(self) -> Array:
        """Updates done."""
        return self.inner.step


@dataclass(frozen=True)
class EMA:
    """Keeps an exponential moving average of the model; made by `ema`."""

    inner: Optimizer
    decay: float

    def init(self, model: Any) -> EMAState:
        """The state before the first update; the average starts as a copy of the model."""
        copy = pytree.tree_map(lambda v: known(array(v) * 1), model)
        return EMAState(copy, self.inner.init(model))

    def update(self, model: Any, state: EMAState, grads: Any) -> tuple[Any, EMAState]:
        """The model after a step of the optimizer within, and the next state."""
        new, inner = self.inner.update(model, state.inner, grads)
        leaves, structure = pytree.flatten(new)
        olds = pytree.flatten(state.average)[0]
        # a + (p - a) * (1 - decay); what is no float stays
        rows = list(zip(olds, leaves, strict=True))
        average = [like(a, a + (p - a) * (1 - self.decay)) if is_float(p) else a for a, p in rows]
        return new, EMAState(pytree.unflatten(structure, average), inner)


def ema(inner: Optimizer, decay: float = 0.999) -> EMA:
    """`inner`, with decay * average + (1 - decay) * model in `state.average`, states included."""
    if not 0 <= decay <= 1:
        raise ValueError(f"ema needs 0 <= decay <= 1, got {decay}")
    return EMA(inner, decay)


_FACTORS = 2.0**-24, 2.0**96  # bounds of a loss's factor


@dataclass(frozen=True)
class ScaledState:
    """The factor of the loss, finite steps since it changed, and the optimizer's state."""

    scale: Array
    good: Array
    inner: Any

    @property
    def step(self) -> Array:
        """Updates done."""
        return self.inner.step


@dataclass(frozen=True)
class Scaled:
    """Divides gradients by the loss's factor and skips those that overflowed; made by `scaled`."""

    inner: Optimizer
    initial: float
    growth: float
    backoff: float
    interval: int

    def init(self, model: Any) -> ScaledState:
        """The state before the first update."""
        return ScaledState(known(array(self.initial) * 1.0), no_steps(), self.inner.init(model))

    def update(self, model: Any, state: ScaledState, grads: Any) -> tuple[Any, ScaledState]:
        """The model after a step along `grads / state.scale` if all are finite; the next state."""
        down = map_floats(lambda g: as_float(g) / state.scale, grads)
        fine = finite(down)
        new, inner = self.inner.update(model, state.inner, down)
        good = M.where(fine, state.good + 1, 0)
        grown = good == self.interval
        raised = M.where(grown, state.scale * self.growth, state.scale)
        scale = M.where(fine, raised, state.scale * self.backoff)
        scale = M.clip(scale, *_FACTORS)  # no run of good or bad steps ends at infinity or 0
        new, inner = choose(fine, (new, inner), (model, state.inner))
        return new, ScaledState(scale, M.where(grown, 0, good), inner)


def scaled(
    inner: Optimizer, initial: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5,
    interval: int = 2000,
) -> Scaled:  # fmt: skip
    """`inner` for losses multiplied by `state.scale`, so that small f16 gradients stay above 0.

    The factor halves when a gradient is not finite, and that step is skipped; it doubles after
    `interval` finite steps (torch.amp.GradScaler), within 2^-24 and 2^96.
    """
    return Scaled(inner, initial, growth, backoff, interval)


def finite(tree: Any) -> Array:
    """Whether every element of every float leaf is finite."""
    leaves = [array(v) for v in pytree.flatten(tree)[0] if is_float(v)]
    if not leaves:
        raise TraceError("finite needs at least one float array")
    out = all_(M.isfinite(leaves[0]))
    for leaf in leaves[1:]:
        out = out & all_(M.isfinite(leaf))
    return out
