"""The key/value cache as a value, and attention of new positions over it.

A step takes a cache and gives the next one; donated, it is written where the old one lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import eggpu as eg
from eggpu import nn
from eggpu.compiler.library.updates import dynamic_slice, dynamic_update_slice
from eggpu.compiler.tracing import Array, array


@dataclass(frozen=True)
class Cache:
    """Keys and values of each layer, (batch, kv heads, context, head size) each."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @property
    def context(self) -> int:
        return self.keys[0].shape[2]

    def layer(self, k: int) -> tuple[Array, Array]:
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

    def held(self, layer: Array) -> Array:
        """What a layer of the cache has for the rows of the new positions."""
        if self.slot is None:
            return layer
        return dynamic_slice(layer, [self.slot, 0, 0, 0], (1, *layer.shape[1:]))


def empty(
    layers: int, batch: int, heads: int, context: int, size: int, dtype: str = "f32"
) -> Cache:
    """A cache without positions."""
    kind = {"f32": np.float32, "f16": np.float16}[dtype]

    def zeros() -> tuple[Array, ...]:
        return tuple(array(np.zeros((batch, heads, context, size), kind)) for _ in range(layers))

    return Cache(zeros(), zeros())


def visible(place: Place, count: int, context: int, window: int = 0) -> Array:
    """bool (batch, 1, count, context): which keys of the cache each new position sees."""
    key = eg.arange(context).reshape((1, 1, 1, context))
    query = place.positions(count).reshape((-1, 1, count, 1))
    return (key <= query) & (key > query - window) if window else key <= query


def attend(
    q: Array, k: Array, v: Array, mask: Array | None, *, scale: float, causal: bool = False,
    window: int = 0, softcap: float = 0.0,
) -> Array:  # fmt: skip
    """Attention of q (b, heads, t, d) over k, v (b, kv heads, s, d), with a mask (b, 1, t, s).

    The query heads that share a key head are rows of one product, so that keys are read once.
    """
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


def written(held: Array, new: Array, place: Place) -> Array:
    """A layer's keys or values with those of new positions (b, kv heads, t, d), a place a row."""
    new, batch = new.astype(held.dtype), new.shape[0]
    if place.slot is not None:
        return dynamic_update_slice(held, new, [place.slot, 0, place.first[0], 0])
    if batch == 1:
        return dynamic_update_slice(held, new, [0, 0, place.first[0], 0])
    zero = eg.zeros((batch,), "i32")
    return dynamic_update_slice(held, new, eg.stack([zero, place.first, zero], 1))


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
