"""Settings of Mesa's lavapipe: those that must stand in the environment before Vulkan starts, and
where its threads run.

Mesa 22 computes on 256-bit vectors unless told otherwise; where the CPU has 512-bit ones, kernels
take a third less time with them. Later versions are slower so, and some results are wrong.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

WIDTH = "LP_NATIVE_VECTOR_WIDTH"
SHADERS = "MESA_SHADER_CACHE_DIR"
_WIDE = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VERSION = re.compile(rb"Mesa (\d+)\.\d+\.\d+")
PINNED = "EGGPU_PIN"
_TASKS = Path("/proc/self/task")
_FOLDERS = ("/usr/local/share", "/usr/share", "/usr/local/etc", "/etc")


def prepare() -> None:
    """Choose the vector width, unless the user has; shaders of each width are kept apart.

    Must run before the process first asks for adapters: the driver reads its environment once.
    """
    if WIDTH not in os.environ:
        if not _has_wide_vectors() or driver_versions() != {22}:
            return
        os.environ[WIDTH] = "512"
    width = os.environ[WIDTH]
    if width in ("", "256"):
        return
    # the driver's cache does not know the width: a shader of the other one would run
    chosen = os.environ.get(SHADERS)
    if chosen and chosen.endswith(f"-{width}"):
        return  # by the process that started this one
    folder = Path(chosen) / f"width-{width}" if chosen else _folder(width)
    if folder is None:
        os.environ["MESA_SHADER_CACHE_DISABLE"] = "true"
        return
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ[SHADERS] = str(folder)


def threads() -> set[int]:
    """The threads of this process."""
    with suppress(OSError):
        return {int(task.name) for task in _TASKS.iterdir()}
    return set()


def spread(before: set[int]) -> None:
    """Give each thread that runs workgroups a processor of its own, unless EGGPU_PIN is 0.

    Linux often wakes them on one processor and leaves another idle for milliseconds. `before`: the
    threads before the first device was opened.
    """
    if os.environ.get(PINNED) == "0" or not hasattr(os, "sched_setaffinity"):
        return
    with suppress(OSError):
        processors = sorted(os.sched_getaffinity(0))
        names = [(task, _name(task)) for task in sorted(threads() - before)]
        workers = _workers(names, _name(threading.get_native_id()), len(processors))
        for worker, processor in zip(workers, processors, strict=False):
            os.sched_setaffinity(worker, {processor})


def _name(task: int) -> str:
    return (_TASKS / str(task) / "comm").read_text().strip()


def _workers(names: Sequence[tuple[int, str]], maker: str, count: int) -> list[int]:
    """The threads that Mesa makes for workgroups: as many as, and right after, those that it makes
    for pixels, without a name of their own. None where it made another number than `count`."""
    pixels = [i for i, (_, name) in enumerate(names) if re.fullmatch(r"llvmpipe-\d+", name)]
    if len(pixels) != count or count < 2:
        return []
    after = names[pixels[-1] + 1 : pixels[-1] + 1 + count]
    workers = [task for task, name in after if name == maker]
    return workers if len(workers) == count else []


def cache_folder() -> Path | None:
    """Where compiled plans and what belongs to them are kept; None when nothing is to be kept."""
    chosen = os.environ.get("EGGPU_CACHE_DIR")
    if chosen == "":
        return None
    if chosen is None:
        import platformdirs

        chosen = platformdirs.user_cache_dir("eggpu", appauthor=False)
    return Path(chosen)


def _folder(width: str) -> Path | None:
    """Where shaders of a width are kept: beside compiled plans; None when nothing is to be kept."""
    folder = cache_folder()
    return None if folder is None else folder / f"mesa-{width}"


def _has_wide_vectors() -> bool:
    """Whether the CPU and the system have the 512-bit instructions that the driver asks for."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.exists():
        return False
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return flags is not None and set(flags[1].split()) >= _WIDE


def driver_versions() -> set[int]:
    """Major versions of Mesa of the installed lavapipe drivers."""
    found = (_version(library) for library in _libraries())
    return {version for version in found if version is not None}


def _libraries() -> Iterator[Path]:
    """The libraries that manifests of Vulkan drivers name for lavapipe."""
    for manifest in _manifests():
        try:
            library = str(json.loads(manifest.read_text())["ICD"]["library_path"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if "lvp" not in Path(library).name:
            continue
        if "/" not in library:  # found by the linker
            yield from (p / library for p in _linked() if (p / library).exists())
        else:
            yield (manifest.parent / library).resolve()


def _manifests() -> Iterator[Path]:
    """What the Vulkan loader reads: the files of its variables, or of its folders."""
    named = os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES")
    if named:
        for path in map(Path, named.split(os.pathsep)):
            yield from sorted(path.glob("*.json")) if path.is_dir() else [path]
        return
    home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    given = filter(None, os.environ.get("XDG_DATA_DIRS", "").split(os.pathsep))
    for folder in dict.fromkeys((home, *map(Path, given), *map(Path, _FOLDERS))):
        yield from sorted((folder / "vulkan/icd.d").glob("*.json"))


def _linked() -> Iterator[Path]:
    given = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    yield from map(Path, given)
    yield from map(Path, ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"))


def _version(library: Path) -> int | None:
    """The major version in a driver's own name of itself, such as "Mesa 22.3.6"."""
    try:
        with library.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            match = _VERSION.search(data)
            return int(match[1]) if match else None
    except (OSError, ValueError):
        return None
