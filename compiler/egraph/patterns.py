"""Rules: equations between patterns, written as s-expressions, and their translation to the
engine's language.

A pattern is a variable, or `(Op operands... attributes...)` with the constructor names of
`language`, or `(Named operands... attributes...)` with a stepping stone of `rules.named`. In the
place of an operand

    2.0      is any value all of whose elements are this number,
    #c       is any value all of whose elements are one number, which the rule calls c,
    (Add* ..) matches in both orders of the operands.

On the right side `(const expr x)` is the number `expr` in the shape and dtype of the variable x.
Conditions are premises of the engine: `(= s (shape x))`, `(< c d)`, `(= p (Softmax x axes))`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeGuard

from ..errors import IRError
from ..ir import Node
from ..rule import Rule as Rule
from ..rule import Term as Term
from ..rule import parse as parse
from .language import Form, families, float_text, made_by, string_text

# relations of (result, operand, number) for operations whose second operand is a number: joins over
# them are small
BY_CONSTANT = {"Mul": "mul-by", "Add": "add-by", "Div": "div-by"}
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*(e[-+]?\d+)?|inf)$")


def rules_of(theme: str) -> Callable[..., Rule]:
    """A constructor of the rules of a theme: name, left, right, conditions."""

    def rule(name: str, left: str, right: str, *when: str, relaxed: bool = False) -> Rule:
        return Rule(name, left, right, when, theme, relaxed=relaxed)

    return rule


def with_samples(
    rules: Iterable[Rule], samples: Mapping[str, Mapping[str, Any]]
) -> tuple[Rule, ...]:
    """The rules, each with its sample; keys of `samples` are names with spaces between them."""
    known = {name: sample for names, sample in samples.items() for name in names.split()}
    out = tuple(replace(r, samples=(known[r.name],)) if r.name in known else r for r in rules)
    if strange := known.keys() - {r.name for r in out}:
        raise IRError(f"there are samples for {', '.join(sorted(strange))}, which are no rules")
    return out


def show(term: Term) -> str:
    return term if isinstance(term, str) else f"({' '.join(map(show, term))})"


def is_number(term: Term) -> TypeGuard[str]:
    return isinstance(term, str) and _NUMBER.match(term) is not None


def is_constant(term: Term) -> TypeGuard[str]:
    return isinstance(term, str) and (is_number(term) or term.startswith("#"))


def head_form(term: Term) -> Form | None:
    """The form of an op pattern, None for anything else."""
    if isinstance(term, str) or not term or not isinstance(term[0], str):
        return None
    family = families().get(term[0].removesuffix("*"))
    return family.form(len(term) - 1 - len(family.fields)) if family else None


def operand_count(term: Term) -> int:
    """How many of a pattern's arguments are arrays, as opposed to attributes."""
    from .rules.named import NAMED

    form = head_form(term)
    if form is not None:
        return form.arity
    named = NAMED.get(term[0]) if term and isinstance(term[0], str) else None
    return named.operands if named else 0


def variants(term: Term) -> list[Term]:
    """The pattern with each commutative op in both orders."""
    if isinstance(term, str):
        return [term]
    parts = [variants(t) for t in term]
    out: list[Term] = []
    for choice in itertools.product(*parts):
        head = choice[0]
        if isinstance(head, str) and head.endswith("*") and len(head) > 1:
            out += [(head[:-1], *choice[1:]), (head[:-1], choice[2], choice[1])]
        else:
            out.append(choice)
    return list(dict.fromkeys(out))


class _Translation:
    """One variant of a rule on its way to the engine."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.premises: list[str] = []
        self.actions: list[str] = []
        self.fresh = itertools.count()

    def text(self, left: Term, conditions: tuple[Term, ...], number: int) -> str:
        root = left if isinstance(left, str) else "root"
        if root == "root":
            pattern = show(self._pattern(left))
            self.premises.append(f"(= root {pattern})")
        for condition in conditions:
            self.premises.append(show(self._condition(condition)))
        made = self._build(parse(self.rule.right))
        self.actions.append(f"(union {root} {made})")
        name = string_text(f"{self.rule.name}#{number}")
        return (f"(rule ({' '.join(self.premises)}) ({' '.join(self.actions)}) "
                f":ruleset {self.rule.theme} :name {name})")  # fmt: skip

    def _pattern(self, term: Term) -> Term:
        """The pattern with constants in operand places as variables that have premises."""
        if isinstance(term, str):
            return term
        count = operand_count(term)
        form = head_form(term)
        if term[0] in BY_CONSTANT and is_constant(term[2]) and not is_constant(term[1]):
            return self._by_constant(term)
        out: list[Term] = [form.name if form else term[0]]
        for k, item in enumerate(term[1:]):
            if k < count and is_number(item):
                out.append(self._constant(float_text(float(item))))
            elif k < count and isinstance(item, str) and item.startswith("#"):
                out.append(self._constant(item[1:]))
            else:
                out.append(self._pattern(item))
        return tuple(out)

    def _by_constant(self, term: Term) -> str:
        """The result of an operation with a number, found in the relation that holds just these."""
        op, operand, number = term
        name = f"k{next(self.fresh)}"
        value = float_text(float(number)) if is_number(number) else show(number)[1:]
        pattern = show(self._pattern(operand))
        self.premises.append(f"({BY_CONSTANT[show(op)]} {name} {pattern} {value})")
        return name

    def _constant(self, value: str) -> str:
        name = f"k{next(self.fresh)}"
        self.premises.append(f"(= {value} (uniform {name}))")
        return name

    def _condition(self, term: Term) -> Term:
        if isinstance(term, str):
            return term
        if term[0] == "=" or head_form(term) is None:
            return tuple(
                self._condition(t) if operand_count(t) == 0 else self._pattern(t) for t in term
            )
        return self._pattern(term)

    def _build(self, term: Term) -> str:
        """The name of a new term, made of actions that also note which rule made it."""
        if isinstance(term, str):
            return term
        if term[0] == "const":
            return self._const(term)
        form = head_form(term)
        count = operand_count(term)
        if form is None and count == 0 and not _is_named(term):
            return show(term)
        args = [self._build(t) if k < count else show(t) for k, t in enumerate(term[1:])]
        name = f"r{next(self.fresh)}"
        head = form.name if form else show(term[0])
        self.actions.append(f"(let {name} ({' '.join([head, *args])}))")
        if form is not None:
            self.actions.append(
                f"(set ({' '.join([made_by(head), *args])}) {string_text(self.rule.base)})"
            )
        return name

    def _const(self, term: Term) -> str:
        assert not isinstance(term, str)
        _, value, like = term
        name = f"r{next(self.fresh)}"
        self.premises += [f"(= {name}s (shape {show(like)}))", f"(= {name}d (dtype {show(like)}))"]
        self.actions.append(f"(let {name} (Full {_number(value)} {name}d {name}s))")
        return name


def _is_named(term: Term) -> bool:
    from .rules.named import NAMED

    return not isinstance(term, str) and term[0] in NAMED


def _number(value: Term) -> str:
    return float_text(float(value)) if isinstance(value, str) and is_number(value) else show(value)


@cache
def translate(rule: Rule) -> tuple[str, ...]:
    """The engine's texts of a rule: one for each order of its commutative ops."""
    whole = (parse(rule.left), *(parse(c) for c in rule.when))
    texts = []
    for number, variant in enumerate(variants(whole)):
        assert not isinstance(variant, str)
        texts.append(_Translation(rule).text(variant[0], variant[1:], number))
    return tuple(texts)


def _terms(texts: Iterable[str]) -> Iterator[tuple[Term, ...]]:
    """All compound terms in patterns."""
    stack: list[Term] = [parse(t) for t in texts]
    while stack:
        term = stack.pop()
        if not isinstance(term, str):
            yield term
            stack.extend(term)


def heads(texts: Iterable[str]) -> set[str]:
    """The constructors that patterns name."""
    from .rules.named import NAMED

    found: set[str] = set()
    for term in _terms(texts):
        form = head_form(term)
        if form is not None:
            found.add(form.name)
        elif term[0] in NAMED:
            found.add(str(term[0]))
        elif term[0] == "const":
            found.add("Full")
    return found


def forms_in(rules: Iterable[Rule]) -> set[Form]:
    """The op constructors that rules name."""
    return {form for rule in rules for form in _forms(rule)}


@cache
def _forms(rule: Rule) -> frozenset[Form]:
    terms = _terms((rule.left, rule.right, *rule.when))
    return frozenset(form for form in map(head_form, terms) if form is not None)


@cache
def needs_and_makes(rule: Rule) -> tuple[frozenset[str], frozenset[str]]:
    """The constructors that a rule matches, and those that it makes."""
    return frozenset(heads((rule.left, *rule.when))), frozenset(heads((rule.right,)))


def able_to_match(
    rules: Sequence[Rule], constructors: Iterable[str]
) -> tuple[list[Rule], set[str]]:
    """The rules that can match in a program with these constructors, and all constructors that may
    then occur.
    """
    known = set(constructors)
    active: set[Rule] = set()
    while True:
        more = [r for r in rules if r not in active and needs_and_makes(r)[0] <= known]
        if not more:
            return [r for r in rules if r in active], known
        active.update(more)
        known.update(*(needs_and_makes(r)[1] for r in more))


@dataclass(frozen=True)
class ProgramRule:
    """A rule about a whole program: `find` gives pairs of a node and a new form of it.

    It is for what no pattern of fixed size says, such as all products that share an operand.
    """

    name: str
    theme: str
    find: Callable[[Sequence[Node]], Iterable[tuple[Node, Node]]]
    relaxed: bool = False

    @property
    def base(self) -> str:
        return self.name

    @property
    def about(self) -> str:
        """The first sentence of what `find` says of itself."""
        text = " ".join((self.find.__doc__ or "").split())
        return text.partition(". ")[0].rstrip(".")
