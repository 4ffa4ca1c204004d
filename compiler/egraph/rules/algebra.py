"""Algebra: identities, constants, and the steps that bring gradients to their textbook forms."""

from __future__ import annotations

from ..patterns import Rule


def _rule(
    name: str, left: str, right: str, *when: str, samples: tuple = (), relaxed: bool = False
) -> Rule:
    return Rule(name, "algebra", left, right, when, samples, relaxed)


# Operations that do nothing. x + 0 keeps NaN and infinities; x * 0 is no rule, for it would not.
IDENTITIES = (
    _rule("mul-one",            "(Mul* x 1.0)",                  "x"),
    _rule("div-one",            "(Div x 1.0)",                   "x"),
    _rule("add-zero",           "(Add* x 0.0)",                  "x"),
    _rule("sub-zero",           "(Sub x 0.0)",                   "x"),
    _rule("mul-minus-one",      "(Mul* x -1.0)",                 "(Neg x)"),
    _rule("cancel-neg",         "(Neg (Neg x))",                 "x"),
    _rule("drop-stop-gradient", "(StopGradient x)",              "x"),  # gradients are part of the program by now
    _rule("drop-identity",      "(Identity x)",                  "x"),
    _rule("select-true",        "(Select 1.0 x y)",              "x"),
    _rule("select-false",       "(Select 0.0 x y)",              "y"),
    _rule("select-same",        "(Select c x x)",                "x", samples=({"c": "bool[3, 4]", "x": "f32[3, 4]"},)),
    _rule("select-not",         "(Select (Not c) x y)",          "(Select c y x)",
          samples=({"c": "bool[3, 4]", "x": "f32[3, 4]", "y": "f32[3, 4]"},)),
    _rule("cancel-not",         "(Not (Not c))",                 "c", samples=({"c": "bool[3, 4]"},)),
)  # fmt: skip

# Numbers meet: the engine's doubles are rounded once to the dtype, never worse than the operations they replace.
CONSTANTS = (
    _rule("constant-right-mul", "(Mul #c x)",                    "(Mul x (const c x))"),
    _rule("constant-right-add", "(Add #c x)",                    "(Add x (const c x))"),
    _rule("fold-mul-mul",       "(Mul (Mul x #c) #d)",           "(Mul x (const (* c d) x))", *("(= f (dtype x))", "(float f)")),
    _rule("fold-mul-div",       "(Div (Mul x #c) #d)",           "(Mul x (const (/ c d) x))", "(!= d 0.0)"),
    _rule("fold-add-add",       "(Add (Add x #c) #d)",           "(Add x (const (+ c d) x))", *("(= f (dtype x))", "(float f)")),
    _rule("neg-constant",       "(Neg (Mul x #c))",              "(Mul x (const (neg c) x))"),
    _rule("mul-neg-constant",   "(Mul (Neg x) #c)",              "(Mul x (const (neg c) x))"),
    _rule("sub-to-add",         "(Sub x #c)",                    "(Add x (const (neg c) x))", *("(= f (dtype x))", "(float f)")),
    # 1 / c is exact for a power of two, whose significand is one half in every binary format
    _rule("div-power-of-two",   "(Div x #c)",                    "(Mul x (const (/ 1.0 c) x))", "(power-of-two c)",
          samples=({"x": "f32[3, 4]", "c": 8.0}, {"x": "f32[5]", "c": 0.25})),
    _rule("div-to-mul",         "(Div x #c)",                    "(Mul x (const (/ 1.0 c) x))", "(!= c 0.0)", relaxed=True),
)  # fmt: skip

# Signs move outwards, sums of negatives become differences.
SIGNS = (
    _rule("add-neg",            "(Add* x (Neg y))",              "(Sub x y)"),
    _rule("sub-neg",            "(Sub x (Neg y))",               "(Add x y)"),
    _rule("neg-sub",            "(Neg (Sub x y))",               "(Sub y x)"),
    _rule("mul-neg",            "(Mul* (Neg x) y)",              "(Neg (Mul x y))"),
    _rule("div-neg",            "(Div (Neg x) y)",               "(Neg (Div x y))"),
    _rule("div-by-neg",         "(Div x (Neg y))",               "(Neg (Div x y))"),
    _rule("sum-neg",            "(Sum (Neg x) a)",               "(Neg (Sum x a))",
          samples=({"x": "f32[3, 4]", "a": (1,)}, {"x": "f32[2, 3, 4]", "a": (0, 2)})),
    _rule("broadcast-neg",      "(Broadcast (Neg x) s)",         "(Neg (Broadcast x s))",
          samples=({"x": "f32[3, 1]", "s": (3, 4)},)),
)  # fmt: skip

_ROW = (
    {"x": "f32[3, 4]", "z": "f32[3, 1]", "a": (1,), "s": (3, 4)},
    {"x": "f32[2, 3, 4]", "z": "f32[2, 1, 1]", "a": (1, 2), "s": (2, 3, 4)},
)

# The gradient of e / sum(e) comes as (g / z + sum(-(g * p) / z)) * e; these steps lead to p * (g - sum(g * p)).
SOFTMAX = (
    # z is one number along the summed axes
    _rule("sum-div",            "(Sum (Div x (Broadcast z s)) a)",          "(Div (Sum x a) z)", "(= (shape root) (shape z))", samples=_ROW),
    _rule("sum-mul-constant",   "(Sum (Mul x #c) a)",            "(Mul (Sum x a) (const c root))",
          samples=({"x": "f32[3, 4]", "a": (1,), "c": 0.5},)),
    _rule("broadcast-div",      "(Broadcast (Div x y) s)",       "(Div (Broadcast x s) (Broadcast y s))",
          samples=({"x": "f32[3, 1]", "y": "f32[3, 1]", "s": (3, 4)},)),
    _rule("common-divisor-add", "(Add (Div x z) (Div y z))",     "(Div (Add x y) z)"),
    _rule("common-divisor-sub", "(Sub (Div x z) (Div y z))",     "(Div (Sub x y) z)"),
    _rule("mul-div",            "(Mul* (Div x z) e)",            "(Mul x (Div e z))"),
    _rule("common-factor-sub",  "(Sub (Mul* x z) (Mul* y z))",   "(Mul (Sub x y) z)"),
    # exp(x - log z) = exp(x) / z
    _rule("exp-sub-log",        "(Exp (Sub x (Log z)))",         "(Div (Exp x) z)",
          samples=({"x": "f32[3, 4]", "z": "positive f32[3, 4]"},)),
    _rule("broadcast-log",      "(Broadcast (Log z) s)",         "(Log (Broadcast z s))",
          samples=({"z": "positive f32[3, 1]", "s": (3, 4)},)),
    _rule("div-sqrt",           "(Div x (Sqrt y))",              "(Mul x (Rsqrt y))",
          samples=({"x": "f32[3, 4]", "y": "positive f32[3, 4]"},)),
)  # fmt: skip

RULES = (*IDENTITIES, *CONSTANTS, *SIGNS, *SOFTMAX)
