"""Peers beside our side: torch in this process, every other one in a child that answers over pipes.

Children wait for a line while others are timed, so blocks of all sides come in turn; all their
threads are stopped meanwhile. Each runs in the interpreter that --python names for it, or in this
one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import peers_known
from peers_data import Arrays, Batches
from peers_known import DEFAULT, PEERS, THREADS

WORKER = Path(__file__).parent / "peers_worker.py"
LIMIT = 300.0  # seconds for an answer
# Before a runtime pins threads of this process to single cores.
CORES = sorted(os.sched_getaffinity(0))[:THREADS] if hasattr(os, "sched_getaffinity") else []


class PeerError(RuntimeError):
    """A peer is missing or failed."""


class Side(Protocol):
    """What is timed: steps of a model, or calls of a kernel."""

    def train(self, task: str, weights: Arrays, batches: Batches) -> None: ...
    def steps(self, count: int) -> tuple[list[float], float]: ...
    def block(self, count: int) -> float: ...
    def kernel(self, kind: str, arrays: list[np.ndarray]) -> tuple[list[np.ndarray], float]: ...
    def best(self, seconds: float) -> float: ...


class Here:
    """A trainer or a module with kernels in this process."""

    def __init__(self, trainer: Any = None, module: Any = None) -> None:
        self.trainer, self.module = trainer, module
        self.run: Callable[[], Any] = lambda: None

    def train(self, task: str, weights: Arrays, batches: Batches) -> None:
        """Make the trainer of the module."""
        self.trainer = self.module.Trainer(task, weights, batches, THREADS)

    def steps(self, count: int) -> tuple[list[float], float]:
        """Losses, and the seconds of the first step."""
        start = time.perf_counter()
        losses = [float(self.trainer.advance())]
        first = time.perf_counter() - start
        return losses + [float(self.trainer.advance()) for _ in range(count - 1)], first

    def block(self, count: int) -> float:
        """Seconds a step."""
        return peers_known.block(self.trainer.advance, count)

    def kernel(self, kind: str, arrays: list[np.ndarray]) -> tuple[list[np.ndarray], float]:
        """Results, and the seconds of the first call."""
        self.run = self.module.kernel(kind, arrays)
        start = time.perf_counter()
        results = self.run()
        first = time.perf_counter() - start
        return self.module.values(results), first

    def best(self, seconds: float) -> float:
        """The best call of a while."""
        return peers_known.best_of_block(self.run, seconds)


class Child:
    """A peer in a process of its own; every method raises PeerError where it fails."""

    def __init__(self, name: str, python: str, limit: float = LIMIT) -> None:
        self.name, self.limit = name, limit
        self.folder = tempfile.TemporaryDirectory(prefix="eggpu-peer-")
        self.log = open(Path(self.folder.name) / "stderr", "w+")  # noqa: SIM115, until close()
        command = [python, str(WORKER), name, "--cores", ",".join(map(str, CORES))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        try:
            hello = self.read()
            if "missing" in hello:
                raise PeerError(f"{name} needs more in {python}: {hello['missing']}")
        except PeerError:
            self.close()
            raise
        self.version: str = hello["version"]
        self.signal("SIGSTOP")

    def signal(self, name: str) -> None:
        """Stop the child or let it go on, where the system can."""
        if hasattr(signal, name):
            self.process.send_signal(getattr(signal, name))

    def train(self, task: str, weights: Arrays, batches: Batches) -> None:
        """Send the numbers, once."""
        path = Path(self.folder.name) / "numbers.npz"
        peers_known.save_numbers(path, weights, batches)
        self.ask(do="train", task=task, numbers=str(path))

    def steps(self, count: int) -> tuple[list[float], float]:
        """Losses, and the seconds of the first step."""
        answer = self.ask(do="steps", count=count)
        return answer["losses"], answer["first_s"]

    def block(self, count: int) -> float:
        """Seconds a step."""
        return self.ask(do="block", count=count)["seconds"]

    def kernel(self, kind: str, arrays: list[np.ndarray]) -> tuple[list[np.ndarray], float]:
        """Results, and the seconds of the first call."""
        paths = [Path(self.folder.name) / name for name in ("arrays.npz", "results.npz")]
        peers_known.save_arrays(paths[0], arrays)
        first = self.ask(do="kernel", kind=kind, arrays=str(paths[0]), results=str(paths[1]))
        return peers_known.load_arrays(paths[1]), first["first_s"]

    def best(self, seconds: float) -> float:
        """The best call of a while."""
        return self.ask(do="best", seconds=seconds)["seconds"]

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request."""
        assert self.process.stdin is not None
        self.signal("SIGCONT")
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(self.died()) from None
        answer = self.read()
        self.signal("SIGSTOP")
        if "error" in answer:
            raise PeerError(f"{self.name} failed at {request['do']}: {answer['error']}")
        return answer

    def read(self) -> dict[str, Any]:
        """A line of the child, which is ended where it takes too long."""
        assert self.process.stdout is not None
        timer = threading.Timer(self.limit, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise PeerError(self.died())
        return json.loads(line)

    def died(self) -> str:
        """What a child wrote last."""
        code = self.process.wait(10)
        self.log.seek(0)
        last = self.log.read().strip().splitlines()[-3:]
        return f"{self.name} ended with {code} or took {self.limit:g} s: {' | '.join(last)}"

    def close(self) -> None:
        """End the child."""
        self.signal("SIGCONT")
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        self.folder.cleanup()


class Peers:
    """The sides that are timed besides ours, by name.

    One that fails raises where it is required, else it is left out with a line on stderr.
    """

    def __init__(self, sides: dict[str, Side], required: bool = True) -> None:
        self.sides, self.required = dict(sides), required
        self.stack = ExitStack()

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End children; the program too where a peer that was asked for failed."""
        self.stack.close()
        if isinstance(error, PeerError):
            sys.exit(f"error: {error}")

    def add(self, name: str, python: str) -> None:
        """Start a peer: torch in this process, others in a child."""

        def start() -> Side:
            if name != "torch":
                child = Child(name, python)
                self.stack.callback(child.close)
                return child
            if absent := peers_known.missing(PEERS[name]):
                raise PeerError(f"torch needs more in {sys.executable}: {absent}")
            return Here(module=importlib.import_module(PEERS[name].module))

        side = self.attempt(name, start)
        if side is not None:
            self.sides[name] = side

    def each(self, f: Callable[[str, Side], Any]) -> dict[str, Any]:
        """f of every side; those that fail are gone."""
        found = {}
        for name, side in list(self.sides.items()):
            result = self.attempt(name, lambda: f(name, side))  # noqa: B023, called at once
            if name in self.sides:
                found[name] = result
        return found

    def attempt(self, name: str, f: Callable[[], Any]) -> Any:
        """What f gives; None where it fails and the peer is not required."""
        try:
            return f()
        except PeerError as error:
            if self.required:
                raise
            self.sides.pop(name, None)
            print(f"without {error}", file=sys.stderr)
            return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options by which peers are chosen."""
    parser.add_argument(
        "--against",
        metavar="NAMES",
        help=f"peers by comma, of {', '.join(PEERS)}, or none; by default the first four where "
        "they are installed",
    )
    parser.add_argument("--without-torch", action="store_true", help="our side alone")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="[PEER=]PATH",
        help="the interpreter that has a peer, or all peers but torch; by default this one",
    )


def start(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Peers:
    """The peers that were asked for, started; ends the program where options are wrong."""
    pythons = interpreters(parser, args.python)
    if args.without_torch and args.against is not None:
        parser.error("--without-torch is --against none: give one of the two")
    names = chosen(parser, "none" if args.without_torch else args.against)
    peers = Peers({}, required=args.against is not None)
    try:
        for name in names:
            peers.add(name, pythons.get(name, pythons.get("", sys.executable)))
    except PeerError as error:
        peers.stack.close()
        parser.error(str(error))
    return peers


def chosen(parser: argparse.ArgumentParser, against: str | None) -> Sequence[str]:
    """Names of peers."""
    if against is None:
        return DEFAULT
    names = [] if against == "none" else against.split(",")
    for name in names:
        if name not in PEERS:
            parser.error(f"--against needs names of {', '.join(PEERS)}, got {name!r}")
    return list(dict.fromkeys(names))


def interpreters(parser: argparse.ArgumentParser, given: list[str]) -> dict[str, str]:
    """Paths by peer; the empty name is for all others."""
    found = {}
    for text in given:
        name, _, path = text.rpartition("=")
        if name == "torch":
            parser.error("torch runs in this process: start the script by a Python that has it")
        if name and name not in PEERS:
            parser.error(f"--python needs PEER=PATH with one of {', '.join(PEERS)}, got {text!r}")
        if not os.access(path, os.X_OK) or Path(path).is_dir():
            parser.error(f"--python needs an interpreter, got {path!r}")
        found[name] = path
    return found
