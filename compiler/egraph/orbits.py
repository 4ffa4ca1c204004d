"""Orbits: classes that look alike in the e-graph, such as one place in all layers of a model."""

from __future__ import annotations

from .graph import Problem

HUB = 12  # a class with more readers says nothing about each of them


def colors(p: Problem, rounds: int = 3) -> list[int]:
    """A color a class, refined by the e-nodes below and the readers above; alike are equal colors.

    The names of inputs and the contents of constants do not count, only their types. With more
    rounds than these the layers next to the ends of a model, whose residual paths are short, are
    told from the others, and each is searched on its own for nothing.
    """
    number: dict[object, int] = {}

    def intern(key: object) -> int:
        return number.setdefault(key, len(number))

    roots, types = set(p.roots), p.snapshot.types
    color = [-1] * p.classes
    readers: dict[int, list[tuple[int, int, int]]] = {}
    for c in p.live:
        labels = tuple(sorted({p.label[n] for n in p.candidates[c]}))
        color[c] = intern((c in roots, types[c], labels))
        for n in p.candidates[c]:
            for place, k in enumerate(p.kids[n]):
                readers.setdefault(k, []).append((p.label[n], place, c))
    distinct = 0
    for _ in range(rounds):
        new = [-1] * p.classes
        for c in p.live:
            below = tuple(
                sorted({(p.label[n], *[color[k] for k in p.kids[n]]) for n in p.candidates[c]})
            )
            users = readers.get(c, ())
            above = (
                tuple(sorted((op, place, color[u]) for op, place, u in users))
                if len(users) <= HUB
                else ()
            )
            new[c] = intern((color[c], below, above))
        color = new
        found = len({color[c] for c in p.live})
        if found == distinct:
            break
        distinct = found
    return color
