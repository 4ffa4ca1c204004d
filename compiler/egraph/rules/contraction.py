"""Contraction: products change layout, and numbers and signs move out of them.

Each rule changes the order of roundings only, but for those of chains, which are relaxed. Rules
about several products that share operands are in `programs`.
"""

from __future__ import annotations

from ..patterns import rules_of, with_samples

_rule = rules_of("contraction")

# (a b)^T = b^T a^T; (c a) b = c (a b)
LAYOUTS = (
    _rule("transpose-dot",  "(Transpose (Dot a b) t)",  "(Dot (Transpose b t) (Transpose a t))",
          "(= n (vec-length t))", "(= t (swap-perm n))"),
    _rule("dot-mul-left",   "(Dot (Mul a #c) b)",       "(Mul (Dot a b) (const c root))"),
    _rule("dot-mul-right",  "(Dot a (Mul b #c))",       "(Mul (Dot a b) (const c root))"),
    _rule("dot-div-left",   "(Dot (Div a #c) b)",       "(Div (Dot a b) (const c root))",
          "(!= c 0.0)"),
    _rule("dot-div-right",  "(Dot a (Div b #c))",       "(Div (Dot a b) (const c root))",
          "(!= c 0.0)"),
    _rule("dot-div-rows",       "(Div (Dot e v) (Broadcast z s))",
          "(Dot (Div e (Broadcast z r)) v)", "(= r (shape e))", "(= z (Sum e a))",
          "(= n (vec-length s))", "(= a (vec-of (- n 1)))", "(= e (Exp u))"),
    _rule("dot-neg-left",   "(Dot (Neg a) b)",          "(Neg (Dot a b))"),
    _rule("dot-neg-right",  "(Dot a (Neg b))",          "(Neg (Dot a b))"),
)  # fmt: skip

_A = "(Reshape a (vec-of (* (vec-get s 0) (vec-get s 1)) (vec-get s 2)))"
_B = "(Reshape b (vec-of (vec-get u 1) (vec-get u 2)))"
_SHAPES = ("(= s (shape a))", "(= u (shape b))", "(= r (shape root))", "(= 3 (vec-length s))")
# A batch of products with one matrix is one product over all rows.
BATCHES = (
    _rule("flatten-batch-1",       "(Dot a b)",               f"(Reshape (Dot {_A} {_B}) r)",
          *_SHAPES, "(= 1 (vec-get s 0))"),
    _rule("flatten-shared-matrix", "(Dot a (Broadcast b v))", f"(Reshape (Dot {_A} {_B}) r)",
          *_SHAPES, "(= 1 (vec-get u 0))", "(!= 1 (vec-get s 0))",
          "(= k (vec-get u 1))", "(= k (vec-get v 1))",
          "(= n (vec-get u 2))", "(= n (vec-get v 2))"),
)  # fmt: skip

# (a b) c = a (b c): another number of multiplications, and other sums with roundings of their own.
CHAINS = (
    _rule("dot-chain-right", "(Dot (Dot a b) c)", "(Dot a (Dot b c))", relaxed=True),
    _rule("dot-chain-left",  "(Dot a (Dot b c))", "(Dot (Dot a b) c)", relaxed=True),
)  # fmt: skip

_AB = {"a": "f32[2, 3, 4]", "b": "f32[2, 4, 5]", "c": 0.5, "t": (0, 2, 1)}
_ROWS = {"u": "f32[2, 3, 4]", "v": "f32[2, 4, 5]", "a": (2,), "s": (2, 3, 5)}
SAMPLES = {
    **{rule.name: _AB for rule in LAYOUTS if rule.name != "dot-div-rows"},
    "dot-div-rows": _ROWS,
    "dot-chain-right dot-chain-left": {"a": "f32[3, 4]", "b": "f32[4, 5]", "c": "f32[5, 2]"},
    "flatten-batch-1": {"a": "f32[1, 3, 4]", "b": "f32[1, 4, 5]"},
    "flatten-shared-matrix": {"a": "f32[2, 3, 4]", "b": "f32[1, 4, 5]", "v": (2, 4, 5)},
}
RULES = with_samples((*LAYOUTS, *BATCHES, *CHAINS), SAMPLES)
