"""A BERT on characters of text, and what it puts into the gaps of a line.

python examples/bert.py --help
"""

from __future__ import annotations

from pathlib import Path

from eggpu import script
from eggpu.checkpoints import read_metadata
from eggpu.data import Vocabulary
from eggpu.train import Run, train_bert
from eggpu.train.bert import fill

LINES = ("    def __in_t__(self, name: s_r) -> None:", "        ret_rn len(s_lf)", "impo_t os")


def main(steps: int = 1500, out: Path = Path("runs/example-bert")) -> list[str]:
    """Train; the lines with their gaps filled."""
    result = train_bert({}, run=Run(out, steps))
    vocabulary = Vocabulary(read_metadata(result.checkpoint).config["characters"])
    filled = [fill(result.model, vocabulary, line) for line in LINES]
    for line, whole in zip(LINES, filled, strict=True):
        print(f"{line}\n{whole}\n")
    return filled


if __name__ == "__main__":
    script.run(main)
