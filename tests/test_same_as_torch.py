"""The same losses as PyTorch with the same weights and batches, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn, optim
from eggpu.train.lstm import LSTMLanguageModel

pytestmark = [pytest.mark.models, pytest.mark.timeout(400)]
STEPS = 12
RNG = np.random.default_rng(0)


def ours(model: Any, loss: Any, batches: list[Any], name: str) -> list[float]:
    """Losses of AdamW steps by the compiled program."""
    opt = optim.adamw(1e-2, weight_decay=0.1)

    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        (value, moved), grads = eg.value_and_grad(loss, has_aux=True)(model, x, y)
        model, state = opt.update(moved, state, grads)
        return model, state, value

    compiled, state, out = eg.compile(step, name=f"torch_{name}"), opt.init(model), []
    for x, y in batches:
        model, state, value = compiled(model, state, x, y)
        out.append(float(value))
    return out


def theirs(model: Any, batches: list[Any]) -> list[float]:
    """Losses of the same steps by PyTorch."""
    import torch

    opt, out = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), []
    for x, y in batches:
        opt.zero_grad()
        logits = model(torch.tensor(x))
        value = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), torch.tensor(y).long().reshape(-1)
        )
        value.backward()
        opt.step()
        out.append(value.item())
    return out


def trained(model: Any, x: Any, y: Any) -> Any:
    logits, model = model.train(x)
    return nn.cross_entropy(logits, y), model


def images(count: int = STEPS) -> list[Any]:
    pairs = [(RNG.standard_normal((16, 1, 8, 8)), RNG.integers(0, 4, 16)) for _ in range(count)]
    return [(x.astype(np.float32), y.astype(np.int32)) for x, y in pairs]


def test_mlp() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32, key=0), nn.relu, nn.Linear(32, 4, key=1))
    model = eg.from_torch_state(model, net.state_dict())
    batches = images()
    np.testing.assert_allclose(ours(model, trained, batches, "mlp"), theirs(net, batches), 1e-4)


def test_cnn() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 6, 3, padding=1), torch.nn.BatchNorm2d(6), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Conv2d(6, 8, 3, stride=2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(8, 4),
    )  # fmt: skip
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, key=0, padding=1), nn.BatchNorm(6), nn.relu, nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, key=1, stride=2), nn.relu, nn.Flatten(), nn.Linear(8, 4, key=2),
    )  # fmt: skip
    model = eg.from_torch_state(model, net.state_dict())
    batches = images()
    np.testing.assert_allclose(ours(model, trained, batches, "cnn"), theirs(net, batches), 2e-4)


def torch_gpt(vocab: int, width: int, heads: int, context: int) -> Any:
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            self.attention = torch.nn.MultiheadAttention(width, heads, batch_first=True)
            self.feed_forward = torch.nn.ModuleDict(
                {
                    "up": torch.nn.Linear(width, 4 * width),
                    "down": torch.nn.Linear(4 * width, width),
                }
            )

        def forward(self, x: Any) -> Any:
            h = self.norm1(x)
            later = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
            x = x + self.attention(h, h, h, attn_mask=later, need_weights=False)[0]
            h = self.feed_forward["up"](self.norm2(x))
            return x + self.feed_forward["down"](torch.nn.functional.gelu(h, approximate="tanh"))

    class GPT(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(vocab, width)
            self.positions = torch.nn.Embedding(context, width)
            self.blocks = torch.nn.ModuleList([Block()])
            self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, vocab)

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids.long()) + self.positions.weight[: ids.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return GPT()


def test_gpt() -> None:
    pytest.importorskip("torch")
    net = torch_gpt(17, 16, 2, 8)
    model = nn.GPT(17, 1, 16, 2, 8, key=0)
    model = eg.from_torch_state(model, net.state_dict())
    ids = RNG.integers(0, 17, (STEPS, 4, 9)).astype(np.int32)
    batches = [(np.ascontiguousarray(t[:, :-1]), np.ascontiguousarray(t[:, 1:])) for t in ids]

    def loss(model: Any, x: Any, y: Any) -> Any:
        return nn.cross_entropy(model(x), y), model

    np.testing.assert_allclose(ours(model, loss, batches, "gpt"), theirs(net, batches), 2e-4)


def test_lstm() -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(17, 12)
            self.lstm = torch.nn.LSTM(12, 16, 2, batch_first=True)
            self.head = torch.nn.Linear(16, 17)

        def forward(self, ids: Any) -> Any:
            return self.head(self.lstm(self.tokens(ids.long()))[0])

    net = Net()
    model = LSTMLanguageModel(17, 2, 12, 16, key=0)
    model = eg.from_torch_state(model, net.state_dict())
    ids = RNG.integers(0, 17, (STEPS, 4, 11)).astype(np.int32)
    batches = [(np.ascontiguousarray(t[:, :-1]), np.ascontiguousarray(t[:, 1:])) for t in ids]

    def loss(model: Any, x: Any, y: Any) -> Any:
        return nn.cross_entropy(model(x), y), model

    np.testing.assert_allclose(ours(model, loss, batches, "lstm"), theirs(net, batches), 1e-5)


def torch_vit(width: int, heads: int, patch: int, classes: int) -> Any:
    import torch

    gpt_block = torch_gpt(1, width, heads, 1).blocks[0]

    class Block(type(gpt_block)):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:  # every place sees every other
            h = self.norm1(x)
            x = x + self.attention(h, h, h, need_weights=False)[0]
            h = self.feed_forward["up"](self.norm2(x))
            return x + self.feed_forward["down"](torch.nn.functional.gelu(h, approximate="tanh"))

    class ViT(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = torch.nn.Conv2d(1, width, patch, stride=patch)
            self.token = torch.nn.Parameter(torch.randn(1, 1, width) * 0.02)
            self.positions = torch.nn.Parameter(torch.randn(1, (8 // patch) ** 2 + 1, width) * 0.02)
            self.blocks = torch.nn.ModuleList([Block(), Block()])
            self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, classes)

        def forward(self, x: Any) -> Any:
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)[:, 0])

    return ViT()


def test_vit() -> None:
    pytest.importorskip("torch")
    net = torch_vit(16, 2, 4, 4)
    model = nn.ViT(1, 8, 4, key=0, patch=4, layers=2, width=16, heads=2)
    model = eg.from_torch_state(model, net.state_dict())
    batches = images()
    np.testing.assert_allclose(ours(model, trained, batches, "vit"), theirs(net, batches), 2e-4)
