"""Batches made on a thread while the device works on earlier ones."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Protocol

from eggpu.data.batches import Batch
from eggpu.data.errors import DataError

_LOOK = 0.5  # seconds after which a thread that nobody reads from looks whether it is wanted


class Numbered(Protocol):
    """Batches by number; every Source is one."""

    def __getitem__(self, i: int, /) -> Batch: ...


class Prefetch:
    """Batches `start`, `start + 1`, ... up to `stop` of a source, `depth` of them made ahead.

    They come in their order, whatever the thread is at. `position` is the number of the next one:
    as `start` of another Prefetch it goes on exactly there. An error of the source is raised where
    its batch would have come. Close it (or leave the `with` block) to end the thread, which also
    ends when nothing refers to this object any more, and with Python.
    """

    def __init__(
        self, source: Numbered, start: int = 0, stop: int | None = None, depth: int = 2
    ) -> None:
        if depth < 1:
            raise DataError(f"reading ahead needs a depth of 1 or more batches, got {depth}")
        self.position = start
        self._made: queue.Queue[Any] = queue.Queue(depth)
        self._closing = threading.Event()
        work = _make, source, start, stop, self._made, self._closing  # not self: it may be dropped
        self._thread = threading.Thread(
            target=copy_context().run, args=work, name="eggpu-prefetch", daemon=True
        )
        weakref.finalize(self, self._closing.set)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._closing.is_set():
            raise StopIteration
        made = self._made.get()
        if isinstance(made, BaseException):
            self.close()
            raise made
        self.position += 1
        return made

    def close(self) -> None:
        """End the thread, after the batch that it is at; one that waits for a batch gets none."""
        self._closing.set()
        self._drop()
        self._thread.join()
        self._drop()
        self._made.put_nowait(StopIteration())

    def _drop(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._made.get_nowait()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is KeyboardInterrupt:  # at once: the thread ends by itself after its batch
            self._closing.set()
        else:
            self.close()


def _make(
    source: Numbered, i: int, stop: int | None, made: queue.Queue[Any], closing: threading.Event
) -> None:
    """What the thread does."""
    while not closing.is_set() and (stop is None or i < stop):
        try:
            batch: Any = source[i]
        except BaseException as error:  # noqa: BLE001  raised again by the reader
            _offer(error, made, closing)
            return
        _offer(batch, made, closing)
        i += 1
    _offer(StopIteration(), made, closing)


def _offer(one: Any, made: queue.Queue[Any], closing: threading.Event) -> None:
    while not closing.is_set():
        with suppress(queue.Full):
            made.put(one, timeout=_LOOK)
            return
