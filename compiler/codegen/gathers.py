"""Loads of four neighbours that are no vec4 in memory.

Of rows whose length is no multiple of four, neighbouring elements may lie in two of them: what has
a value a row is loaded once for the first and once for the last of the four, and where the next row
begins is found by one division instead of four.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..index import Atom, Div, Index, Mod, Var, index, variable
from ..ir import Node
from .expression import loaded, scalar_access
from .statements import LANE, LANES
from .wgsl import storage_type

if TYPE_CHECKING:
    from .emitter import Access, Emitter
    from .statements import Value


def gathered(em: Emitter, node: Node, flat: Index, k: int, access: Access) -> Value:
    """The node's elements at `flat` for the four values of the lane variable, or of other vectors,
    from binding k."""
    moving = _moving(flat) if _vectors(em, flat) == {LANE} else None
    if moving is not None and isinstance(moving, Div):
        return _of_two(em, node, flat, k, access, moving)
    if moving is not None:
        coefficient = dict(flat.terms)[moving]
        flat = flat + (_wrapped(em, moving) - Index(((moving, 1),))) * coefficient
    places = _places(em, flat)
    items = ", ".join(scalar_access(k, place.text) for place in places)
    text = loaded(f"{storage_type(access.dtype, True)}({items})", access.dtype, True)
    return em.let((node, flat), "load", text, max(p.depth for p in places), True)


def _vectors(em: Emitter, flat: Index) -> set[str]:
    return {v for v in flat.variables if em.variables[v].vector}


def _places(em: Emitter, flat: Index) -> list[Value]:
    """The indexes of the four elements."""
    if _vectors(em, flat) == {LANE}:
        return [em.index(flat.substitute({LANE: index(c)})) for c in range(4)]
    at = em.index(flat)
    return [at.part(c) for c in range(4)]


def _moving(flat: Index) -> Div | Mod | None:
    """The one quotient or remainder that depends on the lane, whose steps are 1 and which begins
    anew at most once among four; None if there is more."""
    found = [atom for atom, _ in flat.terms if _depends(atom)]
    if len(found) != 1 or isinstance(found[0], Var):
        return None
    atom = found[0]
    return atom if atom.base.coefficient(LANE) == 1 and atom.by >= 4 and atom.base.lo >= 0 else None


def _depends(atom: Atom) -> bool:
    return atom.name == LANE if isinstance(atom, Var) else LANE in atom.base.variables


def _of_two(em: Emitter, node: Node, flat: Index, k: int, access: Access, row: Div) -> Value:
    """What the first and the last of the four have, each where it belongs."""
    ends = [em.index(flat.substitute({LANE: index(c)})) for c in (0, 3)]
    scalar, kind = storage_type(access.dtype, False), storage_type(access.dtype, True)
    first, last = (
        em.let((node, flat, c), "load", f"{scalar}({scalar_access(k, at.text)})", at.depth, False)
        for c, at in zip((0, 3), ends, strict=True)
    )
    inside = _inside(em, row)
    text = f"select({kind}({last.text}), {kind}({first.text}), {inside.text})"
    depth = max(first.depth, last.depth, inside.depth)
    return em.let((node, flat), "load", loaded(text, access.dtype, True), depth, True)


def _inside(em: Emitter, row: Div | Mod) -> Value:
    """Which of the four are in the first one's row."""
    known = em.known(("inside", row.base, row.by))
    if known is not None:
        return known
    at = _from_begin(em, row)
    text = f"{at.text} < vec4<u32>({row.by}u)"
    return em.let(("inside", row.base, row.by), "inside", text, at.depth, True)


def _from_begin(em: Emitter, row: Div | Mod) -> Value:
    """How far the four are from where the first one's row begins."""
    key = ("from begin", row.base, row.by)
    known = em.known(key)
    if known is not None:
        return known
    start = em.index(row.base.substitute({LANE: index(0)}) % row.by)
    return em.let(key, "at", f"{start.text} + {LANES}", start.depth, True)


def _wrapped(em: Emitter, column: Mod) -> Index:
    """The four remainders, as a variable."""
    key = ("wrapped", column.base, column.by)
    found = em.known(key)
    if found is None:
        at, inside = _from_begin(em, column), _inside(em, column)
        by, depth = f"vec4<u32>({column.by}u)", max(at.depth, inside.depth)
        found = em.let(
            key, "rem", f"select({at.text} - {by}, {at.text}, {inside.text})", depth, True
        )
        em.variables[found.text] = found
    return variable(found.text, column.by)
