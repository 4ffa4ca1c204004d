"""Algebra: identities, numbers, signs, and the steps that bring gradients to textbook forms."""

from __future__ import annotations

from ..patterns import rules_of, with_samples

_rule = rules_of("algebra")

# Operations that do nothing. x + 0 keeps NaN and infinities; x * 0 is no rule, for it would not.
# Gradients are part of the program by now, so a stopped gradient is the value itself.
IDENTITIES = (
    _rule("mul-one",            "(Mul* x 1.0)",            "x"),
    _rule("div-one",            "(Div x 1.0)",             "x"),
    _rule("add-zero",           "(Add* x 0.0)",            "x"),
    _rule("sub-zero",           "(Sub x 0.0)",             "x"),
    _rule("mul-minus-one",      "(Mul* x -1.0)",           "(Neg x)"),
    _rule("cancel-neg",         "(Neg (Neg x))",           "x"),
    _rule("drop-stop-gradient", "(StopGradient x)",        "x"),
    _rule("drop-identity",      "(Identity x)",            "x"),
    _rule("select-true",        "(Select 1.0 x y)",        "x"),
    _rule("select-false",       "(Select 0.0 x y)",        "y"),
    _rule("select-same",        "(Select c x x)",          "x"),
    _rule("select-not",         "(Select (Not c) x y)",    "(Select c y x)"),
    _rule("cancel-not",         "(Not (Not c))",           "c"),
)  # fmt: skip

_FLOAT = ("(= f (dtype x))", "(float f)")
_FINITE = ("(< 0.0 (abs c))", "(< (abs c) inf)")
# Numbers meet: the engine's doubles are rounded once to the dtype, never worse than the operations
# they replace. A number that would stay as it is (0, an infinity) is left alone, for such a value
# equals its own multiples and would be folded forever. 1 / c is exact for a power of two.
NUMBERS = (
    _rule("constant-right-mul", "(Mul #c x)",          "(Mul x (const c x))", *_FINITE),
    _rule("constant-right-add", "(Add #c x)",          "(Add x (const c x))"),
    _rule("fold-mul-mul",       "(Mul (Mul x #c) #d)", "(Mul x (const (* c d) x))", *_FLOAT,
          "(!= (* c d) c)"),
    _rule("fold-mul-div",       "(Div (Mul x #c) #d)", "(Mul x (const (/ c d) x))", "(!= d 0.0)",
          "(!= (/ c d) c)"),
    _rule("fold-add-add",       "(Add (Add x #c) #d)", "(Add x (const (+ c d) x))", *_FLOAT,
          "(!= (+ c d) c)"),
    _rule("neg-constant",       "(Neg (Mul x #c))",    "(Mul x (const (neg c) x))", "(!= c 0.0)"),
    _rule("mul-neg-constant",   "(Mul (Neg x) #c)",    "(Mul x (const (neg c) x))", "(!= c 0.0)"),
    _rule("sub-to-add",         "(Sub x #c)", "(Add x (const (neg c) x))", *_FLOAT, "(!= c 0.0)"),
    _rule("div-power-of-two",   "(Div x #c)", "(Mul x (const (/ 1.0 c) x))", "(power-of-two c)"),
    _rule("div-to-mul",         "(Div x #c)",          "(Mul x (const (/ 1.0 c) x))", "(!= c 0.0)",
          relaxed=True),
)  # fmt: skip

# What autodiff guards below a choice, since 0 * inf is no 0, needs no guard around a number.
GUARDS = (
    _rule("drop-div-guard",     "(Select (Eq x 0.0) 0.0 (Div x #c))", "(Div x (const c x))",
          "(< 0.0 (abs c))"),
)  # fmt: skip

# Signs move outwards, sums with negatives become differences.
SIGNS = (
    _rule("add-neg",            "(Add* x (Neg y))",        "(Sub x y)"),
    _rule("sub-neg",            "(Sub x (Neg y))",         "(Add x y)"),
    _rule("neg-sub",            "(Neg (Sub x y))",         "(Sub y x)"),
    _rule("mul-neg",            "(Mul* (Neg x) y)",        "(Neg (Mul x y))"),
    _rule("div-neg",            "(Div (Neg x) y)",         "(Neg (Div x y))"),
    _rule("div-by-neg",         "(Div x (Neg y))",         "(Neg (Div x y))"),
    _rule("sum-neg",            "(Sum (Neg x) a)",         "(Neg (Sum x a))"),
    _rule("broadcast-neg",      "(Broadcast (Neg x) s)",   "(Neg (Broadcast x s))"),
)  # fmt: skip

# The gradient of p = e / sum(e) comes as (g / z + sum(-(g * p) / z)) * e; these steps lead to
# p * (g - sum(g * p)). Where a safe softmax replaces the sum 0 by 1, all exponentials are 0 and
# what is multiplied with them does not matter. exp(x - log z) = exp(x) / z.
SOFTMAX = (
    _rule("sum-div",            "(Sum (Div x (Broadcast z s)) a)", "(Div (Sum x a) z)",
          "(= (shape root) (shape z))"),
    _rule("sum-mul-constant",   "(Sum (Mul x #c) a)", "(Mul (Sum x a) (const c root))"),
    _rule("broadcast-div",      "(Broadcast (Div x y) s)", "(Div (Broadcast x s) (Broadcast y s))"),
    _rule("common-divisor-add", "(Add (Div x z) (Div y z))",       "(Div (Add x y) z)"),
    _rule("common-divisor-sub", "(Sub (Div x z) (Div y z))",       "(Div (Sub x y) z)"),
    _rule("mul-div-exp",        "(Mul* (Div x z) e)", "(Mul x (Div e z))", "(= e (Exp u))"),
    _rule("common-factor-sub",  "(Sub (Mul* x z) (Mul* y z))",     "(Mul (Sub x y) z)",
          "(= y (Broadcast (Sum w a) s))"),
    _rule("drop-zero-guard",    "(Mul* (Add* x (Broadcast (Select (Eq* z 0.0) 0.0 y) s)) e)",
          "(Mul (Add x (Broadcast y s)) e)", "(= z (Sum e a))", "(= e (Exp u))"),
    _rule("drop-zero-guards",   "(Select (Eq w 0.0) 0.0 (Mul w e))",
          "(Mul (Add x (Broadcast y s)) e)",
          "(= w (Add* x (Broadcast (Select (Eq* z 0.0) 0.0 y) s)))", "(= z (Sum e a))",
          "(= e (Exp (Sub u (Broadcast (Select (Eq* m -inf) 0.0 m) s))))", "(= m (Max u a))"),
    _rule("exp-sub-log",        "(Exp (Sub x (Log z)))",           "(Div (Exp x) z)"),
    _rule("broadcast-log",      "(Broadcast (Log z) s)",           "(Log (Broadcast z s))"),
    _rule("div-sqrt",           "(Div x (Sqrt y))",                "(Mul x (Rsqrt y))"),
)  # fmt: skip

_X, _COLUMN, _POSITIVE = "f32[3, 4]", "f32[3, 1]", "positive f32[3, 4]"
SAMPLES = {
    "select-same": {"c": "bool[3, 4]", "x": _X},
    "select-not": {"c": "bool[3, 4]", "x": _X, "y": _X},
    "cancel-not": {"c": "bool[3, 4]"},
    "div-power-of-two": {"x": _X, "c": 8.0},
    "sum-neg": {"x": "f32[2, 3, 4]", "a": (0, 2)},
    "broadcast-neg": {"x": _COLUMN, "s": (3, 4)},
    "sum-div": {"x": "f32[2, 3, 4]", "z": "f32[2, 1, 1]", "a": (1, 2), "s": (2, 3, 4)},
    "sum-mul-constant": {"x": _X, "a": (1,), "c": 0.5},
    "broadcast-div": {"x": _COLUMN, "y": _COLUMN, "s": (3, 4)},
    "mul-div-exp": {"x": _X, "z": _POSITIVE, "u": _X},
    "common-factor-sub": {"x": _X, "z": _X, "w": _X, "a": (1,), "s": (3, 4)},
    "drop-zero-guard": {"x": _X, "y": _COLUMN, "u": _X, "a": (1,), "s": (3, 4)},
    "drop-zero-guards": {
        "x": _X,
        "y": _COLUMN,
        "u": _X,
        "a": (1,),
        "s": (3, 4),
        "m": "(Max u a)",
        "e": "(Exp (Sub u (Broadcast (Select (Eq m -inf) 0.0 m) s)))",
    },
    "drop-div-guard": {"x": _X, "c": 3.0},
    "exp-sub-log": {"x": _X, "z": _POSITIVE},
    "broadcast-log": {"z": "positive f32[3, 1]", "s": (3, 4)},
    "div-sqrt": {"x": _X, "y": _POSITIVE},
}
RULES = with_samples((*IDENTITIES, *NUMBERS, *GUARDS, *SIGNS, *SOFTMAX), SAMPLES)
