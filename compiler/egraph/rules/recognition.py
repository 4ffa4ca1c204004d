"""Recognition: values get the names that people know them by.

Extraction fuses them without names; attention needs softmax, and the report tells what was found.
"""

from __future__ import annotations

import math

from ..patterns import rules_of, with_samples

_rule = rules_of("recognition")

_SHIFTED = "(Exp (Sub x (Broadcast m s)))"
_GUARDED = "(Exp (Sub x (Broadcast (Select (Eq* m -inf) 0.0 m) s)))"
# exp(x - max x) / sum(exp(x - max x)). The safe form gives 0 for rows of -inf, the plain one NaN.
SOFTMAX = (
    _rule("softmax",            f"(Div {_SHIFTED} (Broadcast (Sum {_SHIFTED} a) s))",
          "(Softmax x a)", "(= m (Max x a))"),
    _rule("softmax-unshifted",  "(Div (Exp x) (Broadcast (Sum (Exp x) a) s))", "(Softmax x a)",
          relaxed=True),
    _rule("safe-softmax",       "(Div e (Broadcast (Select (Eq* z 0.0) 1.0 z) s))",
          "(SafeSoftmax x a)", f"(= e {_GUARDED})", "(= m (Max x a))", "(= z (Sum e a))"),
    _rule("safe-softmax-zeros", "(Select (Broadcast (Eq* z 0.0) s) 0.0 (SafeSoftmax x a))",
          "(SafeSoftmax x a)", f"(= z (Sum {_GUARDED} a))", "(= m (Max x a))"),
    # what hides scores hides the probabilities too: rows without any score are 0
    _rule("softmax-hidden-twice", "(Select m (Softmax (Select m x #f) a) 0.0)",
          "(SafeSoftmax (Select m x (const -inf x)) a)", "(<= f -1e9)"),
    _rule("softmax-of-log",     "(Exp (LogSoftmax x a))", "(Softmax x a)"),
    _rule("log-softmax-total",
          f"(Sub x (Broadcast (Add* (Log (Sum {_SHIFTED} a)) m) s))",
          "(LogSoftmax x a)", "(= m (Max x a))"),
    _rule("log-softmax",
          f"(Sub (Sub x (Broadcast m s)) (Broadcast (Log (Sum {_SHIFTED} a)) s))",
          "(LogSoftmax x a)", "(= m (Max x a))"),
    _rule("softmax-gradient",   "(Mul* (Sub g (Broadcast (Sum (Mul* g p) a) s)) p)",
          "(SoftmaxGrad p g a 1.0)"),
)  # fmt: skip

# x / sqrt(mean(x^2) + e); a layer norm is that of centered values.
_COUNT = ("(= 1 (vec-length a))", "(= n (to-f64 (vec-get (shape x) (vec-get a 0))))")
NORMS = (
    _rule("mean",         "(Mul (Sum x a) #c)", "(Mean x a)", *_COUNT,
          "(< (abs (- (* c n) 1.0)) 1e-6)"),
    _rule("mean-div",     "(Div (Sum x a) #c)", "(Mean x a)", *_COUNT, "(= c n)"),
    _rule("rms-norm",     "(Mul* x (Broadcast (Rsqrt (Add (Mean (Mul x x) a) #e)) s))",
          "(RmsNorm x a e)"),
    _rule("rms-norm-div", "(Div x (Broadcast (Sqrt (Add (Mean (Mul x x) a) #e)) s))",
          "(RmsNorm x a e)"),
    _rule("layer-norm",   "(RmsNorm (Sub x (Broadcast (Mean x a) s)) a e)", "(LayerNorm x a e)"),
)  # fmt: skip

_ERF = "(Add (Erf (Mul x #c)) 1.0)"
_TANH = "(Add (Tanh (Mul (Add* x (Mul (Mul* (Mul x x) x) #c)) #d)) 1.0)"
_HALF = "(< (abs (- c 0.7071067812)) 1e-6)"
_CUBIC = ("(< (abs (- c 0.044715)) 1e-6)", "(< (abs (- d 0.7978845608)) 1e-6)")
# x / 2 * (1 + erf(x / sqrt 2)) and its tanh form, each in the three orders of its product.
ACTIVATIONS = (
    _rule("gelu",            f"(Mul* (Mul x 0.5) {_ERF})",     "(Gelu x)", _HALF),
    _rule("gelu-outer",      f"(Mul (Mul* x {_ERF}) 0.5)",     "(Gelu x)", _HALF),
    _rule("gelu-inner",      f"(Mul* x (Mul {_ERF} 0.5))",     "(Gelu x)", _HALF),
    _rule("gelu-tanh",       f"(Mul* (Mul x 0.5) {_TANH})",    "(GeluTanh x)", *_CUBIC),
    _rule("gelu-tanh-outer", f"(Mul (Mul* x {_TANH}) 0.5)",    "(GeluTanh x)", *_CUBIC),
    _rule("gelu-tanh-inner", f"(Mul* x (Mul {_TANH} 0.5))",    "(GeluTanh x)", *_CUBIC),
    _rule("erf-div",         "(Erf (Div x #c))", "(Erf (Mul x (const (/ 1.0 c) x)))",
          "(< (abs (- c 1.4142135624)) 1e-6)"),
    _rule("silu",            "(Div x (Add (Exp (Neg x)) 1.0))", "(Silu x)"),
)  # fmt: skip

# The log probability at an index, as a masked sum.
LOSSES = (
    _rule("cross-entropy",
          '(Sum (Select (Eq* (Broadcast i s) (Index s -1 0.0 "i32")) (LogSoftmax x a) 0.0) a)',
          "(CrossEntropy x i a)"),
)  # fmt: skip

_X = {"x": "f32[2, 3, 5]", "a": (2,), "s": (2, 3, 5)}
_ROWS = {**_X, "c": 0.2, "e": 1e-5}
_TANH_NUMBERS = {"x": "f32[3, 5]", "c": 0.044715, "d": 0.7978845608028654}
SAMPLES = {
    "softmax softmax-unshifted safe-softmax safe-softmax-zeros log-softmax": _X,
    "softmax-of-log log-softmax-total": _X,
    "softmax-hidden-twice": {**_X, "m": "bool[2, 3, 5]", "f": -math.inf},
    "softmax-gradient": {"p": "f32[3, 5]", "g": "f32[3, 5]", "a": (1,), "s": (3, 5)},
    "mean rms-norm rms-norm-div layer-norm": _ROWS,
    "mean-div": {**_X, "c": 5.0},
    "gelu gelu-outer gelu-inner": {"x": "f32[3, 5]", "c": 0.7071067811865476},
    "gelu-tanh gelu-tanh-outer gelu-tanh-inner": _TANH_NUMBERS,
    "erf-div": {"x": "f32[3, 5]", "c": 1.4142135623730951},
    "cross-entropy": {**_X, "i": "i32[2, 3, 1]"},
}  # fmt: skip
RULES = with_samples((*SOFTMAX, *NORMS, *ACTIVATIONS, *LOSSES), SAMPLES)
