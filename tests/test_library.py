"""Every public function against NumPy: at once (the interpreter) and compiled, with arguments of
all shapes."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.testing import check_grads

sys.path.insert(0, str(Path(__file__).parent))
import library_nn  # noqa: F401 - adds its rows
from library_table import ROWS, Row

NAMES = list(dict.fromkeys(r.name for r in ROWS))


@cache
def rows(name: str) -> list[Row]:
    return [r for r in ROWS if r.name == name]


def public() -> set[str]:
    """Functions on arrays under `eggpu` and `eggpu.nn`."""
    found = [*vars(eg).items(), *vars(nn).items()]
    return {
        name
        for name, value in found
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", "").startswith("eggpu.compiler.library.")
    }


def test_every_public_function_has_a_row() -> None:
    assert public() - set(NAMES) == {"fori_loop", "scan"}  # which take functions: test_loops.py


def test_every_library_function_is_public() -> None:
    import eggpu.compiler.library as library

    named = ("attention", "einsum", "indexing", "linalg", "losses", "math", "nn", "ordering",
             "reductions", "shaping", "softmax", "spatial", "updates")  # fmt: skip
    helpers = {"getitem", "sliced", "joined", "mean_node", "centered", "safe_max", "At"}
    helpers |= {"log_softmax_node"}
    inside = set()
    for module in named:
        home = f"eggpu.compiler.library.{module}"
        values = vars(getattr(library, module, sys.modules[home]))
        inside |= {n for n, v in values.items() if getattr(v, "__module__", "") == home}
    inside = {n for n in inside if not n.startswith("_")} - helpers
    assert inside - public() == set()


def flat(value: Any) -> list[Any]:
    return (
        [v for item in value for v in flat(item)] if isinstance(value, (list, tuple)) else [value]
    )


def expected(r: Row, args: tuple[Any, ...]) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        out = r.oracle(*args) if r.oracle else r.call(np, *args)
    return [np.asarray(v) for v in flat(out)]


def same(got: list[Any], want: list[np.ndarray], what: str) -> None:
    assert len(got) == len(want), what
    for g, w in zip(got, want, strict=True):
        g = np.asarray(g)
        assert g.shape == w.shape, f"{what}: {g.shape} for {w.shape}"
        kinds = {"f": "f", "i": "iu", "u": "iu", "b": "b"}
        assert g.dtype.kind in kinds[w.dtype.kind], f"{what}: {g.dtype} for {w.dtype}"
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=5e-6, err_msg=what)


@pytest.mark.parametrize("name", NAMES)
def test_it_means_what_numpy_means(name: str) -> None:
    for r in rows(name):
        for args in r.args:
            shapes = [np.shape(a) for a in args]
            got = flat(r.call(r.module, *(eg.array(a) for a in args)))
            same(got, expected(r, args), f"{name} of {shapes}")


@pytest.mark.parametrize("name", NAMES)
def test_compiled_it_means_the_same(name: str) -> None:
    calls = [(r, args) for r in rows(name) for args in r.args]

    def every(arguments: Any) -> Any:
        return [
            flat(r.call(r.module, *mine)) for (r, _), mine in zip(calls, arguments, strict=True)
        ]

    outputs = eg.compile(every)([list(args) for _, args in calls])
    for (r, args), got in zip(calls, outputs, strict=True):
        shapes = [np.shape(a) for a in args]
        same([g.numpy() for g in got], expected(r, args), f"compiled {name} of {shapes}")


@pytest.mark.parametrize("name", [n for n in NAMES if n != "stop_gradient"])
def test_its_gradient_is_the_finite_difference(name: str) -> None:
    for r in rows(name):
        for args in r.args:
            floats = [a for a in args if np.asarray(a).dtype == np.float32 and np.size(a)]
            if not floats or (name == "kl_div" and not args[1].all()):  # 0 log 0 is a corner
                continue

            def call(*xs: Any, r: Row = r) -> Any:
                out = r.call(r.module, *map(eg.array, xs))
                return out[0] if name == "batch_norm" else out  # new statistics have no gradient

            check_grads(call, *args, most=8)
