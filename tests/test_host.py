"""Processors and memory of this process, under affinities and control groups of both versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eggpu.runtime import host, translate

GiB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups, on a machine of 16 processors."""
    monkeypatch.setattr(host, "_OWN", tmp_path / "own")
    monkeypatch.setattr(host, "_ROOT", tmp_path / "root")
    monkeypatch.setattr(os, "process_cpu_count", lambda: 16, raising=False)
    (tmp_path / "root").mkdir()
    return tmp_path


def write(groups: Path, own: str, files: dict[str, str]) -> None:
    (groups / "own").write_text(own)
    for name, text in files.items():
        path = groups / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


V2 = "0::/work.slice/job\n"
V1 = "4:memory:/job\n3:cpuacct,cpu:/job\n2:cpuset:/\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "count"),
    [
        ("", {}, 16),
        (V2, {"cpu.max": "max 100000"}, 16),
        (V2, {"work.slice/job/cpu.max": "200000 100000"}, 2),
        (V2, {"work.slice/job/cpu.max": "50000 100000"}, 1),  # half of one
        (V2, {"work.slice/job/cpu.max": "250000 100000"}, 3),  # a part of one counts
        (V2, {"work.slice/cpu.max": "400000 100000", "work.slice/job/cpu.max": "max 100000"}, 4),
        (V2, {"work.slice/job/cpu.max": "6400000 100000"}, 16),
        ("0::/../other\n", {"cpu.max": "300000 100000"}, 3),  # a container's own, as the root
        (V2, {"cpu.max": ""}, 16),
        (V2, {"cpu.max": "300000 0"}, 16),
        (V1, {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, 16),
        (V1, {"cpu/job/cpu.cfs_quota_us": "150000", "cpu/job/cpu.cfs_period_us": "50000"}, 3),
        (V1, {"cpu/cpu.cfs_quota_us": "90000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        (V1, {f"cpuacct,cpu/job/cpu.cfs_{name}_us": us for name, us in
              (("quota", "500"), ("period", "100"))}, 5),
    ],
)  # fmt: skip
def test_processors_that_groups_pay_for(
    groups: Path, own: str, files: dict[str, str], count: int
) -> None:
    write(groups, own, files)
    assert host.processors() == count
    assert translate._devices() == min(count, 4)


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        (V2, {"work.slice/job/memory.max": "max", "memory.max": str(GiB)}, GiB),
        (V2, {"work.slice/job/memory.max": str(GiB), "work.slice/memory.max": str(2 * GiB)}, GiB),
        (V1, {"memory/job/memory.limit_in_bytes": str(GiB)}, GiB),
        (V1, {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("", {}, None),
    ],
)
def test_memory_that_groups_allow(
    groups: Path, own: str, files: dict[str, str], limit: int | None
) -> None:
    write(groups, own, files)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host.memory() == (limit or whole)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinities are Linux's")
def test_processors_of_an_affinity() -> None:
    program = (
        "import os\n"
        "from eggpu.runtime import host, translate\n"
        "before = host.processors()\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "print(before, host.processors(), translate._devices())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    before, after, devices = map(int, done.stdout.split())
    assert before >= 1
    assert (after, devices) == (1, 1)
