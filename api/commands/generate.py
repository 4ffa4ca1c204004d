"""`eggpu generate`: text from a pretrained language model, as it is made."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import eggpu as eg

if TYPE_CHECKING:
    from eggpu.generate import Sampling

_CHOICES = (
    ("temperature", float, 0, "0 takes the likeliest"),
    ("top-k", int, 0, "among the K likeliest; 0 is all"),
    ("top-p", float, 1, "among the likeliest that make up this probability"),
    ("min-p", float, 0, "among those with this share of the highest probability"),
    ("repetition-penalty", float, 1, "of tokens that were there; 1 is none"),
    ("seed", int, 0, "of random choices"),
)


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """The command's flags."""
    text = "write text with a pretrained language model"
    parser = commands.add_parser(
        "generate", parents=[common], help=text,
        description="Answer a prompt with a pretrained language model.",
        epilog='example: eggpu generate --model smollm2 "What is the capital of France?"',
    )  # fmt: skip
    parser.add_argument("prompt", help="what to answer, or with --raw to continue; - reads it")
    parser.add_argument(
        "--model", default="smollm2", metavar="NAME",
        help="smollm2, a GGUF file or a folder with config.json (default: smollm2)",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N",
        help="tokens of an answer at most (default: 256)",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=int, default=None, metavar="N",
        help="room for prompt and answer (default: what they need)",
    )  # fmt: skip
    parser.add_argument("--system", metavar="TEXT", help="the system's message")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt, without a template"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before it; may be given several times",
    )
    parser.add_argument(
        "--cache",
        choices=("f32", "f16"),
        default="f32",
        help="type of keys and values (default: f32)",
    )
    parser.add_argument("--stats", action="store_true", help="tell tokens a second, on stderr")
    parser.add_argument(
        "--explain", action="store_true",
        help="instead of an answer, why the kernels of a step are what they are at this context",
    )  # fmt: skip
    group = parser.add_argument_group(
        "choice of tokens", "What is not given is as in the model's generation_config.json (its "
        "temperature only with do_sample), or as said here where it has none.",
    )  # fmt: skip
    for name, kind, default, what in _CHOICES:
        group.add_argument(
            f"--{name}", type=kind, metavar="X" if kind is float else "N",
            help=f"{what} (default: {'' if name == 'seed' else 'of the model, or '}{default})",
        )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate and print."""
    from eggpu.generate import Generator, Sampling, load_language_model
    from eggpu.generate.suggested import described

    if args.device is not None:
        eg.device(args.device)
    _sampling(args, Sampling())  # what is out of range is told before the model is read
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with _Waiting() as waiting:
        waiting.tell(f"reading {args.model} ...")
        language = load_language_model(args.model, args.context)
        sampling = _sampling(args, language.sampling)
        ids = language.prompt(_messages(prompt, args.system) if args.system else prompt, args.raw)
        context = args.context or rounded(len(ids) + args.max_tokens)
        generator = Generator(language.model, context=context, cache_dtype=args.cache)
        if args.explain:
            generator.start([ids], sampling).next()
            waiting.clear()
            print(generator.advance.report)
            return 0
        times, counts, finish = [time.perf_counter()], [0], ""
        pieces = language.stream(
            generator, ids, sampling, most=args.max_tokens, stop=args.stop,
            progress=waiting.prompt if waiting.shown else None,
        )  # fmt: skip
        for piece in pieces:
            waiting.clear()
            print(piece.text, end="", flush=True)
            times.append(time.perf_counter())
            counts.append(piece.tokens)
            finish = piece.finish
    print()
    if args.stats:
        print(f"tokens are chosen by: {described(sampling)}", file=sys.stderr)
        _tell(len(ids), times, counts, finish)
    return 0


class _Waiting:
    """A line on stderr, where that is a terminal, that tells what is waited for."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()
        self.after: tuple[int, float] | None = None  # tokens and time of the first chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def tell(self, text: str) -> None:
        if self.shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """What is written from now on begins on an empty line."""
        self.tell("")
        self.shown = False

    def prompt(self, taken: int, total: int) -> None:
        """So many tokens of the prompt are taken in."""
        now = time.perf_counter()
        if not taken:
            self.tell(f"compiling for a prompt of {total} tokens ...")
            return
        first, then = self.after = self.after or (taken, now)
        rate = f", {(taken - first) / (now - then):.0f} a second" if taken > first else ""
        self.tell(f"prompt: {taken} of {total} tokens{rate}")


def _sampling(args: argparse.Namespace, base: Sampling) -> Sampling:
    """The options that were given, the others as in `base`."""
    names = [name.replace("-", "_") for name, *_ in _CHOICES]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(base, **given)


def rounded(tokens: int) -> int:
    """A context that holds `tokens`: a power of 2, so that few programs are made."""
    return max(64, 1 << (tokens - 1).bit_length())


def _messages(prompt: str, system: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def _tell(prompt: int, times: list[float], counts: list[int], finish: str) -> None:
    # the first token comes from the prompt's plan, the second may wait for the plan of the steps
    steps, seconds = (
        counts[-1] - counts[min(2, len(counts) - 1)],
        times[-1] - times[min(2, len(times) - 1)],
    )
    rate = f", {steps / seconds:.1f} tokens/s after the second" if steps > 0 and seconds > 0 else ""
    ended = {"stop": "ended by itself", "length": "cut at its length"}.get(finish, finish)
    print(
        f"{prompt} tokens of prompt; first token after {times[1] - times[0]:.2f} s with compiling; "
        f"{counts[-1]} tokens{rate}; {ended}",
        file=sys.stderr,
    )
