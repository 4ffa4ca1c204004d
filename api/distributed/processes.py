"""Starts the processes of a group on this machine, and gives each its device."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import eggpu as eg
from eggpu.distributed.groups import GLOO_HINT, MPI_HINT, RENDEZVOUS, DistributedError, Group
from eggpu.runtime import Device, adapters

_PATIENCE = 10.0  # seconds that processes have to end after one of them failed
# Open MPI refuses both unless told: more processes than cores, and to run as root in a container.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def launch(processes: int, argv: Sequence[str], engine: str | None = None) -> int:
    """Run `python *argv` in so many processes of this machine; the first bad exit status, or 0.

    Each finds the others by `init`. The engine is gloo where torch is installed, else MPI where
    mpi4py and mpirun are. When a process fails the others are ended. What they write comes out in
    whole lines. Raises DistributedError, which says what to install, when there is no engine.
    """
    if processes < 1:
        raise DistributedError(f"launch needs at least 1 process, got {processes}")
    chosen = engine or available_engine()
    if chosen == "gloo":
        return _with_gloo(processes, argv)
    if (mpirun := _mpirun()) is None:
        raise DistributedError(f"mpirun was not found: {MPI_HINT}")
    command = [mpirun, "-n", str(processes), sys.executable, *argv]
    return _wait([subprocess.Popen(command, env=_OPEN_MPI | os.environ)])


def available_engine() -> str:
    """The engine that `launch` takes."""
    if importlib.util.find_spec("torch") is not None:
        return "gloo"
    if importlib.util.find_spec("mpi4py") is not None and _mpirun() is not None:
        return "mpi"
    raise DistributedError(
        f"data-parallel training needs an engine for its all-reduce: MPI ({MPI_HINT}), or "
        f"torch.distributed's gloo ({GLOO_HINT})"
    )


def local_device(group: Group) -> Device:
    """A device of its own for each process of this machine, where there are as many of a kind.

    The best kind counts: with two GPUs and a CPU device processes take the GPUs in turn.
    """
    found = adapters()
    alike = [a for a in found if (a.kind, a.backend) == (found[0].kind, found[0].backend)]
    if group.size == 1 or len(alike) < 2:
        return eg.device()
    return eg.device(alike[group.local_rank % len(alike)].index)


def _mpirun() -> str | None:
    """mpirun beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.is_file() else shutil.which("mpirun")


def _with_gloo(processes: int, argv: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="eggpu-") as folder:
        shared = os.environ | {
            RENDEZVOUS: str(Path(folder) / "group"),
            "WORLD_SIZE": str(processes),
        }
        if sys.platform == "linux":  # a machine's own name may lead nowhere
            shared.setdefault("GLOO_SOCKET_IFNAME", "lo")
        started: list[subprocess.Popen[Any]] = []
        readers: list[threading.Thread] = []
        for rank in range(processes):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process, threads = _started([sys.executable, *argv], own)
            started.append(process)
            readers += threads
        failed = _wait(started)
        for reader in readers:  # one that does not end reads from a process of the process
            reader.join(_PATIENCE)
        return failed


def _started(
    command: Sequence[str], environ: dict[str, str]
) -> tuple[subprocess.Popen[Any], list[threading.Thread]]:
    """A process, and threads that hand on what it writes; a terminal it has for itself."""
    out, err = (None if os.isatty(file) else subprocess.PIPE for file in (1, 2))
    process = subprocess.Popen(command, env=environ, stdout=out, stderr=err)
    readers = []
    for pipe, file in ((process.stdout, 1), (process.stderr, 2)):
        if pipe is not None:
            readers.append(threading.Thread(target=_hand_on, args=(pipe, file), daemon=True))
            readers[-1].start()
    return process, readers


_WRITING = threading.Lock()


def _hand_on(pipe: IO[bytes], file: int) -> None:
    """Write each line of a process in one piece: Python and C++ may write it in several."""
    with pipe:  # once nobody reads what is written the process learns it by its own pipe
        for line in pipe:
            rest = memoryview(line)
            try:
                with _WRITING:
                    while rest:
                        rest = rest[os.write(file, rest) :]
            except OSError:
                return


def _wait(started: Sequence[subprocess.Popen[Any]]) -> int:
    """Wait for all; end the others when one fails. Ctrl-C is left to the processes themselves."""

    def passed_on(number: int, frame: object) -> None:
        for process in started:
            if process.poll() is None:
                process.send_signal(number)

    before = {signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, passed_on)
    failed = 0
    try:
        while not failed and any(p.poll() is None for p in started):
            time.sleep(0.05)
            failed = _failed(started)
        failed = failed or _failed(started)
        _end(started, _PATIENCE)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _end(started, 0.0)
    return failed


def _failed(started: Sequence[subprocess.Popen[Any]]) -> int:
    """The exit status of one that failed, or 0."""
    return next((p.returncode for p in started if p.poll()), 0)


def _end(started: Sequence[subprocess.Popen[Any]], patience: float) -> None:
    """End what still runs: after some patience, and by force if need be."""
    limit = time.monotonic() + patience
    while any(p.poll() is None for p in started) and time.monotonic() < limit:
        time.sleep(0.05)
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()
