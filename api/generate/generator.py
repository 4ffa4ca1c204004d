"""Generation: prompts through bucketed prefill plans, then one plan for all steps.

Of each step only the token is read, 4 bytes, by the submission that chose it. A text that goes on
has its next step submitted before that, since a step takes the token from the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

import eggpu as eg
from eggpu.compiler.errors import EggpuError
from eggpu.compiler.tracing import Array, array
from eggpu.generate.sampling import Knobs, Sampling, choose, knobs, marked
from eggpu.models.cache import Cache, Place, chunk, empty
from eggpu.models.llama import Settings
from eggpu.session import Compiled

Progress = Callable[[int, int], None]  # (tokens of the longest prompt taken in, of all)
SIZES = (1, 16, 64, 256)  # positions of the prefill plans


class GenerationError(EggpuError, ValueError):
    """A prompt cannot be continued: it is empty, too long, or holds unknown tokens."""


class Decoder(Protocol):
    """A language model with a cache."""

    settings: Settings

    def step(self, tokens: Array, cache: Cache, place: Place) -> tuple[Array, Cache]: ...

    def logits(self, hidden: Array) -> Array: ...


@dataclass(frozen=True)
class State:
    """All that goes from step to step, on the device."""

    cache: Cache
    place: Place
    knobs: Knobs


@dataclass(frozen=True)
class Snapshot:
    """A copy of a session's state in device memory, from which others can go on."""

    state: State
    texts: tuple[tuple[int, ...], ...]
    position: np.ndarray
    chosen: Array  # the latest tokens on the device, which no step takes over
    token: np.ndarray
    logprob: np.ndarray | None


def advance(
    model: Decoder, state: State, tokens: Array, count: Array
) -> tuple[Array, Array | None, State]:
    """The token after the first `count[b]` of `tokens` (batch, t) of each row, its log-probability,
    the next state. A count of 0 leaves a row as it is; its token then means nothing."""
    hidden, cache = model.step(tokens, state.cache, state.place)
    first = state.place.first + count
    token, logprob, next_knobs = choose(model.logits(last(hidden, count)), state.knobs, first)
    return token.reshape((-1, 1)), logprob, State(cache, Place(first), next_knobs)


def last(hidden: Array, count: Array) -> Array:
    """Row b's hidden values (batch, width) at position count[b] - 1 of (batch, t, width)."""
    batch, t, width = hidden.shape
    if t == 1:
        return hidden[:, 0]
    rows = hidden.reshape((batch * t, width))
    return eg.take(rows, eg.arange(batch) * t + eg.maximum(count - 1, 0), 0)


class Generator:
    """A model with room for `batch` texts of `context` tokens.

    Plans are compiled on first use, one for each of `sizes` and choice of sampling, and serve every
    later step: positions and options are data. `cache_dtype` is f32, or f16 where the device has
    it. A layer's keys of more than `most_bytes` (0: what the device binds) come in segments.
    """

    def __init__(
        self, model: Decoder, *, context: int | None = None, batch: int = 1,
        cache_dtype: str = "f32", sizes: Sequence[int] = SIZES, most_bytes: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        s = model.settings
        self.model, self.batch, self.cache_dtype = model, batch, cache_dtype
        self.context = min(context or s.context, s.context)
        self.sizes = tuple(sorted(n for n in {1, *sizes} if n <= self.context))
        self.most_bytes = most_bytes or eg.device().target.max_binding_bytes
        self.one = array(np.ones(batch, np.int32))  # tokens of a step
        self.advance: Compiled = eg.compile(
            advance, donate=("state",), name="advance", fetch=(0, 1), **options
        )

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        progress: Progress | None = None,
    ) -> GenerationSession:
        """Take prompts in, one a row of the batch; the first token of each is then chosen, by one
        choice of sampling or one a row. `progress` is called with 0 first, and after each chunk,
        which is then waited for."""
        return GenerationSession(self, prompts, sampling or Sampling(), progress)

    @property
    def programs(self) -> int:
        """Compiled programs so far."""
        return self.advance.programs

    def empty_cache(self) -> Cache:
        """A cache without positions."""
        s = self.model.settings
        return empty(
            len(s.layers), self.batch, s.kv_heads, self.context, s.head_size, self.cache_dtype,
            most_bytes=self.most_bytes, slack=self.sizes[-1],
        )  # fmt: skip


class GenerationSession:
    """Texts being written. `token` are the latest tokens; `next()` writes them and chooses more."""

    def __init__(
        self,
        generator: Generator,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        progress: Progress | None = None,
    ) -> None:
        texts = [list(p) for p in prompts]
        _check(texts, generator)
        self.generator, self.sampling = generator, sampling
        self.texts = texts
        self.logprob: np.ndarray | None = None
        self._ahead: tuple[Array, Array | None] | None = None  # of a step that is under way
        vocab = generator.model.settings.vocab
        self._position = np.zeros(len(texts), np.int32)
        place = Place(array(self._position))
        self._state = State(generator.empty_cache(), place, knobs(sampling, texts, vocab))
        self._run(texts, progress)

    def _run(self, texts: Sequence[Sequence[int]], progress: Progress | None = None) -> None:
        """Write tokens into the cache in chunks; short rows wait, so that all end in the last."""
        left = np.array([len(t) for t in texts], np.int32)
        total = int(left.max())
        if progress is not None:
            progress(0, total)
        while longest := int(left.max()):
            size, count = chunk(longest, self.room, self.generator.sizes)
            after = longest - count
            taken = np.maximum(left - after, 0).astype(np.int32)
            part = np.zeros((len(texts), size), np.int32)
            for row, text, k, n in zip(part, texts, left, taken, strict=True):
                row[:n] = text[len(text) - k : len(text) - k + n]
            left = left - taken
            self._step(array(part), array(taken))
            if after:  # what this chunk chose is not written
                self._saw(self.texts)
            if progress is not None:
                self._chosen.numpy()  # waits for the chunk
                progress(total - after, total)
        self._read()

    def _saw(self, texts: Sequence[Sequence[int]]) -> None:
        """The tokens of these texts, and no others, count as seen."""
        held = self._state.knobs
        if held.seen is not None:
            marks = array(marked(texts, held.seen.shape[-1]))
            self._state = replace(self._state, knobs=replace(held, seen=marks))

    def _step(self, tokens: Array, count: Array) -> None:
        """Write count[b] of tokens (batch, t) into row b."""
        out = self.generator.advance(self.generator.model, self._state, tokens, count)
        self._chosen, self._logprob, self._state = out
        self._position = self._position + count.numpy()

    def _read(self) -> None:
        self.token = self._chosen.numpy()[:, 0]
        self.logprob = None if self._logprob is None else self._logprob.numpy()

    @property
    def position(self) -> np.ndarray:
        """Positions in the cache, a number a row."""
        return self._position

    @property
    def room(self) -> int:
        """Tokens that still fit into every row."""
        return self.generator.context - int(self._position.max())

    def next(self) -> np.ndarray:
        """Write the latest tokens and choose the next ones, (batch,). Raises GenerationError when
        the context is full."""
        return self._next(False)

    def _next(self, ahead: bool) -> np.ndarray:
        """With `ahead`, the step after this one is submitted before this one's token is read."""
        if self.room < 1:
            raise GenerationError(f"the context of {self.generator.context} tokens is full")
        for text, token in zip(self.texts, self.token, strict=True):
            text.append(int(token))
        if self._ahead is None:
            self._step(self._chosen, self.generator.one)
        else:
            (self._chosen, self._logprob), self._ahead = self._ahead, None
            self._position = self._position + self.generator.one.numpy()
        if ahead and self.room > 0:
            self._look_ahead()
        self._read()
        return self.token

    def _look_ahead(self) -> None:
        """Submit the step that writes the latest tokens."""
        if self._ahead is None:
            generator = self.generator
            chosen, logprob, self._state = generator.advance(
                generator.model, self._state, self._chosen, generator.one
            )
            self._ahead = chosen, logprob

    def _settle(self) -> None:
        """Take back a step that was submitted too early: what it wrote lies behind all positions
        that count, so it is never seen."""
        if self._ahead is not None:
            self._ahead = None
            self._state = replace(self._state, place=Place(array(self._position)))
            chosen = zip(self.texts, self.token, strict=True)
            self._saw([[*text, int(token)] for text, token in chosen])

    def feed(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """Write given tokens, at least one a text, instead of the chosen ones."""
        _check([list(t) for t in tokens], self.generator)
        lengths = [len(t) for t in tokens]
        rooms = self.generator.context - self._position
        if (lengths > rooms).any():
            raise GenerationError(f"needs at most {rooms.tolist()} tokens, got {lengths}")
        for text, new in zip(self.texts, tokens, strict=True):
            text.extend(new)
        self._settle()
        self._saw(self.texts)
        self._run(tokens)
        return self.token

    def snapshot(self) -> Snapshot:
        """A copy of the state, from which `restore` goes on any number of times. It is made on the
        device: nothing is read back."""
        self._settle()
        texts = tuple(map(tuple, self.texts))
        return Snapshot(
            eg.copy(self._state), texts, self._position, self._chosen, self.token, self.logprob
        )

    def restore(self, saved: Snapshot) -> None:
        """Go on from a snapshot."""
        self._take(replace(saved, state=eg.copy(saved.state)))

    def _take(self, saved: Snapshot) -> None:
        self._ahead = None
        self._state, self._position, self._chosen = saved.state, saved.position, saved.chosen
        self.texts = [list(t) for t in saved.texts]
        self.token, self.logprob = saved.token, saved.logprob

    def fork(self) -> GenerationSession:
        """Another session that goes on from here; neither changes the other."""
        twin = copy.copy(self)
        twin._take(self.snapshot())
        return twin

    def rewind(self, count: int) -> None:
        """Forget the last `count` positions and choose again from what is before them."""
        shortest = min(map(len, self.texts))
        if not 0 < count < shortest:
            raise GenerationError(f"can go back 1 to {shortest - 1} positions, got {count}")
        self._settle()
        again = [text[-count - 1] for text in self.texts]
        self.texts = [text[:-count] for text in self.texts]
        self._position = self._position - np.int32(count + 1)
        self._state = replace(self._state, place=Place(array(self._position)))
        self._saw(self.texts)
        self._run([[token] for token in again])

    def tokens(self, most: int, stop: Callable[[int], bool] = lambda _: False) -> Iterator[int]:
        """Up to `most` tokens of the first text, until one that `stop` names (not given).

        While one is read and handled the device is at the next already: where a text ends early,
        one step at most was for nothing.
        """
        for number in range(most):
            token, more = int(self.token[0]), number + 1 < most and self.room > 0
            if stop(token):
                return
            if more:
                self._look_ahead()
            yield token
            if not more:
                return
            self._next(number + 2 < most)


def _check(texts: list[list[int]], generator: Generator) -> None:
    if len(texts) != generator.batch:
        raise GenerationError(f"needs {generator.batch} texts, got {len(texts)}")
    vocab = generator.model.settings.vocab
    for text in texts:
        if not text:
            raise GenerationError("a prompt needs at least one token")
        if len(text) > generator.context:
            most = generator.context
            raise GenerationError(f"the prompt has {len(text)} tokens, the context {most}")
        if not all(0 <= t < vocab for t in text):
            raise GenerationError(f"a token is a number from 0 to {vocab - 1}")
