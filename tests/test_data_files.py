"""Batches by number, prefetching, and readers of token, IDX, NPZ and image files."""

from __future__ import annotations

import gc
import gzip
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eggpu import data
from eggpu.data import DataError


def pairs(count: int = 10) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(count, dtype=np.float32), np.arange(count, dtype=np.int32) * 10


def test_an_epoch_has_every_example_once_in_an_order_of_its_own() -> None:
    batches = data.Batches(pairs(), 2, seed=3)
    assert len(batches) == 5
    epochs = [[int(v) for i in range(5) for v in batches[5 * e + i][0]] for e in range(3)]
    assert all(sorted(e) == list(range(10)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    x, y = batches[7]
    np.testing.assert_array_equal(y, x * 10)


def test_batch_i_is_the_same_in_any_order_and_differs_by_seed() -> None:
    there, back = data.Batches(pairs(), 3, seed=1), data.Batches(pairs(), 3, seed=1)
    forward = [there[i][0].tolist() for i in range(9)]
    backward = [back[i][0].tolist() for i in reversed(range(9))][::-1]
    assert forward == backward
    other = data.Batches(pairs(), 3, seed=2)
    assert forward != [other[i][0].tolist() for i in range(9)]
    plain = data.Batches(pairs(), 3, shuffle=False)
    assert [plain[i][0].tolist() for i in (0, 2, 3)] == [[0, 1, 2], [6, 7, 8], [0, 1, 2]]


def test_changes_are_random_by_seed_and_number() -> None:
    def noisy(batch: Any, generator: np.random.Generator) -> Any:
        return batch[0] + generator.standard_normal(len(batch[0])), batch[1]

    one, two = (data.Batches(pairs(), 5, seed=4, change=noisy) for _ in range(2))
    np.testing.assert_array_equal(one[3][0], two[3][0])
    assert (one[1][0] != one[1][1] / 10).all()


def test_in_order_leaves_nothing_out() -> None:
    assert [x.tolist() for x, _ in data.in_order(pairs(5), 2)] == [[0, 1], [2, 3], [4]]


def test_token_files_are_mapped(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 300, 500)
    path = data.write_tokens(tmp_path / "tokens.npy", ids, 300)
    assert path.stat().st_size < 1200  # two bytes each
    tokens = data.read_tokens(path)
    assert isinstance(tokens, np.memmap)
    batches = data.TokenBatches(tokens, 4, 16, seed=2)
    assert len(batches) == 500 // 64
    x, y = batches[5]
    assert (x.shape, x.dtype) == ((4, 16), np.int32)
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    np.testing.assert_array_equal(x, data.TokenBatches(tokens, 4, 16, seed=2)[5][0])
    text = "".join(chr(i + 200) for i in ids)
    assert "".join(chr(i + 200) for i in x[0]) in text
    ids.astype(np.uint16).tofile(tmp_path / "plain.bin")
    np.testing.assert_array_equal(data.read_tokens(tmp_path / "plain.bin"), ids)


@pytest.mark.parametrize("packed", [False, True])
def test_idx(tmp_path: Path, packed: bool) -> None:
    x = np.random.default_rng(0).integers(0, 256, (3, 4, 5)).astype(np.uint8)
    raw = b"\0\0\x08\x03" + struct.pack(">3I", 3, 4, 5) + x.tobytes()
    path = tmp_path / "images-idx3-ubyte"
    path.write_bytes(gzip.compress(raw) if packed else raw)
    np.testing.assert_array_equal(data.read_idx(path), x)
    numbers = np.array([1, -2, 70000], ">i4")
    (tmp_path / "i").write_bytes(b"\0\0\x0c\x01" + struct.pack(">I", 3) + numbers.tobytes())
    found = data.read_idx(tmp_path / "i")
    assert found.tolist() == [1, -2, 70000]
    assert found.dtype.isnative


def test_npz(tmp_path: Path) -> None:
    x, y = pairs()
    np.savez(tmp_path / "a.npz", x=x, y=y)
    found = data.read_npz(tmp_path / "a.npz", "y", "x")
    np.testing.assert_array_equal(found[0], y)
    assert len(data.read_npz(tmp_path / "a.npz")) == 2
    with pytest.raises(DataError, match=r"a\.npz has no z; it has x, y"):
        data.read_npz(tmp_path / "a.npz", "x", "z")


def picture(path: Path, pixels: np.ndarray) -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(pixels).save(path)


def test_image_folders(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (6, 4, 3)).astype(np.uint8) for _ in range(3)]
    for name, p in zip(("dog/b.png", "cat/z.png", "dog/a.png"), pixels, strict=True):
        picture(tmp_path / name, p)
    (tmp_path / "cat" / "notes.txt").write_text("no picture")
    folder = data.ImageFolder(tmp_path)
    assert folder.classes == ["cat", "dog"]
    x, y = folder.rows(np.arange(3))
    assert (x.shape, x.dtype) == ((3, 3, 6, 4), np.float32)
    assert y.tolist() == [0, 1, 1]
    expected = np.stack([pixels[i] for i in (1, 2, 0)]).transpose(0, 3, 1, 2) / 255
    np.testing.assert_allclose(x, expected, rtol=1e-6)
    assert data.ImageFolder(tmp_path, (8, 5), gray=True).rows(np.array([1]))[0].shape == (
        1, 1, 8, 5,
    )  # fmt: skip
    assert len(data.Batches(folder, 2)) == 1
    picture(tmp_path / "dog" / "c.png", pixels[0][:5])
    with pytest.raises(DataError, match=r"c\.png needs \[3, 6, 4\] like the others"):
        data.ImageFolder(tmp_path).rows(np.arange(4))


@pytest.mark.parametrize(
    ("content", "read", "message"),
    [
        (b"text", data.read_idx, "is no IDX file"),
        (b"\0\0\x08\x01\0\0\0\x05abc", data.read_idx, "needs 13 bytes for [5], has 11"),
        (b"\x1f\x8bnot gzip", data.read_idx, "is damaged"),
        (b"text", data.read_npz, "is no .npz file"),
        (b"abc", data.read_tokens, "holds no tokens"),
    ],
)
def test_damaged_files(
    tmp_path: Path, content: bytes, read: Callable[[Path], Any], message: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read(path)
    assert message in str(error.value)
    with pytest.raises(DataError, match="does not exist"):
        read(tmp_path / "missing")


def test_prefetching_gives_the_same_batches() -> None:
    batches = data.Batches(pairs(), 3, seed=1)
    with data.Prefetch(data.Batches(pairs(), 3, seed=1), 2, 8) as ahead:
        found = [b[0].tolist() for b in ahead]
    assert found == [batches[i][0].tolist() for i in range(2, 8)]


class Failing:
    """Counts what was asked for; batch 3 is broken."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> Any:
        self.asked += 1
        if i == 3:
            raise DataError("batch 3 is broken")
        return (np.array([i]),)


def test_errors_come_where_their_batch_would_and_the_thread_ends() -> None:
    before = threading.active_count()
    ahead = data.Prefetch(Failing())
    assert [int(next(ahead)[0][0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="batch 3 is broken"):
        next(ahead)
    assert threading.active_count() == before
    source = Failing()
    with data.Prefetch(source, depth=1) as early:
        next(early)
    assert source.asked <= 3  # given, waiting, and at hand
    assert threading.active_count() == before
    assert list(early) == []


class Noted:
    """Sets an event for each batch that is asked for; batch `slow` waits to be let through."""

    def __init__(self, slow: int = -1) -> None:
        self.slow, self.let = slow, threading.Event()
        self.asked = [threading.Event() for _ in range(50)]

    def __getitem__(self, i: int) -> Any:
        self.asked[i].set()
        if i == self.slow:
            assert self.let.wait(30)
        return (np.array([i]),)


def test_the_next_batches_are_made_while_one_is_worked_on() -> None:
    source = Noted()
    with data.Prefetch(source, depth=2) as ahead:
        next(ahead)
        for i in (1, 2, 3):  # two that wait, and one that has no place yet
            assert source.asked[i].wait(30)
        assert not source.asked[4].wait(0.05)
        next(ahead)
        assert source.asked[4].wait(30)


def test_reading_goes_on_exactly_at_a_position() -> None:
    source = data.Batches(pairs(), 3, seed=1, change=lambda b, g: (b[0] + g.random(), b[1]))
    with data.Prefetch(source, 1, 12) as whole:
        want = [b[0].tolist() for b in whole]
    with data.Prefetch(source, 1, 12) as first:
        found = [next(first)[0].tolist() for _ in range(4)]
    assert first.position == 5
    with data.Prefetch(source, first.position, 12) as rest:
        found += [b[0].tolist() for b in rest]
    assert (found, rest.position) == (want, 12)


def test_a_reader_that_waits_is_let_go_when_another_thread_closes() -> None:
    source = Noted(slow=0)
    ahead, got = data.Prefetch(source), []
    reader = threading.Thread(target=lambda: got.extend(ahead))
    reader.start()
    assert source.asked[0].wait(30)
    closer = threading.Thread(target=ahead.close)
    closer.start()
    source.let.set()
    for thread in (closer, reader):
        thread.join(30)
        assert not thread.is_alive()
    ahead.close()  # once more does nothing
    assert len(got) <= 1


def test_the_thread_ends_when_nobody_can_read_from_it_any_more() -> None:
    ahead = data.Prefetch(Noted())
    next(ahead)
    thread = ahead._thread
    del ahead
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


LOOP = """
import contextlib, signal, sys, time
from eggpu import data

signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored

class Source:
    def __getitem__(self, i):
        if i == 8:
            {at}
        return (i,)

with {way} as ahead:
    for (i,) in ahead:
        print(i, flush=True)
        if i == 5:
            {then}
"""


@pytest.mark.parametrize(
    ("at", "then", "status"),
    [
        ("pass", "break", 0),
        ("time.sleep(100)", "sys.exit(7)", 7),
        ("raise ValueError('batch 8')", "pass", 1),
    ],
)
def test_python_ends_at_once_with_a_thread_at_work(at: str, then: str, status: int) -> None:
    left = "contextlib.nullcontext(data.Prefetch(Source(), depth=1))"
    script = LOOP.format(at=at, then=then, way=left)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == status, done.stderr
    lines = done.stderr.splitlines()
    assert lines[-1:] == (["ValueError: batch 8"] if status == 1 else [])


@pytest.mark.parametrize("at", ["time.sleep(100)", "pass"])
def test_ctrl_c_ends_the_wait_for_a_batch(at: str) -> None:
    then = "pass" if at != "pass" else "time.sleep(100)"
    script = LOOP.format(at=at, then=then, way="data.Prefetch(Source(), depth=1)")
    work = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert work.stdout is not None
    while (line := work.stdout.readline().strip()) != ("5" if at == "pass" else "7"):
        assert line
    time.sleep(0.2)
    work.send_signal(signal.SIGINT)
    _, error = work.communicate(timeout=20)
    assert work.returncode == -signal.SIGINT, error
    assert error.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: data.Batches(pairs(4), 5), "1 to 4 examples, got 5"),
        (lambda: data.Batches((np.zeros(3), np.zeros(4)), 1), "arrays of one length, got 3, 4"),
        (lambda: data.TokenBatches(np.zeros(8, np.int32), 1, 8), "needs 9 tokens, got 8"),
        (lambda: data.write_tokens("unused", [5], 5), "from 0 to 4, got 5 to 5"),
        (lambda: data.Prefetch(Failing(), depth=0), "a depth of 1 or more batches, got 0"),
        (lambda: data.ImageFolder("missing"), "image folder missing does not exist"),
    ],
)
def test_what_does_not_fit_is_told(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        make()
    assert message in str(error.value)
