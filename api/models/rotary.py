"""Rotary positions (Su et al., 2021) with the scalings that model configs name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import eggpu as eg
from eggpu.compiler.tracing import Array, array
from eggpu.importers.tensors import ModelFileError

MOST_ROTARY = 1 << 16  # elements of a head


@dataclass(frozen=True)
class Rotary:
    """Pair i of a head turns by position * rates[i]; elements after the pairs stay.

    Pairs are (i, i + n / 2) of the first n elements, or (2 i, 2 i + 1) when interleaved.
    """

    rates: tuple[float, ...] = field(metadata={"static": True})
    factor: float = 1.0  # of cosine and sine
    interleaved: bool = False

    def angles(self, positions: Array) -> tuple[Array, Array]:
        """Cosine and sine (..., t, pairs) of positions (..., t)."""
        rates = array(np.asarray(self.rates, np.float32))
        angle = positions.astype("f32").reshape((*positions.shape, 1)) * rates
        c, s = eg.cos(angle), eg.sin(angle)
        return (c, s) if self.factor == 1.0 else (c * self.factor, s * self.factor)

    def turn(self, x: Array, angles: tuple[Array, Array]) -> Array:
        """Rows of heads x (..., t, d) turned by the angles of their positions."""
        c, s = angles
        pairs = len(self.rates)
        turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        if self.interleaved:
            both = turned.reshape((*x.shape[:-1], pairs, 2))
            a, b = both[..., 0], both[..., 1]
            out = eg.stack([a * c - b * s, b * c + a * s], -1).reshape(turned.shape)
        else:
            a, b = turned[..., :pairs], turned[..., pairs:]
            out = eg.concatenate([a * c - b * s, b * c + a * s], -1)
        return out if rest.shape[-1] == 0 else eg.concatenate([out, rest], -1)


def rotary(
    size: int, base: float, scaling: Mapping[str, Any] | None = None, *,
    used: int = 0, most: int = 0, original: int = 0, interleaved: bool = False,
) -> Rotary:  # fmt: skip
    """The rates of `size` elements of a head, under the scaling of a config (`rope_scaling`), for
    `used` positions of at most `most` in a model that was first trained on `original`."""
    if not 2 <= size <= MOST_ROTARY or size % 2 or not 0 < base < math.inf:
        raise ModelFileError(
            f"rotary positions need an even size from 2 to {MOST_ROTARY} and a base above 0, got "
            f"{size} and {base}"
        )
    rates = [base ** (-2 * i / size) for i in range(size // 2)]
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    match kind:
        case "default" | None:
            return Rotary(tuple(rates), 1.0, interleaved)
        case "linear":
            by = float(scaling["factor"])
            return Rotary(tuple(r / by for r in rates), 1.0, interleaved)
        case "llama3":
            return Rotary(tuple(_llama3(r, scaling) for r in rates), 1.0, interleaved)
        case "longrope":
            long = (used or most) > original
            return _longrope(rates, scaling, long, most / max(original, 1), interleaved)
        case "yarn":
            return _yarn(rates, scaling, base, size, original, interleaved)
        case _:
            raise ModelFileError(f"rope_scaling of type {kind!r} is not known")


def _llama3(rate: float, scaling: Mapping[str, Any]) -> float:
    factor, low, high = (
        float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor")
    )
    turns = float(scaling["original_max_position_embeddings"]) * rate / (2 * math.pi)
    smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
    return (1 - smooth) * rate / factor + smooth * rate


def _longrope(
    rates: list[float], scaling: Mapping[str, Any], long: bool, stretch: float, interleaved: bool
) -> Rotary:
    by = scaling["long_factor" if long else "short_factor"]
    if len(by) != len(rates):
        raise ModelFileError(f"rope_scaling needs {len(rates)} factors, got {len(by)}")
    factor = scaling.get("attention_factor")
    if factor is None:
        stretch = float(scaling.get("factor") or stretch)
        first = float(scaling["original_max_position_embeddings"])
        factor = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(first))
    return Rotary(tuple(r / float(f) for r, f in zip(rates, by)), float(factor), interleaved)


def _yarn(
    rates: list[float], scaling: Mapping[str, Any], base: float, size: int, original: int,
    interleaved: bool,
) -> Rotary:  # fmt: skip
    factor = float(scaling["factor"])
    length = float(scaling.get("original_max_position_embeddings") or original)

    def place(turns: float) -> float:
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(place(float(scaling.get("beta_fast") or 32))), 0)
    high = min(math.ceil(place(float(scaling.get("beta_slow") or 1))), size - 1)
    span = max(high - low, 0.001)
    out = []
    for i, rate in enumerate(rates):
        slow = min(max((i - low) / span, 0.0), 1.0)
        out.append(rate / factor * slow + rate * (1 - slow))
    scale = scaling.get("attention_factor")
    return Rotary(tuple(out), float(scale or 0.1 * math.log(factor) + 1), interleaved)
