"""Continuous batching: texts come and go at any step of one decode plan.

Each text has a slot, a row of the cache. Prompts go through bucketed plans, a chunk between two
steps, so that a long prompt never holds up the others for long.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import eggpu as eg
from eggpu.compiler.errors import EggpuError
from eggpu.compiler.tracing import Array, array
from eggpu.generate.generator import Decoder, GenerationError, last
from eggpu.generate.sampling import Knobs, Sampling, choose, knobs
from eggpu.models.cache import Cache, Place, empty
from eggpu.session import Compiled

BUCKETS = (32, 256)  # tokens of the plans for prompts


class BusyError(EggpuError):
    """No further text is taken: as many as may wait are waiting."""


@dataclass(frozen=True, slots=True)
class Token:
    """A chosen token. `top` are the likeliest ones with their log-probabilities, when asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Continuation:
    """A text that is being continued.

    `take` gets each token and says why the text ends with it, or ""; `end` gets the reason once:
    what `take` said, "length", "cancel" or "error: ...". Both are called by the thread that steps.
    """

    ids: tuple[int, ...]
    sampling: Sampling
    most: int  # tokens
    take: Callable[[Token], str]
    end: Callable[[str], None]
    top: int = 0  # likeliest tokens to tell
    taken: int = 0  # of `ids`, in the cache
    count: int = 0  # tokens chosen
    canceled: bool = False

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature == 0 and self.sampling.repetition_penalty == 1


@dataclass(frozen=True)
class Slots:
    """All that goes from step to step, on the device."""

    cache: Cache  # a row a slot
    first: Array  # i32 (slots,): positions in the cache
    tokens: Array  # i32 (slots, 1): chosen and not yet written
    logits: Array  # f32 (slots, vocab) that they were chosen by


def decode(
    model: Decoder, slots: Slots, options: Knobs | None, active: Array
) -> tuple[Array, Array, Slots, Knobs | None]:
    """Write the token of every slot and choose the next, with its log-probability; slots that are
    not `active` (1, else 0) stay as they are. Without options all are greedy."""
    hidden, cache = model.step(slots.tokens, slots.cache, Place(slots.first))
    first, logits = slots.first + active, model.logits(hidden[:, 0])
    token, logprob, after = choose(logits, _greedy() if options is None else options, first)
    assert logprob is not None
    new = Slots(cache, first, token.reshape((-1, 1)), logits)
    return token, logprob, new, None if options is None else after


def _greedy() -> Knobs:
    return Knobs(None, None, None, None, None, None, None, mixed=False, logprobs=True)


def prefill(
    model: Decoder, slots: Slots, options: Knobs, row: Knobs, tokens: Array, count: Array,
    place: Place,
) -> tuple[Array, Array, Slots, Knobs]:  # fmt: skip
    """Write the first `count` of tokens (1, t) into a slot and choose the token after them, with
    its log-probability. The slot then has the options of `row`."""
    hidden, cache = model.step(tokens, slots.cache, place)
    first, logits = place.first + count, model.logits(last(hidden, count))
    token, logprob, row = choose(logits, row, first)
    assert logprob is not None and place.slot is not None  # noqa: PT018
    here = eg.arange(slots.first.shape[0]) == place.slot

    def put(held: Array, new: Array) -> Array:
        return eg.where(here.reshape((-1,) + (1,) * (len(held.shape) - 1)), new, held)

    after = Slots(
        cache, put(slots.first, first), put(slots.tokens, token.reshape((1, 1))),
        put(slots.logits, logits),
    )  # fmt: skip
    return token, logprob, after, eg.tree_map(put, options, row)


@dataclass(frozen=True, slots=True)
class _Step:
    """A submitted step, and the texts that it continues by their slots."""

    texts: dict[int, Continuation]
    token: Array
    logprob: Array


class Batcher:
    """Continues up to `slots` texts of `context` tokens at once; others wait, up to `waiting`.

    `submit` and `cancel` may be called from any thread, `step` from one. All programs are compiled
    by `warm`: one a size of `sizes`, and two for steps (all greedy, and any options). The device is
    at the next step while a step's tokens are taken, unless a text asks for log-probabilities.
    """

    def __init__(
        self, model: Decoder, *, slots: int = 4, context: int | None = None, waiting: int = 64,
        cache_dtype: str = "f32", sizes: Sequence[int] = BUCKETS,
        most_bytes: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        s = model.settings
        if slots < 1:
            raise GenerationError(f"needs at least 1 slot, got {slots}")
        self.model, self.cache_dtype, self.most_waiting = model, cache_dtype, waiting
        self.context = min(context or s.context, s.context)
        self.most_bytes = most_bytes or eg.device().target.max_binding_bytes
        self.sizes = tuple(sorted({min(n, self.context) for n in sizes}))
        self._decode: Compiled = eg.compile(
            decode, donate=("slots", "options"), name="decode", fetch=0, **options
        )
        self._prefill: Compiled = eg.compile(
            prefill, donate=("slots", "options"), name="prefill", **options
        )
        self._slots: list[Continuation | None] = [None] * slots
        self._waiting: deque[Continuation] = deque()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # told when there is something to do
        self._active: dict[tuple[bool, ...], Array] = {}
        self._ahead: _Step | None = None  # submitted, its tokens not read
        self._reset()

    def _reset(self) -> None:
        self._broken, self._ahead = False, None
        s, n = self.model.settings, len(self._slots)
        cache = empty(
            len(s.layers), n, s.kv_heads, self.context, s.head_size, self.cache_dtype,
            most_bytes=self.most_bytes, slack=self.sizes[-1],
        )  # fmt: skip
        self._state = Slots(
            cache, array(np.zeros(n, np.int32)), array(np.zeros((n, 1), np.int32)),
            array(np.zeros((n, s.vocab), np.float32)),
        )  # fmt: skip
        self._options = knobs(Sampling(), [[]] * n, s.vocab, every=True)

    @property
    def programs(self) -> int:
        """Compiled programs so far."""
        return sum(c.programs for c in (self._decode, self._prefill))

    @property
    def slots(self) -> int:
        """Texts that are continued at once at most."""
        return len(self._slots)

    @property
    def running(self) -> int:
        """Texts in slots."""
        return sum(s is not None for s in self._slots)

    @property
    def waiting(self) -> int:
        """Texts that wait for a slot."""
        return len(self._waiting)

    def wait(self, seconds: float) -> None:
        """Wait until there is something to do, or `wake` is called, at most so long."""
        with self._work:
            if not self._waiting and not self.running:
                self._work.wait(seconds)

    def wake(self) -> None:
        """End a `wait`."""
        with self._work:
            self._work.notify_all()

    def warm(self) -> None:
        """Compile all programs, by running them on slots that nobody has."""
        for size in self.sizes:
            self._run_prefill(0, 0, [0] * size, size, Sampling(), [0])
        for plain in (True, False):
            self._run_decode([False] * len(self._slots), plain)

    def submit(
        self, ids: Sequence[int], take: Callable[[Token], str], end: Callable[[str], None], *,
        sampling: Sampling | None = None, most: int = 256, top: int = 0,
    ) -> Continuation:  # fmt: skip
        """Queue a prompt. Raises GenerationError for what can never be run, BusyError when as many
        as may wait are waiting."""
        vocab = self.model.settings.vocab
        if not ids:
            raise GenerationError("a prompt needs at least one token")
        if len(ids) > self.context:
            raise GenerationError(f"the prompt has {len(ids)} tokens, the context {self.context}")
        if not all(0 <= t < vocab for t in ids):
            raise GenerationError(f"a token is a number from 0 to {vocab - 1}")
        if most < 1:
            raise GenerationError(f"needs at least 1 token to generate, got {most}")
        sequence = Continuation(
            tuple(ids), sampling or Sampling(), most, take, end, min(top, vocab)
        )
        with self._lock:
            if len(self._waiting) >= self.most_waiting:
                raise BusyError(f"{len(self._waiting)} texts are waiting; try again later")
            self._waiting.append(sequence)
            self._work.notify_all()
        return sequence

    def cancel(self, sequence: Continuation) -> None:
        """End a text before its next token; one that has ended stays as it is."""
        with self._lock:
            sequence.canceled = True
            self._work.notify_all()

    def step(self) -> bool:
        """Take in a chunk of a prompt, then choose a token of every text whose prompt is taken in.
        False when there is nothing to do."""
        if self._broken:
            self._reset()
        self._admit()
        prompts = [s for s in self._slots if s is not None and s.taken < len(s.ids)]
        if prompts:
            self._chunk(prompts[0])
        running = self._running()
        if running:
            self._tokens(running)
        else:
            self._ahead = None  # all its texts have ended
        return bool(prompts or running)

    def fail(self, message: str) -> None:
        """End every text, those that wait too; the next step begins with an empty cache."""
        with self._lock:
            ended = [s for s in self._slots if s is not None] + list(self._waiting)
            self._waiting.clear()
            self._slots = [None] * len(self._slots)
            self._broken = True
        for sequence in ended:
            sequence.end(f"error: {message}")

    def _admit(self) -> None:
        """Let go of what was canceled, and give free slots to those that waited longest."""
        ended: list[Continuation] = []
        with self._lock:
            for k, sequence in enumerate(self._slots):
                if sequence is not None and sequence.canceled:
                    ended.append(sequence)
                    self._slots[k] = None
            ended += [s for s in self._waiting if s.canceled]
            self._waiting = deque(s for s in self._waiting if not s.canceled)
            for k, held in enumerate(self._slots):
                if held is None and self._waiting:
                    self._slots[k] = self._waiting.popleft()
        for sequence in ended:
            sequence.end("cancel")

    def _chunk(self, sequence: Continuation) -> None:
        slot = self._slots.index(sequence)
        left = len(sequence.ids) - sequence.taken
        size = min((n for n in self.sizes if n >= left), default=self.sizes[-1])
        # a chunk that would pass the context's end begins earlier, and writes the same again
        at = min(sequence.taken, self.context - size)
        ids = sequence.ids[at : at + size]
        token, logprob = self._run_prefill(slot, at, ids, size, sequence.sampling, sequence.ids)
        sequence.taken = at + len(ids)
        if sequence.taken == len(sequence.ids):
            self._deliver(slot, token, logprob, 0)

    def _running(self) -> dict[int, Continuation]:
        """The texts by slot whose prompts are taken in."""
        held = enumerate(self._slots)
        return {k: s for k, s in held if s is not None and s.taken == len(s.ids)}

    def _tokens(self, running: dict[int, Continuation]) -> None:
        """A token for every running text, with the next step under way; for those that were when it
        was submitted if it was under way already."""
        step, self._ahead = self._ahead or self._submit(running), None
        here = {k: s for k, s in step.texts.items() if running.get(k) is s}
        if not here:  # they ended, and others came
            step, here = self._submit(running), running
        after = {k: s for k, s in running.items() if not (k in here and self._full(s, 1))}
        if after and not any(s.sampling.logprobs for s in running.values()):
            self._ahead = self._submit(after)
        for slot in here:
            self._deliver(slot, step.token, step.logprob, slot)

    def _submit(self, texts: dict[int, Continuation]) -> _Step:
        active = [k in texts for k in range(len(self._slots))]
        return _Step(texts, *self._run_decode(active, all(s.greedy for s in texts.values())))

    def _full(self, sequence: Continuation, more: int) -> bool:
        """Whether a text ends when it has so many more tokens, whatever they are."""
        count = sequence.count + more
        return count == sequence.most or len(sequence.ids) + count > self.context

    def _deliver(self, slot: int, token: Array, logprob: Array, row: int) -> None:
        """Hand the token of a slot, a row of `token`, to its text."""
        sequence = self._slots[slot]
        assert sequence is not None
        told = sequence.sampling.logprobs
        value = float(logprob.numpy()[row]) if told else None
        top = self._top(slot, sequence.top) if told and sequence.top else ()
        sequence.count += 1
        reason = sequence.take(Token(int(token.numpy()[row]), value, top))
        if not reason and self._full(sequence, 0):
            reason = "length"
        if reason:
            with self._lock:
                self._slots[slot] = None
            sequence.end(reason)

    def _top(self, slot: int, count: int) -> tuple[tuple[int, float], ...]:
        """The likeliest tokens of a slot; its logits are read back for this."""
        x = self._state.logits.numpy()[slot].astype(np.float64)
        x -= x.max()
        x -= np.log(np.exp(x).sum())
        likeliest = np.argsort(-x, kind="stable")[:count]
        return tuple((int(k), float(x[k])) for k in likeliest)

    def _run_prefill(
        self, slot: int, at: int, ids: Sequence[int], size: int, sampling: Sampling,
        text: Sequence[int],
    ) -> tuple[Array, Array]:  # fmt: skip
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(ids)] = ids
        vocab = self.model.settings.vocab
        row = knobs(sampling, [text], vocab, every=True)
        place = Place(array(np.array([at], np.int32)), array(np.int32(slot)))
        token, logprob, self._state, self._options = self._prefill(
            self.model, self._state, self._options, row, array(tokens),
            array(np.array([len(ids)], np.int32)), place,
        )  # fmt: skip
        return token, logprob

    def _run_decode(self, running: Sequence[bool], plain: bool) -> tuple[Array, Array]:
        key = tuple(running)
        if key not in self._active:
            self._active[key] = array(np.array(key, np.int32))
        options = None if plain else self._options
        token, logprob, self._state, after = self._decode(
            self.model, self._state, options, self._active[key]
        )
        self._options = self._options if after is None else after
        return token, logprob
