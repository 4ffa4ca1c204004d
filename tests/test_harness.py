"""The golden fixture and the check for a device do what they promise, tried on a small suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
def test_text(golden):
    golden("first\\n{word}\\n")


def test_two(golden):
    golden("a", "ir")
    golden("b", "ir", part="after")
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder with this suite's conftest.py and one file of tests that use `golden`."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_small.py").write_text(SUITE.format(word="second"))
    return tmp_path


def run(
    suite: Path, *options: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(suite)]
    inherited = {k: v for k, v in os.environ.items() if k not in {"EGGPU_REQUIRE_DEVICE", "CI"}}
    return subprocess.run(
        command,
        cwd=suite,
        env=inherited | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )


def test_golden_writes_then_compares(suite: Path) -> None:
    assert run(suite, "--update-golden").returncode == 0
    folder = suite / "golden" / "small"
    assert {path.name for path in folder.iterdir()} == {"text.txt", "two.ir", "two.after.ir"}
    assert (folder / "text.txt").read_text() == "first\nsecond\n"
    assert run(suite).returncode == 0


def test_golden_shows_the_difference(suite: Path) -> None:
    run(suite, "--update-golden")
    (suite / "test_small.py").write_text(SUITE.format(word="other"))
    result = run(suite)
    assert result.returncode == 1
    assert "-second" in result.stdout
    assert "+other" in result.stdout
    assert "1 failed, 1 passed" in result.stdout


def test_a_missing_golden_fails(suite: Path) -> None:
    result = run(suite)
    assert result.returncode == 1
    assert "text.txt: run pytest --update-golden" in result.stdout


def test_a_missing_device_fails_the_run(suite: Path) -> None:
    run(suite, "--update-golden")
    nowhere = {"VK_DRIVER_FILES": "/nonexistent.json", "VK_ICD_FILENAMES": "/nonexistent.json"}
    required = run(suite, environment={**nowhere, "EGGPU_REQUIRE_DEVICE": "1"})
    assert required.returncode == 1
    assert "no Vulkan device can be opened: no Vulkan adapter" in required.stdout + required.stderr
    assert run(suite, environment=nowhere).returncode == 0
