"""The gradient of attention: what autodiff writes becomes results of one kernel.

With p the probabilities, do the output's cotangent: ds = p * (do v^T - delta), delta = rowsum(do *
o), dq = scale * ds k, dk = scale * ds^T q, dv = p^T do.
"""

from __future__ import annotations

import math

from ..patterns import Rule, rules_of, with_samples

_rule = rules_of("attention")

# Numbers around p * (g - rowsum(g * p)) are part of its name. Where the mask hides scores, the
# probabilities are 0, and so is the gradient: choosing 0 there changes nothing.
_HIDES = "(= p ({} (Select m z #f) a))"
SCORES = (
    _rule("softmax-gradient-mul",  "(Mul (SoftmaxGrad p g a e) #d)", "(SoftmaxGrad p g a (* e d))"),
    _rule("softmax-gradient-div",  "(Div (SoftmaxGrad p g a e) #d)", "(SoftmaxGrad p g a (/ e d))",
          "(!= d 0.0)"),
    _rule("hidden-gradient-mul",   "(Mul (Select m (SoftmaxGrad p g a e) 0.0) #d)",
          "(Select m (SoftmaxGrad p g a (* e d)) (const 0.0 g))"),
    _rule("hidden-gradient-div",   "(Div (Select m (SoftmaxGrad p g a e) 0.0) #d)",
          "(Select m (SoftmaxGrad p g a (/ e d)) (const 0.0 g))", "(!= d 0.0)"),
    *(
        _rule(name, "(Select m (SoftmaxGrad p g a e) 0.0)", "(SoftmaxGrad p g a e)",
              _HIDES.format(softmax), "(<= f -1e9)", f"(= p {weights})")
        for name, softmax, weights in (
            ("hidden-gradient",       "Softmax",     "(Weights q k c h i w u)"),
            ("hidden-gradient-safe",  "SafeSoftmax", "(Weights q k c h i w u)"),
            ("hidden-gradient-extra", "SafeSoftmax", '(WeightsX q k x c h i w u y "zero")'),
            ("hidden-gradient-both",  "SafeSoftmax", '(WeightsXY q k x o c h i w u y "zero")'),
        )
    ),
)  # fmt: skip

_T = ("(= n (vec-length (shape root)))", "(= t (swap-perm n))")
_V = (*_T, "(= v (Transpose vt t))", "(= a (vec-of (- n 1)))")
_GRADIENT = "(SoftmaxGrad p (Dot do vt) a e)"


def _kernel(attention: str, extra: str, options: str) -> str:
    """The gradient of scores after their soft cap, as something inside the backward kernel."""
    delta = f"(Sum (Mul do (Get {attention} 0)) a)"
    kernel = f"(AttentionBackward q k v (Get {attention} 1) {delta} do {extra}{options})"
    return f"(CappedGrad {kernel} q k p do e c u)"


_PLAIN = _kernel('(Attention q k v c h i w u "none" "zero")', "", 'c h i w u "none" "zero"')
_EXTRA = _kernel("(Attention q k v x c h i w u y z)", "x ", "c h i w u y z")
_BOTH = _kernel("(Attention q k v x o c h i w u y z)", "x o ", "c h i w u y z")
_WEIGHTS = "(= p (Weights q k c h i w u))"
_WEIGHTS_X = "(= p (WeightsX q k x c h i w u y z))"
_WEIGHTS_XY = "(= p (WeightsXY q k x o c h i w u y z))"
# NaN and the mean are in the probabilities of hidden scores, and not in the scores' gradient.
_HIDDEN = f"(Select m {_GRADIENT} 0.0)"


def _hiding(scores: str) -> tuple[str, ...]:
    """The mask m hides all that is hidden."""
    return (f"(= p (Softmax (Select m {scores} #f) a))", "(<= f -1e9)", '(!= z "zero")')


_S = "(Scores q kt c u)"
_SAFE, _ALL = '(= z "zero")', (_WEIGHTS_X, '(= y "bias")', '(= z "nan")', "(= h 0)")
_CAPPED = "(CappedGrad b q k p do e c u)"
_SLOPE = f"(Mul* {_CAPPED} (Sub 1.0 (Mul g g)))"
_CAP = ("(= g (Tanh (Scores q kt r 0.0)))", "(< 0.0 u)",
        "(< (abs (- (* r u) c)) (* 1e-6 (abs c)))", "(= k (Transpose kt t))", *_T)  # fmt: skip
_SG = "(ScoreGrad b q k p do e c)"
KERNELS = (
    # rowsum(p * (do v^T)) = rowsum(do * (p v))
    _rule("delta", "(Sum (Mul* (Dot do vt) p) a)", "(Sum (Mul do (Dot p v)) a)", _WEIGHTS, *_V),
    _rule("capped-gradient",             _GRADIENT, _PLAIN, _WEIGHTS, *_V),
    _rule("capped-gradient-extra",       _GRADIENT, _EXTRA, _WEIGHTS_X, _SAFE, *_V),
    _rule("capped-gradient-both",        _GRADIENT, _BOTH,  _WEIGHTS_XY, _SAFE, *_V),
    _rule("capped-gradient-bias",        _GRADIENT, _EXTRA, *_ALL, *_V),
    _rule("capped-gradient-hidden",      _HIDDEN,   _EXTRA, _WEIGHTS_X, *_hiding(_S), *_V),
    _rule("capped-gradient-hidden-bias", _HIDDEN,   _EXTRA, _WEIGHTS_X,
          *_hiding(f"(Add* {_S} x)"), *_V),
    _rule("capped-gradient-hidden-both", _HIDDEN,   _BOTH,  _WEIGHTS_XY,
          *_hiding(f"(Add* {_S} o)"), *_V),
    # a soft cap puts 1 - tanh^2 before the scale
    _rule("scores-gradient",             "(CappedGrad b q k p do e c 0.0)", _SG),
    _rule("scores-gradient-softcap",     _SLOPE, _SG, *_CAP),
    _rule("scores-gradient-guarded",     f"(Select (Eq {_CAPPED} 0.0) 0.0 {_SLOPE})", _SG, *_CAP),
    _rule("scores-gradient-mul",         f"(Mul {_SG} #m)", "(ScoreGrad b q k p do (* e m) c)"),
    _rule("scores-gradient-div",         f"(Div {_SG} #m)", "(ScoreGrad b q k p do (/ e m) c)",
          "(!= m 0.0)"),
)  # fmt: skip

# The gradient of a bias is that of the scores, before scale and soft cap; where the bias is
# repeated, its sum.
_AXES = ("(= n (vec-length (shape root)))", "(= m (vec-length a))")
_LAST = "(vec-get a (- m 1))"


def _bias(operands: str, axes: str) -> str:
    return f"(Get (AttentionBias q k v l d do {operands} c h i w u y z {axes}) 0)"


BIASES = (
    *(
        _rule(f"bias-gradient{both}", "(CappedGrad b q k p do 1.0 c u)",
              _bias(operands, "(vec-empty)"), f'(= y "{kind}")',
              f"(= b (AttentionBackward q k v l d do {operands} c h i w u y z))")
        for both, kind, operands in (("", "bias", "x"), ("-both", "both", "x o"))
    ),
    *(
        _rule(f"bias-gradient-{case}", f"(Sum {_bias(operands, '(vec-empty)')} a)", right, *_AXES,
              *when)
        for suffix, operands in (("", "x"), ("-both", "x o"))
        for case, right, when in (
            (f"sum{suffix}", _bias(operands, "a"), ("(< 0 m)", f"(< {_LAST} (- n 2))")),
            (f"rows{suffix}", f"(Sum {_bias(operands, '(vec-pop a)')} (vec-of (- n 2)))",
             ("(< 1 m)", f"(= {_LAST} (- n 2))")),
        )
    ),
)  # fmt: skip

_MAKES_UP = "(<= (abs (- (* e m) c)) (* 1e-9 (abs c)))"


def _results(name: str, product: str, result: str, *when: str) -> tuple[Rule, ...]:
    """A product with the scores' gradient, once the numbers in and after it make up the scale."""
    return (
        _rule(name, product, result, _MAKES_UP.replace("(* e m)", "e"), *when),
        _rule(f"{name}-scaled", f"(Mul {product} #m)", result, _MAKES_UP, *when),
    )


RESULTS = (
    *_results("attention-dq",  f"(Dot {_SG} k)",               "(Get b 0)"),
    *_results("attention-dqt", f"(Dot (Transpose k t) (Transpose {_SG} t))",
              "(Transpose (Get b 0) t)", *_T),
    *_results("attention-dk",  f"(Dot (Transpose {_SG} t) q)", "(Get b 1)", *_T),
    *_results("attention-dkt", f"(Dot (Transpose q t) {_SG})", "(Transpose (Get b 1) t)", *_T),
    _rule("attention-dv",      "(Dot (Transpose p t) do)",     "(Get b 2)", *_T, f"(= g {_SG})"),
    _rule("attention-dvt",     "(Dot (Transpose do t) p)", "(Transpose (Get b 2) t)", *_T,
          f"(= g {_SG})"),
)  # fmt: skip

_G = {"p": "f32[3, 5]", "g": "f32[3, 5]", "a": (1,), "e": 0.5, "d": 4.0}
_O = {"q": "f32[2, 4, 3]", "kt": "f32[2, 3, 4]", "k": "(Transpose kt (vec-of 0 2 1))",
      "v": "f32[2, 4, 6]", "vt": "(Transpose v (vec-of 0 2 1))", "do": "f32[2, 4, 6]",
      "c": 0.5, "h": 1, "i": 0, "w": 0, "u": 0.0, "a": (2,), "t": (0, 2, 1)}  # fmt: skip
_P = {**_O, "p": "(Weights q k c h i w u)", "e": 2.0}
_X = {**_O, "x": "bool[2, 4, 4]", "y": "mask", "z": "zero", "e": 2.0,
      "p": "(WeightsX q k x c h i w u y z)"}  # fmt: skip
_KERNEL = {
    **_P,
    "l": '(Get (Attention q k v c h i w u "none" "zero") 1)',
    "delta": '(Sum (Mul do (Get (Attention q k v c h i w u "none" "zero") 0)) a)',
    "b": '(AttentionBackward q k v l delta do c h i w u "none" "zero")',
}
_B = {**_X, "x": "f32[2, 4, 4]", "y": "bias"}
_STATS = {"z": "nan", "l": "f32[2, 4, 2]", "d": "f32[2, 4, 1]"}
_BIASED = {"x": "f32[2, 4, 4]", "y": "bias", **_STATS,
           "b": "(AttentionBackward q k v l d do x c h i w u y z)"}  # fmt: skip
_BIASED_BOTH = {"x": "bool[2, 4, 4]", "o": "f32[2, 4, 4]", "y": "both", **_STATS,
                "b": "(AttentionBackward q k v l d do x o c h i w u y z)"}  # fmt: skip
_NAN = {"h": 0, "y": "bias", "z": "nan"}
# a mask that hides all keys of some queries
_SOME = {**_O, "j": (2, 4, 4), "m": "(Not (Causal j 1.0))", "h": 0, "e": 2.0, "f": -math.inf}
_M = {**_SOME, "x": "(Not (Causal j 1.0))", "y": "mask", "z": "nan",
      "p": "(WeightsX q k m c h i w u y z)"}  # fmt: skip
_BM = {**_SOME, "x": "f32[2, 4, 4]", "m": "(Causal j -1.0)", "h": 1, "i": -1, "y": "bias",
       "z": "nan", "p": "(WeightsX q k x c h i w u y z)"}  # fmt: skip
_MB = {"o": "f32[2, 4, 4]", "y": "both"}
_P_BOTH = {"p": "(WeightsXY q k x o c h i w u y z)"}
_XY = {**_O, **_MB, "x": "bool[2, 4, 4]", "z": "zero", "e": 2.0, **_P_BOTH}
_HXY = {**_SOME, **_MB, "x": "(Not (Causal j 1.0))", "z": "nan", **_P_BOTH}  # fmt: skip
_SUMMED = {"q": "f32[2, 3, 4, 3]", "k": "f32[2, 3, 4, 3]", "v": "f32[2, 3, 4, 5]",
           "do": "f32[2, 3, 4, 5]", "x": "f32[2, 3, 4, 4]", "l": "f32[2, 3, 4, 2]",
           "d": "f32[2, 3, 4, 1]", "c": 0.5, "h": 1, "i": 0, "w": 0, "u": 0.0, "y": "bias",
           "z": "zero"}  # fmt: skip
_SUMMED_BOTH = {"x": "bool[2, 3, 4, 4]", "o": "f32[2, 3, 4, 4]", "y": "both"}
_SEEN = {**_O, "s": (2, 4, 4), "z": "(Scores q kt c 0.0)", "g": "f32[2, 4, 4]", "e": 1.0,
         "f": -math.inf}  # fmt: skip
_SEEN_X = {"m": "bool[2, 4, 4]", "x": "(Select m m m)", "y": "mask", "h": 0}
_CAPS = {"u": 4.0, "r": 0.125}
_TRIANGLE = {**_SEEN, "m": "(Causal s 0.0)"}
SAMPLES = {
    "softmax-gradient-mul softmax-gradient-div": _G,
    "hidden-gradient hidden-gradient-safe": _TRIANGLE,
    "hidden-gradient-extra": {**_SEEN, **_SEEN_X},
    "hidden-gradient-mul hidden-gradient-div": {**_G, "m": "bool[3, 5]"},
    "delta capped-gradient": _P,
    "capped-gradient-extra": _X,
    "capped-gradient-both": _XY,
    "capped-gradient-bias": {**_B, **_NAN},
    "capped-gradient-hidden": _M,
    "capped-gradient-hidden-bias": _BM,
    "capped-gradient-hidden-both": _HXY,
    "scores-gradient": _KERNEL,
    "scores-gradient-softcap scores-gradient-guarded": {**_KERNEL, "u": 4.0, "r": 0.125},
    "bias-gradient": {**_P, **_BIASED},
    "bias-gradient-both": {**_P, **_BIASED_BOTH},
    "hidden-gradient-both": {
        **_MB,
        **_SEEN,
        **_SEEN_X,
        "z": "(Add (Scores q kt c 0.0) o)",
        "y": "both",
    },
    "bias-gradient-sum-both": {**_SUMMED, **_SUMMED_BOTH, "a": (0, 1)},
    "bias-gradient-rows-both": {**_SUMMED, **_SUMMED_BOTH, "a": (1, 2)},
    "bias-gradient-sum": {**_SUMMED, "a": (0, 1)},
    "bias-gradient-rows": {**_SUMMED, "a": (1, 2)},
    "scores-gradient-mul scores-gradient-div": {**_KERNEL, "m": 3.0},
    **{
        r.name: {**_KERNEL, "e": 0.125, "m": 4.0} if "scaled" in r.name else {**_KERNEL, "e": 0.5}
        for r in RESULTS
    },
}
RULES = with_samples((*SCORES, *KERNELS, *BIASES, *RESULTS), SAMPLES)
