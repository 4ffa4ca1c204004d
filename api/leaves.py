"""Arrays in device memory: the leaves of what compiled functions are called with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from eggpu.compiler import pytree
from eggpu.compiler.tracing import Array, array, is_traced, leaf_type
from eggpu.compiler.types import Type
from eggpu.runtime import Device, DeviceBuffer


@dataclass(frozen=True, slots=True)
class DeviceStorage:
    """An array's value in device memory."""

    type: Type
    buffer: DeviceBuffer

    @property
    def gone(self) -> bool:
        """Whether a call has consumed the value, which was not fetched for the host either."""
        return self.buffer.gone

    def numpy(self) -> np.ndarray:
        """Wait for the value and copy it to NumPy."""
        return self.buffer.device.download(self.buffer, self.type.shape, self.type.dtype.name)


def copy(tree: Any) -> Any:
    """The same pytree with arrays of its own, which outlive the donation of the given ones.

    What is in device memory is copied there, without the host and by one submission a device.
    """
    leaves, structure = pytree.flatten(tree)
    held: dict[Device, list[int]] = {}
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray):
            leaves[k] = leaf.copy()
        elif isinstance(leaf, Array) and isinstance(leaf.storage, DeviceStorage):
            held.setdefault(leaf.storage.buffer.device, []).append(k)
        elif isinstance(leaf, Array) and not is_traced(leaf):
            leaves[k] = array(leaf.numpy().copy())
    for on, places in held.items():
        buffers = on.copies([leaves[k].storage.buffer for k in places])
        for k, buffer in zip(places, buffers, strict=True):
            leaves[k] = Array(storage=DeviceStorage(leaves[k].type, buffer))
    return pytree.unflatten(structure, leaves)


def buffer_of(leaf: Any, on: Device, known: Type | None = None) -> DeviceBuffer:
    """The device memory of a leaf; an Array keeps it, so that it is uploaded once. `known` is the
    leaf's type if that is known."""
    if isinstance(leaf, Array):
        if isinstance(leaf.storage, DeviceStorage) and leaf.storage.buffer.device is on:
            return leaf.storage.buffer
        buffer = on.upload(leaf.numpy())
        leaf.storage = DeviceStorage(leaf.type, buffer)
        return buffer
    t = known or leaf_type(leaf)
    return on.upload(np.asarray(leaf).astype(t.dtype.numpy, copy=False))


# A model has hundreds of leaves and a step should take microseconds, so that what follows looks at
# all of them only by loops inside of Python's own functions.
_STORAGE, _DEVICE = attrgetter("storage"), attrgetter("device")
_TYPE, _BUFFER = attrgetter("storage.type"), attrgetter("storage.buffer")


def not_on_devices(leaves: Sequence[Any]) -> list[int]:
    """The leaves that are not arrays in device memory."""
    try:
        if set(map(type, map(_STORAGE, leaves))) <= {DeviceStorage}:
            return []
    except AttributeError:
        pass
    return [
        i for i, v in enumerate(leaves)
        if type(v) is not Array or type(v.storage) is not DeviceStorage
    ]  # fmt: skip


def types_of(leaves: Sequence[Any]) -> list[Type]:
    """The types of all leaves."""
    try:
        return list(map(_TYPE, leaves))
    except AttributeError:  # not all of them are arrays with storage
        return [
            v.storage.type if type(v) is Array and v.storage is not None else leaf_type(v)
            for v in leaves
        ]


def buffers_of(
    leaves: Sequence[Any], on: Device, others: Sequence[int] | None = None
) -> list[DeviceBuffer]:
    """The device memory of all leaves, of which `others` may have none yet."""
    others = not_on_devices(leaves) if others is None else others
    if others:
        at = set(others)
        found = [buffer_of(v, on) if i in at else v.storage.buffer for i, v in enumerate(leaves)]
    else:
        found = list(map(_BUFFER, leaves))
    if set(map(_DEVICE, found)) <= {on}:
        return found
    return [b if b.device is on else buffer_of(v, on) for v, b in zip(leaves, found, strict=True)]
