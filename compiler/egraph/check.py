"""Rules on samples: both sides on values, and whether the engine takes the left side to the right
one.

The rule's own text is what is evaluated, so nothing is declared twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from ..errors import IRError
from ..ir import Graph, Node, make
from ..ops import full, input_node
from ..ops.move import inverse
from ..reference import evaluate
from ..types import DType, TupleType, bool_, f32, parse_type
from .engine import Engine
from .language import SORT_OF, Form, float_text, form_of, integers_text, string_text
from .patterns import Rule, Term, forms_in, head_form, is_constant, is_number, operand_count, parse
from .rules.named import NAMED
from .saturate import language_of, prepare

_SHAPES = ("f32[3, 4]", "f32[2, 1, 5]", "f32[]")
_NUMBERS = (2.5, -0.75, 3.0)
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: math.nan if b == 0 else a / b if isinstance(a, float) else int(a / b),
    "%": math.fmod,
    "neg": lambda a: -a,
    "abs": abs,
    "max": max,
    "min": min,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "!=": lambda a, b: a != b,
    "to-f64": float,
    "to-i64": int,
    "vec-of": lambda *a: a,
    "vec-empty": tuple,
    "vec-get": lambda v, i: v[i],
    "vec-length": len,
    "vec-pop": lambda v: v[:-1],
    "vec-set": lambda v, i, x: (*v[:i], x, *v[i + 1 :]),
    "shape": lambda x: x.node.shape,
    "dtype": lambda x: x.node.dtype.name,
    "float": lambda d: d in ("f32", "f16"),
    "signed": lambda d: d in ("f32", "i32"),
    "logits": lambda _: 1,  # of samples, which have a softmax of it
    "structured": lambda mask: 1 if mask.text.startswith("(Causal") else 0,
    "power-of-two": lambda c: math.frexp(c)[0] in (0.5, -0.5),
    "ones": lambda r: (1,) * r,
    "identity-perm": lambda r: tuple(range(r)),
    "swap-perm": lambda r: (*range(r - 2), r - 1, r - 2),
    "inverse-perm": inverse,
}


@dataclass(frozen=True)
class Made:
    """An array of a sample: as a node, and as a term of the engine."""

    node: Node
    text: str


@dataclass
class Sample:
    """A rule with values for its variables. `positive` are the inputs that must not be negative or
    zero.
    """

    rule: Rule
    given: Mapping[str, Any]
    env: dict[str, Any] = field(default_factory=dict)
    inputs: list[Node] = field(default_factory=list)
    positive: set[Node] = field(default_factory=set)
    made: list[Made] = field(default_factory=list)
    forms: set[Form] = field(default_factory=set)
    equal: list[tuple[Made, Made]] = field(default_factory=list)
    unmet: list[Term] = field(default_factory=list)

    def left(self) -> Made:
        """The left side, after which all conditions are checked and all variables are known."""
        self._conditions()
        left = self.value(parse(self.rule.left))
        self.env["root"] = left
        self._conditions()
        return left

    def right(self) -> Made:
        return self.value(parse(self.rule.right))

    def bind(self, name: str, value: Any) -> None:
        """Give a variable a value, an array of a type (`f32[3, 4]`) or a term of other ones."""
        if isinstance(value, str) and value.startswith("("):
            value = self.value(parse(value))
        elif isinstance(value, str) and value.endswith("]"):
            node = input_node(len(self.inputs), name, parse_type(value.removeprefix("positive ")))
            self.inputs.append(node)
            if value.startswith("positive "):
                self.positive.add(node)
            value = self._made(node, self._leaf(node))
        self.env[name] = value

    def _leaf(self, node: Node) -> str:
        form = form_of(node.op, 0)
        self.forms.add(form)
        return f"({' '.join([form.name, *form.attribute_texts(node.op)])})"

    def arrays(self, seed: int) -> list[np.ndarray]:
        """Random values for the inputs."""
        rng = np.random.default_rng(seed)
        return [self._array(n, rng) for n in self.inputs]

    def _array(self, node: Node, rng: np.random.Generator) -> np.ndarray:
        if node.dtype.kind == "b":
            return rng.random(node.shape) < 0.7
        if node.dtype.kind in "iu":
            return rng.integers(0, 7, node.shape)
        values = rng.standard_normal(node.shape)
        return np.abs(values) + 0.1 if node in self.positive else values

    def _conditions(self) -> None:
        """Bind what conditions define; note in `unmet` those that are false or still open."""
        waiting = [parse(c) for c in self.rule.when]
        self.equal.clear()
        self.unmet.clear()
        while waiting:
            later = [term for term in waiting if not self._condition(term)]
            if len(later) == len(waiting):
                break
            waiting = later
        self.unmet += waiting

    def _condition(self, term: Term) -> bool:
        """Whether a condition could be decided; it binds a variable that it defines."""
        try:
            if term[0] != "=":
                if not self.value(term):
                    self.unmet.append(term)
                return True
            _, a, b = term
            for name, other in ((a, b), (b, a)):
                if _is_variable(name) and name not in self.env:
                    self.env[name] = self.value(other)
                    return True
            left, right = self.value(a), self.value(b)
        except KeyError:
            return False
        if isinstance(left, Made):
            self.equal.append((left, right))
        elif left != right:
            self.unmet.append(term)
        return True

    def value(self, term: Term) -> Any:
        """An array, tuple, number or text; KeyError for a variable without a value."""
        if isinstance(term, str):
            if is_number(term):
                return int(term) if term.lstrip("+-").isdigit() else float(term)
            return term[1:-1] if term.startswith('"') else self.env[term]
        head = str(term[0])
        if head == "const":
            like = self.value(term[2]).node
            return self._full(self.value(term[1]), like.shape, like.dtype)
        if head in ARITHMETIC:
            return ARITHMETIC[head](*(self.value(t) for t in term[1:]))
        count = operand_count(term)
        operands = self._operands(term, count)
        attributes = [self.value(t) for t in term[1 + count :]]
        form = head_form(term)
        if form is not None:
            return self._op(form, operands, attributes)
        nodes, texts = [o.node for o in operands], [o.text for o in operands]
        rest = [_attribute(v, s) for v, s in zip(attributes, NAMED[head].attributes)]
        text = f"({' '.join([head, *texts, *rest])})"
        return self._made(NAMED[head].meaning(*nodes, *attributes), text)

    def _op(self, form: Form, operands: list[Made], attributes: list[Any]) -> Made:
        self.forms.add(form)
        typed = [
            float(v) if sort.name == "f64" else v
            for v, (_, sort) in zip(attributes, form.family.fields)
        ]
        values = {name: v for v, (name, _) in zip(typed, form.family.fields)}
        node = make(form.family.entry(**values), *(o.node for o in operands))
        texts = [sort.text(v) for v, (_, sort) in zip(typed, form.family.fields)]
        return self._made(node, f"({' '.join([form.name, *(o.text for o in operands), *texts])})")

    def _operands(self, term: Term, count: int) -> list[Made]:
        """Operands; a number takes the type of the one beside it, and is bool as a condition."""
        items = term[1 : 1 + count]
        known = {k: self.value(t) for k, t in enumerate(items) if not is_constant(t)}
        if len(known) == count:
            return list(known.values())
        like = next(iter(known.values())).node
        typed = [m.node.dtype for k, m in known.items() if term[0] != "Select" or k > 0]
        out = []
        for k, item in enumerate(items):
            if k in known:
                out.append(known[k])
                continue
            text = str(item)
            number = float(self.env[text[1:]] if text[0] == "#" else text)
            choice = bool_ if term[0] == "Select" and k == 0 else (*typed, f32)[0]
            out.append(self._full(number, like.shape, choice))
        return out

    def _full(self, value: float, shape: tuple[int, ...], dtype: DType) -> Made:
        attributes = (float_text(float(value)), string_text(dtype.name), integers_text(shape))
        return self._made(full(value, shape, dtype), f"(Full {' '.join(attributes)})")

    def _made(self, node: Node, text: str) -> Made:
        self.made.append(Made(node, text))
        return self.made[-1]


def samples(rule: Rule) -> Iterator[Sample]:
    """The rule with each of its samples; without any, with arrays of a few shapes."""
    for values in rule.samples or _defaults(rule):
        yield sample(rule, values)


def sample(rule: Rule, values: Mapping[str, Any]) -> Sample:
    """The rule with these values of its variables."""
    out = Sample(rule, values)
    for name, value in values.items():
        out.bind(name, value)
    return out


def check_rule(rule: Rule, seed: int = 0) -> float:
    """The largest relative difference of the two sides over all samples, in double precision.

    IRError when a sample does not meet the conditions, or when types or infinities and NaN differ.
    """
    worst = 0.0
    for one in samples(rule):
        left, right = one.left().node, one.right().node
        if one.unmet or left.type != right.type:
            raise IRError(
                f"rule {rule.name}: {left!r} and {right!r} differ, or {one.unmet} do not hold"
            )
        graph = Graph(rule.base, tuple(one.inputs), (left, right))
        a, b = (np.asarray(v, np.float64) for v in evaluate(graph, one.arrays(seed), np.float64))
        both = np.isfinite(a) & np.isfinite(b)
        if not np.array_equal(a[~both], b[~both], equal_nan=True):
            raise IRError(f"rule {rule.name}: infinities or NaN of {left!r} differ")
        error = np.abs(a[both] - b[both]).max(initial=0.0) / (1 + np.abs(a[both]).max(initial=0.0))
        worst = max(worst, float(error))
    return worst


def fires(rule: Rule, values: Mapping[str, Any]) -> bool:
    """Whether the engine, given the left side for these values, matches the rule and so equates
    both sides.

    Conditions may be false for the values: then they must keep the rule from matching.
    """
    one = sample(rule, values)
    left = one.left()
    right = one.right() if not one.unmet else None
    forms, _ = language_of(sorted(one.forms | forms_in([rule]), key=lambda f: f.name), [])
    perms = [v for v in one.env.values() if isinstance(v, tuple) and sorted(v) == [*range(len(v))]]
    engine = prepare([rule], forms, perms)
    for k, made in enumerate(dict.fromkeys(one.made)):
        _insert(engine, k, made)
    for a, b in one.equal:
        engine.run(f"(union {a.text} {b.text})")
    engine.step("(seq (saturate (run types)) (run facts))")
    step = engine.step(f"(run {rule.theme})")
    matched = any(n for name, n in step.matches.items() if name.startswith(f"{rule.name}#"))
    if matched and right is not None:
        engine.step("(saturate (run types))")
        engine.run(f"(check (= {left.text} {right.text}))")
    return matched


def _insert(engine: Engine, number: int, made: Made) -> None:
    """A term with its type; results of kernels are inside other terms."""
    if isinstance(made.node.type, TupleType):
        return
    name = f"(node {number})"
    engine.run(f"(set {name} {made.text})")
    engine.run(f"(set (shape {name}) {integers_text(made.node.shape)})")
    engine.run(f"(set (dtype {name}) {string_text(made.node.dtype.name)})")


def _attribute(value: Any, sort: str) -> str:
    for known in SORT_OF.values():
        if known.name == sort:
            return known.text(float(value) if sort == "f64" else value)
    raise IRError(f"no attribute has sort {sort}")


def _is_variable(term: Term) -> TypeGuard[str]:
    return isinstance(term, str) and not is_number(term) and not term.startswith('"')


def _defaults(rule: Rule) -> Iterator[dict[str, Any]]:
    names = _variables(parse(rule.left))
    numbers = {n[1:]: value for n, value in zip((n for n in names if n[0] == "#"), _NUMBERS)}
    for text in _SHAPES:
        yield {n: text for n in names if n[0] != "#"} | numbers


def _variables(term: Term) -> list[str]:
    """The variables of a pattern, in order."""
    if isinstance(term, str):
        return [] if is_number(term) else [term]
    return list(dict.fromkeys(v for item in term[1:] for v in _variables(item)))
