"""Batches made on a thread while the device works on earlier ones."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

from eggpu.data.batches import Batch, Source


class Prefetch:
    """Batches `start`, `start + 1`, ... up to `stop` of a source, `depth` of them made ahead.

    An error of the source is raised where its batch would have come. Close it (or leave the `with`
    block) to end the thread.
    """

    def __init__(
        self, source: Source, start: int = 0, stop: int | None = None, depth: int = 2
    ) -> None:
        self._source, self._start, self._stop = source, start, stop
        self._made: queue.Queue[Any] = queue.Queue(max(1, depth))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._make, name="eggpu-prefetch", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        i = self._start
        while not self._closing.is_set() and (self._stop is None or i < self._stop):
            try:
                made: Any = self._source[i]
            except BaseException as error:  # noqa: BLE001  raised again by the reader
                self._offer(error)
                return
            self._offer(made)
            i += 1
        self._offer(StopIteration())

    def _offer(self, made: Any) -> None:
        while not self._closing.is_set():
            try:
                self._made.put(made, timeout=0.05)
            except queue.Full:
                continue
            return

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._closing.is_set():
            raise StopIteration
        made = self._made.get()
        if isinstance(made, BaseException):
            self.close()
            raise made
        return made

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
