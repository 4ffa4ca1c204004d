"""Has lavapipe translate kernels to machine code before they first run, on several cores.

It translates when it meets a dispatch, even one of no workgroups, one kernel at a time on each open
device, and keeps the result in its cache on disk. So where that takes long, further devices are
opened that translate some of the kernels; the one that runs them then finds those in the cache.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import wgpu

from ..compiler.schedule.plan import Kernel
from . import host, native

if TYPE_CHECKING:
    from .device import Device
    from .pipelines import Key

_LONG = 0.03  # seconds after which a kernel was not in the cache
_LOOK = 0.01  # seconds between two looks at how far the device is
_WRITTEN = 0.02  # seconds that the driver may take to write its cache
_MOST = 4  # devices
_FEW = 3  # kernels that are not worth another device


class Translation:
    """The translation of kernels that a device has pipelines of; of many, on threads of their own.

    `wait()` before they are to run: the device that meets a kernel would translate it once more
    while another one is at it.
    """

    def __init__(self, device: Device, kernels: Mapping[Key, Kernel]) -> None:
        self._device = device
        self._kernels = kernels
        # the longest first, so that no device is left with a long one at the end
        self._left = deque(sorted(kernels, key=lambda key: len(key[0]), reverse=True))
        self._lock = threading.Lock()
        self._since = time.monotonic()  # when the device began with its present kernel
        self._over = threading.Event()  # nothing is left to take
        self._stopped = False
        self._threads: list[threading.Thread] = []
        if len(kernels) <= _FEW:
            for key in kernels:
                device.pipelines.translate(key)
            return
        jobs = [self._here, *[self._elsewhere] * (_devices() - 1)]
        self._threads = [threading.Thread(target=job, daemon=True) for job in jobs]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Returns when the device has been given all kernels."""
        for thread in self._threads:
            thread.join()

    @property
    def done(self) -> bool:
        """Whether there is nothing to wait for."""
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Gives up what has not begun, and waits for what has."""
        with self._lock:
            self._stopped = True
            self._left.clear()
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _take(self) -> Key | None:
        with self._lock:
            key = self._left.popleft() if self._left else None
            if not self._left:
                self._over.set()
        return key

    def _here(self) -> None:
        """Translates on the device itself, then what others have translated."""
        with suppress(wgpu.GPUError, RuntimeError):  # what is wrong shows where the kernel runs
            others = dict(self._kernels)
            while (key := self._take()) is not None:
                self._since = time.monotonic()
                self._translate(self._device, key)
                del others[key]
            for thread in self._threads[1:]:
                thread.join()
            if others:
                time.sleep(_WRITTEN)
            for key in others:
                if self._stopped:  # some of them nobody has translated
                    return
                self._device.pipelines.translate(key)

    def _elsewhere(self) -> None:
        """Once a kernel takes long: translates on another device."""
        while time.monotonic() - self._since < _LONG:
            if self._over.wait(_LOOK):
                return
        with suppress(wgpu.GPUError, RuntimeError):
            with self._lock:
                free = self._device.others
                other = free.pop() if free else self._device.another()
            while (key := self._take()) is not None:
                other.pipelines.get([self._kernels[key]])
                native.poll(other.gpu, wait=True)
                other.pipelines.drop()
            self._device.others.append(other)

    def _translate(self, device: Device, key: Key) -> None:
        index = device.pipelines.translate(key)
        if index is not None:
            native.poll(device.gpu, wait=True, index=index)


def _devices() -> int:
    """How many devices translate at once: one where the driver keeps nothing."""
    kept = os.environ.get("MESA_SHADER_CACHE_DISABLE", "") in ("", "0", "false")
    return min(host.processors(), _MOST) if kept else 1
