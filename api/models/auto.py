"""A model of any known architecture from a folder or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eggpu.importers.folder import open_folder
from eggpu.importers.gguf_file import open_gguf
from eggpu.importers.tensors import ModelFileError
from eggpu.models import bert, gpt2, llama_config, resnet, vit, whisper

_OTHERS = {
    "bert": bert.from_config, "gpt2": gpt2.from_config, "resnet": resnet.from_config,
    "vit": vit.from_config, "whisper": whisper.from_config,
}  # fmt: skip


def load_model(path: str | Path, context: int | None = None) -> Any:
    """The model that config.json or a GGUF file describes, as a module to call.

    `context` is how many positions will be used, which decides some rotary scalings (default: all
    that the model has). Raises ModelFileError for what is damaged or not known.
    """
    path = Path(path)
    if not path.is_dir():
        file = open_gguf(path)
        if file.architecture not in llama_config.GGUF_ARCHITECTURES:
            known = ", ".join(llama_config.GGUF_ARCHITECTURES)
            got = file.architecture
            raise ModelFileError(f"{path} has the architecture {got!r}; known are {known}")
        return llama_config.from_gguf(file)
    folder = open_folder(path)
    kind = folder.config.get("model_type")
    if kind in llama_config.MODEL_TYPES:
        return llama_config.from_config(folder.config, folder.weights, context)
    if not isinstance(kind, str) or kind not in _OTHERS:
        known = ", ".join(sorted((*llama_config.MODEL_TYPES, *_OTHERS)))
        raise ModelFileError(f"{path} has the model_type {kind!r:.60}; known are {known}")
    return _OTHERS[kind](folder.config, folder.weights)
