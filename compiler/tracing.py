"""Arrays as users see them, and `trace`: running a plain function on symbolic arrays to get its
graph.

An `Array` is a value that is known (NumPy or device memory) or an expression over known values and
trace inputs. Outside of a trace an expression over known values is computed by NumPy when its value
is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from . import pytree
from .errors import TraceError, TypeMismatch
from .expect import Expectation, expecting, of_arguments
from .ir import Graph, Kind, Node, at_line, make, recording, topological
from .loops import tidy
from .ops import constant, input_node
from .threads import Stack
from .types import DTYPES, DType, Type, dtype


class Storage(Protocol):
    """A value kept somewhere else, such as on a device."""

    @property
    def type(self) -> Type: ...

    @property
    def gone(self) -> bool: ...  # whether `numpy` raises, as after a donation

    def numpy(self) -> np.ndarray: ...


class Array:
    """An n-dimensional array with NumPy's operators. Methods and operators are attached by
    `eggpu.compiler.library`."""

    __slots__ = ("_node", "_value", "storage")
    __eggpu_array__ = True
    __array_priority__ = 1000
    __array_ufunc__ = None  # NumPy arrays on the left defer to our operators

    def __init__(
        self,
        node: Node | None = None,
        storage: Storage | None = None,
        value: np.ndarray | None = None,
    ) -> None:
        self._node = node
        self._value = value
        self.storage = storage

    @property
    def node(self) -> Node:
        """The expression; a known value becomes a constant of it."""
        if self._node is None or self._gone():
            value = self.numpy()
            self._node = constant(value, dtype(value.dtype))
        return self._node

    @property
    def type(self) -> Type:
        if self.storage is not None:
            return self.storage.type
        if self._node is None:
            assert self._value is not None
            return Type(self._value.shape, dtype(self._value.dtype))
        return self._node.type

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return self.type.rank

    @property
    def size(self) -> int:
        return self.type.size

    def numpy(self) -> np.ndarray:
        """The value as a NumPy array. Raises TraceError for a symbolic array, DonatedError for one
        that a call has consumed, whether the host had its value or not."""
        if self._value is None or self._gone():
            self._value = self.storage.numpy() if self.storage is not None else self._compute()
        return self._value

    def _gone(self) -> bool:
        return self.storage is not None and self.storage.gone

    def _compute(self) -> np.ndarray:
        assert self._node is not None
        if any(n.kind is Kind.INPUT for n in topological([self._node])):
            raise TraceError(
                f"the value of a traced {self.type} was asked for: inside a compiled function an "
                "array has no value yet. "
                "Use eggpu.where instead of `if`, and keep NumPy calls, float(), int() and print "
                "outside"
            )
        from .reference import evaluate

        return evaluate(Graph("value", (), (self._node,)), [])[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy().astype(dtype, copy=False) if dtype is not None else self.numpy()

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __index__(self) -> int:
        if self.dtype.kind == "f":
            raise TypeError(f"an index must be an integer, got {self.type}")
        return int(self.numpy())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __iter__(self):  # noqa: ANN204
        if not self.shape:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(self.shape[0]))  # type: ignore[index]

    def item(self) -> Any:
        return self.numpy().item()

    def tolist(self) -> Any:
        return self.numpy().tolist()

    def __repr__(self) -> str:
        if self._value is None and self.storage is None and is_traced(self):
            return f"Array({self.type}, traced)"
        if self._gone():
            return f"Array({self.type}, donated)"
        return f"Array({np.array2string(self.numpy(), threshold=20, separator=', ')}, {self.type})"

    if TYPE_CHECKING:  # attached by eggpu.compiler.library

        def __add__(self, other: Any) -> Array: ...
        def __radd__(self, other: Any) -> Array: ...
        def __sub__(self, other: Any) -> Array: ...
        def __rsub__(self, other: Any) -> Array: ...
        def __mul__(self, other: Any) -> Array: ...
        def __rmul__(self, other: Any) -> Array: ...
        def __truediv__(self, other: Any) -> Array: ...
        def __rtruediv__(self, other: Any) -> Array: ...
        def __floordiv__(self, other: Any) -> Array: ...
        def __mod__(self, other: Any) -> Array: ...
        def __pow__(self, other: Any) -> Array: ...
        def __matmul__(self, other: Any) -> Array: ...
        def __rmatmul__(self, other: Any) -> Array: ...
        def __and__(self, other: Any) -> Array: ...
        def __or__(self, other: Any) -> Array: ...
        def __xor__(self, other: Any) -> Array: ...
        def __lshift__(self, other: Any) -> Array: ...
        def __rshift__(self, other: Any) -> Array: ...
        def __lt__(self, other: Any) -> Array: ...
        def __le__(self, other: Any) -> Array: ...
        def __gt__(self, other: Any) -> Array: ...
        def __ge__(self, other: Any) -> Array: ...
        def __eq__(self, other: object) -> Array: ...  # type: ignore[override]
        def __ne__(self, other: object) -> Array: ...  # type: ignore[override]
        def __neg__(self) -> Array: ...
        def __abs__(self) -> Array: ...
        def __invert__(self) -> Array: ...
        def __getitem__(self, key: Any) -> Array: ...
        @property
        def T(self) -> Array: ...
        def sum(self, axis: Any = None, keepdims: bool = False) -> Array: ...
        def prod(self, axis: Any = None, keepdims: bool = False) -> Array: ...
        def max(self, axis: Any = None, keepdims: bool = False) -> Array: ...
        def min(self, axis: Any = None, keepdims: bool = False) -> Array: ...
        def mean(self, axis: Any = None, keepdims: bool = False) -> Array: ...
        def var(self, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> Array: ...
        def std(self, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> Array: ...
        def any(self, axis: Any = None, keepdims: bool = False) -> Array: ...
        def all(self, axis: Any = None, keepdims: bool = False) -> Array: ...
        def argmax(self, axis: int | None = None, keepdims: bool = False) -> Array: ...
        def argmin(self, axis: int | None = None, keepdims: bool = False) -> Array: ...
        def reshape(self, shape: Any, *more: int) -> Array: ...
        def transpose(self, axes: Any = None, *more: int) -> Array: ...
        def swapaxes(self, a: int, b: int) -> Array: ...
        def squeeze(self, axis: Any = None) -> Array: ...
        def ravel(self) -> Array: ...
        def astype(self, to: Any) -> Array: ...
        def clip(self, low: Any = None, high: Any = None) -> Array: ...
        def take(self, positions: Any, axis: int | None = None) -> Array: ...
        def dot(self, other: Any) -> Array: ...

    __hash__ = object.__hash__


def array(value: Any, dtype: Any = None) -> Array:
    """`value` (array, number, nested list) as an Array; 64-bit NumPy types become 32-bit ones."""
    from .types import dtype as as_dtype

    if isinstance(value, Array):
        return value if dtype is None or value.dtype is as_dtype(dtype) else value.astype(dtype)  # type: ignore[attr-defined]
    if isinstance(value, (list, tuple)) and any(isinstance(v, Array) for v in value):
        from .library.shaping import stack

        return stack([array(v, dtype) for v in value])
    found = np.asarray(value)
    if found.dtype == object or found.dtype.kind not in "fiub":
        raise TypeMismatch(
            f"an array needs numbers, got {type(value).__name__} of dtype {found.dtype}"
        )
    wanted = as_dtype(dtype) if dtype is not None else as_dtype(found.dtype)
    return Array(value=found.astype(wanted.numpy, copy=False))


def is_traced(value: Array) -> bool:
    """Whether an array is computed from the arguments of a trace that is under way."""
    node = value._node  # pyright: ignore[reportPrivateUsage]
    return node is not None and any(n.kind is Kind.INPUT for n in topological([node]))


def host_value(value: Array) -> np.ndarray | None:
    """What the host has of an array already; None where that would be computed or copied."""
    return value._value  # pyright: ignore[reportPrivateUsage]


def leaf_type(leaf: Any) -> Type:
    """The type of a leaf as an argument of a trace: Python numbers are f32, i32 or bool scalars."""
    match leaf:
        case Type():
            return leaf
        case Array():
            return leaf.type
        case bool():
            return Type((), DTYPES["bool"])
        case int():
            return Type((), DTYPES["i32"])
        case float():
            return Type((), DTYPES["f32"])
        case _:
            return Type(tuple(leaf.shape), dtype(leaf.dtype))


@dataclass(frozen=True)
class Traced:
    """A traced call: its graph, how arguments and results are put together, and what was
    differentiated."""

    graph: Graph
    primal: Graph
    arguments: pytree.Structure
    results: pytree.Structure
    expected: Mapping[int, Sequence[Expectation]] = field(default_factory=dict)  # of arguments


def trace_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    names: Sequence[str] | None = None,
    name: str | None = None,
) -> Traced:
    """Run `function` on symbolic arrays of the arguments' types and take its graph.

    `names` are the parameters' names, for the names of inputs; leaves may also be Types.
    """
    from .types import Type as TypeClass

    kwargs = kwargs or {}
    tree = (tuple(args), kwargs)
    leaves, structure = _flatten_with_types(tree, TypeClass)
    labels = _labels(structure, names)
    sources: dict[Node, str] = {}
    differentiated: list[Node] = []
    found: list[Expectation] = []
    with recording(sources), noting(differentiated), expecting(found):
        inputs = [
            input_node(i, label, leaf_type(v))
            for i, (v, label) in enumerate(zip(leaves, labels, strict=True))
        ]
        call_args, call_kwargs = pytree.unflatten(structure, [Array(n) for n in inputs])
        out = function(*call_args, **call_kwargs)
        result_leaves, results = pytree.flatten(out)
        nodes = [array(v).node for v in result_leaves]
        primals = [p for p in differentiated if p in set(topological(nodes))]
        stripped = tidy(strip_identities([*nodes, *primals], sources))
    out_names = tuple(n or "result" for n in pytree.paths(results))
    label = name or getattr(function, "__name__", "program")
    outputs = stripped[: len(nodes)]
    graph = Graph(
        label.replace("<", "").replace(">", ""),
        tuple(inputs),
        outputs,
        tuple(labels),
        out_names,
        (),
        sources,
    )
    primal = primal_graph(graph, stripped[len(nodes) :])
    return Traced(graph, primal, structure, results, of_arguments(found, inputs))


_noted: Stack[list[Node]] = Stack()


@contextmanager
def noting(differentiated: list[Node]) -> Iterator[None]:
    """Within it, values that gradients are taken of are appended to the list."""
    _noted.values.append(differentiated)
    try:
        yield
    finally:
        _noted.values.pop()


def note(nodes: Sequence[Node]) -> None:
    """Tell the trace under way that these values are differentiated."""
    if noted := _noted.values:
        noted[-1].extend(nodes)


def primal_graph(graph: Graph, primals: Sequence[Node]) -> Graph:
    """The program before differentiation: what the differentiated values are computed from."""
    if not primals:
        return graph
    needed = set(topological(primals))
    sources = {n: line for n, line in graph.sources.items() if n in needed}
    names = ("value",) if len(primals) == 1 else tuple(f"value{i}" for i in range(len(primals)))
    return Graph(graph.name, graph.inputs, tuple(primals), graph.input_names, names, (), sources)


def strip_identities(outputs: Sequence[Node], sources: dict[Node, str]) -> tuple[Node, ...]:
    """`outputs` without the ops that only autodiff needs, such as stop_gradient and marks of
    differentiated values."""
    new: dict[Node, Node] = {}
    for node in topological(outputs):
        operands = [new[o] for o in node.operands]
        stands = node.op.stripped(operands)
        if stands is not None:
            new[node] = stands
        else:
            with at_line(sources.get(node, "")):
                op = node.op
                if op.bodies:
                    op = op.with_bodies([_stripped(body, sources) for body in op.bodies])
                new[node] = make(op, *operands)
    return tuple(new[o] for o in outputs)


def _stripped(body: Graph, sources: dict[Node, str]) -> Graph:
    return body.replace(outputs=strip_identities(body.outputs, sources))


def _flatten_with_types(tree: Any, type_class: type) -> tuple[list[Any], pytree.Structure]:
    def shaped(value: Any) -> Any:
        if isinstance(value, type_class):
            return Array(input_node(0, "type", value))
        if isinstance(value, dict):
            return {k: shaped(v) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(shaped(v) for v in value)
        return value

    return pytree.flatten(shaped(tree))


def _labels(structure: pytree.Structure, names: Sequence[str] | None) -> list[str]:
    args, kwargs = structure.children
    out: list[str] = []
    for k, child in enumerate(args.children):
        prefix = names[k] if names and k < len(names) else f"arg{k}"
        out += pytree.paths(child, prefix)
    out += pytree.paths(kwargs)
    seen: dict[str, int] = {}
    for i, label in enumerate(out):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] > 1:
            out[i] = f"{label}_{seen[label]}"
    return out


def trace(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Graph:
    """The graph of `function` for arguments of these types (arrays, numbers, pytrees, or Types such
    as parse_type("f32[8, 64]")).

    >>> print(trace(lambda x: x + 1.0, parse_type("f32[8]")))
    """
    return trace_call(function, args, kwargs, names=parameter_names(function)).graph


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """The names of a function's positional parameters, or none when it has no signature."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
