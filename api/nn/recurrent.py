"""Recurrent layers with PyTorch's meaning, names and layouts: RNN, GRU and LSTM, and their cells.

Products with the input are taken for all steps at once; a loop carries the state from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from eggpu.compiler.errors import ShapeMismatch, TraceError
from eggpu.compiler.library import loops, random
from eggpu.compiler.library import math as M
from eggpu.compiler.library import nn as F
from eggpu.compiler.library.shaping import concatenate, expand_dims, stack, zeros
from eggpu.compiler.tracing import Array, array
from eggpu.nn import initial
from eggpu.nn.initial import Key
from eggpu.nn.module import Module

State = tuple[Array, ...]  # h, or h and c
Step = Callable[[State, Array, Array], State]  # (state, W_ih x, W_hh h) -> the next state
_NONLINEARITIES = {"tanh": M.tanh, "relu": M.relu}


def _rnn(activation: Callable[[Array], Array]) -> Step:
    return lambda state, x, h: (activation(x + h),)


def _gru(state: State, x: Array, h: Array) -> State:
    # r, z = sigmoid(x + h); n = tanh(x + r * h); h' = (1 - z) * n + z * h
    (before,) = state
    (xr, xz, xn), (hr, hz, hn) = (_parts(a, 3) for a in (x, h))
    r, z = M.sigmoid(xr + hr), M.sigmoid(xz + hz)
    n = M.tanh(xn + r * hn)
    return ((1.0 - z) * n + z * before,)


def _lstm(state: State, x: Array, h: Array) -> State:
    # i, f, o = sigmoid(x + h); g = tanh(x + h); c' = f * c + i * g; h' = o * tanh(c')
    i, f, g, o = _parts(x + h, 4)
    c = M.sigmoid(f) * state[1] + M.sigmoid(i) * M.tanh(g)
    return M.sigmoid(o) * M.tanh(c), c


def _parts(gates: Array, count: int) -> list[Array]:
    size = gates.shape[-1] // count
    return [gates[..., k * size : (k + 1) * size] for k in range(count)]


class _Weights(Module):
    """What layers and cells share: sizes of gates, and weights uniform in ±1/sqrt(hidden_size)."""

    gates: ClassVar[int] = 1
    states: ClassVar[int] = 1

    def _made(
        self, key: Key, sizes: list[tuple[str, int]], hidden: int, bias: bool
    ) -> dict[str, Array]:
        """Weights and biases; `sizes` are the ends of names and the inputs that each reads."""
        rows, bound = self.gates * hidden, 1 / math.sqrt(hidden)
        shapes: dict[str, tuple[int, ...]] = {}
        for end, width in sizes:
            shapes |= {f"weight_ih{end}": (rows, width), f"weight_hh{end}": (rows, hidden)}
            if bias:
                shapes |= {f"bias_ih{end}": (rows,), f"bias_hh{end}": (rows,)}
        each = initial.keys(key, len(shapes))
        pairs = zip(shapes.items(), each, strict=True)
        return {name: initial.uniform(k, shape, bound) for (name, shape), k in pairs}

    def _step(self) -> Step:
        raise NotImplementedError


@dataclass(frozen=True, init=False, repr=False, eq=False)
class _Recurrent(_Weights):
    """Layers of a recurrent network over sequences."""

    inline: ClassVar[str] = "weights"  # whose entries have names as if they were fields
    weights: dict[str, Array]
    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, *, key: Key,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        if min(input_size, hidden_size, num_layers) < 1:
            came = f"{input_size}, {hidden_size} and {num_layers}"
            raise ShapeMismatch(f"{name} needs sizes and layers of at least 1, got {came}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"{name} needs 0 <= dropout <= 1, got {dropout}")
        self._set(
            input_size=input_size, hidden_size=hidden_size, num_layers=num_layers, bias=bias,
            batch_first=batch_first, dropout=float(dropout), bidirectional=bidirectional,
        )  # fmt: skip
        later = hidden_size * len(self._ends(0))
        widths = [input_size] + [later] * (num_layers - 1)
        sizes = [(end, width) for k, width in enumerate(widths) for end in self._ends(k)]
        self._set(weights=self._made(key, sizes, hidden_size, bias))

    def __getattr__(self, name: str) -> Array:
        if name.startswith(("weight_", "bias_")) and name in self.weights:
            return self.weights[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    def _ends(self, layer: int) -> list[str]:
        """Ends of the names of a layer's weights, one for each direction."""
        return [f"_l{layer}", f"_l{layer}_reverse"][: 1 + self.bidirectional]

    def _run(self, x: Array, state: State | None, key: Array | None) -> tuple[Array, State]:
        x, batched = array(x), array(x).ndim == 3
        if x.ndim not in (2, 3) or x.shape[-1] != self.input_size:
            need = "(batch, steps" if self.batch_first else "(steps, batch"
            raise ShapeMismatch(
                f"{type(self).__name__} needs {need}, {self.input_size}) or "
                f"(steps, {self.input_size}), got {x.type}"
            )
        x = x if batched else expand_dims(x, 1)
        x = x.swapaxes(0, 1) if batched and self.batch_first else x
        state = self._first(state, x.shape[1], batched)
        drops = None if key is None else random.split(key, self.num_layers)
        last: list[State] = []
        for layer in range(self.num_layers):
            if layer and drops is not None:
                x = F.dropout(x, self.dropout, drops[layer])
            each = [self._direction(x, state, layer, way) for way in range(len(self._ends(0)))]
            last += [after for _, after in each]
            x = concatenate([y for y, _ in each], -1) if len(each) > 1 else each[0][0]
        after = tuple(stack([s[k] for s in last]) for k in range(self.states))
        if not batched:
            return x[:, 0], tuple(s[:, 0] for s in after)
        return (x.swapaxes(0, 1) if self.batch_first else x), after

    def _direction(self, x: Array, state: State, layer: int, way: int) -> tuple[Array, State]:
        """One direction of one layer over x (steps, batch, width)."""
        end, row = self._ends(layer)[way], layer * len(self._ends(0)) + way
        get, step = self.weights, self._step()
        w, bias = get[f"weight_hh{end}"], get.get(f"bias_hh{end}")
        given = F.linear(x, get[f"weight_ih{end}"].T, get.get(f"bias_ih{end}"))
        if bias is not None and self.gates != 3:  # a GRU multiplies a part of it
            given, bias = given + bias, None

        def run(state: State, x: Array) -> tuple[State, Array]:
            state = step(state, x, F.linear(state[0], w.T, bias))
            return state, state[0]

        first = tuple(s[row] for s in state)
        after, out = loops.scan(run, first, given, reverse=bool(way))
        return out, after

    def _first(self, state: State | None, batch: int, batched: bool) -> State:
        """The state before the first step, each part (layers * directions, batch, hidden)."""
        shape = (self.num_layers * len(self._ends(0)), batch, self.hidden_size)
        if state is None:
            return tuple(zeros(shape) for _ in range(self.states))
        given = [array(s) for s in state]
        need = shape if batched else (shape[0], shape[2])
        if len(given) != self.states or any(s.shape != need for s in given):
            came = " and ".join(str(s.type) for s in given)
            raise ShapeMismatch(
                f"{type(self).__name__} needs {self.states} of f32{list(need)} as state, got {came}"
            )
        return tuple(s if batched else expand_dims(s, 1) for s in given)

    def _with_dropout(
        self, x: Array, state: State | None, key: Array | None
    ) -> tuple[Array, State]:
        if key is None and self.dropout and self.num_layers > 1:
            raise TraceError(
                f"{type(self).__name__} needs a key for its dropout in training: "
                "model.train(x, key=key)"
            )
        return self._run(x, state, key)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class _OneState(_Recurrent):
    """Layers whose state is h alone."""

    def __call__(self, x: Array, h0: Array | None = None) -> tuple[Array, Array]:
        """(outputs of the last layer, h after the last step); without `h0` the first state is 0.

        x is (steps, batch, input_size), (batch, steps, input_size) with `batch_first`, or
        (steps, input_size). h is (layers * directions, batch, hidden_size).
        """
        out, (h,) = self._run(x, None if h0 is None else (h0,), None)
        return out, h

    def train(
        self, x: Array, h0: Array | None = None, *, key: Array | None = None
    ) -> tuple[tuple[Array, Array], Self]:
        """The call in training: outputs between layers are dropped."""
        out, (h,) = self._with_dropout(x, None if h0 is None else (h0,), key)
        return (out, h), self


@dataclass(frozen=True, init=False, repr=False, eq=False)
class RNN(_OneState):
    """h' = tanh(W_ih x + b_ih + W_hh h + b_hh), as torch.nn.RNN (Elman, 1990); or with "relu".

    `num_layers` are stacked; a `bidirectional` one also runs back, and its outputs stand behind the
    others. In training `dropout` zeroes outputs between layers.
    """

    nonlinearity: str

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = "tanh",
        bias: bool = True, batch_first: bool = False, dropout: float = 0.0,
        bidirectional: bool = False, *, key: Key,
    ) -> None:  # fmt: skip
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, key=key
        )
        self._set(nonlinearity=_known(nonlinearity))

    def _step(self) -> Step:
        return _rnn(_NONLINEARITIES[self.nonlinearity])


@dataclass(frozen=True, init=False, repr=False, eq=False)
class GRU(_OneState):
    """Gated recurrent units (Cho et al., 2014), as torch.nn.GRU.

    r, z = sigmoid(W x + b + W h + b); n = tanh(W x + b + r * (W h + b)); h' = (1 - z) n + z h.
    Rows of the weights are r, z, n. For the arguments see RNN.
    """

    gates = 3

    def _step(self) -> Step:
        return _gru


@dataclass(frozen=True, init=False, repr=False, eq=False)
class LSTM(_Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997), as torch.nn.LSTM.

    i, f, o = sigmoid(W x + b + W h + b); g = tanh(W x + b + W h + b); c' = f c + i g;
    h' = o tanh(c'). Rows of the weights are i, f, g, o. For the arguments see RNN.
    """

    gates = 4
    states = 2

    def _step(self) -> Step:
        return _lstm

    def __call__(
        self, x: Array, state: tuple[Array, Array] | None = None
    ) -> tuple[Array, tuple[Array, Array]]:
        """(outputs of the last layer, (h, c) after the last step); the first state is 0 or `state`.

        x is (steps, batch, input_size), (batch, steps, input_size) with `batch_first`, or
        (steps, input_size). h and c are (layers * directions, batch, hidden_size).
        """
        out, (h, c) = self._run(x, state, None)
        return out, (h, c)

    def train(
        self, x: Array, state: tuple[Array, Array] | None = None, *, key: Array | None = None
    ) -> tuple[tuple[Array, tuple[Array, Array]], Self]:
        """The call in training: outputs between layers are dropped."""
        out, (h, c) = self._with_dropout(x, state, key)
        return (out, (h, c)), self


@dataclass(frozen=True, init=False, repr=False, eq=False)
class _Cell(_Weights):
    """One step of one layer."""

    weight_ih: Array
    weight_hh: Array
    bias_ih: Array | None
    bias_hh: Array | None

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, *, key: Key) -> None:
        if min(input_size, hidden_size) < 1:
            came = f"{input_size} and {hidden_size}"
            raise ShapeMismatch(f"{type(self).__name__} needs sizes of at least 1, got {came}")
        made: dict[str, Any] = {"bias_ih": None, "bias_hh": None}
        self._set(**made | self._made(key, [("", input_size)], hidden_size, bias))

    def _next(self, x: Array, state: State | None) -> State:
        x = array(x)
        width, hidden = self.weight_ih.shape[1], self.weight_hh.shape[1]
        if x.ndim not in (1, 2) or x.shape[-1] != width:
            raise ShapeMismatch(f"{type(self).__name__} needs (batch, {width}), got {x.type}")
        shape = (*x.shape[:-1], hidden)
        given = state or tuple(zeros(shape) for _ in range(self.states))
        given = tuple(array(s) for s in given)
        if len(given) != self.states or any(s.shape != shape for s in given):
            came = " and ".join(str(s.type) for s in given)
            raise ShapeMismatch(
                f"{type(self).__name__} needs {self.states} of f32{list(shape)}, got {came}"
            )
        both = F.linear(x, self.weight_ih.T, self.bias_ih)
        return self._step()(given, both, F.linear(given[0], self.weight_hh.T, self.bias_hh))


@dataclass(frozen=True, init=False, repr=False, eq=False)
class RNNCell(_Cell):
    """One step of an RNN: x (batch, input_size) and h (batch, hidden_size) give the next h."""

    nonlinearity: str

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh", *,
        key: Key,
    ) -> None:  # fmt: skip
        super().__init__(input_size, hidden_size, bias, key=key)
        self._set(nonlinearity=_known(nonlinearity))

    def _step(self) -> Step:
        return _rnn(_NONLINEARITIES[self.nonlinearity])

    def __call__(self, x: Array, h: Array | None = None) -> Array:
        return self._next(x, None if h is None else (h,))[0]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class GRUCell(_Cell):
    """One step of a GRU: x (batch, input_size) and h (batch, hidden_size) give the next h."""

    gates = 3

    def _step(self) -> Step:
        return _gru

    def __call__(self, x: Array, h: Array | None = None) -> Array:
        return self._next(x, None if h is None else (h,))[0]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class LSTMCell(_Cell):
    """One step of an LSTM: x (batch, input_size) and (h, c) give the next (h, c)."""

    gates = 4
    states = 2

    def _step(self) -> Step:
        return _lstm

    def __call__(self, x: Array, state: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
        h, c = self._next(x, state)
        return h, c


def _known(nonlinearity: str) -> str:
    if nonlinearity not in _NONLINEARITIES:
        known = " or ".join(_NONLINEARITIES)
        raise ValueError(f"RNN needs {known} as nonlinearity, got {nonlinearity!r}")
    return nonlinearity
