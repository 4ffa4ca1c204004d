"""Text to token ids and back: tokenizer.json, or the byte-level BPE of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eggpu.importers.gguf_file import GGUF
from eggpu.importers.tensors import ModelFileError

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF

# How the text is cut before merging, by GGUF's name of the scheme; others use GPT-2's pattern.
_GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_PATTERNS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2}
_SINGLE_DIGITS = ("smollm", "refact", "starcoder", "command-r")


class Tokenizer:
    """Encodes and decodes. `end` are the ids that end a text."""

    def __init__(self, inner: Any, end: Sequence[int] = (), begin: int | None = None) -> None:
        self.inner, self.end, self.begin = inner, frozenset(end), begin

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text; with `special`, with what the model's texts begin and end with."""
        ids = self.inner.encode(text, add_special_tokens=special).ids
        if special and self.begin is not None and ids[:1] != [self.begin]:
            ids = [self.begin, *ids]
        return ids

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of ids; special tokens are left out unless asked for."""
        return self.inner.decode(list(ids), skip_special_tokens=not special)

    @property
    def size(self) -> int:
        return self.inner.get_vocab_size()

    def text(self, token: int) -> str:
        """The vocabulary's entry of an id."""
        return self.inner.id_to_token(token) or ""

    def id(self, text: str) -> int | None:
        """The id of an entry of the vocabulary."""
        return self.inner.token_to_id(text)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ModelFileError(
            "reading a tokenizer needs the package tokenizers: pip install 'eggpu[models]'"
        ) from None
    return tokenizers


def from_file(path: Path, end: Sequence[int] = ()) -> Tokenizer:
    """A tokenizer.json."""
    library = _library()
    if not path.is_file():
        raise ModelFileError(f"{path.parent} has no {path.name}")
    try:
        inner = library.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare ones
        raise ModelFileError(f"{path} is no tokenizer: {error}") from None
    inner.no_padding()
    inner.no_truncation()
    return Tokenizer(inner, end)


def from_gguf(file: GGUF) -> Tokenizer:
    """The tokenizer in a GGUF file: byte-level BPE ("gpt2")."""
    kind = file.get("tokenizer.ggml.model")
    tokens, merges = (file.get(f"tokenizer.ggml.{k}") for k in ("tokens", "merges"))
    if kind != "gpt2" or not isinstance(tokens, list) or not isinstance(merges, list):
        raise ModelFileError(
            f"{file.path} has a tokenizer of the kind {kind!r}; byte-level BPE ('gpt2') is read. "
            "Put the model's tokenizer.json beside the file"
        )
    pairs = [tuple(m.split(" ", 1)) for m in merges if isinstance(m, str)]
    if len(pairs) != len(merges) or any(len(p) != 2 for p in pairs):
        raise ModelFileError(f"{file.path}: tokenizer.ggml.merges needs pairs of tokens")
    inner = _byte_bpe(tokens, pairs, str(file.get("tokenizer.ggml.pre", "")))
    types = file.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list):
        raise ModelFileError(f"{file.path}: tokenizer.ggml.token_type needs a type a token")
    _add_special(inner, tokens, types)
    end = [file.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom")]
    begin = file.get("tokenizer.ggml.bos_token_id")
    begins = bool(file.get("tokenizer.ggml.add_bos_token", False))
    return Tokenizer(inner, [e for e in end if isinstance(e, int)], begin if begins else None)


def _byte_bpe(tokens: list[str], pairs: list[Any], scheme: str) -> Any:
    library = _library()
    from tokenizers import Regex, decoders, models, pre_tokenizers

    vocabulary = {t: i for i, t in enumerate(tokens)}
    try:
        inner = library.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    except Exception as error:  # noqa: BLE001 - the library raises bare ones
        raise ModelFileError(f"the merges do not fit the vocabulary: {error}") from None
    steps = []
    if scheme in _SINGLE_DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.Split(Regex(_PATTERNS.get(scheme, _GPT2)), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.ByteLevel()
    return inner


def _add_special(inner: Any, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    control = [t for t, k in zip(tokens, types, strict=False) if k == _CONTROL]
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    own = [t for t, k in zip(tokens, types, strict=False) if k == _USER_DEFINED]
    inner.add_tokens([AddedToken(t, normalized=False) for t in own])
