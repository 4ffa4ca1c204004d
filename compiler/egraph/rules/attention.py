"""Attention, found in small steps: scaled scores, probabilities of masked scores, the kernel.

What a row without visible keys gives is part of the kernel: 0 for the safe form of softmax, NaN for
the plain one of -inf, the mean of the values where hidden scores are one huge negative number. A
causal mask whose every row sees a key needs none of these.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...ops.decode import MOST_PHASE_KEYS, MOST_ROWS
from ..patterns import Rule, rules_of, with_samples

_rule = rules_of("attention")

# scale * q k^T, perhaps as cap * tanh(scale * q k^T / cap)
SCORES = (
    _rule("scores",         "(Dot q kt)",                           "(Scores q kt 1.0 0.0)"),
    _rule("scores-mul",     "(Mul* (Scores q kt c 0.0) #d)",        "(Scores q kt (* c d) 0.0)"),
    _rule("scores-div",     "(Div (Scores q kt c 0.0) #d)",         "(Scores q kt (/ c d) 0.0)",
          "(!= d 0.0)"),
    _rule("scores-softcap", "(Mul* (Tanh (Scores q kt c 0.0)) #d)", "(Scores q kt (* c d) d)",
          "(< 0.0 d)"),
)  # fmt: skip

_S, _K = "(Scores q kt c u)", "(Transpose kt t)"
# What is added to scores in several steps is one bias; so is a mask below it.
ADDED = (
    _rule("scores-add-add",  f"(Add* (Add* {_S} x) y)",        f"(Add {_S} (Add x y))",
          "(= 1 (logits root))"),
    _rule("mask-then-bias",  f"(Add* (Select m {_S} -inf) x)",
          f"(Select m (Add {_S} x) (const -inf x))"),
)  # fmt: skip
_LAST = ("(= n (vec-length (shape root)))", "(= a (vec-of (- n 1)))", "(= t (swap-perm n))")
_HIDDEN = "(<= f -1e9)"  # exp of it, less any sensible maximum, is 0
_OFFSET = "(= i (to-i64 o))"
_SEES = "(<= 0.0 o)"  # the first key is visible to every query
_BAND = ("(= w (to-i64 (- o p)))", "(<= 1 w)")
# so is the last one's window: i + offset - window < keys
_SEES_BAND = "(<= (- (+ (vec-get s (- n 2)) i) w) (- (vec-get s (- n 1)) 1))"
_CAUSAL, _WINDOW = "(Causal s o)", "(And* (Causal s o) (Not (Causal s p)))"


def _both(name: str, scores: str, right: str, *when: str) -> tuple[Rule, ...]:
    """The rule for softmax and for its safe form."""
    return (
        _rule(name, f"(Softmax {scores} a)", right, *_LAST, *when),
        _rule(f"{name}-safe", f"(SafeSoftmax {scores} a)", right, *_LAST, *when),
    )


def _safe(name: str, scores: str, right: str, *when: str) -> Rule:
    return _rule(name, f"(SafeSoftmax {scores} a)", right, *_LAST, *when)


_EXTRA = f"(WeightsX{{}} q {_K} {{}} u {{}})"
_PLAIN = "(= 0 (structured m))"  # of masks that are given as arrays
_FINITE = ("(<= f -1e9)", "(< -1e300 f)")  # what hidden scores are, when softmax has their mean
_SINGLE = '(= "f32" (dtype q))'  # the mean is told by numbers that half precision does not have


def _extra(options: str, extra: str, empty: str) -> str:
    return _EXTRA.format("Y" if extra == "both" else "", options, f'"{extra}" "{empty}"')


def _nan(name: str, scores: str, options: str, extra: str, *when: str) -> tuple[Rule, ...]:
    """The rules for softmax, and for its safe form, of scores that are -inf where hidden."""
    return (
        _safe(name, scores, _extra(options, extra, "zero"), *when),
        _rule(f"{name}-nan", f"(Softmax {scores} a)", _extra(options, extra, "nan"), *_LAST, *when),
    )


def _mean(name: str, scores: str, options: str, extra: str, *when: str) -> Rule:
    """Of softmax of scores that are one huge negative number where hidden. A bias may be as far
    below the others.
    """
    right = _extra(options, extra, "mean")
    return _rule(name, f"(Softmax {scores} a)", right, *_LAST, *_FINITE, _SINGLE, *when,
                 relaxed=extra != "mask")  # fmt: skip


_BIASED = f"(Add* {_S} b)"
# the scores that something besides the position hides, its operands, and what must hold
_GIVEN = {
    "mask": ("m", _S, "m", (_PLAIN,)),
    "bias": ("", _BIASED, "b", ()),
    "both": ("m", _BIASED, "m b", (_PLAIN,)),
}
_PLACES = {
    "": ("", "c 0 0 0", ()),
    "causal-": (_CAUSAL, "c 1 i 0", (_OFFSET,)),
    "window-": (_WINDOW, "c 1 i w", (_OFFSET, *_BAND)),
}


def _given(place: str, extra: str) -> Iterator[Rule]:
    """Attention with a mask or bias or both, perhaps causal, by what hidden scores are."""
    seen, options, placed = _PLACES[place]
    mask, scores, operands, when = _GIVEN[extra]
    hidden = f"(And* {seen} {mask})" if seen and mask else seen or mask
    name, given = f"weights-{place}{extra}", (f"{operands} {options}", extra, *placed, *when)
    yield from _nan(name, f"(Select {hidden} {scores} -inf)" if hidden else scores, *given)
    if hidden:
        yield _mean(f"{name}-mean", f"(Select {hidden} {scores} #f)", *given)


WEIGHTS = (
    *_both("weights",            _S, f"(Weights q {_K} c 0 0 0 u)"),
    *_both("weights-causal",     f"(Select {_CAUSAL} {_S} #f)", f"(Weights q {_K} c 1 i 0 u)",
           _OFFSET, _HIDDEN, _SEES),
    _safe("weights-causal-rows", f"(Select {_CAUSAL} {_S} -inf)", f"(Weights q {_K} c 1 i 0 u)",
          _OFFSET),
    *_both("weights-window",     f"(Select {_WINDOW} {_S} #f)", f"(Weights q {_K} c 1 i w u)",
           _OFFSET, *_BAND, _HIDDEN, _SEES, _SEES_BAND),
    _safe("weights-window-rows", f"(Select {_WINDOW} {_S} -inf)", f"(Weights q {_K} c 1 i w u)",
          _OFFSET, *_BAND),
    # a causal mask that hides all keys of the first queries is one like any other
    _rule("weights-unseen-nan",  f"(Softmax (Select m {_S} -inf) a)",
          _extra("m c 0 0 0", "mask", "nan"), *_LAST, "(= m (Causal s o))", "(< o 0.0)"),
    _mean("weights-unseen-mean", f"(Select m {_S} #f)", "m c 0 0 0", "mask",
          "(= m (Causal s o))", "(< o 0.0)"),
    *(rule for extra in _GIVEN for place in _PLACES for rule in _given(place, extra)),
)  # fmt: skip

# Few rows of queries have kernels that know bounds of the keys, and give what plain softmax gives
# for a row without keys: NaN when hidden scores are -inf, the mean of the values when they are one
# huge negative number.
_FEW = ("(= z (shape q))", "(= e (vec-length z))", f"(<= (vec-get z (- e 2)) {MOST_ROWS})")
_KEYS = "(= m (Between f g s))"
_KEYS_AND = "(= m (And* (Between f g s) x))"
_BIASED_KEYS = f"(Select m (Add* {_S} x) -inf)"
FEW = (
    _rule("weights-bounds-nan",      f"(Softmax (Select m {_S} -inf) a)",
          f'(WeightsB q {_K} f g c 0 0 0 u "nan")', *_LAST, *_FEW, _KEYS),
    _rule("weights-bounds-mean",     f"(Softmax (Select m {_S} #d) a)",
          f'(WeightsB q {_K} f g c 0 0 0 u "mean")', *_LAST, *_FEW, _KEYS, "(<= d -1e9)",
          "(< -1e300 d)"),
    _rule("weights-bounds-mask-nan", f"(Softmax (Select m {_S} -inf) a)",
          f'(WeightsBX q {_K} f g x c 0 0 0 u "mask" "nan")', *_LAST, *_FEW, _KEYS_AND),
    _rule("weights-bounds-bias-nan", f"(Softmax {_BIASED_KEYS} a)",
          f'(WeightsBX q {_K} f g x c 0 0 0 u "bias" "nan")', *_LAST, *_FEW, _KEYS),
    _rule("weights-bounds-bias",     f"(SafeSoftmax {_BIASED_KEYS} a)",
          f'(WeightsBX q {_K} f g x c 0 0 0 u "bias" "zero")', *_LAST, *_FEW, _KEYS),
)  # fmt: skip

KERNELS = (
    _rule("attention",       "(Dot (Weights q k c h i w u) v)",
          '(Get (Attention q k v c h i w u "none" "zero") 0)'),
    _rule("attention-extra", "(Dot (WeightsX q k x c h i w u y z) v)",
          "(Get (Attention q k v x c h i w u y z) 0)"),
    _rule("attention-both",  "(Dot (WeightsXY q k x o c h i w u y z) v)",
          "(Get (Attention q k v x o c h i w u y z) 0)"),
)  # fmt: skip

# Few rows of queries over many keys: three kernels more. A mask that bounds the keys is read as its
# bounds, and no key beyond them.
_LONGEST_GROUP = {"Phases": (f"(<= (vec-get j (- e 2)) {MOST_PHASE_KEYS})",)}
_LONGEST = {"Phases": ("(= j (shape k))", "(= l (vec-length j))",
                       f"(<= (vec-get j (- l 2)) {MOST_PHASE_KEYS})")}  # fmt: skip
_MASKED = '(Get (Attention q k v x c h i w u "mask" p) 0)'
_SOME = '(!= p "mean")'  # kernels of few rows know the mean of keys within bounds only
DECODE = tuple(
    _rule(f"decode-{form.lower()}{case}", left, f"(Get (Attention{form} {right}) 0)",
          *(_FEW if left.startswith("(Get") else ()), *_LONGEST.get(form, ()), *when)
    for form in ("Online", "Phases", "Split")
    for case, left, right, when in (
        ("", '(Get (Attention q k v c h i w u "none" "zero") 0)',
         'q k v c h i w u "none" 1 0 "zero"', ()),
        ("-mask", _MASKED, 'q k v x c h i w u "mask" 1 0 p', (_SOME,)),
        ("-bias", '(Get (Attention q k v x c h i w u "bias" p) 0)',
         'q k v x c h i w u "bias" 1 0 p', (_SOME,)),
        ("-both", '(Get (Attention q k v x o c h i w u "both" p) 0)',
         'q k v x o c h i w u "both" 1 0 p', (_SOME,)),
        ("-bounds", _MASKED, 'q k v a b c h i w u "none" 1 1 p',
         ("(= x (Between a b s))", _SOME)),
        ("-bounds-mask", _MASKED, 'q k v a b m c h i w u "mask" 1 1 p',
         ("(= x (And* (Between a b s) m))", _SOME)),
        ("-keys", "(Dot (WeightsB q k f g c h i w u p) v)",
         'q k v f g c h i w u "none" 1 1 p', ()),
        ("-keys-extra", "(Dot (WeightsBX q k f g x c h i w u y p) v)",
         "q k v f g x c h i w u y 1 1 p", ()),
    )
)  # fmt: skip

# Query heads that share a head of keys become rows of one attention: keys are not repeated. The
# heads of k stand on axis -3 and are repeated by broadcasting an axis of 1 after them.
_REPEATED = "(Reshape (Broadcast (Reshape {0} {1}) {2}) {3})"
_HEADS = ("(= z (shape q))", "(= e (vec-length z))", "(<= 3 e)", "(= j (shape k))",
          "(= e (vec-length j))", "(= l (vec-get j (- e 3)))", "(< 0 l)",
          "(= g (/ (vec-get z (- e 3)) l))", f"(<= (* g (vec-get z (- e 2))) {MOST_ROWS})",
          "(= r (vec-set (vec-set z (- e 3) l) (- e 2) (* g (vec-get z (- e 2)))))",
          "(= o (shape root))")  # fmt: skip


def _repeats(name: str, before: str, after: str, whole: str) -> tuple[str, ...]:
    """An array of l heads is repeated g times: its shapes with an axis of 1, with g, and all."""
    return (f"(= (+ e 1) (vec-length {before}))", f"(= 1 (vec-get {before} (- e 2)))",
            f"(= l (vec-get {before} (- e 3)))", f"(= {after} (vec-set {before} (- e 2) g))",
            f"(= {whole} (vec-set (shape {name}) (- e 3) (vec-get z (- e 3))))")  # fmt: skip


_SAME = f"q {_REPEATED.format('k', 'b', 'd', 'f')} {_REPEATED.format('v', 'm', 'p', 's')}"
_GROUPED = f"(Attention {_SAME}"
_TURNED = "(Reshape low line) (Reshape high line) "
_LINES = ("(= line (vec-set r (- e 1) 1))",)
_PAIRS = ("(= t (vec-set r (- e 1) (vec-get j (- e 2))))",)
_SHARED = (*_HEADS, *_repeats("k", "b", "d", "f"), *_repeats("v", "m", "p", "s"))
GROUPS = (
    _rule("group-heads",       f'(Get {_GROUPED} c 0 i 0 u "none" none) 0)',
          '(Reshape (Get (Attention (Reshape q r) k v c 0 i 0 u "none" none) 0) o)', *_SHARED),
    _rule("group-heads-extra", f'(Get {_GROUPED} x c 0 i 0 u y none) 0)',
          "(Reshape (Get (Attention (Reshape q r) k v (Reshape x t) c 0 i 0 u y none) 0) o)",
          *_SHARED, *_PAIRS),
    *(
        _rule(f"group-heads-{form.lower()}{case}",
              f"(Get (Attention{form} {_SAME} {operands}c h i w u {kind} 1 {bounded} none) 0)",
              f"(Reshape (Get (Attention{form} (Reshape q r) k v {rows}c h i w u {kind} "
              f"(max 1 (* g h)) {bounded} none) 0) o)",
              *_SHARED, *_LONGEST_GROUP.get(form, ()), *when)
        for form in ("Online", "Phases", "Split")
        for case, operands, rows, kind, bounded, when in (
            ("", "", "", '"none"', 0, ()),
            ("-bounds", "low high ", _TURNED, '"none"', 1, _LINES),
            ("-extra", "x ", "(Reshape x t) ", "y", 0, _PAIRS),
            ("-bounds-extra", "low high x ", _TURNED + "(Reshape x t) ", "y", 1,
             (*_LINES, *_PAIRS)),
        )
    ),
)  # fmt: skip

_QK = {"q": "f32[2, 4, 3]", "kt": "f32[2, 3, 4]", "k": "f32[2, 4, 3]", "v": "f32[2, 4, 6]",
       "c": 0.5, "u": 0.0, "d": 0.25, "a": (2,)}  # fmt: skip
_UNMASKED = {"h": 0, "i": 0, "w": 0}
_ROWS = {**_QK, "s": (2, 4, 4), "o": -1.0, "m": "bool[2, 4, 4]", "b": "f32[2, 4, 4]"}
_FILL = {**_QK, "s": (2, 4, 4), "o": 1.0, "f": -1e9}
_BANDED = {**_FILL, "o": 0.0, "p": -2.0}


def _decode_sample(name: str) -> dict[str, object]:
    sample = {**_QK, "h": 1, "i": 1, "w": 2, "u": 3.0, "s": (2, 4, 4), "m": "bool[2, 4, 4]"}
    kind = name.split("-", 2)[2] if name.count("-") > 1 else ""
    if kind in ("keys", "keys-extra"):
        more = {"f": "i32[2, 4, 1]", "g": "i32[2, 4, 1]", "x": "bool[2, 4, 4]", "y": "mask"}
        return {**sample, **more, "p": "mean" if kind == "keys" else "nan", **_UNMASKED}
    x = {"mask": "bool[2, 4, 4]", "both": "bool[2, 4, 4]", "bias": "f32[2, 4, 4]",
         "bounds": "(Between a b s)", "bounds-mask": "(And (Between a b s) m)"}  # fmt: skip
    if kind.startswith("bounds"):
        sample |= {"a": "i32[2, 4, 1]", "b": "i32[2, 4, 1]"}
    sample["o"] = "f32[2, 4, 4]"
    return {**sample, "x": x[kind], "p": "nan" if kind == "mask" else "zero"} if kind else sample


_GROUP = {"q": "f32[2, 6, 2, 3]", "k": "f32[2, 2, 4, 3]", "v": "f32[2, 2, 4, 5]",
          "b": (2, 2, 1, 4, 3), "d": (2, 2, 3, 4, 3), "f": (2, 6, 4, 3), "m": (2, 2, 1, 4, 5),
          "p": (2, 2, 3, 4, 5), "s": (2, 6, 4, 5), "c": 0.5, "i": 1, "u": 3.0, "h": 1, "w": 2,
          "x": "f32[2, 6, 2, 4]", "y": "bias", "none": "zero", "low": "i32[2, 6, 2, 1]",
          "high": "i32[2, 6, 2, 1]"}  # fmt: skip


def _few_sample(name: str) -> dict[str, object]:
    bounds = {"f": "i32[2, 4, 1]", "g": "i32[2, 4, 1]", "s": (2, 4, 4), "d": -1e9}
    extra = "f32[2, 4, 4]" if "bias" in name else "bool[2, 4, 4]"
    keys = "(And (Between f g s) x)" if "mask" in name else "(Between f g s)"
    return {**_QK, **bounds, "x": extra, "m": keys}


def _extra_sample(name: str) -> dict[str, object]:
    hides = {"z": "bool[2, 4, 4]", "m": "(And z (Not (Causal s 1.0)))"}  # all keys of some queries
    sample = {**_QK, "s": (2, 4, 4), "b": "f32[2, 4, 4]", **hides, "f": -1e9, "o": -1.0}
    if "unseen" in name:
        return {**_QK, "s": (2, 4, 4), "o": -1.0, "f": -1e9}
    return {**sample, "o": 0.0, "p": -2.0} if "window" in name else sample


_TERMS = {"x": "f32[2, 4, 4]", "y": "f32[2, 4, 4]"}
SAMPLES = {
    **{r.name: _QK for r in SCORES},
    "scores-add-add": {**_QK, **_TERMS, "p": "(Softmax (Add (Add (Scores q kt c u) x) y) a)"},
    "mask-then-bias": {**_QK, **_TERMS, "m": "bool[2, 4, 4]"},
    "weights weights-safe": {**_QK, "kt": "f32[2, 3, 5]"},
    "weights-causal weights-causal-safe": _FILL,
    "weights-causal-rows": _ROWS,
    "weights-window weights-window-safe": _BANDED,
    "weights-window-rows": {**_BANDED, "o": -1.0},
    **{r.name: _extra_sample(r.name) for r in WEIGHTS if "(WeightsX" in r.right},
    "attention": {**_QK, "h": 1, "i": 1, "w": 2, "u": 3.0},
    "attention-extra": {
        **_QK,
        "x": "bool[2, 4, 4]",
        "h": 1,
        "i": 0,
        "w": 0,
        "y": "mask",
        "z": "nan",
    },
    "attention-both": {
        **_QK,
        "x": "bool[2, 4, 4]",
        "o": "f32[2, 4, 4]",
        "h": 1,
        "i": 0,
        "w": 0,
        "y": "both",
        "z": "zero",
    },
    **{r.name: _decode_sample(r.name) for r in DECODE},
    **{r.name: _few_sample(r.name) for r in FEW},
    **{r.name: _GROUP for r in GROUPS},
}
RULES = with_samples((*SCORES, *ADDED, *WEIGHTS, *FEW, *KERNELS, *DECODE, *GROUPS), SAMPLES)
