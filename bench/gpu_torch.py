"""What bench/gpu.py runs through PyTorch on the same GPU: float32 without TF32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import peers
import torch
import torch.nn.functional as F
from gpu_ours import HEADS, SQUARE, GPTShape
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Run = Callable[[], Any]
DEVICE = "cuda"


def exact() -> None:
    """Float32 products in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def values(*shape: int) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(*shape, device=DEVICE)


def matmul(m: int, n: int, k: int) -> Run:
    """a b for a (m, k) and b (k, n)."""
    a, b = values(m, k), values(k, n)
    return lambda: a @ b


def attention() -> Run:
    """Causal attention, memory-efficient."""
    q, k, v = (values(*HEADS) for _ in range(3))

    def run() -> Any:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return run


def attention_gradients() -> Run:
    """Forward and backward of the same."""
    q, k, v = (values(*HEADS).requires_grad_() for _ in range(3))
    do = values(*HEADS)

    def run() -> Any:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), do)

    return run


def rowwise(name: str) -> Run:
    """A function of a SQUARE by SQUARE matrix."""
    x = values(SQUARE, SQUARE)
    return {
        "softmax": lambda: x.softmax(-1),
        "layer_norm": lambda: F.layer_norm(x, (SQUARE,)),
        "gelu": lambda: F.gelu(x),
        "sum_rows": lambda: x.sum(1),
        "sum_columns": lambda: x.sum(0),
    }[name]


class Block(nn.Module):
    """Pre-norm transformer block; the three projections as one product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, t, width) to the same."""
        batch, t, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, -1)
        q, k, v = (p.view(batch, t, self.heads, -1).transpose(1, 2) for p in parts)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """The model of eggpu.nn.GPT with its loss."""

    def __init__(self, s: GPTShape) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(s.vocab, s.width),
            nn.Embedding(s.context, s.width),
        )
        self.blocks = nn.ModuleList([Block(s.width, s.heads) for _ in range(s.layers)])
        self.norm, self.head = nn.LayerNorm(s.width), nn.Linear(s.width, s.vocab)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class MLP(nn.Module):
    """784-256-10 with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(784, 256), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return F.cross_entropy(self.second(F.relu(self.first(x))), targets)


def training(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Any, ...], compiled: bool
) -> Run:
    """A training step."""
    forward = torch.compile(model) if compiled else model

    def run() -> Any:
        loss = forward(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return run


def peer(task: str, compiled: bool) -> Run:
    """A training step of a model of bench/peers.py."""
    _, batches = peers.numbers(task, peers.ROOT.parent / "shared" / "peers")
    x, y = (torch.from_numpy(np.ascontiguousarray(v)).to(DEVICE) for v in batches[0])
    if task == "mlp":
        model: nn.Module = MLP().to(DEVICE)
        return training(model, torch.optim.SGD(model.parameters(), 0.1), (x, y.long()), compiled)
    model = GPT(GPTShape(vocab=65, context=64, layers=4, width=128, heads=4, batch=8)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0, fused=True)
    return training(model, optimizer, (x.long(), y.long()), compiled)


def gpt(s: GPTShape, compiled: bool) -> Run:
    """A training step of a GPT with fused AdamW."""
    model = GPT(s).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    batch = tuple(torch.randint(0, s.vocab, (s.batch, s.context), device=DEVICE) for _ in range(2))
    return training(model, optimizer, batch, compiled)


def synchronize() -> None:
    """Wait for the GPU."""
    torch.cuda.synchronize()


def fresh() -> None:
    """Forget compiled models and peak memory."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """The most memory that was in use since `fresh`."""
    return torch.cuda.max_memory_allocated()
