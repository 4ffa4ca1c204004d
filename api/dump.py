"""The stages of a compilation as text, and as a folder of numbered files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from eggpu.compiler.pipeline import Compilation
from eggpu.compiler.schedule.show import kernel_wgsl, memory_map, plan_text
from eggpu.compiler.text import print_graph
from eggpu.report import egraph_text, kernels_text, report


def stages(compilation: Compilation) -> dict[str, str]:
    """File name to text, in the order of the pipeline. Deterministic: no times of this run."""
    out = {
        "0-trace.ir": print_graph(compilation.trace),
        "1-grad.ir": print_graph(compilation.graph),
    }
    if compilation.egraph is not None:
        out["2-egraph.txt"] = egraph_text(compilation)
    out["3-best.ir"] = "\n".join(print_graph(p.selection.graph) for p in compilation.parts)
    out["4-plan.txt"] = plan_text(compilation.plan)
    out["5-kernels.txt"] = kernels_text(report(compilation))
    out["memory.txt"] = memory_map(compilation.plan)
    return out


def write(compilation: Compilation, folder: Path) -> Path:
    """Write the stages, the report as data and one WGSL file a kernel; an older dump in the folder
    is replaced."""
    kernels = folder / "kernels"
    if kernels.is_dir():
        shutil.rmtree(kernels)
    kernels.mkdir(parents=True)
    for name, text in stages(compilation).items():
        (folder / name).write_text(text.rstrip() + "\n", encoding="utf-8")
    data = json.dumps(report(compilation).data(), indent=1)
    (folder / "report.json").write_text(data + "\n", encoding="utf-8")
    for i, kernel in enumerate(compilation.plan.kernels):
        (kernels / f"{i:03d}-{kernel.name}.wgsl").write_text(
            kernel_wgsl(compilation.plan, i), encoding="utf-8"
        )
    return folder
