"""Scalars in TensorBoard's event files, without a library for it."""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, bits reversed
_TABLE: list[int] = []


class EventFile:
    """An event file in a folder; each scalar is on the disk when `scalar` returns."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now * 1e6)}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._file = self.path.open("wb")
        self._write(_double(1, now) + _bytes(3, b"brain.Event:2"))

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Add a value of a curve."""
        point = _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value)  # field 2, f32
        event = _double(1, time.time()) + b"\x10" + _varint(step)  # field 2, an integer
        self._write(event + _bytes(5, _bytes(1, point)))

    def close(self) -> None:
        """No more scalars."""
        self._file.close()

    def _write(self, event: bytes) -> None:
        """A record: length, its checksum, the event, its checksum."""
        size = struct.pack("<Q", len(event))
        self._file.write(size + _masked(size) + event + _masked(event))
        self._file.flush()


def crc32c(data: bytes) -> int:
    """The CRC-32C of bytes (RFC 3720)."""
    if not _TABLE:
        _TABLE.extend(_entry(byte) for byte in range(256))
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _entry(crc: int) -> int:
    for _ in range(8):
        crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc


def _masked(data: bytes) -> bytes:
    """The checksum as TFRecord files keep it: rotated, and moved by a constant."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)
