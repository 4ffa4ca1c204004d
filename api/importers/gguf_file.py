"""GGUF, versions 2 and 3: typed metadata, then tensors in plain and block formats.

Every count, length and offset is checked against the file before it is used, which the reader of
the package gguf does not do. Blocks without a packed form here are expanded by that package.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eggpu.importers.tensors import ModelFileError, Tensor, Weights, apart, placed

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_ALIGNMENT = 32  # of tensors, unless the metadata says otherwise
_MOST_HEADER = 256 << 20  # bytes; Python's numbers and texts take several times as much
_MOST_DIMS, _MOST_DEPTH, _LONGEST_NAME = 4, 4, 1024

_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
}  # fmt: skip
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUF:
    """A file's metadata (numbers, strings, lists of them) and tensors."""

    path: Path
    metadata: dict[str, Any]
    weights: Weights

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata; `{arch}` in the key is the architecture's name."""
        return self.metadata.get(key.replace("{arch}", self.architecture), default)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def open_gguf(path: str | Path) -> GGUF:
    """Read the header of a file. Raises ModelFileError where it is wrong."""
    path = Path(path)
    if not path.is_file():
        raise ModelFileError(f"{path} is no file")
    size = path.stat().st_size
    if size < 24:
        raise ModelFileError(f"{path} is no GGUF file: it has {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(path, data, size)
        try:
            return reader.file()
        except UnicodeDecodeError:
            raise ModelFileError(f"{path}: text at byte {reader.at} is not UTF-8") from None


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0

    def fail(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}")

    def take(self, nbytes: int, what: str) -> bytes:
        """The next bytes, which must be in the file."""
        if nbytes > self.size - self.at:
            left = self.size - self.at
            raise self.fail(f"{what} needs {nbytes} bytes at {self.at}, the file has {left} more")
        if self.at + nbytes > _MOST_HEADER:
            raise self.fail(f"{what} lies past the {_MOST_HEADER} bytes that a header may have")
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def text(self, what: str) -> str:
        return self.take(self.number("Q", what), what).decode()

    def count(self, least: int, what: str) -> int:
        """A number of items of at least `least` bytes each."""
        n = self.number("Q", what)
        if n * least > self.size - self.at:
            raise self.fail(f"{n} {what} do not fit the file of {self.size} bytes")
        return n

    def file(self) -> GGUF:
        if self.take(4, "the magic number") != MAGIC:
            raise self.fail("this is no GGUF file")
        version = self.number("I", "the version")
        if version not in VERSIONS:
            other = " (big-endian files are not read)" if version & 0xFFFF == 0 else ""
            raise self.fail(f"GGUF versions 2 and 3 are read, got {version}{other}")
        tensors, pairs = self.count(24, "tensors"), self.count(13, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.text("a metadata key")
            if key in metadata:
                raise self.fail(f"the metadata key {key!r:.80} is there twice")
            metadata[key] = self.value(self.number("I", key), key)
        found = [self.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment needs a power of 2, got {alignment!r:.40}")
        start = -(-self.at // alignment) * alignment
        placed_ = self.placed(found, start, alignment)
        return GGUF(self.path, metadata, Weights(apart(placed_, self.path), str(self.path)))

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text(key)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind != _ARRAY or depth >= _MOST_DEPTH:
            raise self.fail(f"the metadata key {key!r:.80} has the unknown type {kind}")
        inner = self.number("I", key)
        code = _SCALARS.get(inner)
        n = self.count(struct.calcsize(f"<{code}") if code else 8, f"entries of {key!r:.80}")
        if code:
            return list(
                struct.unpack(f"<{n}{code}", self.take(n * struct.calcsize(f"<{code}"), key))
            )
        return [self.value(inner, key, depth + 1) for _ in range(n)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text("a tensor's name")
        if len(name) > _LONGEST_NAME:
            raise self.fail(f"a tensor's name has {len(name)} characters: {name!r:.80}")
        dims = self.number("I", f"tensor {name!r}")
        if not 0 <= dims <= _MOST_DIMS:
            raise self.fail(f"tensor {name!r} has {dims} axes, at most {_MOST_DIMS} are read")
        shape = tuple(self.number("Q", f"tensor {name!r}") for _ in range(dims))
        kind, offset = self.number("I", f"tensor {name!r}"), self.number("Q", f"tensor {name!r}")
        return name, shape[::-1], kind, offset

    def placed(
        self, found: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, shape, kind, offset in found:
            if name in tensors:
                raise self.fail(f"tensor {name!r} is there twice")
            if kind not in _TYPES:
                raise self.fail(f"tensor {name!r} has the unknown type {kind}")
            if offset % alignment:
                raise self.fail(f"tensor {name!r} lies at {offset}, not a multiple of {alignment}")
            tensors[name] = placed(
                name, shape, _TYPES[kind], self.path, start + offset, -1, self.size
            )
        return tensors
