"""Rewrite rules as data, and their s-expressions with positions. Needs no e-graph engine, so that
options with rules in them are cheap to make.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .errors import IRError

Term = str | tuple["Term", ...]
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()]|[^\s()]+')


class RuleError(IRError):
    """A rule that is not well formed, is not known, or is wrong."""


@dataclass(frozen=True)
class Rule:
    """`left` = `right` whenever the conditions `when` hold; docs/egraph.md describes patterns.

    `samples` are values for the variables, from which the rule is checked: a text such as "f32[3,
    4]" is an array of that type, a tuple or number an attribute. Without samples the values are
    random. `relaxed` rules change rounding by more than the order of a sum does; they are off
    unless asked for. `theme` decides the phase: a user's rules are "extra" and run last.
    """

    name: str
    left: str
    right: str
    when: tuple[str, ...] = ()
    theme: str = "extra"
    samples: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)
    relaxed: bool = False

    def __post_init__(self) -> None:
        """Reject texts that cannot be read. Raises RuleError with the position."""
        if isinstance(self.when, str):
            object.__setattr__(self, "when", (self.when,))
        for text in (self.left, self.right, *self.when):
            try:
                parse(text)
            except RuleError as error:
                raise RuleError(f"rule {self.name}: {error}") from None

    @property
    def base(self) -> str:
        """The name without the rank that the rule is for."""
        return self.name.partition("@")[0]

    def __str__(self) -> str:
        return f"{self.name}: {self.equation}"

    @property
    def equation(self) -> str:
        """`left = right when ...` in a line."""
        conditions = f"  when {', '.join(self.when)}" if self.when else ""
        return f"{self.left} = {self.right}{conditions}"


@dataclass(frozen=True, slots=True)
class Located:
    """A term, the place in the text where it begins, and its items when it is compound."""

    term: Term
    at: int
    items: tuple[Located, ...] = ()


@cache
def parse(text: str) -> Term:
    """One s-expression as nested tuples. Raises RuleError with the position."""
    return locate(text).term


def locate(text: str) -> Located:
    """One s-expression with the place of every part."""
    tokens = [(m[0], m.start()) for m in _TOKEN.finditer(text)]
    found, end = _read(tokens, 0, text)
    if end != len(tokens):
        raise RuleError(pointed("one expression was needed, got more", text, tokens[end][1]))
    return found


def _read(tokens: list[tuple[str, int]], at: int, text: str) -> tuple[Located, int]:
    if at >= len(tokens):
        raise RuleError(pointed("an expression was needed, got nothing", text, len(text)))
    token, start = tokens[at]
    if token == ")":
        raise RuleError(pointed("a ) that closes nothing", text, start))
    if token[0] == '"' and (len(token) == 1 or token[-1] != '"'):
        raise RuleError(pointed("a text that is not closed", text, start))
    if token != "(":
        return Located(token, start), at + 1
    items: list[Located] = []
    at += 1
    while at < len(tokens) and tokens[at][0] != ")":
        item, at = _read(tokens, at, text)
        items.append(item)
    if at >= len(tokens):
        raise RuleError(pointed("a ( that is not closed", text, start))
    if not items:
        raise RuleError(pointed("an expression needs an op, got ()", text, start))
    return Located(tuple(i.term for i in items), start, tuple(items)), at + 1


def pointed(message: str, text: str, at: int) -> str:
    """The message, and below it the text with a mark under the place."""
    return f"{message}, at position {at}\n  {text}\n  {' ' * at}^"
