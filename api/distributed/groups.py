"""Groups of processes that train together, and their all-reduce by MPI or by gloo."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np

from eggpu.compiler import pytree
from eggpu.compiler.errors import EggpuError
from eggpu.compiler.tracing import array

RENDEZVOUS = "EGGPU_RENDEZVOUS"  # a file through which processes started by `launch` meet
ENGINES = ("mpi", "gloo")
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MINUTES = 30  # that a process waits for the others
MPI_HINT = "pip install 'eggpu[mpi]', in an environment with an MPI library"
GLOO_HINT = "pip install torch, whose CPU build is enough"


class DistributedError(EggpuError):
    """Processes cannot find each other, or do not fit together."""


@dataclass(frozen=True, slots=True)
class Group:
    """Processes that train together; this one is number `rank` of `size`.

    Every process must make the same calls in the same order, or all wait for ever.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes of this machine
    engine: str = "alone"
    _reduce: Callable[[np.ndarray, str], None] | None = field(default=None, repr=False)
    _send: Callable[[np.ndarray], None] | None = field(default=None, repr=False)
    _end: Callable[[], None] | None = field(default=None, repr=False)

    def all_reduce(self, tree: Any, how: str = "mean") -> Any:
        """The pytree with each array's "mean", "sum", "max" or "min" over all processes.

        Floats are reduced as f32, integers and bools as i64; a mean needs floats. All arrays
        travel in one piece.
        """
        if how not in ("mean", "sum", "max", "min"):
            raise DistributedError(f"all_reduce needs mean, sum, max or min, got {how!r}")
        leaves, structure = pytree.flatten(tree)
        values = [np.asarray(v) for v in leaves]
        if how == "mean" and any(v.dtype.kind != "f" for v in values):
            raise DistributedError("the mean over processes needs arrays of floats")
        if self._reduce is None:
            return pytree.unflatten(structure, [array(v) for v in values])
        run = self._reduce

        def reduced(flat: np.ndarray) -> np.ndarray:
            run(flat, "sum" if how == "mean" else how)
            return flat / np.float32(self.size) if how == "mean" else flat

        return pytree.unflatten(structure, _packed(values, reduced))

    def broadcast(self, tree: Any) -> Any:
        """The pytree as the first process has it, to the last bit."""
        leaves, structure = pytree.flatten(tree)
        if self._send is None:
            return tree
        out = []
        for leaf in leaves:
            value = np.array(leaf, order="C")
            flat = value.reshape(-1).view(np.uint8)
            self._send(flat)
            out.append(array(value))
        return pytree.unflatten(structure, out)

    def barrier(self) -> None:
        """Wait until every process is here."""
        self.all_reduce(np.float32(0), "sum")

    def close(self) -> None:
        """Leave the group once all processes are here; the last call."""
        if self._end is not None:
            self._end()


def _packed(values: list[np.ndarray], function: Callable[[np.ndarray], np.ndarray]) -> list[Any]:
    """Each array after `function` of all floats as one f32 array, and of all others as one i64."""
    out: list[Any] = [None] * len(values)
    for floats, kind in ((True, np.float32), (False, np.int64)):
        places = [i for i, v in enumerate(values) if (v.dtype.kind == "f") == floats]
        if not places:
            continue
        flat = function(np.concatenate([values[i].reshape(-1).astype(kind) for i in places]))
        at = 0
        for i in places:
            value = values[i]
            part = flat[at : at + value.size].reshape(value.shape)
            out[i], at = array(part.astype(value.dtype)), at + value.size
    return out


def init(engine: str | None = None) -> Group:
    """The group that mpirun, torchrun or `launch` started this process in; alone without them.

    `engine` is "mpi" (mpi4py) or "gloo" (torch.distributed), by default that of the launcher.
    Raises DistributedError, which says what to install, when the engine is missing.
    """
    if engine not in (None, *ENGINES):
        raise DistributedError(f"the engine needs to be mpi or gloo, got {engine!r}")
    chosen = engine or _launcher(os.environ)
    if chosen == "mpi":
        return _mpi()
    if chosen == "gloo":
        return _gloo(os.environ)
    return Group()


def _launcher(environ: Mapping[str, str]) -> str | None:
    """The engine of whatever started this process."""
    if RENDEZVOUS in environ or all(name in environ for name in _TORCHRUN):
        return "gloo"
    return "mpi" if any(name in environ for name in _MPI) else None


def _mpi() -> Group:
    try:
        from mpi4py import MPI  # type: ignore[import-not-found]
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library
        raise DistributedError(
            f"training under mpirun needs mpi4py: {MPI_HINT}; or leave mpirun away and take "
            f"--data-parallel N with torch: {GLOO_HINT} ({error})"
        ) from None
    world = MPI.COMM_WORLD
    operations = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}

    def reduce(flat: np.ndarray, how: str) -> None:
        world.Allreduce(MPI.IN_PLACE, flat, op=operations[how])

    local = world.Split_type(MPI.COMM_TYPE_SHARED).rank
    return Group(world.rank, world.size, local, "mpi", reduce, world.Bcast)


def _gloo(environ: Mapping[str, str]) -> Group:
    try:
        import torch  # type: ignore[import-not-found]
        import torch.distributed as dist  # type: ignore[import-not-found]
    except ImportError:
        raise DistributedError(f"torch.distributed's gloo needs torch: {GLOO_HINT}") from None
    missing = [n for n in ("RANK", "WORLD_SIZE") if n not in environ]
    if missing:
        raise DistributedError(
            f"gloo needs {' and '.join(missing)} in the environment: start with torchrun, or with "
            "python -m eggpu.distributed N SCRIPT"
        )
    met = environ.get(RENDEZVOUS)
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if not dist.is_initialized():
        where = "env://" if met is None else f"file://{met}"
        wait = timedelta(minutes=_MINUTES)
        dist.init_process_group("gloo", where, wait, rank=rank, world_size=size)
    operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

    def reduce(flat: np.ndarray, how: str) -> None:
        dist.all_reduce(torch.from_numpy(flat), operations[how])

    def send(flat: np.ndarray) -> None:
        dist.broadcast(torch.from_numpy(flat), 0)

    def end() -> None:
        dist.barrier()  # who leaves early breaks what is under way in others
        dist.destroy_process_group()

    local = int(environ.get("LOCAL_RANK", rank))
    return Group(rank, size, local, "gloo", reduce, send, end)
