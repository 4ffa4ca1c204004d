"""A GPT on characters of text, and what it writes.

python examples/gpt.py --help
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eggpu import data, nn, optim, script
from eggpu.train import Trainer
from eggpu.train.sample import sample_text

BATCH, CONTEXT = 16, 64


def loss(model: Any, tokens: Any, targets: Any) -> Any:
    """Nats a character."""
    return nn.cross_entropy(model(tokens), targets)


def main(
    steps: int = 400, files: tuple[str, ...] = (), out: Path = Path("runs/example-gpt")
) -> float:
    """Train, print what the model writes, and give the loss on unseen text."""
    corpus = data.corpus([Path(f) for f in files])
    model = nn.GPT(corpus.vocabulary.size, layers=2, width=64, heads=4, context=CONTEXT, key=0)
    valid = data.TokenBatches(corpus.valid, BATCH, CONTEXT)
    trainer = Trainer(
        model,
        loss,
        optim.adamw(optim.cosine(3e-3, steps=steps, warmup=steps // 10)),
        data.TokenBatches(corpus.train, BATCH, CONTEXT),
        valid=[valid[i] for i in range(min(8, len(valid)))],
    )
    trainer.fit(out, steps=steps)
    unseen = trainer.evaluate()["loss"]
    print(f"{unseen:.3f} nats a character, single ones have {corpus.unigram_entropy:.3f}")
    print(sample_text(trainer.model, corpus.vocabulary, length=200))
    return unseen


if __name__ == "__main__":
    script.run(main)
