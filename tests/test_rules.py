"""Every rewrite rule: equal values, a match, and no match where its conditions do not hold."""

import itertools
import math

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.egraph.check import check_rule, fires, sample, samples
from eggpu.compiler.egraph.patterns import Rule, parse, variants
from eggpu.compiler.egraph.rules import all_rules, program_rules
from eggpu.compiler.errors import CompileError, EggpuError, IRError
from eggpu.compiler.ir import Graph, topological
from eggpu.compiler.reference import evaluate
from eggpu.compiler.tracing import trace
from eggpu.compiler.types import parse_type

RULES = {rule.name: rule for rule in all_rules()}
X = "f32[3, 4]"


def test_names_are_unique():
    assert len(RULES) == len(all_rules())


@pytest.mark.parametrize("name", RULES)
def test_both_sides_have_equal_values(name):
    assert all(check_rule(RULES[name], seed) < 1e-6 for seed in (0, 1))


@pytest.mark.parametrize("name", RULES)
def test_the_engine_takes_the_left_side_to_the_right_one(name):
    one = next(samples(RULES[name]))
    assert fires(RULES[name], one.given)


# What to change in a rule's first sample so that a condition is false.
F32, I32 = "f32[3, 4]", "i32[3, 4]"
REFUSED = {
    "div-power-of-two": {"c": 3.0},
    "div-to-mul": {"x": F32, "c": 0.0},
    "fold-mul-div": {"x": F32, "c": 1.0, "d": 0.0},
    "fold-mul-mul": {"x": I32, "c": 2.0, "d": 3.0},
    "neg-constant": {"x": F32, "c": 0.0},
    "mul-neg-constant": {"x": F32, "c": 0.0},
    "fold-add-add": {"x": I32, "c": 2.0, "d": 3.0},
    "sub-to-add": {"x": I32, "c": 2.0},
    "sum-div": {"x": F32, "z": F32, "s": (3, 4), "a": (1,)},
    "compose-transpose@2": {"p": (1, 0), "q": (1, 0)},
    "compose-transpose@3": {"p": (1, 2, 0), "q": (2, 0, 1)},
    "cancel-transpose": {"q": (1, 2, 0)},
    "drop-transpose": {"p": (1, 0)},
    "compose-reshape": {"t": (2, 6)},
    "cancel-reshape": {"t": (3, 4)},
    "drop-reshape": {"s": (12,)},
    "drop-broadcast": {"x": "f32[1, 6]"},
    "add-reshapes": {"y": "f32[3, 4]"},
    "split-sum@2": {"x": "f32[2, 3, 4]", "a": (0, 1)},
    "sum-transpose": {"a": (0, 1)},
    "sum-broadcast": {"x": "f32[3, 4]"},
    "dot-div-left": {"c": 0.0},
    "dot-div-right": {"c": 0.0},
    "scores-div": {"d": 0.0},
    "softmax-gradient-div": {"d": 0.0},
    "transpose-dot": {"a": "f32[2, 2, 4]", "b": "f32[2, 4, 2]", "t": (1, 0, 2)},
    "flatten-batch-1": {"a": "f32[2, 3, 4]", "b": "f32[2, 4, 5]"},
    "flatten-shared-matrix": {"b": "f32[1, 1, 1]"},
    "mean": {"c": 0.25},
    "mean-div": {"c": 3.0},
    **{f"gelu{order}": {"c": 0.6} for order in ("", "-outer", "-inner")},
    **{f"gelu-tanh{order}": {"d": 0.8} for order in ("", "-outer", "-inner")},
    "erf-div": {"c": 1.5},
    "index-reshape": {"t": (4, 3)},
    "index-column": {"t": (1, 4)},
    "index-broadcast": {"a": -2},
    "causal-reshape": {"t": (4, 3)},
    "causal-broadcast": {"s": (2, 1, 4)},
    "keys-not-below": {"a": 1.0},
    "keys-not-from": {"a": 4.0},
    "keys-above": {"a": 4.0},
    "keys-under": {"a": 1.0},
    "keys-reshape": {"t": (4, 10)},
    "keys-broadcast": {"s": (1, 4, 1)},
    "keys-back": {"e": "i32[2, 4, 2]", "t": (8, 2), "s": (2, 4, 2)},
    # more rows than the kernels for few rows take
    **{
        f"decode-{form}{case}": {
            "q": "f32[2, 17, 3]",
            "x": x,
            "o": "f32[2, 17, 4]",
            "m": "bool[2, 17, 4]",
            "a": "i32[2, 17, 1]",
            "b": "i32[2, 17, 1]",
            "s": (2, 17, 4),
        }
        for form in ("online", "phases", "split")
        for case, x in (
            ("", ""),
            ("-mask", "bool[2, 17, 4]"),
            ("-bias", "f32[2, 17, 4]"),
            ("-both", "bool[2, 17, 4]"),
            ("-bounds", "(Between a b s)"),
            ("-bounds-mask", "(And (Between a b s) m)"),
        )
    },
    **{
        f"weights-{name}": {
            "q": "f32[2, 17, 3]",
            "m": m,
            "x": x,
            "f": "i32[2, 17, 1]",
            "g": "i32[2, 17, 1]",
            "s": (2, 17, 4),
        }
        for name, m, x in (
            ("bounds-nan", "(Between f g s)", ""),
            ("bounds-mask-nan", "(And (Between f g s) x)", "bool[2, 17, 4]"),
            ("bounds-bias-nan", "(Between f g s)", "f32[2, 17, 4]"),
            ("bounds-bias", "(Between f g s)", "f32[2, 17, 4]"),
        )
    },
    "weights-bounds-mean": {"d": -math.inf},
    "decode-phases-keys": {"k": "f32[2, 65537, 3]", "v": "f32[2, 65537, 6]"},
    "decode-phases-keys-extra": {
        "k": "f32[2, 65537, 3]",
        "v": "f32[2, 65537, 6]",
        "x": "bool[2, 4, 65537]",
    },
    # 18 rows in a group
    **{
        f"group-heads{kind}": {
            "q": "f32[2, 18, 2, 3]",
            "x": "f32[2, 18, 2, 4]",
            "d": (2, 2, 9, 4, 3),
            "f": (2, 18, 4, 3),
            "p": (2, 2, 9, 4, 5),
            "s": (2, 18, 4, 5),
            "low": "i32[2, 18, 2, 1]",
            "high": "i32[2, 18, 2, 1]",
        }
        for kind in (
            "",
            "-extra",
            *(
                f"-{form}{case}"
                for form in ("online", "phases", "split")
                for case in ("", "-bounds", "-extra", "-bounds-extra")
            ),
        )
    },
    "mask-by-adding": {"f": -100.0},
    "scores-softcap": {"d": -2.0},
    # softmax over the queries
    "weights": {"a": (1,)},
    # a number that is not far below every score
    "weights-causal": {"f": -100.0},
    # the first query would see no key
    "weights-causal-safe": {"o": -1.0},
    # the last query's window lies behind all keys; a window of no keys
    "weights-window": {"kt": "f32[2, 3, 2]", "s": (2, 4, 2)},
    "weights-window-safe": {"f": -100.0},
    "weights-window-rows": {"p": -1.0},
    # a mask that the kernel knows by itself
    **{
        f"weights-{place}{extra}{kind}": {"m": "(Causal s -1.0)"}
        for place in ("", "causal-", "window-")
        for extra in ("mask", "both")
        for kind in ("", "-nan")
    },
    "choose-equal": {"d": 1.0},
    "choose-equal-other": {"c": 0.0},
    "choose-unequal": {"d": 1.0},
    "choose-unequal-other": {"c": 0.0},
    "softmax-hidden-twice": {"f": -100.0},
    "weights-unseen-nan": {"o": 0.0},
    "weights-unseen-mean": {"o": 0.0},
    # hidden scores that count
    **{
        f"weights-{name}-mean": {"f": -100.0}
        for name in (
            *("mask", "causal-mask", "window-mask", "causal-bias", "window-bias"),
            *("both", "causal-both", "window-both"),
        )
    },
    # a window of no keys
    **{f"weights-window-bias{kind}": {"p": 0.0} for kind in ("", "-nan")},
    "hidden-gradient-div": {"d": 0.0},
    "capped-gradient-hidden": {"f": -100.0},
    "capped-gradient-hidden-bias": {"f": -100.0},
    "capped-gradient-hidden-both": {"f": -100.0},
    "hidden-gradient-both": {"f": -100.0},
    # a bias that is repeated along queries; one that is not repeated before them
    **{
        f"bias-gradient-{case}{both}": {"a": (2,)}
        for case in ("sum", "rows")
        for both in ("", "-both")
    },
    "hidden-gradient": {"f": -100.0},
    "hidden-gradient-safe": {"f": -100.0},
    "hidden-gradient-extra": {"f": -100.0},
    # numbers that do not make up the scale
    "scores-gradient-softcap": {"r": 0.25},
    "scores-gradient-guarded": {"r": 0.25},
    **{f"attention-{name}-scaled": {"m": 2.0} for name in ("dq", "dqt", "dk", "dkt")},
    **{f"attention-{name}": {"e": 2.0} for name in ("dq", "dqt", "dk", "dkt")},
    "drop-div-guard": {"c": 0.0},
    "constant-right-mul": {"c": -math.inf},
    "scores-gradient-div": {"m": 0.0},
}


@pytest.mark.parametrize("name", REFUSED)
def test_conditions_keep_a_rule_from_matching(name):
    rule = RULES[name]
    assert not fires(rule, {**next(samples(rule)).given, **REFUSED[name]})


def narrower(rule: Rule, given: dict):
    """The same values, where an array has one element along an axis, two of them or all."""
    text = " ".join((rule.left, *rule.when, rule.right))
    for name, value in given.items():
        if not isinstance(value, str) or not value.endswith("]"):
            continue
        if value.startswith("i32") and ("(Between" in text or "(WeightsB" in text):
            continue  # bounds of keys, which rules make with their rows' shape
        start, extents = value[:-1].split("[")
        shape = [int(e) for e in extents.split(",") if e.strip()]
        axes = [k for k, e in enumerate(shape) if e != 1]
        for some in {(k,) for k in axes} | set(itertools.combinations(axes, 2)) | {tuple(axes)}:
            ones = [1 if k in some else e for k, e in enumerate(shape)]
            yield {**given, name: f"{start}[{', '.join(map(str, ones))}]"}


def agree(one) -> bool:
    """Whether a rule may match: its conditions hold, and both sides are the same."""
    left = one.left().node
    if one.unmet:
        return False
    try:
        right = one.right().node
    except EggpuError:
        return False
    if left.type != right.type:
        return False
    graph = Graph("sides", tuple(one.inputs), (left, right))
    a, b = evaluate(graph, one.arrays(0), np.float64)
    return np.allclose(a, b, 1e-6, 1e-6, equal_nan=True)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_right_for_operands_that_are_broadcast_along_any_axis(name):
    rule = RULES[name]
    for one in samples(rule):
        for given in narrower(rule, one.given):
            try:
                other = sample(rule, given)
                other.left()
            except EggpuError:
                continue  # there is no such program
            assert agree(other) or not fires(rule, given), given


def test_every_comparison_has_a_counterexample():
    compares = {
        rule.name
        for rule in all_rules()
        if any(parse(c)[0] in ("<", "<=", "!=", "power-of-two") for c in rule.when)
    }
    ranks = {f"compose-transpose@{r}" for r in (4, 5, 6)}
    assert compares - ranks <= set(REFUSED)


def test_a_wrong_rule_is_found_by_its_values():
    assert check_rule(Rule("wrong", "(Sub x y)", "(Sub y x)")) > 0.1
    with pytest.raises(IRError, match="differ"):
        check_rule(Rule("wrong", "(Sum x a)", "x", samples=({"x": X, "a": (1,)},)))


def test_a_rule_that_changes_a_type_fails_loudly():
    rule = Rule("wrong", "(Sum x a)", "x")
    with pytest.raises(CompileError, match="merge"):
        fires(rule, {"x": X, "a": (1,)})


def test_commutative_patterns_match_in_every_order():
    orders = ["(Mul (Add x y) z)", "(Mul z (Add x y))", "(Mul (Add y x) z)", "(Mul z (Add y x))"]
    assert variants(parse("(Mul* (Add* x y) z)")) == list(map(parse, orders))
    assert len(variants(parse("(Mul* x x)"))) == 1


def scattered(x, at):
    return eg.grad(lambda t: eg.sum(eg.take(t, at, 0) * 2.0))(x)


def masked(x):
    seen = np.tril(np.ones((4, 4), bool))
    return (
        eg.where(eg.array(seen), x, 0.0)
        + eg.array(np.where(np.tri(4, k=-1), 0.0, -9.0))
        + eg.array(np.ones((4, 4)))
    )


def shared(x, w1, w2, b1, b2):
    return eg.matmul(x, w1) + b1, eg.matmul(x, w2) + b2


def summed(a, b, c, d):
    return (eg.matmul(a, b) + eg.matmul(c, d)) + eg.matmul(d, b)


def in_parts(x, w, v):
    """A row times keys in parts, side by side, and the sum of its parts times values in parts."""
    keys = [w[:, 1:4], w[:, 4:6], w[:, 0:1]]
    scores = eg.concatenate([eg.matmul(x, k) for k in keys], -1)
    share = eg.exp(scores)
    return share[:, :3] @ v[:3] + share[:, 3:5] @ v[3:5] + share[:, 5:] @ v[5:]


PROGRAMS = {
    "scatter-as-product": (scattered, ["f32[6, 3]", "i32[9]"], 1),
    "constant-as-mask": (masked, ["f32[4, 4]"], 3),
    "wide-product": (shared, ["f32[3, 4, 4]", "f32[4, 5]", "f32[4, 6]", "f32[5]", "f32[6]"], 4),
    "sum-of-products": (summed, ["f32[4, 4]"] * 4, 1),
    "products-side-by-side": (in_parts, ["f32[1, 4]", "f32[4, 6]", "f32[6, 4]"], 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_rules_about_programs_keep_values(name):
    function, types, count = PROGRAMS[name]
    graph = trace(function, *map(parse_type, types))
    (rule,) = (r for r in program_rules() if r.name == name)
    pairs = list(rule.find(topological(graph.outputs)))
    assert len(pairs) == count
    rng = np.random.default_rng(0)
    inputs = [
        rng.integers(0, 6, n.shape) if n.dtype.kind == "i" else rng.standard_normal(n.shape)
        for n in graph.inputs
    ]
    for old, new in pairs:
        assert old.type == new.type
        one = Graph("pair", graph.inputs, (old, new))
        left, right = evaluate(one, inputs, np.float64)
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-9)


def test_parts_of_a_whole_are_joined_to_it():
    graph = trace(in_parts, *map(parse_type, ["f32[1, 4]", "f32[4, 6]", "f32[6, 4]"]))
    order = topological(graph.outputs)
    rules = {r.name: r for r in program_rules()}
    ((_, total),) = rules["sum-of-products"].find(order)
    assert total.operands == (next(n for n in order if n.op.name == "exp"), graph.inputs[2])
    ((_, side),) = rules["products-side-by-side"].find(order)
    assert side.operands[1].op.name == "concat"  # not in order, so not the whole
    rng = np.random.default_rng(1)
    values = [rng.standard_normal(n.shape) for n in graph.inputs]
    one = Graph("pair", graph.inputs, (graph.outputs[0], total))
    left, right = evaluate(one, values, np.float64)
    np.testing.assert_allclose(left, right, rtol=1e-9)


def test_products_of_several_operands_side_by_side_stay():
    def two(x, y, w):
        return eg.concatenate([x @ w, y @ w], -1), eg.concatenate([x @ w, x @ y], 0)

    graph = trace(two, *map(parse_type, ["f32[4, 4]"] * 3))
    rule = next(r for r in program_rules() if r.name == "products-side-by-side")
    assert list(rule.find(topological(graph.outputs))) == []


def test_products_that_need_each_other_are_not_joined():
    def chained(x, w):
        y = eg.matmul(x, w)
        return eg.matmul(x, y)

    graph = trace(chained, *map(parse_type, ("f32[4, 4]", "f32[4, 4]")))
    (rule,) = (r for r in program_rules() if r.name == "wide-product")
    assert list(rule.find(topological(graph.outputs))) == []


def test_relaxed_chains_of_products_take_the_fewest_multiplications():
    def chain(*matrices):
        out = matrices[0]
        for one in matrices[1:]:
            out = out @ one
        return out

    sides = 30, 35, 15, 5, 10, 20, 25
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(s, np.float32) for s in itertools.pairwise(sides)]
    want = np.linalg.multi_dot([m.astype(np.float64) for m in given])
    flops = []
    for relaxed in (False, True):
        compiled = eg.compile(chain, relaxed=relaxed, cache=False)
        got = compiled(*given).numpy()
        assert np.abs(got - want).max() < 1e-6 * np.abs(want).max()
        flops.append(sum(k.flops for k in compiled.plan.kernels))
    assert flops == [81_000, 30_250]  # as written, and the least


def test_relaxed_rules_are_those_that_change_results():
    assert {r.base for r in all_rules() if r.relaxed} == {
        "div-to-mul",
        "dot-chain-left",
        "dot-chain-right",
        "softmax-unshifted",
        *(
            f"weights-{place}-{extra}-mean"
            for place in ("causal", "window")
            for extra in ("bias", "both")
        ),
        "weights-both-mean",
    }
