"""From groups to a plan: of orders, merged kernels and images, what takes little time and fits in
memory."""

from __future__ import annotations

import math

from ..errors import CompileError
from .build import build
from .horizontal import merge as find_merged
from .images import AHEAD
from .placement import Placement, Unplaceable
from .plan import Plan
from .program import Lower, Program
from .recompute import recomputed
from .selection import Group, Selection
from .target import Target
from .times import Times

Made = tuple[tuple[Group, ...], ...]
"""For each kernel of a plan the groups that it computes; () for a kernel of a loop's body."""


def assemble(
    selection: Selection,
    target: Target,
    lower: Lower,
    merge: bool = True,
    max_memory: int | None = None,
    made: dict[int, Made] | None = None,
) -> Plan:
    """The plan of a selection; `lower` gives the kernels of a group.

    Of the selection's order, the same with donated inputs read earlier, and orders that free
    scratch early, the one that needs least memory is taken. Independent kernels of one form are
    merged where that takes little memory (with `merge`). Raises CompileError when a value is too
    large for the target, and when `max_memory` bytes are too few for a call, even where copies in
    images are made late, nothing is merged, and values are computed again instead of kept. `made`
    is given the groups of each kernel, by the id of a plan.
    """
    program = Program(selection, target, lower)
    program.made = made
    plain = _smallest(program, target)
    merged = _with_merged(program, plain, target) if merge else None
    plan = build(merged or plain)
    if max_memory is None or plan.peak_bytes <= max_memory:
        return plan
    for placement, ahead in ((merged, 1), (plain, AHEAD)) if merged else ():
        plan = build(placement, ahead)
        if plan.peak_bytes <= max_memory:
            return plan
    return _limited(plain, target, max_memory)


class TooLittleMemory(CompileError):
    """`max_memory` is too little; `least` bytes would do."""

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


def _limited(plain: Placement, target: Target, limit: int) -> Plan:
    """The plan with images copied late and values computed again, within a limit of bytes."""
    time = Times(plain.program.groups, plain.steps, target.profile.launch)
    plan = build(plain, ahead=1)
    if plan.peak_bytes <= limit:
        return plan
    fixed, least = plan.peak_bytes - sum(plan.arena), plan.peak_bytes
    budget = limit - fixed
    for _ in range(MOST_TRIES):
        program, steps = recomputed(plain.program, plain.steps, max(budget, 0), time)
        found = build(_smallest(program.ordered(steps), target), ahead=1)
        least = min(least, found.peak_bytes)
        if found.peak_bytes <= limit:
            return found
        if budget <= 0:
            break
        budget -= max(found.peak_bytes - limit, limit // 64)
    raise TooLittleMemory(
        f"{plan.name} cannot run on {target.name} with max_memory={limit} bytes: arguments, "
        f"results, constants and images take {fixed}, and the least found, with values computed "
        f"again, is {least}",
        least,
    )


MOST_TRIES = 5  # budgets that are tried for a limit


def _smallest(program: Program, target: Target) -> Placement:
    """Memory for the best order. Raises Unplaceable when no order can place what is merged."""
    found: list[Placement] = []
    refused: Unplaceable | None = None
    for order in program.orders():
        try:
            found.append(Placement(program, order, target))
        except Unplaceable as error:
            refused = error
    if not found:
        assert refused is not None
        raise refused
    given, *others = found
    best = min(others, key=lambda m: m.alive, default=given)
    return min(given, best, key=lambda m: m.nbytes)


def _with_merged(program: Program, plain: Placement, target: Target) -> Placement | None:
    """The program with all that can be merged, or only what reads little scratch, if that pays."""
    arguments = sum(v.nbytes for v in program.values if v.role == "input")
    room = (plain.nbytes + arguments) // ROOM
    profile = target.profile
    for launches in (math.inf, 1.0, 1 / 16):
        found = find_merged(program, target, launches)
        while found:
            try:
                memory = _smallest(program.merged(found), target)
            except Unplaceable as error:
                found = [step for step in found if step not in error.steps]
                continue
            grown = memory.nbytes - plain.nbytes
            saved = (len(plain.steps) - len(memory.steps)) * profile.launch
            if grown <= room or 2 * grown < saved * profile.bandwidth:
                return memory
            break
    return None


ROOM = 8  # merged kernels may add an eighth to the memory of a call, or what is written sooner
