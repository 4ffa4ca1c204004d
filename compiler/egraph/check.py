"""Rules on values: both sides of a rule as nodes for sample variables, and their difference in double precision.

The rule's own text is what is evaluated, so nothing is declared twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import IRError
from ..ir import Graph, Kind, Node, make, topological
from ..ops import full, input_node
from ..ops.move import inverse
from ..reference import evaluate
from ..types import TupleType, parse_type
from .patterns import Rule, Term, is_constant, head_form, is_number, operand_count, parse
from .rules.named import NAMED

_NUMBERS = (2.5, -0.75, 3.0)
DEFAULT = ("f32[3, 4]", "f32[2, 1, 5]", "f32[]")
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "abs": abs, "neg": lambda a: -a,
    "/": lambda a, b: a / b if isinstance(a, float) else int(a / b), "%": math.fmod,
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
    "!=": lambda a, b: a != b, "to-f64": float, "to-i64": int, "max": max, "min": min,
    "vec-of": lambda *a: tuple(a), "vec-empty": tuple, "vec-get": lambda v, i: v[i], "vec-length": len,
    "vec-set": lambda v, i, x: (*v[:i], x, *v[i + 1 :]), "vec-append": lambda *v: sum(v, ()),
    "vec-push": lambda v, x: (*v, x),
    "shape": lambda x: x.shape, "dtype": lambda x: x.dtype.name, "float": lambda d: d in ("f32", "f16"),
    "signed": lambda d: d in ("f32", "i32"), "structured": lambda _: 0,
    "power-of-two": lambda c: math.frexp(c)[0] in (0.5, -0.5),
    "ones": lambda r: (1,) * r, "identity-perm": lambda r: tuple(range(r)), "inverse-perm": lambda p: inverse(p),
    "swap-perm": lambda r: (*range(r - 2), r - 1, r - 2),
}  # fmt: skip


@dataclass(frozen=True)
class Instance:
    """A rule for one sample: its two sides as graphs over the same inputs."""

    left: Node
    right: Node
    inputs: tuple[Node, ...]
    positive: frozenset[Node]

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
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

    def values(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Both sides in double precision."""
        graph = Graph("rule", self.inputs, (self.left, self.right))
        left, right = evaluate(graph, self.arrays(seed), np.float64)
        return left, right


def instances(rule: Rule) -> Iterator[Instance]:
    """The rule for each of its samples; without any, for arrays of a few shapes."""
    for sample in rule.samples or _defaults(rule):
        yield instantiate(rule, sample)


def _defaults(rule: Rule) -> Iterator[dict[str, Any]]:
    names = _variables(rule)
    numbers = {n[1:]: value for n, value in zip((n for n in names if n[0] == "#"), _NUMBERS)}
    for text in DEFAULT:
        yield {n: text for n in names if n[0] != "#"} | numbers


def check_rule(rule: Rule, seed: int = 0) -> float:
    """The largest relative difference of the two sides over all samples; IRError where a type or a condition differs."""
    worst = 0.0
    for instance in instances(rule):
        left, right = instance.values(seed)
        both = np.isfinite(left) & np.isfinite(right)
        if instance.left.type != instance.right.type or not np.array_equal(left[~both], right[~both], equal_nan=True):
            raise IRError(f"rule {rule.name}: {instance.left!r} differs from {instance.right!r}")
        if left.dtype.kind == "f":
            size = 1 + np.abs(left[both]).max(initial=0.0)
            worst = max(worst, float(np.abs(left[both] - right[both]).max(initial=0.0) / size))
        elif not np.array_equal(left, right):
            raise IRError(f"rule {rule.name}: {instance.left!r} differs from {instance.right!r}")
    return worst


def instantiate(rule: Rule, sample: Mapping[str, Any]) -> Instance:
    """Both sides of a rule; IRError when its conditions do not hold for the sample."""
    env: dict[str, Any] = {}
    inputs: list[Node] = []
    positive: set[Node] = set()
    for name, value in sample.items():
        if isinstance(value, str) and value.endswith("]") and "(" not in value:
            text = value.removeprefix("positive ")
            value = input_node(len(inputs), name, parse_type(text))
            inputs.append(value)
            if text != sample[name]:
                positive.add(value)
        elif isinstance(value, str) and value.startswith("("):
            value = _value(parse(value), env)
        env[name] = value
    conditions = [parse(c) for c in rule.when]
    _solve(rule, conditions, env)
    left = env[rule.left] if rule.left in env else _value(parse(rule.left), env)
    env["root"] = left
    _solve(rule, conditions, env, final=True)
    right = _value(parse(rule.right), env)
    return Instance(left, right, tuple(inputs), frozenset(positive))


def _solve(rule: Rule, conditions: list[Term], env: dict[str, Any], final: bool = False) -> None:
    """Bind what conditions define, and check the others."""
    waiting = list(conditions)
    while waiting:
        later = []
        for term in waiting:
            try:
                holds = _holds(term, env)
            except KeyError:
                later.append(term)
                continue
            if not holds:
                raise IRError(f"rule {rule.name}: the sample does not meet {term}")
        if len(later) == len(waiting):
            break
        waiting = later
    if final and waiting:
        raise IRError(f"rule {rule.name}: the sample leaves {waiting} open")


def _holds(term: Term, env: dict[str, Any]) -> bool:
    if term[0] != "=":
        return bool(_value(term, env))
    _, a, b = term
    for name, other in ((a, b), (b, a)):
        if isinstance(name, str) and name not in env and not is_number(name) and name[0] not in '"':
            env[name] = _value(other, env)
            return True
    left, right = _value(a, env), _value(b, env)
    # two forms of one value: equal types are all that a sample can promise before evaluation
    return left.type == right.type if isinstance(left, Node) else left == right


def _value(term: Term, env: Mapping[str, Any]) -> Any:
    """A node, tuple, number or text; KeyError for a variable without a value."""
    if isinstance(term, str):
        if is_number(term):
            return float(term) if "." in term or "e" in term or "inf" in term else int(term)
        return term[1:-1] if term.startswith('"') else env[term]
    head = term[0]
    if head == "const":
        like = _value(term[2], env)
        return full(_value(term[1], env), like.shape, like.dtype)
    if head == "uniform":
        return next(v for k, v in env.items() if f"#{k}" == term[1])
    if isinstance(head, str) and head in _ARITHMETIC:
        return _ARITHMETIC[head](*(_value(t, env) for t in term[1:]))
    count = operand_count(term)
    operands = _operands(term, count, env)
    attributes = [_value(t, env) for t in term[1 + count :]]
    form = head_form(term)
    if form is not None:
        names = [name for name, _ in form.family.fields]
        values = {n: _typed(v, sort.name) for n, v, (_, sort) in zip(names, attributes, form.family.fields)}
        return make(form.family.entry(**values), *operands)
    if isinstance(head, str) and head in NAMED:
        return NAMED[head].meaning(*operands, *attributes)
    raise IRError(f"no value is known for {head}")


def _typed(value: Any, sort: str) -> Any:
    return float(value) if sort == "f64" else value


def _operands(term: Term, count: int, env: Mapping[str, Any]) -> list[Node]:
    """Operand nodes; constants take the type of the operand beside them."""
    items = term[1 : 1 + count]
    out = [None if is_constant(t) else _value(t, env) for t in items]
    for k, item in enumerate(items):
        if out[k] is None:
            number = float(item) if is_number(item) else float(env[item[1:]])  # type: ignore[index, arg-type]
            like = next(o for o in out if o is not None)
            is_condition = term[0] == "Select" and k == 0
            out[k] = full(number, like.shape, parse_type("bool").dtype if is_condition else _number_dtype(term, out, like))
    return out  # type: ignore[return-value]


def _number_dtype(term: Term, out: list[Node | None], like: Node) -> Any:
    known = [o for k, o in enumerate(out) if o is not None and not (term[0] == "Select" and k == 0)]
    return known[0].dtype if known else parse_type("f32").dtype


def _variables(rule: Rule) -> list[str]:
    """The free variables of the left side, in order."""
    found: dict[str, None] = {}

    def walk(term: Term) -> None:
        if isinstance(term, str):
            if not is_number(term):
                found.setdefault(term)
            return
        for item in term[1:]:
            walk(item)

    walk(parse(rule.left))
    return list(found)


def snapshot_values(graph: Graph, inputs: list[np.ndarray]) -> dict[Node, Any]:
    """The value of every node of a graph in double precision."""
    order = [n for n in topological(graph.outputs) if not isinstance(n.type, TupleType) and n.kind is not Kind.INPUT]
    values = evaluate(graph.replace(outputs=tuple(order), output_names=()), inputs, np.float64)
    return dict(zip(order, values, strict=True))
