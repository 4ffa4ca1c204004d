"""Einstein summation: subscripts to movement, reductions and batched products."""

from __future__ import annotations

import math

from ..errors import ShapeMismatch
from ..ir import Node
from ..ops import broadcast, cast, dot, reduce, reshape, slice_, transpose
from ..ops import elementwise as E
from ..tracing import Array
from .convert import Value, promoted, wrap


def einsum(subscripts: str, *operands: Value) -> Array:
    """NumPy's einsum: repeated letters within an operand take the diagonal, `...` broadcasts, a
    missing output is implied.

    More than two operands are contracted from the left.
    """
    text = subscripts.replace(" ", "")
    nodes = promoted("einsum", list(operands))
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(nodes):
        raise ShapeMismatch(
            f"einsum {subscripts!r} has {len(terms)} terms for {len(nodes)} operands"
        )
    terms, extra = _without_ellipsis(subscripts, terms, nodes)
    if arrow:
        output = right.replace("...", extra)
    else:
        letters = "".join(terms)
        output = extra + "".join(
            sorted(c for c in set(letters) - set(extra) if letters.count(c) == 1)
        )
    sizes = _sizes(subscripts, terms, nodes)
    if len(set(output)) != len(output) or any(c not in sizes for c in output):
        raise ShapeMismatch(
            f"einsum {subscripts!r}: the output {output!r} needs letters of the operands, each once"
        )
    parts = [_spread(*_diagonal(t, n), sizes) for t, n in zip(terms, nodes, strict=True)]
    term, value = parts[0]
    for k, (other_term, other) in enumerate(parts[1:], 1):
        keep = set(output).union(*(t for t, _ in parts[k + 1 :]))
        term, value = _pair(term, value, other_term, other, keep, sizes)
    term, value = _summed(term, value, set(output))
    return wrap(_arranged(term, value, output))


def _without_ellipsis(
    subscripts: str, terms: list[str], nodes: list[Node]
) -> tuple[list[str], str]:
    free = [
        c for c in "ZYXWVUTSRQPONMLKJIHGFEDCBAzyxwvutsrqponmlkjihgfedcba" if c not in subscripts
    ]
    most = max(
        (
            len(n.shape) - len(t.replace("...", ""))
            for t, n in zip(terms, nodes, strict=True)
            if "..." in t
        ),
        default=0,
    )
    extra = "".join(free[:most])
    out = []
    for t, n in zip(terms, nodes, strict=True):
        count = len(n.shape) - len(t.replace("...", ""))
        if count < 0 or (count and "..." not in t):
            raise ShapeMismatch(f"einsum {subscripts!r}: the term {t!r} does not fit {n.type}")
        out.append(t.replace("...", extra[most - count :]))
    return out, extra


def _sizes(subscripts: str, terms: list[str], nodes: list[Node]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for t, n in zip(terms, nodes, strict=True):
        for letter, size in zip(t, n.shape, strict=True):
            known = sizes.get(letter, 1)
            if size not in (1, known) and known != 1:
                raise ShapeMismatch(f"einsum {subscripts!r}: {letter!r} is both {known} and {size}")
            sizes[letter] = size if known == 1 else known
    return sizes


def _diagonal(term: str, n: Node) -> tuple[str, Node]:
    """Repeated letters of one operand: every (size + 1)-th element of the two axes laid out
    flat."""
    for letter in dict.fromkeys(term):
        while term.count(letter) > 1:
            a = term.index(letter)
            b = term.index(letter, a + 1)
            size = n.shape[a]
            if n.shape[b] != size:
                raise ShapeMismatch(
                    f"einsum: {letter!r} is twice in {term!r}, with lengths {size} and {n.shape[b]}"
                )
            rest = [k for k in range(len(term)) if k not in (a, b)]
            lead = tuple(n.shape[k] for k in rest)
            flat = reshape(transpose(n, (*rest, a, b)), (*lead, size * size))
            n = slice_(flat, (0,) * len(flat.shape), flat.shape, (*(1,) * len(lead), size + 1))
            term = "".join(term[k] for k in rest) + letter
    return term, n


def _spread(term: str, n: Node, sizes: dict[str, int]) -> tuple[str, Node]:
    return term, broadcast(n, tuple(sizes[c] for c in term))


def _summed(term: str, n: Node, keep: set[str]) -> tuple[str, Node]:
    axes = tuple(k for k, c in enumerate(term) if c not in keep)
    out = reduce("sum", n, axes)
    return "".join(c for c in term if c in keep), reshape(
        out, tuple(d for k, d in enumerate(out.shape) if k not in axes)
    )


def _arranged(term: str, n: Node, wanted: str) -> Node:
    return transpose(n, tuple(term.index(c) for c in wanted))


def _pair(
    a: str, x: Node, b: str, y: Node, keep: set[str], sizes: dict[str, int]
) -> tuple[str, Node]:
    a, x = _summed(a, x, keep | set(b))
    b, y = _summed(b, y, keep | set(a))
    batch = "".join(c for c in a if c in b and c in keep)
    inner = "".join(c for c in a if c in b and c not in keep)
    rows = "".join(c for c in a if c not in b)
    columns = "".join(c for c in b if c not in a)

    def size(letters: str) -> int:
        return math.prod(sizes[c] for c in letters)

    shape = tuple(sizes[c] for c in batch)
    left = reshape(_arranged(a, x, batch + rows + inner), (*shape, size(rows), size(inner)))
    right = reshape(_arranged(b, y, batch + inner + columns), (*shape, size(inner), size(columns)))
    if not inner and (not rows or not columns):  # nothing is summed: a product of elements
        full = (*shape, size(rows), size(columns))
        left = broadcast(left, full)
        right = broadcast(reshape(right, (*shape, 1, size(columns))), full)
        out = left * right if x.dtype.kind != "b" else cast(E.and_(left, right), x.dtype)
    else:
        out = dot(left, right)
    return batch + rows + columns, reshape(out, tuple(sizes[c] for c in batch + rows + columns))
