"""Rules about whole programs: what no pattern of fixed size says.

They look at the traced program. The products of one operand (query, key and value; gate and up),
products side by side (scores of keys in parts) and sums of products (the gradient of what products
share, values in parts) are found there as they were written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...ir import Kind, Node
from ...ops import broadcast, cast, concat, dot, full, iota, reshape, slice_, transpose
from ...ops import elementwise as E
from ...ops.contract import Dot
from ...ops.elementwise import ELEMENTWISE
from ...ops.move import Broadcast, Concat, Reshape, Slice, Transpose
from ...ops.scatter import ScatterAdd
from ...types import i32
from ..patterns import ProgramRule

MOST_OPERANDS = 8  # more would not fit the bindings of a kernel
FEW_ROWS = 8  # that products share too little to be one


def _independent(members: list[Node], place: dict[Node, int]) -> bool:
    """Whether no right operand needs the result of another product of the group."""
    first = min(place[m] for m in members)
    found, stack = set(members), [m.operands[1] for m in members]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in found:
            return False
        if node not in seen and place[node] > first:
            seen.add(node)
            stack.extend(node.operands)
    return True


def _users(order: Sequence[Node]) -> dict[Node, list[Node]]:
    users: dict[Node, list[Node]] = {}
    for node in order:
        for operand in node.operands:
            users.setdefault(operand, []).append(node)
    return users


def _biased(product: Node, users: dict[Node, list[Node]]) -> tuple[Node, Node] | None:
    """(product + bias, bias) where a product, perhaps reshaped, is used only there."""
    node = product
    while len(users.get(node, ())) == 1:
        (user,) = users[node]
        if isinstance(user.op, Reshape) and user.shape[-1] == product.shape[-1]:
            node = user
            continue
        if user.op is not ELEMENTWISE["add"]:
            return None
        (bias,) = [o for o in user.operands if o is not node] or [None]
        if bias is None or not isinstance(bias.op, Broadcast):
            return None
        row = bias.operands[0]
        return (user, row) if row.type.size == row.shape[-1] == product.shape[-1] else None
    return None


def wide_products(order: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    """x w1, x w2, x w3 are parts of x [w1 w2 w3]; so are they with their biases."""
    place, users = {n: i for i, n in enumerate(order)}, _users(order)
    groups: dict[Node, list[Node]] = {}
    for node in order:
        if isinstance(node.op, Dot):
            groups.setdefault(node.operands[0], []).append(node)
    for x, members in groups.items():
        if not 2 <= len(members) <= MOST_OPERANDS or not _independent(members, place):
            continue
        if math.prod(x.shape[:-1]) <= FEW_ROWS:
            continue  # to read x again costs nothing beside the matrices
        last = len(x.shape) - 1
        wide = dot(x, concat([m.operands[1] for m in members], last))
        yield from _parts(members, wide)
        biased = [_biased(m, users) for m in members]
        found = [b for b in biased if b is not None]
        if len(found) < len(members) or any(
            b[0].shape[:-1] != found[0][0].shape[:-1] for b in found
        ):
            continue
        shape = (*found[0][0].shape[:-1], wide.shape[-1])
        bias = concat([row for _, row in found], len(shape) - 1)
        yield from _parts([b for b, _ in found], reshape(wide, shape) + broadcast(bias, shape))


def _parts(members: list[Node], wide: Node) -> Iterator[tuple[Node, Node]]:
    """Each member with its columns of the wide value."""
    at = 0
    for member in members:
        start, stop = (
            (0,) * (len(wide.shape) - 1) + (at,),
            (*wide.shape[:-1], at + member.shape[-1]),
        )
        at = stop[-1]
        yield member, slice_(wide, start, stop)


def sums_of_products(order: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    """a1 b1 + a2 b2 + a3 b3 = [a1 a2 a3] [b1; b2; b3]: the sum happens inside one product."""
    users, add = _users(order), ELEMENTWISE["add"]
    for node in order:
        if node.op is not add or (len(users.get(node, ())) == 1 and users[node][0].op is add):
            continue
        terms, stack = [], [node]
        while stack:
            term = stack.pop()
            if term.op is add and (term is node or len(users[term]) == 1):
                stack.extend(reversed(term.operands))
            else:
                terms.append(term)
        products = [t for t in terms if isinstance(t.op, Dot)]
        if not 2 <= len(products) <= MOST_OPERANDS:
            continue
        last = len(node.shape) - 1
        total = dot(
            _joined([p.operands[0] for p in products], last),
            _joined([p.operands[1] for p in products], last - 1),
        )
        for term in terms:
            if not isinstance(term.op, Dot):
                total = total + term
        yield node, total


def products_side_by_side(order: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    """[x w1 | x w2 | x w3] = x [w1 w2 w3]: scores of keys in parts are those of all keys."""
    for node in order:
        if not isinstance(node.op, Concat) or node.op.axis != len(node.shape) - 1:
            continue
        parts = node.operands
        alike = all(isinstance(p.op, Dot) and p.operands[0] is parts[0].operands[0] for p in parts)
        if alike and 2 <= len(parts) <= MOST_OPERANDS:
            wide = _joined([p.operands[1] for p in parts], node.op.axis)
            yield node, dot(parts[0].operands[0], wide)


def _joined(xs: Sequence[Node], axis: int) -> Node:
    """xs one after the other: the whole where they are its parts, transposed after it is joined
    where all are."""
    first, op = xs[0], xs[0].op
    if isinstance(op, Transpose) and all(x.op == op for x in xs):
        return transpose(_joined([x.operands[0] for x in xs], op.perm[axis]), op.perm)
    if not isinstance(op, Slice) or any(
        not isinstance(x.op, Slice) or x.operands[0] is not first.operands[0] for x in xs
    ):
        return concat(xs, axis)
    whole, at = first.operands[0], 0
    for x in xs:
        start, stop = [0] * len(x.shape), list(whole.shape)
        start[axis], stop[axis] = at, at + x.shape[axis]
        at = stop[axis]
        if x is not slice_(whole, start, stop):
            return concat(xs, axis)
    return whole if at == whole.shape[axis] else concat(xs, axis)


def scatters_as_products(order: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    """Adding rows into places is a product with the places' one-hot matrix: no atomics, but rows
    times more work.
    """
    for node in order:
        if not isinstance(node.op, ScatterAdd) or node.dtype.kind != "f":
            continue
        updates, places = node.operands
        rows, count = node.op.rows, updates.shape[0]
        if not count or not node.type.size:
            continue
        p = cast(places, i32)
        p = E.select(E.lt(p, _number(0, p)), p + rows, p)
        p = E.minimum(E.maximum(p, _number(0, p)), _number(rows - 1, p))
        hits = E.eq(broadcast(reshape(p, (1, count)), (rows, count)), iota((rows, count), 0, i32))
        width = updates.type.size // count
        yield (
            node,
            reshape(dot(cast(hits, updates.dtype), reshape(updates, (count, width))), node.shape),
        )


def _number(value: int, like: Node) -> Node:
    return full(value, like.shape, like.dtype)


def expansions(order: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    """What an op's declaration says it is in other ops, such as a convolution as a product."""
    for node in order:
        expand = getattr(node.op, "expansions", None)
        if expand is not None and node.kind is not Kind.TUPLE:
            yield from ((node, form) for form in expand(*node.operands))


def constants_as_masks(order: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    """A carried array of one number is that number; one of two numbers, the second above a
    diagonal, is a choice.
    """
    for node in order:
        if node.kind is not Kind.CONSTANT or not node.type.size:
            continue
        data = node.op.evaluate()
        if (data == data.flat[0]).all():
            yield node, full(data.flat[0].item(), node.shape, node.dtype)
        elif len(node.shape) >= 2:
            yield from ((node, form) for form in _triangle(node, data))


def _triangle(node: Node, data: np.ndarray) -> Iterator[Node]:
    """A choice between the numbers below and above a diagonal, if that is all that the array is."""
    t, s = node.shape[-2:]
    matrix = data.reshape(-1, t, s)[0]
    low, high = matrix[0, -1], matrix[-1, 0]
    row, column = int((matrix[0] == high).sum()), int((matrix[:, 0] == high).sum())
    k = row - 1 if row else column - t
    below = np.tri(t, s, k, dtype=bool)
    if not (data == np.where(below, high, low)).all():
        return
    i, j = iota((t, s), 0, i32), iota((t, s), 1, i32)
    seen = broadcast(E.le(j, i + k if k else i), node.shape)
    if node.dtype.kind == "b":
        yield seen if high else E.not_(seen)
    else:
        numbers = (full(v.item(), node.shape, node.dtype) for v in (high, low))
        yield E.select(seen, *numbers)


PROGRAM_RULES = (
    ProgramRule("constant-as-mask", "masks", constants_as_masks),
    ProgramRule("wide-product", "contraction", wide_products),
    ProgramRule("sum-of-products", "contraction", sums_of_products),
    ProgramRule("products-side-by-side", "contraction", products_side_by_side),
    ProgramRule("scatter-as-product", "contraction", scatters_as_products),
    ProgramRule("expand", "contraction", expansions),
)
