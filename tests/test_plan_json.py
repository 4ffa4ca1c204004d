"""Saved plans: what is written is read back, and what was not written by us is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eggpu.compiler.errors import IRError
from eggpu.compiler.schedule.plan import Binding, Buffer, Constant, Kernel, Plan
from eggpu.compiler.schedule.serialize import VERSION, plan_from_json, plan_to_json

sizes = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
dtypes = st.sampled_from(["f32", "f16", "i32", "u32", "bool"])
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
whole = st.integers(0, 2**60)
lists = st.lists(st.integers(0, 99), max_size=3).map(tuple)
texts = st.text(max_size=8)
buffers = st.builds(
    Buffer,
    texts,
    shapes,
    dtypes,
    whole,
    st.sampled_from(["input", "output", "scratch", "constant"]),
    st.one_of(
        st.tuples(st.sampled_from(["input", "output", "constant"]), whole),
        st.tuples(st.just("arena"), whole, whole),
    ),
)
kernels = st.builds(
    Kernel,
    name=texts,
    template=texts,
    wgsl=texts,
    bindings=st.lists(
        st.builds(Binding, whole, st.sampled_from(["read", "read_write"])), max_size=3
    ).map(tuple),
    grid=sizes,
    workgroup=sizes,
    flops=whole,
    bytes_read=whole,
    bytes_written=whole,
    predicted_ns=st.floats(allow_nan=False),
    computes=texts,
    source=st.lists(texts, max_size=2).map(tuple),
    trusted=st.booleans(),
    writes=whole,
)
constants = st.builds(Constant, shapes, dtypes, st.binary(max_size=20))
plans = st.builds(
    Plan,
    texts,
    st.lists(buffers, max_size=4).map(tuple),
    st.lists(kernels, max_size=3).map(tuple),
    lists,
    lists,
    lists,
    st.lists(constants, max_size=2).map(tuple),
    lists,
    whole,
    st.lists(texts, max_size=2).map(tuple),
)


def small() -> Plan:
    buffer = Buffer("x", (2, 3), "f32", 24, "input", ("input", 0))
    scratch = Buffer("t0", (6,), "f32", 24, "scratch", ("arena", 0, 0))
    bindings = (Binding(1, "read_write"), Binding(0, "read"))
    sizes = ((1, 1, 1), (64, 1, 1), 6, 24, 24)
    kernel = Kernel("add", "e.wgsl.j2", "fn main() {}", bindings, *sizes, 1.5, "add(%x)")
    constant = Constant((2,), "bool", b"\0\1\2\3\xff\0\0\0")
    return Plan("p", (buffer, scratch), (kernel,), (0,), (1,), (), (constant,), (256,), 24, ())


@given(plans)
def test_plans_are_read_back(plan: Plan) -> None:
    text = plan_to_json(plan)
    assert plan_from_json(text) == plan
    assert plan_to_json(plan_from_json(text)) == text


def at(*path: str | int, value: object) -> Callable[[dict], None]:
    """Puts `value` at a place in the document."""

    def change(document: dict) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return change


def drop(document: dict) -> None:
    del document["plan"]["arena"]


CHANGES = [
    (at("format", value="other"), "format 'eggpu-plan'"),
    (at("version", value=1), f"needs version {VERSION}, got 1"),
    (at("plan", value=[]), r"plan needs an object, got \[\]"),
    (drop, "plan needs the fields name, buffers, .* got"),
    (at("plan", "kernels", 0, "grid", value=[1, 1]), r"plan.kernels\[0\].grid needs 3 values, got"),
    (at("plan", "kernels", 0, "grid", 1, value="1"), r"grid\[1\] needs int, got '1'"),
    (at("plan", "kernels", 0, "flops", value=1.5), r"plan.kernels\[0\].flops needs int, got 1.5"),
    (at("plan", "kernels", 0, "trusted", value=0), r"kernels\[0\].trusted needs bool, got 0"),
    (
        at("plan", "kernels", 0, "bindings", 0, "access", value="w"),
        "one of read, read_write, image1, image4, image1u, image4u, got",
    ),
    (at("plan", "buffers", 0, "place", value=["input"]), r"buffers\[0\].place needs .* or .* got"),
    (at("plan", "buffers", 0, "shape", value=None), r"buffers\[0\].shape needs a list, got None"),
    (at("plan", "constants", 0, "data", value="*"), r"constants\[0\].data needs base64 text"),
    (at("plan", "constants", 0, "data", value=7), r"constants\[0\].data needs base64 text, got 7"),
    (at("plan", "kernels", 0, "wgsl", value="fn main() { }"), "changed after it was written"),
    (at("digest", value=""), "changed after it was written"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=range(len(CHANGES)))
def test_a_changed_plan_is_refused(change: Callable[[dict], None], message: str) -> None:
    document = json.loads(plan_to_json(small()))
    change(document)
    with pytest.raises(IRError, match=message):
        plan_from_json(json.dumps(document))


@given(st.data())
def test_a_text_with_a_lost_or_changed_character_is_refused(data: st.DataObject) -> None:
    text = plan_to_json(small())
    k = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from(["", "x", "0", "\\", '"', "}"]))
    broken = text[:k] + other + text[k + 1 :]
    try:
        same_document = json.loads(broken) == json.loads(text)
    except ValueError:
        same_document = False
    if not same_document:
        with pytest.raises(IRError):
            plan_from_json(broken)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(IRError, match="a saved plan"):
        plan_from_json(text)


def test_the_digest_covers_every_field() -> None:
    plans = [small(), replace(small(), name="q"), replace(small(), scratch_bytes=1)]
    assert len({json.loads(plan_to_json(p))["digest"] for p in plans}) == 3
