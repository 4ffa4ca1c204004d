"""Movement: views compose, cancel and have inverses; sums of moved and repeated values."""

from __future__ import annotations

from ..patterns import Rule, rules_of, with_samples

RANKS = range(2, 7)
_rule = rules_of("movement")


def picked(vector: str, rank: int) -> str:
    """The entries of a vector in the order of the permutation q."""
    return f"(vec-of {' '.join(f'(vec-get {vector} (vec-get q {k}))' for k in range(rank))})"


# Two views are one, and y = view(x) makes x a view of y: so what is known of a gradient's view
# is known of the gradient, and kernels' results meet it.
VIEWS = (
    _rule("cancel-transpose",  "(Transpose (Transpose x p) q)", "x", "(= q (inverse-perm p))"),
    _rule("drop-transpose",    "(Transpose x p)", "x", "(= n (vec-length p))",
          "(= p (identity-perm n))"),
    _rule("invert-transpose",  "x", "(Transpose y q)", "(= y (Transpose x p))",
          "(= q (inverse-perm p))"),
    _rule("compose-reshape",   "(Reshape (Reshape x s) t)", "(Reshape x t)", "(!= t (shape x))"),
    _rule("cancel-reshape",    "(Reshape (Reshape x s) t)",     "x", "(= t (shape x))"),
    _rule("drop-reshape",      "(Reshape x s)",                 "x", "(= s (shape x))"),
    _rule("invert-reshape",    "x", "(Reshape y s)", "(= y (Reshape x t))", "(= s (shape x))"),
    _rule("compose-broadcast", "(Broadcast (Broadcast x s) t)", "(Broadcast x t)"),
    _rule("drop-broadcast",    "(Broadcast x s)",               "x", "(= s (shape x))"),
)  # fmt: skip

TRANSPOSES = tuple(
    rule
    for r in RANKS
    for rule in (
        _rule(f"compose-transpose@{r}", "(Transpose (Transpose x p) q)",
              f"(Transpose x {picked('p', r)})", f"(= {r} (vec-length q))",
              "(= n (inverse-perm p))", "(!= q n)"),
        _rule(f"transpose-broadcast@{r}", "(Transpose (Broadcast x s) q)",
              f"(Broadcast (Transpose x q) {picked('s', r)})", f"(= {r} (vec-length q))"),
    )
)  # fmt: skip

# Numbers move out of views, so that they meet the numbers and products around them.
SCALES = tuple(
    _rule(f"{view.lower()}-{op.lower()}-constant", f"({view} ({op} x #c) v)",
          f"({op} ({view} x v) (const c root))")
    for view in ("Transpose", "Reshape", "Broadcast")
    for op in ("Mul", "Div")
)  # fmt: skip

# The sum of two equal views is a view of the sum.
SUMS_OF_VIEWS = (
    _rule("add-transposes", "(Add (Transpose x p) (Transpose y p))", "(Transpose (Add x y) p)"),
    _rule("add-reshapes",   "(Add (Reshape x s) (Reshape y s))", "(Reshape (Add x y) s)",
          "(= (shape x) (shape y))"),
)  # fmt: skip


def _split(count: int) -> Rule:
    rest = " ".join(f"(vec-get a {k})" for k in range(count - 1))
    last = f"(vec-get a {count - 1})"
    rows = f"(Sum x (vec-of {last}))"
    is_last = f"(= {last} (- (vec-length (shape x)) 1))"
    return _rule(f"split-sum@{count}", "(Sum x a)", f"(Sum {rows} (vec-of {rest}))",
                 f"(= {count} (vec-length a))", is_last)  # fmt: skip


# A sum over several axes is a sum of row sums, which can share a kernel with what makes the rows.
# The sum of n equal elements is a multiple of one.
SUMS = (
    *map(_split, range(2, 5)),
    _rule("sum-transpose", "(Sum (Transpose x p) a)",
          "(Transpose (Sum x (vec-of (vec-get p (vec-get a 0)))) p)", "(= 1 (vec-length a))"),
    _rule("sum-broadcast", "(Sum (Broadcast x s) a)",
          "(Mul (Broadcast x (vec-set s k 1)) (const (to-f64 (vec-get s k)) root))",
          "(= 1 (vec-length a))", "(= k (vec-get a 0))", "(= 1 (vec-get (shape x) k))",
          "(< 0 (vec-get s k))"),
)  # fmt: skip

_SIDES = {r: ", ".join(str(2 + k) for k in range(r)) for r in RANKS}
_TURN = {r: (*range(1, r), 0) for r in RANKS}
SAMPLES = {
    "cancel-transpose": {"x": "f32[2, 3, 4]", "p": (1, 2, 0), "q": (2, 0, 1)},
    "drop-transpose": {"x": "f32[2, 3]", "p": (0, 1)},
    "invert-transpose": {"x": "f32[2, 3, 4]", "p": (1, 2, 0)},
    "compose-reshape": {"x": "f32[2, 6]", "s": (12,), "t": (3, 4)},
    "cancel-reshape": {"x": "f32[2, 6]", "s": (12,), "t": (2, 6)},
    "drop-reshape": {"x": "f32[2, 6]", "s": (2, 6)},
    "invert-reshape": {"x": "f32[2, 6]", "t": (3, 4)},
    "compose-broadcast": {"x": "f32[1, 1, 4]", "s": (1, 3, 4), "t": (2, 3, 4)},
    "drop-broadcast": {"x": "f32[2, 6]", "s": (2, 6)},
    "compose-transpose@2": {"x": "f32[2, 3]", "p": (1, 0), "q": (0, 1)},
    **{f"compose-transpose@{r}": {"x": f"f32[{_SIDES[r]}]", "p": _TURN[r], "q": _TURN[r]}
       for r in RANKS[1:]},
    **{f"transpose-broadcast@{r}": {"x": f"f32[1{', 3' * (r - 1)}]", "s": (2, *(3,) * (r - 1)),
                                    "q": _TURN[r]}
       for r in RANKS},
    "transpose-mul-constant transpose-div-constant": {"x": "f32[2, 6]", "v": (1, 0), "c": 0.5},
    "reshape-mul-constant reshape-div-constant": {"x": "f32[2, 6]", "v": (3, 4), "c": 0.5},
    "broadcast-mul-constant broadcast-div-constant": {"x": "f32[2, 1]", "v": (2, 6), "c": 0.5},
    "add-transposes": {"x": "f32[2, 3]", "y": "f32[2, 3]", "p": (1, 0)},
    "add-reshapes": {"x": "f32[2, 6]", "y": "f32[2, 6]", "s": (12,)},
    **{f"split-sum@{r}": {"x": f"f32[{_SIDES[r]}]", "a": tuple(range(r))} for r in range(2, 5)},
    "sum-transpose": {"x": "f32[2, 3, 4]", "p": (1, 2, 0), "a": (1,)},
    "sum-broadcast": {"x": "f32[3, 1]", "s": (3, 4), "a": (1,)},
}  # fmt: skip
RULES = with_samples((*VIEWS, *TRANSPOSES, *SCALES, *SUMS_OF_VIEWS, *SUMS), SAMPLES)
