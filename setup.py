"""Builds outside the tree: a build/ left behind puts deleted modules into the next wheel.

Everything else about the package is in pyproject.toml.
"""

import tempfile

from setuptools import setup

with tempfile.TemporaryDirectory(prefix="eggpu-build-") as folder:
    setup(options={"build": {"build_base": folder}})
