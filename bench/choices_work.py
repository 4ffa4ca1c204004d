"""The grid of bench/choices.py: programs with the types of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import eggpu as eg
from eggpu import nn

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """A program and its arguments' types, such as "f32[8, 64]"; integers are below `below`."""

    name: str
    function: Callable[..., Any]
    types: tuple[str, ...]
    below: int = 0


def workloads() -> Iterator[Workload]:
    """The grid, the cheapest of each kind first."""
    yield from decodes()
    yield from attentions()
    yield from products()
    yield from rows()
    yield from elementwise()
    yield from programs()


def of(name: str, function: Callable[..., Any], *shapes: Sizes) -> Workload:
    """A workload of float32 arrays."""
    return Workload(name, function, tuple(f"f32{[*shape]}" for shape in shapes))


def decodes() -> Iterator[Workload]:
    """One query, or a few, over many keys."""
    for keys in (64, 1024, 8192):
        for heads, size in ((12, 64), (8, 128)):
            kv = (1, heads, keys, size)
            yield of(f"decode {keys} {heads}x{size}", attention, (1, heads, 1, size), kv, kv)
    kv = (1, 8, 2048, 64)
    yield of("decode 2048 8x64 grouped", attention, (1, 8, 4, 64), kv, kv)
    yield of("decode 512 16x32 batch 8", attention, (8, 16, 1, 32), *((8, 16, 512, 32),) * 2)


def attentions() -> Iterator[Workload]:
    """Square and oblong attention, forward and with gradients."""
    for length, heads, size in (
        (16, 4, 32), (16, 12, 64), (64, 4, 32), (64, 32, 32), (128, 12, 64), (256, 4, 64),
        (256, 16, 32), (512, 8, 64), (1024, 4, 64), (2048, 2, 64),
    ):  # fmt: skip
        shape = (1, heads, length, size)
        yield of(f"attention {length} {heads}x{size}", attention, *(shape,) * 3)
    yield of("attention 100 3x40", attention, *((2, 3, 100, 40),) * 3)
    yield of("attention 512 8x64 all", full_attention, *((1, 8, 512, 64),) * 3)
    yield of("attention 32 over 1024", full_attention, (1, 8, 32, 64), *((1, 8, 1024, 64),) * 2)
    yield of("attention 8192 1x32", attention, *((1, 1, 8192, 32),) * 3)
    for length, heads, size in ((64, 8, 32), (256, 8, 64)):
        shape = (1, heads, length, size)
        yield of(f"attention gradients {length} {heads}x{size}", gradients, *(shape,) * 4)


def products() -> Iterator[Workload]:
    """Rows, columns, squares, tall, wide, odd, deep and batched products."""
    for m, k, n in (
        (1, 768, 768), (1, 768, 3072), (1, 576, 49152), (4, 768, 768), (8, 768, 3072),
        (64, 64, 64), (128, 128, 128), (256, 768, 768), (512, 512, 512), (1024, 1024, 1024),
        (2048, 2048, 2048), (4096, 64, 64), (64, 64, 4096), (64, 4096, 64), (16, 16384, 16),
        (127, 129, 131), (1024, 33, 1024), (513, 511, 257),
    ):  # fmt: skip
        yield of(f"product {m}x{k}x{n}", eg.matmul, (m, k), (k, n))
    for m, k, n in ((128, 128, 128), (768, 1024, 768), (64, 4096, 64), (255, 255, 255)):
        yield of(f"product {m}x{k}x{n} of a^T", transposed, (k, m), (k, n))
    for m, k, n in ((8, 768, 3072), (512, 512, 512), (127, 129, 131)):
        yield of(f"product {m}x{k}x{n} of b^T", transposed_right, (m, k), (n, k))
    yield of("product 12 of 128x64x128", eg.matmul, (12, 128, 64), (12, 64, 128))


def rows() -> Iterator[Workload]:
    """Softmax, norms and sums along rows and columns."""
    for count, length in ((1, 65536), (16, 4096), (64, 50257), (1024, 256), (4096, 33)):
        shape = (count, length)
        yield of(f"softmax {count}x{length}", nn.softmax, shape)
        yield of(f"norm {count}x{length}", norm, shape, (length,))
    for count, length in ((1, 1 << 20), (16, 65536), (1024, 1024), (65536, 16), (4096, 33)):
        shape = (count, length)
        yield of(f"sum of rows {count}x{length}", sum_rows, shape)
        yield of(f"sum of columns {count}x{length}", sum_columns, shape)
    yield of("layer norm gradients 512x768", norm_gradients, (512, 768), (768,), (512, 768))


def elementwise() -> Iterator[Workload]:
    """Chains with values that are used twice, and with broadcasts."""
    for n in (1 << 10, 1 << 16, 1 << 20):
        yield of(f"chain {n}", chain, (n,), (n,))
    yield of("chain 1024x1024 of rows", row_chain, (1024, 1024), (1024, 1), (1024,))


def programs() -> Iterator[Workload]:
    """Parts of models."""
    for m, d in ((64, 128), (256, 256)):
        yield of(f"three products {m}x{d}", three, (m, d), *((d, d),) * 3)
        yield of(f"feed forward {m}x{d}", block, (m, d), (d, 4 * d), (4 * d, d))
    yield of("gated 16x256", gated, (16, 256), *((256, 512),) * 2, (512, 256))
    yield of("linear step 128x256", linear_step, (128, 256), (128, 64), (256, 64), (64,))
    for n, classes in ((64, 1000), (512, 64)):
        types = (f"f32[{n}, {classes}]", f"i32[{n}]")
        yield Workload(f"cross entropy {n}x{classes}", cross_entropy, types, classes)


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal for squares, over all keys for a few queries; rows of one group are heads."""
    return nn.scaled_dot_product_attention(q, k, v, causal=q.shape[-2] == k.shape[-2])


def full_attention(q: Any, k: Any, v: Any) -> Any:
    """Over all keys."""
    return nn.scaled_dot_product_attention(q, k, v)


def gradients(q: Any, k: Any, v: Any, ct: Any) -> Any:
    """Those of causal attention."""
    return eg.grad(lambda qkv: (attention(*qkv) * ct).sum())((q, k, v))


def transposed(a: Any, b: Any) -> Any:
    """A product whose left operand lies transposed."""
    return eg.transpose(a) @ b


def transposed_right(a: Any, b: Any) -> Any:
    """A product whose right operand lies transposed."""
    return a @ eg.transpose(b)


def norm(x: Any, weight: Any) -> Any:
    """Root mean square norm."""
    return x * eg.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def norm_gradients(x: Any, weight: Any, ct: Any) -> Any:
    """Those of root mean square norm."""
    return eg.grad(lambda xw: (norm(*xw) * ct).sum())((x, weight))


def sum_rows(x: Any) -> Any:
    """A number a row."""
    return x.sum(1)


def sum_columns(x: Any) -> Any:
    """A number a column."""
    return x.sum(0)


def chain(x: Any, y: Any) -> Any:
    """Elementwise, with values that are used twice."""
    a = eg.exp(-x * x) + y
    return eg.tanh(a) * a + eg.sqrt(eg.abs(a)), a


def row_chain(x: Any, scale: Any, shift: Any) -> Any:
    """Elementwise with a number a row, a number a column, and what is cheap to compute again."""
    return (x * eg.exp(scale) + eg.tanh(shift)) * eg.sigmoid(x)


def three(x: Any, a: Any, b: Any, c: Any) -> Any:
    """Products that share an operand."""
    return x @ a, x @ b, x @ c


def block(x: Any, up: Any, down: Any) -> Any:
    """The feed-forward part of a transformer layer."""
    return x + nn.gelu(nn.softmax(x) @ up) @ down


def gated(x: Any, gate: Any, up: Any, down: Any) -> Any:
    """The feed-forward part of Llama's layers."""
    return x + (nn.silu(x @ gate) * (x @ up)) @ down


def linear_step(x: Any, ct: Any, w: Any, b: Any) -> Any:
    """A layer and a step of gradient descent on it."""
    y = nn.relu(x @ w + b)
    d = eg.where(y > 0.0, ct, 0.0)
    return y, w - 0.1 * (x.T @ d), b - 0.1 * d.sum(0)


def cross_entropy(logits: Any, targets: Any) -> Any:
    """The loss and its gradient."""
    return eg.value_and_grad(nn.cross_entropy)(logits, targets)
