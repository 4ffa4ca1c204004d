"""The ways to run one kernel that are worth timing: the best tilings by predicted cost, each as a
small plan of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from .codegen import lower
from .codegen.repeated import Repeated, structure
from .errors import CompileError
from .ir import Graph, Kind, Node, make, substitute
from .ops.leaf import Input
from .schedule.assemble import assemble
from .schedule.kernel import KernelSource
from .schedule.plan import Plan
from .schedule.selection import Group, LoopGroup, Selection, body
from .schedule.target import Target
from .schedule.verify import verify_plan

_TILED = (Kind.CONTRACT, Kind.TUPLE, Kind.REDUCE)  # kernels of these have choices


def group_key(group: Group) -> str:
    """Names what a group computes, up to the identity of what it reads."""
    operands = [o for o in group.operands if o not in group.outputs]
    text = repr(structure(group, [*operands, *body(group)], len(operands)))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def worth_timing(groups: Sequence[Group | LoopGroup], launch: float) -> dict[str, Group]:
    """The groups with a choice that take longer than two launches, once each, dearest first."""
    found: dict[str, Group] = {}
    cost: dict[str, float] = {}
    for group in groups:
        if not isinstance(group, Group) or group.predicted_ns < 2 * launch:
            continue
        if any(n.kind in _TILED for n in body(group)):
            key = group_key(group)
            found.setdefault(key, group)
            cost[key] = cost.get(key, 0.0) + group.predicted_ns
    return {key: found[key] for key in sorted(found, key=lambda k: (-cost[k], k))}


def variants(group: Group, target: Target, most: int) -> dict[int, Plan]:
    """Plans of the group alone by rank, the predicted best first (0); equal ones once."""
    graph, alone = _alone(group)
    plans: dict[int, Plan] = {}
    for rank in range(most):
        try:
            plan = assemble(
                Selection(graph, (alone,)), target, ranked({group_key(alone): rank}), merge=False
            )
            verify_plan(plan, target)
        except CompileError:
            continue
        texts = [tuple(k.wgsl for k in p.kernels) for p in plans.values()]
        if tuple(k.wgsl for k in plan.kernels) not in texts:
            plans[rank] = plan
    return plans


def ranked(ranks: Mapping[str, int]) -> Repeated:
    """Lowering with the ranks of some groups by key; others get the predicted best."""

    def of(group: Group, target: Target) -> list[KernelSource]:
        rank = ranks.get(group_key(group), 0) if ranks else 0
        return lower(group, target, hints={"rank": rank})

    return Repeated(of)


def _alone(group: Group) -> tuple[Graph, Group]:
    """A program that computes the group's outputs from inputs, and its one group."""
    given = [o for o in group.operands if o not in group.outputs and o.kind is not Kind.CONSTANT]
    inputs: dict[Node, Node] = {
        o: make(Input(k, f"in{k}", o.shape, o.dtype.name)) for k, o in enumerate(given)
    }
    outputs = tuple(substitute(group.outputs, inputs))
    operands = tuple(inputs.get(o, o) for o in group.operands if o not in group.outputs)
    graph = Graph("kernel", tuple(inputs.values()), outputs)
    return graph, Group(outputs, operands, group.predicted_ns)
