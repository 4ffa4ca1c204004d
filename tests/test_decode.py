"""Decoding over a cache: every kernel forced, one plan for all lengths, and why one was taken."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.compiler.egraph import saturate_graph
from eggpu.compiler.egraph.extract import extract
from eggpu.compiler.egraph.keep import forced_to
from eggpu.compiler.ops.decode import DecodeBase
from eggpu.compiler.rule import RuleError
from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE
from eggpu.compiler.tracing import array, trace
from eggpu.compiler.types import parse_type
from eggpu.models.cache import Cache, Place, Segments, attend, visible, written

sys.path.insert(0, str(Path(__file__).parent))
from model_files import tiny_llama

KERNELS = ("attention_online", "attention_phases", "attention_split")
GPU = replace(FLOOR, name="a GPU", subgroup=32, max_bindings=16, features=("subgroup",))


def step(q, k, v, new, n):
    """One token of a layer: its keys and values into the cache, attention over what is valid."""
    place = Place(n)
    k, v = written(k, new, place), written(v, new * 0.5, place)
    return attend(q, k, v, visible(place, 1, k.shape[2]), scale=0.3), k, v


def oracle(q, k, v, new, n):
    """`step`'s attention in float64, row by row."""
    group = q.shape[1] // k.shape[1]
    out = np.zeros(q.shape)
    for b, h in np.ndindex(*q.shape[:2]):
        keys, values = (x[b, h // group].astype(np.float64) for x in (k, v))
        keys[n[b]], values[n[b]] = new[b, h // group, 0], new[b, h // group, 0] * 0.5
        s = 0.3 * keys[: n[b] + 1] @ q[b, h, 0].astype(np.float64)
        p = np.exp(s - s.max())
        out[b, h, 0] = p / p.sum() @ values[: n[b] + 1]
    return out


@pytest.mark.parametrize("kernel", [*KERNELS, "attention"])
def test_every_kernel_that_is_forced_gives_the_same_at_all_lengths(kernel):
    rng = np.random.default_rng(0)
    shapes = ((2, 6, 1, 16), (2, 2, 80, 16), (2, 2, 80, 16), (2, 2, 1, 16))
    q, k, v, new = (rng.standard_normal(s, np.float32) for s in shapes)
    run = eg.compile(step, force=(kernel,), cache=False)
    for n in ([0, 0], [0, 62], [63, 64], [79, 7]):
        place = np.array(n, np.int32)
        out, *_ = run(q, k, v, new, place)
        np.testing.assert_allclose(np.asarray(out), oracle(q, k, v, new, place), atol=3e-6)
    assert len(run.recompilations) == 0
    assert any(x.name.startswith(kernel) for x in run.plan.kernels)


def parts_of(x, count, slack=1):
    """An array of positions as segments of a cache."""
    room = ((0, 0), (0, 0), (slack, slack), (0, 0))
    return Segments(tuple(array(np.pad(p, room)) for p in np.split(x, count, 2)), slack)


@pytest.mark.parametrize("kernel", [None, *KERNELS, "dot"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_cache_in_segments_has_the_same_kernels(kernel, dtype):
    """Attention over segments that no array holds as one reads each of them where it lies."""
    if dtype is np.float16 and "shader-f16" not in eg.device().target.features:
        pytest.skip("the device has no f16")
    rng = np.random.default_rng(0)
    shapes = ((2, 6, 1, 16), (2, 2, 84, 16), (2, 2, 84, 16), (2, 2, 1, 16))
    q, k, v, new = (rng.standard_normal(s, np.float32) for s in shapes)
    k, v, new = (x.astype(dtype).astype(np.float32) for x in (k, v, new))
    options = {"without": ("products-side-by-side",)} if kernel == "dot" else {}
    options |= {"force": (kernel,)} if kernel in KERNELS else {}
    run = eg.compile(step, cache=False, **options)
    for n in ([0, 0], [0, 27], [28, 29], [55, 56], [83, 7]):
        place = np.array(n, np.int32)
        out, after, _ = run(
            q, parts_of(k.astype(dtype), 3), parts_of(v.astype(dtype), 3), new, place
        )
        np.testing.assert_allclose(np.asarray(out), oracle(q, k, v, new, place), atol=2e-5)
    assert len(after.parts) == 3
    assert len(run.recompilations) == 0
    names = [x.name for x in run.plan.kernels if "attention" in x.name]
    assert bool(names) == (kernel != "dot")
    assert all(name.startswith(kernel or "attention_") for name in names)
    whole = 2 * 2 * 84 * 16 * np.dtype(dtype).itemsize
    assert all(b.nbytes < whole for b in run.plan.buffers)


@pytest.mark.parametrize(("bindings", "parts", "fused"), [(8, 2, True), (8, 3, False)])
def test_segments_that_a_kernel_cannot_bind_are_attended_apart(bindings, parts, fused):
    target = replace(LLVMPIPE, max_bindings=bindings, max_binding_bytes=40 << 20)
    part = f"f32[1, 3, {40_000 + 2}, 64]"
    types = ["f32[1, 9, 1, 64]", "f32[1, 3, 1, 64]", "i32[1]", *[part] * (2 * parts)]

    def apart(q, new, n, *held):
        k, v = Segments(held[:parts], 1), Segments(held[parts:], 1)
        out, k, v = step(q, k, v, new, n)
        return out, *k.parts, *v.parts

    graph = trace(apart, *map(parse_type, types))
    selection, _ = extract(saturate_graph(graph)[0], target, graph)
    found = [n.op.name for n in selection.graph.nodes() if isinstance(n.op, DecodeBase)]
    assert bool(found) == fused
    assert all(o.type.nbytes <= 40 << 20 for g in selection.groups for o in g.outputs)


def test_a_kernel_that_does_not_exist_cannot_be_forced():
    with pytest.raises(RuleError, match="force names 'attention_fast', which is none of attention"):
        eg.compile(step, force=("attention_fast",)).compile(
            *(np.zeros(s, np.float32) for s in ((1, 1, 1, 4), *((1, 1, 5, 4),) * 2, (1, 1, 1, 4))),
            np.zeros(1, np.int32),
        )


def decided(context, target, force=()):
    """(the kernel of attention, its choice) of a step of SmolLM2's heads over a context."""
    types = ["f32[1, 9, 1, 64]", *[f"f32[1, 3, {context}, 64]"] * 2, "f32[1, 3, 1, 64]", "i32[1]"]
    graph = trace(step, *map(parse_type, types))
    snapshot, _ = saturate_graph(graph)
    selection, report = extract(forced_to(snapshot, force), target, graph)
    names = {n.op.name for n in selection.graph.nodes() if isinstance(n.op, DecodeBase)}
    choice = next((c for c in report.choices if "attention" in c.chosen), None)
    return names, choice


@pytest.mark.parametrize("target", [LLVMPIPE, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("context", "kernel"),
    [(128, "attention_online"), (2048, "attention_split"), (32_768, "attention_split")],
)
def test_the_report_says_why_a_kernel_was_taken(target, context, kernel):
    names, choice = decided(context, target)
    assert names == {kernel}
    assert choice.chosen.startswith(kernel)
    losses = {o.text.partition("(")[0]: o.loss for o in choice.others}
    assert losses.keys() >= {"attention", "dot", *KERNELS} - {kernel}
    assert all(loss is not None and loss > 0 for loss in losses.values())


@pytest.mark.parametrize("keys", [128, 2048, 32_768])
def test_explain_tells_the_kernel_of_grouped_heads_and_why(keys):
    """As a user types it: every kernel has the choice, and no near miss is told of what was
    formed behind a reshape."""

    def over_cache(q, k, v, count):
        return nn.scaled_dot_product_attention(q, k, v, eg.arange(keys) < count)

    rng = np.random.default_rng(0)
    shapes = ((1, 9, 1, 64), (1, 3, keys, 64), (1, 3, keys, 64))
    given = [*(rng.standard_normal(s, np.float32) for s in shapes), keys - 5]
    run = eg.compile(over_cache, cache=False)
    out = np.asarray(run(*given))
    text = str(run.report.kernels[-1])
    assert all(k.choices == run.report.kernels[-1].choices for k in run.report.kernels)
    chosen, view = [line for line in text.splitlines() if line.startswith("  chosen ")]
    assert " reshape(get) " in view  # of heads that share keys: those of the query, apart
    assert "    not      dot(" in text.partition(view)[2]
    taken = next(name for name in KERNELS if name in chosen)
    assert taken == ("attention_online" if keys == 128 else "attention_split")
    assert all(f"    not      {name}(" in text for name in {"attention", *KERNELS} - {taken})
    assert text.count("us more (") >= 4
    assert text in run.explain(*given)
    assert run.report.near_misses == ()
    for kernel in KERNELS:
        forced = np.asarray(eg.compile(over_cache, cache=False, force=(kernel,))(*given))
        np.testing.assert_allclose(forced, out, atol=1e-6)


def test_few_keys_a_head_are_not_split_where_heads_are_many():
    types = ["f32[64, 8, 1, 64]", *["f32[64, 8, 256, 64]"] * 2, "i32[]"]
    graph = trace(
        lambda q, k, v, n: nn.scaled_dot_product_attention(q, k, v, eg.arange(256) < n),
        *map(parse_type, types),
    )
    snapshot, _ = saturate_graph(graph)
    selection, _ = extract(snapshot, GPU, graph, explain=0)
    names = {n.op.name for n in selection.graph.nodes() if isinstance(n.op, DecodeBase)}
    assert names == {"attention_online"}


def test_heads_that_are_too_large_for_one_kernel_leave_the_others():
    graph = trace(
        lambda q, k, v: nn.scaled_dot_product_attention(q, k, v),
        *map(parse_type, ["f32[1, 2, 8, 2048]", *["f32[1, 2, 300, 2048]"] * 2]),
    )
    snapshot, _ = saturate_graph(graph)
    _, report = extract(snapshot, LLVMPIPE, graph)
    others = {o.text.partition("(")[0]: o for c in report.choices for o in c.others}
    found = others["attention_online"]
    assert found.loss is None
    assert found.why == "no kernel of llvmpipe fits its shape"


@pytest.mark.parametrize("kernel", [None, *KERNELS])
def test_a_model_decodes_with_it_in_every_layer(kernel):
    model = tiny_llama()
    cache = [np.zeros((1, 2, 24, 8), np.float32) for _ in range(4)]

    def token(tokens, position, *held):
        hidden, new = model.step(tokens, Cache(held[:2], held[2:]), Place(position))
        return model.logits(hidden), new.keys, new.values

    types = ["i32[1, 1]", "i32[1]", *["f32" + str(list(c.shape)) for c in cache]]
    graph = trace(token, *map(parse_type, types))
    snapshot, report = saturate_graph(graph)
    assert report.recognized["attention"] == (2, 2)
    selection, _ = extract(forced_to(snapshot, (kernel,) if kernel else ()), LLVMPIPE, graph)
    ops = [n.op for n in selection.graph.nodes() if isinstance(n.op, DecodeBase)]
    assert len(ops) == 2
    assert all(op.bounded and kernel in (None, op.name) for op in ops)


def test_probabilities_that_are_used_elsewhere_are_priced():
    def both(q, k, v):
        p = nn.softmax(q @ k.swapaxes(-1, -2) * 0.5, -1)
        return p @ v, p.sum(-2)

    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(s, np.float32) for s in ((2, 3, 8), (2, 20, 8), (2, 20, 8)))
    compiled = eg.compile(both, cache=False)
    out, sums = compiled(q, k, v)
    s = 0.5 * q.astype(np.float64) @ k.swapaxes(-1, -2)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(out), p @ v, atol=2e-6)
    np.testing.assert_allclose(np.asarray(sums), p.sum(-2), atol=2e-6)
    (miss,) = compiled.report.near_misses
    assert "the probabilities are also used by sum" in miss.why
    assert "it would cost" in miss.why
    forced = eg.compile(both, cache=False, force=("attention_online",))
    out, sums = forced(q, k, v)
    np.testing.assert_allclose(np.asarray(out), p @ v, atol=2e-6)
    np.testing.assert_allclose(np.asarray(sums), p.sum(-2), atol=2e-6)
    costs = [sum(x.predicted_ns for x in c.plan.kernels) for c in (compiled, forced)]
    assert costs[0] < costs[1]


def test_scores_that_are_used_elsewhere_are_right_in_every_program():
    def both(q, k, v):
        s = q @ k.swapaxes(-1, -2) * 0.5
        return nn.softmax(s, -1) @ v, s.max(-1)

    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal(s, np.float32) for s in ((2, 3, 8), (2, 20, 8), (2, 20, 8)))
    s = 0.5 * q.astype(np.float64) @ k.swapaxes(-1, -2)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    for options in ({}, {"force": ("attention_split",)}, {"without": ("attention",)}):
        out, top = eg.compile(both, cache=False, **options)(q, k, v)
        np.testing.assert_allclose(np.asarray(out), p @ v, atol=2e-6)
        np.testing.assert_allclose(np.asarray(top), s.max(-1), atol=2e-6)
