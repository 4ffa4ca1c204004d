"""Checks for tests: whether gradients and rewrite rules are right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eggpu.compiler.rule import Rule, RuleError
from eggpu.grad_check import WrongGradient as WrongGradient
from eggpu.grad_check import check_grads as check_grads

if TYPE_CHECKING:
    from eggpu.compiler.egraph.counterexample import Counterexample


class WrongRule(RuleError):
    """A rule whose sides differ; `counterexample` has the values and what both sides are then."""

    def __init__(self, counterexample: Counterexample) -> None:
        super().__init__(str(counterexample))
        self.counterexample = counterexample


def check_rule(rule: Rule, seed: int = 0) -> int:
    """Evaluate both sides of a rule in double precision; how many samples were compared.

    The samples are the rule's own, or random shapes, attributes and numbers, each with normal and
    with special values (zeros of both signs, ones, large and small numbers). Raises WrongRule with
    a counterexample when the sides differ in type or value, and RuleError when the rule is not well
    formed or no values meet its conditions.
    """
    from eggpu.compiler.egraph.counterexample import search

    found, count = search(rule, seed)
    if found is not None:
        raise WrongRule(found)
    return count
