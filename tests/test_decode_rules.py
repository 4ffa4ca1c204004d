"""Attention of few rows over a cache is found however it is written, with its bounds and groups."""

import math
import sys
from pathlib import Path

import pytest

import eggpu as eg
from eggpu.compiler.egraph import saturate_graph
from eggpu.compiler.library.attention import scaled_dot_product_attention as A
from eggpu.compiler.library.einsum import einsum
from eggpu.compiler.library.softmax import softmax
from eggpu.compiler.ops.decode import DecodeBase
from eggpu.compiler.tracing import trace
from eggpu.compiler.types import parse_type
from eggpu.models.cache import Place, attend, visible, written

sys.path.insert(0, str(Path(__file__).parent))
from equal_classes import unequal

KEYS = 7


def T(x):
    return x.swapaxes(-1, -2)


def keys():
    return eg.arange(KEYS)


def over(s, v):
    return softmax(s, -1) @ v


def hidden(q, k, v, mask, fill=-math.inf):
    return over(eg.where(mask, q @ T(k) * 0.5, fill), v)


def each(n):
    return n.reshape((2, 1, 1, 1))


def spelled_out(q, k, v, n):
    s = eg.where(keys() < n, q @ T(k), -1e30)
    e = eg.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def by_einsum(q, k, v, n):
    s = einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(3)
    p = softmax(eg.where(keys() < n, s, -math.inf), -1)
    return einsum("bhqk,bhkd->bhqd", p, v)


def split_heads(x, k, v, n):
    """Heads of a projection, split by reshape and transpose, joined again."""
    q = x.reshape((2, 1, 2, 3)).transpose((0, 2, 1, 3))
    out = hidden(q, k, v, keys() < n)
    return out.transpose((0, 2, 1, 3)).reshape((2, 1, 6))


def repeated(q, k, v, n):
    def wide(x):
        return eg.broadcast_to(x[:, :, None], (2, 2, 3, KEYS, 3)).reshape((2, 6, KEYS, 3))

    return hidden(q, wide(k), wide(v), keys() < n)


def halves(q, k, v, n):
    return A(q, k.astype("f32"), v.astype("f32"), keys() < n)


def with_cache(q, k, v, new, n):
    place = Place(n)
    k, v = written(k, new, place), written(v, new, place)
    return attend(q, k, v, visible(place, 1, KEYS, 3), scale=0.5)


def two_dimensions(q, k, v, n):
    return over(eg.where(keys() < n, q @ T(k), -math.inf), v)


QKV = ["f32[2, 2, 1, 3]", *["f32[2, 2, 7, 3]"] * 2]
ONE, EACH = [*QKV, "i32[]"], [*QKV, "i32[2]"]
SIX = ["f32[2, 6, 1, 3]", *QKV[1:], "i32[]"]
ROW = ["f32[2, 1, 6]", *QKV[1:], "i32[]"]
F16 = ["f32[2, 2, 1, 3]", *["f16[2, 2, 7, 3]"] * 2, "i32[]"]
CACHE = ["f32[2, 6, 1, 3]", *QKV[1:], "f32[2, 2, 1, 3]", "i32[2]"]
MASK, BIAS = [*ONE, "bool[2, 1, 1, 7]"], [*ONE, "f32[2, 2, 1, 7]"]

# name: function, types of its arguments, what a row without keys gives
SPELLINGS = {
    "library": (lambda q, k, v, n: A(q, k, v, keys() < n), ONE, "zero"),
    "infinite": (lambda q, k, v, n: hidden(q, k, v, keys() < n), ONE, "nan"),
    "huge": (lambda q, k, v, n: hidden(q, k, v, keys() < n, -1e9), ONE, "mean"),
    "lowest": (lambda q, k, v, n: hidden(q, k, v, keys() < n, -3e38), ONE, "mean"),
    "added": (
        lambda q, k, v, n: over(q @ T(k) + eg.where(keys() < n, 0.0, -math.inf), v), ONE, "nan"),
    "added, huge": (
        lambda q, k, v, n: over(q @ T(k) + eg.where(keys() < n, 0.0, -1e30), v), ONE, "mean"),
    "position": (lambda q, k, v, n: hidden(q, k, v, keys() <= n), ONE, "nan"),
    "reversed": (lambda q, k, v, n: hidden(q, k, v, n > keys()), ONE, "nan"),
    "position, reversed": (lambda q, k, v, n: A(q, k, v, n >= keys()), ONE, "zero"),
    "future": (
        lambda q, k, v, n: over(eg.where(keys() >= n, -math.inf, q @ T(k)), v), ONE, "nan"),
    "not": (lambda q, k, v, n: hidden(q, k, v, ~(keys() >= n)), ONE, "nan"),
    "shifted": (lambda q, k, v, n: A(q, k, v, keys() + 2 < n), ONE, "zero"),
    "a length a row": (lambda q, k, v, n: A(q, k, v, keys() < each(n)), EACH, "zero"),
    "a length a row, infinite": (lambda q, k, v, n: hidden(q, k, v, keys() < each(n)), EACH, "nan"),
    "from": (lambda q, k, v, n: A(q, k, v, keys() >= n), ONE, "zero"),
    "window": (lambda q, k, v, n: A(q, k, v, (keys() <= n) & (keys() > n - 3)), ONE, "zero"),
    "window, infinite": (
        lambda q, k, v, n: hidden(q, k, v, (keys() <= each(n)) & (keys() > each(n) - 3)), EACH,
        "nan"),
    "scaled query": (lambda q, k, v, n: hidden(q * 0.3, k, v, keys() < n), ONE, "nan"),
    "scaled key": (lambda q, k, v, n: hidden(q, k * 0.3, v, keys() < n), ONE, "nan"),
    "softcap": (
        lambda q, k, v, n: A(q, k, v, keys() < n, softcap=3.0), ONE, "zero"),
    "spelled out": (spelled_out, ONE, "mean"),
    "einsum": (by_einsum, ONE, "nan"),
    "split heads": (split_heads, ROW, "nan"),
    "two dimensions": (two_dimensions, ["f32[1, 3]", *["f32[7, 3]"] * 2, "i32[]"], "nan"),
    "half precision": (halves, F16, "zero"),
    "repeated heads": (repeated, SIX, "nan"),
    "grouped heads": (lambda q, k, v, n: A(q, k, v, keys() < n), SIX, "zero"),
    "repeat": (
        lambda q, k, v, n: hidden(q, eg.repeat(k, 3, 1), eg.repeat(v, 3, 1), keys() < n), SIX,
        "nan"),
    "models": (with_cache, CACHE, "zero"),
    "and a mask": (lambda q, k, v, n, m: A(q, k, v, (keys() < n) & m), MASK, "zero"),
    "and a mask, infinite": (lambda q, k, v, n, m: hidden(q, k, v, m & (keys() < n)), MASK, "nan"),
    "and a bias": (
        lambda q, k, v, n, b: over(eg.where(keys() < n, q @ T(k) + b, -math.inf), v), BIAS, "nan"),
}  # fmt: skip


def decode_ops(snapshot):
    return [op for op in snapshot.ops if isinstance(op, DecodeBase)]


@pytest.mark.parametrize("name", SPELLINGS)
def test_bounds_of_the_keys_are_found_however_they_are_written(name):
    function, types, empty = SPELLINGS[name]
    found, snapshot, report = unequal(trace(function, *map(parse_type, types)))
    assert found == []
    assert report.stop == "saturated"
    assert report.recognized["attention"] == (1, 1)
    bounded = [op for op in decode_ops(snapshot) if op.bounded]
    assert {op.name for op in bounded} == {
        "attention_online", "attention_phases", "attention_split",
    }  # fmt: skip
    assert {op.empty for op in bounded} == {empty}
    assert report.near_misses == []


@pytest.mark.parametrize("name", ["repeated heads", "grouped heads", "repeat"])
def test_repeated_heads_become_rows(name):
    function, types, _ = SPELLINGS[name]
    _, snapshot, _ = unequal(trace(function, *map(parse_type, types)))
    rows = zip(snapshot.ops, snapshot.kids, strict=True)
    shapes = {snapshot.types[kids[1]].shape for op, kids in rows if isinstance(op, DecodeBase)}
    assert (2, 2, KEYS, 3) in shapes


def test_causal_rows_of_grouped_heads_keep_their_places():
    types = map(parse_type, ["f32[2, 6, 2, 3]", *QKV[1:]])
    graph = trace(lambda q, k, v: A(q, k, v, causal="bottom-right"), *types)
    found, snapshot, _ = unequal(graph)
    assert found == []
    assert {op.group for op in decode_ops(snapshot)} == {1, 3}


NO_BOUNDS = {
    "along the queries": lambda q, k, v, n: A(q, k, v, eg.arange(3)[:, None] < n),
    "a float": lambda q, k, v, n: A(q, k, v, keys().astype("f32") < n.astype("f32")),
    "of each key": lambda q, k, v, n: A(q, k, v, keys() < keys()[::-1] * n),
    "twice": lambda q, k, v, n: A(q, k, v, keys() * 2 < n),
    "either": lambda q, k, v, n: A(q, k, v, (keys() < n) | (keys() > n + 2)),
    "equal": lambda q, k, v, n: A(q, k, v, keys() != n),
    "backwards": lambda q, k, v, n: A(q, k, v, keys()[::-1] < n),
}


@pytest.mark.parametrize("name", NO_BOUNDS)
def test_other_masks_are_no_bounds(name):
    types = ["f32[2, 2, 3, 3]", *QKV[1:], "i32[]"]
    found, snapshot, _ = unequal(trace(NO_BOUNDS[name], *map(parse_type, types)))
    assert found == []
    assert decode_ops(snapshot)
    assert not any(op.bounded for op in decode_ops(snapshot))


def test_many_rows_have_no_kernel_for_few():
    types = ["f32[2, 2, 17, 3]", *QKV[1:], "i32[]"]
    _, snapshot, _ = unequal(
        trace(lambda q, k, v, n: A(q, k, v, keys() < n), *map(parse_type, types))
    )
    assert not decode_ops(snapshot)


def test_the_kernel_with_phases_ends_at_65536_keys():
    for count, expected in ((65_536, True), (65_537, False)):
        graph = trace(
            lambda q, k, v: A(q, k, v),
            *map(parse_type, ["f32[1, 2]", f"f32[{count}, 2]", f"f32[{count}, 2]"]),
        )
        snapshot, _ = saturate_graph(graph)
        names = {op.name for op in decode_ops(snapshot)}
        assert ("attention_phases" in names) == expected
        assert "attention_split" in names
