"""What belongs to one thread."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Stack(threading.local, Generic[T]):
    """The values of the blocks that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.values: list[T] = []
