"""Plans on disk: what hits, what misses, and what a broken file does."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

import eggpu as eg
from eggpu import cache, nn
from eggpu.compiler.tracing import trace_call


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("EGGPU_CACHE_DIR", str(tmp_path))
    return tmp_path / "plans"


def key(function, *args, target=None, options=None):
    graph = trace_call(function, args).graph
    return cache.key(graph, target or eg.device().target, options or eg.Options())


X = np.ones((3, 4), np.float32)


def base(x):
    return nn.softmax(x * 2.0, axis=1)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: nn.softmax(x * 2.0, axis=0), X),  # attribute
        (lambda x: nn.softmax(x * 2.0000002, axis=1), X),  # constant, by one bit
        (lambda x: nn.softmax(x * -0.0, axis=1), X),
        (base, X.astype(np.float16)),  # dtype
        (base, X[:2]),  # shape
        (lambda x: (nn.softmax(x * 2.0, axis=1), x), X),  # results
    ],
)
def test_another_program_misses(function, x):
    assert key(function, x) != key(base, X)


def test_the_same_program_hits_from_another_line():
    assert key(lambda x: nn.softmax(x * 2.0, axis=1), X) == key(
        lambda x: nn.softmax(x * 2.0, axis=1), X
    )


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(eg.Options)])
def test_every_option_counts(field):
    changed = {
        bool: lambda v: not v,
        int: lambda v: v + 1,
        float: lambda v: v + 1,
        tuple: lambda v: ("fuse",),
        str: lambda v: "mixed",
        type(None): lambda v: 1 << 30,
    }
    value = getattr(eg.Options(), field)
    new = changed[type(value)](value)
    if field == "rules":
        new = (eg.rules.Rule("double", "(Add x x)", "(Mul x (const 2.0 x))"),)
    other = dataclasses.replace(eg.Options(), **{field: new})
    assert key(base, X, options=other) != key(base, X)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(type(eg.device().target))])
def test_every_fact_of_the_device_counts(field):
    target = eg.device().target
    value = getattr(target, field)
    if dataclasses.is_dataclass(value):
        other = dataclasses.replace(value, launch=value.launch + 1)
    else:
        other = value + (
            ("x",) if isinstance(value, tuple) else "x" if isinstance(value, str) else 1
        )
    assert key(base, X, target=dataclasses.replace(target, **{field: other})) != key(base, X)


def test_donation_counts():
    graph = trace_call(base, (X,)).graph
    target = eg.device().target
    assert cache.key(graph, target, eg.Options()) != cache.key(
        graph.replace(donated=(0,)), target, eg.Options()
    )


def test_versions_count(monkeypatch):
    before = key(base, X)
    monkeypatch.setattr(cache, "versions", lambda: ("another",))
    assert key(base, X) != before


def test_a_plan_is_kept_and_used(folder):
    first = eg.compile(base)
    want = first(X).numpy()
    (file,) = folder.iterdir()
    second = eg.compile(base)
    assert np.array_equal(second(X).numpy(), want)
    assert "saturate" in first.seconds
    assert "saturate" not in second.seconds
    assert second.explain(X) == first.explain(X)  # its reports are made again when asked for
    assert file.stat().st_size > 0


def test_a_broken_file_is_replaced(folder):
    want = eg.compile(base)(X).numpy()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for broken in (b"", whole[:-7], b"rubbish" + whole):
        file.write_bytes(broken)
        assert np.array_equal(eg.compile(base)(X).numpy(), want)
        assert file.read_bytes() == whole


def test_the_cache_can_be_off(folder, monkeypatch):
    eg.compile(base, cache=False)(X)
    monkeypatch.setenv("EGGPU_CACHE_DIR", "")
    eg.compile(base)(X)
    assert not folder.exists()


def test_a_second_start_imports_no_egglog():
    program = (
        "import sys, numpy as np, eggpu as eg\n"
        "f = eg.compile(lambda x: eg.exp(x).sum(1))\n"
        "f(np.ones((3, 4), np.float32)).numpy()\n"
        "engine = 'eggpu.compiler.egraph.engine' in sys.modules\n"
        "print(engine, any('egglog' in m for m in sys.modules), 'jinja2' in sys.modules)"
    )
    seen = [
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    # the first takes egglog's compiled module alone, under a name of its own
    assert seen == ["True False True\n", "False False False\n"]
