"""Token ids to text as they come: whole characters only, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from eggpu.generate.tokenizer import Tokenizer

_PARTIAL = "\ufffd"  # what bytes decode to that are no whole character yet
_LONGEST = 6  # tokens that one character may need


class TextStream:
    """The text of tokens, given out as soon as it is certain.

    What may be the beginning of one of the strings `stop` is held back; once one is complete,
    `stopped` is true and nothing from it on is given out.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(s for s in stop if s)
        self.stopped = False
        self._ids: list[int] = []
        self._from = self._read = 0  # ids from which text is decoded, and which are in `_held`
        self._held = ""

    def push(self, token: int) -> str:
        """What a further token makes certain."""
        self._ids.append(token)
        new = self._new()
        if new.endswith(_PARTIAL) and len(self._ids) - self._read < _LONGEST:
            return ""
        self._from, self._read = self._read, len(self._ids)
        return self._ready(new)

    def rest(self) -> str:
        """What is held back, once no further token comes."""
        if self.stopped:
            return ""
        ready = self._ready(self._new())
        self._read = len(self._ids)
        held, self._held = self._held, ""
        return ready if self.stopped else ready + held

    def _new(self) -> str:
        """The text of the ids that were not read. It depends on a few before them: decoders treat
        the first of a text in their own way."""
        before = self.tokenizer.decode(self._ids[self._from : self._read])
        return self.tokenizer.decode(self._ids[self._from :])[len(before) :]

    def _ready(self, new: str) -> str:
        text = self._held + new
        at = min((k for s in self.stop if (k := text.find(s)) >= 0), default=-1)
        if at >= 0:
            self.stopped, self._held = True, ""
            return text[:at]
        count = len(text) - held_back(text, self.stop)
        self._held = text[count:]
        return text[:count]


def held_back(text: str, stop: Sequence[str]) -> int:
    """Characters at the end that may be the beginning of a stop string."""
    most = 0
    for s in stop:
        for n in range(min(len(s) - 1, len(text)), most, -1):
            if text.endswith(s[:n]):
                most = n
                break
    return most
