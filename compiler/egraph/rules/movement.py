"""Movement: views compose, cancel and have inverses; reductions of moved and repeated values."""

from __future__ import annotations

from collections.abc import Callable

from ..patterns import Rule

RANKS = range(2, 7)


def _rule(name: str, left: str, right: str, *when: str, samples: tuple = ()) -> Rule:
    return Rule(name, "movement", left, right, when, samples)


def by_rank(build: Callable[[int], Rule], ranks: range = RANKS) -> tuple[Rule, ...]:
    return tuple(build(r) for r in ranks)


def vector(items: Callable[[int], str], rank: int) -> str:
    return f"(vec-of {' '.join(items(k) for k in range(rank))})"


def _sides(rank: int) -> str:
    return f"f32[{', '.join(str(2 + k) for k in range(rank))}]"


def _turn(rank: int) -> tuple[int, ...]:
    return (*range(1, rank), 0)


def _permute_after(name: str, inner: str, right: Callable[[str], str], *when: str,
                   sample: Callable[[int], dict]) -> tuple[Rule, ...]:  # fmt: skip
    """(Transpose inner q) for each rank; `right` gets the vector that q picks from."""

    def build(rank: int) -> Rule:
        return _rule(f"{name}@{rank}", f"(Transpose {inner} q)", right(vector(lambda k: f"(vec-get {{}} (vec-get q {k}))", rank)),
                     f"(= {rank} (vec-length q))", *when, samples=(sample(rank),))  # fmt: skip

    return by_rank(build)


# Two views are one, and y = view(x) makes x a view of y: so gradients of a view meet kernels' results for the value itself.
VIEWS = (
    *_permute_after("compose-transpose", "(Transpose x p)", lambda pick: f"(Transpose x {pick.replace('{}', 'p')})",
                    "(= n (inverse-perm p))", "(!= q n)",
                    sample=lambda r: {"x": _sides(r), "p": _turn(r), "q": _turn(r) if r > 2 else (0, 1)}),
    _rule("cancel-transpose", "(Transpose (Transpose x p) q)", "x", "(= q (inverse-perm p))",
          samples=({"x": "f32[2, 3, 4]", "p": (1, 2, 0), "q": (2, 0, 1)},)),
    _rule("drop-transpose",   "(Transpose x p)", "x", "(= n (vec-length p))", "(= p (identity-perm n))",
          samples=({"x": "f32[2, 3]", "p": (0, 1)},)),
    _rule("invert-transpose", "x", "(Transpose y q)", "(= y (Transpose x p))", "(= q (inverse-perm p))",
          samples=({"x": "f32[2, 3, 4]", "p": (1, 2, 0)},)),
    _rule("compose-reshape",  "(Reshape (Reshape x s) t)", "(Reshape x t)", "(!= t (shape x))",
          samples=({"x": "f32[2, 6]", "s": (12,), "t": (3, 4)},)),
    _rule("cancel-reshape",   "(Reshape (Reshape x s) t)", "x", "(= t (shape x))",
          samples=({"x": "f32[2, 6]", "s": (12,), "t": (2, 6)},)),
    _rule("drop-reshape",     "(Reshape x s)", "x", "(= s (shape x))", samples=({"x": "f32[2, 6]", "s": (2, 6)},)),
    _rule("invert-reshape",   "x", "(Reshape y s)", "(= y (Reshape x t))", "(= s (shape x))",
          samples=({"x": "f32[2, 6]", "t": (3, 4)},)),
    _rule("compose-broadcast", "(Broadcast (Broadcast x s) t)", "(Broadcast x t)",
          samples=({"x": "f32[1, 1, 4]", "s": (1, 3, 4), "t": (2, 3, 4)},)),
    _rule("drop-broadcast",   "(Broadcast x s)", "x", "(= s (shape x))", samples=({"x": "f32[2, 6]", "s": (2, 6)},)),
    *_permute_after("transpose-broadcast", "(Broadcast x s)",
                    lambda pick: f"(Broadcast (Transpose x q) {pick.replace('{}', 's')})",
                    sample=lambda r: {"x": f"f32[1{', 3' * (r - 1)}]", "s": (2, *(3,) * (r - 1)), "q": _turn(r)}),
)  # fmt: skip

_VIEWED = ({"x": "f32[2, 6]", "v": (1, 0), "c": 0.5},)
_SHAPED = ({"x": "f32[2, 6]", "v": (3, 4), "c": 0.5},)
_SPREAD = ({"x": "f32[2, 1]", "v": (2, 6), "c": 0.5},)
# Numbers move out of views, so that they meet the numbers and products around them.
SCALES = tuple(
    _rule(f"{view.lower()}-{op.lower()}-constant", f"({view} ({op} x #c) v)", f"({op} ({view} x v) (const c root))", samples=samples)
    for view, samples in (("Transpose", _VIEWED), ("Reshape", _SHAPED), ("Broadcast", _SPREAD))
    for op in ("Mul", "Div")
)  # fmt: skip

# The sum of two equal views is a view of the sum.
SUMS_OF_VIEWS = (
    _rule("add-transposes", "(Add (Transpose x p) (Transpose y p))", "(Transpose (Add x y) p)",
          samples=({"x": "f32[2, 3]", "y": "f32[2, 3]", "p": (1, 0)},)),
    _rule("add-reshapes",   "(Add (Reshape x s) (Reshape y s))", "(Reshape (Add x y) s)", "(= (shape x) (shape y))",
          samples=({"x": "f32[2, 6]", "y": "f32[2, 6]", "s": (12,)},)),
)  # fmt: skip


def _split(count: int) -> Rule:
    """A sum over several axes as a sum of row sums: the row sums can share a kernel with what made the rows."""
    rest = vector(lambda k: f"(vec-get a {k})", count - 1)
    last = f"(vec-get a {count - 1})"
    shape = tuple(range(2, 2 + count))
    return _rule(f"split-sum@{count}", "(Sum x a)", f"(Sum (Sum x (vec-of {last})) {rest})",
                 f"(= {count} (vec-length a))", f"(= {last} (- (vec-length (shape x)) 1))",
                 samples=({"x": f"f32[{', '.join(map(str, shape))}]", "a": tuple(range(count))},))  # fmt: skip


REDUCTIONS = (
    *by_rank(_split, range(2, 5)),
    _rule("sum-transpose", "(Sum (Transpose x p) a)", "(Transpose (Sum x (vec-of (vec-get p (vec-get a 0)))) p)",
          "(= 1 (vec-length a))", samples=({"x": "f32[2, 3, 4]", "p": (1, 2, 0), "a": (1,)},)),
    # n equal elements
    _rule("sum-broadcast", "(Sum (Broadcast x s) a)", "(Mul (Broadcast x (vec-set s k 1)) (const (to-f64 (vec-get s k)) root))",
          "(= 1 (vec-length a))", "(= k (vec-get a 0))", "(= 1 (vec-get (shape x) k))", "(< 0 (vec-get s k))",
          samples=({"x": "f32[3, 1]", "s": (3, 4), "a": (1,)},)),
)  # fmt: skip

RULES = (*VIEWS, *SCALES, *SUMS_OF_VIEWS, *REDUCTIONS)
