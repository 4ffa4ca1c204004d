"""Horizontal fusion: kernels of one form in one dispatch, arguments side by side between calls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn, optim
from eggpu.compiler.errors import IRError
from eggpu.compiler.pipeline import compile_graph
from eggpu.compiler.schedule.kernel import KernelSource
from eggpu.compiler.schedule.parts import element_bytes, form, loads, merged
from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE
from eggpu.compiler.schedule.verify import verify_plan
from eggpu.compiler.tracing import trace_call
from eggpu.runtime import DonatedError

WIDTHS = [24, 40, 24, 40, 32, *[24, 16, 24, 40, 32, 24, 40, 24, 40, 32] * 2, 8]
GPU = replace(FLOOR, name="gpu", max_bindings=32, subgroup=32, features=("subgroup",))


@pytest.fixture(scope="module")
def device():
    return eg.device()


def model():
    return nn.MLP(WIDTHS, key=0)


def step_of(opt):
    def step(model, state, x, y):
        value, grads = eg.value_and_grad(lambda m: nn.cross_entropy(m(x), y))(model)
        model, state = opt.update(model, state, grads)
        return model, state, value

    return step


def batch(seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((16, 24), np.float32), rng.integers(0, 8, 16).astype(np.int32)


def source(text: str, grid=(1, 1, 1)) -> KernelSource:
    return KernelSource(
        "k", "k.wgsl", text, (), (), ("vec4<f32>", "f32"), grid, (64, 1, 1), 0, 0, 0, ""
    )  # fmt: skip


TEXT = """const SIDE = 4u;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let i = id.x;
  if (i >= %du) {
    return;
  }
  $0[i] = vec4<f32>($1[i * 4u + u32($1[7u])]);
}"""


def test_numbers_of_functions_are_what_a_form_leaves_out():
    text, numbers = form(TEXT % 96)
    assert numbers == (96, 4, 7)
    assert "const SIDE = 4u" in text
    assert form(TEXT % 5)[0] == text
    assert form(TEXT.replace("i * 4u", "i + 4u"))[0] != text


def test_offsets_and_numbers_of_parts():
    parts = [source(TEXT % n, (n // 64, 1, 1)) for n in (64, 128, 192)]
    text, table = merged(parts, [(0, 1024, 2048), (0, 512, 256)], (6, 1, 1))
    assert "if (i >= part_0)" in text
    assert "part_0 = 64u + part * 64u;" in text
    assert "part_1 = 0u + part * 64u;" in text  # vec4<f32>: 1024 bytes are 64 elements
    assert "$0[part_1 + (i)]" in text
    assert "$1[part_2 + (i * 4u + u32($1[part_2 + (7u)]))]" in text
    assert table == [0, 128, 64, 0, 1, 3]  # places of binding 1, then first workgroups
    equal, none = merged(parts[:1] * 2, [(0, 64), None], (2, 1, 1))
    assert none == []
    assert "let part = part_all / 1u;" in equal
    assert element_bytes("vec4<f16>") == 8
    assert loads([(1, 2, 3), (4, 4, 4), (1, 2, 4)]) == 1


@pytest.mark.parametrize(("target", "most"), [(None, 8), (GPU, 24)], ids=["here", "gpu"])
def test_adamw_of_fifty_parameters_takes_a_handful_of_dispatches(device, target, most):
    opt = optim.adamw(1e-3)
    start, (x, y) = model(), batch(0)
    state = opt.init(start)
    graph = trace_call(step_of(opt), (start, state, x, y), names=("model", "state", "x", "y")).graph
    count = sum(n.startswith("model.") for n in graph.input_names)
    assert count == 50
    donated = tuple(range(len(graph.inputs) - 2))
    plan = compile_graph(graph.replace(donated=donated), target or device.target).plan
    out = {n for n in plan.outputs if plan.buffers[n].name.startswith("0.")}
    updates = [k for k in plan.kernels if any(out & {*b.buffers} for b in k.bindings[: k.writes])]
    assert sum(len(out & {*b.buffers}) for k in updates for b in k.bindings[: k.writes]) == 50
    assert len(updates) <= most  # on a GPU they are in products, some of which feed others
    assert len(plan.packs) == 1


def test_merged_steps_train_as_separate_ones(device):
    opt = optim.adamw(1e-2)
    ours = eg.compile(step_of(opt), donate=("model", "state"), cache=False)
    plain = eg.compile(step_of(opt), optimize=False, cache=False)
    a = b = model()
    a, b = eg.tree_map(lambda v: v * 1, a), eg.tree_map(lambda v: v * 1, b)
    sa, sb = opt.init(a), opt.init(b)
    for k in range(4):
        x, y = batch(k)
        a, sa, la = ours(a, sa, x, y)
        b, sb, lb = plain(b, sb, x, y)
        np.testing.assert_allclose(float(la), float(lb), rtol=1e-5)
    assert any("_times_" in k.name for k in ours.plan.kernels)
    for (name, p), (_, q) in zip(nn.state_dict(a).items(), nn.state_dict(b).items(), strict=True):
        np.testing.assert_allclose(p.numpy(), q.numpy(), rtol=2e-4, atol=1e-5, err_msg=name)


def changed(w, x):
    return w - 0.1 * np.tanh(w * x[0, 0])


def chained(ws, x):
    """Each weight is changed by a kernel of its own, since no two have equally many elements."""
    return [w - 0.1 * eg.tanh(w * x[0, 0]) for w in ws], eg.sum(x)


def compiled_chain():
    rng = np.random.default_rng(1)
    ws = [rng.standard_normal((16, 4 * k), np.float32) for k in range(1, 6)]
    x = rng.standard_normal((16, 16), np.float32)
    step = eg.compile(chained, donate=("ws",), cache=False)
    step.compile(ws, x)
    assert len(step.plan.packs) == 1
    return step, ws, x


def test_arguments_lie_side_by_side_from_the_second_call_on(device):
    step, ws, x = compiled_chain()
    want = [w.copy() for w in ws]
    now = [eg.put(w) for w in ws]
    for k in range(3):
        want = [changed(w, x) for w in want]
        before = device.counters.copy()
        now, _ = step(now, x)
        grown = device.counters.since(before)
        if k > 1:
            assert "buffers_created" not in grown
    slabs = [v.storage.buffer.slab for v in now]
    assert len({id(slab) for slab in slabs if slab is not None}) == 1
    assert slabs.count(None) < 2
    for got, w in zip(now, want, strict=True):
        np.testing.assert_allclose(got.numpy(), w, rtol=1e-4, atol=1e-4)


def test_arguments_from_elsewhere_are_gathered_and_leave_others_alone(device):
    step, ws, x = compiled_chain()
    first, _ = step([eg.put(w) for w in ws], x)
    held = first[2]
    kept = held.numpy().copy()
    mixed = [first[0], first[1], eg.put(ws[2]), first[3], first[4]]
    values = [v.numpy().copy() for v in mixed]
    second, _ = step(mixed, x)
    for got, w in zip(second, values, strict=True):
        np.testing.assert_allclose(got.numpy(), changed(w, x), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(held.numpy(), kept)
    with pytest.raises(DonatedError):
        step(mixed, x)


def test_a_part_of_a_pack_serves_other_programs(device):
    step, ws, x = compiled_chain()
    now, _ = step([eg.put(w) for w in ws], x)
    values = [v.numpy().copy() for v in now]
    other = eg.compile(lambda a, b: (a + b[:, :4], b * 2), donate=("a",), cache=False)
    both, twice = other(now[0], now[1])  # one is written over, the other read
    np.testing.assert_allclose(both.numpy(), values[0] + values[1][:, :4], rtol=1e-6)
    np.testing.assert_allclose(twice.numpy(), values[1] * 2, rtol=1e-6)
    np.testing.assert_array_equal(now[1].numpy(), values[1])
    np.testing.assert_array_equal(now[4].numpy(), values[4])


def test_profile_leaves_packed_arguments_as_they_are(device):
    step, ws, x = compiled_chain()
    now, _ = step([eg.put(w) for w in ws], x)
    values = [v.numpy().copy() for v in now]
    step.profile(now, x)
    for got, w in zip(now, values, strict=True):
        np.testing.assert_array_equal(got.numpy(), w)


def test_operands_in_images_are_layers_of_one():
    model = nn.GPT(vocab=32, layers=1, width=128, heads=4, context=64, key=0)
    tokens = np.zeros((4, 64), np.int32)

    def step(model, tokens):
        return model(tokens), eg.tree_map(lambda v: v * 0.5, model)

    graph = trace_call(step, (model, tokens)).graph
    graph = graph.replace(donated=tuple(range(len(graph.inputs) - 1)))
    plan = compile_graph(graph, LLVMPIPE).plan
    several = [k for k in plan.kernels if "_times_" in k.name]
    stacks = [b for k in several for b in k.bindings if b.access == "image4" and b.more]
    assert stacks
    for binding in stacks:
        assert plan.images[binding.image].layers >= len(binding.buffers)
        copies = [c for c in plan.copies if c.image == binding.image]
        layers = {c.layer for c in copies if c.buffer in binding.buffers}
        assert len(layers) == len(binding.buffers)
    broken = tuple(replace(c, layer=0) for c in plan.copies)
    with pytest.raises(IRError, match=r"from image \d+, which holds another value"):
        verify_plan(replace(plan, copies=broken), LLVMPIPE)
    beyond = tuple(replace(c, layer=c.layer + 9) for c in plan.copies)
    with pytest.raises(IRError, match=r"copies to layer 9 of 1 of an image"):
        verify_plan(replace(plan, copies=beyond), LLVMPIPE)
    plain = eg.compile(step, cache=False, optimize=False)(model, tokens)[0].numpy()
    got = eg.compile(step, donate=("model",), cache=False)(model, tokens)[0].numpy()
    np.testing.assert_allclose(got, plain, rtol=1e-3, atol=1e-4)


def test_a_value_read_before_a_merged_kernel_is_copied_once():
    model = nn.GPT(vocab=32, layers=2, width=128, heads=4, context=64, key=0)
    tokens = np.arange(8 * 64, dtype=np.int32).reshape(8, 64) % 31

    def step(model, tokens):
        grads = eg.grad(lambda m: nn.cross_entropy(m(tokens), tokens))(model)
        return eg.tree_map(lambda w, g: w - 0.5 * g, model, grads)

    graph = trace_call(step, (model, tokens)).graph
    graph = graph.replace(donated=tuple(range(len(graph.inputs) - 1)))
    plan = compile_graph(graph, LLVMPIPE).plan
    stacks = [b for k in plan.kernels for b in k.bindings if b.image >= 0 and b.more]
    single = {b.buffer for k in plan.kernels for b in k.bindings if b.image >= 0 and not b.more}
    both = {n for b in stacks for n in b.buffers} & single
    assert both  # read on their own and as layers
    copies = [c.buffer for c in plan.copies]
    stacked = [n for b in {b.buffers for b in stacks} for n in b]
    assert sum(copies.count(n) for n in both) < sum(1 + stacked.count(n) for n in both)
    verify_plan(plan, LLVMPIPE)
    plain = eg.compile(step, cache=False, optimize=False)(model, tokens)
    got = eg.compile(step, donate=("model",), cache=False)(model, tokens)
    want = nn.state_dict(plain)
    for name, value in nn.state_dict(got).items():
        np.testing.assert_allclose(value.numpy(), want[name].numpy(), rtol=1e-4, atol=1e-5)
