"""Gray pictures as PNG files, without a library for it."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np


def grid(images: np.ndarray, columns: int, zoom: int = 4, gap: int = 2) -> np.ndarray:
    """(n, h, w) from 0 to 1 as one u8 picture, row by row, each enlarged, on gray."""
    n, h, w = images.shape
    rows = -(-n // columns)
    tall, wide = h * zoom + gap, w * zoom + gap
    out = np.full((rows * tall + gap, columns * wide + gap), 96, np.uint8)
    for i, image in enumerate(images):
        y, x = i // columns * tall + gap, i % columns * wide + gap
        large = np.kron(np.clip(image, 0, 1) * 255, np.ones((zoom, zoom)))
        out[y : y + h * zoom, x : x + w * zoom] = np.round(large)
    return out


def write_png(path: Path, picture: np.ndarray) -> Path:
    """Write a u8 picture (h, w) as an 8-bit gray PNG."""
    h, w = picture.shape
    lines = np.zeros((h, w + 1), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = picture
    head = struct.pack(">2I5B", w, h, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(k, d) for k, d in chunks))
    return path


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
