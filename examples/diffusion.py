"""A diffusion model that draws handwritten digits: a picture with each digit eight times.

python examples/diffusion.py --help
"""

from __future__ import annotations

from pathlib import Path

from eggpu import script
from eggpu.train import Run, train_diffusion


def main(steps: int = 2000, out: Path = Path("runs/example-diffusion")) -> Path:
    """Train; the picture: a column for each digit from 0 to 9."""
    train_diffusion({"seed": 1}, run=Run(out, steps))
    return out / "pictures.png"


if __name__ == "__main__":
    script.run(main)
