"""The package list names every package of the tree, and a wheel holds every file of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = CONFIG["tool"]["setuptools"]
FOLDERS: dict[str, str] = {folder: name for name, folder in SETUPTOOLS["package-dir"].items()}
BUILD_FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


def sources() -> list[Path]:
    """Every file below the code's folders, relative to the root."""
    return [
        path.relative_to(ROOT)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]


def installed(path: Path) -> Path:
    """Where a file of the tree lies once installed: api/nn/gpt.py is eggpu/nn/gpt.py."""
    return Path(*FOLDERS[path.parts[0]].split("."), *path.parts[1:])


def test_every_package_is_listed() -> None:
    found = {
        ".".join(installed(path).parent.parts) for path in sources() if path.name == "__init__.py"
    }
    assert found == set(SETUPTOOLS["packages"]), "mend `packages` in pyproject.toml"


def test_the_list_is_sorted_without_repeats() -> None:
    assert SETUPTOOLS["packages"] == sorted(set(SETUPTOOLS["packages"]))


def test_every_module_is_in_a_package() -> None:
    outside = [
        str(path)
        for path in sources()
        if path.suffix == ".py" and not (ROOT / path).with_name("__init__.py").exists()
    ]
    assert outside == [], "an __init__.py is missing beside them"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, tree)
    for folder in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "."]
    built = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert not (tree / "build").exists(), "a build/ left behind keeps deleted modules"
    (path,) = tree.glob("*.whl")
    return path


def test_the_wheel_holds_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {installed(path).as_posix() for path in sources()}
    assert expected - inside == set(), "mend `package-data` in pyproject.toml"
    assert inside - expected == set(), "the wheel holds what the tree does not"


def test_the_wheel_has_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/entry_points.txt"))
        assert "eggpu = eggpu.cli:main" in archive.read(name).decode()
