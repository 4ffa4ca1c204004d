"""The models and kernels of the comparison in JAX on the CPU, compiled by jax.jit as a whole.

pip install jax
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peers_data import Arrays, Batches, GPTSize, MLPSize
from peers_known import PRODUCTS, chain

Weights = dict[str, jax.Array]


class Trainer:
    """Weights and an optimizer's state between steps; `advance` as in bench/peers.py."""

    def __init__(self, task: str, weights: Arrays, batches: Batches, threads: int) -> None:
        # XLA's threads are one a core that this process may use: `threads` of them (the worker).
        self.weights = {name: jnp.asarray(value) for name, value in weights.items()}
        self.state: Any = ()
        update = sgd
        if task == "gpt":
            update = adamw
            zeros = [jax.tree.map(jnp.zeros_like, self.weights) for _ in range(2)]
            self.state = (jnp.zeros(()), *zeros)
        forward = mlp if task == "mlp" else gpt

        def step(weights: Weights, state: Any, x: jax.Array, y: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(forward)(weights, x, y)
            return *update(weights, state, grads), loss

        self.step = jax.jit(step, donate_argnums=(0, 1))
        self.batches = [tuple(jnp.asarray(v) for v in batch) for batch in batches]
        self.done = 0

    def advance(self) -> jax.Array:
        """One step; its loss."""
        batch = self.batches[self.done % len(self.batches)]
        self.done += 1
        self.weights, self.state, loss = self.step(self.weights, self.state, *batch)
        return loss


def sgd(weights: Weights, state: Any, grads: Weights) -> tuple[Weights, Any]:
    """w - lr g."""
    lr = MLPSize().lr
    return jax.tree.map(lambda w, g: w - lr * g, weights, grads), state


def adamw(weights: Weights, state: Any, grads: Weights) -> tuple[Weights, Any]:
    """AdamW without decay."""
    count, first, second = state
    count = count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)

    def moved(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        root = jnp.sqrt(v / (1 - 0.999**count))
        return w - GPTSize().lr * (m / (1 - 0.9**count)) / (root + 1e-8)

    return jax.tree.map(moved, weights, first, second), (count, first, second)


def mlp(p: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of the perceptron."""
    return cross_entropy(linear(p, "layers.1", jax.nn.relu(linear(p, "layers.0", x))), y)


def gpt(p: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of the language model."""
    size = GPTSize()
    h = p["tokens.weight"][x] + p["positions.weight"]
    for k in range(size.layers):
        name = f"blocks.{k}"
        h = h + attention(p, f"{name}.attention", norm(p, f"{name}.norm1", h), size.heads)
        up = jax.nn.gelu(linear(p, f"{name}.feed_forward.up", norm(p, f"{name}.norm2", h)))
        h = h + linear(p, f"{name}.feed_forward.down", up)
    return cross_entropy(linear(p, "head", norm(p, "norm", h)), y)


def attention(p: Weights, name: str, x: jax.Array, heads: int) -> jax.Array:
    """Causal, by JAX's own function."""
    q, k, v = (
        linear(p, f"{name}.{part}", x).reshape(*x.shape[:2], heads, -1)
        for part in ("query", "key", "value")
    )
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return linear(p, f"{name}.output", out.reshape(x.shape))


def linear(p: Weights, name: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def norm(p: Weights, name: str, x: jax.Array) -> jax.Array:
    return layer_norm(x, p[f"{name}.weight"], p[f"{name}.bias"])


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """The mean over all rows."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1).mean()


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    variance = (centered * centered).mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(variance + 1e-5) * weight + bias


def heads_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """(batch, heads, t, d), as softmax of products: on CPUs faster than JAX's function forward."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return jax.nn.softmax(scores, -1) @ v


def heads_gradients(q: jax.Array, k: jax.Array, v: jax.Array, ct: jax.Array) -> Any:
    """By JAX's own function, which wants heads behind t: faster than softmax of products here."""

    def weighted(heads: Any) -> jax.Array:
        out = jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in heads))
        return (out.swapaxes(1, 2) * ct).sum()

    return jax.grad(weighted)((q, k, v))


KERNELS: dict[str, Callable[..., Any]] = {
    **PRODUCTS,
    "attention forward": heads_attention,
    "attention backward": heads_gradients,
    "softmax": lambda x: jax.nn.softmax(x, -1),
    "layer norm": layer_norm,
    "elementwise chain": chain(jnp.tanh),
}


def kernel(kind: str, arrays: list[np.ndarray]) -> Callable[[], Any]:
    """A call that ends when its results are there."""
    values, compiled = [jnp.asarray(a) for a in arrays], jax.jit(KERNELS[kind])
    return lambda: jax.block_until_ready(compiled(*values))


def values(results: Any) -> list[np.ndarray]:
    """Results of a call as NumPy's."""
    return [np.asarray(v) for v in jax.tree.leaves(results)]
