"""Example calls of kernels with several results, which only rules make."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..ir import Op
from .decode import DECODE
from .fused import EXTRAS, Attention, AttentionBackward, AttentionBias, Get
from .samples import Array, Sample, floats, integers, samples_of

# ---- kernels with several results, which only rules make


def attention_cases() -> Iterator[tuple[dict[str, object], tuple[Array, ...]]]:
    """Attributes and operands of attention: q, k, v and a mask or a bias."""
    plain = {
        "scale": 0.5,
        "causal": False,
        "offset": 0,
        "window": 0,
        "softcap": 0.0,
        "extra": "none",
    }
    for change, (lead, t, s, d, e) in (
        ({}, ((), 3, 5, 4, 4)),
        ({}, ((2,), 1, 7, 3, 5)),
        ({"causal": True}, ((2, 3), 9, 9, 8, 8)),
        ({"causal": True, "offset": 3}, ((2,), 4, 7, 8, 8)),
        ({"causal": True, "window": 3}, ((1,), 11, 11, 4, 4)),
        ({"softcap": 2.0}, ((2,), 5, 6, 4, 4)),
        ({"extra": "mask"}, ((2,), 6, 5, 4, 4)),
        ({"extra": "bias"}, ((2,), 6, 5, 4, 4)),
        ({"extra": "mask", "empty": "nan"}, ((2,), 6, 5, 4, 4)),
        ({"extra": "mask", "empty": "mean", "causal": True}, ((2,), 6, 5, 4, 4)),
        ({"extra": "both", "softcap": 2.0}, ((2,), 6, 5, 4, 4)),
        ({"extra": "bias", "empty": "nan", "window": 3, "causal": True}, ((2, 2), 6, 5, 4, 4)),
    ):
        q, k, v = floats(*lead, t, d), floats(*lead, s, d, seed=1), floats(*lead, s, e, seed=2)
        extra = {"mask": integers(*lead, t, s, dtype="bool"), "bias": floats(*lead, t, s, seed=3)}
        extra["mask"][..., t // 2, :] = False  # a row that sees nothing
        names = EXTRAS[str(change.get("extra", "none"))]
        yield {**plain, **change}, (q, k, v, *(extra[name] for name in names))


@samples_of(Attention, Get)
def _attention() -> Iterator[Sample]:
    for attributes, operands in attention_cases():
        yield Sample(Attention(**attributes), operands, smooth=False)  # type: ignore[arg-type]


def decode_cases() -> Iterator[tuple[dict[str, object], tuple[Array, ...]]]:
    """Attributes and operands of attention of few rows: q, k, v, bounds, and a mask or a bias."""
    plain: dict[str, object] = {"scale": 0.5, "causal": False, "offset": 0, "window": 0}
    plain |= {"softcap": 0.0, "extra": "none", "group": 1, "bounded": True, "empty": "zero"}
    for change, (lead, t, s, d, e) in (
        ({}, ((2,), 1, 9, 4, 4)),
        ({"bounded": False}, ((), 2, 9, 3, 5)),
        ({"group": 3}, ((2, 2), 3, 12, 8, 8)),
        ({"group": 2, "causal": True, "offset": 5}, ((1,), 4, 9, 4, 8)),
        ({"group": 2, "extra": "mask"}, ((2,), 2, 9, 4, 4)),
        ({"extra": "bias", "softcap": 3.0}, ((1,), 2, 9, 4, 4)),
        ({"extra": "both"}, ((2,), 2, 9, 4, 4)),
        ({"empty": "nan"}, ((2,), 3, 9, 4, 4)),
        ({"empty": "mean"}, ((2,), 3, 9, 4, 4)),
    ):
        shape = (*lead, t, 1)
        first = integers(*shape, low=-2, high=4)
        end = first + integers(*shape, low=-1, high=s + 2, seed=1)  # some rows see nothing
        more = {"mask": integers(*lead, t, s, dtype="bool"), "bias": floats(*lead, t, s, seed=3)}
        qkv = floats(*lead, t, d), floats(*lead, s, d, seed=1), floats(*lead, s, e, seed=2)
        extra = [more[name] for name in EXTRAS[str(change.get("extra", "none"))]]
        bounds = [first, end] if change.get("bounded", True) else []
        yield {**plain, **change}, (*qkv, *bounds, *extra)


def _decode(op: type[Op]) -> Callable[[], Iterator[Sample]]:
    def cases() -> Iterator[Sample]:
        for attributes, operands in decode_cases():
            yield Sample(op(**attributes), operands, smooth=False)  # type: ignore[arg-type]

    return cases


for _form in DECODE:
    samples_of(_form)(_decode(_form))


@samples_of(AttentionBackward)
def _attention_backward() -> Iterator[Sample]:
    for attributes, operands in gradient_cases():
        yield Sample(AttentionBackward(**attributes), operands, smooth=False)  # type: ignore[arg-type]


@samples_of(AttentionBias)
def _attention_bias() -> Iterator[Sample]:
    for attributes, operands in gradient_cases():
        lead = operands[0].ndim - 2
        for axes in sorted({(), (0,)[:lead], tuple(range(lead))}):
            yield Sample(AttentionBias(**attributes, axes=axes), operands, smooth=False)  # type: ignore[arg-type]


def gradient_cases() -> Iterator[tuple[dict[str, object], tuple[Array, ...]]]:
    """Attributes and operands of the gradients of attention."""
    for attributes, (q, k, v, *extra) in attention_cases():
        out, stats = Attention(**attributes).evaluate(q, k, v, *extra)  # type: ignore[arg-type]
        ct = floats(*out.shape, seed=4)
        yield attributes, (q, k, v, stats, (ct * out).sum(-1, keepdims=True), ct, *extra)
