"""A snapshot in which named kernels are forced: what they can compute has no other e-nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir import Kind
from ..ops.move import Reshape
from ..rule import RuleError
from .language import families
from .snapshot import Snapshot


def forceable() -> set[str]:
    """The names of kernels that rules make and that may be forced."""
    kinds = [f for f in families().values() if f.kind is Kind.TUPLE]
    return {f.cls.name for f in kinds if isinstance(f.cls.name, str)}  # type: ignore[comparison-overlap]


def validate_forced(names: Sequence[str]) -> None:
    """Raise RuleError for a name that no kernel has."""
    known = forceable()
    for name in names:
        if name not in known:
            raise RuleError(f"force names {name!r}, which is none of {', '.join(sorted(known))}")


def forced_to(snapshot: Snapshot, names: Sequence[str]) -> Snapshot:
    """The snapshot with the named ops' e-nodes only in the classes that they can compute. Classes
    that none of them can compute stay as they are."""
    if not names:
        return snapshot
    rows = range(len(snapshot.ops))
    makers = {snapshot.cls[i] for i in rows if snapshot.ops[i].name in names}
    kept = {i for i in rows if snapshot.ops[i].kind is Kind.GET and snapshot.kids[i][0] in makers}
    forced = {snapshot.cls[i] for i in kept}
    # heads that are grouped come back to their shape by a reshape
    kept |= {
        i for i in rows if isinstance(snapshot.ops[i], Reshape) and snapshot.kids[i][0] in forced
    }
    left = [
        i for i in rows
        if (i in kept or snapshot.cls[i] not in forced)
        and (snapshot.cls[i] not in makers or snapshot.ops[i].name in names)
    ]  # fmt: skip
    return replace(
        snapshot,
        ops=[snapshot.ops[i] for i in left],
        kids=[snapshot.kids[i] for i in left],
        cls=[snapshot.cls[i] for i in left],
        rule=[snapshot.rule[i] for i in left],
    )
