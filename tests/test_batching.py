"""Continuous batching on a small random Llama: every text gets what it gets alone."""

import numpy as np
import pytest
from model_files import tiny_llama

import eggpu as eg
from eggpu.generate import Generator, Sampling
from eggpu.generate.batching import Batcher, BusyError
from eggpu.generate.generator import GenerationError

pytestmark = pytest.mark.timeout(300)  # the first test waits for all plans
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9, 32, 3, 8, 46, 2, 6, 43]
SIZES = (4, 16)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(window=6)


@pytest.fixture(scope="module")
def batcher(model):
    made = Batcher(model, slots=3, context=48, sizes=SIZES, waiting=6)
    made.warm()
    return made


@pytest.fixture(scope="module")
def alone(model):
    return Generator(model, context=48, sizes=(1, *SIZES))


class Taken:
    """A text in a batcher, and what came of it."""

    def __init__(self, batcher, ids, most=8, stop=(), **options):
        top = options.pop("top", 0)
        self.tokens, self.reasons, self.stop = [], [], stop
        self.ids, self.most, self.sampling = ids, most, Sampling(**options)
        self.handle = batcher.submit(
            ids, self.take, self.reasons.append, sampling=self.sampling, most=most, top=top
        )

    def take(self, token):
        self.tokens.append(token)
        return "stop" if token.id in self.stop else ""

    @property
    def chosen(self):
        return [t.id for t in self.tokens]

    def expected(self, alone):
        return list(alone.start([self.ids], self.sampling).tokens(self.most))


def finish(batcher):
    steps = 0
    while batcher.step():
        steps += 1
        assert steps < 300
    return steps


def test_texts_come_and_go_at_any_step(batcher, alone):
    programs = batcher.programs
    assert programs == len(SIZES) + 2
    texts = [Taken(batcher, PROMPT, 12)]
    for step, (ids, most) in enumerate([(PROMPT[:1], 5), (PROMPT[2:9], 9), (PROMPT[5:], 3)]):
        for _ in range(step + 1):
            batcher.step()
        texts.append(Taken(batcher, ids, most))
    texts.append(Taken(batcher, PROMPT[4:6], 4))
    assert (batcher.running, batcher.waiting) == (3, 2)
    finish(batcher)
    for text in texts:
        assert text.chosen == text.expected(alone)
        assert text.reasons == ["length"]
    assert batcher.running == 0
    assert batcher.programs == programs  # nothing was compiled while texts came and went


def test_options_of_each_text(batcher, alone):
    programs = batcher.programs
    texts = [
        Taken(batcher, PROMPT, temperature=0.9, seed=4),
        Taken(batcher, PROMPT[:7], temperature=1.5, top_k=5, seed=9, repetition_penalty=1.4),
        Taken(batcher, PROMPT[3:], logprobs=True),
        Taken(batcher, PROMPT, temperature=0.7, top_p=0.6, min_p=0.02, seed=2**35 + 1),
        Taken(batcher, PROMPT[:7], repetition_penalty=1.6),
    ]
    finish(batcher)
    for text in texts:
        assert text.chosen == text.expected(alone)
    assert batcher.programs == programs
    session = alone.start([texts[2].ids], texts[2].sampling)
    assert np.isclose(texts[2].tokens[0].logprob, session.logprob[0], atol=1e-5)
    assert texts[0].tokens[0].logprob is None


def test_likeliest_tokens(batcher):
    text = Taken(batcher, PROMPT, 3, logprobs=True, top=4)
    finish(batcher)
    for token in text.tokens:
        assert [len(token.top), token.top[0][0]] == [4, token.id]
        assert np.isclose(token.top[0][1], token.logprob, atol=1e-5)
        assert sorted((p for _, p in token.top), reverse=True) == [p for _, p in token.top]


def test_four_bytes_a_text_and_step_are_read(batcher):
    for ids in (PROMPT, PROMPT[:4]):
        Taken(batcher, ids, 20)
    for _ in range(4):
        batcher.step()
    counters = eg.device().counters
    before = counters.download_bytes, counters.downloads
    batcher.step()
    assert counters.download_bytes - before[0] == 4 * 3
    assert counters.downloads - before[1] == 1
    finish(batcher)


def test_ends_and_cancels(batcher, alone):
    known = list(alone.start([PROMPT]).tokens(6))
    stopped = Taken(batcher, PROMPT, 6, stop=(known[2],))
    full = Taken(batcher, PROMPT + PROMPT[::-1] + [1] * 4, 10)  # its last chunk does not fit
    long = Taken(batcher, PROMPT, 25)
    waiting = Taken(batcher, PROMPT)
    batcher.step()
    batcher.cancel(long.handle)
    batcher.cancel(waiting.handle)
    finish(batcher)
    assert stopped.chosen == known[: known.index(known[2]) + 1]
    assert stopped.reasons == ["stop"]
    assert (len(full.tokens), full.reasons) == (3, ["length"])
    assert full.chosen == full.expected(alone)
    assert long.reasons == ["cancel"]
    assert len(long.tokens) < 25
    assert (waiting.tokens, waiting.reasons) == ([], ["cancel"])
    batcher.cancel(stopped.handle)
    assert not batcher.step()
    assert stopped.reasons == ["stop"]


def test_slots_in_segments(model, alone):
    positions = 13 + 2 * 4  # 12 of each segment's own
    made = Batcher(model, slots=2, context=48, sizes=(4,), most_bytes=positions * 4 * 2 * 2 * 8)
    texts = [Taken(made, PROMPT, 6), Taken(made, PROMPT[:3], 12)]
    finish(made)
    assert len(made._state.cache.keys[0].parts) == 4
    for text in texts:
        assert text.chosen == text.expected(alone)


def test_what_cannot_be_taken(batcher):
    for ids, message in (
        ([], "at least one token"),
        ([1] * 49, "49 tokens, the context 48"),
        ([50], "from 0 to 49"),
    ):
        with pytest.raises(GenerationError, match=message):
            Taken(batcher, ids)
    with pytest.raises(GenerationError, match="at least 1 token to generate"):
        Taken(batcher, [1], 0)
    texts = [Taken(batcher, [1], 2) for _ in range(6)]
    with pytest.raises(BusyError, match="6 texts are waiting"):
        Taken(batcher, [1])
    finish(batcher)
    assert all(t.reasons == ["length"] for t in texts)


def test_after_an_error_all_texts_end_and_new_ones_run(batcher, alone, monkeypatch):
    texts = [Taken(batcher, PROMPT) for _ in range(4)]
    batcher.step()
    batcher.fail("the device was lost")
    assert all(t.reasons == ["error: the device was lost"] for t in texts)
    again = Taken(batcher, PROMPT)
    finish(batcher)
    assert again.chosen == again.expected(alone)


def test_the_next_step_is_under_way_while_tokens_are_taken(batcher, alone, monkeypatch):
    events, run = [], batcher._run_decode

    def noted(running, plain):
        events.append("step")
        return run(running, plain)

    monkeypatch.setattr(batcher, "_run_decode", noted)
    text = Taken(batcher, PROMPT[:4], 5)
    take = text.handle.take
    text.handle.take = lambda token: events.append("take") or take(token)
    finish(batcher)
    # the first token is the prompt's; no step follows the last one, which is known to be it
    assert events == ["take", "step", *["step", "take"] * 3, "take"]
    assert text.chosen == text.expected(alone)
    events.clear()
    told = Taken(batcher, PROMPT[:4], 5, logprobs=True, top=2)  # its logits are read
    finish(batcher)
    assert events == ["step"] * 4
    assert told.chosen == text.chosen


def test_a_step_too_many_leaves_no_trace(batcher, alone):
    """Of a text that stops the device is one token further; whoever gets its slot, and the others,
    never see it."""
    options = [{}, {"temperature": 1.2, "seed": 3, "repetition_penalty": 1.3}, {"seed": 8}]
    known = [list(alone.start([PROMPT[:5]], Sampling(**o)).tokens(16)) for o in options]
    ends = [next(t for k, t in enumerate(ids) if k >= 3 and t not in ids[:k]) for ids in known]
    stopped = [
        Taken(batcher, PROMPT[:5], 16, stop=(end,), **o)
        for end, o in zip(ends, options, strict=True)
    ]
    after = [Taken(batcher, PROMPT[k:], 12, **o) for k, o in enumerate(options)]
    finish(batcher)
    for text, ids, end in zip(stopped, known, ends, strict=True):
        assert text.chosen == ids[: ids.index(end) + 1]
        assert text.reasons == ["stop"]
    for text in after:
        assert text.chosen == text.expected(alone)
    assert batcher._ahead is None
    assert not batcher.step()


def test_no_step_goes_past_the_context(batcher, alone):
    texts = [Taken(batcher, (PROMPT * 3)[:n], 20) for n in (47, 44, 40)]
    finish(batcher)
    for text, n in zip(texts, (2, 5, 9), strict=True):
        assert len(text.tokens) == n
        assert text.chosen == text.expected(alone)
