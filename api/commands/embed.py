"""`eggpu embed`: vectors of texts from a pretrained sentence encoder."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import eggpu as eg

_SHOWN = 8


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """The command's flags."""
    text = "turn texts into vectors with a pretrained encoder"
    parser = commands.add_parser(
        "embed", parents=[common], help=text,
        description="Turn texts into vectors of length 1; near texts have near vectors.",
        epilog='example: eggpu embed --model minilm "a cat" "a kitten" "a tax form"',
    )  # fmt: skip
    parser.add_argument("text", nargs="+", help="texts; - reads one a line")
    parser.add_argument(
        "--model", default="minilm", metavar="NAME",
        help="minilm or a folder with config.json (default: minilm)",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print the vectors, a line of JSON each"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Embed and print vectors, or how near the texts are to each other."""
    from eggpu.generate.embedding import load_embedder

    if args.device is not None:
        eg.device(args.device)
    embedder = load_embedder(args.model)
    texts = [line.rstrip("\n") for line in sys.stdin] if args.text == ["-"] else args.text
    vectors = embedder(texts)
    if args.json:
        for vector in vectors:
            print(json.dumps([round(float(x), 7) for x in vector]))
        return 0
    near = vectors @ vectors.T
    for k, (text, vector) in enumerate(zip(texts, vectors, strict=True)):
        numbers = " ".join(f"{x:+.4f}" for x in vector[:_SHOWN])
        print(f"{k}  {numbers} ... ({len(vector)} numbers)  {text}")
    if len(texts) > 1:
        print("cosine of each text with the others")
        for k, row in enumerate(near):
            print(f"{k}  " + "  ".join(f"{x:.4f}" for x in row))
    return 0
