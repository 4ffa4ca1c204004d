"""Files of examples: memory-mapped tokens, IDX and NPZ arrays, folders of images."""

from __future__ import annotations

import gzip
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eggpu.data.errors import DataError

_IDX = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_PICTURES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def write_tokens(path: str | Path, tokens: Sequence[int] | np.ndarray, vocab: int) -> Path:
    """Write ids below `vocab` as .npy, two bytes each where they fit."""
    path, ids = Path(path), np.asarray(tokens)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(f"tokens are one axis of integers, got {ids.dtype}{list(ids.shape)}")
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
        raise DataError(f"tokens are from 0 to {vocab - 1}, got {ids.min()} to {ids.max()}")
    kind = np.uint16 if vocab <= 1 << 16 else np.uint32
    with path.open("wb") as file:
        np.save(file, ids.astype(kind))
    return path


def read_tokens(path: str | Path, dtype: str = "uint16") -> np.ndarray:
    """Tokens of a file, mapped into memory: .npy, or plain numbers of `dtype`."""
    path = _there(path)
    try:
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        return np.memmap(path, dtype, mode="r")
    except ValueError as error:
        raise DataError(f"{path} holds no tokens: {error}") from error


def read_idx(path: str | Path) -> np.ndarray:
    """The array of an IDX file (MNIST's format), which may be gzipped."""
    path = _there(path)
    raw = path.read_bytes()
    try:
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX:
        raise DataError(f"{path} is no IDX file")
    rank, kind = raw[3], np.dtype(_IDX[raw[2]])
    start = 4 + 4 * rank
    shape = tuple(int(n) for n in np.frombuffer(raw[4:start], ">u4"))
    need = math.prod(shape) * kind.itemsize
    if len(shape) != rank or len(raw) != start + need:
        raise DataError(f"{path} needs {start + need} bytes for {list(shape)}, has {len(raw)}")
    data = np.frombuffer(raw, kind, offset=start).reshape(shape)
    return data.astype(kind.newbyteorder("="))


def read_npz(path: str | Path, *names: str) -> tuple[np.ndarray, ...]:
    """Arrays of an .npz file by name; all of them, in their order, when none is named."""
    path = _there(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            if missing := [n for n in names if n not in file.files]:
                found = ", ".join(file.files)
                raise DataError(f"{path} has no {', '.join(missing)}; it has {found}")
            return tuple(file[n] for n in names or file.files)
    except (ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is no .npz file: {error}") from error


class ImageFolder:
    """Images in one folder a class, read when needed: f32 (n, c, h, w) from 0 to 1, and classes.

    Classes are numbered in the order of their names. `size` (h, w) resizes every image; without it
    all need the size of the first. Reading pictures takes Pillow.
    """

    def __init__(
        self, folder: str | Path, size: tuple[int, int] | None = None, *, gray: bool = False
    ) -> None:
        folder = Path(folder)
        if not folder.is_dir():
            raise DataError(f"image folder {folder} does not exist")
        self.classes = sorted(p.name for p in folder.iterdir() if p.is_dir())
        files = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in _PICTURES
        ]
        if not files:
            raise DataError(f"{folder} has no folders with images")
        self.paths = [path for path, _ in files]
        self.labels = np.array([number for _, number in files], np.int32)
        self.size, self.gray = size, gray

    def __len__(self) -> int:
        return len(self.paths)

    def rows(self, places: np.ndarray) -> tuple[np.ndarray, ...]:
        """The images and classes at `places`."""
        images = [self._read(self.paths[int(i)]) for i in places]
        for i, image in zip(places, images, strict=True):
            if image.shape != images[0].shape:
                need, came = list(images[0].shape), list(image.shape)
                raise DataError(f"{self.paths[int(i)]} needs {need} like the others, got {came}")
        return np.stack(images), self.labels[places]

    def _read(self, path: Path) -> np.ndarray:
        try:
            from PIL import Image, UnidentifiedImageError
        except ImportError:
            raise DataError("reading images needs Pillow: pip install Pillow") from None
        try:
            with Image.open(path) as file:
                picture = file.convert("L" if self.gray else "RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise DataError(f"cannot read {path}: {error}") from error
        if self.size is not None:
            height, width = self.size
            if picture.size != (width, height):
                picture = picture.resize((width, height))
        pixels = np.asarray(picture, np.float32) / 255
        return pixels[None] if self.gray else np.moveaxis(pixels, -1, 0)


def _there(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise DataError(f"file {path} does not exist")
    return path
