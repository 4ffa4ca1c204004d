"""Plans on disk: a program that was compiled before starts without e-graph and code generation.

The key holds the program's text with every attribute, dtype and literal, the options, the target
with its limits and rates, and the versions of eggpu's own sources and of the libraries that decide
plans. The folder is the user's cache directory, or EGGPU_CACHE_DIR; EGGPU_CACHE_DIR="" turns the
cache off.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path

from eggpu.compiler.errors import IRError
from eggpu.compiler.ir import Graph
from eggpu.compiler.pipeline import Options
from eggpu.compiler.schedule.plan import Plan
from eggpu.compiler.schedule.target import Target
from eggpu.compiler.text import print_graph
from eggpu.runtime.lavapipe import cache_folder

_LARGEST = 64 << 20  # bytes of a plan's constants that are still worth a file


def folder() -> Path | None:
    """Where plans are kept; None when the cache is off."""
    where = cache_folder()
    return None if where is None else where / "plans"


def key(graph: Graph, target: Target, options: Options) -> str:
    """What decides a plan, as a digest. The user's line numbers do not count."""
    parts = (print_graph(graph.replace(sources={})), repr(target), repr(options), *versions())
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


@functools.cache
def versions() -> tuple[str, ...]:
    """Versions of what decides plans: Python, egglog, jinja2, and a digest of eggpu's compiler and
    templates."""
    digest = hashlib.sha256()
    for package in ("eggpu.compiler", "eggpu.templates"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        root = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".j2")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    libraries = [f"{name} {importlib.metadata.version(name)}" for name in ("egglog", "jinja2")]
    return (sys.version.split()[0], *libraries, digest.hexdigest())


def load(name: str) -> Plan | None:
    """The plan kept under a key; None when there is none or the file is not whole."""
    from eggpu.compiler.schedule.serialize import plan_from_json

    where = folder()
    if where is None:
        return None
    path = where / f"{name}.plan"
    try:
        return plan_from_json(zlib.decompress(path.read_bytes()).decode())
    except FileNotFoundError:
        return None
    except (OSError, zlib.error, UnicodeDecodeError, IRError):
        with suppress(OSError):
            path.unlink()  # a file that was cut off or changed is of no use
        return None


def store(name: str, plan: Plan) -> None:
    """Keep a plan under a key. A folder that cannot be written is no error: the plan is compiled
    again next time."""
    from eggpu.compiler.schedule.serialize import plan_to_json

    where = folder()
    if where is None or sum(len(c.data) for c in plan.constants) > _LARGEST:
        return
    data = zlib.compress(plan_to_json(plan).encode(), 1)
    with suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=where, suffix=".new", delete=False) as new:
            new.write(data)
        os.replace(new.name, where / f"{name}.plan")
