"""Gradients against finite differences, in double precision on the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eggpu.compiler import pytree
from eggpu.compiler.autodiff import grad
from eggpu.compiler.errors import EggpuError
from eggpu.compiler.library.math import multiply
from eggpu.compiler.library.reductions import sum as sum_
from eggpu.compiler.reference import evaluate
from eggpu.compiler.tracing import Array, array, leaf_type, parameter_names, trace_call

Wide = np.ndarray[Any, np.dtype[np.float64]]
_SHOWN = 5  # elements of an argument in a report


@dataclass(frozen=True, slots=True)
class Difference:
    """An element whose derivative differs: what autodiff gives, and the slopes to both sides."""

    argument: str
    index: tuple[int, ...]
    gradient: float
    left: float
    right: float

    @property
    def numeric(self) -> float:
        """The central difference."""
        return (self.left + self.right) / 2

    def __str__(self) -> str:
        place = (
            f"{self.argument}[{', '.join(map(str, self.index))}]" if self.index else self.argument
        )
        text = f"{place}: gradient {self.gradient:.6g}, finite difference {self.numeric:.6g}"
        if abs(self.left - self.right) > 1e-2 * (1e-3 + abs(self.left) + abs(self.right)):
            text += f" (a corner: {self.left:.6g} from the left, {self.right:.6g} from the right)"
        return text


class WrongGradient(EggpuError, AssertionError):
    """A gradient that is not the finite difference; `differences` has the elements, worst first."""

    def __init__(
        self, name: str, order: int, differences: Sequence[Difference], checked: int
    ) -> None:
        self.differences = tuple(differences)
        which = {1: "gradient", 2: "second-order gradient"}.get(order, f"gradient of order {order}")
        lines = [f"the {which} of {name} is wrong in {len(differences)} of {checked} elements"]
        for argument in dict.fromkeys(d.argument for d in differences):
            mine = [d for d in differences if d.argument == argument]
            lines += [f"  {d}" for d in mine[:_SHOWN]]
            if len(mine) > _SHOWN:
                lines.append(f"  ... and {len(mine) - _SHOWN} more of {argument}")
        super().__init__("\n".join(lines))


def check_grads(
    function: Callable[..., Any],
    *args: Any,
    order: int = 1,
    step: float = 1e-5,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    most: int = 200,
    seed: int = 0,
) -> int:
    """Compare gradients with finite differences; how many derivatives were compared.

    Every float array in `args` (arrays, numbers and pytrees of them) is checked against
    central differences of width `step` of a randomly weighted sum of all float results, in
    double precision; of an array with more than `most` elements, `most` random ones. `order=2` also
    checks the gradient of the gradient, and so on. Raises WrongGradient, which lists the elements
    that differ by more than atol + rtol * size, and where the function has a corner.

    >>> check_grads(lambda x: eggpu.tanh(x) @ x, np.ones((3, 3), np.float32))
    9
    """
    leaves, structure = pytree.flatten(list(args))
    labels = _labels(function, structure)
    values = [np.asarray(v.numpy() if isinstance(v, Array) else v) for v in leaves]
    moving = [k for k, v in enumerate(leaves) if leaf_type(v).dtype.kind == "f"]
    rng = np.random.default_rng(seed)
    name = getattr(function, "__name__", "the function")

    def scalar(*arrays: Any) -> Any:
        out, _ = pytree.flatten(function(*pytree.unflatten(structure, list(arrays))))
        return _weighted([array(r) for r in out], np.random.default_rng(seed))

    count = 0
    for n in range(1, order + 1):
        check = _Check(scalar, values, moving, labels, step)
        wrong = check.run(rng, rtol, atol, most)
        count += check.compared
        if wrong:
            raise WrongGradient(name, n, wrong, check.compared)
        scalar = _slope(scalar, moving, seed + n)
    return count


def _labels(function: Callable[..., Any], structure: pytree.Structure) -> list[str]:
    names = parameter_names(function)
    labels: list[str] = []
    for k, child in enumerate(structure.children):
        labels += pytree.paths(child, names[k] if k < len(names) else f"argument {k}")
    return labels


def _weighted(results: Sequence[Array], rng: np.random.Generator) -> Array:
    total = array(0.0)
    for result in results:
        if result.dtype.kind == "f":
            weights = array(rng.uniform(0.5, 1.5, result.shape) * rng.choice([-1, 1], result.shape))
            total = total + sum_(multiply(result, weights))  # type: ignore[operator]
    return total


def _slope(scalar: Callable[..., Any], moving: Sequence[int], seed: int) -> Callable[..., Any]:
    """A weighted sum of the gradient: its own gradient is the next order."""

    def run(*arrays: Any) -> Any:
        grads = grad(scalar, tuple(moving))(*arrays)
        return _weighted(list(grads), np.random.default_rng(seed))

    return run


class _Check:
    """One order: the gradient of a scalar function of arrays."""

    def __init__(
        self,
        scalar: Callable[..., Any],
        values: Sequence[np.ndarray],
        moving: Sequence[int],
        labels: Sequence[str],
        step: float,
    ) -> None:
        self.values = [v.astype(np.float64) if v.dtype.kind == "f" else v for v in values]
        self.moving, self.labels, self.step = moving, labels, step
        self.graph = trace_call(scalar, list(values)).graph
        both = trace_call(grad(scalar, tuple(moving)), list(values)).graph
        self.grads = evaluate(both, self.values, np.float64) if moving else []
        self.compared = 0

    def _at(self, k: int, index: tuple[int, ...], move: float) -> float:
        moved = list(self.values)
        moved[k] = np.array(moved[k], np.float64)
        moved[k][index] += move
        return float(evaluate(self.graph, moved, np.float64)[0])

    def run(
        self, rng: np.random.Generator, rtol: float, atol: float, most: int
    ) -> list[Difference]:
        """The elements that differ, worst first."""
        here = float(evaluate(self.graph, self.values, np.float64)[0])
        found: list[tuple[float, Difference]] = []
        for k, gradient in zip(self.moving, self.grads, strict=True):
            places = list(np.ndindex(*gradient.shape))
            if len(places) > most:
                places = [places[i] for i in sorted(rng.choice(len(places), most, replace=False))]
            for index in places:
                self.compared += 1
                after, before = (self._at(k, index, move) for move in (self.step, -self.step))
                slopes = (here - before) / self.step, (after - here) / self.step
                one = Difference(self.labels[k], index, float(gradient[index]), *slopes)
                error = abs(one.gradient - one.numeric)
                if not error <= atol + rtol * abs(one.numeric):
                    found.append((-error if error == error else -np.inf, one))
        return [d for _, d in sorted(found, key=lambda pair: pair[0])]
