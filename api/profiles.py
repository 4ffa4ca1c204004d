"""Measured device profiles, kept for each device and driver in the user's cache directory.

`eggpu calibrate` writes one; a device that has one is opened with it. Nothing is read or kept when
EGGPU_CACHE_DIR is "".
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import eggpu
from eggpu import cache
from eggpu.compiler.schedule.target import Profile, Target

# A rate that moved by less than this stays as it was, so that noise does not change plans.
SETTLED = 0.15


def path(name: str, driver: str, backend: str) -> Path | None:
    """The file of a device's profile; None when nothing is kept."""
    plans = cache.folder()
    if plans is None:
        return None
    digest = hashlib.sha256("\n".join((name, driver, backend)).encode()).hexdigest()[:10]
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    return plans.parent / "profiles" / f"{words}-{digest}.json"


def load(name: str, driver: str, backend: str) -> Profile | None:
    """The profile measured for a device with this driver and this version of eggpu, if any."""
    where = path(name, driver, backend)
    if where is None:
        return None
    try:
        kept = json.loads(where.read_text(encoding="utf-8"))
        rates = kept["profile"] if kept["eggpu"] == eggpu.__version__ else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if rates is None else _profile(rates)


def _profile(rates: object) -> Profile | None:
    """The profile of a file, None unless it has every rate as a positive number."""
    kinds = {f.name: f.type for f in fields(Profile)}
    if not isinstance(rates, dict) or rates.keys() != kinds.keys():
        return None
    if not all(isinstance(v, (int, float)) and 0 < v < 1e18 for v in rates.values()):
        return None
    typed: dict[str, Any] = {n: int(v) if kinds[n] == "int" else float(v) for n, v in rates.items()}
    return Profile(**typed)


def store(target: Target, profile: Profile) -> Path | None:
    """Keep a profile; the file, or None when nothing is kept. Raises OSError."""
    where = path(target.name, target.driver, target.backend)
    if where is None:
        return None
    device = {"name": target.name, "driver": target.driver, "backend": target.backend}
    content = {"eggpu": eggpu.__version__, "device": device, "profile": asdict(profile)}
    where.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=where.parent, suffix=".new", delete=False, encoding="utf-8"
    ) as new:
        json.dump(content, new, indent=2)
    try:
        os.replace(new.name, where)
    except OSError:
        with suppress(OSError):
            os.unlink(new.name)
        raise
    return where


def measured(target: Target) -> Target:
    """The target with its measured profile, or as it is when there is none."""
    found = load(target.name, target.driver, target.backend)
    return target if found is None else replace(target, profile=found)


def settled(new: Profile, old: Profile | None) -> Profile:
    """`new`, rounded to two digits, with the rates of `old` that it confirms."""
    rates = {}
    for name, value in asdict(new).items():
        before = None if old is None else getattr(old, name)
        near = before is not None and abs(value - before) <= SETTLED * before
        rounded = value if isinstance(value, int) else float(f"{value:.1e}")
        rates[name] = before if near else rounded
    return Profile(**rates)
