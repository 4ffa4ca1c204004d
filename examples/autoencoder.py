"""An autoencoder of handwritten digits: 64 pixels through 8 numbers, and a picture of the result.

python examples/autoencoder.py --help
"""

from __future__ import annotations

from pathlib import Path

from eggpu import script
from eggpu.train import Run, train_images


def main(steps: int = 600, out: Path = Path("runs/example-autoencoder")) -> Path:
    """Train; the picture: digits above what the model makes of them."""
    train_images("autoencoder", {"code": 8}, run=Run(out, steps))
    return out / "pictures.png"


if __name__ == "__main__":
    script.run(main)
