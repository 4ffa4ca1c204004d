"""Times a language model's prefill and decode beside llama.cpp on the same machine.

    python bench/generate.py --json

Both sides read the same file and run in turn in one process: each round is a prompt on one side,
the same prompt on the other, then a block of greedy tokens each; the best round of each counts.
`ratio` is our tokens a second over theirs. llama.cpp's threads spin while they wait for each other,
so that two are slower than one on a busy machine: its rounds take 2 threads and 1 in turn; and they
go on spinning for a while afterwards, so there is a pause before each side's turn. It comes
through the package cyllama (or cyllama-vulkan), which is optional; without it our side is timed
alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("LP_NUM_THREADS", "2")  # lavapipe's, read when the driver is loaded


import eggpu as eg
from eggpu.generate import Generator, LanguageModel, load_language_model
from eggpu.generate.find import find

THREADS = 2
PAUSE = 0.5  # seconds before a side's turn
GOALS = {"prefill": 0.15, "decode": 0.25}  # of llama.cpp on a CPU with 2 threads
GPU_GOALS = {"prefill": 0.6, "decode": 0.6}  # of its Vulkan backend
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps in the warm sun. "


class Side(Protocol):
    """A runtime with the model loaded: a prompt, then greedy tokens after it."""

    def begin(self, first: int) -> None:
        """Forget everything, then take in one token; not timed."""
        ...

    def prefill(self, ids: Sequence[int]) -> int:
        """Take in a prompt; the likeliest token after it."""
        ...

    def decode(self, count: int) -> list[int]:
        """Take in that token; the next one, and so on."""
        ...


class Ours:
    """eggpu."""

    def __init__(self, language: LanguageModel, context: int, prompt: int, cache: str) -> None:
        sizes = (1, prompt)
        self.generator = Generator(language.model, context=context, sizes=sizes, cache_dtype=cache)

    def begin(self, first: int) -> None:
        self.session = self.generator.start([[first]])

    def prefill(self, ids: Sequence[int]) -> int:
        token = int(self.session.feed([ids])[0])
        self.stream = self.session.tokens(self.generator.context)  # as `eggpu generate` goes on
        next(self.stream)  # that token
        return token

    def decode(self, count: int) -> list[int]:
        return [next(self.stream) for _ in range(count)]


class Theirs:
    """llama.cpp."""

    def __init__(self, path: Path, context: int, prompt: int, gpu_layers: int) -> None:
        from cyllama.llama import llama_cpp

        self.library = llama_cpp
        llama_cpp.disable_logging()
        llama_cpp.ggml_backend_load_all()
        model = llama_cpp.LlamaModelParams()
        model.n_gpu_layers = gpu_layers
        self.model = llama_cpp.LlamaModel(str(path), model)
        options = llama_cpp.LlamaContextParams()
        options.n_ctx, options.n_batch, options.n_ubatch = context, prompt, prompt
        self.threads = THREADS
        self.context = llama_cpp.LlamaContext(self.model, options)
        self.sampler = llama_cpp.LlamaSampler(llama_cpp.LlamaSamplerChainParams())
        self.sampler.add_greedy()

    def begin(self, first: int) -> None:
        self.threads = THREADS if self.threads == 1 else 1
        self.context.set_n_threads(self.threads, self.threads)
        self.context.kv_cache_clear()
        self.at = 0
        self._take([first])

    def prefill(self, ids: Sequence[int]) -> int:
        return self._take(ids)

    def decode(self, count: int) -> list[int]:
        return [self._take([self.token]) for _ in range(count)]

    def _take(self, ids: Sequence[int]) -> int:
        self.context.decode(self.library.llama_batch_get_one(list(ids), self.at))
        self.at += len(ids)
        self.token = self.sampler.sample(self.context, -1)
        return self.token


@dataclass
class Best:
    """The best tokens a second of a side, and the tokens that it chose."""

    prefill: float = 0.0
    decode: float = 0.0
    tokens: list[int] = field(default_factory=list)


def main() -> None:
    """Time both sides; print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="a line of JSON")
    parser.add_argument("--model", default="smollm2", help="smollm2, or a GGUF file")
    parser.add_argument("--device", help="part of a device's name, or its number")
    parser.add_argument("--cache", choices=("f32", "f16"), default="f32", help="our keys' type")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a block of decoding")
    parser.add_argument("--context", type=int, default=512, help="positions of both caches")
    parser.add_argument("--rounds", type=int, default=4, help="measurements of each side")
    parser.add_argument(
        "--gpu-layers", type=int, default=0, help="layers that llama.cpp puts on its GPU"
    )
    args = parser.parse_args()
    if args.prompt + args.tokens + 1 > args.context:
        parser.error(f"{args.prompt} + {args.tokens} + 1 tokens need a larger --context")
    if args.device is not None:
        eg.device(args.device)
    row = measure(args)
    print(json.dumps(row) if args.json else text(row), flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures of a run."""
    path = find(args.model)
    language = load_language_model(args.model, args.context)
    ids = language.tokenizer.encode(TEXT * args.prompt)[: args.prompt + 1]
    ours = Ours(language, args.context, args.prompt, args.cache)
    version, theirs = _theirs(path, args)
    best = {"ours": Best(), "theirs": Best()}
    for side in filter(None, (ours, theirs)):  # compiling and warming up
        side.begin(ids[0])
        side.prefill(ids[1:])
        side.decode(2)
    for _ in range(args.rounds):
        for step in ("prefill", "decode"):
            for name, side in (("ours", ours), ("theirs", theirs)):
                if side is not None:
                    time.sleep(PAUSE)
                    _time(step, side, best[name], ids, args.tokens)
    dispatches, submits = _counted(ours, ids)
    layers = len(language.model.settings.layers)
    return {
        "model": path.name, "device": str(eg.device()), "threads": THREADS, "theirs": version,
        **{k: _compared(k, best, version is not None, args.gpu_layers > 0) for k in GOALS},
        "prompt": args.prompt, "tokens": args.tokens, "rounds": args.rounds,
        "dispatches_a_token": dispatches, "dispatches_a_layer": round(dispatches / layers, 2),
        "submits_a_token": submits,
        "equal_tokens": _equal(best["ours"].tokens, best["theirs"].tokens),
    }  # fmt: skip


def _theirs(path: Path, args: argparse.Namespace) -> tuple[str | None, Theirs | None]:
    for package in ("cyllama", "cyllama-vulkan"):  # the second has a backend for GPUs
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        side = Theirs(path, args.context, args.prompt + 1, args.gpu_layers)
        return f"llama.cpp of {package} {version}", side
    return None, None


def _time(step: str, side: Side, best: Best, ids: Sequence[int], tokens: int) -> None:
    if step == "prefill":
        side.begin(ids[0])
        began = time.perf_counter()
        side.prefill(ids[1:])
        best.prefill = max(best.prefill, (len(ids) - 1) / (time.perf_counter() - began))
        return
    began = time.perf_counter()
    best.tokens = side.decode(tokens)
    best.decode = max(best.decode, tokens / (time.perf_counter() - began))


def _compared(step: str, best: dict[str, Best], both: bool, gpu: bool) -> dict[str, Any]:
    ours, theirs = (getattr(best[k], step) for k in ("ours", "theirs"))
    row: dict[str, Any] = {"ours": round(ours, 2)}
    if both:
        row |= {"theirs": round(theirs, 2), "ratio": round(ours / theirs, 3)}
    return row | {"goal": (GPU_GOALS if gpu else GOALS)[step]}


def _counted(ours: Ours, ids: Sequence[int]) -> tuple[int, int]:
    """Dispatches and submissions of a step, with what reading the token back takes."""
    ours.begin(ids[0])
    counters = eg.device().counters
    before = counters.dispatches, counters.submits
    ours.decode(1)
    return counters.dispatches - before[0], counters.submits - before[1]


def _equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens at the beginning that are the same."""
    return next((k for k, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def text(row: dict[str, Any]) -> str:
    """A table of the figures."""
    lines = [f"{row['model']} on {row['device']}, {row['threads']} threads"]
    for step in GOALS:
        found = row[step]
        beside = (
            f"  llama.cpp {found['theirs']:9.2f}  ratio {found['ratio']:.3f}"
            if "ratio" in found
            else ""
        )
        lines.append(
            f"{step:8} {found['ours']:9.2f} tokens/s{beside}  (goal {found['goal']} of llama.cpp)"
        )
    lines.append(
        f"{row['dispatches_a_token']} dispatches a token ({row['dispatches_a_layer']} a layer), "
        f"{row['submits_a_token']} submission a token"
    )
    if row["theirs"] is None:
        lines.append("llama.cpp was not timed: pip install cyllama")
    else:
        lines.append(f"{row['theirs']}; the first {row['equal_tokens']} tokens are the same")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
