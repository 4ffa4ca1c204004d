"""What every test may use: fixtures, `--update-golden`, and the check for a device."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent

# The first example of a test may compile kernels, so a time limit for each example says nothing.
settings.register_profile("eggpu", settings.default, deadline=None, print_blob=True)
settings.load_profile("eggpu")

# In a process of its own: tests choose driver settings before their first use of a device.
OPEN_DEVICE = """
import wgpu
found = [a for a in wgpu.gpu.enumerate_adapters_sync() if a.info["backend_type"] == "Vulkan"]
if not found:
    raise SystemExit("no Vulkan adapter")
found[0].request_device_sync()
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what tests produce to tests/golden/ instead of comparing with it",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """With EGGPU_REQUIRE_DEVICE=1 a missing device ends the run at once: nothing skips silently."""
    is_worker = hasattr(session.config, "workerinput")  # of pytest-xdist; its main process asks
    if is_worker or os.environ.get("EGGPU_REQUIRE_DEVICE") != "1":
        return
    probe = subprocess.run(
        [sys.executable, "-c", OPEN_DEVICE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if probe.returncode != 0:
        reason = (probe.stderr.strip() or f"exit status {probe.returncode}").splitlines()[-1]
        pytest.exit(
            f"EGGPU_REQUIRE_DEVICE=1, but no Vulkan device can be opened: {reason}\n"
            "scripts/setup-driver.sh installs one that runs on the CPU",
            returncode=1,
        )


Golden = Callable[..., None]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares a text with tests/golden/<module>/<test>.<extension>.

    `golden(text)`, `golden(text, "wgsl")`; a second text of the same test and extension needs
    `part="name"`. `pytest --update-golden` writes the files.
    """
    module = request.path.relative_to(TESTS).with_suffix("")
    folder = TESTS / "golden" / module.with_name(module.name.removeprefix("test_"))
    test = re.sub(r"[^\w.-]+", "-", request.node.name.removeprefix("test_")).strip("-")
    seen: set[Path] = set()

    def compare(text: str, extension: str = "txt", *, part: str = "") -> None:
        path = folder / f"{test}{'.' + part if part else ''}.{extension}"
        assert path not in seen, f"two texts for {path.name}: give one of them part=..."
        seen.add(path)
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        shown = path.relative_to(TESTS.parent)
        if not path.exists():
            pytest.fail(f"no {shown}: run pytest --update-golden, then read what it wrote")
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            lines = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), str(shown), "this run", lineterm=""
            )
            pytest.fail("\n".join(lines) + "\nIf this is meant: pytest --update-golden")

    return compare


@pytest.fixture(scope="module")
def second() -> Any:
    """Another device of the adapter in use."""
    from eggpu.runtime import Device
    from eggpu.runtime.adapter import choose, features

    adapter, raw = choose(None, None)
    return Device(adapter, raw.request_device_sync(required_features=features(adapter, raw)))
