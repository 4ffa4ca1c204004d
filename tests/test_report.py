"""The report says why: rules and lines of kernels, alternatives that lost, near misses."""

from __future__ import annotations

import inspect
import json

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn

QKV = [np.zeros((2, 2, 24, 8), np.float32)] * 3
LARGE = [np.zeros((1, 4, 256, 64), np.float32)] * 3  # arithmetic counts more than dispatches
softmax = nn.softmax


def T(x):
    return x.swapaxes(-1, -2)


def causal():
    return eg.arange(24)[:, None] >= eg.arange(24)[None, :]


def attend(q, k, v):
    return softmax(q @ T(k) * 0.3, -1) @ v


def probabilities_too(q, k, v):
    p = softmax(q @ T(k) * 0.3, -1)
    return p @ v, p


def over_queries(q, k, v):
    return softmax(q @ T(k), -2) @ v


def masked_after(q, k, v):
    p = softmax(q @ T(k), -1)
    return eg.where(causal(), p, 0.0) @ v


def scaled_after(q, k, v):
    return (softmax(q @ T(k), -1) * eg.cos(q[..., :1])) @ v


def small_fill(q, k, v):
    return softmax(eg.where(causal(), q @ T(k), -10.0), -1) @ v


def low_bias(q, k, v):
    return softmax(eg.where(causal(), q @ T(k) + eg.cos(q @ T(v)), -1e9), -1) @ v


def scale_by_head(q, k, v):
    return softmax(q @ T(k) * eg.arange(2).astype("f32").reshape((2, 1, 1)), -1) @ v


def clipped(q, k, v):
    return softmax(eg.maximum(q @ T(k), 0.0), -1) @ v


def of_numbers(q, k, v):
    return softmax(eg.where(q @ T(k) > 0, 0.0, -np.inf), -1) @ v


def unshifted(q, k, v):
    e = eg.exp(q @ T(k))
    return (e / e.sum(-1, keepdims=True)) @ v


MISSES = {
    over_queries: "softmax over axis 2, attention's is over the keys, the last axis (3)",
    masked_after: "the probabilities go through select before the product with the values",
    scaled_after: "the probabilities go through mul before the product with the values",
    small_fill: "masked scores are -10, which still counts",
    low_bias: "a bias is added, which may be as far below the others as the masked scores (-1e+09)",
    scale_by_head: "the scale is an array that differs between scores (mul), not one number",
    clipped: "maximum stands between the product and softmax",
    of_numbers: "the mask chooses between two numbers, not between scores and a number",
    unshifted: "softmax without its maximum subtracted overflows where attention does not",
}


def line_of(function, text):
    lines, start = inspect.getsourcelines(function)
    return next(start + k for k, line in enumerate(lines) if text in line)


def report_of(function, *args, **options):
    compiled = eg.compile(function, cache=False, **options)
    compiled.compile(*args)
    return compiled.report


@pytest.mark.parametrize("function", MISSES, ids=lambda f: f.__name__)
def test_what_is_almost_attention_is_told_with_line_and_reason(function):
    (miss,) = report_of(function, *QKV).near_misses
    assert miss.what == "attention"
    assert miss.why.startswith(MISSES[function])
    last = line_of(function, "return")
    assert miss.at == f"test_report.py:{last}"
    assert str(miss) == f"attention not formed at {miss.at}: {miss.why}"


def test_attention_that_loses_is_told_with_what_it_would_cost():
    (miss,) = report_of(probabilities_too, *LARGE).near_misses
    assert miss.why.startswith("the probabilities are also returned; it would cost ")
    assert "us more" in miss.why
    assert miss.at.endswith(f":{line_of(probabilities_too, 'return')}")


def test_a_gradient_that_is_no_kernel_is_told():
    def loss(q, k, v):
        out, p = probabilities_too(q, k, v)
        return eg.sum(out**2) + eg.sum(p**3)

    report = report_of(eg.grad(loss, (0, 1, 2)), *QKV)
    assert any(
        m.what == "attention backward" and "used elsewhere" in m.why for m in report.near_misses
    )


@pytest.mark.parametrize(
    "function",
    [
        attend,
        lambda q, k, v: nn.scaled_dot_product_attention(q, k, v, causal=True),
        lambda q, k, v: softmax(eg.exp(q), -1) + k,  # no product
        lambda q, k, v: softmax(q, -1) @ T(k) @ v,  # none before softmax
    ],
)
def test_no_near_miss_without_reason(function):
    assert report_of(function, *QKV).near_misses == ()


def test_near_misses_are_near():
    """Without what the reason names, the same program has attention."""
    report = report_of(attend, *QKV)
    assert report.recognized["attention"] == (1, 1)
    bias = report_of(low_bias, *QKV, relaxed=True)
    assert bias.recognized["attention"] == (1, 1)
    assert not any("a bias" in m.why for m in bias.near_misses)


def test_kernels_have_lines_rules_and_results():
    def model(x, w1, w2):
        a = x @ w1
        return a, x @ w2 + 0.0 * 1.0

    args = [np.zeros(s, np.float32) for s in ((64, 32), (32, 48), (32, 16))]
    report = report_of(model, *args)
    at = f"test_report.py:{line_of(model, 'a = x @ w1')}"
    assert report.at(at)
    assert report.kernel(0).number == 0
    assert all(k.writes for k in report.kernels)
    assert report.kernel(report.kernels[-1].writes[0]) is report.kernels[-1]
    with pytest.raises(KeyError, match=r"no kernel .nothing.; there are 0 to \d+; buffers that"):
        report.kernel("nothing")
    known = {r.name.partition("@")[0] for r in eg.rules.list()} | {"constant"}
    assert {r for k in report.kernels for r in k.rules} <= known


def test_a_kernel_that_a_rule_made_names_it():
    report = report_of(eg.value_and_grad(lambda q, k, v: eg.sum(attend(q, k, v)), (0, 1, 2)), *[
        np.zeros((2, 2, 256, 32), np.float32)] * 3)  # fmt: skip
    made = {r for k in report.kernels if "attention" in k.name for r in k.rules}
    assert "attention" in made


def test_a_kernel_has_all_its_lines_and_what_it_won_over():
    def model(q, k, v):
        scores = q @ k.swapaxes(-1, -2) * 0.125
        p = softmax(scores, -1)
        return p @ v

    report = report_of(model, *LARGE)
    (kernel,) = report.kernels
    assert kernel.lines == tuple(
        f"test_report.py:{line_of(model, text)}" for text in ("scores =", "p =", "return")
    )
    (choice,) = kernel.choices
    assert choice.chosen.startswith("attention(")
    (other,) = choice.others
    assert other.text == "dot(div, input)"
    assert other.loss > 0
    assert "dispatches" in other.why
    assert "MB" in other.why
    told = f"not      {other.text}: {other.loss / 1e3:.1f} us more ({other.why})"
    assert told in str(kernel)
    assert report.bytes_before > 2 * report.bytes_after > 0


def test_lines_end_where_another_kernel_starts():
    def model(q, k, v):
        p = softmax(q @ T(k), -1)
        return p, p @ v

    report = report_of(model, *LARGE)
    last = report.kernel(report.kernels[-1].writes[0])
    assert last.lines == (f"test_report.py:{line_of(model, 'return')}",)
    first = report.kernel("out0") if "out0" in report.kernels[0].writes else report.kernels[0]
    assert f"test_report.py:{line_of(model, 'p =')}" in first.lines


def test_every_kernel_of_a_training_step_says_why():
    model = nn.GPT(vocab=32, layers=1, width=16, heads=2, context=8, key=eg.random.key(0))

    def step(model, x, y):
        return eg.value_and_grad(lambda m: nn.cross_entropy(m(x), y))(model)

    ids = np.zeros((2, 8), np.int32)
    compiled = eg.compile(step, cache=False)
    compiled.compile(model, ids, ids)
    report = compiled.report
    assert all(k.lines and k.predicted_us > 0 for k in report.kernels)
    assert any(k.rules for k in report.kernels)
    told = [c for k in report.kernels for c in k.choices]
    assert len(told) > 5
    assert all(o.why for c in told for o in c.others)
    illegal = [o.why for c in told for o in c.others if o.loss is None]
    assert all(
        w.startswith(("no kernel of ", "it reads stored", "its operands", "its kernels"))
        for w in illegal
    )
    assert report.stored > 0
    assert report.inlined > 0
    assert report == compiled.report


def test_loops_and_limits_have_kernels_with_reasons():
    def looped(q, k, v):
        return eg.scan(lambda c, _: (softmax(c @ T(k), -1) @ v, None), q, length=3)[0] @ T(k)

    report = report_of(looped, *LARGE)
    assert max(k.runs for k in report.kernels) == 3
    assert all(k.lines for k in report.kernels)
    assert report_of(attend, *LARGE, max_memory=64 << 20).kernels[0].choices


def test_a_dump_has_the_reasons_as_text_and_as_data(tmp_path):
    compiled = eg.compile(attend, cache=False)
    folder = compiled.dump(tmp_path / "out", *LARGE)
    text = (folder / "5-kernels.txt").read_text()
    data = json.loads((folder / "report.json").read_text())
    report = compiled.report
    assert text.startswith("plan attend: 1 kernel, ")
    assert text.rstrip().endswith("\n".join(map(str, (*report.results, "", *report.kernels))))
    assert text.rstrip() in compiled.explain(*LARGE)
    assert data["kernels"][0]["choices"][0]["others"][0]["why"]
    assert data["bytes_before"] == report.traced.nbytes == data["traced"]["nbytes"]
    assert (data["stored"], data["inlined"]) == (report.stored, report.inlined)


def test_data_and_text_agree():
    compiled = eg.compile(probabilities_too, cache=False)
    compiled.compile(*LARGE)
    report = compiled.report
    text = str(report)
    assert report.egraph in text
    assert str(report.near_misses[0]) in report.egraph
    assert str(report.near_misses[0]) in compiled.explain(*LARGE)
    assert all(str(k) in text for k in report.kernels)
    assert report.stop == "saturated"
    assert report.rules["softmax"] == 1
    assert report.joint.cost <= report.greedy.cost < report.traced.cost
    assert report.joint.nbytes < report.traced.nbytes
    assert report.stored == 3 <= report.inlined
    lost = [o for c in report.choices for o in c.others if o.text.startswith("attention(")]
    assert lost[0].loss > 0
    assert lost[0].why
    assert report == compiled.report


def test_an_unoptimized_program_reports_its_kernels():
    report = report_of(attend, *QKV, optimize=False)
    assert report.kernels
    assert report.choices == () == report.near_misses
    assert report.joint is None
    assert report.planned.kernels == len(report.kernels)
    assert str(report).startswith(f"plan attend: {len(report.kernels)} kernels\nresult f32")


def scores_too(q, k, v):
    scores = q @ T(k)
    return softmax(eg.where(eg.arange(256) < 200, scores * 0.3, -np.inf), -1) @ v, scores


def test_scores_that_are_returned_before_scale_and_mask_are_told():
    (miss,) = report_of(scores_too, *LARGE).near_misses
    assert str(miss).startswith(
        f"attention not formed at test_report.py:{line_of(scores_too, 'return')}: "
        "the scores are also returned; it would cost "
    )


@pytest.mark.parametrize("rules", [("attention",), ("weights", "attention")])
def test_a_rule_that_is_left_out_is_told(rules):
    report = report_of(attend, *QKV, without=rules)
    assert report.recognized["attention"] == (0, 1)
    (miss,) = report.near_misses
    names, verb = ", ".join(rules), "is" if len(rules) == 1 else "are"
    assert miss.why == f"the rule{'s' * (len(rules) > 1)} {names} {verb} left out"


def returning(x, g):
    kept = eg.exp(x)
    return x, x.reshape((-1,)), g + 0, eg.full((4,), 2.0) * 3.0, kept, {"again": kept}


def test_every_result_says_which_kernel_gives_it_or_what_it_is():
    report = report_of(returning, np.zeros((4, 8), np.float32), np.zeros(3, np.float32))
    told = {r.name: r for r in report.results}
    assert [r.name for r in report.results] == ["0", "1", "2", "3", "4", "5.again"]
    for name, argument in (("0", "x"), ("1", "x"), ("2", "g")):
        assert told[name].kernel is None
        assert told[name].told.startswith(
            f"no kernel writes it: it is the argument {argument} as it came"
        )
    assert told["1"].lines == (f"test_report.py:{line_of(returning, 'x.reshape')}",)
    for name in ("3", "4", "5.again"):
        kernel = report.kernel(told[name].kernel)
        assert kernel.lines == told[name].lines
        assert "test_report.py" in kernel.lines[0]
    assert told["4"].kernel == told["5.again"].kernel
    assert report.result("4") is report.result(4) is told["4"]
    assert all(str(r) in str(report) for r in report.results)
    with pytest.raises(KeyError, match=r"no result .y.; there are 0, 1, 2, 3, 4, 5.again"):
        report.result("y")
    with pytest.raises(KeyError, match=r"result 2 .*: no kernel writes it: it is the argument g"):
        report.kernel("2")


def test_results_of_loops_have_kernels():
    def looped(x):
        return eg.scan(lambda c, _: (eg.tanh(c @ c), eg.sum(c)), x, length=3)

    report = report_of(looped, np.zeros((8, 8), np.float32))
    assert [r.kernel is not None for r in report.results] == [True, True]
    named = {w for k in report.kernels for w in k.writes}
    for kernel in report.kernels:  # names inside loops are those of the plan around them
        assert all(f"%{w} =" in kernel.computes for w in kernel.writes)
    assert len(named) == sum(len(k.writes) for k in report.kernels)


def test_the_totals_of_the_plan_are_the_sums_of_its_kernels():
    def loss(ws, x):
        for w in ws:
            x = eg.tanh(x @ w)
        return eg.sum(x)

    def clipped(ws, x):
        grads = eg.grad(loss)(ws, x)
        norm = eg.sqrt(sum(eg.sum(g * g) for g in grads))
        return [g / norm for g in grads]

    ws = [np.zeros((32, 32), np.float32)] * 4
    report = report_of(clipped, ws, np.zeros((64, 32), np.float32))
    assert report.planned.cost == pytest.approx(sum(1e3 * k.predicted_us for k in report.kernels))
    assert report.planned.nbytes == sum(k.nbytes for k in report.kernels)
    assert report.planned.flops == sum(k.flops for k in report.kernels)
    assert report.planned.kernels == len(report.kernels) < report.joint.kernels
    saved = (report.planned.cost - report.joint.cost) / 1e3
    assert f"{report.joint.kernels} kernels of {report.joint.cost / 1e3:.1f} us" in str(report)
    assert f"share dispatches ({saved:+.1f} us)" in str(report)


def test_attention_without_its_kernel_has_a_price_in_a_training_step():
    def loss(q, k, v):
        return eg.sum(nn.scaled_dot_product_attention(q, k, v, causal=True) ** 2)

    report = report_of(eg.value_and_grad(loss, (0, 1, 2)), *LARGE)
    told = {c.chosen.partition("(")[0]: c for k in report.kernels for c in k.choices}
    for name in ("attention", "attention_backward"):
        unfused = [o for o in told[name].others if o.text.startswith("dot(")]
        assert unfused
        assert all(o.loss is not None and o.loss > 0 and "dispatches" in o.why for o in unfused)


def test_choices_have_lines_and_alternatives_the_rules_that_made_them():
    report = report_of(probabilities_too, *LARGE)
    (choice,) = report.choices
    assert choice.lines == (f"test_report.py:{line_of(probabilities_too, 'return')}",)
    assert [(o.text.partition("(")[0], o.rule) for o in choice.others] == [
        ("attention", "attention")
    ]
    assert "by attention: " in str(report)
    assert f"for {choice.type} at {choice.lines[0]}" in str(report)


def test_a_stored_value_says_what_it_would_cost_not_to_store_it():
    def twice(x):
        y = eg.exp(x)
        return y @ y

    report = report_of(twice, np.zeros((256, 256), np.float32))
    first, last = report.kernels
    (kept,) = [c for c in first.choices if c.chosen.startswith("stored exp")]
    again, together = kept.others
    assert again.text == "computed again in the kernel that reads it"
    assert again.loss > 0
    assert "MFLOP" in again.why
    assert together.text == "in one kernel with a reader"
    assert not any(c.chosen.startswith("stored") for c in last.choices)  # a result is stored anyway


def decode(q, k, v, length):
    seen = eg.arange(k.shape[-2]) < length
    return nn.scaled_dot_product_attention(q, k, v, seen)


DECODERS = ("attention", "attention_online", "attention_phases", "attention_split")


@pytest.mark.parametrize("keys", [128, 2048, 32768])
def test_the_decode_kernel_is_explained_by_what_the_others_would_cost(keys):
    cache = np.zeros((1, 3, keys, 64), np.float32)
    query = np.zeros((1, 9, 1, 64), np.float32)
    report = report_of(decode, query, cache, cache, np.int32(keys // 2))
    for kernel in report.kernels:  # split keys: also the kernel that joins the parts
        told = [c for c in kernel.choices if not c.chosen.startswith("stored")]
        taken = next(c.chosen.partition("(")[0] for c in told if c.chosen.startswith("attention"))
        others = [o for c in told for o in c.others]
        assert {o.text.partition("(")[0] for o in others} == {*DECODERS, "dot"}
        assert all(o.loss is not None and o.loss > 0 for o in others)
        assert any(o.text.startswith(f"{taken}(") and "mask=" in o.text for o in others)
    assert taken == ("attention_online" if keys == 128 else "attention_split")


@pytest.mark.parametrize("keys", [128, 2048, 32768])
def test_every_decode_kernel_gives_the_same(keys):
    random = np.random.default_rng(keys)
    q, k, v = (random.standard_normal((1, h, n, 16), dtype=np.float32)
               for h, n in ((6, 1), (2, keys), (2, keys)))  # fmt: skip
    expected = np.asarray(eg.compile(decode, cache=False)(q, k, v, np.int32(keys - 7)).numpy())
    for name in DECODERS:
        forced = eg.compile(decode, cache=False, force=(name,))
        found = forced(q, k, v, np.int32(keys - 7)).numpy()
        assert any(kernel.name.startswith(name) for kernel in forced.plan.kernels)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_an_alternative_of_an_added_rule_is_told_though_it_costs_the_same():
    def twice(x):
        y = x + x
        return eg.sum(y @ y.T, 0)

    double = eg.rules.Rule("double", "(Add x x)", "(Mul x (const 2.0 x))")
    report = report_of(twice, np.zeros((64, 32), np.float32), rules=(double,))
    found = [o for k in report.kernels for c in k.choices for o in c.others if o.rule == "double"]
    assert [o.text for o in found] == ["mul(input, broadcast)"]
    assert found[0].loss == 0
    assert f"mul(input, broadcast) by double: {0:.1f} us more (equal work)" in str(report)
    assert report.at(f"somewhere/test_report.py:{line_of(twice, 'y @ y')}") == report.kernels


def test_flops_of_causal_attention_are_those_of_its_kernel():
    def step(q, k, v):
        return nn.scaled_dot_product_attention(q, k, v, causal=True)

    report = report_of(step, *LARGE)
    assert [k.name for k in report.kernels] == ["attention"]
    assert report.joint.flops == report.planned.flops == report.kernels[0].flops


def test_every_kernel_of_a_scatter_says_what_it_computes() -> None:
    table, rows = np.ones((80, 32), np.float32), np.arange(256, dtype=np.int32) % 7
    step = eg.compile(eg.grad(lambda table: (table[rows] ** 2).sum()))
    step.compile(table)
    kernels = step.plan.kernels
    assert len(kernels) == 3
    assert all(k.computes for k in kernels)
    assert "first update of each row" in str(step.plan)  # a table, not the plan's fields


def test_kernels_of_a_gradient_belong_to_the_lines_of_the_loss():
    def loss(x):
        return eg.exp(eg.tanh(x)).sum()

    def caller(x):
        return eg.grad(loss)(x)

    compiled = eg.compile(caller, cache=False)
    compiled.compile(np.ones((3, 5), np.float32))
    line = f"test_report.py:{line_of(loss, 'return')}"
    assert [k.lines for k in compiled.report.kernels] == [(line,)]
