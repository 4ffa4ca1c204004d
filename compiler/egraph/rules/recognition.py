"""Recognition: values get the names that people know them by. Extraction fuses them without names; attention needs softmax,
and the report tells what was found."""

from __future__ import annotations

from ..patterns import Rule

_X = ({"x": "f32[3, 5]", "a": (1,), "s": (3, 5)}, {"x": "f32[2, 3, 5]", "a": (2,), "s": (2, 3, 5)})
_SHIFTED = "(Exp (Sub x (Broadcast m s)))"
_GUARDED = "(Exp (Sub x (Broadcast (Select (Eq* m -inf) 0.0 m) s)))"


def _rule(name: str, left: str, right: str, *when: str, samples: tuple = (), theme: str = "recognition",
          relaxed: bool = False) -> Rule:  # fmt: skip
    return Rule(name, theme, left, right, when, samples, relaxed)


# exp(x - max x) / sum(exp(x - max x)); the safe form gives 0 for rows of -inf
SOFTMAX = (
    _rule("softmax", f"(Div {_SHIFTED} (Broadcast (Sum {_SHIFTED} a) s))", "(Softmax x a)", "(= m (Max x a))", samples=_X),
    _rule("softmax-unshifted", "(Div (Exp x) (Broadcast (Sum (Exp x) a) s))", "(Softmax x a)", samples=_X, relaxed=True),
    _rule("safe-softmax", "(Div e (Broadcast (Select (Eq* z 0.0) 1.0 z) s))", "(SafeSoftmax x a)",
          f"(= e {_GUARDED})", "(= m (Max x a))", "(= z (Sum e a))", samples=_X),
    _rule("safe-softmax-zeros", "(Select (Broadcast (Eq* z 0.0) s) 0.0 (SafeSoftmax x a))", "(SafeSoftmax x a)",
          f"(= z (Sum {_GUARDED} a))", "(= m (Max x a))", samples=_X),
    _rule("log-softmax", f"(Sub (Sub x (Broadcast m s)) (Broadcast (Log (Sum {_SHIFTED} a)) s))", "(LogSoftmax x a)",
          "(= m (Max x a))", samples=_X),
)  # fmt: skip

_G = ({"p": "f32[3, 5]", "g": "f32[3, 5]", "a": (1,), "s": (3, 5), "c": 0.5, "d": 4.0},)
_E = ({"u": "f32[3, 5]", "y": "f32[3, 1]", "x": "f32[3, 5]", "a": (1,), "s": (3, 5)},)
# p * (g - sum(g * p)), with the numbers around it
SOFTMAX_GRADIENT = (
    _rule("softmax-gradient", "(Mul* (Sub g (Broadcast (Sum (Mul* g p) a) s)) p)", "(SoftmaxGrad p g a 1.0)", samples=_G),
    _rule("softmax-gradient-mul", "(Mul (SoftmaxGrad p g a c) #d)", "(SoftmaxGrad p g a (* c d))", samples=_G, theme="attention"),
    _rule("softmax-gradient-div", "(Div (SoftmaxGrad p g a c) #d)", "(SoftmaxGrad p g a (/ c d))", samples=_G, theme="attention"),
    # where the sum of exponentials is 0, all of them are 0: what is multiplied with them does not matter
    _rule("drop-zero-guard", "(Mul* (Add* x (Broadcast (Select (Eq* z 0.0) 0.0 y) s)) e)", "(Mul (Add x (Broadcast y s)) e)",
          "(= z (Sum e a))", "(= e (Exp u))", samples=_E, theme="algebra"),
)  # fmt: skip

_ROWS = ({"x": "f32[3, 5]", "s": (3, 5), "c": 0.2, "e": 1e-5, "a": (1,)},)
_IS_MEAN = ("(= 1 (vec-length a))", "(= n (to-f64 (vec-get (shape x) (vec-get a 0))))")
NORMS = (
    _rule("mean", "(Mul (Sum x a) #c)", "(Mean x a)", *_IS_MEAN, "(< (abs (- (* c n) 1.0)) 1e-6)", samples=_ROWS),
    _rule("mean-div", "(Div (Sum x a) #c)", "(Mean x a)", *_IS_MEAN, "(= c n)",
          samples=({"x": "f32[3, 5]", "a": (1,), "c": 5.0},)),
    _rule("rms-norm", "(Mul* x (Broadcast (Rsqrt (Add (Mean (Mul x x) a) #e)) s))", "(RmsNorm x a e)", samples=_ROWS),
    _rule("rms-norm-div", "(Div x (Broadcast (Sqrt (Add (Mean (Mul x x) a) #e)) s))", "(RmsNorm x a e)", samples=_ROWS),
    _rule("layer-norm", "(RmsNorm (Sub x (Broadcast (Mean x a) s)) a e)", "(LayerNorm x a e)", samples=_ROWS),
)  # fmt: skip

_TANH_NUMBERS = ("(< (abs (- c 0.044715)) 1e-6)", "(< (abs (- d 0.7978845608)) 1e-6)")
_TANH = "(Add (Tanh (Mul (Add* x (Mul (Mul* (Mul x x) x) #c)) #d)) 1.0)"
_ERF_NUMBERS = ("(< (abs (- c 0.7071067812)) 1e-6)",)
_ERF = "(Add (Erf (Mul x #c)) 1.0)"


def _gelu(
    name: str, to: str, factor: str, numbers: tuple[str, ...], sample: dict
) -> tuple[Rule, ...]:
    """x / 2 * factor in its three orders."""
    forms = (
        f"(Mul* (Mul x 0.5) {factor})",
        f"(Mul (Mul* x {factor}) 0.5)",
        f"(Mul* x (Mul {factor} 0.5))",
    )
    return tuple(_rule(f"{name}@{k}", form, f"({to} x)", *numbers, samples=({"x": "f32[3, 5]", **sample},))
                 for k, form in enumerate(forms))  # fmt: skip


ACTIVATIONS = (
    *_gelu("gelu", "Gelu", _ERF, _ERF_NUMBERS, {"c": 0.7071067811865476}),
    *_gelu("gelu-tanh", "GeluTanh", _TANH, _TANH_NUMBERS, {"c": 0.044715, "d": 0.7978845608028654}),
    _rule("erf-div", "(Erf (Div x #c))", "(Erf (Mul x (const (/ 1.0 c) x)))", "(< (abs (- c 1.4142135624)) 1e-6)",
          samples=({"x": "f32[3, 5]", "c": 1.4142135623730951},)),
    _rule("silu", "(Div x (Add (Exp (Neg x)) 1.0))", "(Silu x)"),
)  # fmt: skip

# the log probability at an index, as a masked sum
LOSSES = (
    _rule("cross-entropy", '(Sum (Select (Eq* (Broadcast i s) (Index s -1 0.0 "i32")) (LogSoftmax x a) 0.0) a)', "(CrossEntropy x i a)",
          samples=({"x": "f32[3, 5]", "i": "i32[3, 1]", "a": (1,), "s": (3, 5)},)),
)  # fmt: skip

RULES = (*SOFTMAX, *SOFTMAX_GRADIENT, *NORMS, *ACTIVATIONS, *LOSSES)
