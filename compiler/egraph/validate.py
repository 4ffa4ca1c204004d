"""Rules that users write, checked before the engine sees them: names, ops, operand counts,
variables.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence

from ..rule import Located, Rule, RuleError, locate, pointed
from .check import ARITHMETIC
from .language import families
from .patterns import is_number, operand_count
from .rules import PHASES, all_rules, program_rules
from .rules.named import NAMED
from .terms import COMMUTATIVE

THEMES = tuple(dict.fromkeys(t for p in PHASES for t in p.themes if t != "facts"))
FUNCTIONS = frozenset({"=", *ARITHMETIC})  # what conditions and attributes may compute


def validate(rule: Rule) -> None:
    """Raise RuleError, with the position in its text, for what is wrong with a rule."""
    try:
        _validate(rule)
    except RuleError as error:
        raise RuleError(f"rule {rule.name}: {error}") from None


def known_names(extra: Iterable[Rule] = ()) -> set[str]:
    """The names by which rules can be turned off."""
    return {r.base for r in (*all_rules(), *program_rules(), *extra)}


def validate_choice(without: Sequence[str], extra: Sequence[Rule]) -> None:
    """Raise RuleError for a rule that cannot be turned off, as there is none of that name, or one
    that cannot be added."""
    built_in = {r.name for r in (*all_rules(), *program_rules())} | known_names()
    seen: set[str] = set()
    for rule in extra:
        validate(rule)
        if rule.name in built_in or rule.name in seen:
            raise RuleError(f"rule {rule.name}: another rule has this name")
        seen.add(rule.name)
    known = known_names(extra)
    for name in without:
        if name not in known:
            raise RuleError(
                f"without names {name!r}, which is no rule{_suggestion(name, known)}; "
                "`eggpu rules` lists them"
            )


def _validate(rule: Rule) -> None:
    if not rule.name or any(c in rule.name for c in '#" \n()'):
        raise RuleError('a name has no spaces, parentheses, " or #')
    if rule.theme not in THEMES:
        raise RuleError(f"theme {rule.theme!r} is none of {', '.join(THEMES)}")
    left = locate(rule.left)
    conditions = [(locate(text), text) for text in rule.when]
    if not left.items and is_number(left.term):
        raise RuleError(pointed("the left side is a number", rule.left, left.at))
    _pattern(left, rule.left, "left")
    bound = {"root"} | {v for v, *_ in _variables(left)}
    for condition, text in conditions:
        if not condition.items:
            raise RuleError(pointed("a condition is an expression", text, condition.at))
        _pattern(condition, text, "condition")
        bound.update(v for v, *_ in _variables(condition))
    if not left.items and left.term not in {v for c, _ in conditions for v, *_ in _variables(c)}:
        raise RuleError(pointed(f"{left.term} alone matches everything", rule.left, left.at))
    right = locate(rule.right)
    _pattern(right, rule.right, "right")
    for name, at in _variables(right):
        if name not in bound:
            what = f"{name} is on the right side only{_suggestion(name, bound)}"
            raise RuleError(pointed(what, rule.right, at))


def _variables(term: Located) -> Iterator[tuple[str, int]]:
    if not isinstance(term.term, str):
        for item in term.items[1:]:
            yield from _variables(item)
    elif not is_number(term.term) and not term.term.startswith('"'):
        yield term.term.removeprefix("#"), term.at


def _pattern(term: Located, text: str, side: str) -> None:
    """Check a term in the place of an array, or a condition."""
    if not term.items:
        _leaf(term, text, side)
        return
    head = term.items[0]
    if not isinstance(head.term, str):
        raise RuleError(pointed("an op's name was needed, got an expression", text, head.at))
    if head.term == "const":
        _const(term, text, side)
        return
    name = head.term.removesuffix("*") if len(head.term) > 1 else head.term
    if side == "condition" and head.term in FUNCTIONS:
        for item in term.items[1:]:
            _condition_item(item, text)
        return
    if name != head.term and (name not in COMMUTATIVE or side == "right"):
        why = "stands on the left side only" if name in COMMUTATIVE else f"{name} does not commute"
        raise RuleError(pointed(f"* for either order of the operands: {why}", text, head.at))
    _count(term, name, text)
    operands = operand_count(term.term)
    if operands and side == "left" and all(map(_is_number, term.items[1 : 1 + operands])):
        raise RuleError(pointed(f"{name} of numbers alone has no type", text, term.at))
    for item in term.items[1 : 1 + operands]:
        _pattern(item, text, side)
    for item in term.items[1 + operands :]:
        _attribute(item, text)


def _condition_item(item: Located, text: str) -> None:
    head = item.items[0].term if item.items else None
    if isinstance(head, str) and (head.removesuffix("*") in families() or head in NAMED):
        _pattern(item, text, "condition")
    else:
        _attribute(item, text)


def _is_number(term: Located) -> bool:
    return isinstance(term.term, str) and (is_number(term.term) or term.term.startswith("#"))


def _leaf(term: Located, text: str, side: str) -> None:
    assert isinstance(term.term, str)
    if term.term.startswith('"'):
        raise RuleError(pointed("an array was needed, got a text", text, term.at))
    if side == "right" and (is_number(term.term) or term.term.startswith("#")):
        number = term.term.removeprefix("#")
        what = f"a number needs the type of a value: (const {number} x)"
        raise RuleError(pointed(what, text, term.at))
    if term.term == "#":
        raise RuleError(pointed("# needs a name", text, term.at))


def _const(term: Located, text: str, side: str) -> None:
    if side != "right":
        raise RuleError(pointed("const stands on the right side only; write #c", text, term.at))
    if len(term.items) != 3:
        raise RuleError(pointed("const needs a number and a variable", text, term.at))
    _attribute(term.items[1], text)
    if term.items[2].items:
        raise RuleError(pointed("const takes its type from a variable", text, term.items[2].at))


def _attribute(term: Located, text: str) -> None:
    """Check a term in the place of a number, a text or a tuple."""
    if not term.items:
        if isinstance(term.term, str) and term.term.startswith("#"):
            raise RuleError(pointed(f"{term.term[1:]} is a number here, without #", text, term.at))
        return
    head = term.items[0].term
    if head not in FUNCTIONS:
        what = f"{head} is no function of attributes{_suggestion(str(head), FUNCTIONS)}"
        raise RuleError(pointed(what, text, term.items[0].at))
    for item in term.items[1:]:
        _attribute(item, text)


def _count(term: Located, name: str, text: str) -> None:
    """Check that an op is known and has as many operands and attributes as it needs."""
    got, at = len(term.items) - 1, term.items[0].at
    family, named = families().get(name), NAMED.get(name)
    if family is not None:
        attributes = [n for n, _ in family.fields]
        least, exact = family.least + len(attributes), not family.variadic
    elif named is not None:
        attributes = list(named.attributes)
        least, exact = named.operands + len(attributes), True
    else:
        known = {*families(), *NAMED}
        raise RuleError(pointed(f"{name} is no op{_suggestion(name, known)}", text, at))
    if got < least or (exact and got > least):
        operands = least - len(attributes)
        extra = f" and the attributes {', '.join(attributes)}" if attributes else ""
        plural = "" if operands == 1 else "s"
        what = f"{name} needs {operands} operand{plural}{extra}, got {got} in all"
        raise RuleError(pointed(what, text, at))


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), 1, 0.6)
    return f" (did you mean {close[0]}?)" if close else ""
