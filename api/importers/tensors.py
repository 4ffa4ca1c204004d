"""Tensors in model files: where their bytes lie, and those bytes as arrays or packed matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eggpu.compiler.errors import EggpuError
from eggpu.compiler.tracing import Array, array
from eggpu.importers.formats import FORMATS
from eggpu.importers.packed import Packed, pack
from eggpu.importers.small_floats import SMALL_FLOATS

Matrix = Array | Packed
MOST_AXES = 8
_MOST_ELEMENTS = 1 << 60  # of the axes beside one of 0, as NumPy has it
_SHOWN = 6

# Formats of single elements: the NumPy type that holds them in the file.
PLAIN = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1",
    "F8_E8M0": "u1", "F8_E4M3FNUZ": "u1", "F8_E5M2FNUZ": "u1",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2",
    "U8": "u1", "BOOL": "u1",
}  # fmt: skip


class ModelFileError(EggpuError, ValueError):
    """A model file is damaged, hostile, or holds what is not supported."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file: `nbytes` bytes at `offset`, known to lie inside the file and to fit the
    shape."""

    name: str
    shape: tuple[int, ...]
    format: str  # F32, BF16, I64 ..., or a block format such as Q4_1
    path: Path
    offset: int
    nbytes: int

    def __repr__(self) -> str:
        return f"{self.name}: {self.format}[{', '.join(map(str, self.shape))}]"

    def raw(self) -> np.ndarray:
        """The bytes, read from the file when they are looked at."""
        if self.nbytes == 0:
            return np.zeros(0, np.uint8)
        return np.memmap(self.path, np.uint8, "r", self.offset, (self.nbytes,))

    def numpy(self) -> np.ndarray:
        """The elements: f32 for floats and blocks, 32-bit integers, or bool. What float32 cannot
        hold is infinite."""
        if self.format not in PLAIN:
            return _blocks(self).reshape(self.shape)
        held = self.raw().view(PLAIN[self.format]).reshape(self.shape)
        match self.format:
            case "F32" | "F64" | "F16":
                with np.errstate(over="ignore", invalid="ignore"):
                    return held.astype(np.float32)
            case "BF16":
                return (held.astype(np.uint32) << np.uint32(16)).view(np.float32)
            case kind if kind in SMALL_FLOATS:
                return SMALL_FLOATS[kind][held]
            case "BOOL":
                return held != 0
            case _:
                return _narrow(self, held)


def _blocks(tensor: Tensor) -> np.ndarray:
    if tensor.format in _BELOW_A_BYTE:
        return SMALL_FLOATS[tensor.format][_bits(tensor)]
    if tensor.format in FORMATS:
        rows = tensor.nbytes // FORMATS[tensor.format].nbytes
        matrix = pack(tensor.raw(), tensor.format, (rows, FORMATS[tensor.format].block))
        return matrix.dequantize().numpy()
    try:
        import gguf
    except ImportError:
        raise ModelFileError(
            f"{tensor!r} needs the package gguf to be read: pip install 'eggpu[models]'"
        ) from None
    kind = gguf.GGMLQuantizationType[tensor.format]
    try:
        return gguf.dequantize(tensor.raw(), kind)
    except NotImplementedError as error:
        raise ModelFileError(f"{tensor!r}: {error}") from None


def _narrow(tensor: Tensor, held: np.ndarray) -> np.ndarray:
    wanted = np.dtype(np.uint32 if held.dtype.kind == "u" else np.int32)
    info = np.iinfo(wanted)
    if held.size and (held.min() < info.min or held.max() > info.max):
        raise ModelFileError(f"{tensor!r} holds integers that need more than 32 bits")
    return held.astype(wanted)


def _bits(tensor: Tensor) -> np.ndarray:
    """The codes of floats of 4 or 6 bits, the first in the lowest bits."""
    width = _BELOW_A_BYTE[tensor.format]
    bits = np.unpackbits(tensor.raw(), bitorder="little").reshape(-1, width)
    return np.packbits(bits, axis=1, bitorder="little")[:, 0]


def placed(
    name: str, shape: Sequence[int], format_: str, path: Path, offset: int, nbytes: int, size: int
) -> Tensor:
    """A tensor whose bytes are checked against the file's size and its shape. `nbytes` < 0: as many
    as the shape needs."""
    where = f"{path}: tensor {name!r}"
    if len(shape) > MOST_AXES or any(n < 0 for n in shape):
        raise ModelFileError(f"{where} needs at most {MOST_AXES} axes of length 0 or more")
    count = math.prod(shape)
    if not count and math.prod(max(n, 1) for n in shape) >= _MOST_ELEMENTS:
        raise ModelFileError(f"{where} has too long axes beside one of 0: {list(shape)!s:.80}")
    if format_ in PLAIN:
        needed = count * np.dtype(PLAIN[format_]).itemsize
    else:
        block, each = block_size(format_)
        if not shape or shape[-1] % block:
            got = f"{format_}{list(shape)}"
            raise ModelFileError(f"{where} needs rows of a multiple of {block} elements, got {got}")
        needed = count // block * each
    if nbytes >= 0 and nbytes != needed:
        kind = f"{format_}{list(shape)}"
        raise ModelFileError(f"{where} needs {needed} bytes for {kind}, the file gives {nbytes}")
    if offset < 0 or offset + needed > size:
        end = offset + needed
        raise ModelFileError(f"{where} lies at bytes {offset}:{end} of a file of {size} bytes")
    return Tensor(name, tuple(shape), format_, path, offset, needed)


def apart(tensors: Mapping[str, Tensor], path: Path) -> Mapping[str, Tensor]:
    """The tensors, known to share no bytes: a small file would become any amount of memory."""
    last: Tensor | None = None
    for tensor in sorted((t for t in tensors.values() if t.nbytes), key=lambda t: t.offset):
        if last is not None and tensor.offset < last.offset + last.nbytes:
            raise ModelFileError(
                f"{path}: the tensors {last.name!r:.80} and {tensor.name!r:.80} overlap at byte "
                f"{tensor.offset}"
            )
        last = tensor
    return tensors


# Floats that are no whole bytes, and their bits.
_BELOW_A_BYTE = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def block_size(format_: str) -> tuple[int, int]:
    """(elements, bytes) of a block."""
    if format_ in FORMATS:
        return FORMATS[format_].block, FORMATS[format_].nbytes
    if format_ in _BELOW_A_BYTE:
        return (2, 1) if _BELOW_A_BYTE[format_] == 4 else (4, 3)
    return OTHER_BLOCKS[format_]


# Block formats that are expanded to f32 as they are loaded.
OTHER_BLOCKS = {
    "Q8_1": (32, 40), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ3_XXS": (256, 98),
    "IQ1_S": (256, 50), "IQ4_NL": (32, 18), "IQ3_S": (256, 110), "IQ2_S": (256, 82),
    "IQ4_XS": (256, 136), "IQ1_M": (256, 56), "Q8_K": (256, 292),
}  # fmt: skip


class Weights(Mapping[str, Tensor]):
    """The tensors of a model by name. `array` and `matrix` load one, checked against a shape."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self._tensors = dict(tensors)
        self.where = where

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            near = [n for n in self._tensors if n.rpartition(".")[0] == name.rpartition(".")[0]]
            hint = f"; beside it are {', '.join(near[:_SHOWN])}" if near else ""
            raise ModelFileError(f"{self.where} has no tensor {name!r}{hint}")
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def renamed(self, new_name: Callable[[str], str]) -> Weights:
        """The same tensors under other names."""
        return Weights({new_name(k): v for k, v in self._tensors.items()}, self.where)

    def _shaped(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = self[name]
        if tensor.shape != tuple(shape):
            raise ModelFileError(
                f"{self.where}: tensor {name!r} needs the shape {list(shape)}, got {tensor!r}"
            )
        return tensor

    def array(self, name: str, shape: Sequence[int]) -> Array:
        """A tensor of this shape as f32."""
        return array(self._shaped(name, shape).numpy().astype(np.float32, copy=False))

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """A matrix of this shape; one of 16-bit floats or blocks stays packed."""
        tensor = self._shaped(name, shape)
        even = tensor.format not in ("F16", "BF16") or shape[1] % 2 == 0
        if even and tensor.format in (*FORMATS, "F16", "BF16"):
            return pack(tensor.raw(), tensor.format, shape)
        return self.array(name, shape)
