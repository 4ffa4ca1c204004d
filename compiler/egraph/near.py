"""Near misses: attention that the program almost is, and what kept it from being found or chosen.

Before extraction the traced program is asked why a softmax before a product has no attention in its
class; after it, which attention was possible and what else uses the values that it would not store.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..ir import Graph, Kind, Node, Op
from ..ops.contract import Dot
from ..ops.elementwise import Elementwise
from ..ops.fused import Attention, AttentionBackward, AttentionBase, Get
from ..ops.move import Reshape
from ..ops.reduce import Reduce
from ..schedule.selection import Selection
from .outcome import ExtractionReport
from .report import EGraphReport
from .rules.named import WEIGHTS
from .snapshot import Snapshot
from .terms import Class, Frozen

DEPTH = 6  # elementwise steps that are looked through
_KERNELS = (Attention, AttentionBackward)
HIDDEN = -1e9  # the number at and below which a score does not count


@dataclass(frozen=True, slots=True)
class NearMiss:
    """`what` ("attention" or its "backward") was not formed at the user's line `at`, and why."""

    what: str
    at: str
    why: str

    def __str__(self) -> str:
        where = f" at {self.at}" if self.at else ""
        return f"{self.what} not formed{where}: {self.why}"


@dataclass(frozen=True, slots=True)
class Possible:
    """A fused kernel that is in the e-graph: the class of its result, and who else needs what it
    would not store.
    """

    what: str
    cls: int
    at: str
    uses: str


@dataclass(slots=True)
class _Program:
    """The traced program by e-class."""

    frozen: Frozen
    graph: Graph
    of: Mapping[Node, Class]
    left_out: Sequence[str] = ()  # rules about attention
    stop: str = "saturated"
    readers: dict[Class, list[Node]] = field(default_factory=dict)
    nodes: dict[Class, list[Node]] = field(default_factory=dict)
    stones: dict[str, set[Class]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node, cls in self.of.items():
            self.nodes.setdefault(cls, []).append(node)
            for operand in dict.fromkeys(node.operands):
                if operand in self.of:
                    self.readers.setdefault(self.of[operand], []).append(node)
        for name, rows in self.frozen.named.items():
            self.stones[name] = {cls for _, cls in rows}

    def line(self, *nodes: Node) -> str:
        return next((at for n in nodes if (at := self.graph.sources.get(n, ""))), "")

    def uses(self, cls: Class, ours: set[Node]) -> str:
        """Who needs a value besides `ours`: what is returned, or read at a line; "" for nobody."""
        if any(self.of.get(o) == cls for o in self.graph.outputs):
            return "also returned"
        for reader in self.readers.get(cls, ()):
            if reader in ours:
                continue
            if isinstance(reader.op, Reshape):
                found = self.uses(self.of[reader], ours)
                if found:
                    return found
                continue
            at = self.line(reader)
            return f"also used by {_label(reader.op)}" + (f" at {at}" if at else "")
        return ""


def look(
    frozen: Frozen,
    order: Sequence[Node],
    graph: Graph,
    number: Mapping[Node, int],
    left_out: Sequence[str] = (),
    stop: str = "saturated",
) -> tuple[list[NearMiss], list[Possible]]:
    """What the e-graph does not hold, and what it holds and extraction may not choose. `order` are
    the traced nodes, `number` their classes in the snapshot, `left_out` the rules about attention
    that were not used, `stop` why saturation ended.
    """
    of = {n: frozen.nodes[i] for i, n in enumerate(order)}
    p = _Program(frozen, graph, of, left_out, stop)
    formed = attention_results(frozen)
    missed: dict[NearMiss, None] = {}
    possible: list[Possible] = []
    weights = set[Class]().union(*(p.stones[name] for name in WEIGHTS))
    softmax = {cls: kids[0] for s in ("Softmax", "SafeSoftmax") for kids, cls in frozen.named[s]}
    for cls, x in softmax.items():
        products = [n for n in p.readers.get(cls, ()) if _reads(n, p.nodes.get(cls, ()))]
        if products and cls in weights:
            found = [n for n in products if p.of[n] in formed]
            possible += [_possible(p, n, cls, x, number[n]) for n in found[:1] if n in number]
            if not found:
                missed[NearMiss("attention", p.line(*products, *p.nodes[cls]), _unformed(p))] = None
        elif products:
            why = _no_weights(p, cls, x)
            if why:
                missed[NearMiss("attention", p.line(products[0], *p.nodes[cls]), why)] = None
        else:
            missed.update(dict.fromkeys(_after(p, cls, x)))
    missed.update(dict.fromkeys(_unnamed(p, set(softmax))))
    missed.update(dict.fromkeys(_backward(p, p.stones["Weights"] | p.stones["WeightsX"])))
    return sorted(missed, key=lambda m: (m.at, m.what, m.why)), possible


def attention_results(frozen: Frozen) -> set[Class]:
    """The values that an attention kernel of the e-graph gives."""
    made = {e.cls for e in frozen.enodes if isinstance(e.op, AttentionBase)}
    return {e.cls for e in frozen.enodes if isinstance(e.op, Get) and e.kids[0] in made}


def _unformed(p: _Program) -> str:
    """Why nothing came of probabilities that a rule had found."""
    if p.left_out:
        several = len(p.left_out) > 1
        names = ", ".join(p.left_out[:4]) + (", ..." if len(p.left_out) > 4 else "")
        return f"the rule{'s' if several else ''} {names} {'are' if several else 'is'} left out"
    if p.stop != "saturated":
        return f"saturation ended before it was found ({p.stop})"
    return "no rule has a kernel for it"


def _reads(node: Node, values: Sequence[Node]) -> bool:
    return isinstance(node.op, Dot) and node.operands[0] in values


def _possible(p: _Program, product: Node, cls: Class, x: Class, number: int) -> Possible:
    inside = _inside(p, cls, x) | {product}
    parts = []
    for name, value in (("probabilities", cls), ("scores", x)):
        found = p.uses(value, inside)
        if found:
            parts.append(f"the {name} are {found}")
    if not any(part.startswith("the scores") for part in parts):
        parts += [f"the scores are {use}" for use in _raw_uses(p, cls, x, inside)][:1]
    return Possible("attention", number, p.line(product), ", ".join(parts))


def _raw_uses(p: _Program, cls: Class, x: Class, inside: set[Node]) -> Iterator[str]:
    """Who else needs the scores as they were before scale, soft cap, bias or mask."""
    trained = any(kids[0] == cls for kids, _ in p.frozen.named["SoftmaxGrad"])
    stack, path = list(p.nodes.get(x, ())), set(inside)
    below: dict[Class, None] = {}
    while stack:
        node = stack.pop()
        if node not in path and _product(node):
            path.add(node)
            below[p.of[node]] = None
            stack.extend(() if isinstance(node.op, Dot) else (o for o in node.operands))
    for value in below:
        found = p.uses(value, path)
        # what a gradient reads of them is in its kernel
        if found and (found == "also returned" or not trained):
            yield found


def _inside(p: _Program, cls: Class, x: Class) -> set[Node]:
    """The nodes between scores and probabilities, and gradients with kernels of their own."""
    found: set[Node] = set()
    stack = list(p.nodes.get(cls, ()))
    while stack:
        node = stack.pop()
        if node not in found and p.of.get(node) != x:
            found.add(node)
            stack.extend(node.operands)
    for kids, _ in p.frozen.named["SoftmaxGrad"]:
        if kids[0] == cls:
            found |= {r for r in p.readers.get(cls, ()) if r.kind is Kind.ELEMENTWISE}
            found |= {r for r in p.readers.get(cls, ()) if r.op.name == "transpose"}
    return found


def _no_weights(p: _Program, cls: Class, x: Class) -> str:
    """Why a softmax before a product has no attention; "" when it has no scores either."""
    last = len(p.nodes[cls][0].shape) - 1
    axes = _softmax_axes(p.nodes[cls])
    if axes and axes != (last,):
        if not any(_product(n) for n in p.nodes.get(x, ())):
            return ""
        shown = ", ".join(map(str, axes))
        return f"softmax over axis {shown}, attention's is over the keys, the last axis ({last})"
    for node in p.nodes.get(x, ()):
        why = _scores(p, node)
        if why:
            return why
    return ""


def _softmax_axes(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The axes of the sum that a softmax divides by."""
    stack = [(n, 0) for n in nodes]
    while stack:
        node, depth = stack.pop(0)
        if isinstance(node.op, Reduce) and node.op.combine == "sum":
            return node.op.axes
        if depth < DEPTH:
            stack.extend((o, depth + 1) for o in node.operands)
    return ()


def _scores(p: _Program, node: Node) -> str:
    """Why these are no scores of attention; "" when there is no product in them."""
    if not _product(node):
        return ""
    node = _seen_through(node)
    label = _label(node.op)
    if label == "select":
        return _masked(p, node)
    if label in ("mul", "div"):
        return _scaled(p, node)
    if label == "add":
        inner = next((o for o in node.operands if _product(o)), node)
        if _label(_seen_through(inner).op) == "select":
            return "what is added to masked scores belongs to the scores: add it before the mask"
        return _scores(p, inner) if p.of.get(inner) not in p.stones["Scores"] else ""
    if isinstance(node.op, Dot):
        if p.left_out or p.stop != "saturated":
            return _unformed(p)
        return "its operands' layout has no attention"
    cap = ": a soft cap is c * tanh(score / c)" if label == "tanh" else ""
    return f"{label} stands between the product and softmax{cap}"


def _scaled(p: _Program, node: Node) -> str:
    """Why a product with an array, or a quotient, is no scaled score."""
    label = _label(node.op)
    if p.of.get(node) in p.stones["Softmax"] | p.stones["SafeSoftmax"]:
        return "softmax is taken of probabilities, not of scores"
    if all(_product(o) for o in node.operands):
        both = "are multiplied" if label == "mul" else "are divided"
        return f"two products {both} in the scores, one would be with a number"
    return f"the scale is an array that differs between scores ({label}), not one number"


def _masked(p: _Program, node: Node) -> str:
    branches = node.operands[1:]
    fill = next((f for b in branches if (f := _number(b)) is not None), None)
    if fill is None:
        return "the mask chooses between two arrays, not between scores and a number"
    below = next((b for b in branches if _number(b) is None), None)
    if below is None:
        return "the mask chooses between two numbers, not between scores and a number"
    if fill > HIDDEN:
        return f"masked scores are {fill:g}, which still counts: attention's are -inf"
    seen = _seen_through(below)
    if _label(seen.op) == "add" and fill > -math.inf:
        return (
            f"a bias is added, which may be as far below the others as the masked scores ({fill:g})"
            ": mask with -inf, or relaxed=True ignores that"
        )
    if p.of.get(below) not in p.stones["Scores"] and _label(seen.op) != "dot":
        return _scores(p, below)
    if p.left_out or p.stop != "saturated":
        return _unformed(p)
    return "softmax gives a row without any key something else than attention does"


_CHANGES = {  # what probabilities go through, and what that usually is
    "mul": "a mask or dropout applied after softmax",
    "select": "a mask or dropout applied after softmax",
    "div": "they are divided by another sum",
    "slice": "some keys have no value, such as a sink",
}


def _after(p: _Program, cls: Class, x: Class) -> Iterator[NearMiss]:
    """Attention whose probabilities are changed before the product with the values."""
    if not any(_product(n) for n in p.nodes.get(x, ())):
        return
    level, steps = [cls], 0
    while level and steps < 3:
        above: list[Class] = []
        for reader in (r for c in level for r in p.readers.get(c, ())):
            if _label(reader.op) not in _CHANGES:
                continue
            product = next(
                (n for n in p.readers.get(p.of[reader], ()) if _reads(n, (reader,))), None
            )
            if product is not None:
                label = _label(reader.op)
                why = f"the probabilities go through {label} before the product with the values "
                why += f"({_CHANGES[label]})"
                yield NearMiss("attention", p.line(reader, product), why)
                return
            above.append(p.of[reader])
        level, steps = above, steps + 1


def _unnamed(p: _Program, softmax: set[Class]) -> Iterator[NearMiss]:
    """exp(s) over a sum before a product that is nearly a softmax."""
    for node in p.of:
        if not isinstance(node.op, Dot) or p.of.get(node.operands[0]) in softmax:
            continue
        ratio = _seen_through(node.operands[0])
        if _label(ratio.op) != "div" or _label(ratio.operands[0].op) != "exp":
            continue
        why = _no_softmax(ratio.operands[0], _under_views(ratio.operands[1]))
        if why and _product(ratio.operands[0].operands[0]):
            yield NearMiss("attention", p.line(node), why)


def _no_softmax(e: Node, total: Node) -> str:
    """Why e / total is no softmax over the last axis; "" where that is not nearly so."""
    last = (len(e.shape) - 1,)
    if _label(total.op) == "add":
        total = next(
            (t for o in total.operands if isinstance((t := _under_views(o)).op, Reduce)), e
        )
        added = isinstance(total.op, Reduce) and total.operands[0] is e
        return "something is added to the sum that softmax divides by" if added else ""
    if not isinstance(total.op, Reduce) or total.operands[0] is not e:
        return ""
    if total.op.axes != last:
        return f"exponentials are divided by their sum over axis {_axes(total)}, not over the keys"
    top = e.operands[0]
    if _label(top.op) != "sub":
        return (
            "softmax without its maximum subtracted overflows where attention does not: "
            "relaxed=True ignores that"
        )
    below = _under_views(top.operands[1])
    if isinstance(below.op, Reduce) and below.op.combine == "max" and below.op.axes != last:
        return f"the maximum over axis {_axes(below)} is subtracted, not that of the keys"
    return ""


def _axes(node: Node) -> str:
    assert isinstance(node.op, Reduce)
    return ", ".join(map(str, node.op.axes))


def _backward(p: _Program, weights: set[Class]) -> Iterator[NearMiss]:
    """Gradients of attention that are in no kernel."""
    formed = {kids[3] for kids, _ in p.frozen.named["ScoreGrad"]}
    for kids, _ in p.frozen.named["SoftmaxGrad"]:
        cls, cotangent = kids[0], kids[1]
        if cls not in weights or cls in formed:
            continue
        products = [n for n in p.readers.get(cls, ()) if _reads(n, p.nodes.get(cls, ()))]
        if not products:
            continue
        ops = [_label(_seen_through(n).op) for n in p.nodes.get(cotangent, ())]
        if "add" in ops:
            why = "the probabilities are used elsewhere too, which adds to their gradient"
        else:
            why = "the numbers around the scores' gradient do not make up the scale"
        yield NearMiss("attention backward", p.line(products[0]), why)


def _label(op: Op) -> str:
    return op.label if isinstance(op, Elementwise) else op.name


def _under_views(node: Node) -> Node:
    while node.kind is Kind.MOVE and len(node.operands) == 1:
        node = node.operands[0]
    return node


def _seen_through(node: Node) -> Node:
    """The node under views and multiplications by a number."""
    while True:
        if isinstance(node.op, Reshape):
            node = node.operands[0]
            continue
        scaled = _label(node.op) in ("mul", "div")
        arrays = [o for o in node.operands if _number(o) is None] if scaled else []
        if len(arrays) != 1:  # also of two numbers
            return node
        node = arrays[0]


def _number(node: Node) -> float | None:
    """The number that all elements are, if it is written as one."""
    node = _under_views(node)
    return float(node.op.attributes()["value"]) if node.kind is Kind.LITERAL else None  # type: ignore[arg-type]


def _product(node: Node, depth: int = DEPTH) -> bool:
    """Whether a product is under a value, some elementwise ops and views below."""
    if isinstance(node.op, Dot):
        return True
    if depth == 0 or node.kind not in (Kind.ELEMENTWISE, Kind.MOVE):
        return False
    return any(_product(o, depth - 1) for o in node.operands)


def near(
    egraph: EGraphReport, extraction: ExtractionReport, snapshot: Snapshot, selection: Selection
) -> tuple[NearMiss, ...]:
    """All near misses of a compilation: what was not found, and what was found and not chosen."""
    # grouped heads stand behind a reshape
    chosen = {c: _under_views(node).op for node, c in selection.classes.items()}
    kernels = {
        c for op, c in zip(snapshot.ops, snapshot.cls, strict=True) if isinstance(op, _KERNELS)
    }
    rows = zip(snapshot.ops, snapshot.kids, snapshot.cls, strict=True)
    fused = {cls for op, kids, cls in rows if isinstance(op, Get) and kids[0] in kernels}
    out = dict.fromkeys(egraph.near_misses)
    for one in egraph.possible:
        if one.cls not in chosen or one.cls not in fused or isinstance(chosen[one.cls], Get):
            continue
        loss = _loss(extraction, one.cls, repr(snapshot.types[one.cls]))
        reasons = [r for r in (one.uses, loss) if r]
        out[NearMiss(one.what, one.at, "; ".join(reasons) or "another kernel costs less")] = None
    return tuple(out)


def _loss(extraction: ExtractionReport, cls: int, type_: str) -> str:
    """What attention would have cost more, from the choice of its class or of one like it."""
    like = sorted(extraction.choices, key=lambda c: (c.cls != cls, c.type != type_))
    for choice in like:
        if choice.cls != cls and choice.type != type_:
            continue
        for other in choice.others:
            if other.text.startswith("attention("):
                if other.loss is None:
                    return f"no legal program was found with it ({other.why})"
                return f"it would cost {other.loss / 1e3:.1f} us more ({other.why})"
    return ""
