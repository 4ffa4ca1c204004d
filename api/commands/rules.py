"""`eggpu rules`: the rewrite rules of the e-graph, and a check of each."""

from __future__ import annotations

import argparse
from typing import Any

import eggpu as eg
from eggpu.compiler.rule import RuleError


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """The command's flags."""
    text = "list the rewrite rules of the e-graph"
    parser = commands.add_parser("rules", parents=[common], help=text, description=text)
    parser.add_argument("--theme", help="only the rules of this theme")
    parser.add_argument(
        "--check", action="store_true", help="evaluate both sides of each rule and compare them"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; with --check the result for each rule, and 1 when one is wrong."""
    table = eg.rules.list(args.theme)
    if not args.check:
        print(table)
        relaxed = sum(r.relaxed for r in table)
        print(f"{len(table)} rules, {relaxed} of them only with relaxed=True")
        return 0
    return check(table)


def check(table: eg.rules.Table) -> int:
    """Check every rule that is an equation."""
    from eggpu.compiler.egraph.rules import all_rules

    equations = {r.name: r for r in all_rules()}
    wrong = checked = 0
    for row in table:
        rule = equations.get(row.name)
        if rule is None:
            continue  # about whole programs
        checked += 1
        try:
            print(f"ok    {rule.name}: {eg.testing.check_rule(rule)} samples")
        except RuleError as error:
            wrong += 1
            print(f"WRONG {error}")
    print(f"{checked} rules checked, {wrong or 'none'} wrong")
    return 1 if wrong else 0
