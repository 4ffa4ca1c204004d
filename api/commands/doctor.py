"""`eggpu doctor`: checks what eggpu needs, and says what to do about what is missing."""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

import numpy as np

import eggpu as eg
from eggpu import nn
from eggpu.compiler.errors import EggpuError
from eggpu.runtime import Device, DeviceError, KernelError, adapters

_PACKAGES = ("numpy", "egglog", "wgpu", "jinja2", "rich", "platformdirs", "safetensors")
_EXTRAS = {
    "matplotlib": "train",
    "scikit-learn": "digits",
    "gguf": "models",
    "tokenizers": "models",
    "starlette": "serve",
    "uvicorn": "serve",
    "mpi4py": "mpi",
}
_MARKS = {"ok": "ok  ", "missing": "FAIL", "optional": "-   "}
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and what to do."""

    state: Literal["ok", "missing", "optional"]
    name: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"\n       -> {self.advice}" if self.advice else ""
        return f"{_MARKS[self.state]}  {self.name:<15}  {self.found}{advice}"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """The command's flags."""
    text = "check what eggpu needs, and say what is missing"
    parser = commands.add_parser("doctor", parents=[common], help=text, description=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print every check; 1 if something that eggpu needs is missing."""
    failed = 0
    for check in checks(args.device):
        print(check, flush=True)
        failed += check.state == "missing"
    print("all is well" if not failed else f"{failed} of what eggpu needs is missing")
    return 1 if failed else 0


def checks(name: str | None) -> Iterator[Check]:
    """Every check, each after the ones that it needs."""
    yield python()
    yield from map(package, _PACKAGES)
    yield from (extra(p, e) for p, e in _EXTRAS.items())
    if sys.platform.startswith("linux"):
        yield vulkan_loader()
    try:
        found = adapters()
        listed = ", ".join(f"{a.name} ({a.backend})" for a in found)
        device = eg.device(name)
    except DeviceError as error:
        yield Check("missing", "device", "none", str(error))
        return
    yield Check("ok", "devices", listed)
    yield from capabilities(device)
    yield program()


def python() -> Check:
    """The interpreter's version."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check("ok", "Python", found)


def package(name: str) -> Check:
    """A package that eggpu needs."""
    try:
        return Check("ok", name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check("missing", name, "not installed", f"pip install {name}")


def extra(name: str, group: str) -> Check:
    """A package that one part of eggpu needs."""
    try:
        return Check("ok", name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check("optional", name, "not installed", f"pip install 'eggpu[{group}]'")


def vulkan_loader() -> Check:
    """libvulkan, which finds the drivers."""
    for name in ("libvulkan.so.1", ctypes.util.find_library("vulkan")):
        if name is None:
            continue
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return Check("ok", "Vulkan loader", name)
    advice = "apt-get install libvulkan1, or your distribution's vulkan-loader"
    return Check("missing", "Vulkan loader", "not found", advice)


def capabilities(device: Device) -> Iterator[Check]:
    """What the device that is used can do."""
    target = device.target
    yield Check("ok", "device", f"{target.name}, {target.backend}, {target.driver}")
    lanes = f"subgroups of {target.subgroup}" if target.subgroup else "no subgroups"
    yield Check("ok" if target.subgroup else "optional", "subgroups", lanes)
    timed = "timestamp-query" in target.features
    found = "kernels can be timed" if timed else "kernels cannot be timed"
    yield Check("ok" if timed else "optional", "timestamps", found)
    half = "shader-f16" in target.features
    yield Check("ok" if half else "optional", "f16", "yes" if half else "no: f32 only")


def program() -> Check:
    """A small program, compiled, run and compared with NumPy."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((33, 20), (20, 17)))
    e = np.exp(x.astype(np.float64) @ w)
    expected = e / e.sum(-1, keepdims=True)
    try:
        found = np.asarray(eg.compile(lambda x, w: nn.softmax(x @ w))(x, w))
    except (EggpuError, DeviceError, KernelError) as error:
        return Check("missing", "program", "failed", str(error))
    gap = float(np.abs(found - expected).max())
    if gap < _TOLERANCE:
        return Check("ok", "program", f"softmax(x @ w) is right to {gap:.0e}")
    advice = "update the driver, or choose another device with --device"
    return Check("missing", "program", f"softmax(x @ w) is off by {gap:.0e}", advice)
