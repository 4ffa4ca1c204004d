"""The C header of wgpu-native is parsed once, then taken from disk; a spoiled file is no harm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eggpu.runtime import bindings

HEADER = "typedef struct { int a; float b; } Pair; enum Color { RED = 3, BLUE }; int abs(int);"


def made() -> bindings.Remembering:
    ffi = bindings.Remembering()
    ffi.cdef(HEADER)
    ffi.set_source("anything", None)
    return ffi


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EGGPU_CACHE_DIR", str(tmp_path))
    return tmp_path / "headers"


def works(ffi: bindings.Remembering) -> None:
    pair = ffi.new("Pair *", {"a": 2, "b": 0.5})
    assert (pair.a, pair.b) == (2, 0.5)
    lib = ffi.dlopen(None)
    assert lib.abs(-7) == 7
    assert lib.BLUE == 4
    assert isinstance(pair, ffi.CData)


def test_header_is_parsed_once_and_types_are_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    real = bindings.cffi.api.FFI.cdef
    monkeypatch.setattr(
        bindings.cffi.api.FFI, "cdef", lambda ffi, text: parsed.append(text) or real(ffi, text)
    )
    first, second = made(), made()
    for ffi in (first, second):
        assert "_parser" not in ffi.__dict__
        works(ffi)
    assert parsed == [HEADER]
    assert len(list(folder.glob("*.py"))) == 1


@pytest.mark.parametrize("text", ["", "ffi = 1 +", "ffi = None + 1", "raise ImportError"])
def test_spoiled_file_is_replaced(folder: Path, text: str) -> None:
    made()
    (path,) = folder.glob("*.py")
    path.write_text(text)
    works(made())
    works(made())
    assert path.read_text() != text


def test_other_text_is_other_file_and_more_text_is_parsed(folder: Path) -> None:
    made()
    made()
    other = bindings.Remembering()
    other.cdef(HEADER + "typedef int more;")
    assert len(list(folder.glob("*.py"))) == 2
    plain = bindings.Remembering()
    assert plain.sizeof("int") == 4  # used before any header: as cffi's own
    plain.cdef("typedef int another;")
    assert plain.sizeof("another") == 4
    assert len(list(folder.glob("*.py"))) == 2


def test_off_when_there_is_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EGGPU_CACHE_DIR", "")
    assert bindings.kept(HEADER) is None
    works(made())
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("EGGPU_CACHE_DIR", str(blocked))  # cannot be written
    works(made())


def test_a_second_process_needs_no_c_parser(folder: Path) -> None:
    program = "import sys, eggpu.runtime; print('pycparser' in sys.modules)"
    environment = dict(os.environ)
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=environment, capture_output=True, text=True, check=True, timeout=60,
        ).stdout.strip()
        for _ in range(2)
    ]  # fmt: skip
    assert said == ["True", "False"]
