"""A training step over several devices and processes: gradients, their mean, the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import eggpu as eg
from eggpu.compiler import pytree
from eggpu.compiler.tracing import Array, array
from eggpu.distributed.groups import DistributedError, Group
from eggpu.nn.module import states
from eggpu.runtime import Device
from eggpu.session import Compiled, using

Gradient = Callable[..., tuple[Any, Any, Any]]
Update = Callable[..., tuple[Any, Any]]


def share(batch: Any, part: int, parts: int) -> Any:
    """Part `part` of `parts` equal ones of every array of a pytree, along the first axis.

    Numbers and arrays without axes stay whole. Raises DistributedError for other lengths.
    """
    leaves, structure = pytree.flatten(batch)
    return pytree.unflatten(structure, [_part(v, part, parts) for v in leaves])


def _part(value: Any, part: int, parts: int) -> Any:
    shape = np.shape(value) if not isinstance(value, Array) else value.shape
    if not shape or parts == 1:
        return value
    if shape[0] % parts:
        raise DistributedError(f"a batch of {shape[0]} cannot be shared evenly by {parts}")
    size = shape[0] // parts
    return np.asarray(value)[part * size : (part + 1) * size]


class DataParallel:
    """A training step in two compiled programs, with one all-reduce between them.

    `gradient(model, state, *batch)` gives (loss, model, gradients), the model with its states
    moved; `update(model, state, gradients, *numbers)` gives (model, state) and gets those
    arguments of the batch that have no axes. Called as `model, state, loss = step(model, state,
    *batch)` with this process's share of the batch, which its `devices` share again. Loss,
    gradients and moved states are means over all of them, so that the losses are those of one
    process with the whole batch. `options` are those of `eg.compile`, for loss and gradients.
    """

    def __init__(
        self, gradient: Gradient, update: Update, group: Group | None = None,
        devices: Sequence[Device] = (), name: str = "model", **options: Any,
    ) -> None:  # fmt: skip
        self.group, self.devices = group or Group(), tuple(devices)
        self.gradient: Compiled = eg.compile(
            _taken_apart(gradient), name=f"{name}_gradient", **options
        )
        self.update: Compiled = eg.compile(
            _put_together(update), donate=("model", "state"), name=f"{name}_update"
        )
        self._last: tuple[Any, Any] | None = None  # the model and state given last
        self._copies: list[tuple[Any, Any]] = []  # the same on the other devices

    def __call__(self, model: Any, state: Any, *batch: Any) -> tuple[Any, Any, Array]:
        devices = self.devices or (eg.device(),)
        replicas = self._replicas(model, state, devices)
        found = []
        for k, (device, replica) in enumerate(zip(devices, replicas, strict=True)):
            with using(device):  # nothing is waited for until all devices have their work
                found.append(self.gradient(*replica, *share(batch, k, len(devices))))
        mean = _mean([one["means"] for one in found])
        mean = {"means": self.group.all_reduce(mean), "counts": found[0]["counts"]}
        numbers = [v for v in pytree.flatten(batch)[0] if np.shape(v) == ()]
        after = []
        for device, replica in zip(devices, replicas, strict=True):
            with using(device):
                after.append(self.update(*replica, _fresh(mean), *numbers))
        self._last, self._copies = after[0], after[1:]
        return (*after[0], mean["means"]["loss"])

    def start(self, model: Any, state: Any) -> tuple[Any, Any]:
        """Model and state as the first process has them."""
        return self.group.broadcast((model, state))

    def _replicas(self, model: Any, state: Any, devices: Sequence[Device]) -> list[tuple[Any, Any]]:
        """Model and state for each device; those of the step before where nothing else came."""
        known = self._last is not None and model is self._last[0] and state is self._last[1]
        if not known or len(self._copies) != len(devices) - 1:
            self._copies = [_copy((model, state)) for _ in devices[1:]]
        return [(model, state), *self._copies]

    @property
    def graph(self) -> Any:
        """The traced program of loss and gradients."""
        return self.gradient.graph

    @property
    def plan(self) -> Any:
        """The kernels and buffers of loss and gradients."""
        return self.gradient.plan

    @property
    def compile_seconds(self) -> float:
        """Seconds of compiling both programs."""
        return self.gradient.compile_seconds + self.update.compile_seconds

    def dump(self, folder: str | Path) -> Path:
        """Write every stage of both programs, each to a folder of its own."""
        self.gradient.dump(Path(folder) / "gradient")
        self.update.dump(Path(folder) / "update")
        return Path(folder)

    def profile(self, model: Any, state: Any, *batch: Any) -> Any:
        """Time of each kernel of loss and gradients, on this process's first device."""
        return self.gradient.profile(model, state, *share(batch, 0, max(1, len(self.devices))))


def _taken_apart(gradient: Gradient) -> Callable[..., dict[str, Any]]:
    """What travels between processes (loss, gradients, moved states), and states that count."""

    def run(model: Any, state: Any, *batch: Any) -> dict[str, Any]:
        loss, moved, grads = gradient(model, state, *batch)
        kept = _is_float(model)
        leaves, structure = pytree.flatten(moved)
        slopes = pytree.flatten(grads)[0]
        rows = list(zip(leaves, slopes, kept, states(structure), strict=True))
        means = {
            "loss": loss,
            "grads": [g for _, g, f, _ in rows if f],
            "states": [v for v, _, f, s in rows if f and s],
        }
        return {"means": means, "counts": [v for v, _, f, s in rows if s and not f]}

    return run


def _put_together(update: Update) -> Callable[..., tuple[Any, Any]]:
    """The update of a model, given what travelled."""

    def run(model: Any, state: Any, mean: dict[str, Any], *numbers: Any) -> tuple[Any, Any]:
        leaves, structure = pytree.flatten(model)
        given, moved = iter(mean["means"]["grads"]), iter(mean["means"]["states"])
        counts, grads, after = iter(mean["counts"]), [], []
        for leaf, is_float, is_state in zip(
            leaves, _is_float(model), states(structure), strict=True
        ):
            grads.append(next(given) if is_float else eg.zeros_like(array(leaf)))
            after.append(next(moved if is_float else counts) if is_state else leaf)
        return update(
            pytree.unflatten(structure, after), state, pytree.unflatten(structure, grads), *numbers
        )

    return run


def _is_float(model: Any) -> list[bool]:
    return [array(v).dtype.kind == "f" for v in pytree.flatten(model)[0]]


def _mean(found: Sequence[Any]) -> Any:
    """The mean over the devices of this process, on the host."""
    if len(found) == 1:
        return found[0]
    rows = [[np.asarray(v) for v in pytree.flatten(one)[0]] for one in found]
    scale = np.float32(1 / len(found))
    means = [array((sum(vs[1:], vs[0]) * scale).astype(vs[0].dtype)) for vs in zip(*rows)]
    return pytree.unflatten(pytree.flatten(found[0])[1], means)


def _fresh(tree: Any) -> Any:
    """Arrays on the host, so that each device uploads its own."""
    return pytree.tree_map(np.asarray, tree)


def _copy(tree: Any) -> Any:
    return pytree.tree_map(lambda v: array(np.array(v)), tree)
