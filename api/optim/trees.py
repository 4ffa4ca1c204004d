"""What optimizers share: their protocol, and formulas applied to each parameter of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from eggpu.compiler import pytree
from eggpu.compiler.errors import TraceError
from eggpu.compiler.library import math as M
from eggpu.compiler.library.shaping import zeros
from eggpu.compiler.tracing import Array, array
from eggpu.nn.initial import known
from eggpu.nn.module import states


class Optimizer(Protocol):
    """`state = opt.init(model)` once, then `model, state = opt.update(model, state, grads)`."""

    def init(self, model: Any) -> Any: ...
    def update(self, model: Any, state: Any, grads: Any) -> tuple[Any, Any]: ...


# The parameter and its gradient (f32), then its moments; the new parameter and moments.
Rule = Callable[..., Sequence[Array]]


def updated(rule: Rule, model: Any, grads: Any, *moments: Any) -> list[Any]:
    """The model and its moments after `rule` for each parameter; other leaves stay."""
    params, gradients, structure = pairs(model, grads)
    columns = [pytree.flatten(m)[0] for m in moments]
    for i, trained in enumerate(trainable(params, structure)):
        if not trained:
            continue
        new, *moved = rule(params[i], gradients[i], *(c[i] for c in columns))
        params[i] = like(params[i], new)
        for column, value in zip(columns, moved, strict=True):
            column[i] = value
    return [pytree.unflatten(structure, leaves) for leaves in (params, *columns)]


def trainable(leaves: Sequence[Any], structure: pytree.Structure) -> list[bool]:
    """For each leaf whether it is trained: a float array that is no state of a module."""
    return [is_float(v) and not s for v, s in zip(leaves, states(structure), strict=True)]


def pairs(model: Any, grads: Any) -> tuple[list[Array], list[Array], pytree.Structure]:
    """Parameters and their gradients (f32) as lists; TraceError when they do not fit together."""
    params, structure = pytree.flatten(model)
    gradients, same = pytree.flatten(grads)
    if same != structure:
        raise TraceError("an update needs gradients in the structure of the model")
    for p, g in zip(params, gradients, strict=True):
        if array(p).shape != array(g).shape:
            raise TraceError(f"gradient {array(g).type} does not fit parameter {array(p).type}")
    wide = [as_float(array(g)) if is_float(g) else array(g) for g in gradients]
    return [array(p) for p in params], wide, structure


def moments(model: Any, shape: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple) -> Any:
    """Zeros for each parameter, f32 whatever its dtype; a scalar in place of other leaves.

    `shape` gives the moment's shape of the parameter's.
    """
    leaves, structure = pytree.flatten(model)
    trained = trainable(leaves, structure)
    shapes = [shape(array(v).shape) if t else () for v, t in zip(leaves, trained, strict=True)]
    return pytree.unflatten(structure, [known(zeros(s)) for s in shapes])


def no_steps() -> Array:
    """The number of updates before the first."""
    return known(zeros((), "i32"))


def choose(condition: Array, yes: Any, no: Any) -> Any:
    """Each leaf of one tree or of another, by a bool scalar."""
    return pytree.tree_map(lambda a, b: M.where(condition, a, b), yes, no)


def map_floats(function: Callable[[Array], Array], tree: Any) -> Any:
    """`function` over the float leaves; others as arrays."""
    arrays = pytree.tree_map(array, tree)
    return pytree.tree_map(lambda v: function(v) if is_float(v) else v, arrays)


def is_float(x: Any) -> bool:
    """True for arrays of floats."""
    return array(x).dtype.kind == "f"


def as_float(x: Array) -> Array:
    """`x` as f32."""
    return M.astype(x, "f32")


def like(x: Array, new: Array) -> Array:
    """`new` in the dtype of `x`."""
    return M.astype(new, x.dtype)


def plus_decay(g: Array, decay: float, p: Array) -> Array:
    """g + decay * p."""
    return g + p * decay if decay else g
