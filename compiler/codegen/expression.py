"""Spells WGSL expressions: an elementwise op, a sum of index terms, an element in memory."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..ir import Node
from ..ops.elementwise import Cast, Elementwise
from ..schedule.images import FLAT
from ..types import DTYPES
from .wgsl import cast, suffix, wgsl_type


def scalar_access(k: int, at: str) -> str:
    """One element of binding k, spelled once it is known whether the binding holds scalars or
    vec4."""
    return f"«{k}|{at}»"


def quad_access(k: int, width: int, at: str, row: str = "") -> str:
    """Four elements of binding k, which is a buffer or an image with `width` vec4s in a row: vec4
    number `at`, or with `row` the one at column `at` of that row."""
    return f"‹{k}|{width}|{at}|{row}›"


def loaded(text: str, dtype: str, vector: bool) -> str:
    """What memory holds, as registers hold it."""
    match dtype:
        case "bool":
            return f"{text} != vec4<u32>(0u)" if vector else f"{text} != 0u"
        case "f16":
            return f"vec4<f32>({text})" if vector else f"f32({text})"
        case _:
            return text


def sum_text(terms: list[tuple[str, int]], constant: int, vector: bool = False) -> str:
    """terms and a constant added up, positive ones first."""

    def product(text: str, c: int) -> str:
        by = f"vec4<u32>({c}u)" if vector else f"{c}u"
        return text if c == 1 else f"{text} * {by}"

    up = [product(t, c) for t, c in terms if c > 0] + ([f"{constant}u"] if constant > 0 else [])
    down = [product(t, -c) for t, c in terms if c < 0] + ([f"{-constant}u"] if constant < 0 else [])
    zero = "vec4<u32>(0u)" if vector else "0u"
    text = " + ".join(up) if up else zero
    return " - ".join([text, *down])


def expression(node: Node, texts: list[str], vector: bool) -> str:
    op, last = node.op, node.operands[-1].dtype
    if isinstance(op, Cast):
        return cast(texts[0], last, DTYPES[op.to], vector)
    assert isinstance(op, Elementwise)
    template = op.wgsl if isinstance(op.wgsl, str) else op.wgsl[last.kind]
    if last.kind == "f":
        template, texts = _hidden(node, template, texts, "4" if vector else "")
    return template.format(
        *texts, T=wgsl_type(last, vector), v="4" if vector else "", s=suffix(last, vector)
    )


_ZERO = r"(vec4<f32>\()?(0\.0|eg_bits\(0x80000000u\))\)?"
_BY_BITS = {  # of an operator and the place of the operand that is zero
    ("{0} * {1}", 0): "eg_mul_zero{v}({0})",
    ("{0} * {1}", 1): "eg_mul_zero{v}({0})",
    ("{0} / {1}", 0): "eg_zero_div{v}({0})",
    ("{0} / {1}", 1): "eg_div_zero{v}({0})",
}
_SUMS = ("{0} + {1}", "{0} - {1}")


def _hidden(node: Node, template: str, texts: list[str], v: str) -> tuple[str, list[str]]:
    """The template and the operands in a form that the driver does not simplify: x * 0, 0 / x,
    x - x, (x + y) - x and sqrt(x) * sqrt(x) are not what they are for numbers when infinities and
    NaN count."""
    zeros = [re.fullmatch(_ZERO, t) is not None for t in texts]
    if sum(zeros) == 1 and (template, zeros.index(True)) in _BY_BITS:
        x, zero = texts[zeros[0]], texts[zeros[1]]
        sign = "-" if "eg_bits" in zero else ""
        return sign + _BY_BITS[template, zeros.index(True)], [x]
    same = [f"eg_same{v}({t})" for t in texts]
    if template == "{0} * {1}" and texts[0] == texts[1] and _wgsl(node.operands[0]) == "sqrt({0})":
        return template, [texts[0], same[1]]
    if template in _SUMS:
        a, b = node.operands
        if template == "{0} - {1}" and texts[0] == texts[1]:
            return "eg_sub_self{v}({0})", texts
        if _holds(a, b):
            return template, [texts[0], same[1]]
        if _holds(b, a):
            return template, [same[0], texts[1]]
    return template, texts


def _holds(sum_: Node, x: Node) -> bool:
    """Whether a sum or difference has x as one of its two terms."""
    x = _plain(x)
    return _wgsl(sum_) in _SUMS and any(_plain(o) is x for o in sum_.operands)


def _plain(x: Node) -> Node:
    """x without its sign."""
    while _wgsl(x) == "-{0}":
        x = x.operands[0]
    return x


def _wgsl(node: Node) -> str:
    """The template of an elementwise op on floats."""
    template = node.op.wgsl if isinstance(node.op, Elementwise) else ""
    return template if isinstance(template, str) else template.get("f", "")


def spell(text: str, elements: Sequence[str]) -> str:
    """`text` with its accesses spelled for bindings of these element types."""

    def one(match: re.Match[str]) -> str:
        k, at = int(match[1]), match[2]
        if elements[k] in ("image1", "image1u"):
            return _words(_texel(k, at), elements[k], "u32")
        if not elements[k].startswith("vec4"):
            return f"${k}[{at}]"
        if re.fullmatch(r"\d+u", at):
            return f"${k}[{int(at[:-1]) // 4}u][{int(at[:-1]) % 4}u]"
        return f"${k}[{at} >> 2u][{at} & 3u]"

    def four(match: re.Match[str]) -> str:
        k, width, at, row = int(match[1]), *match.groups()[1:]
        if elements[k] in ("image4", "image4u"):
            width = FLAT if elements[k] == "image4u" else width
            column, row = (at, row) if row else (f"{at} % {width}u", f"{at} / {width}u")
            quad = f"textureLoad(${k}, vec2<u32>({column}, {row}))"
            return _words(quad, elements[k], "vec4<u32>")
        at = f"{row} * {width}u + {at}" if row else at
        if elements[k] not in ("image1", "image1u"):
            return f"${k}[{at}]"
        quad = f"vec4<f32>({', '.join(_texel(k, f'({at}) * 4u + {c}u') for c in range(4))})"
        return _words(quad, elements[k], "vec4<u32>")

    text = re.sub(r"‹(\d+)\|(\d+)\|([^|›]*)\|([^›]*)›", four, text)
    return re.sub(r"«(\d+)\|([^»]*)»", one, text)


def _words(texels: str, element: str, kind: str) -> str:
    """What an image holds: the bits of words lie in texels of floats."""
    return f"bitcast<{kind}>({texels})" if element.endswith("u") else texels


def _texel(k: int, at: str) -> str:
    """Element number `at` of an image of single elements."""
    last, shift = FLAT - 1, FLAT.bit_length() - 1
    return f"textureLoad(${k}, vec2<u32>(({at}) & {last}u, ({at}) >> {shift}u)).x"
