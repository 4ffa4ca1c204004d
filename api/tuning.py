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
TRIES = 3  # of a kernel's tilings of which some fail
WORKER = (sys.executable, "-m", "eggpu.tuning_child")
_BETTER = 0.95  # of the predicted best's time, that another tiling must reach to be taken


@dataclass(frozen=True, slots=True)
class Timing:
    """What a child found for one plan: its ns, or why there is none. The device has `refused` it,
    now and later, or else the child failed, and the next one may not."""

    ns: float | None
    why: str = ""
    refused: bool = False


@dataclass(slots=True)
class Tuning:
    """Finds the rank of the fastest tiling for each kernel of a selection that was ever timed here.

    Warns where a child failed. What it was to time is then not kept, and `complete` is False: the
    next process tries again, and meanwhile the fastest of the other tilings is taken. Tilings that
    fail in several processes, in which others do not, are given up.
    """

    worker: Sequence[str] = WORKER
    complete: bool = True

    def __call__(self, selection: Selection, target: Target) -> Mapping[str, int]:
        from eggpu.compiler.variants import variants, worth_timing

        known, failed = load(target), failures(target)
        wanted = worth_timing(selection.groups, target.profile.launch)
        missing = [key for key in wanted if key not in known][:MOST_KERNELS]
        choices = {key: variants(wanted[key], target, MOST) for key in missing}
        timings = _timings(choices, target, self.worker)
        found = {key: _fastest(timings[key]) for key in missing}
        lacking = {key: why for key in missing if (why := _failure(timings[key]))}
        if lacking:
            names = dict.fromkeys(_name(choices[key]) for key in lacking)
            warnings.warn(_told(list(names), next(iter(lacking.values()))), stacklevel=2)
        works = not lacking or any(t.ns for of in timings.values() for t in of.values())
        tries = {key: failed.get(key, 0) + 1 for key in lacking}
        again = {key: n for key, n in tries.items() if n < TRIES or not works}
        self.complete = not again
        kept = known | {key: rank for key, rank in found.items() if key not in again}
        if missing and works:
            others = {key: n for key, n in failed.items() if key not in kept}
            store(target, kept, others | again)
        return {key: rank for key, rank in (known | found).items() if key in wanted}


def _timings(
    choices: Mapping[str, Mapping[int, Plan]], target: Target, worker: Sequence[str]
) -> dict[str, dict[int, Timing]]:
    """The timings of each kernel's plans by rank, where it has several."""
    plans = [
        (key, rank, plan)
        for key, found in choices.items()
        for rank, plan in found.items()
        if len(found) > 1
    ]
    timings = time_plans([plan for *_, plan in plans], target, worker) if plans else []
    by_key: dict[str, dict[int, Timing]] = {key: {} for key in choices}
    for (key, rank, _), timing in zip(plans, timings, strict=True):
        by_key[key][rank] = timing
    return by_key


def _fastest(timings: Mapping[int, Timing]) -> int:
    """The rank to take: the predicted best, 0, unless another one is clearly faster."""
    times = {rank: t.ns for rank, t in timings.items() if t.ns is not None}
    best = min(times, key=lambda rank: (times[rank], rank), default=0)
    return best if best in times and times[best] < _BETTER * times.get(0, float("inf")) else 0


def _failure(timings: Mapping[int, Timing]) -> str:
    """Why a child failed, if one did."""
    return next((t.why for t in timings.values() if t.ns is None and not t.refused), "")


def _name(plans: Mapping[int, Plan]) -> str:
    return next(iter(plans.values())).kernels[0].name


def _told(names: Sequence[str], why: str) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"tune: some tilings could not be timed, of {shown}: {why}; until they are, the fastest of "
        f"the others is taken, or the predicted best"
    )


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
            found.append(Timing(said["ns"], said.get("why", ""), bool(said.get("refused"))))
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
    return _kept(target, "ranks")


def failures(target: Target) -> dict[str, int]:
    """How often a child failed at some tiling of kernels of which nothing is kept yet."""
    return _kept(target, "failures")


def _kept(target: Target, what: str) -> dict[str, int]:
    """Numbers by kernel; none where the file is another compiler's, or not as it should be."""
    where = path(target)
    if where is None:
        return {}
    try:
        kept = json.loads(where.read_text(encoding="utf-8"))
        found = kept.get(what, {}) if kept["versions"] == list(cache.versions()) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    good = isinstance(found, dict) and all(isinstance(n, int) and n >= 0 for n in found.values())
    return found if good else {}


def store(
    target: Target, ranks: Mapping[str, int], failed: Mapping[str, int] | None = None
) -> None:
    """Keep tilings, and how often others failed. A folder that cannot be written is no error: they
    are timed again next time."""
    where = path(target)
    if where is None:
        return
    content = {"versions": list(cache.versions()), "device": target.name, "ranks": dict(ranks)}
    content["failures"] = dict(failed or {})
    with suppress(OSError):
        where.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=where.parent, suffix=".new", delete=False, encoding="utf-8"
        ) as new:
            json.dump(content, new, indent=1, sort_keys=True)
        os.replace(new.name, where)
