"""The key/value cache as a value, and attention of new positions over it.

A step takes a cache and gives the next one; donated, it is written where the old one lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import eggpu as eg
from eggpu import nn
from eggpu.compiler.errors import ShapeMismatch
from eggpu.compiler.library.updates import dynamic_slice, dynamic_update_slice
from eggpu.compiler.tracing import Array, array


@dataclass(frozen=True)
class Segments:
    """Keys or values of a layer in parts along the positions, where one array would be too large.

    Each part has `slack` rows before and after its own: a window of up to so many positions is
    written into every part, and falls into the slack where it belongs to another.
    """

    parts: tuple[Array, ...]  # (batch, kv heads, slack + length + slack, head size)
    slack: int = field(metadata={"static": True})

    @property
    def length(self) -> int:
        """Positions of a part."""
        return self.parts[0].shape[2] - 2 * self.slack

    @property
    def shape(self) -> tuple[int, ...]:
        """As if it were one array."""
        batch, heads, _, size = self.parts[0].shape
        return (batch, heads, self.length * len(self.parts), size)

    def rows(self) -> list[Array]:
        """The positions of each part, as f32."""
        return [p[:, :, self.slack : self.slack + self.length].astype("f32") for p in self.parts]


Held = Array | Segments


@dataclass(frozen=True)
class Cache:
    """Keys and values of each layer, (batch, kv heads, context, head size) each."""

    keys: tuple[Held, ...]
    values: tuple[Held, ...]

    @property
    def context(self) -> int:
        return self.keys[0].shape[2]

    def layer(self, k: int) -> tuple[Held, Held]:
        return self.keys[k], self.values[k]


@dataclass(frozen=True)
class Place:
    """Where new positions stand: `first[b]` is that of the first of row b, i32 (batch,).

    A row's cache holds `first[b]` positions; what lies after them is never seen. With `slot`, an
    i32 scalar, there is one row of new positions, and it belongs to that row of the cache.
    """

    first: Array
    slot: Array | None = None

    def positions(self, count: int) -> Array:
        """The position of each new token in its row, (batch, count)."""
        return self.first.reshape((-1, 1)) + eg.arange(count).reshape((1, count))

    def held(self, layer: Held) -> Held:
        """What a layer of the cache has for the rows of the new positions."""
        if self.slot is None:
            return layer
        if isinstance(layer, Segments):
            own = (dynamic_slice(p, [self.slot, 0, 0, 0], (1, *p.shape[1:])) for p in layer.parts)
            return Segments(tuple(own), layer.slack)
        return dynamic_slice(layer, [self.slot, 0, 0, 0], (1, *layer.shape[1:]))


def empty(
    layers: int, batch: int, heads: int, context: int, size: int, dtype: str = "f32", *,
    most_bytes: int = 0, slack: int = 1,
) -> Cache:  # fmt: skip
    """A cache without positions. Where a layer's keys would take more than `most_bytes` (0: no
    limit) they come in segments, into which at most `slack` positions are written at once."""
    kind = {"f32": np.float32, "f16": np.float16}[dtype]
    each = batch * heads * size * np.dtype(kind).itemsize  # bytes of a position

    def zeros(positions: int) -> Array:
        return array(np.zeros((batch, heads, positions, size), kind))

    def layer() -> Held:
        if not most_bytes or context * each <= most_bytes:
            return zeros(context)
        length = most_bytes // each - 2 * slack
        if length < 1:
            raise ShapeMismatch(
                f"a cache of {batch} texts needs {(2 * slack + 1) * each} bytes of a binding at "
                f"least, the device binds {most_bytes}"
            )
        parts = -(-context // length)
        length = -(-context // parts)  # as equal as they can be
        return Segments(tuple(zeros(length + 2 * slack) for _ in range(parts)), slack)

    return Cache(*(tuple(layer() for _ in range(layers)) for _ in range(2)))


def visible(place: Place, count: int, context: int, window: int = 0) -> Array:
    """bool (batch, 1, count, context): which keys of the cache each new position sees."""
    key = eg.arange(context).reshape((1, 1, 1, context))
    query = place.positions(count).reshape((-1, 1, count, 1))
    return (key <= query) & (key > query - window) if window else key <= query


def attend(
    q: Array, k: Held, v: Held, mask: Array | None, *, scale: float, causal: bool = False,
    window: int = 0, softcap: float = 0.0,
) -> Array:  # fmt: skip
    """Attention of q (b, heads, t, d) over k, v (b, kv heads, s, d), with a mask (b, 1, t, s).

    The query heads that share a key head are rows of one product, so that keys are read once.
    """
    if isinstance(k, Segments):
        assert isinstance(v, Segments) and mask is not None  # noqa: PT018 - as a cache has them
        return _attend_parts(q, k, v, mask, scale, softcap)
    assert isinstance(v, Array)
    batch, heads, t, d = q.shape
    kv = k.shape[1]
    group = heads // kv
    options = {"scale": scale, "softcap": softcap, "causal": causal, "window": window}
    k, v = k.astype("f32"), v.astype("f32")
    if mask is None or group == 1:
        return nn.scaled_dot_product_attention(q, k, v, mask, **options)
    rows = q.reshape((batch, kv, group * t, d))
    wide = eg.broadcast_to(mask, (batch, group, t, mask.shape[-1]))
    wide = wide.reshape((batch, 1, group * t, mask.shape[-1]))
    out = nn.scaled_dot_product_attention(rows, k, v, wide, **options)
    return out.reshape((batch, heads, t, v.shape[-1]))


def _attend_parts(
    q: Array, k: Segments, v: Segments, mask: Array, scale: float, softcap: float
) -> Array:
    """The same over segments: scores of all parts side by side, then the sum of their values."""
    batch, heads, t, d = q.shape
    kv = k.shape[1]
    group = heads // kv
    rows = q.reshape((batch, kv, group * t, d)) * scale
    scores = eg.concatenate([rows @ part.swapaxes(-1, -2) for part in k.rows()], -1)
    scores = eg.tanh(scores * (1 / softcap)) * softcap if softcap else scores
    wide = eg.broadcast_to(mask, (batch, group, t, mask.shape[-1]))
    wide = wide.reshape((batch, 1, group * t, mask.shape[-1]))
    share = nn.softmax(eg.where(wide, scores, -np.inf), -1)
    cut = range(0, scores.shape[-1], k.length)
    first, *others = (
        share[..., i : i + k.length] @ part for i, part in zip(cut, v.rows(), strict=True)
    )
    out = sum(others, first)
    return out.reshape((batch, heads, t, v.shape[-1]))


def written(held: Held, new: Array, place: Place) -> Held:
    """A layer's keys or values with those of new positions (b, kv heads, t, d), a place a row."""
    if isinstance(held, Segments):
        if new.shape[2] > held.slack:
            raise ShapeMismatch(f"at most {held.slack} positions at once, got {new.shape[2]}")
        starts = [place.first - k * held.length for k in range(len(held.parts))]
        starts = [eg.clip(s, -held.slack, held.length) + held.slack for s in starts]
        given = zip(held.parts, starts, strict=True)
        return Segments(tuple(_window(p, new, place, s) for p, s in given), held.slack)
    return _window(held, new, place, place.first)


def _window(held: Array, new: Array, place: Place, first: Array) -> Array:
    """An array with new positions from `first[b]` on in row b."""
    new, batch = new.astype(held.dtype), new.shape[0]
    if place.slot is not None:
        return dynamic_update_slice(held, new, [place.slot, 0, first[0], 0])
    if batch == 1:
        return dynamic_update_slice(held, new, [0, 0, first[0], 0])
    zero = eg.zeros((batch,), "i32")
    return dynamic_update_slice(held, new, eg.stack([zero, first, zero], 1))


def chunks(count: int, room: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """How `count` new positions go through plans of these sizes: (size, positions) each.

    The last chunk may be part full: what it writes after its positions is written over before it is
    seen, so it must only fit the room that the cache has.
    """
    out = []
    while count:
        size, done = chunk(count, room, sizes)
        out.append((size, done))
        count, room = count - done, room - done
    return out


def chunk(count: int, room: int, sizes: Sequence[int]) -> tuple[int, int]:
    """The first of those."""
    larger = [s for s in sizes if count <= s <= room]
    size = min(larger) if larger else max(s for s in sizes if s <= min(count, room))
    return size, min(size, count)
