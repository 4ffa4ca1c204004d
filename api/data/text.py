"""Text to train on: characters of files as ids, and windows of them."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eggpu.data.errors import DataError

LIBRARY = 3_000_000  # characters taken from the standard library
CHARACTERS = 127  # in a vocabulary, besides the unknown one
UNKNOWN = "\ufffd"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Characters by code point; ids are positions, `unknown` is the id of all others."""

    characters: str

    @staticmethod
    def of(text: str, limit: int = CHARACTERS) -> Vocabulary:
        """The `limit` most frequent characters of a text (of equally frequent ones the lowest)."""
        ranked = sorted(Counter(text).items(), key=lambda item: (-item[1], item[0]))
        return Vocabulary("".join(sorted(c for c, _ in ranked[:limit])))

    @property
    def unknown(self) -> int:
        """The id of every character that is not in the vocabulary."""
        return len(self.characters)

    @property
    def size(self) -> int:
        """The number of ids."""
        return len(self.characters) + 1

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, i32."""
        known, codes = _codes(self.characters), _codes(text)
        at = np.searchsorted(known, codes)
        hit = known[np.minimum(at, len(known) - 1)] == codes if len(known) else np.zeros(len(codes))
        return np.where(hit, at, self.unknown).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; the replacement character for unknown ones."""
        shown = self.characters + UNKNOWN
        return "".join(shown[int(i)] for i in ids)


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as ids: the first nine tenths to train on, the last tenth to validate."""

    source: str
    vocabulary: Vocabulary
    train: np.ndarray
    valid: np.ndarray

    @property
    def unigram_entropy(self) -> float:
        """Nats a character that validation costs a model which knows frequencies alone.

        The cross-entropy of the validation text under the frequencies of the training text, with
        one added to each count.
        """
        counts = np.bincount(self.train, minlength=self.vocabulary.size) + 1.0
        return float(-np.log(counts / counts.sum())[self.valid].mean())


def corpus(
    paths: Sequence[str | Path] = (),
    *,
    limit: int | None = None,
    vocabulary: Vocabulary | None = None,
) -> Corpus:
    """The first `limit` characters of files and folders, or of Python's own library.

    Without a limit all of them, of the library the first LIBRARY. A folder gives its files in the
    order of their names without hidden and binary ones. Text is UTF-8 with errors replaced.
    Raises DataError when a path is missing or there is no text.
    """
    files = [f for p in paths for f in _files(Path(p))] if paths else standard_library()
    text = _read(files, (limit or sys.maxsize) if paths else (limit or LIBRARY))
    source = ", ".join(map(str, paths)) or "Python's standard library"
    if not text:
        raise DataError(f"no text in {source}")
    vocabulary = vocabulary or Vocabulary.of(text)
    ids = vocabulary.encode(text)
    split = len(ids) * 9 // 10
    return Corpus(source, vocabulary, ids[:split], ids[split:])


def standard_library() -> list[Path]:
    """The top-level modules of Python's standard library, by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise DataError(f"no Python sources in {folder}; name a text file to train on")
    return files


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"text {path} does not exist")
    found = [p for p in sorted(path.rglob("*")) if p.is_file()]
    return [p for p in found if not any(x.startswith(".") for x in p.relative_to(path).parts)]


def _read(files: Sequence[Path], limit: int) -> str:
    parts, size = [], 0
    for file in files:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}") from error
        if b"\0" in data:
            continue
        text = data.decode("utf-8", "replace").replace("\r\n", "\n")
        parts.append(text)
        size += len(text) + 1
        if size > limit:
            break
    return "\n".join(parts)[:limit]


def batch(
    tokens: np.ndarray, size: int, context: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """`size` random windows (size, context) and the tokens that follow each of theirs."""
    _long_enough(tokens, context)
    return _windows(tokens, generator.integers(0, len(tokens) - context, size), context)


def even_batches(
    tokens: np.ndarray, size: int, context: int, count: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """`count` batches of windows spread evenly over the tokens, the same every time."""
    _long_enough(tokens, context)
    starts = np.linspace(0, len(tokens) - context - 1, size * count).astype(np.int64)
    return [_windows(tokens, part, context) for part in starts.reshape(count, size)]


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    at = starts[:, None] + np.arange(context + 1)
    window = tokens[at]
    return np.ascontiguousarray(window[:, :-1]), np.ascontiguousarray(window[:, 1:])


def _long_enough(tokens: np.ndarray, context: int) -> None:
    if len(tokens) <= context:
        raise DataError(
            f"a context of {context} needs at least {context + 1} characters in the training text "
            f"and in the validation text, got {len(tokens)}: give more text or a smaller context"
        )
