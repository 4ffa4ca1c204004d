"""What the e-graph knows of a class: `shape`, `dtype`, and `uniform`, the number that all its
elements are.

`shape` and `dtype` allow no merging, so a rule that equates values of different types fails loudly.
Their rules restate `Op.infer` in the engine's arithmetic for the ops that rules may create; the
others' types are stated when a program is inserted.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator

from ..ir import Kind
from ..ops.decode import DecodeBase
from ..ops.fused import Attention
from ..ops.move import inverse
from .language import Family, Form, families, float_text, integers_text
from .patterns import BY_CONSTANT

RANKS = range(1, 7)
THEME = "types"
FUNCTIONS = (
    "(function shape (T) Ints :no-merge)",
    "(function dtype (T) String :no-merge)",
    "(function uniform (T) f64 :merge old)",
    "(function ones (i64) Ints :no-merge)",
    "(function identity-perm (i64) Ints :no-merge)",
    "(function swap-perm (i64) Ints :no-merge)",
    "(function inverse-perm (Ints) Ints :no-merge)",
    *(f"(relation {relation} (T T f64))" for relation in BY_CONSTANT.values()),
    "(relation float (String))",
    "(relation signed (String))",
    "(relation power-of-two (f64))",
)
# Numbers of constants. One that is an operand's is left alone: 0 and the infinities would be equal
# to their own
# multiples, and the engine takes 0 and -0 for one.
_NEW = "(!= c a) (!= c b) (= d (dtype root)) (float d)"
FOLDS = {"Add": "(+ a b)", "Sub": "(- a b)", "Mul": "(* a b)", "Div": "(/ a b)"}
_SAME_DTYPE = (
    Kind.ELEMENTWISE,
    Kind.REDUCE,
    Kind.CONTRACT,
    Kind.MOVE,
)  # as an operand's, unless they say otherwise
SPELLS = ("Reshape", "Broadcast")  # with literals, how numbers of a shape are written
SAME_NUMBER = ("Reshape", "Broadcast", "Transpose", "Slice", "Flip", "StopGradient", "Identity")


def derived() -> frozenset[str]:
    """The constructors of which the rules know both shape and dtype."""
    texts = {f.name: " ".join(_types(f)) for f in families().values() if not f.variadic}
    known = {
        name for name, text in texts.items() if "(set (shape" in text and "(set (dtype" in text
    }
    return frozenset(known | {"Literal"})


def facts(perms: Iterable[tuple[int, ...]] = ()) -> list[str]:
    """Tables by rank; inverses of all permutations up to rank 4, and of the given ones and their
    inverses.
    """
    out = ['(float "f32")', '(float "f16")', '(signed "f32")', '(signed "i32")']
    out += [
        f"(power-of-two {float_text(sign * 2.0**k)})" for k in range(-16, 17) for sign in (1, -1)
    ]
    known = {p for r in range(5) for p in itertools.permutations(range(r))}
    known.update(q for p in perms for q in (p, inverse(p)))
    out += [
        f"(set (inverse-perm {integers_text(p)}) {integers_text(inverse(p))})"
        for p in sorted(known)
    ]
    for r in range(7):
        out.append(f"(set (ones {r}) {integers_text((1,) * r)})")
        out.append(f"(set (identity-perm {r}) {integers_text(range(r))})")
        if r >= 2:
            out.append(f"(set (swap-perm {r}) {integers_text((*range(r - 2), r - 1, r - 2))})")
    return out


def rules(declared: Container[str]) -> list[str]:
    """The engine's texts of the analysis of these constructors."""
    known = [f for f in families().values() if not f.variadic and f.name in declared]
    out = [text for family in known for text in _types(family)]
    out += [
        _rule(f"(= root ({op} x {_names(op)})) (= c (uniform x))", "(set (uniform root) c)")
        for op in SAME_NUMBER
        if op in declared
    ]
    out += [
        _rule(f"(= root ({op} x y)) (= a (uniform x)) (= b (uniform y)) (= c {number}) {_NEW}",
              "(set (uniform root) c)")
        for op, number in FOLDS.items()
        if op in declared
    ]  # fmt: skip
    out += [
        _rule(f"(= root ({op} x k)) (= c (uniform k))", f"({relation} root x c)")
        for op, relation in BY_CONSTANT.items()
        if op in declared
    ]
    out += [
        _settle(family)
        for family in known
        if family.kind in _SAME_DTYPE and family.name not in SPELLS
    ]
    out += [
        _attended(family.form(arity))
        for family in families().values()
        if issubclass(family.cls, (Attention, DecodeBase))
        for arity in range(3, 7)
        if family.form(arity).name in declared
    ]
    if "Neg" in declared:
        premises = f"(= root (Neg x)) (= a (uniform x)) (= b a) (= c (neg a)) {_NEW}"
        out.append(_rule(premises, "(set (uniform root) c)"))
    full = "(= root (Full v d s))"
    out += [
        _rule("(= root (Literal v d))", "(set (uniform root) v) (set (shape root) (vec-empty))"),
        _rule(full, "(set (uniform root) v) (set (dtype root) d) (set (shape root) s)"),
        # every constant of one number, dtype and shape is one class
        _rule("(= v (uniform root)) (= d (dtype root)) (= s (shape root))",
              "(union root (Full v d s))"),
        _rule(f"{full} (= 0 (vec-length s))", "(union root (Literal v d))"),
        _rule(f"{full} (= n (vec-length s)) (!= n 0) (= s (ones n))",
              "(union root (Reshape (Literal v d) s))"),
        _rule(f"{full} (= n (vec-length s)) (= o (ones n)) (!= s o)",
              "(union root (Broadcast (Full v d o) s))"),
    ]  # fmt: skip
    return out


def _settle(family: Family) -> str:
    """A value that is known to be one number is not rewritten any more: what computes it stops to
    match.
    """
    term = (
        f"({' '.join([family.name, *(f'x{i}' for i in range(family.least)), _names(family.name)])})"
    )
    return _rule(f"(= root {term}) (= c (uniform root))", f"(subsume {term})")


def _attended(form: Form) -> str:
    """The type of attention's output: rows of q, columns of v."""
    operands = " ".join(f"x{i}" for i in range(form.arity))
    attributes = " ".join(f"a{i}" for i in range(len(form.family.fields)))
    return _rule(
        f"(= root (Get ({form.name} {operands} {attributes}) 0)) (= d (dtype x0)) "
        "(= s (shape x0)) (= t (shape x2)) (= n (vec-length s))",
        "(set (dtype root) d) (set (shape root) (vec-set s (- n 1) (vec-get t (- n 1))))",
    )


def _rule(premises: str, actions: str) -> str:
    return f"(rule ({premises}) ({actions}) :ruleset {THEME})"


def _names(op: str) -> str:
    return " ".join(f"a{i}" for i in range(len(families()[op].fields)))


def _types(family: Family) -> Iterator[str]:
    """Shape and dtype of what an op gives, where they can be derived."""
    operands = [f"x{i}" for i in range(family.least)]
    attributes = [f"a-{name}" for name, _ in family.fields]
    this = f"(= root ({' '.join([family.name, *operands, *attributes])}))"
    if "a-dtype" not in attributes and family.kind not in _SAME_DTYPE:
        return
    if "a-dtype" in attributes:
        yield _rule(this, "(set (dtype root) a-dtype)")
    elif family.template is not None and family.template.result != "same":
        yield _rule(this, f'(set (dtype root) "{family.template.result}")')
    elif family.kind is Kind.ELEMENTWISE and "a-to" in attributes:
        yield _rule(this, "(set (dtype root) a-to)")
    elif operands:
        typed = operands[-1 if family.template is not None else 0]
        yield _rule(f"{this} (= d (dtype {typed}))", "(set (dtype root) d)")
    if "a-shape" in attributes:
        yield _rule(this, "(set (shape root) a-shape)")
    elif operands:
        for premise, shape in _shapes(family):
            yield _rule(f"{this} (= s (shape x0)) {premise}", f"(set (shape root) {shape})")


def _shapes(family: Family) -> Iterator[tuple[str, str]]:
    """(premises, shape) from the shape s of the first operand."""
    match family.kind, family.name:
        case Kind.ELEMENTWISE, _:
            yield "", "s"
        case Kind.REDUCE, _:
            for count in RANKS:
                shape = "s"
                for k in range(count):
                    shape = f"(vec-set {shape} (vec-get a-axes {k}) 1)"
                yield f"(= {count} (vec-length a-axes))", shape
        case Kind.CONTRACT, "Dot":
            yield "(= t (shape x1)) (= n (vec-length s))", "(vec-set s (- n 1) (vec-get t (- n 1)))"
        case Kind.MOVE, "Transpose":
            for rank in RANKS:
                items = " ".join(f"(vec-get s (vec-get a-perm {k}))" for k in range(rank))
                yield f"(= {rank} (vec-length a-perm))", f"(vec-of {items})"
        case Kind.MOVE, "Slice":
            for rank in RANKS:
                yield (
                    f"(= {rank} (vec-length s))",
                    f"(vec-of {' '.join(map(_sliced, range(rank)))})",
                )
        case Kind.MOVE, "Flip":
            yield "", "s"
        case _:
            return


def _sliced(axis: int) -> str:
    """The length of a slice: (stop - start + step - 1) / step."""
    start, stop, step = (f"(vec-get a-{name} {axis})" for name in ("start", "stop", "step"))
    return f"(/ (+ (- {stop} {start}) (- {step} 1)) {step})"
