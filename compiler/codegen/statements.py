"""WGSL statements in nested blocks, and symbolic indexes as their values.

Each value is one `let`, made once, in the outermost block where all that it needs is known: what
does not depend on a loop's variable stands before the loop. Along a lane variable four neighbouring
elements are one vec4.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..index import Atom, Div, Index, Mod, Var, variable
from .expression import sum_text

LANE = "lane4"
"""The variable along which values are vec4."""
V = variable(LANE, 4)
LANES = "vec4<u32>(0u, 1u, 2u, 3u)"
"""Its values."""


@dataclass(frozen=True, slots=True)
class Value:
    """An expression that may be repeated at no cost (a name or a number), and the depth of the
    block that it needs."""

    text: str
    vector: bool = False
    depth: int = 0
    constant: bool = False

    def part(self, k: int) -> Value:
        """Element k of a vector."""
        return Value(f"{self.text}.{'xyzw'[k]}", depth=self.depth)


@dataclass(slots=True)
class Block:
    lines: list[str] = field(default_factory=list[str])
    values: dict[object, Value] = field(default_factory=dict[object, Value])


class Statements:
    """The statements of one function, in the block that is open and those around it."""

    def __init__(self) -> None:
        self.blocks = [Block()]
        self.variables: dict[str, Value] = {LANE: Value(LANES, vector=True)}
        self.sharing = False  # equal texts are one value
        self._names = 0

    # ---- blocks

    @property
    def depth(self) -> int:
        return len(self.blocks) - 1

    @contextmanager
    def block(self, opening: str) -> Generator[None]:
        """Statements within stand in `opening { ... }`; what they can share with later blocks is
        put before it."""
        self.blocks.append(Block())
        yield
        inner = self.blocks.pop()
        self.line(f"{opening} {{", *inner.lines, "}")

    def line(self, *lines: str) -> None:
        self.blocks[-1].lines += lines

    def variable(
        self, name: str, size: int, text: str | None = None, vector: bool = False
    ) -> Index:
        """The WGSL name `name`, a u32 in [0, size), as an index; with `text`, defined here."""
        if text is not None and size > 1:
            self.line(f"let {name} = {text};")
        self.variables[name] = Value(name, vector, self.depth)
        return variable(name, size)

    def fresh(self, prefix: str) -> str:
        self._names += 1
        return f"{prefix}_{self._names}"

    def let(self, key: object, prefix: str, text: str, depth: int, vector: bool) -> Value:
        """`text` under a new name, remembered under `key` while its block lasts."""
        if self.sharing:
            same = self.known(("text", text))
            if same is not None:
                self.blocks[same.depth].values[key] = same
                return same
        value = Value(self.fresh(prefix), vector, depth)
        self.blocks[depth].lines.append(f"let {value.text} = {text};")
        self.blocks[depth].values[key] = value
        if self.sharing:
            self.blocks[depth].values["text", text] = value
        return value

    def known(self, key: object) -> Value | None:
        for block in self.blocks:
            if key in block.values:
                return block.values[key]
        return None

    @property
    def text(self) -> str:
        assert self.depth == 0
        return "\n".join(self.blocks[0].lines)

    # ---- indexes

    def index(self, at: Index) -> Value:
        """A symbolic index as a u32 expression, vec4<u32> where it depends on a vector variable."""
        if not at.terms:
            return Value(f"{at.constant % 2**32}u", constant=True)
        if len(at.terms) == 1 and at.constant == 0 and at.terms[0][1] == 1:
            return self._atom(at.terms[0][0])
        known = self.known(at)
        if known is not None:
            return known
        terms = [(self._atom(a), c) for a, c in at.terms]
        plain = sum_text([(t.text, c) for t, c in terms if not t.vector], at.constant)
        depth = max(t.depth for t, _ in terms)
        lanes = [(t.text, c) for t, c in terms if t.vector]
        if not lanes:
            return self.let(at, "at", plain, depth, False)
        wide = sum_text([(t, c) for t, c in lanes], 0, vector=True)
        text = wide if plain == "0u" else f"vec4<u32>({plain}) + {wide}"
        return self.let(at, "at", text, depth, True)

    def _atom(self, atom: Atom) -> Value:
        if isinstance(atom, Var):
            return self.variables[atom.name]
        known = self.known(atom)
        if known is not None:
            return known
        # u32 has no negative numbers: shift the base by a multiple of the divisor
        shift = -(atom.base.lo // atom.by) if atom.base.lo < 0 else 0
        base = self.index(atom.base + shift * atom.by)
        by, power = atom.by, atom.by & (atom.by - 1) == 0

        def splat(text: str) -> str:
            return f"vec4<u32>({text})" if base.vector else text

        match atom:
            case Mod() if power:
                text, prefix = f"{base.text} & {splat(f'{by - 1}u')}", "rem"
            case Mod():
                quotient = self._atom(Div(atom.base + shift * atom.by, by))
                text, prefix = f"{base.text} - {quotient.text} * {splat(f'{by}u')}", "rem"
            case _:
                text = (
                    f"{base.text} >> {splat(f'{by.bit_length() - 1}u')}"
                    if power
                    else f"{base.text} / {splat(f'{by}u')}"
                )
                text, prefix = (f"({text}) - {splat(f'{shift}u')}" if shift else text), "quo"
        return self.let(atom, prefix, text, base.depth, base.vector)

    def is_vector(self, flat: Index) -> bool:
        """Whether an index has four values, one a lane."""
        return any(self.variables[v].vector for v in flat.variables)
