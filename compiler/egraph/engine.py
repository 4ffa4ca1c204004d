"""The egglog engine behind a few calls; the only module that knows its two supported versions apart
(13.2 and 14).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import CompileError


@dataclass(frozen=True, slots=True)
class _Loaded(MetaPathFinder, Loader):
    """Whoever imports egglog later gets the module that is loaded: 14 panics when loaded twice."""

    module: ModuleType

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == "egglog.bindings" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """It has run."""


def _bindings() -> Any:
    """egglog's compiled module, without the Python language around it: that takes twenty times as
    long to import and is not used here."""
    package = importlib.util.find_spec("egglog")
    folders = package.submodule_search_locations if package is not None else None
    if "egglog" not in sys.modules:
        paths = (Path(f, f"bindings{s}") for f in folders or () for s in EXTENSION_SUFFIXES)
        for path in (p for p in paths if p.exists()):
            spec = importlib.util.spec_from_file_location("egglog.bindings", path)
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                sys.modules.pop("egglog.bindings", None)
                sys.meta_path.insert(0, _Loaded(module))
                return module
    from egglog import bindings

    return bindings


bindings = _bindings()


@dataclass(frozen=True, slots=True)
class Step:
    """What one run of rules did: matches by rule, and whether anything changed."""

    matches: dict[str, int]
    updated: bool


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_users: set[int] = set()  # the process that uses the engine, and those that it was forked from


def _leave_after_fork() -> None:
    """In a forked process, which lacks the engine's threads: what waits for them waits for ever,
    also to free an e-graph. So those that there are stay until the process ends."""
    for engine in list(_engines):
        engine.keep()


def _refuse_after_fork() -> None:
    if before := _users - {os.getpid()}:
        raise CompileError(
            f"process {before.pop()} used the e-graph before it was forked to this one, where its "
            "threads are missing: start processes by spawn, or fork before anything is compiled"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_after_fork)


class Engine:
    """One e-graph. Texts must be short: version 13.2 copies the source of a program into every span
    of it.
    """

    def __init__(self) -> None:
        _refuse_after_fork()
        _users.add(os.getpid())
        self._egraph: Any = bindings.EGraph()
        _engines.add(self)
        # 14 parses and runs in one call, without handing the commands to Python
        self._direct = getattr(self._egraph, "parse_and_run_program", None)

    def keep(self) -> None:
        """Hold the e-graph until the process ends."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._egraph))

    def run(self, text: str) -> list[Any]:
        """Run commands; CompileError with the command when the engine refuses or panics, and in a
        process that was forked from one that used the engine."""
        _refuse_after_fork()
        try:
            if self._direct is not None:
                return self._direct(text)
            return self._egraph.run_program(*self._egraph.parse_program(text))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise CompileError(f"the e-graph refused {text[:200]}: {error}") from error

    def step(self, schedule: str) -> Step:
        """Run a schedule such as `(run algebra)`."""
        report = self.run(f"(run-schedule {schedule})")[0].report
        return Step(dict(report.num_matches_per_rule), report.updated)

    def sizes(self) -> dict[str, int]:
        """Rows by function."""
        return dict(self.run("(print-size)")[0].sizes)

    def count(self, constructors: Iterable[str]) -> tuple[int, int]:
        """How many e-nodes and e-classes the rows of these constructors are."""
        functions = self._egraph.freeze().functions
        outputs = [
            (functions[c].output_sort, row.output)
            for c in constructors
            for row in functions[c].rows
        ]
        return len(outputs), len(set(outputs))

    def freeze(self) -> dict[str, list[tuple[list[Any], Any]]]:
        """(inputs, output) of all rows of all functions, as opaque hashable values."""
        frozen = self._egraph.freeze()
        return {
            name: [(row.inputs, row.output) for row in function.rows if not row.subsumed]
            for name, function in frozen.functions.items()
        }

    def integer(self, value: Any) -> int:
        return self._egraph.value_to_i64(value)

    def number(self, value: Any) -> float:
        return self._egraph.value_to_f64(value)

    def string(self, value: Any) -> str:
        return self._egraph.value_to_string(value)

    def integers(self, value: Any) -> tuple[int, ...]:
        return tuple(self._egraph.value_to_i64(v) for v in self._egraph.value_to_vec(value))
