"""Losses of a run as CSV and as a PNG curve."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from eggpu.train.run import History


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


def with_earlier(history: History, path: Path) -> History:
    """The losses with those of `path`, a CSV of write_losses, from before their first step."""
    first = history.train[0][0] if history.train else math.inf
    whole = History()
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if int(row["step"]) < first]
        for losses, column in ((whole.train, "train"), (whole.valid, "valid")):
            losses += [(int(row["step"]), float(row[column])) for row in rows if row[column]]
    return History(whole.train + history.train, whole.valid + history.valid)


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
