"""What a run leaves in its folder: curve of losses, the compiler's dumps, time by kernel."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from eggpu.runtime import DeviceError
from eggpu.train.curves import draw_losses, with_earlier
from eggpu.train.curves import write_losses as write_losses
from eggpu.train.run import History, Result, Run
from eggpu.train.task import Task

_ROWS = 12  # of the table of kernels


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


def _losses(result: Result, run: Run) -> History:
    """Those of the run, after those of the run in this folder that it goes on from."""
    if run.resume is None or run.resume.resolve().parent != run.out.resolve():
        return result.history
    return with_earlier(result.history, run.out / "loss.csv")


def nothing_more(result: Result, run: Run) -> bool:
    """Write the losses and say how a stopped run goes on; True when that is all there is to say,
    as in all processes but the first."""
    if not run.first:
        return True
    write_losses(_losses(result, run), run.out / "loss.csv")
    if result.interrupted:
        print(f"stopped after {result.steps} steps; go on with --resume {result.checkpoint}")
    return result.interrupted


def write_report(
    task: Task, result: Result, run: Run, title: str, baseline: tuple[str, float] | None = None,
    unit: str = "loss (nats)",
) -> str:  # fmt: skip
    """Write curve, dumps and profile; what to tell the user about them."""
    lines = [
        f"checkpoint   {result.checkpoint}",
        draw_losses(_losses(result, run), run.out / "loss.png", title, baseline, unit),
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
