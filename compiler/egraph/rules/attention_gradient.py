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
    *(
        _rule(name, "(Select m (SoftmaxGrad p g a e) 0.0)", "(SoftmaxGrad p g a e)",
              _HIDES.format(softmax), "(<= f -1e9)", f"(= p {weights})")
        for name, softmax, weights in (
            ("hidden-gradient",       "Softmax",     "(Weights q k c h i w u)"),
            ("hidden-gradient-safe",  "SafeSoftmax", "(Weights q k c h i w u)"),
            ("hidden-gradient-extra", "SafeSoftmax", "(WeightsX q k x c h i w u y)"),
        )
    ),
)  # fmt: skip

_T = ("(= n (vec-length (shape root)))", "(= t (swap-perm n))")
_V = (*_T, "(= v (Transpose vt t))", "(= a (vec-of (- n 1)))")
_GRADIENT = "(SoftmaxGrad p (Dot do vt) a e)"


def _kernel(attention: str, extra: str, options: str) -> str:
    """The gradient of scores as something inside the backward kernel."""
    delta = f"(Sum (Mul do (Get {attention} 0)) a)"
    kernel = f"(AttentionBackward q k v (Get {attention} 1) {delta} do {extra}{options})"
    return f"(ScoreGrad {kernel} q k p do e c)"


_PLAIN = _kernel('(Attention q k v c h i w u "none")', "", 'c h i w u "none"')
_EXTRA = _kernel("(Attention q k v x c h i w u y)", "x ", "c h i w u y")
# rowsum(p * (do v^T)) = rowsum(do * (p v)). A soft cap puts 1 - tanh^2 before the scale.
KERNELS = (
    _rule("delta", "(Sum (Mul* (Dot do vt) p) a)", "(Sum (Mul do (Dot p v)) a)",
          "(= p (Weights q k c h i w u))", *_V),
    _rule("scores-gradient", _GRADIENT, _PLAIN, "(= p (Weights q k c h i w u))", "(= u 0.0)", *_V),
    _rule("scores-gradient-extra", _GRADIENT, _EXTRA, "(= p (WeightsX q k x c h i w u y))",
          "(= u 0.0)", *_V),
    _rule("scores-gradient-softcap", f"(Mul* {_GRADIENT} (Sub 1.0 (Mul y y)))", _PLAIN,
          "(= y (Tanh (Scores q kt r 0.0)))", "(= p (Weights q k c h i w u))", "(< 0.0 u)",
          "(< (abs (- (* r u) c)) (* 1e-6 (abs c)))", "(= k (Transpose kt t))", *_V),
    _rule("scores-gradient-mul", "(Mul (ScoreGrad b q k p do e c) #m)",
          "(ScoreGrad b q k p do (* e m) c)"),
)  # fmt: skip

_SG = "(ScoreGrad b q k p do e c)"
_MAKES_UP = "(< (abs (- (* e m) c)) (* 1e-9 (abs c)))"


def _results(name: str, product: str, result: str, *when: str) -> tuple[Rule, ...]:
    """A product with the scores' gradient, once the numbers in and after it make up the scale."""
    return (
        _rule(name, product, result, "(= e c)", *when),
        _rule(f"{name}-scaled", f"(Mul {product} #m)", result, _MAKES_UP, *when),
    )


RESULTS = (
    *_results("attention-dq",  f"(Dot {_SG} k)",               "(Get b 0)"),
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
_X = {**_O, "x": "bool[2, 4, 4]", "y": "mask", "p": "(WeightsX q k x c h i w u y)", "e": 2.0}
_KERNEL = {
    **_P,
    "l": '(Get (Attention q k v c h i w u "none") 1)',
    "delta": '(Sum (Mul do (Get (Attention q k v c h i w u "none") 0)) a)',
    "b": '(AttentionBackward q k v l delta do c h i w u "none")',
}
_SEEN = {**_O, "s": (2, 4, 4), "z": "(Scores q kt c 0.0)", "g": "f32[2, 4, 4]", "e": 1.0,
         "f": -math.inf}  # fmt: skip
_SEEN_X = {"m": "bool[2, 4, 4]", "x": "(Select m m m)", "y": "mask", "h": 0}
_TRIANGLE = {**_SEEN, "m": "(Causal s 0.0)"}
SAMPLES = {
    "softmax-gradient-mul softmax-gradient-div": _G,
    "hidden-gradient hidden-gradient-safe": _TRIANGLE,
    "hidden-gradient-extra": {**_SEEN, **_SEEN_X},
    "delta scores-gradient": _P,
    "scores-gradient-extra": _X,
    "scores-gradient-softcap": {**_P, "u": 4.0, "r": 0.125, "p": "(Weights q k c h i w u)"},
    "scores-gradient-mul": {**_KERNEL, "m": 3.0},
    **{
        r.name: {**_KERNEL, "e": 0.125, "m": 4.0} if "scaled" in r.name else {**_KERNEL, "e": 0.5}
        for r in RESULTS
    },
}
RULES = with_samples((*SCORES, *KERNELS, *RESULTS), SAMPLES)
