"""wgpu-native's functions as cffi sees them, without reading its C header at every start.

The wgpu package has cffi parse 5,000 lines of C each time it is imported, which takes longer than
the rest of it. cffi can write what it found as a Python module; that is kept beside compiled plans,
under a name that holds the header and cffi's version. EGGPU_CACHE_DIR="" turns this off.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cffi

from .lavapipe import cache_folder


class Remembering(cffi.FFI):
    """An FFI whose first `cdef` takes a header's declarations from disk where they are kept."""

    def __init__(self) -> None:
        # what cffi.FFI sets up (its parser among it) waits until somebody needs it
        self._started = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__dict__.get("_started", True):
            raise AttributeError(name)
        self._start()
        return getattr(self, name)

    def _start(self) -> None:
        self._started = True
        super().__init__()

    def cdef(self, csource: str, *args: Any, **kwargs: Any) -> None:
        """Declare what C text says; from the kept module if it is the first and has no options."""
        path = None if self._started or args or kwargs else kept(csource)
        if path is None:
            if not self._started:
                self._start()
            super().cdef(csource, *args, **kwargs)
            return
        known, parsed = loaded(path), None
        if known is None:
            parsed = cffi.api.FFI()
            parsed.cdef(csource)
            store(parsed, path)
            known = loaded(path)  # a type by its name: the parsed one needs 12 ms, this one none
        if known is not None:
            found = {n: getattr(known, n) for n in dir(known) if not n.startswith("__")}
        else:
            found = vars(parsed)
        self.__dict__.update(found)
        self._started = True

    def set_source(self, module_name: str, source: Any, *args: Any, **kwargs: Any) -> None:
        """Name the module that would be made; nothing to do when it was."""
        if "_parser" in self.__dict__:
            super().set_source(module_name, source, *args, **kwargs)


def kept(header: str) -> Path | None:
    """Where a header's declarations are kept; None when nothing is."""
    folder = cache_folder()
    if folder is None:
        return None
    text = f"{cffi.__version__} {sys.implementation.cache_tag} {sys.platform} {header}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return folder / "headers" / f"eggpu_header_{digest}.py"


def loaded(path: Path) -> Any:
    """The compiled FFI of a module that `store` wrote; None when there is none that works."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return module.ffi
    except OSError:
        return None
    except (ImportError, SyntaxError, ValueError, TypeError, AttributeError, NameError):
        # cut off or changed, or of another cffi: of no use
        with suppress(OSError):
            path.unlink()
        return None


def store(parsed: cffi.FFI, path: Path) -> None:
    """Keep an FFI's declarations. A folder that cannot be written is no error."""
    from cffi.recompiler import make_py_source

    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = os.path.join(folder, path.name)
            make_py_source(parsed, path.stem, new)
            os.replace(new, path)


@contextmanager
def remembered() -> Iterator[None]:
    """While it is open, an `FFI` that is made remembers its header."""
    before = cffi.FFI
    cffi.FFI = Remembering
    try:
        yield
    finally:
        cffi.FFI = before


with remembered():
    import wgpu.backends.wgpu_native

native = wgpu.backends.wgpu_native
