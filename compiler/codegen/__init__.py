"""Groups to WGSL: `lower` dispatches on what a group holds; each kernel family has a module and
templates."""

from __future__ import annotations

from collections.abc import Mapping

from ..schedule.kernel import KernelSource
from ..schedule.selection import Group
from ..schedule.space import analyze
from ..schedule.target import Target
from .attention import lower_attention
from .contract import lower_contract
from .rewrite import without_windows
from .rowwise import lower_rows
from .scan import lower_scan
from .scatter import lower_scatter
from .sort import lower_sort
from .source import Job
from .update import lower_map


def lower(
    group: Group, target: Target, *, hints: Mapping[str, object] | None = None
) -> list[KernelSource]:
    """The dispatches that compute a group's outputs, in order; none where the outputs are empty.

    Raises IRError for a group that is no legal kernel, CompileError for one that is beyond the
    target's limits.
    """
    memory = {o: o for o in group.operands if o not in group.outputs}
    job = Job(group, target, memory, {}, hints or {})
    job = without_windows(job)
    analysis = analyze(job.group)
    match analysis.kind:
        case "map":
            return lower_map(job, analysis)
        case "rows":
            return lower_rows(job, analysis)
        case "contract":
            return lower_contract(job, analysis)
        case "scatter":
            return lower_scatter(job, analysis)
        case "scan":
            return lower_scan(job, analysis)
        case "sort":
            return lower_sort(job, analysis)
        case "tuple":
            return lower_attention(job, analysis)
        case _:
            raise AssertionError(analysis.kind)
