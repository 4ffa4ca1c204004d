"""Values for which the two sides of a rule differ, looked for among its samples and random ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import EggpuError
from ..ir import Graph, Node
from ..reference import evaluate
from ..rule import Rule, RuleError, Term, parse
from ..types import TupleType
from .check import Sample, sample
from .patterns import head_form, is_number, operand_count
from .rules.named import NAMED
from .validate import validate

ENOUGH, ATTEMPTS = 24, 800  # random samples that meet the conditions, and tries to find them
TOLERANCE = 1e-6  # relative, in double precision
SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 1e-3, -60.0, 3.0])
# what ops and the meanings of names raise for operands that do not fit
_ILL_TYPED = (
    EggpuError, ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError,
)  # fmt: skip
_NUMBERS = (2.5, -0.75, 3.0, 0.5, -4.0, 1.0, 0.25, 0.0)


@dataclass(frozen=True, slots=True)
class Counterexample:
    """Values of a rule's variables, and what its sides are for them (None where a side cannot be
    evaluated, or is of another type: `why` says so)."""

    rule: Rule
    values: Mapping[str, Any]
    left: np.ndarray | None
    right: np.ndarray | None
    why: str

    def __str__(self) -> str:
        lines = [f"rule {self.rule.name} is wrong: {self.why}", f"  {self.rule.equation}", "  for"]
        lines += [f"    {name} = {_shown(value)}" for name, value in self.values.items()]
        for side, value in (("left", self.left), ("right", self.right)):
            if value is not None:
                lines.append(f"  {side:5} = {_shown(value)}")
        return "\n".join(lines)


def search(rule: Rule, seed: int = 0) -> tuple[Counterexample | None, int]:
    """The first counterexample, and how many samples were looked at.

    Raises RuleError for a rule that is not well formed, or for which no values meet the conditions.
    """
    validate(rule)
    count = 0
    for one, special in _samples(rule, seed):
        found = _differs(rule, one, special, seed)
        count += 1
        if found is not None:
            return found, count
    if not count:
        raise RuleError(
            f"rule {rule.name}: no values were found that meet its conditions; give some as "
            'samples=({"x": "f32[3, 4]", "a": (1,)},)'
        )
    return None, count


def _samples(rule: Rule, seed: int) -> Iterator[tuple[Sample, bool]]:
    """Samples whose conditions hold, each with normal and with special values."""
    given = [dict(s) for s in rule.samples]
    tries = itertools.islice(_random(rule, seed), ATTEMPTS)
    found = 0
    for values in itertools.chain(given, () if given else tries):
        one = _met(rule, values)
        if one is None:
            if given:
                raise RuleError(f"rule {rule.name}: sample {values} does not meet its conditions")
            continue
        found += 1
        yield one, False
        yield one, True
        if not given and found >= ENOUGH:
            return


def _met(rule: Rule, values: Mapping[str, Any]) -> Sample | None:
    """The sample with its left side made; None when that has no value or conditions do not hold."""
    try:
        one = sample(rule, values)
        left = one.left().node
        if one.unmet or isinstance(left.type, TupleType):
            return None
        evaluate(Graph(rule.base, tuple(one.inputs), (left,)), one.arrays(0), np.float64)
    except _ILL_TYPED:
        return None
    return one


def _differs(rule: Rule, one: Sample, special: bool, seed: int) -> Counterexample | None:
    left = one.env["root"].node
    rng = np.random.default_rng(seed)
    inputs = [_special(n, rng) for n in one.inputs] if special else one.arrays(seed)
    values = dict(one.given) | dict(zip((_name(n) for n in one.inputs), inputs, strict=True))
    try:
        right = one.right().node
    except _ILL_TYPED as error:
        return Counterexample(rule, values, None, None, f"the right side is no value: {error}")
    if left.type != right.type:
        why = f"the left side is {left.type}, the right one {right.type}"
        return Counterexample(rule, values, None, None, why)
    graph = Graph(rule.base, tuple(one.inputs), (left, right))
    with np.errstate(all="ignore"):
        a, b = (np.asarray(v, np.float64) for v in evaluate(graph, inputs, np.float64))
    why = _difference(a, b, special)
    return Counterexample(rule, values, a, b, why) if why else None


def _difference(a: np.ndarray, b: np.ndarray, special: bool) -> str:
    """How two values differ, "" if they do not.

    Special values may overflow or divide by 0 in the middle: there only the finite are compared.
    """
    both = np.isfinite(a) & np.isfinite(b)
    if not special and not np.array_equal(a[~both], b[~both], equal_nan=True):
        return "infinities or NaN differ"
    scale = 1 + np.abs(a[both]).max(initial=0.0)
    worst = float(np.abs(a[both] - b[both]).max(initial=0.0) / scale)
    return f"the sides differ by {worst:.3g} of the largest value" if worst > TOLERANCE else ""


def _special(node: Node, rng: np.random.Generator) -> np.ndarray:
    if node.dtype.kind == "b":
        return rng.random(node.shape) < 0.5
    if node.dtype.kind in "iu":
        return rng.integers(0, 3, node.shape)
    return rng.choice(SPECIAL, node.shape)


def _name(node: Node) -> str:
    return str(node.op.attributes()["label"])


def _random(rule: Rule, seed: int) -> Iterator[dict[str, Any]]:
    """Values for the variables without end: arrays of few small shapes, attributes by their
    names."""
    rng = np.random.default_rng(seed)
    sorts = _sorts(rule)
    while True:
        rank = int(rng.integers(0, 4))
        shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4], rank))
        yield {name: _value(sort, shape, rng) for name, sort in sorts.items()}


def _value(sort: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    rank = len(shape)
    match sort:
        case "T" | "bool":
            kept = shape
            if rank and rng.random() < 0.35:  # another size along an axis, as in products
                axis = int(rng.integers(rank))
                kept = (*shape[:axis], int(rng.choice([1, 2, 3])), *shape[axis + 1 :])
            dtype = sort if sort == "bool" else "f32"
            return f"{dtype}[{', '.join(map(str, kept))}]"
        case "axes":
            count = int(rng.integers(1, rank + 1)) if rank else 0
            return tuple(sorted(int(a) for a in rng.permutation(rank)[:count]))
        case "perm":
            return tuple(int(a) for a in rng.permutation(rank))
        case "shape" | "Ints":
            new = tuple(int(n) for n in rng.permutation(np.array(shape, int)))
            return new if rng.random() < 0.7 else (int(np.prod(shape)),)
        case "String":
            return "f32"
        case "i64":
            return int(rng.integers(0, 3))
        case _:
            return float(rng.choice(_NUMBERS))


def _sorts(rule: Rule) -> dict[str, str]:
    """What each free variable of the left side is: T, bool, f64, or an attribute's name or sort."""
    out: dict[str, str] = {}
    defined: set[str] = set()
    for text in rule.when:
        term = parse(text)
        if isinstance(term, tuple) and term[0] == "=" and len(term) == 3:
            _, a, b = term
            defined |= {x for x, y in ((a, b), (b, a)) if isinstance(x, str) and x not in _words(y)}
    for text in (rule.left, *rule.when):
        _note(parse(text), "T", out)
    return {name: sort for name, sort in out.items() if name not in defined and name != "root"}


def _words(term: Term) -> set[str]:
    return {term} if isinstance(term, str) else {w for item in term for w in _words(item)}


def _note(term: Term, sort: str, out: dict[str, str]) -> None:
    if isinstance(term, str):
        if not is_number(term) and not term.startswith('"'):
            out.setdefault(term.removeprefix("#"), "f64" if term.startswith("#") else sort)
        return
    head, count = str(term[0]), operand_count(term)
    form = head_form(term)
    if form is not None:
        attributes = [n if s.name == "Ints" else s.name for n, s in form.family.fields]
    elif head in NAMED:
        attributes = ["axes" if s == "Ints" else s for s in NAMED[head].attributes]
    else:
        attributes, count = ["f64"] * len(term), 0
    for k, item in enumerate(term[1:]):
        logical = head.removesuffix("*") in ("And", "Or", "Not") or (head == "Select" and k == 0)
        operand = "bool" if logical else "T"
        _note(item, operand if k < count else attributes[min(k - count, len(attributes) - 1)], out)


def _shown(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return str(value)
    text = np.array2string(value, precision=6, threshold=24, separator=", ")
    return text.replace("\n", "\n" + " " * 10)
