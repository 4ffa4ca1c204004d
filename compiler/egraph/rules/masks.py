"""Masks: arrays that hold positions, comparisons of them, and the triangles these make."""

from __future__ import annotations

from ..patterns import rules_of, with_samples

_rule = rules_of("masks")

# The last two axes stay as they are.
_SAME_TAIL = ("(= n (vec-length s))", "(= m (vec-length t))", "(<= 2 n)", "(<= 2 m)",
              "(= (vec-get s (- n 1)) (vec-get t (- m 1)))",
              "(= (vec-get s (- n 2)) (vec-get t (- m 2)))")  # fmt: skip

# Each element is its position along an axis, counted from the last, plus an offset.
POSITIONS = (
    _rule("index",           "(Iota s a d)", "(Index s (- a (vec-length s)) 0.0 d)"),
    _rule("index-row",       "(Reshape (Index s -1 o d) t)", "(Index t -1 o d)",
          "(= 1 (vec-length s))", "(= n (vec-length t))", "(= (vec-get s 0) (vec-get t (- n 1)))"),
    _rule("index-column",    "(Reshape (Index s -1 o d) t)", "(Index t -2 o d)",
          "(= 1 (vec-length s))", "(= n (vec-length t))", "(<= 2 n)", "(= 1 (vec-get t (- n 1)))",
          "(= (vec-get s 0) (vec-get t (- n 2)))"),
    _rule("index-reshape",   "(Reshape (Index s a o d) t)", "(Index t a o d)", *_SAME_TAIL,
          "(<= -2 a)"),
    _rule("index-broadcast", "(Broadcast (Index s a o d) t)", "(Index t a o d)",
          "(= n (+ a (vec-length s)))", "(= (vec-get s n) (vec-get t n))"),
    _rule("index-add",       "(Add* (Index s a o d) #c)",         "(Index s a (+ o c) d)"),
    _rule("index-sub",       "(Sub (Index s a o d) #c)",          "(Index s a (- o c) d)"),
    _rule("index-cast",      "(Cast (Index s a o d) e)", "(Index s a o e)", "(signed d)",
          "(signed e)"),
)  # fmt: skip

_ROW, _KEY = "(Index s -2 o d)", "(Index s -1 p d)"
# i + o >= j + p, in its spellings and their opposites: key j is visible to query i when
# j <= i + (o - p).
TRIANGLES = (
    _rule("causal-ge",         f"(Ge {_ROW} {_KEY})",          "(Causal s (- o p))"),
    _rule("causal-le",         f"(Le {_KEY} {_ROW})",          "(Causal s (- o p))"),
    _rule("causal-gt",         f"(Gt {_ROW} {_KEY})",          "(Causal s (- (- o p) 1.0))"),
    _rule("causal-lt",         f"(Lt {_KEY} {_ROW})",          "(Causal s (- (- o p) 1.0))"),
    _rule("future-lt",         f"(Lt {_ROW} {_KEY})",          "(Not (Causal s (- o p)))"),
    _rule("future-gt",         f"(Gt {_KEY} {_ROW})",          "(Not (Causal s (- o p)))"),
    _rule("future-le",         f"(Le {_ROW} {_KEY})", "(Not (Causal s (- (- o p) 1.0)))"),
    _rule("future-ge",         f"(Ge {_KEY} {_ROW})", "(Not (Causal s (- (- o p) 1.0)))"),
    _rule("causal-difference", f"(Ge (Sub {_ROW} {_KEY}) #c)", "(Causal s (- (- o p) c))",
          "(signed d)"),
    _rule("causal-reshape",    "(Reshape (Causal s o) t)",        "(Causal t o)", *_SAME_TAIL),
    _rule("causal-broadcast",  "(Broadcast (Causal s o) t)",      "(Causal t o)", *_SAME_TAIL),
)  # fmt: skip

# Positions compared with a value that does not change along them: first <= key < end.
_COLUMN = '(Index s -1 o "i32")'
_VALUE = "(Broadcast n s)"
_LINE = ("(= r (vec-length s))", "(= 1 (vec-get (shape n) (- r 1)))", "(= c (vec-set s (- r 1) 1))",
         "(= b (to-f64 (vec-get s (- r 1))))")  # fmt: skip


def _below(add: str) -> str:
    return f'(Between (Full 0.0 "i32" c) (Broadcast (Sub n (const {add} n)) c) s)'


def _from(add: str) -> str:
    return f'(Between (Broadcast (Sub n (const {add} n)) c) (Full b "i32" c) s)'


_VIEWED = ("(= n (vec-length s))", "(= m (vec-length t))", "(<= 1 n)", "(<= 1 m)",
           "(= (vec-get s (- n 1)) (vec-get t (- m 1)))",
           "(= c (vec-set t (- m 1) 1))")  # fmt: skip
BOUNDS = (
    _rule("keys-below-lt",   f"(Lt {_COLUMN} {_VALUE})", _below("o"),         *_LINE),
    _rule("keys-below-le",   f"(Le {_COLUMN} {_VALUE})", _below("(- o 1.0)"), *_LINE),
    _rule("keys-below-gt",   f"(Gt {_VALUE} {_COLUMN})", _below("o"),         *_LINE),
    _rule("keys-below-ge",   f"(Ge {_VALUE} {_COLUMN})", _below("(- o 1.0)"), *_LINE),
    _rule("keys-from-ge",    f"(Ge {_COLUMN} {_VALUE})", _from("o"),          *_LINE),
    _rule("keys-from-gt",    f"(Gt {_COLUMN} {_VALUE})", _from("(- o 1.0)"),  *_LINE),
    _rule("keys-from-le",    f"(Le {_VALUE} {_COLUMN})", _from("o"),          *_LINE),
    _rule("keys-from-lt",    f"(Lt {_VALUE} {_COLUMN})", _from("(- o 1.0)"),  *_LINE),
    _rule("keys-not-below",  "(Not (Between #a e s))", '(Between e (Full b "i32" c) s)',
          "(<= a 0.0)", "(= r (vec-length s))", "(= c (shape e))",
          "(= b (to-f64 (vec-get s (- r 1))))"),
    _rule("keys-not-from",   "(Not (Between f #a s))", '(Between (Full 0.0 "i32" c) f s)',
          "(= r (vec-length s))", "(<= (to-f64 (vec-get s (- r 1))) a)", "(= c (shape f))"),
    # the opposites, for choices that are written the other way round
    _rule("keys-above",      "(Between e #a s)", '(Not (Between (Full 0.0 "i32" c) e s))',
          "(= r (vec-length s))", "(<= (to-f64 (vec-get s (- r 1))) a)", "(= c (shape e))"),
    _rule("keys-under",      "(Between #a e s)", '(Not (Between e (Full b "i32" c) s))',
          "(<= a 0.0)", "(= r (vec-length s))", "(= c (shape e))",
          "(= b (to-f64 (vec-get s (- r 1))))"),
    _rule("keys-and",        "(And (Between a b s) (Between c d s))",
          "(Between (Maximum a c) (Minimum b d) s)"),
    _rule("keys-and-mask",   "(And* (And* (Between a b s) m) (Between c d s))",
          "(And (Between (Maximum a c) (Minimum b d) s) m)"),
    *(
        _rule(f"keys-{view.lower()}", f"({view} (Between a b s) t)",
              f"(Between ({view} a c) ({view} b c) t)", *_VIEWED)
        for view in ("Reshape", "Broadcast")
    ),
    # bounds that go to another shape and back are the same ones
    _rule("keys-back", "(Reshape (Reshape e t) s)", "e", '(= "i32" (dtype e))', "(= s (shape e))",
          "(= n (vec-length s))", "(<= 1 n)", "(= 1 (vec-get s (- n 1)))"),
)  # fmt: skip

# Logic and choices between numbers move out of views.
VIEWS = tuple(
    rule
    for view in ("Reshape", "Broadcast")
    for rule in (
        _rule(f"{view.lower()}-not",    f"({view} (Not x) s)",          f"(Not ({view} x s))"),
        _rule(f"{view.lower()}-and", f"({view} (And x y) s)", f"(And ({view} x s) ({view} y s))"),
        _rule(f"{view.lower()}-select", f"({view} (Select x #c #d) s)",
              f"(Select ({view} x s) (const c root) (const d root))"),
    )
)  # fmt: skip

# Adding 0 or a huge negative number is choosing the score or that number.
CHOICES = (
    _rule("choose-truth", "(Select m x y)", "m", '(= x (Full 1.0 "bool" s))',
          '(= y (Full 0.0 "bool" s))'),
    # m as numbers, told apart again
    _rule("choose-equal", "(Eq (Select m #c #d) #e)", "m", "(= c e)", "(!= d e)"),
    _rule("choose-equal-other", "(Eq (Select m #c #d) #e)", "(Not m)", "(= d e)", "(!= c e)"),
    _rule("choose-unequal", "(Ne (Select m #c #d) #e)", "(Not m)", "(= c e)", "(!= d e)"),
    _rule("choose-unequal-other", "(Ne (Select m #c #d) #e)", "m", "(= d e)", "(!= c e)"),
    _rule("nest-choices", "(Select m (Select n x #c) #d)", "(Select (And m n) x (const c x))",
          "(= c d)"),
    _rule("comm-and", "(And m n)", "(And n m)"),
    # without these a choice by a mask that hides nothing, which equals a part of itself, would nest
    # for ever
    _rule("and-same", "(And m m)", "m"),
    _rule("and-true", "(And* m 1.0)", "m"),
    _rule("mask-by-adding", "(Add* x (Select m 0.0 #f))", "(Select m x (const f x))",
          "(<= f -1e9)"),
)  # fmt: skip

# `structured` tells the masks that attention knows by itself and is not given as arrays: causal
# ones, their opposites, and a causal one with another.
# `logits` tells what softmax is taken of, and what that is a sum or choice of.
FACTS = (
    "(function logits (T) i64 :merge (max old new))",
    *(
        f"(rule ((= y ({softmax} x a))) ((set (logits x) 1)) :ruleset facts)"
        for softmax in ("Softmax", "SafeSoftmax")
    ),
    "(rule ((= x (Select m y z)) (= 1 (logits x))) ((set (logits y) 1)) :ruleset facts)",
    "(rule ((= x (Add y z)) (= 1 (logits x))) ((set (logits y) 1) (set (logits z) 1))"
    " :ruleset facts)",
    "(function structured (T) i64 :merge (max old new))",
    "(rule ((= x (Select m y z))) ((set (structured m) 0)) :ruleset facts)",
    "(rule ((= x (And m n))) ((set (structured m) 0) (set (structured n) 0)) :ruleset facts)",
    "(rule ((= m (Causal s o))) ((set (structured m) 1)) :ruleset facts)",
    "(rule ((= m (And (Causal s o) n))) ((set (structured m) 1)) :ruleset facts)",
    "(rule ((= m (And n (Causal s o)))) ((set (structured m) 1)) :ruleset facts)",
    "(rule ((= m (Not (Causal s o)))) ((set (structured m) 1)) :ruleset facts)",
)

_I = {"s": (2, 4, 5), "d": "i32", "o": 1.0, "p": 0.0}
_A = {"s": (3, 4), "a": -1, "o": 2.0, "d": "i32"}
_N = {"s": (2, 4, 5), "n": "i32[1, 4, 1]", "o": 2.0}
_B = {
    **dict.fromkeys("abcd", "i32[2, 4, 1]"),
    "s": (2, 4, 5),
    "m": "bool[2, 4, 5]",
}
_V = {"x": "bool[3, 1]", "y": "bool[3, 1]", "c": 0.0, "d": -1e9}
SAMPLES = {
    "index": {"s": (3, 4), "a": 1, "d": "i32"},
    "index-row": {"s": (4,), "t": (1, 4), "o": 2.0, "d": "i32"},
    "index-column": {"s": (4,), "t": (4, 1), "o": 2.0, "d": "i32"},
    "index-reshape": {**_A, "t": (1, 1, 3, 4), "a": -2},
    "index-broadcast": {**_A, "s": (1, 4), "t": (3, 4)},
    "index-add": {**_A, "c": 3},
    "index-sub": {**_A, "c": 3},
    "index-cast": {**_A, "e": "f32"},
    **{r.name: _I for r in TRIANGLES[:8]},
    "causal-difference": {**_I, "c": 1.0},
    "causal-reshape": {"s": (3, 4), "t": (1, 1, 3, 4), "o": 1.0},
    "causal-broadcast": {"s": (1, 3, 4), "t": (2, 3, 4), "o": 1.0},
    **{r.name: {**_V, "s": (1, 3) if r.name.startswith("reshape") else (3, 4)} for r in VIEWS},
    **{r.name: _N for r in BOUNDS[:8]},
    "keys-not-below": {"s": (2, 4, 5), "a": 0.0, "e": "i32[2, 4, 1]"},
    "keys-not-from": {"s": (2, 4, 5), "a": 5.0, "f": "i32[2, 4, 1]"},
    "keys-above": {"s": (2, 4, 5), "a": 5.0, "e": "i32[2, 4, 1]"},
    "keys-under": {"s": (2, 4, 5), "a": 0.0, "e": "i32[2, 4, 1]"},
    "keys-and keys-and-mask": _B,
    "keys-back": {"e": "i32[2, 4, 1]", "t": (8, 1), "s": (2, 4, 1)},
    "keys-reshape": {"a": "i32[2, 4, 1]", "b": "i32[2, 4, 1]", "s": (2, 4, 5), "t": (8, 5)},
    "keys-broadcast": {"a": "i32[1, 4, 1]", "b": "i32[1, 4, 1]", "s": (1, 4, 5), "t": (3, 4, 5)},
    "choose-truth": {
        "m": "bool[3, 4]",
        "s": (3, 4),
        "x": '(Full 1.0 "bool" s)',
        "y": '(Full 0.0 "bool" s)',
    },
    "choose-equal choose-unequal": {
        "m": "bool[3, 4]",
        "x": "f32[3, 4]",
        "c": 1.0,
        "d": 0.0,
        "e": 1.0,
    },
    "choose-equal-other choose-unequal-other": {"m": "bool[3, 4]", "c": 1.0, "d": 0.0, "e": 0.0},
    "nest-choices": {"m": "bool[3, 4]", "n": "bool[3, 4]", "x": "f32[3, 4]", "c": -1e9, "d": -1e9},
    "comm-and": {"m": "bool[3, 4]", "n": "bool[3, 4]"},
    "and-same and-true": {"m": "bool[3, 4]"},
    "mask-by-adding": {"x": "f32[4, 5]", "m": "bool[4, 5]", "f": -1e9},
}
RULES = with_samples((*POSITIONS, *TRIANGLES, *BOUNDS, *VIEWS, *CHOICES), SAMPLES)
