"""Templates are translated once and then taken from disk; a spoiled file is no harm."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import DictLoader, Environment

from eggpu.templates.bytecode import Kept


def text(source: str = "{{ n + 1 }}") -> str:
    environment = Environment(loader=DictLoader({"a": source}), bytecode_cache=Kept())
    return environment.get_template("a").render(n=4)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EGGPU_CACHE_DIR", str(tmp_path))
    return tmp_path / "templates"


def test_second_time_translates_nothing(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert text() == "5"
    (path,) = files.iterdir()
    monkeypatch.setattr(Environment, "_parse", None)  # whoever translates fails
    assert text() == "5"
    with pytest.raises(TypeError):
        text("{{ n + 2 }}")
    assert list(files.iterdir()) == [path]


@pytest.mark.parametrize("keep", [0, 5, 30, 60])
def test_file_that_was_cut_off_is_replaced(files: Path, keep: int) -> None:
    text()
    (path,) = files.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    assert text() == "5"
    assert path.read_bytes() == whole


def test_other_source_of_the_same_name(files: Path) -> None:
    assert (text(), text("{{ n + 2 }}"), text()) == ("5", "6", "5")


def test_off_or_not_writable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EGGPU_CACHE_DIR", "")
    assert text() == "5"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EGGPU_CACHE_DIR", str(tmp_path / "file"))
    assert text() == "5"
