"""The report says why: rules and lines of kernels, alternatives that lost, near misses."""

from __future__ import annotations

import inspect
import json

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.cli import main

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
    assert text.rstrip() == "\n".join(map(str, report.kernels))
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
    assert str(report).startswith("kernel 0 ")


MODULE = """
from eggpu import nn

def attend(q, k, v):
    p = nn.softmax(q @ k.swapaxes(-1, -2), -1)
    return p @ v, p
"""


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("EGGPU_CACHE_DIR", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attending.py").write_text(MODULE)
    argv = ["inspect", "attending.py:attend", *["--arg", "f32[2,24,8]"] * 3]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "recognized: softmax x1, attention 1/1" in text
    assert main([*argv, "--misses"]) == 0
    assert capsys.readouterr().out.startswith("attention not formed at attending.py:6: ")
    assert main([*argv, "--kernel", "0"]) == 0
    assert capsys.readouterr().out.startswith("kernel 0 ")
    assert main([*argv, "--line", "attending.py:5"]) == 0
    assert "attending.py:5" in capsys.readouterr().out
    assert main([*argv, "--kernel", "nothing"]) == 2
    assert main([*argv, "--line", "attending.py:99"]) == 2
    assert "no kernel computes attending.py:99" in capsys.readouterr().err
