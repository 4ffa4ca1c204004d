"""Attention, forward and backward, found in small steps: masks, scaled scores, probabilities, then the kernels.

A row of scores without any visible key is 0 in `Attention`. So a softmax that would give NaN there may only become one where
no such row can be: without a mask, or with a causal one whose every row sees a key.
"""

from __future__ import annotations

from ..patterns import Rule

HIDDEN = "(<= f -1e9)"  # exp of it, less any sensible maximum, is 0


def _mask(name: str, left: str, right: str, *when: str, samples: tuple) -> Rule:
    return Rule(name, "masks", left, right, when, samples)


def _rule(
    name: str, left: str, right: str, *when: str, samples: tuple, relaxed: bool = False
) -> Rule:
    return Rule(name, "attention", left, right, when, samples, relaxed)


_I = {"s": (2, 4, 5), "d": "i32", "o": 1.0, "p": 0.0}
_ROW, _COLUMN = "(Index s -2 o d)", "(Index s -1 p d)"
_AT_LEAST_2 = "(<= 2 (vec-length s))"
_TAIL = ("(= n (vec-length s))", "(= m (vec-length t))", "(<= 2 n)", "(<= 2 m)",
         "(= (vec-get s (- n 1)) (vec-get t (- m 1)))", "(= (vec-get s (- n 2)) (vec-get t (- m 2)))")  # fmt: skip

# Arrays that hold their own position along an axis, plus an offset.
POSITIONS = (
    _mask("index", "(Iota s a d)", "(Index s (- a (vec-length s)) 0.0 d)", samples=({"s": (3, 4), "a": 1, "d": "i32"},)),
    _mask("index-row", "(Reshape (Index s -1 o d) t)", "(Index t -1 o d)", "(= 1 (vec-length s))", "(= n (vec-length t))",
          "(= (vec-get s 0) (vec-get t (- n 1)))", samples=({"s": (4,), "t": (1, 4), "o": 2.0, "d": "i32"},)),
    _mask("index-column", "(Reshape (Index s -1 o d) t)", "(Index t -2 o d)", "(= 1 (vec-length s))", "(= n (vec-length t))",
          "(<= 2 n)", "(= 1 (vec-get t (- n 1)))", "(= (vec-get s 0) (vec-get t (- n 2)))",
          samples=({"s": (4,), "t": (4, 1), "o": 2.0, "d": "i32"},)),
    _mask("index-reshape", "(Reshape (Index s a o d) t)", "(Index t a o d)", *_TAIL, "(<= -2 a)",
          samples=({"s": (3, 4), "t": (1, 1, 3, 4), "a": -2, "o": 2.0, "d": "i32"},)),
    _mask("index-broadcast", "(Broadcast (Index s a o d) t)", "(Index t a o d)", "(= n (+ a (vec-length s)))",
          "(= (vec-get s n) (vec-get t n))", samples=({"s": (1, 4), "t": (3, 4), "a": -1, "o": 2.0, "d": "i32"},)),
    _mask("index-add", "(Add* (Index s a o d) #c)", "(Index s a (+ o c) d)", samples=({"s": (3, 4), "a": -1, "o": 2.0, "d": "i32", "c": 3},)),
    _mask("index-sub", "(Sub (Index s a o d) #c)", "(Index s a (- o c) d)", samples=({"s": (3, 4), "a": -1, "o": 2.0, "d": "i32", "c": 3},)),
    _mask("index-cast", "(Cast (Index s a o d) e)", "(Index s a o e)", "(signed d)", "(signed e)",
          samples=({"s": (3, 4), "a": -1, "o": 2.0, "d": "i32", "e": "f32"},)),
)  # fmt: skip

# i + o >= j + p, in its four spellings and their opposites, is: key j is visible to query i when j <= i + (o - p).
CAUSAL = (
    _mask("causal-ge", f"(Ge {_ROW} {_COLUMN})", "(Causal s (- o p))", samples=(_I,)),
    _mask("causal-le", f"(Le {_COLUMN} {_ROW})", "(Causal s (- o p))", samples=(_I,)),
    _mask("causal-gt", f"(Gt {_ROW} {_COLUMN})", "(Causal s (- (- o p) 1.0))", samples=(_I,)),
    _mask("causal-lt", f"(Lt {_COLUMN} {_ROW})", "(Causal s (- (- o p) 1.0))", samples=(_I,)),
    _mask("future-lt", f"(Lt {_ROW} {_COLUMN})", "(Not (Causal s (- o p)))", samples=(_I,)),
    _mask("future-gt", f"(Gt {_COLUMN} {_ROW})", "(Not (Causal s (- o p)))", samples=(_I,)),
    _mask("future-le", f"(Le {_ROW} {_COLUMN})", "(Not (Causal s (- (- o p) 1.0)))", samples=(_I,)),
    _mask("future-ge", f"(Ge {_COLUMN} {_ROW})", "(Not (Causal s (- (- o p) 1.0)))", samples=(_I,)),
    _mask("causal-difference", f"(Ge (Sub {_ROW} {_COLUMN}) #c)", "(Causal s (- (- o p) c))", "(signed d)", samples=({**_I, "c": 1.0},)),
    _mask("causal-reshape", "(Reshape (Causal s o) t)", "(Causal t o)", *_TAIL, samples=({"s": (3, 4), "t": (1, 1, 3, 4), "o": 1.0},)),
    _mask("causal-broadcast", "(Broadcast (Causal s o) t)", "(Causal t o)", *_TAIL,
          samples=({"s": (1, 3, 4), "t": (2, 3, 4), "o": 1.0},)),
)  # fmt: skip

_M2 = {"x": "bool[3, 1]", "y": "bool[3, 1]", "c": 0.0, "d": -1e9}
# Masks come in views: logic and choices of numbers move out of them.
VIEWED_MASKS = tuple(
    rule
    for view, shape in (("Reshape", (1, 3)), ("Broadcast", (3, 4)))
    for rule in (
        _mask(f"{view.lower()}-not", f"({view} (Not x) s)", f"(Not ({view} x s))", samples=({**_M2, "s": shape},)),
        _mask(f"{view.lower()}-and", f"({view} (And x y) s)", f"(And ({view} x s) ({view} y s))", samples=({**_M2, "s": shape},)),
        _mask(f"{view.lower()}-select", f"({view} (Select x #c #d) s)", f"(Select ({view} x s) (const c root) (const d root))",
              samples=({**_M2, "s": shape},)),
    )
)  # fmt: skip

_QK = {
    "q": "f32[2, 4, 3]",
    "kt": "f32[2, 3, 5]",
    "k": "f32[2, 5, 3]",
    "v": "f32[2, 5, 6]",
    "c": 0.5,
    "u": 0.0,
    "d": 0.25,
    "a": (2,),
}
_SQUARE = {**_QK, "kt": "f32[2, 3, 4]", "k": "f32[2, 4, 3]", "v": "f32[2, 4, 6]"}
SCORES = (
    _rule("scores",         "(Dot q kt)",                      "(Scores q kt 1.0 0.0)", samples=(_QK,)),
    _rule("scores-mul",     "(Mul* (Scores q kt c 0.0) #d)",   "(Scores q kt (* c d) 0.0)", samples=(_QK,)),
    _rule("scores-div",     "(Div (Scores q kt c 0.0) #d)",    "(Scores q kt (/ c d) 0.0)", samples=(_QK,)),
    _rule("scores-softcap", "(Mul* (Tanh (Scores q kt c 0.0)) #d)", "(Scores q kt (* c d) d)", "(< 0.0 d)", samples=(_QK,)),
    # adding 0 or a huge negative number is choosing the score or that number
    _rule("mask-by-adding", "(Add* x (Select m 0.0 #f))", "(Select m x (const f x))", HIDDEN,
          samples=({"x": "f32[4, 5]", "m": "bool[4, 5]", "f": -1e9},)),
)  # fmt: skip

_S = "(Scores q kt c u)"
_LAST = ("(= n (vec-length (shape root)))", "(= a (vec-of (- n 1)))", "(= t (swap-perm n))")
_K = "(Transpose kt t)"
_SEES = (
    "(<= 0.0 o)",
    "(= i (to-i64 o))",
)  # with an offset of 0 or more the first key is always visible
_C = {**_SQUARE, "s": (2, 4, 4), "o": 1.0, "f": -1e9}
_INF = float("-inf")
_B = {**_SQUARE, "s": (2, 4, 4), "o": -1.0, "b": "f32[2, 4, 4]", "f": _INF}
_M = {**_SQUARE, "s": (2, 4, 4), "o": -1.0, "m": "bool[2, 4, 4]", "f": _INF}
_BAND = ("(= i (to-i64 o))", "(= w (to-i64 (- o p)))", "(<= 1 w)")
_SEES_BAND = ("(<= 0.0 o)", "(<= (- (+ (vec-get s (- n 2)) i) w) (- (vec-get s (- n 1)) 1))")
_W = {**_SQUARE, "s": (2, 4, 4), "o": 0.0, "p": -2.0, "f": -1e9}


def _both(name: str, scores: str, right: str, *when: str, samples: tuple) -> tuple[Rule, ...]:
    """For softmax and its safe form."""
    return tuple(_rule(f"{name}{suffix}", f"({head} {scores} a)", right, *_LAST, *when, samples=samples)
                 for head, suffix in (("Softmax", ""), ("SafeSoftmax", "-safe")))  # fmt: skip


WEIGHTS = (
    *_both("weights", _S, f"(Weights q {_K} c 0 0 0 u)", samples=(_QK,)),
    *_both("weights-causal", f"(Select (Causal s o) {_S} #f)", f"(Weights q {_K} c 1 i 0 u)", HIDDEN, *_SEES, samples=(_C,)),
    _rule("weights-causal-rows", f"(SafeSoftmax (Select (Causal s o) {_S} -inf) a)", f"(Weights q {_K} c 1 i 0 u)",
          *_LAST, "(= i (to-i64 o))", samples=({**_C, "o": -1.0},)),
    *_both("weights-window", f"(Select (And* (Causal s o) (Not (Causal s p))) {_S} #f)", f"(Weights q {_K} c 1 i w u)",
           HIDDEN, *_BAND, *_SEES_BAND, samples=(_W,)),
    _rule("weights-window-rows", f"(SafeSoftmax (Select (And* (Causal s o) (Not (Causal s p))) {_S} -inf) a)",
          f"(Weights q {_K} c 1 i w u)", *_LAST, *_BAND, samples=({**_W, "o": -1.0},)),
    _rule("weights-mask", f"(SafeSoftmax (Select m {_S} -inf) a)", f'(WeightsX q {_K} m c 0 0 0 u "mask")',
          *_LAST, "(= 0 (structured m))", samples=(_M,)),
    _rule("weights-causal-mask", f"(SafeSoftmax (Select (And* (Causal s o) m) {_S} -inf) a)",
          f'(WeightsX q {_K} m c 1 i 0 u "mask")', *_LAST, "(= 0 (structured m))", "(= i (to-i64 o))", samples=(_M,)),
    _rule("weights-bias-safe", f"(SafeSoftmax (Add* {_S} b) a)", f'(WeightsX q {_K} b c 0 0 0 u "bias")', *_LAST, samples=(_B,)),
    _rule("weights-causal-bias", f"(SafeSoftmax (Select (Causal s o) (Add* {_S} b) -inf) a)",
          f'(WeightsX q {_K} b c 1 i 0 u "bias")', *_LAST, "(= i (to-i64 o))", samples=(_B,)),
    # a row of the bias may be all -inf, where this softmax is NaN
    _rule("weights-bias", f"(Softmax (Add* {_S} b) a)", f'(WeightsX q {_K} b c 0 0 0 u "bias")', *_LAST, samples=(_B,), relaxed=True),
)  # fmt: skip

_P = "(Weights q k c h i w u)"
_PX = "(WeightsX q k x c h i w u y)"
_O = {**_QK, "h": 0, "i": 0, "w": 0}
_OX = {**_SQUARE, "x": "bool[2, 4, 4]", "h": 1, "i": 0, "w": 0, "y": "mask"}
FORWARD = (
    _rule("attention", f"(Dot {_P} v)", '(Get (Attention q k v c h i w u "none") 0)', samples=(_O, {**_O, "h": 1, "i": 1, "w": 2, "u": 3.0})),
    _rule("attention-extra", f"(Dot {_PX} v)", "(Get (Attention q k v x c h i w u y) 0)",
          samples=(_OX, {**_OX, "x": "f32[2, 4, 4]", "y": "bias"})),
)  # fmt: skip

_GRAD = {**_O, "p": "(Weights q k c h i w u)", "do": "f32[2, 4, 6]", "vt": "(Transpose v (vec-of 0 2 1))", "e": 2.0,
         "h": 1, "i": 0, "u": 0.0}  # fmt: skip
_GRADX = {
    **_OX,
    "p": "(WeightsX q k x c h i w u y)",
    "do": "f32[2, 4, 6]",
    "vt": "(Transpose v (vec-of 0 2 1))",
    "e": 2.0,
}
_SEL = {
    **_C,
    "y": "f32[2, 4, 4]",
    "g": "f32[2, 4, 4]",
    "e": 1.0,
    "m": "bool[2, 4, 4]",
    "b": "f32[2, 4, 4]",
    "f": _INF,
}


def _hidden_gradient(name: str, head: str, proof: str, sample: dict) -> Rule:
    """The gradient of scores is 0 where the mask hides them, because there the probabilities are."""
    return _rule(name, "(Select m (SoftmaxGrad p g a e) 0.0)", "(SoftmaxGrad p g a e)",
                 f"(= p ({head} (Select m y #f) a))", HIDDEN, f"(= p {proof})", samples=(sample,))  # fmt: skip


_SEL_P = {
    **_SEL,
    "y": "(Scores q kt c 0.0)",
    "m": "(Causal s o)",
    "k": "f32[2, 4, 3]",
    "h": 1,
    "i": 1,
    "w": 0,
    "u": 0.0,
}
_SEL_X = {
    **_SEL,
    "y": "(Scores q kt c 0.0)",
    "x": "bool[2, 4, 4]",
    "h": 0,
    "i": 0,
    "w": 0,
    "u": 0.0,
    "z": "mask",
}
_PLAIN = 'c h i w u "none"'
_NONE = '(Attention q k v c h i w u "none")'
_EXTRA = "(Attention q k v x c h i w u y)"
_GRADIENT = "(SoftmaxGrad p (Dot do vt) a e)"
_SWAP = (
    "(= n (vec-length (shape root)))",
    "(= t (swap-perm n))",
    "(= v (Transpose vt t))",
    "(= a (vec-of (- n 1)))",
)


def _kernel(attention: str, extra: str, options: str) -> str:
    delta = f"(Sum (Mul do (Get {attention} 0)) a)"
    return f"(AttentionBackward q k v (Get {attention} 1) {delta} do {extra}{options})"


def _scores_gradient(name: str, weights: str, kernel: str, sample: dict) -> Rule:
    return _rule(
        name,
        _GRADIENT,
        f"(ScoreGrad {kernel} q k p do e c)",
        f"(= p {weights})",
        "(= u 0.0)",
        *_SWAP,
        samples=(sample,),
    )


_BACK = {
    **_GRAD, "a": (2,), "c": 2.0, "l": '(Get (Attention q k v c h i w u "none") 1)',
    "delta": '(Sum (Mul do (Get (Attention q k v c h i w u "none") 0)) a)',
    "b": '(AttentionBackward q k v l delta do c h i w u "none")', "t": (0, 2, 1),
}  # fmt: skip
_SG = "(ScoreGrad b q k p do e c)"
_T = ("(= n (vec-length (shape root)))", "(= t (swap-perm n))")


def _results(name: str, product: str, result: str, *when: str) -> tuple[Rule, ...]:
    """A product with the scores' gradient is a result of the kernel once its numbers make up the scale, inside or after."""
    return (
        _rule(name, product, result, *when, "(= e c)", samples=({**_BACK, "e": 2.0},)),
        _rule(f"{name}-scaled", f"(Mul {product} #m)", result, *when, "(< (abs (- (* e m) c)) (* 1e-9 (abs c)))",
              samples=({**_BACK, "e": 0.5, "m": 4.0},)),
    )  # fmt: skip


BACKWARD = (
    _hidden_gradient("hidden-gradient", "Softmax", "(Weights q k c h i w u)", _SEL_P),
    _hidden_gradient("hidden-gradient-safe", "SafeSoftmax", "(Weights q k c h i w u)", _SEL_P),
    _hidden_gradient("hidden-gradient-extra", "SafeSoftmax", "(WeightsX q k x c h i w u z)", _SEL_X),
    # rowsum(p * (do v^T)) = rowsum(do * (p v))
    _rule("delta", "(Sum (Mul* (Dot do vt) p) a)", "(Sum (Mul do (Dot p v)) a)", "(= p (Weights q k c h i w u))", *_SWAP, samples=(_GRAD,)),
    _scores_gradient("scores-gradient", _P, _kernel(_NONE, "", _PLAIN), _GRAD),
    _scores_gradient("scores-gradient-extra", _PX, _kernel(_EXTRA, "x ", "c h i w u y"), _GRADX),
    # the gradient of cap * tanh(score / cap) has 1 - tanh^2 before the scale
    _rule("scores-gradient-softcap", f"(Mul* {_GRADIENT} (Sub 1.0 (Mul y y)))",
          f'(ScoreGrad {_kernel(_NONE, "", _PLAIN)} q k p do e c)', "(= y (Tanh (Scores q kt r 0.0)))", f"(= p {_P})", "(< 0.0 u)",
          "(< (abs (- (* r u) c)) (* 1e-6 (abs c)))", *_SWAP, "(= k (Transpose kt t))",
          samples=({**_GRAD, "kt": "f32[2, 3, 5]", "k": "(Transpose kt (vec-of 0 2 1))", "c": 0.5, "u": 4.0, "r": 0.125,
                    "p": "(Weights q k c h i w u)"},)),
    _rule("scores-gradient-mul", f"(Mul {_SG} #m)", "(ScoreGrad b q k p do (* e m) c)", samples=({**_BACK, "m": 3.0},)),
    *_results("attention-dq", f"(Dot {_SG} k)", "(Get b 0)"),
    *_results("attention-dk", f"(Dot (Transpose {_SG} t) q)", "(Get b 1)", *_T),
    *_results("attention-dkt", f"(Dot (Transpose q t) {_SG})", "(Transpose (Get b 1) t)", *_T),
    _rule("attention-dv", "(Dot (Transpose p t) do)", "(Get b 2)", *_T, f"(= g {_SG})", samples=(_BACK,)),
    _rule("attention-dvt", "(Dot (Transpose do t) p)", "(Transpose (Get b 2) t)", *_T, f"(= g {_SG})", samples=(_BACK,)),
)  # fmt: skip

RULES = (*POSITIONS, *CAUSAL, *VIEWED_MASKS, *SCORES, *WEIGHTS, *FORWARD, *BACKWARD)
# A mask that is causal, or causal and another, is not given to the kernel as an array: `structured` tells such masks.
FACTS = (
    "(function structured (T) i64 :merge (max old new))",
    "(rule ((= x (Select m y z))) ((set (structured m) 0)) :ruleset facts)",
    "(rule ((= x (And m n))) ((set (structured m) 0) (set (structured n) 0)) :ruleset facts)",
    "(rule ((= m (Causal s o))) ((set (structured m) 1)) :ruleset facts)",
    "(rule ((= m (And (Causal s o) n))) ((set (structured m) 1)) :ruleset facts)",
    "(rule ((= m (And n (Causal s o)))) ((set (structured m) 1)) :ruleset facts)",
    "(rule ((= m (Not (Causal s o)))) ((set (structured m) 1)) :ruleset facts)",
)
