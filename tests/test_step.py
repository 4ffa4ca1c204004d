"""A whole training step: one program, one submission, memory of its own, and attention chosen by
cost."""

from dataclasses import replace

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn, optim
from eggpu.compiler import pytree
from eggpu.compiler.egraph import saturate_graph
from eggpu.compiler.egraph.extract import extract
from eggpu.compiler.schedule.target import LLVMPIPE
from eggpu.compiler.tracing import trace_call

pytestmark = pytest.mark.timeout(400)


def training_step(opt):
    def loss(model, tokens, targets):
        return nn.cross_entropy(model(tokens), targets)

    def step(model, state, tokens, targets):
        value, grads = eg.value_and_grad(loss)(model, tokens, targets)
        model, state = opt.update(model, state, optim.clip_by_global_norm(grads, 1.0))
        return model, state, value

    return step


@pytest.fixture(scope="module")
def trained():
    model = nn.GPT(vocab=11, layers=2, width=24, heads=2, context=48, key=0)
    opt = optim.adamw(1e-3)
    step = eg.compile(training_step(opt), donate=("model", "state"), name="step")
    batch = np.random.default_rng(0).integers(0, 11, (2, 49)).astype(np.int32)
    return step, model, opt.init(model), batch[:, :-1], batch[:, 1:]


def test_one_submission_a_step_and_nothing_new_in_steady_state(trained):
    step, model, state, tokens, targets = trained
    for _ in range(3):
        model, state, value = step(model, state, tokens, targets)
    first = float(value)
    on = eg.device()
    before = on.counters.copy()
    for _ in range(5):
        model, state, value = step(model, state, tokens, targets)
    grown = on.counters.since(before)
    assert grown["submits"] == 5
    assert grown["dispatches"] == 5 * len(step.plan.kernels)
    assert (
        not {"buffers_created", "pipelines_compiled", "bind_groups_created", "downloads"}
        & grown.keys()
    )
    assert float(value) < first
    assert step.recompilations == []


def test_state_is_written_in_place(trained):
    step, model, state, tokens, targets = trained
    plan = step.compile(model, state, tokens, targets).plan
    floats = [b for b in plan.outputs if plan.buffers[b].shape and plan.buffers[b].dtype == "f32"]
    assert all(plan.buffers[b].place[0] in ("input", "pack") for b in floats)
    arguments = {plan.buffers[n].place for n in plan.inputs}
    assert all(plan.buffers[b].place in arguments for b in floats)
    assert sum(plan.arena) < plan.scratch_bytes


def kernels(graph, target=LLVMPIPE):
    snapshot, report = saturate_graph(graph)
    selection, _ = extract(snapshot, target, graph)
    names = [n.op.name for n in selection.graph.nodes()]
    return names, report


def attention_gradients(heads, length, size, causal):
    shape = eg.parse_type(f"f32[{heads}, {length}, {size}]")

    def loss(q, k, v):
        return (nn.scaled_dot_product_attention(q, k, v, causal=causal) ** 2).sum()

    return eg.trace(eg.grad(loss, (0, 1, 2)), shape, shape, shape)


def test_attention_is_formed_in_every_layer(trained):
    step, model, state, tokens, targets = trained
    compilation = step.compile(model, state, tokens, targets)
    text = compilation.egraph.text()
    assert "attention 2/2" in text or "attention x2" in text, text


def test_the_first_and_the_last_layer_take_the_attention_of_those_between():
    """They are alone of their kind, so that no other layer leads the way: attention and its
    gradients have to be taken together."""
    model = nn.GPT(vocab=65, layers=4, width=128, heads=4, context=64, key=0)
    opt = optim.adamw(1e-3, weight_decay=0.0)

    def step(model, state, tokens, targets):
        loss, grads = eg.value_and_grad(lambda m: nn.cross_entropy(m(tokens), targets))(model)
        return *opt.update(model, state, grads), loss

    ids = np.zeros((8, 64), np.int32)
    donated = len(pytree.flatten((model, opt.init(model)))[0])
    graph = trace_call(step, (model, opt.init(model), ids, ids)).graph
    names, _ = kernels(graph.replace(donated=tuple(range(donated))))
    assert names.count("attention") == names.count("attention_backward") == 4


def test_shapes_decide_between_flash_and_unfused_attention():
    """Hidden tiles are skipped by the fused kernels only; where all scores of wide heads count,
    large products are faster."""
    causal, _ = kernels(attention_gradients(8, 512, 64, causal=True))
    assert "attention" in causal
    assert "attention_backward" in causal
    full, report = kernels(attention_gradients(8, 512, 128, causal=False))
    assert "attention backward 1/1" in report.text()  # it is known to be attention there too
    assert "attention_backward" not in full
    assert "dot" in full


def test_products_are_found_where_attention_is_what_the_search_begins_with():
    wide = replace(LLVMPIPE, subgroup=16)
    names, _ = kernels(attention_gradients(8, 512, 128, causal=False), wide)
    assert not {"attention", "attention_backward"} & {*names}
