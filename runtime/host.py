"""What this process may use of the machine: processors and memory, as affinity and control groups
allow."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_OWN = Path("/proc/self/cgroup")  # a line "number:controllers:path" for each group
_ROOT = Path("/sys/fs/cgroup")


def processors() -> int:
    """How many processors work for this process at once: those that it may run on (`taskset`, and
    Python's -X cpu_count), and no more than its control groups pay for (`docker --cpus`)."""
    counted = getattr(os, "process_cpu_count", _allowed)() or 1
    return max(1, min([counted, *map(math.ceil, _quotas())]))


def memory() -> int:
    """Bytes that this process may use: of the machine, or of its control groups if that is less."""
    found = [1 << 62]
    if hasattr(os, "sysconf"):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for group in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            found += [int(text) for text in _words(group / name) if text.isdecimal()]
    return min(found)


def _allowed() -> int | None:
    with suppress(AttributeError, OSError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _quotas() -> Iterator[float]:
    """Processors that each control group around this process pays for."""
    for group in _groups("cpu"):
        words = _words(group / "cpu.max") or [
            *_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")
        ]  # fmt: skip
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            yield int(words[0]) / int(words[1])  # microseconds of work, in so many


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the control groups with a controller, of both versions, that hold this process
    one in the other. A container may see its own group as the root."""
    for line in _lines(_OWN):
        _, names, path = line.split(":", 2)
        if names == "":
            roots = [_ROOT, _ROOT / "unified"]
        elif controller in names.split(","):
            roots = [_ROOT / controller, _ROOT / names]
        else:
            continue
        for root in roots:
            own = Path(path.lstrip("/"))
            yield from (root / part for part in (own, *own.parents) if (root / part).is_dir())


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


def _lines(path: Path) -> list[str]:
    with suppress(OSError, ValueError):
        return path.read_text().splitlines()
    return []
