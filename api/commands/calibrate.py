"""`eggpu calibrate`: measure the device, so that costs are true on it."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

import eggpu as eg
from eggpu import profiles
from eggpu.calibrate import calibrate, profile_of

_UNITS = {
    "launch": "ns", "bandwidth": "GB/s", "contract": "GFLOP/s", "attention": "GFLOP/s",
    "elementwise": "GFLOP/s", "rows": "rows", "onchip": "elements", "strided": "times the bytes",
    "decode": "GB/s a group",
}  # fmt: skip


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """The command's flags."""
    text = "measure the device's rates for the cost model, and keep them for it and its driver"
    parser = commands.add_parser("calibrate", parents=[common], help=text, description=text)
    parser.add_argument("--forget", action="store_true", help="go back to the built-in rates")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print each rate, keep the profile."""
    device = eg.device(args.device)
    target = device.target
    where = profiles.path(target.name, target.driver, target.backend)
    if args.forget:
        if where is not None and where.exists():
            where.unlink()
        print(f"{target.name} has built-in rates")
        return 0
    print(f"{target.name}, {target.driver}")
    start = time.perf_counter()
    fits = []
    for fit in calibrate(device):
        fits.append(fit)
        print(
            f"  {fit.rate:12} {fit.value:10.3g} {_UNITS[fit.rate]:16} "
            f"predicted {fit.predicted_us:9.1f} us, measured {fit.measured_us:9.1f} us",
            flush=True,
        )
    old = profiles.load(target.name, target.driver, target.backend)
    profile = profiles.settled(profile_of(fits, target.profile), old)
    print("  " + ", ".join(f"{name} {value:g}" for name, value in asdict(profile).items()))
    kept = profiles.store(target, profile)
    print(f"{time.perf_counter() - start:.0f} s; " + (f"kept in {kept}" if kept else "not kept"))
    return 0
