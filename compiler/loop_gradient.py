"""The gradient of a loop: the same loop once more, which keeps what the gradient reads, and one
that runs back.

The loop that runs back carries the cotangents of the carries, and sums those of values that every
run sees. A cotangent that is a product, or the sum of what is kept anyway, is not summed run by
run: one product over all the rows gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .ir import Kind, Node, make, substitute, topological
from .loops import Body, enclose, marks
from .ops import concat, dot, full, reduce, reshape, slice_, transpose
from .ops.elementwise import ELEMENTWISE
from .ops.loop import Loop, loop
from .ops.move import Reshape, Transpose
from .ops.reduce import Reduce

Vjp = Callable[[Sequence[Node], Sequence[Node], Sequence[Node]], list[Node]]

# Values that cost nothing to compute again from what they read.
_CHEAP = (Kind.ELEMENTWISE, Kind.MOVE, Kind.LITERAL, Kind.IOTA, Kind.CONSTANT)
_ADD, _BARRIER = ELEMENTWISE["add"], ELEMENTWISE["barrier"]


def loop_vjp(node: Node, cotangents: Sequence[Node | None], vjp: Vjp) -> list[Node | None]:
    """The cotangents of a loop's operands, from those of its results; `vjp` is of nodes."""
    return _Gradient(node, cotangents, vjp).parts()


def _floats(nodes: Sequence[Node]) -> list[int]:
    return [k for k, n in enumerate(nodes) if n.dtype.kind == "f"]


def is_zero(node: Node) -> bool:
    """Whether a value is the number 0, repeated."""
    while node.kind is Kind.MOVE and len(node.operands) == 1:
        node = node.operands[0]
    return node.kind is Kind.LITERAL and not node.op.evaluate()


@dataclass
class _Kept:
    """Forward values that the gradient reads, and rows that it hands out: the stacks behind nodes
    of a body.
    """

    stacks: dict[Node, Node] = field(default_factory=dict[Node, Node])  # known before it runs
    given: dict[Node, int] = field(default_factory=dict[Node, int])  # rows of its results

    def want(self, node: Node) -> None:
        """Have the stack of a node once the loop that runs back has run."""
        base = _base(node)
        if base not in self.stacks:
            self.given.setdefault(base, len(self.given))

    def has(self, node: Node) -> bool:
        base = _base(node)
        return base in self.stacks or base in self.given

    def stack(self, node: Node, results: Sequence[Node]) -> Node:
        """The stack of a node's values; `results` are the rows that were asked for."""
        if node in self.stacks:
            return self.stacks[node]
        if node in self.given:
            return results[self.given[node]]
        below = self.stack(node.operands[0], results)
        match node.op:
            case Transpose(perm=perm):
                return transpose(below, (0, *(k + 1 for k in perm)))
            case _:
                return reshape(below, (below.shape[0], *node.shape))


def _base(node: Node) -> Node:
    while isinstance(node.op, (Transpose, Reshape)):
        node = node.operands[0]
    return node


class _Gradient:
    """One loop, its cotangents, and the loop that runs back."""

    def __init__(self, node: Node, cotangents: Sequence[Node | None], vjp: Vjp) -> None:
        assert isinstance(node.op, Loop)
        self.op, self.operands = node.op, node.operands
        self.seen, self.carried, self.rows = self.op.parts(self.op.body.inputs)
        self.outputs = self.op.body.outputs
        self.last = [None if c is None or is_zero(c) else c for c in cotangents]
        self.seen_f, self.rows_f = _floats(self.seen), _floats(self.rows)
        self.carried_f = _floats(self.carried)
        self.row_cts = [
            k
            for k in range(self.op.carries, len(self.outputs))
            if self.outputs[k].dtype.kind == "f" and self.last[k] is not None
        ]
        self.vjp = vjp
        self.kept = _Kept()

    def parts(self) -> list[Node | None]:
        ct_carried = marks([self.carried[k].type for k in self.carried_f])
        ct_rows = marks([self.outputs[k].type for k in self.row_cts])
        wrt = [
            *(self.seen[k] for k in self.seen_f),
            *(self.carried[k] for k in self.carried_f),
            *(self.rows[k] for k in self.rows_f),
        ]
        after = [self.outputs[k] for k in (*self.carried_f, *self.row_cts)]
        grads = self.vjp(after, [*ct_carried, *ct_rows], wrt)
        for_seen = grads[: len(self.seen_f)]
        for_carried = grads[len(self.seen_f) : len(self.seen_f) + len(self.carried_f)]
        for_rows = grads[len(self.seen_f) + len(self.carried_f) :]
        self._keep(grads, {*ct_carried, *ct_rows})
        for k, ct in zip(self.row_cts, ct_rows, strict=True):
            stack = self.last[k]
            assert stack is not None
            self.kept.stacks[ct] = stack
        for grad in for_rows:
            if not is_zero(grad):
                self.kept.want(grad)
        sums = [_Sum(grad, self.kept) for grad in for_seen]
        return self._run_back(ct_carried, for_carried, for_rows, sums)

    def _keep(self, grads: Sequence[Node], cotangents: set[Node]) -> None:
        """Have the forward loop keep what the gradients read of it: carries, rows and what is dear
        to compute again.
        """
        forward = _forward(grads, cotangents, set(topological(self.outputs)))
        wanted, found = set(grads), dict[Node, None]()
        known = {*self.seen, *self.rows}
        for node in reversed(topological(grads)):
            if node not in wanted or node in known or node in cotangents:
                continue
            if node in self.carried or (node in forward and node.kind not in _CHEAP):
                found[node] = None
            else:
                wanted.update(node.operands)
        inside = _dependent(grads, {*self.carried, *self.rows})
        saved = [n for n in reversed(found) if n in inside]
        handed = {n: row for n in saved if (row := self._row_after(n)) is not None}
        saved = [n for n in saved if n not in handed]
        body = self.op.body.replace(outputs=(*self.outputs, *saved))
        results = loop(self.op.with_bodies([body]), self.operands)
        stacks = self.op.parts(self.operands)[2]
        self.kept.stacks |= dict(zip(saved, results[len(self.outputs) :], strict=True))
        self.kept.stacks |= {n: self._shifted(n, results[row]) for n, row in handed.items()}
        self.kept.stacks |= dict(zip(self.rows, stacks, strict=True))

    def _row_after(self, node: Node) -> int | None:
        """The result whose rows are what a carry is after each run, if the loop gives them."""
        if node not in self.carried:
            return None
        after = self.outputs[self.carried.index(node)]
        rows = self.outputs[self.op.carries :]
        return self.op.carries + rows.index(after) if after in rows else None

    def _shifted(self, node: Node, after: Node) -> Node:
        """The stack of a carry before each run, from what it is after each run."""
        init = self.op.parts(self.operands)[1][self.carried.index(node)]
        first, count = reshape(init, (1, *init.shape)), self.op.count
        zeros = (0,) * len(init.shape)
        if self.op.reverse:
            return concat([slice_(after, (1, *zeros), (count, *init.shape)), first], 0)
        return concat([first, slice_(after, (0, *zeros), (count - 1, *init.shape))], 0)

    def _run_back(
        self,
        ct_carried: Sequence[Node],
        for_carried: Sequence[Node],
        for_rows: Sequence[Node],
        sums: Sequence[_Sum],
    ) -> list[Node | None]:
        kept = self.kept
        seen = self.op.parts(self.operands)[0]
        added = [s.total for s in sums if s.total is not None]
        totals = marks([n.type for n in added])
        summed = [t + n for t, n in zip(totals, added, strict=True)]
        rows = marks([n.type for n in kept.stacks])
        carries = [*ct_carried, *totals]
        new: Mapping[Node, Node] = {
            **dict(zip(self.seen, seen, strict=True)),
            **dict(zip(kept.stacks, rows, strict=True)),
        }
        outputs = substitute([*for_carried, *summed, *kept.given], new)
        init = [self.last[k] or _zeros(self.carried[k]) for k in self.carried_f]
        init += [_zeros(t) for t in totals]
        body = Body(f"{self.op.body.name}_back", carries, rows, outputs)
        results = enclose(
            body, init, list(kept.stacks.values()), self.op.count, not self.op.reverse
        )
        at = len(ct_carried)
        total = iter(results[at : at + len(totals)])
        given = results[at + len(totals) :]
        parts: list[Node | None] = [None] * len(self.operands)
        for k, s in zip(self.seen_f, sums, strict=True):
            parts[k] = s.value(None if s.total is None else next(total), given)
        for j, k in enumerate(self.carried_f):
            parts[len(self.seen) + k] = results[j]
        first = len(self.seen) + len(self.carried)
        for k, grad in zip(self.rows_f, for_rows, strict=True):
            parts[first + k] = None if is_zero(grad) else kept.stack(grad, given)
        return parts


def _zeros(node: Node) -> Node:
    return full(0, node.shape, node.dtype)


def _dependent(roots: Sequence[Node], on: set[Node]) -> set[Node]:
    """The nodes under `roots` that depend on some nodes, these included."""
    found = set(on)
    for node in topological(roots):
        if any(o in found for o in node.operands):
            found.add(node)
    return found


def _forward(grads: Sequence[Node], cotangents: set[Node], traced: set[Node]) -> set[Node]:
    """The nodes under the gradients that the forward loop can keep.

    Those behind a barrier of the gradient's own are to be computed a second time.
    """
    order = topological(grads)
    again = {n for n in order if n.op is _BARRIER and n not in traced}
    late = _dependent(grads, cotangents | again)
    return {n for n in order if n not in late}


# sums over the runs


class _Sum:
    """The cotangent of a value that every run sees, summed over the runs: `total` is what is added
    run by run.
    """

    def __init__(self, grad: Node, kept: _Kept) -> None:
        self.kept = kept
        self.products: list[tuple[list[Node], Node]] = []  # movement on top, and what is summed
        self.total: Node | None = None
        for term in _terms(grad):
            above, core = _unwrapped(term)
            if core.kind is Kind.CONTRACT:
                for operand in core.operands:
                    kept.want(operand)
                self.products.append((above, core))
            elif _is_sum(core) and kept.has(core.operands[0]):
                self.products.append((above, core))
            elif not is_zero(term):
                self.total = term if self.total is None else self.total + term

    def value(self, total: Node | None, results: Sequence[Node]) -> Node | None:
        """The sum, from what was added run by run and from the stacks of the rest."""
        for above, core in self.products:
            part = self._over_rows(core, results)
            for node in reversed(above):
                part = make(node.op, part)
            total = part if total is None else total + part
        return total

    def _over_rows(self, core: Node, results: Sequence[Node]) -> Node:
        stacks = [self.kept.stack(o, results) for o in core.operands]
        if core.kind is not Kind.CONTRACT:
            (x,) = stacks
            axes = core.op.attributes()["axes"]
            return reshape(reduce("sum", x, (0, *(k + 1 for k in axes))), core.shape)
        # the sum over rows t of a_t b_t is one product over (t, k)
        a, b = stacks
        rank = len(core.shape)
        (*batch, m, k), n = core.operands[0].shape, core.shape[-1]
        rows = (a.shape[0] * k,)
        a = reshape(transpose(a, (*range(1, rank), 0, rank)), (*batch, m, *rows))
        b = reshape(transpose(b, (*range(1, rank - 1), 0, rank - 1, rank)), (*batch, *rows, n))
        return dot(a, b)


def _terms(node: Node) -> list[Node]:
    """What a sum adds up."""
    if node.op is _ADD:
        return [t for o in node.operands for t in _terms(o)]
    return [node]


def _unwrapped(node: Node) -> tuple[list[Node], Node]:
    """(transposes and reshapes on top, the first node that is none)."""
    above: list[Node] = []
    while isinstance(node.op, (Transpose, Reshape)):
        above.append(node)
        node = node.operands[0]
    return above, node


def _is_sum(node: Node) -> bool:
    return isinstance(node.op, Reduce) and node.op.combine == "sum"
