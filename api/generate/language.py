"""A language model with its tokenizer and chat template: text in, text out piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eggpu.generate import chat
from eggpu.generate.find import find
from eggpu.generate.generator import GenerationError, GenerationSession, Generator, Progress
from eggpu.generate.sampling import Sampling
from eggpu.generate.suggested import suggested
from eggpu.generate.text import TextStream
from eggpu.generate.tokenizer import Tokenizer, from_file, from_gguf
from eggpu.importers.folder import Folder, open_folder, read_json
from eggpu.importers.gguf_file import GGUF, open_gguf
from eggpu.importers.tensors import ModelFileError
from eggpu.models import gpt2, llama_config

_SETTINGS = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Piece:
    """New text. The last piece says why it ends: "stop" or "length"."""

    text: str
    tokens: int  # generated so far
    logprob: float | None = None
    finish: str = ""


@dataclass(frozen=True)
class LanguageModel:
    """A model, its tokenizer, the template of its conversations ("" where it has none), and how
    its authors would have tokens chosen."""

    model: Any
    tokenizer: Tokenizer
    template: str = ""
    begin: str = ""
    end: str = ""
    sampling: Sampling = field(default_factory=Sampling)

    def prompt(self, text: str | Sequence[chat.Message], raw: bool = False) -> list[int]:
        """Ids of a prompt: a text to continue (`raw`, or no template), or one or more messages."""
        if isinstance(text, str) and (raw or not self.template):
            return self.tokenizer.encode(text)
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        if not self.template:
            raise ModelFileError("the model has no chat template: give it a text to continue")
        full = chat.render(self.template, messages, begin=self.begin, end=self.end)
        return self.tokenizer.encode(full, special=False)

    def stream(
        self, generator: Generator, ids: Sequence[int], sampling: Sampling | None = None, *,
        most: int = 256, stop: Sequence[str] = (), progress: Progress | None = None,
    ) -> Iterator[Piece]:  # fmt: skip
        """The continuation of a prompt as it is made, up to `most` tokens, the end of the text, or
        one of the strings `stop`, which is not part of it. Without `sampling` tokens are chosen as
        the model's authors would. `progress` is told how far the prompt is taken in."""
        if most < 1:
            raise GenerationError(f"needs at least 1 token to generate, got {most}")
        session = generator.start([ids], sampling or self.sampling, progress)
        return _pieces(self.tokenizer, session, most, tuple(s for s in stop if s))


def _pieces(
    tokenizer: Tokenizer, session: GenerationSession, most: int, stop: tuple[str, ...]
) -> Iterator[Piece]:
    text, count = TextStream(tokenizer, stop), 0
    for token in session.tokens(most, tokenizer.end.__contains__):
        count += 1
        ready = text.push(token)
        if text.stopped:
            yield Piece(ready, count, _logprob(session), "stop")
            return
        if ready:
            yield Piece(ready, count, _logprob(session))
    rest = text.rest()
    ended = text.stopped or (count < most and int(session.token[0]) in tokenizer.end)
    yield Piece(rest, count, None, "stop" if ended else "length")


def _logprob(session: GenerationSession) -> float | None:
    return None if session.logprob is None else float(session.logprob[0])


def load_language_model(name: str, context: int | None = None) -> LanguageModel:
    """The language model of a name, file or folder (see `find`)."""
    path = find(name)
    return _from_folder(path, context) if path.is_dir() else _from_file(path)


def _from_file(path: Path) -> LanguageModel:
    file = open_gguf(path)
    if file.architecture not in llama_config.GGUF_ARCHITECTURES:
        known = ", ".join(llama_config.GGUF_ARCHITECTURES)
        raise ModelFileError(
            f"{path} has the architecture {file.architecture!r}; known are {known}"
        )
    beside = path.parent / "tokenizer.json"
    tokenizer = from_file(beside, _ends(file)) if beside.is_file() else from_gguf(file)
    tokens = file.get("tokenizer.ggml.tokens", [])

    def text(key: str) -> str:
        at = file.get(f"tokenizer.ggml.{key}_token_id")
        known = isinstance(tokens, list) and type(at) is int and 0 <= at < len(tokens)
        return str(tokens[at]) if known else ""

    template = file.get("tokenizer.chat_template", "")
    settings = path.parent / _SETTINGS
    values = read_json(settings) if settings.is_file() else {}
    return LanguageModel(
        llama_config.from_gguf(file), tokenizer, str(template), text("bos"), text("eos"),
        suggested(values, str(settings)),
    )  # fmt: skip


def _ends(file: GGUF) -> list[int]:
    ids = [file.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot")]
    return [i for i in ids if isinstance(i, int)]


def _from_folder(path: Path, context: int | None) -> LanguageModel:
    folder = open_folder(path)
    kind = folder.config.get("model_type")
    if kind == "gpt2":
        model: Any = gpt2.from_config(folder.config, folder.weights)
    elif kind in llama_config.MODEL_TYPES:
        model = llama_config.from_config(folder.config, folder.weights, context)
    else:
        known = ", ".join((*llama_config.MODEL_TYPES, "gpt2"))
        raise ModelFileError(f"{path} has the model_type {kind!r}; language models are {known}")
    settings = folder.json("tokenizer_config.json")
    tokenizer = from_file(path / "tokenizer.json", _end_ids(folder))
    begin, end = (_token_text(settings.get(k)) for k in ("bos_token", "eos_token"))
    sampling = suggested(folder.json(_SETTINGS), str(path / _SETTINGS))
    return LanguageModel(model, tokenizer, _template(folder, settings), begin, end, sampling)


def _end_ids(folder: Folder) -> list[int]:
    found: list[int] = []
    for values in (folder.config, folder.json(_SETTINGS)):
        ids = values.get("eos_token_id")
        found += [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)]
    return found


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _template(folder: Folder, settings: dict[str, Any]) -> str:
    beside = folder.path / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default") or ""
    return str(template)
