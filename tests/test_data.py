"""Text and digits: vocabularies, splits, batches, entropy, and errors that say what is missing."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from eggpu import data
from eggpu.data import DataError, Vocabulary


def test_a_vocabulary_keeps_the_frequent_characters() -> None:
    vocabulary = Vocabulary.of("aaaabbbccd", limit=3)
    assert (vocabulary.characters, vocabulary.unknown, vocabulary.size) == ("abc", 3, 4)
    ids = vocabulary.encode("dcbaé😀")
    assert ids.dtype == np.int32
    assert ids.tolist() == [3, 2, 1, 0, 3, 3]
    assert vocabulary.decode(ids) == "\ufffdcba\ufffd\ufffd"


def test_equally_frequent_characters_go_by_code_point() -> None:
    assert Vocabulary.of("zyx\n", limit=2).characters == "\nx"


def test_text_survives_encoding() -> None:
    text = "naïve\n\ttext 😀 \ud800"
    vocabulary = Vocabulary.of(text)
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert Vocabulary("").encode("ab").tolist() == [0, 0]


def test_a_corpus_of_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "more" / ".git").mkdir(parents=True)
    (tmp_path / "one.txt").write_text("0123456789")
    (tmp_path / "more" / "b.txt").write_bytes(b"\xffb\r\n")
    (tmp_path / "more" / "a.txt").write_text("a")
    (tmp_path / "more" / "image").write_bytes(b"x\0x")
    (tmp_path / "more" / ".git" / "c").write_text("hidden")
    corpus = data.corpus([tmp_path / "one.txt", tmp_path / "more"])
    decode = corpus.vocabulary.decode
    assert decode(corpus.train) + decode(corpus.valid) == "0123456789\na\n\ufffdb\n"
    assert len(corpus.valid) == 2
    assert data.corpus([tmp_path / "one.txt"], limit=4).train.tolist() == [0, 1, 2]


def test_a_given_vocabulary_is_kept(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("abc" * 10)
    corpus = data.corpus([tmp_path / "one.txt"], vocabulary=Vocabulary("bx"))
    assert corpus.train[:3].tolist() == [2, 0, 2]


def test_the_standard_library_is_the_default() -> None:
    corpus = data.corpus(limit=50_000)
    assert len(corpus.train) == 45_000
    assert len(corpus.valid) == 5_000
    assert "import" in corpus.vocabulary.decode(corpus.train)
    assert 2.5 < corpus.unigram_entropy < 4
    assert [f.name for f in data.standard_library()][:2] == ["__future__.py", "__hello__.py"]


def test_unigram_entropy(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("ab" * 9 + "aa")
    corpus = data.corpus([tmp_path / "one.txt"])
    # counts with one added: a 10, b 10, unknown 1
    assert corpus.unigram_entropy == pytest.approx(math.log(21 / 10))


def test_batches_are_windows_and_what_follows() -> None:
    tokens = np.arange(100, dtype=np.int32)
    x, y = data.batch(tokens, 50, 8, np.random.default_rng(0))
    assert x.shape == y.shape == (50, 8)
    assert x.dtype == y.dtype == np.int32
    np.testing.assert_array_equal(y, x + 1)
    np.testing.assert_array_equal(x, x[:, :1] + np.arange(8))
    again, _ = data.batch(tokens, 50, 8, np.random.default_rng(0))
    np.testing.assert_array_equal(x, again)
    x, y = data.batch(tokens[:9], 20, 8, np.random.default_rng(0))
    assert (x[:, 0] == 0).all()
    assert (y[:, -1] == 8).all()


def test_even_batches_reach_both_ends() -> None:
    tokens = np.arange(100, dtype=np.int32)
    batches = data.even_batches(tokens, 4, 8, 3)
    assert len(batches) == 3
    assert batches[0][0][0, 0] == 0
    assert batches[-1][1][-1, -1] == 99


def test_missing_empty_and_short_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"text .*none\.txt does not exist"):
        data.corpus([tmp_path / "none.txt"])
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"no text in .*empty\.txt"):
        data.corpus([tmp_path / "empty.txt"])
    with pytest.raises(DataError, match=r"a context of 8 needs at least 9 characters .* got 8"):
        data.batch(np.zeros(8, np.int32), 1, 8, np.random.default_rng(0))
    with pytest.raises(DataError, match="got 3"):
        data.even_batches(np.zeros(3, np.int32), 1, 8, 1)


def test_digits() -> None:
    digits = data.digits(seed=3)
    assert digits.train_x.shape == (1437, 64)
    assert digits.valid_x.shape == (360, 64)
    assert digits.train_x.dtype == np.float32
    assert digits.train_y.dtype == np.int32
    assert (digits.train_x.min(), digits.train_x.max()) == (0, 1)
    assert set(digits.valid_y.tolist()) == set(range(10))
    np.testing.assert_array_equal(digits.train_y, data.digits(seed=3).train_y)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'eggpu\[digits\]'"):
        data.digits()
