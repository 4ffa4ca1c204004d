"""Generation on a small Llama of random weights: caches, windows, batches, sampling, text."""

import sys
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.errors import ShapeMismatch
from eggpu.compiler.tracing import array
from eggpu.generate import GenerationError, Generator, LanguageModel, Sampling
from eggpu.generate import chat as chat_
from eggpu.generate.sampling import SamplingError, choose, knobs, probabilities, threshold
from eggpu.generate.text import TextStream, held_back
from eggpu.importers import ModelFileError
from eggpu.models.cache import chunks

sys.path.insert(0, str(Path(__file__).parent))
from model_files import full_logits, tiny_llama

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9, 32, 3, 8, 46, 2, 6, 43]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def generator(model):
    return Generator(model, context=48, sizes=(1, 4, 16))


def by_prefill(model, prompt, count):
    """Greedy tokens with the whole text run for each."""
    text = list(prompt)
    run = eg.compile(lambda m, t: m(t))
    for _ in range(count):
        padded = np.zeros((1, 40), np.int32)
        padded[0, : len(text)] = text
        text.append(int(run(model, padded).numpy()[0, len(text) - 1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize(
    ("window", "kernel"),
    [(0, ""), (5, ""), (0, "attention_online"), (5, "attention_phases"), (5, "attention_split")],
)
def test_decode_equals_prefill_at_every_position(window, kernel):
    """With the kernel of attention that costs least, and with each other."""
    model = tiny_llama(window=window)
    want = full_logits(model, [PROMPT])[0]
    step = eg.compile(
        lambda m, cache, tokens, place: (lambda h, c: (m.logits(h), c))(
            *m.step(tokens, cache, place)
        ),
        donate=("cache",),
        force=(kernel,) if kernel else (),
    )
    from eggpu.models.cache import Place, empty

    cache = empty(2, 1, 2, 24, 8)
    for k, token in enumerate(PROMPT):
        place = Place(array(np.array([k], np.int32)))
        logits, cache = step(model, cache, array(np.array([[token]], np.int32)), place)
        np.testing.assert_allclose(logits.numpy()[0, 0], want[k], atol=2e-5)
    assert step.recompilations == []
    assert sum(k.name.startswith(kernel or "attention_") for k in step.plan.kernels) == 2


@pytest.mark.parametrize("sizes", [(1,), (1, 4), (1, 16), (1, 4, 16, 64)])
def test_any_chunking_gives_the_same(model, generator, sizes):
    other = Generator(model, context=48, sizes=sizes)
    want = generator.start([PROMPT]).tokens(12)
    assert list(other.start([PROMPT]).tokens(12)) == list(want)


def test_greedy_is_what_prefill_gives_without_recompiling(model, generator):
    want = by_prefill(model, PROMPT, 10)
    first = list(generator.start([PROMPT]).tokens(10))
    assert first == want
    programs = generator.programs
    assert programs <= len(generator.sizes)
    session = generator.start([PROMPT[:9]])
    before = eg.device().counters.download_bytes
    session.next()
    session.next()
    assert eg.device().counters.download_bytes - before == 2 * 4
    assert generator.programs == programs


def test_one_submit_a_token(generator):
    session = generator.start([PROMPT])
    counters = eg.device().counters
    before = counters.submits
    session.next()
    assert counters.submits - before <= 1 + _reads_submit()


def _reads_submit():
    """Submits of reading 4 bytes back."""
    counters = eg.device().counters
    value = eg.put(np.int32(1))
    before = counters.submits
    value.numpy()
    return counters.submits - before


def test_tokens_are_read_with_the_step_after_them_under_way(generator):
    """One submission and 4 bytes a token, whether the next step is submitted early or not."""
    want = [int(t[0]) for t in by_steps(generator.start([PROMPT]), 12)]
    session = generator.start([PROMPT])
    advance, order = generator.advance, []

    class Noted:
        def __call__(self, *args):
            order.append("step")
            return advance(*args)

    before = eg.device().counters.copy()
    generator.advance = Noted()
    try:
        for token in session.tokens(12):
            order += [token]
    finally:
        generator.advance = advance
    gone = eg.device().counters.since(before)
    assert [x for x in order if x != "step"] == want
    assert order.count("step") == 11
    # a token is handled when the step that writes it, and from then on one more, are submitted
    kinds = ["step" if x == "step" else "token" for x in order]
    assert kinds[:4] == ["step", "token", "step", "token"]
    assert kinds[4:] == ["step", "token"] * 9 + ["token"]
    assert gone["submits"] == 11
    assert gone["downloads"] == 11
    assert gone["download_bytes"] == 4 * 11
    assert session.position.tolist() == [len(PROMPT) + 11]


def by_steps(session, count):
    return [session.token.copy()] + [session.next().copy() for _ in range(count - 1)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "seed": 4},
        {"repetition_penalty": 1.5, "logprobs": True},
        {"temperature": 1.1, "repetition_penalty": 1.3, "top_k": 9, "seed": 2},
    ],
    ids="-".join,
)
def test_a_step_that_was_early_is_taken_back(generator, options):
    """What is done after a text was left in the middle is as if it had been stepped by hand."""
    chosen = Sampling(**options)
    want = [int(t[0]) for t in by_steps(generator.start([PROMPT], chosen), 9)]

    def left():
        session = generator.start([PROMPT], chosen)
        for number, _ in enumerate(session.tokens(20)):
            if number == 3:
                return session
        raise AssertionError

    session = left()
    assert session.position.tolist() == [len(PROMPT) + 3]
    assert session.texts == [PROMPT + want[:3]]
    assert [int(t[0]) for t in by_steps(session, 6)] == want[3:]
    session = left()
    assert list(session.tokens(6)) == want[3:]
    session = left()
    twin, saved = session.fork(), session.snapshot()
    assert [int(t[0]) for t in by_steps(twin, 6)] == want[3:]
    assert list(session.tokens(6)) == want[3:]
    session.restore(saved)
    assert list(session.tokens(6)) == want[3:]
    session = left()
    session.rewind(2)
    assert list(session.tokens(8)) == want[1:]
    session = left()
    session.feed([[7, 8]])
    fresh = generator.start([[*PROMPT, *want[:3], 7, 8]], chosen)
    assert list(session.tokens(5)) == list(fresh.tokens(5))
    if chosen.logprobs:
        np.testing.assert_allclose(session.logprob, fresh.logprob, atol=1e-5)


def test_snapshots_are_made_on_the_device(generator):
    """No byte of the cache goes through the host: one submission, and no read."""
    session = generator.start([PROMPT])
    list(session.tokens(3))
    saved = session.snapshot()
    eg.synchronize()
    for act in (session.snapshot, session.fork, lambda: session.restore(saved)):
        before = eg.device().counters.copy()
        act()
        eg.synchronize()
        gone = eg.device().counters.since(before)
        assert gone.keys() <= {"submits", "buffers_created"}
        assert gone["submits"] == 1
    before = eg.device().counters.copy()
    session.rewind(2)
    gone = eg.device().counters.since(before)
    assert gone["download_bytes"] == 4
    assert gone["upload_bytes"] < 64


def test_rows_of_a_batch_are_independent(model):
    prompts = [PROMPT, PROMPT[:5], PROMPT[3:14]]
    together = Generator(model, batch=3, context=48, sizes=(1, 16)).start(prompts)
    rows = [together.token.copy()] + [together.next().copy() for _ in range(7)]
    alone = Generator(model, context=48, sizes=(1, 16))
    for k, prompt in enumerate(prompts):
        assert [int(r[k]) for r in rows] == list(alone.start([prompt]).tokens(8))


def test_rows_go_on_from_different_positions(model):
    together = Generator(model, batch=2, context=48, sizes=(1, 4, 16)).start([PROMPT, PROMPT[:3]])
    more = [[7], PROMPT[4:16]]
    together.feed(more)
    assert together.position.tolist() == [22, 15]
    tokens = [together.token.tolist()] + [together.next().tolist() for _ in range(4)]
    alone = Generator(model, context=48, sizes=(1, 16))
    for row, prompt in enumerate((PROMPT + more[0], PROMPT[:3] + more[1])):
        assert [t[row] for t in tokens] == list(alone.start([prompt]).tokens(5))
    with pytest.raises(GenerationError, match=r"at most \[22, 29\] tokens, got \[1, 30\]"):
        together.feed([[1], [1] * 30])


def test_half_precision_cache_is_close(model, generator):
    half = Generator(model, context=48, sizes=(1, 16), cache_dtype="f16")
    if "shader-f16" not in eg.device().target.features:
        pytest.skip("the device has no f16")
    assert half.empty_cache().keys[0].dtype.name == "f16"
    assert list(half.start([PROMPT]).tokens(3)) == list(generator.start([PROMPT]).tokens(3))


def test_snapshot_fork_and_rewind(generator):
    session = generator.start([PROMPT])
    session.next()
    saved = session.snapshot()
    first = [int(session.next()[0]) for _ in range(5)]
    session.restore(saved)
    assert [int(session.next()[0]) for _ in range(5)] == first
    session.rewind(3)
    assert [int(session.token[0])] + [int(session.next()[0]) for _ in range(2)] == first[1:4]
    session.restore(saved)
    session.feed([[7, 7]])
    text = [*saved.texts[0], 7, 7]
    assert session.texts[0] == text
    assert int(session.token[0]) == next(iter(generator.start([text]).tokens(1)))


def test_a_fork_goes_its_own_way(generator):
    session = generator.start([PROMPT])
    session.next()
    want = list(generator.start([PROMPT]).tokens(6))
    twin = session.fork()
    twin.feed([[7, 7]])
    rest = list(session.tokens(5))
    assert rest == want[1:]
    twin.rewind(2)
    assert list(twin.tokens(5)) == rest[:5]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_cache_in_segments_gives_the_same(batch):
    """Windows of 4 positions cross the borders of segments at every offset."""
    model = tiny_llama(window=7)
    prompts = [PROMPT, PROMPT[:6]][:batch]
    alone = Generator(model, context=48, sizes=(1, 4))
    position = 4 * batch * 2 * 8
    parts = Generator(
        model, context=48, batch=batch, sizes=(1, 4), most_bytes=(13 + 2 * 4) * position
    )
    cache = parts.empty_cache()
    assert [p.shape[2] for p in cache.keys[0].parts] == [12 + 8] * 4
    assert cache.context == 48
    session = parts.start(prompts)
    rows = [session.token.copy()] + [session.next().copy() for _ in range(12)]
    for k, prompt in enumerate(prompts):
        assert [int(r[k]) for r in rows] == list(alone.start([prompt]).tokens(13))
    plan = parts.advance.plan
    assert all(tuple(b.shape) != (batch, 2, 48, 8) for b in plan.buffers)
    assert sum(k.name.startswith(("attention_", "2_times_attention_")) for k in plan.kernels)
    with pytest.raises(ShapeMismatch, match="bytes of a binding at least"):
        Generator(model, context=48, sizes=(1, 4), most_bytes=8 * 64).empty_cache()


def test_what_cannot_be_generated(generator):
    for prompt, message in (
        ([], "at least one token"),
        ([1] * 49, "49 tokens, the context 48"),
        ([50], "from 0 to 49"),
        ([-1], "from 0 to 49"),
    ):
        with pytest.raises(GenerationError, match=message):
            generator.start([prompt])
    with pytest.raises(GenerationError, match="needs 1 texts, got 2"):
        generator.start([[1], [2]])
    full = generator.start([[1] * 48])
    with pytest.raises(GenerationError, match="context of 48 tokens is full"):
        full.next()
    assert len(list(generator.start([[1] * 46]).tokens(10))) == 3


def test_chunks_fit_the_room():
    assert chunks(37, 128, (1, 16, 64)) == [(64, 37)]
    assert chunks(37, 40, (1, 16, 64)) == [(16, 16), (16, 16), (1, 1)] + [(1, 1)] * 4
    assert chunks(300, 512, (1, 16, 64, 256)) == [(256, 256), (64, 44)]


# ---- sampling

LOGITS = np.array([2.0, -1.0, 0.5, 3.0, 2.9, -4.0, 1.0, 3.0], np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.6},
        {"temperature": 2.0, "min_p": 0.3},
        {"temperature": 1.0, "repetition_penalty": 1.8},
    ],
    ids="-".join,
)
def test_draws_have_the_right_probabilities(options):
    count, seen = 3000, [3, 0]
    want = probabilities(LOGITS, Sampling(**options), seen)
    k = knobs(Sampling(**options, seed=3), [seen] * count, len(LOGITS))
    rows = np.tile(LOGITS, (count, 1))
    token, _, _ = eg.compile(choose)(array(rows), k, array(np.int32(5)))
    found = np.bincount(token.numpy(), minlength=len(LOGITS)) / count
    assert found[want == 0].sum() == 0
    # five standard deviations
    assert (np.abs(found - want) < 5 * np.sqrt(want * (1 - want) / count) + 1e-9).all()


def test_seeds_and_steps_decide_the_draw():
    run = eg.compile(choose)
    rows = array(np.zeros((1, 1000), np.float32))

    def draw(seed, step):
        k = knobs(Sampling(temperature=1.0, seed=seed), [[0]], 1000)
        return int(run(rows, k, array(np.int32(step)))[0].numpy()[0])

    assert draw(1, 1) == draw(1, 1)
    assert len({draw(s, t) for s in (1, 2**40) for t in (1, 2)}) > 2
    assert run.recompilations == []


def test_options_of_their_own_for_each_row(model):
    options = [
        Sampling(temperature=0.9, seed=5),
        Sampling(repetition_penalty=1.3),
        Sampling(temperature=2.0, top_k=7, min_p=0.05, seed=11),
        Sampling(temperature=0.8, top_p=0.7, seed=2, logprobs=True),
    ]
    prompts = [PROMPT, PROMPT[:5], PROMPT[3:14], PROMPT[:9]]
    session = Generator(model, batch=4, context=48, sizes=(1, 16)).start(prompts, options)
    rows = [session.token.copy()] + [session.next().copy() for _ in range(5)]
    assert session.logprob.shape == (4,)
    alone = Generator(model, context=48, sizes=(1, 16))
    for k, (prompt, chosen) in enumerate(zip(prompts, options)):
        want = list(alone.start([prompt], chosen).tokens(6))
        assert [int(r[k]) for r in rows] == want
    with pytest.raises(SamplingError, match="options for 2 texts, got 1"):
        knobs(options[:1], [[0], [0]], 50)


def test_greedy_takes_the_first_of_equals_and_gives_logprobs():
    k = knobs(Sampling(logprobs=True), [[0]], len(LOGITS))
    token, logprob, _ = eg.compile(choose)(array(LOGITS[None]), k, array(np.int32(0)))
    assert token.numpy().tolist() == [3]
    exact = LOGITS.astype(np.float64)
    assert np.isclose(logprob.numpy()[0], 3 - np.log(np.exp(exact).sum()), atol=1e-5)


def test_threshold_of_a_large_vocabulary():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(2, 49152)).astype(np.float32) * 3
    z -= z.max(-1, keepdims=True)
    find = eg.compile(lambda z, goal: threshold(z, None, goal))
    for k in (1, 2, 40, 1000):
        t = find(z, np.full((2, 1), k, np.float32)).numpy()
        counts = (z >= t).sum(-1)
        exact = np.sort(z, -1)[:, -k]
        assert (counts >= k).all()
        assert np.abs(t[:, 0] - exact).max() < 4e-6


@pytest.mark.parametrize(
    ("option", "value"),
    [("temperature", -1), ("top_k", -2), ("top_p", 0), ("min_p", 1.5), ("repetition_penalty", 0)],
)
def test_options_out_of_range(option, value):
    with pytest.raises(SamplingError, match=f"{option} needs a number"):
        Sampling(**{option: value})


# ---- text


class Letters:
    """A tokenizer of single characters, for tests."""

    end = frozenset({0})

    def encode(self, text, special=True):
        return [ord(c) % 50 for c in text]

    def decode(self, ids, special=False):
        return "".join(chr(97 + i % 26) for i in ids)


def test_pieces_and_stop_strings(model, generator):
    language = LanguageModel(model, Letters())
    whole = "".join(p.text for p in language.stream(generator, PROMPT, most=12))
    pieces = list(language.stream(generator, PROMPT, most=12))
    assert "".join(p.text for p in pieces) == whole
    assert pieces[-1].finish in ("length", "stop")
    stop = whole[4:6]
    cut = list(language.stream(generator, PROMPT, most=12, stop=[stop]))
    assert "".join(p.text for p in cut) == whole[: whole.index(stop)]
    assert cut[-1].finish == "stop"


def test_the_beginning_of_a_stop_string_isheld_back():
    assert held_back("abcEN", ("END",)) == 2
    assert held_back("abc", ("END",)) == 0
    assert held_back("a##", ("###\n", "#")) == 2


class Bytes:
    """A tokenizer whose ids are bytes of UTF-8."""

    def decode(self, ids, special=False):
        return bytes(ids).decode(errors="replace")


def test_text_comes_in_whole_characters():
    stream = TextStream(Bytes())
    out = [stream.push(byte) for byte in "aé🙂b".encode()]
    assert out == ["a", "", "é", "", "", "", "🙂", "b"]
    # bytes that are no text do not hold back what comes after them
    stream = TextStream(Bytes())
    given = "".join(stream.push(b) for b in [0xFF] * 7 + [65]) + stream.rest()
    assert given.endswith("A")
    stream = TextStream(Bytes())
    assert stream.push(0xC3) + stream.rest() == "\ufffd"


def test_stop_strings_across_tokens():
    stream = TextStream(Bytes(), ["STOP", "éé"])
    out = [stream.push(b) for b in b"xxSTxSTOPyy"[:9]]
    assert "".join(out) == "xxSTx"
    assert stream.stopped
    assert stream.rest() == ""
    stream = TextStream(Bytes(), ["STOP"])
    assert "".join(stream.push(b) for b in b"aSTO") + stream.rest() == "aSTO"


def test_chat_templates():
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [{"role": "system", "content": " hi "}, {"role": "user", "content": "x"}]
    assert chat_.render(template, messages) == "<system>hi<user>x<assistant>"
    with pytest.raises(ModelFileError, match="refuses these messages: no system"):
        chat_.render("{{ raise_exception('no system') }}", messages)
    for hostile in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% for %}"):
        with pytest.raises(ModelFileError, match="chat template failed"):
            chat_.render(hostile, messages)
