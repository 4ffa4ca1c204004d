"""Whether the cost model chooses what is fastest: workloads with every alternative timed.

    python bench/choices.py --json                         compile and time on this machine
    python bench/choices.py --export DIR --profile h200    compile only, for another machine
    python bench/choices.py --run DIR --out ROWS           time there, with wgpu and NumPy only

Alternatives are other e-nodes (attention's kernels, layouts, wide products), one step away from
the chosen kernels (store, inline, merge, split), every tiling of a product, of attention and of its
gradients, rows at once or in parts. Those predicted to take four times as long are left out, and no
more than 32 are taken. All of them must agree before they are timed. `regret` is the time of the
chosen one over the best.

Plans that are in DIR and rows that are in ROWS are not made again, so a run that was cut short by
`--budget` or otherwise goes on where it ended. `bench/choices_work.py` has the grid. All of it
takes about 7 minutes on 2 quiet cores of lavapipe with cold caches, of which attention takes 3;
`seconds` of a row says how long it took.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory
from typing import Any

import choices_run


def main() -> None:
    """Compile, time, print rows and the regret."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--device", help="part of a device's name, or its number")
    parser.add_argument("--only", default="", help="workloads whose name this pattern is found in")
    parser.add_argument("--seconds", type=float, default=0.3, help="of timing an alternative")
    parser.add_argument("--budget", type=float, help="seconds after which no workload is begun")
    parser.add_argument("--export", type=Path, metavar="DIR", help="compile to DIR, time nothing")
    parser.add_argument("--profile", help="what --export compiles for: h200, lavapipe, generic")
    parser.add_argument("--run", type=Path, metavar="DIR", help="time the plans in DIR")
    parser.add_argument("--out", type=Path, metavar="ROWS", help="a file of rows to add to")
    args = parser.parse_args()
    if args.export is not None:
        export(args.export, args.profile or "lavapipe", args.only, args.budget)
        return
    with TemporaryDirectory() as folder:
        rows = timed(args, Path(folder))
    if not rows:
        parser.error(f"no workload has {args.only!r} in its name")
    found = summary(rows)
    print(json.dumps(found) if args.json else table(found))


def export(folder: Path, profile: str, only: str, budget: float | None) -> None:
    """Write the plans of all workloads that are not there yet."""
    from choices_plans import TARGETS
    from choices_plans import export as write
    from choices_work import workloads

    if profile not in TARGETS:
        raise SystemExit(f"--profile is one of {', '.join(TARGETS)}, got {profile}")
    end = None if budget is None else time.monotonic() + budget
    for workload in workloads():
        where = folder / file_name(workload.name)
        if re.search(only, workload.name) and not where.exists():
            if end is not None and time.monotonic() > end:
                raise SystemExit(f"the budget is spent; next is {workload.name}")
            count = write(workload, TARGETS[profile], where)
            print(f"{workload.name}: {count} plans", file=sys.stderr, flush=True)


def timed(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The rows of all workloads; without --run their plans are made in `folder` as they come."""
    choices_run.attach()
    from eggpu.runtime import open_device

    device = open_device(args.device)
    rows = known(args.out)
    done = {row["workload"] for row in rows}
    end = None if args.budget is None else time.monotonic() + args.budget
    for name in names(args.run, args.only):
        if name in done or (end is not None and time.monotonic() > end):
            continue
        where = (args.run or folder) / file_name(name)
        start = time.monotonic()
        if args.run is None:
            compile_here(name, device, where)
        row = tried(where, device, args.seconds) | {"workload": name, "device": device.target.name}
        row["seconds"] = round(time.monotonic() - start, 1)
        rows.append(row)
        print(line(row), file=sys.stderr, flush=True)
        if args.out is not None:
            with args.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
    return [row for row in rows if re.search(args.only, row["workload"])]


def tried(where: Path, device: Any, seconds: float) -> dict[str, Any]:
    """The row of one workload; one whose chosen plan fails has only an `error`."""
    try:
        return choices_run.row(where, device, seconds)
    except (AssertionError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def known(out: Path | None) -> list[dict[str, Any]]:
    """The rows that are in a file already."""
    if out is None or not out.exists():
        return []
    return [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]


def names(folder: Path | None, only: str) -> list[str]:
    """The workloads to time: those of the grid, or those whose plans are in a folder."""
    if folder is not None:
        found = [path.name.removesuffix(".plans").replace("_", " ") for path in folder.iterdir()]
        return sorted(n for n in found if re.search(only, n))
    from choices_work import workloads

    return [w.name for w in workloads() if re.search(only, w.name)]


def compile_here(name: str, device: Any, where: Path) -> None:
    """The plans of one workload for the device that is open, with its measured profile."""
    from choices_plans import export as write
    from choices_work import workloads

    from eggpu.profiles import measured

    workload = next(w for w in workloads() if w.name == name)
    write(workload, measured(device.target), where)


def file_name(name: str) -> str:
    """The file of a workload's plans."""
    return name.replace(" ", "_") + ".plans"


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The regret over all rows."""
    regrets = [row["regret"] for row in rows if "error" not in row]
    return {
        "device": rows[0]["device"],
        "workloads": len(regrets),
        "errors": len(rows) - len(regrets),
        "regret_mean": round(geometric_mean(regrets), 4) if regrets else None,
        "regret_worst": max(regrets, default=None),
        "seconds": round(sum(row.get("seconds", 0.0) for row in rows), 1),
        "rows": list(rows),
    }


def line(row: dict[str, Any]) -> str:
    """A workload in one line."""
    if "error" in row:
        return f"{row['workload']}: {row['error']}"
    chosen, best = row["alternatives"]["chosen"], row["alternatives"][row["best"]]
    return (
        f"{row['workload']}: regret {row['regret']} of {len(row['alternatives'])}; chosen predicted"
        f" {chosen['predicted_us']:.1f} us, measured {chosen['measured_us']:.1f};"
        f" best {row['best']} predicted {best['predicted_us']:.1f},"
        f" measured {best['measured_us']:.1f}"
        + (f"; failed {row['failed']}" if row["failed"] else "")
    )


def table(found: dict[str, Any]) -> str:
    """A line an alternative, predicted beside measured, the fastest first."""
    lines = [
        f"{found['device']}: {found['workloads']} workloads, regret mean {found['regret_mean']},"
        f" worst {found['regret_worst']}, {found['errors']} errors"
    ]
    for row in found["rows"]:
        if "error" in row:
            lines.append(line(row))
            continue
        lines.append(f"{row['workload']}: regret {row['regret']}, best {row['best']}")
        for name, a in row["alternatives"].items():
            guess, us = f"{a['predicted_us']:.1f}", f"{a['measured_us']:.1f}"
            lines.append(f"  {name[:58]:58} predicted {guess:>10} us, measured {us:>10} us")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
