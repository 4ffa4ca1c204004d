"""The models and kernels of the comparison in float64 NumPy, gradients by hand: what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
from peers_data import Arrays, Batches, GPTSize, MLPSize
from peers_known import PRODUCTS, chain

_GELU = np.sqrt(2 / np.pi)
_EPS = 1e-5  # of layer_norm


class Trainer:
    """Weights between steps; `advance` as in bench/peers.py."""

    def __init__(self, task: str, weights: Arrays, batches: Batches, threads: int) -> None:
        mlp = task == "mlp"
        self.losses = (
            mlp_steps(weights, batches, MLPSize())
            if mlp
            else gpt_steps(weights, batches, GPTSize())
        )

    def advance(self) -> float:
        """One step; its loss."""
        return next(self.losses)


def mlp_losses(weights: Arrays, batches: Batches, steps: int, size: MLPSize) -> list[float]:
    """The loss before each of `steps` steps of SGD."""
    return list(islice(mlp_steps(weights, batches, size), steps))


def gpt_losses(weights: Arrays, batches: Batches, steps: int, size: GPTSize) -> list[float]:
    """The loss before each of `steps` steps of AdamW without decay."""
    return list(islice(gpt_steps(weights, batches, size), steps))


def mlp_steps(weights: Arrays, batches: Batches, size: MLPSize) -> Iterator[float]:
    """Takes steps of SGD for ever; the loss before each."""
    p = {k: v.astype(np.float64) for k, v in weights.items()}
    for i in count():
        x, y = batches[i % len(batches)]
        x = x.astype(np.float64)
        z = x @ p["layers.0.weight"] + p["layers.0.bias"]
        h = np.maximum(z, 0)
        loss, g = cross_entropy(h @ p["layers.1.weight"] + p["layers.1.bias"], y)
        gz = (g @ p["layers.1.weight"].T) * (z > 0)
        grads = {
            "layers.0.weight": x.T @ gz,
            "layers.0.bias": gz.sum(0),
            "layers.1.weight": h.T @ g,
            "layers.1.bias": g.sum(0),
        }
        for k, grad in grads.items():
            p[k] -= size.lr * grad
        yield loss


def gpt_steps(weights: Arrays, batches: Batches, size: GPTSize) -> Iterator[float]:
    """Takes steps of AdamW without decay for ever; the loss before each."""
    p = {k: v.astype(np.float64) for k, v in weights.items()}
    first, second = ({k: np.zeros_like(v) for k, v in p.items()} for _ in range(2))
    for i in count():
        loss, grads = gpt_gradients(p, *batches[i % len(batches)], size)
        for k, g in grads.items():
            first[k] += 0.1 * (g - first[k])
            second[k] += 0.001 * (g * g - second[k])
            root = np.sqrt(second[k] / (1 - 0.999 ** (i + 1)))
            p[k] -= size.lr * first[k] / (1 - 0.9 ** (i + 1)) / (root + 1e-8)
        yield loss


def gpt_gradients(p: Arrays, x: np.ndarray, y: np.ndarray, size: GPTSize) -> tuple[float, Arrays]:
    """The loss of a batch and its gradients."""
    grads: Arrays = {}
    h = p["tokens.weight"][x] + p["positions.weight"]
    saved = []
    for k in range(size.layers):
        h, kept = block(p, f"blocks.{k}", h, size.heads)
        saved.append(kept)
    normed, kept = layer_norm(p, "norm", h)
    loss, g = cross_entropy(linear(p, "head", normed), y)
    g = linear_vjp(p, grads, "head", normed, g)
    g = layer_norm_vjp(p, grads, "norm", kept, g)
    for k in reversed(range(size.layers)):
        g = block_vjp(p, grads, f"blocks.{k}", saved[k], g)
    grads["positions.weight"] = g.sum(0)
    grads["tokens.weight"] = np.zeros_like(p["tokens.weight"])
    np.add.at(grads["tokens.weight"], x, g)
    return loss, grads


def block(p: Arrays, name: str, x: np.ndarray, heads: int) -> tuple[np.ndarray, tuple]:
    """x + attention(norm(x)), then x + feed_forward(norm(x)); the result and what the vjp needs."""
    attention = f"{name}.attention"
    n1, s1 = layer_norm(p, f"{name}.norm1", x)
    q, k, v = (split(linear(p, f"{attention}.{m}", n1), heads) for m in ("query", "key", "value"))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores[..., *np.triu_indices(x.shape[1], 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    o = join(weights @ v)
    x = x + linear(p, f"{attention}.output", o)
    n2, s2 = layer_norm(p, f"{name}.norm2", x)
    u = linear(p, f"{name}.feed_forward.up", n2)
    t = np.tanh(_GELU * (u + 0.044715 * u**3))
    a = 0.5 * u * (1 + t)
    out = x + linear(p, f"{name}.feed_forward.down", a)
    return out, (n1, s1, q, k, v, weights, o, n2, s2, u, t, a)


def block_vjp(p: Arrays, grads: Arrays, name: str, saved: tuple, g: np.ndarray) -> np.ndarray:
    """The cotangent of a block's input; gradients of its weights go to `grads`."""
    n1, s1, q, k, v, weights, o, n2, s2, u, t, a = saved
    attention = f"{name}.attention"
    ga = linear_vjp(p, grads, f"{name}.feed_forward.down", a, g)
    inner = _GELU * (1 + 3 * 0.044715 * u**2)
    gu = ga * (0.5 * (1 + t) + 0.5 * u * (1 - t**2) * inner)
    gn = linear_vjp(p, grads, f"{name}.feed_forward.up", n2, gu)
    g = g + layer_norm_vjp(p, grads, f"{name}.norm2", s2, gn)
    go = split(linear_vjp(p, grads, f"{attention}.output", o, g), q.shape[1])
    gw = go @ v.swapaxes(-1, -2)
    gs = weights * (gw - (gw * weights).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
    parts = {
        "query": gs @ k,
        "key": gs.swapaxes(-1, -2) @ q,
        "value": weights.swapaxes(-1, -2) @ go,
    }
    gn = sum(linear_vjp(p, grads, f"{attention}.{m}", n1, join(c)) for m, c in parts.items())
    return g + layer_norm_vjp(p, grads, f"{name}.norm1", s1, gn)


def split(x: np.ndarray, heads: int) -> np.ndarray:
    """(batch, t, width) as (batch, heads, t, width / heads)."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def join(x: np.ndarray) -> np.ndarray:
    """The inverse of split."""
    batch, heads, t, size = x.shape
    return x.swapaxes(1, 2).reshape(batch, t, heads * size)


def linear(p: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    """x @ weight + bias."""
    rows = x.reshape(-1, x.shape[-1]) @ p[f"{name}.weight"] + p[f"{name}.bias"]
    return rows.reshape(*x.shape[:-1], -1)


def linear_vjp(p: Arrays, grads: Arrays, name: str, x: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The cotangent of x."""
    rows, cotangents = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    grads[f"{name}.weight"], grads[f"{name}.bias"] = rows.T @ cotangents, cotangents.sum(0)
    return g @ p[f"{name}.weight"].T


def layer_norm(p: Arrays, name: str, x: np.ndarray) -> tuple[np.ndarray, tuple]:
    """The normed rows, and what the vjp needs."""
    centered = x - x.mean(-1, keepdims=True)
    scale = 1 / np.sqrt((centered**2).mean(-1, keepdims=True) + _EPS)
    normed = centered * scale
    return normed * p[f"{name}.weight"] + p[f"{name}.bias"], (normed, scale)


def layer_norm_vjp(p: Arrays, grads: Arrays, name: str, saved: tuple, g: np.ndarray) -> np.ndarray:
    """The cotangent of the rows before the norm."""
    normed, scale = saved
    axes = tuple(range(g.ndim - 1))
    grads[f"{name}.weight"], grads[f"{name}.bias"] = (g * normed).sum(axes), g.sum(axes)
    g = g * p[f"{name}.weight"]
    mean, along = g.mean(-1, keepdims=True), (g * normed).mean(-1, keepdims=True)
    return scale * (g - mean - normed * along)


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean loss over all rows and the cotangent of the logits."""
    shifted = logits - logits.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    hit = np.arange(logits.shape[-1]) == targets[..., None]
    return float(-logp[hit].mean()), (np.exp(logp) - hit) / targets.size


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


def attention_vjp(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray) -> list[np.ndarray]:
    """The cotangents of q, k and v."""
    weights = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
    gw = g @ v.swapaxes(-1, -2)
    gs = weights * (gw - (gw * weights).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
    return [gs @ k, gs.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ g]


def norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return layer_norm({"norm.weight": weight, "norm.bias": bias}, "norm", x)[0]


KERNELS: dict[str, Callable[..., Any]] = {
    **PRODUCTS,
    "attention forward": attention,
    "attention backward": attention_vjp,
    "softmax": softmax,
    "layer norm": norm,
    "elementwise chain": chain(np.tanh),
}


def kernel(kind: str, arrays: list[np.ndarray]) -> Callable[[], Any]:
    """A call in float64."""
    operands = [a.astype(np.float64) for a in arrays]
    return lambda: KERNELS[kind](*operands)


def values(results: Any) -> list[np.ndarray]:
    """Results of a call."""
    return [results] if isinstance(results, np.ndarray) else list(results)
