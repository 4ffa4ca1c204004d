"""Batches by number: batch i is the same on every run of one seed, so that training can resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from eggpu.data.errors import DataError
from eggpu.data.text import batch as windows

Batch = tuple[np.ndarray, ...]
Change = Callable[[Batch, np.random.Generator], Batch]


class Source(Protocol):
    """Endless batches; `len` is their number in an epoch."""

    def __getitem__(self, i: int, /) -> Batch: ...
    def __len__(self) -> int: ...


class Rows(Protocol):
    """Examples that are read when they are needed, such as images in files."""

    def rows(self, places: np.ndarray) -> Batch: ...
    def __len__(self) -> int: ...


class ArrayRows:
    """Arrays whose first axes count the same examples."""

    def __init__(self, *arrays: np.ndarray) -> None:
        if not arrays or len({len(a) for a in arrays}) != 1:
            came = ", ".join(str(len(a)) for a in arrays) or "no arrays"
            raise DataError(f"batches need arrays of one length, got {came}")
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays[0])

    def rows(self, places: np.ndarray) -> Batch:
        """The examples at `places`."""
        return tuple(np.ascontiguousarray(a[places]) for a in self.arrays)


class Batches:
    """Batches of `size` examples: each epoch goes through all of them in an order of its own.

    `data` is a tuple of arrays, or Rows. What is left at the end of an epoch is dropped. `change`
    alters a batch at random: it gets the batch, and a generator of the seed and the batch's number.

    >>> batches = Batches((x, y), 64, seed=1)
    >>> inputs, targets = batches[0]
    """

    def __init__(
        self, data: Sequence[np.ndarray] | Rows, size: int, *, seed: int = 0, shuffle: bool = True,
        change: Change | None = None,
    ) -> None:  # fmt: skip
        self.data: Rows = ArrayRows(*data) if isinstance(data, (tuple, list)) else data  # type: ignore[assignment]
        if not 1 <= size <= len(self.data):
            raise DataError(f"a batch needs 1 to {len(self.data)} examples, got {size}")
        self.size, self.seed, self.shuffle, self.change = size, seed, shuffle, change
        self._held = -1, np.arange(len(self.data))  # an epoch and its order

    def __len__(self) -> int:
        return len(self.data) // self.size

    def __getitem__(self, i: int) -> Batch:
        epoch, k = divmod(i, len(self))
        order = self._ordered(epoch)
        batch = self.data.rows(order[k * self.size : (k + 1) * self.size])
        if self.change is None:
            return batch
        return self.change(batch, np.random.default_rng((self.seed, i, 1)))

    def _ordered(self, epoch: int) -> np.ndarray:
        held, order = self._held  # as one: another thread may be in another epoch
        if self.shuffle and held != epoch:
            generator = np.random.default_rng((self.seed, epoch))
            order = generator.permutation(len(self.data))
            self._held = epoch, order
        return order


def in_order(data: Sequence[np.ndarray] | Rows, size: int) -> list[Batch]:
    """All examples once, as a list of batches; the last may be smaller. For evaluation."""
    rows: Rows = ArrayRows(*data) if isinstance(data, (tuple, list)) else data  # type: ignore[assignment]
    count = len(rows)
    return [rows.rows(np.arange(k, min(k + size, count))) for k in range(0, count, size)]


class TokenBatches:
    """Random windows of a token array, which may be memory-mapped: inputs and what follows each.

    An epoch is as many batches as windows fit into the tokens side by side.
    """

    def __init__(self, tokens: np.ndarray, size: int, context: int, *, seed: int = 0) -> None:
        if len(tokens) <= context:
            need = context + 1
            raise DataError(f"a context of {context} needs {need} tokens, got {len(tokens)}")
        self.tokens, self.size, self.context, self.seed = tokens, size, context, seed

    def __len__(self) -> int:
        return max(1, len(self.tokens) // (self.size * self.context))

    def __getitem__(self, i: int) -> Batch:
        generator = np.random.default_rng((self.seed, i))
        inputs, targets = windows(self.tokens, self.size, self.context, generator)
        return inputs.astype(np.int32), targets.astype(np.int32)
