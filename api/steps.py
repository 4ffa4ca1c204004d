"""What a call returns and the next one takes back: trees of arrays in device memory that nobody
looks into between two steps, so that neither they nor their arrays are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from eggpu.compiler import pytree
from eggpu.compiler.tracing import Array, leaf_type
from eggpu.compiler.types import Type
from eggpu.leaves import DeviceStorage, buffer_of
from eggpu.runtime import Device, DeviceBuffer

_PLAIN = (int, float, bool, np.generic, np.ndarray)


class Held:
    """The arrays of a tree that a call returned, made when the first of them is asked for."""

    __slots__ = ("_arrays", "buffers", "structure", "types")

    def __init__(
        self, structure: pytree.Structure, types: Sequence[Type], buffers: Sequence[DeviceBuffer]
    ) -> None:
        self.structure, self.types, self.buffers = structure, types, buffers
        self._arrays: list[Array] | None = None

    @property
    def untouched(self) -> bool:
        """Whether no array was asked for, so that each is still what the call returned."""
        return self._arrays is None

    def _made(self) -> list[Array]:
        if self._arrays is None:
            pairs = zip(self.types, self.buffers, strict=True)
            self._arrays = [Array(storage=DeviceStorage(t, b)) for t, b in pairs]
        return self._arrays

    def __len__(self) -> int:
        return len(self.types)

    def __iter__(self) -> Iterator[Array]:
        return iter(self._made())

    def __getitem__(self, at: Any) -> Any:
        return self._made()[at]


class Results:
    """Puts together what a program returns."""

    def __init__(self, structure: pytree.Structure, types: Sequence[Type]) -> None:
        self._whole = structure.kind is not tuple
        self._parts: list[tuple[pytree.Structure, int, int, list[Type]]] = []
        at = 0
        for part in [structure] if self._whole else structure.children:
            self._parts.append((part, at, at + part.leaves, list(types[at : at + part.leaves])))
            at += part.leaves

    def __call__(self, buffers: Sequence[DeviceBuffer]) -> Any:
        """The results in these buffers, in the order of their leaves."""
        out: list[Any] = []
        for part, start, stop, types in self._parts:
            if part is pytree.LEAF:
                out.append(Array(storage=DeviceStorage(types[0], buffers[start])))
            else:
                out.append(pytree.later(part, Held(part, types, buffers[start:stop])))
        return out[0] if self._whole else tuple(out)


class Arguments:
    """Recognizes arguments of a signature: trees that calls returned, of which nothing was asked
    since, and single leaves."""

    def __init__(self, structure: pytree.Structure, types: Sequence[Type]) -> None:
        """`structure` and `types` are those of the positional arguments."""
        self._parts: list[tuple[pytree.Structure, int, Sequence[Type]]] = []
        at = 0
        for part in structure.children:
            self._parts.append((part, at, types[at : at + part.leaves]))
            at += part.leaves

    def leaves(self, args: Sequence[Any]) -> dict[int, Any] | None:
        """The single leaves among `args` by position of the leaf; None where `args` are others than
        those of the signature, or nothing is known of them without looking."""
        if len(args) != len(self._parts):
            return None
        out: dict[int, Any] = {}
        for k, (arg, (part, at, types)) in enumerate(zip(args, self._parts)):
            if part is pytree.LEAF:
                if _type(arg) != types[0]:
                    return None
                out[at] = arg
                continue
            held = _held(arg)
            if held is None:
                return None
            if held.structure is not part or held.types is not types:
                if held.structure != part or held.types != types:
                    return None
                self._parts[k] = held.structure, at, held.types  # compared in no time from now on
        return out

    def buffers(self, args: Sequence[Any], on: Device) -> list[DeviceBuffer] | None:
        """The memory of all leaves of `args`, for which `leaves` was asked; None where some of it
        is another device's."""
        out: list[DeviceBuffer] = []
        for arg, (part, _, _) in zip(args, self._parts):
            if part is pytree.LEAF:
                out.append(buffer_of(arg, on))
                continue
            held = _held(arg)
            if held is None or held.buffers[0].device is not on:
                return None
            out += held.buffers
        return out


def _held(tree: Any) -> Held | None:
    parts = pytree.parts_of(tree)
    if parts is None or type(parts[0]) is not Held or not parts[0].untouched or not parts[0].types:
        return None
    return parts[0]


def _type(leaf: Any) -> Type | None:
    """The type of an array that has a value, or of a number; None for all else."""
    if type(leaf) is Array:
        return None if leaf._is_traced() else leaf.type
    return leaf_type(leaf) if isinstance(leaf, _PLAIN) else None
