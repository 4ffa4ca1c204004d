"""Data-parallel training of an MLP on handwritten digits, in as many processes as are started.

python examples/data_parallel.py                             one process
python -m eggpu.distributed 2 examples/data_parallel.py      two, by gloo or MPI
mpirun -n 2 python examples/data_parallel.py                 two, by MPI
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eggpu import data, distributed, nn, optim, script
from eggpu.train import Trainer


def loss(model: Any, x: Any, y: Any) -> Any:
    """Nats a digit."""
    return nn.cross_entropy(model(x), y)


def main(steps: int = 200, out: Path = Path("runs/example-data-parallel")) -> float:
    """The loss of the last batch, the same for any number of processes."""
    group = distributed.init()
    distributed.local_device(group)
    digits = data.digits()
    trainer = Trainer(
        nn.MLP((64, 64, 10), key=0), loss, optim.adamw(3e-3),
        data.Batches((digits.train_x, digits.train_y), 64), distributed=group, unit="digits",
    )  # fmt: skip
    result = trainer.fit(out, steps=steps)
    last = result.history.train[-1][1]
    print(f"process {group.rank} of {group.size} ({group.engine}): loss {last:.5f}")
    group.close()
    return last


if __name__ == "__main__":
    script.run(main)
