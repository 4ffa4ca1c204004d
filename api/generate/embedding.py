"""Sentence embeddings: texts of any number through a few plans of fixed length and batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import eggpu as eg
from eggpu.compiler.errors import EggpuError
from eggpu.compiler.tracing import Array, array
from eggpu.generate.find import find
from eggpu.generate.tokenizer import Tokenizer, from_file
from eggpu.importers.folder import Folder, open_folder
from eggpu.importers.tensors import ModelFileError
from eggpu.models import bert
from eggpu.session import Compiled

LENGTHS = (16, 32, 64, 128, 256, 512)  # tokens of the plans
BATCHES = (1, 8)


class EmbeddingError(EggpuError, ValueError):
    """What cannot be embedded."""


def _embed(model: bert.Bert, tokens: Array, mask: Array) -> Array:
    return model.embed(tokens, mask)


@dataclass(frozen=True)
class Embedder:
    """A sentence encoder with its tokenizer; texts of more than `longest` tokens are cut."""

    model: bert.Bert
    tokenizer: Tokenizer
    longest: int
    padding: int = 0
    compiled: Compiled = field(default_factory=lambda: eg.compile(_embed, name="embed"))

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """f32 (texts, width), vectors of length 1."""
        if isinstance(texts, str) or not texts:
            raise EmbeddingError("embedding needs a list of at least one text")
        encoded = [self._ids(text) for text in texts]
        out = np.empty((len(texts), self.model.settings.width), np.float32)
        at = 0
        while at < len(encoded):
            left = len(encoded) - at
            size = BATCHES[-1] if left > 1 else BATCHES[0]
            part = encoded[at : at + size]
            out[at : at + len(part)] = self._run(part, size)[: len(part)]
            at += size
        return out

    def _ids(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text)
        # what is cut are words, not the mark of the end
        return ids if len(ids) <= self.longest else [*ids[: self.longest - 1], ids[-1]]

    def _run(self, encoded: Sequence[Sequence[int]], batch: int) -> np.ndarray:
        most = max(map(len, encoded))
        length = min(n for n in (*LENGTHS, self.longest) if n >= most)
        tokens = np.full((batch, length), self.padding, np.int32)
        mask = np.zeros((batch, length), bool)
        for k, ids in enumerate(encoded):
            tokens[k, : len(ids)] = ids
            mask[k, : len(ids)] = True
        return self.compiled(self.model, array(tokens), array(mask)).numpy()


def load_embedder(name: str) -> Embedder:
    """The sentence encoder of a name or folder (see `find`)."""
    path = find(name)
    if not path.is_dir():
        raise ModelFileError(
            f"{path} is no folder with a config.json; encoders are read from those"
        )
    folder = open_folder(path)
    if folder.config.get("model_type") != "bert":
        got = folder.config.get("model_type")
        raise ModelFileError(f"{path} has the model_type {got!r}; sentence encoders are bert")
    _check_pooling(folder)
    settings = folder.json("sentence_bert_config.json")
    model = bert.from_config(folder.config, folder.weights)
    longest = settings.get("max_seq_length")
    longest = longest if isinstance(longest, int) and longest > 2 else model.settings.context
    padding = folder.config.get("pad_token_id", 0)
    tokenizer = from_file(path / "tokenizer.json")
    return Embedder(model, tokenizer, min(longest, model.settings.context), int(padding))


def _check_pooling(folder: Folder) -> None:
    pooling: dict[str, Any] = folder.json("1_Pooling/config.json")
    if pooling and not pooling.get("pooling_mode_mean_tokens", False):
        raise ModelFileError(f"{folder.path} pools other than by the mean, which is not read")
