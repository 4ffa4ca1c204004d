"""What all rows of a product's tile need in a column, such as a bias, or that all elements need:
loaded once, and kept in private variables while results are stored.

llvmpipe would load it for each row again, since a store before might have changed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..index import Index
from ..ir import Node
from .wgsl import wgsl_type

if TYPE_CHECKING:
    from .emitter import Emitter
    from .statements import Value

AXES = ("batch", "m", "n")
_COLUMNS = frozenset({"batch", "n", "quad", "lane4"})  # the variables of what has no rows


@dataclass(slots=True)
class Held:
    """The loads, by operand and position, and the private variables of what they find."""

    loads: dict[tuple[Node, Index], str] = field(default_factory=dict[tuple[Node, Index], str])

    def name(self, node: Node, flat: Index) -> str | None:
        """The variable that holds the operand's elements; None where these depend on the row."""
        if not flat.variables <= _COLUMNS:
            return None
        return self.loads.setdefault((node, flat), f"held_{len(self.loads)}")

    def function(self, emitter: Emitter, extents: Sequence[int]) -> None:
        """Adds `hold(batch, n)`, which loads it all for a product of these extents."""
        from .contract import coordinates, function_text

        em = emitter.child()
        coordinates(em, AXES, extents, 2)
        lines: list[str] = []
        for (node, flat), name in self.loads.items():
            value: Value = em.load(node, flat)
            lines.append(f"var<private> {name}: {wgsl_type(node.dtype, value.vector)};")
            em.line(f"{name} = {value.text};")
        text = function_text("hold(batch: u32, n: u32)", em)
        emitter.functions["hold"] = "\n".join([*lines, text])
