"""The frameworks that are compared with: what each needs, and how all of them are timed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers_data import Arrays, Batches

THREADS = 2  # of every peer


@dataclass(frozen=True, slots=True)
class Peer:
    """A framework: the module here that speaks it, and what a person installs to have it."""

    module: str
    packages: tuple[str, ...]  # that are imported
    install: str
    programs: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()  # of the environment


# By name; those that are compared with by default come first, in this order.
PEERS = {
    "torch": Peer("peers_torch", ("torch",), "pip install torch"),
    "tinygrad-webgpu": Peer(
        "peers_tinygrad",
        ("tinygrad", "pydawn"),
        "pip install tinygrad dawn-python; apt-get install mesa-vulkan-drivers",
        settings=(("DEV", "WEBGPU"), ("TRAINING", "1")),
    ),
    "tinygrad-cpu": Peer(
        "peers_tinygrad",
        ("tinygrad",),
        "pip install tinygrad; apt-get install clang",
        programs=("clang",),
        settings=(("DEV", "CPU"), ("TRAINING", "1")),
    ),
    "jax": Peer(
        "peers_jax", ("jax", "jaxlib"), "pip install jax", settings=(("JAX_PLATFORMS", "cpu"),)
    ),
    "numpy": Peer("peers_numpy", ("numpy",), "pip install numpy"),
}
# Kernels that are spelled alike in all frameworks, ours too.
PRODUCTS: dict[str, Callable[..., Any]] = {
    "matmul": lambda a, b: a @ b,
    "matmul tn": lambda a, b: a.T @ b,
    "matmul nt": lambda a, b: a @ b.T,
    "matmul tt": lambda a, b: a.T @ b.T,
}
DEFAULT = ("torch", "tinygrad-webgpu", "tinygrad-cpu", "jax")


def chain(tanh: Callable[[Any], Any]) -> Callable[..., Any]:
    """Eight elementwise ops, by a framework's `tanh`."""
    return lambda x, y: tanh((x * y + x) * 0.5 - y) * (x + 1.0) + y


def missing(peer: Peer) -> str:
    """What has to be installed for a peer in this environment; empty where nothing has."""
    absent = [name for name in peer.packages if importlib.util.find_spec(name) is None]
    absent += [name for name in peer.programs if shutil.which(name) is None]
    return f"{' and '.join(absent)} missing: {peer.install}" if absent else ""


def environment(peer: Peer) -> dict[str, str]:
    """Variables to set before a peer is imported; dawn's library is where pip put it."""
    found = dict(peer.settings)
    if "pydawn" in peer.packages and "WEBGPU_PATH" not in os.environ:
        found["WEBGPU_PATH"] = dawn_library()
    return found


def dawn_library() -> str:
    """The path of the WebGPU library in dawn-python."""
    spec = importlib.util.find_spec("pydawn")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    machine = platform.machine()
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    for folder in folders:
        for path in sorted((Path(folder) / "lib").glob("libwebgpu_dawn*")):
            if path.suffix == suffix and machine in path.name:
                return str(path)
    raise FileNotFoundError(
        f"needs libwebgpu_dawn for {machine} in dawn-python, or WEBGPU_PATH, got {folders}"
    )


def version(peer: Peer) -> str:
    """Of its first package."""
    return importlib.metadata.version(peer.packages[0])


def block(advance: Callable[[], Any], count: int = 10) -> float:
    """Seconds a step, of `count` of which the last one's loss is read."""
    start = time.perf_counter()
    for _ in range(count):
        loss = advance()
    float(loss)
    return (time.perf_counter() - start) / count


def best_of_block(run: Callable[[], Any], seconds: float) -> float:
    """The least seconds of a call, of those of a while after a first one."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


def save_numbers(path: Path | str, weights: Arrays, batches: Batches) -> None:
    """Weights and batches as one file."""
    pairs = {
        f"{axis}{i}": v for i, b in enumerate(batches) for axis, v in zip("xy", b, strict=True)
    }
    np.savez(path, **{f"w/{name}": value for name, value in weights.items()}, **pairs)


def load_numbers(path: Path | str) -> tuple[Arrays, Batches]:
    """What save_numbers wrote."""
    with np.load(path) as file:
        weights = {name[2:]: file[name] for name in file.files if name.startswith("w/")}
        count = sum(name[0] == "x" for name in file.files)
        return weights, [(file[f"x{i}"], file[f"y{i}"]) for i in range(count)]


def save_arrays(path: Path | str, arrays: Iterable[np.ndarray]) -> None:
    """Arrays in order."""
    np.savez(path, *arrays)


def load_arrays(path: Path | str) -> list[np.ndarray]:
    """What save_arrays wrote."""
    with np.load(path) as file:
        return [file[f"arr_{i}"] for i in range(len(file.files))]
