"""What a call returns and the next one takes back: trees of arrays in device memory that nobody
looks into between two steps, so that neither they nor their arrays are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from eggpu.compiler import pytree
from eggpu.compiler.tracing import Array, is_traced, leaf_type
from eggpu.compiler.types import Type
from eggpu.leaves import DeviceStorage, buffer_of
from eggpu.runtime import Device, DeviceBuffer, Executable, Handed

_PLAIN = (int, float, bool, np.generic, np.ndarray)


class Held(Sequence[Array]):
    """The arrays of a tree that a call returned, made when the first of them is asked for."""

    __slots__ = ("_arrays", "_source", "start", "stop", "structure", "types")

    def __init__(
        self,
        structure: pytree.Structure,
        types: Sequence[Type],
        source: Sequence[DeviceBuffer] | Handed,
        start: int,
    ) -> None:
        """`source` has the buffers from number `start` on."""
        self.structure, self.types = structure, types
        self._source, self.start, self.stop = source, start, start + len(types)
        self._arrays: list[Array] | None = None

    @property
    def untouched(self) -> bool:
        """Whether no array was asked for, so that each is still what the call returned."""
        return self._arrays is None

    @property
    def handed(self) -> Handed | None:
        """What the tree is a part of, if a call can take it over."""
        return self._source if isinstance(self._source, Handed) else None

    @property
    def buffers(self) -> Sequence[DeviceBuffer]:
        source = self._source
        found = source.buffers() if isinstance(source, Handed) else source
        return found[self.start : self.stop]

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

    def __init__(
        self, structure: pytree.Structure, types: Sequence[Type], cycle: int, fetch: Sequence[int]
    ) -> None:
        """`cycle` as the program's executable has it; `fetch` as its calls are told."""
        self._whole = structure.kind is not tuple
        self._parts: list[tuple[pytree.Structure, int, list[Type]]] = []
        at = 0
        for part in [structure] if self._whole else structure.children:
            self._parts.append((part, at, list(types[at : at + part.leaves])))
            at += part.leaves
        trees = [(start, start + part.leaves) for part, start, _ in self._parts if part.keys]
        covered = sum(stop - start for start, stop in trees if stop <= cycle)
        self._cycle = cycle if covered == cycle and all(i >= cycle for i in fetch) else 0
        self._one = types[0] if structure is pytree.LEAF else None

    def handed(self, executable: Executable, buffers: Sequence[DeviceBuffer]) -> Any:
        """The results of a call; those are handed on of which nobody may look at one alone."""
        if self._one is not None:
            return Array(storage=DeviceStorage(self._one, buffers[0]))
        handed = executable.hand(buffers) if self._cycle else None
        return self(handed, buffers[self._cycle :]) if handed is not None else self(None, buffers)

    def __call__(self, handed: Handed | None, buffers: Sequence[DeviceBuffer]) -> Any:
        """The results in order: what is handed on, then these buffers."""
        first = 0 if handed is None else self._cycle
        out: list[Any] = []
        for part, start, types in self._parts:
            if part is pytree.LEAF:
                out.append(Array(storage=DeviceStorage(types[0], buffers[start - first])))
            elif handed is not None and start < first:
                out.append(pytree.later(part, Held(part, types, handed, start)))
            else:
                out.append(pytree.later(part, Held(part, types, buffers, start - first)))
        return out[0] if self._whole else tuple(out)


class Arguments:
    """Recognizes arguments of a signature: trees that calls returned, of which nothing was asked
    since, and single leaves."""

    def __init__(self, structure: pytree.Structure, types: Sequence[Type]) -> None:
        """`structure` and `types` are those of the positional arguments."""
        self._parts: list[tuple[pytree.Structure, int, Sequence[Type]]] = []
        self._flat = all(part is pytree.LEAF for part in structure.children)
        self._types = types
        self._forms: dict[int, tuple[Any, Any]] = {}  # of arrays of NumPy that had the right type
        at = 0
        for part in structure.children:
            self._parts.append((part, at, types[at : at + part.leaves]))
            at += part.leaves

    def direct(self, args: Sequence[Any], on: Device) -> list[DeviceBuffer] | None:
        """The memory of `args` that are all arrays in the device's, of the signature's types; None
        for others."""
        if not self._flat or len(args) != len(self._types):
            return None
        out: list[DeviceBuffer] = []
        for arg, wanted in zip(args, self._types):
            storage = arg.storage if type(arg) is Array else None
            if type(storage) is not DeviceStorage or storage.buffer.device is not on:
                return None
            if storage.type is not wanted and storage.type != wanted:
                return None
            out.append(storage.buffer)
        return out

    def leaves(self, args: Sequence[Any]) -> dict[int, Any] | None:
        """The single leaves among `args` by position of the leaf; None where `args` are others than
        those of the signature, or nothing is known of them without looking."""
        if len(args) != len(self._parts):
            return None
        out: dict[int, Any] = {}
        for k, (arg, (part, at, types)) in enumerate(zip(args, self._parts)):
            if part is pytree.LEAF:
                form = (arg.shape, arg.dtype) if type(arg) is np.ndarray else None
                if form is None or form != self._forms.get(at):
                    if _type(arg) != types[0]:
                        return None
                    if form is not None:
                        self._forms[at] = form
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

    def handed(self, args: Sequence[Any], count: int) -> Handed | None:
        """What the first `count` leaves of `args` are all of, for which `leaves` was asked."""
        first = _held(args[0]) if args and count else None
        handed = None if first is None else first.handed
        if handed is None:
            return None
        for arg, (part, at, _) in zip(args, self._parts):
            if at >= count:
                if part is not pytree.LEAF:
                    return None
                continue
            held = None if part is pytree.LEAF else _held(arg)
            if held is None or held.handed is not handed or held.start != at:
                return None
        return handed

    def buffers(self, args: Sequence[Any], on: Device) -> list[DeviceBuffer] | None:
        """The memory of all leaves of `args`, for which `leaves` was asked; None where some of it
        is another device's."""
        out: list[DeviceBuffer] = []
        for arg, (part, _, types) in zip(args, self._parts):
            if part is pytree.LEAF:
                out.append(buffer_of(arg, on, types[0]))
                continue
            held = _held(arg)
            found = () if held is None else held.buffers
            if not found or found[0].device is not on:
                return None
            out += found
        return out


def _held(tree: Any) -> Held | None:
    parts = pytree.parts_of(tree)
    if parts is None or type(parts[0]) is not Held or not parts[0].untouched or not parts[0].types:
        return None
    return parts[0]


def _type(leaf: Any) -> Type | None:
    """The type of an array that has a value, or of a number; None for all else."""
    if type(leaf) is Array:
        return None if is_traced(leaf) else leaf.type
    return leaf_type(leaf) if isinstance(leaf, _PLAIN) else None
