"""Timed choices between a kernel's tilings, kept for each device and driver.

`tune=True` times the predicted best tilings of every kernel that matters in a child process, so
that a driver that crashes or hangs costs a tiling and not the program. What was found is kept in
the user's cache directory and holds until eggpu's compiler changes.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eggpu import cache, profiles
from eggpu.compiler.schedule.plan import Plan
from eggpu.compiler.schedule.selection import Selection
from eggpu.compiler.schedule.serialize import plan_to_json
from eggpu.compiler.schedule.target import Target

MOST = 4  # tilings of a kernel
MOST_KERNELS = 48  # of a program
START_SECONDS, SECONDS = 90.0, 20.0  # a child that says nothing for so long is hung
WORKER = (sys.executable, "-m", "eggpu.tuning_child")
_BETTER = 0.95  # of the predicted best's time, that another tiling must reach to be taken


@dataclass(frozen=True, slots=True)
class Timing:
    """What a child found for one plan: its ns, or why there is none."""

    ns: float | None
    why: str = ""


def tuned(
    selection: Selection, target: Target, worker: Sequence[str] = WORKER
) -> Mapping[str, int]:
    """The rank of the fastest tiling for each kernel of a selection that was ever timed here.

    Warns when no child could time anything; nothing is kept then, so the next time tries again.
    """
    from eggpu.compiler.variants import variants, worth_timing

    known = load(target)
    wanted = worth_timing(selection.groups, target.profile.launch)
    missing = [key for key in wanted if key not in known][:MOST_KERNELS]
    choices = {key: variants(wanted[key], target, MOST) for key in missing}
    plans = [(key, rank, plan) for key in missing for rank, plan in choices[key].items()]
    if any(len(found) > 1 for found in choices.values()):
        plans = [p for p in plans if len(choices[p[0]]) > 1]
        timings = time_plans([plan for _, _, plan in plans], target, worker)
        if not any(t.ns for t in timings):
            warnings.warn(f"tune: nothing could be timed: {timings[0].why}", stacklevel=2)
            return {key: rank for key, rank in known.items() if key in wanted}
    else:
        timings = []
    found = dict.fromkeys(missing, 0)
    by_key: dict[str, dict[int, float]] = {}
    for (key, rank, _), timing in zip(plans, timings, strict=False):
        if timing.ns is not None:
            by_key.setdefault(key, {})[rank] = timing.ns
    for key, times in by_key.items():
        best = min(times, key=lambda rank: (times[rank], rank))
        found[key] = best if times[best] < _BETTER * times.get(0, float("inf")) else 0
    if missing:
        store(target, {**known, **found})
    return {key: rank for key, rank in {**known, **found}.items() if key in wanted}


def time_plans(
    plans: Sequence[Plan], target: Target, worker: Sequence[str] = WORKER
) -> list[Timing]:
    """The time of each plan, measured in child processes: a new one after each that ends early.

    One that does not get as far as opening the device is the last.
    """
    found: list[Timing] = []
    with tempfile.TemporaryDirectory(prefix="eggpu-tune-") as folder:
        where = Path(folder) / "plans.json"
        where.write_text(json.dumps([plan_to_json(plan) for plan in plans]), encoding="utf-8")
        while len(found) < len(plans):
            ready, more = _child(where, len(found), len(plans), target, worker)
            found += more if ready else more * (len(plans) - len(found))
    return found


def _child(
    where: Path, first: int, count: int, target: Target, worker: Sequence[str]
) -> tuple[bool, list[Timing]]:
    """Whether a child opened the device, and what it finds from plan `first` on: at least one
    timing."""
    command = [*worker, str(where), str(first), target.name, target.backend]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(child, lines), daemon=True)
    reader.start()
    found: list[Timing] = []
    why, patience, ready = "", START_SECONDS, False
    while first + len(found) < count:
        try:
            line = lines.get(timeout=patience)
        except queue.Empty:
            why = f"hung for {patience:g} s"
            break
        if line is None:
            why = f"the process ended with status {child.wait()}"
            break
        patience, ready = SECONDS, True
        with suppress(ValueError, KeyError, TypeError):  # ready
            said: dict[str, Any] = json.loads(line)
            found.append(Timing(said["ns"], said.get("why", "")))
    child.kill()
    child.wait()
    reader.join()
    return ready, [*found, Timing(None, why)] if why else found


def _read(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            lines.put(line)
    lines.put(None)


def path(target: Target) -> Path | None:
    """The file of a device's tilings; None when nothing is kept."""
    profile = profiles.path(target.name, target.driver, target.backend)
    return None if profile is None else profile.parent.parent / "tuned" / profile.name


def load(target: Target) -> dict[str, int]:
    """The tilings kept for a device with this driver and this compiler: ranks by kernel."""
    where = path(target)
    if where is None:
        return {}
    try:
        kept = json.loads(where.read_text(encoding="utf-8"))
        ranks = kept["ranks"] if kept["versions"] == list(cache.versions()) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    good = isinstance(ranks, dict) and all(isinstance(r, int) and r >= 0 for r in ranks.values())
    return ranks if good else {}


def store(target: Target, ranks: Mapping[str, int]) -> None:
    """Keep tilings. A folder that cannot be written is no error: they are timed again next time."""
    where = path(target)
    if where is None:
        return
    content = {"versions": list(cache.versions()), "device": target.name, "ranks": dict(ranks)}
    with suppress(OSError):
        where.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=where.parent, suffix=".new", delete=False, encoding="utf-8"
        ) as new:
            json.dump(content, new, indent=1, sort_keys=True)
        os.replace(new.name, where)
