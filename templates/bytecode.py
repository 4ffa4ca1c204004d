"""Compiled templates on disk: Jinja translates a template once, not once a process.

They lie beside compiled plans, in the user's cache directory or EGGPU_CACHE_DIR;
EGGPU_CACHE_DIR="" turns this off. Jinja takes a file only for the same source, Jinja and Python.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from contextlib import suppress
from pathlib import Path

from jinja2.bccache import Bucket, BytecodeCache


def folder() -> Path | None:
    """Where compiled templates are kept; None when nothing is to be kept."""
    chosen = os.environ.get("EGGPU_CACHE_DIR")
    if chosen == "":
        return None
    if chosen is None:
        import platformdirs

        chosen = platformdirs.user_cache_dir("eggpu", appauthor=False)
    return Path(chosen) / "templates"


class Kept(BytecodeCache):
    """A file a template. One that cannot be read or written is no error."""

    def load_bytecode(self, bucket: Bucket) -> None:
        """Fill a bucket from its file, if that is whole."""
        where = folder()
        if where is None:
            return
        try:
            bucket.bytecode_from_string((where / bucket.key).read_bytes())
        except (OSError, EOFError, ValueError, TypeError, pickle.UnpicklingError):
            bucket.reset()

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Write a bucket's file."""
        where = folder()
        if where is None:
            return
        with suppress(OSError):
            where.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=where, suffix=".new", delete=False) as new:
                new.write(bucket.bytecode_to_string())
            os.replace(new.name, where / bucket.key)
