"""`eggpu serve`: a language model behind OpenAI's chat and completions endpoints."""

from __future__ import annotations

import argparse
import ipaddress
import socket
import sys
from collections.abc import Callable
from typing import Any

import eggpu as eg
from eggpu.compiler.errors import EggpuError

_LONGEST = 2048  # tokens of the context by default
_BACKLOG = 128  # connections that wait to be accepted


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """The command's flags."""
    text = "serve a language model over HTTP, with OpenAI's endpoints"
    parser = commands.add_parser(
        "serve", parents=[common], help=text,
        description="Serve /v1/chat/completions, /v1/completions, /v1/models and /health. Several "
        "texts are continued at once; others wait. Needs pip install 'eggpu[serve,models]'.",
        epilog="example: eggpu serve --model smollm2 --max-sequences 4",
    )  # fmt: skip
    parser.add_argument(
        "--model", default="smollm2", metavar="NAME",
        help="smollm2, a GGUF file or a folder with config.json (default: smollm2)",
    )  # fmt: skip
    parser.add_argument("--name", help="what clients call the model (default: as --model)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at (default: 127.0.0.1, this machine)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port to listen at; 0 takes a free one (default: 8000)",
    )
    for name, default, what in (
        ("max-sequences", 4, "texts that are continued at once"),
        ("max-waiting", 64, "texts that wait; beyond them clients get 429"),
        ("max-tokens", 0, "tokens of an answer at most; 0 is as many as fit"),
        ("max-body", 1 << 20, "bytes of a request"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    parser.add_argument(
        "--context", type=int, default=None, metavar="N",
        help=f"room for prompt and answer of a text (default: the model's, at most {_LONGEST})",
    )  # fmt: skip
    parser.add_argument(
        "--cache",
        choices=("f32", "f16"),
        default="f32",
        help="type of keys and values (default: f32)",
    )
    parser.set_defaults(run=run)


class ServeError(EggpuError):
    """The server cannot be started."""


def run(args: argparse.Namespace) -> int:
    """Load, compile, listen."""
    _check(args)
    try:
        import starlette  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import uvicorn
    except ImportError:
        raise ServeError(
            "serving needs the packages starlette and uvicorn: pip install 'eggpu[serve]'"
        ) from None
    from eggpu.serve import Engine, application

    if args.device is not None:
        eg.device(args.device)
    bound = _bound(
        args.host, args.port
    )  # before the model is loaded: a port in use is told at once
    with bound:
        engine = Engine(*_loaded(args))
        name = args.name or args.model
        app = application(engine, name, most_tokens=args.max_tokens, most_body=args.max_body)
        bound.listen(_BACKLOG)
        _tell(bound, name, engine)
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on")
        server = uvicorn.Server(config)
        server.handle_exit = _ending(engine, server.handle_exit)
        server.run(sockets=[bound])
    return 0


def _ending(engine: Any, then: Callable[..., None]) -> Callable[..., None]:
    """A signal handler that first ends all texts: the server waits for their readers."""

    def handle(number: int, frame: Any) -> None:
        engine.end()
        then(number, frame)

    return handle


def _check(args: argparse.Namespace) -> None:
    for name, least in (
        ("max_sequences", 1), ("max_waiting", 1), ("max_tokens", 0), ("max_body", 1), ("port", 0),
    ):  # fmt: skip
        value = getattr(args, name)
        if value < least:
            flag = name.replace("_", "-")
            raise ServeError(f"--{flag} needs a number of at least {least}, got {value}")
    if args.context is not None and args.context < 2:
        raise ServeError(f"--context needs at least 2 positions, got {args.context}")
    if args.port > 65535:
        raise ServeError(f"--port needs a number up to 65535, got {args.port}")


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServeError(f"{host} is no address of this machine: {error}") from None
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        raise ServeError(f"cannot listen at {host}, port {port}: {error.strerror}") from None
    return made


def _loaded(args: argparse.Namespace) -> tuple[Any, Any]:
    from eggpu.generate import load_language_model
    from eggpu.generate.batching import Batcher

    language = load_language_model(args.model, args.context)
    batcher = Batcher(
        language.model, slots=args.max_sequences, waiting=args.max_waiting,
        context=args.context or min(language.model.settings.context, _LONGEST),
        cache_dtype=args.cache,
    )  # fmt: skip
    print("compiling ...", file=sys.stderr, flush=True)
    batcher.warm()
    return language, batcher


def _tell(bound: socket.socket, name: str, engine: Any) -> None:
    host, port = bound.getsockname()[:2]
    if not ipaddress.ip_address(host.split("%")[0]).is_loopback:
        print(
            f"warning: {host} can be reached from other machines, and there is no password",
            file=sys.stderr,
        )
    shown = f"[{host}]" if ":" in host else host
    batcher = engine.batcher
    print(
        f"serving {name} at http://{shown}:{port}/v1 ({batcher.slots} texts at once, "
        f"{batcher.context} tokens each); Ctrl-C ends it",
        flush=True,
    )
