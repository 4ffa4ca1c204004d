"""Attention, found in small steps: scaled scores, probabilities of masked scores, the kernel.

A row of scores without any visible key is 0 in `Attention`. So a softmax that would give NaN there
may only become one where no such row can be: without a mask, or with a causal one whose every row
sees a key.
"""

from __future__ import annotations

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


# Rows of a bias may be all -inf, where softmax is NaN: only its safe form is attention.
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
    _safe("weights-mask",        f"(Select m {_S} -inf)", f'(WeightsX q {_K} m c 0 0 0 u "mask")',
          "(= 0 (structured m))"),
    _safe("weights-causal-mask", f"(Select (And* {_CAUSAL} m) {_S} -inf)",
          f'(WeightsX q {_K} m c 1 i 0 u "mask")', _OFFSET, "(= 0 (structured m))"),
    _safe("weights-bias-safe",   f"(Add* {_S} b)", f'(WeightsX q {_K} b c 0 0 0 u "bias")'),
    _safe("weights-causal-bias", f"(Select {_CAUSAL} (Add* {_S} b) -inf)",
          f'(WeightsX q {_K} b c 1 i 0 u "bias")', _OFFSET),
    _rule("weights-bias",        f"(Softmax (Add* {_S} b) a)",
          f'(WeightsX q {_K} b c 0 0 0 u "bias")', *_LAST, relaxed=True),
)  # fmt: skip

KERNELS = (
    _rule("attention",       "(Dot (Weights q k c h i w u) v)",
          '(Get (Attention q k v c h i w u "none") 0)'),
    _rule("attention-extra", "(Dot (WeightsX q k x c h i w u y) v)",
          "(Get (Attention q k v x c h i w u y) 0)"),
)  # fmt: skip

# Few rows of queries over many keys: three kernels more. A mask that bounds the keys is read as its
# bounds, and no key beyond them.
_FEW = ("(= z (shape q))", "(= e (vec-length z))", f"(<= (vec-get z (- e 2)) {MOST_ROWS})")
_LONGEST = {"Phases": ("(= j (shape k))", f"(<= (vec-get j (- e 2)) {MOST_PHASE_KEYS})")}
_MASKED = '(Get (Attention q k v x c h i w u "mask") 0)'
DECODE = tuple(
    _rule(f"decode-{form.lower()}{case}", left, f"(Get (Attention{form} {right}) 0)", *_FEW,
          *_LONGEST.get(form, ()), *when)
    for form in ("Online", "Phases", "Split")
    for case, left, right, when in (
        ("", '(Get (Attention q k v c h i w u "none") 0)', 'q k v c h i w u "none" 1 0', ()),
        ("-mask", _MASKED, 'q k v x c h i w u "mask" 1 0', ()),
        ("-bias", '(Get (Attention q k v x c h i w u "bias") 0)',
         'q k v x c h i w u "bias" 1 0', ()),
        ("-bounds", _MASKED, 'q k v a b c h i w u "none" 1 1', ("(= x (Between a b s))",)),
        ("-bounds-mask", _MASKED, 'q k v a b m c h i w u "mask" 1 1',
         ("(= x (And* (Between a b s) m))",)),
    )
)  # fmt: skip

_QK = {"q": "f32[2, 4, 3]", "kt": "f32[2, 3, 4]", "k": "f32[2, 4, 3]", "v": "f32[2, 4, 6]",
       "c": 0.5, "u": 0.0, "d": 0.25, "a": (2,)}  # fmt: skip
_ROWS = {**_QK, "s": (2, 4, 4), "o": -1.0, "m": "bool[2, 4, 4]", "b": "f32[2, 4, 4]"}
_FILL = {**_QK, "s": (2, 4, 4), "o": 1.0, "f": -1e9}
_BANDED = {**_FILL, "o": 0.0, "p": -2.0}


def _decode_sample(name: str) -> dict[str, object]:
    sample = {**_QK, "h": 1, "i": 1, "w": 2, "u": 3.0, "s": (2, 4, 4), "m": "bool[2, 4, 4]"}
    kind = name.split("-", 2)[2] if name.count("-") > 1 else ""
    x = {"mask": "bool[2, 4, 4]", "bias": "f32[2, 4, 4]", "bounds": "(Between a b s)",
         "bounds-mask": "(And (Between a b s) m)"}  # fmt: skip
    if kind.startswith("bounds"):
        sample |= {"a": "i32[2, 4, 1]", "b": "i32[2, 4, 1]"}
    return {**sample, "x": x[kind]} if kind else sample


SAMPLES = {
    **{r.name: _QK for r in SCORES},
    "weights weights-safe": {**_QK, "kt": "f32[2, 3, 5]"},
    "weights-causal weights-causal-safe": _FILL,
    "weights-causal-rows": _ROWS,
    "weights-window weights-window-safe": _BANDED,
    "weights-window-rows": {**_BANDED, "o": -1.0},
    "weights-mask weights-causal-mask": _ROWS,
    "weights-bias-safe weights-causal-bias weights-bias": _ROWS,
    "attention": {**_QK, "h": 1, "i": 1, "w": 2, "u": 3.0},
    "attention-extra": {**_QK, "x": "bool[2, 4, 4]", "h": 1, "i": 0, "w": 0, "y": "mask"},
    **{r.name: _decode_sample(r.name) for r in DECODE},
}
RULES = with_samples((*SCORES, *WEIGHTS, *KERNELS, *DECODE), SAMPLES)
