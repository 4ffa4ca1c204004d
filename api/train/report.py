"""What a run leaves in its folder: losses, their curve, the compiler's dumps, time by kernel."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

from eggpu.runtime import DeviceError
from eggpu.train.run import History, Result, Run
from eggpu.train.task import Task

_ROWS = 12  # of the table of kernels


def write_losses(history: History, path: Path) -> Path:
    """Losses as CSV: step, train, valid."""
    rows: dict[int, list[Any]] = {}
    for column, losses in enumerate((history.train, history.valid)):
        for step, loss in losses:
            rows.setdefault(step, ["", ""])[column] = f"{loss:.6f}"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "train", "valid"])
        writer.writerows([step, *rows[step]] for step in sorted(rows))
    return path


def draw_losses(
    history: History,
    path: Path,
    title: str,
    baseline: tuple[str, float] | None = None,
    unit: str = "loss (nats)",
) -> str:
    """The loss curve as PNG; what was drawn, or what is missing, in a line."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no loss curve: it needs matplotlib (pip install 'eggpu[train]')"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*history.train), color="tab:blue", linewidth=1, label="training batch")
    if history.valid:
        axes.plot(*zip(*history.valid), color="tab:orange", marker="o", label="validation")
    if baseline is not None:
        axes.axhline(baseline[1], color="tab:gray", linestyle="--", label=baseline[0])
    axes.set(xlabel="step", ylabel=unit, title=title)
    axes.legend()
    FigureCanvasAgg(figure).print_png(path)
    return f"loss curve   {path}"


def kernel_table(profile: Any) -> str:
    """Measured time by kernel name, the slowest first."""
    times: dict[str, list[int]] = defaultdict(list)
    for kernel, ns in zip(profile.plan.kernels, profile.ns, strict=True):
        times[kernel.name].append(ns)
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))
    total = sum(profile.ns) or 1
    rows = [(name, ns) for name, ns in ranked[:_ROWS]]
    if rest := [n for _, ns in ranked[_ROWS:] for n in ns]:
        rows.append((f"{len(ranked) - _ROWS} others", rest))
    rows.append(("all", list(profile.ns)))
    wide = max(len("kernel"), *(len(name) for name, _ in rows))
    lines = [f"{'kernel':<{wide}}  count         us   share"]
    for name, ns in rows:
        us, share = sum(ns) / 1e3, sum(ns) / total
        lines.append(f"{name:<{wide}}  {len(ns):>5}  {us:>9,.0f}  {share:>6.1%}")
    return "\n".join(lines)


def write_report(
    task: Task, result: Result, run: Run, title: str, baseline: tuple[str, float] | None = None,
    unit: str = "loss (nats)",
) -> str:  # fmt: skip
    """Write curve, dumps and profile; what to tell the user about them."""
    lines = [
        f"checkpoint   {result.checkpoint}",
        draw_losses(result.history, run.out / "loss.png", title, baseline, unit),
        f"dumps        {task.step.dump(run.out / 'dump')}",
    ]
    try:
        profile = task.step.profile(task.model, task.state, *task.arguments(0, 1.0))
    except DeviceError as error:
        return "\n".join([*lines, f"no times: {error}"])
    (run.out / "profile.txt").write_text(f"{profile}\n", encoding="utf-8")
    lines.append(f"each kernel  {run.out / 'profile.txt'}")
    if run.profile:
        lines.append(f"trace        {profile.save(run.profile)} (for ui.perfetto.dev)")
    table = kernel_table(profile) if run.profile is None else str(profile)
    return "\n".join([*lines, "", table])
