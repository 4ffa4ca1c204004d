"""Layers give PyTorch's results and gradients, with the weights of its state dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn

pytestmark = [pytest.mark.models, pytest.mark.timeout(300)]
RNG = np.random.default_rng(0)

# name: the layer here, the layer there (of torch.nn), the shape of x
LAYERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3, key=0), lambda t: t.Linear(5, 3), (2, 4, 5)),
    "conv1d": (
        lambda: nn.Conv1d(4, 6, 3, key=0, stride=2, padding=2, dilation=2, groups=2),
        lambda t: t.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2),
        (2, 4, 11),
    ),
    "conv2d": (
        lambda: nn.Conv2d(3, 4, (3, 2), key=0, stride=(1, 2), padding=(1, 0)),
        lambda t: t.Conv2d(3, 4, (3, 2), stride=(1, 2), padding=(1, 0)),
        (2, 3, 6, 7),
    ),
    "conv2d same": (
        lambda: nn.Conv2d(2, 3, 3, key=0, padding="same", dilation=2),
        lambda t: t.Conv2d(2, 3, 3, padding="same", dilation=2),
        (1, 2, 5, 6),
    ),
    "depthwise": (
        lambda: nn.Conv2d(4, 8, 3, key=0, padding=1, groups=4, bias=False),
        lambda t: t.Conv2d(4, 8, 3, padding=1, groups=4, bias=False),
        (2, 4, 5, 5),
    ),
    "conv3d": (
        lambda: nn.Conv3d(2, 4, (2, 3, 2), key=0, stride=(1, 2, 1), padding=1, groups=2),
        lambda t: t.Conv3d(2, 4, (2, 3, 2), stride=(1, 2, 1), padding=1, groups=2),
        (1, 2, 4, 5, 4),
    ),
    "transposed 1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, key=0, stride=2, padding=1, output_padding=1, groups=2),
        lambda t: t.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        (2, 4, 5),
    ),
    "transposed 2d": (
        lambda: nn.ConvTranspose2d(3, 2, (3, 2), key=0, stride=(2, 3), dilation=(2, 1)),
        lambda t: t.ConvTranspose2d(3, 2, (3, 2), stride=(2, 3), dilation=(2, 1)),
        (2, 3, 4, 3),
    ),
    "transposed 3d": (
        lambda: nn.ConvTranspose3d(2, 3, 2, key=0, stride=2, padding=1),
        lambda t: t.ConvTranspose3d(2, 3, 2, stride=2, padding=1),
        (1, 2, 3, 3, 2),
    ),
    "layer norm": (lambda: nn.LayerNorm(6), lambda t: t.LayerNorm(6), (3, 2, 6)),
    "rms norm": (lambda: nn.RMSNorm(6), lambda t: t.RMSNorm(6, eps=1e-6), (3, 2, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6), lambda t: t.GroupNorm(2, 6), (2, 6, 3, 4)),
    "max pool": (lambda: nn.MaxPool2d(3, 2, 1), lambda t: t.MaxPool2d(3, 2, 1), (2, 3, 7, 6)),
    "average pool": (lambda: nn.AvgPool2d(3, 2, 1), lambda t: t.AvgPool2d(3, 2, 1), (2, 3, 7, 6)),
    "pool 3d": (lambda: nn.MaxPool3d(2), lambda t: t.MaxPool3d(2), (1, 2, 4, 4, 6)),
    "adaptive pool": (
        lambda: nn.AdaptiveAvgPool(3, 2), lambda t: t.AdaptiveAvgPool2d((3, 2)), (2, 3, 7, 6)
    ),
}  # fmt: skip


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def close(ours: Any, theirs: Any, what: str = "") -> None:
    found = np.asarray(ours.numpy() if hasattr(ours, "numpy") else ours)
    np.testing.assert_allclose(found, theirs.detach().numpy(), 2e-5, 2e-5, err_msg=what)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    torch = pytest.importorskip("torch")
    make, there, shape = LAYERS[name]
    net, x = there(torch.nn), numbers(*shape)
    for parameter in net.parameters():  # norms start as ones and zeros
        torch.nn.init.normal_(parameter)
    layer = eg.from_torch_state(make(), net.state_dict())
    given = torch.tensor(x, requires_grad=True)
    out = net(given)
    factor = numbers(*out.shape)
    (out * torch.tensor(factor)).sum().backward()

    def loss(layer: Any, x: Any) -> Any:
        y = layer(x)
        return (y * factor).sum(), y

    both = eg.compile(eg.value_and_grad(loss, (0, 1), has_aux=True), name="layer")
    (_, y), (grads, slope) = both(layer, x)
    close(y, out)
    close(slope, given.grad, "x")
    theirs = {k: v.grad for k, v in net.named_parameters()}
    ours = eg.to_torch_state(grads)
    assert set(ours) == set(theirs)
    for key, value in ours.items():
        close(value, theirs[key], key)


def test_batch_norm_moves_its_statistics_as_torch() -> None:
    torch = pytest.importorskip("torch")
    net, layer = torch.nn.BatchNorm2d(3, momentum=0.2), nn.BatchNorm(3, momentum=0.2)
    for _ in range(3):
        x = numbers(4, 3, 2, 5) * 3 + 1
        y, layer = layer.train(eg.array(x))
        close(y, net(torch.tensor(x)))
    close(layer.running_mean, net.running_mean)
    close(layer.running_var, net.running_var)
    net.eval()
    close(layer(eg.array(x)), net(torch.tensor(x)))


@pytest.mark.parametrize("cross", [False, True])
def test_attention(cross: bool) -> None:
    torch = pytest.importorskip("torch")
    source = {"kdim": 6, "vdim": 6} if cross else {}
    net = torch.nn.MultiheadAttention(8, 2, batch_first=True, **source)
    layer = nn.MultiHeadAttention(8, 2, key=0, causal=False, from_width=6 if cross else None)
    layer = eg.from_torch_state(layer, net.state_dict())
    x, context = numbers(3, 5, 8), numbers(3, 7, 6)
    seen = RNG.random((3, 1, 1, 7 if cross else 5)) < 0.7
    seen[..., 0] = True
    there = torch.tensor(context if cross else x)
    hidden = torch.tensor(~seen[:, 0, 0])
    expected = net(torch.tensor(x), there, there, key_padding_mask=hidden, need_weights=False)[0]
    found = layer(eg.array(x), eg.array(context) if cross else None, eg.array(seen))
    close(found, expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_attention(kv_heads: int) -> None:
    torch = pytest.importorskip("torch")
    layer = nn.MultiHeadAttention(8, 4, key=0, kv_heads=kv_heads, std=0.5)
    x = numbers(2, 6, 8)
    state = {k: torch.tensor(v) for k, v in eg.to_torch_state(layer).items()}

    def part(name: str) -> Any:
        y = torch.nn.functional.linear(
            torch.tensor(x), state[f"{name}.weight"], state[f"{name}.bias"]
        )
        return y.reshape(2, 6, -1, 2).transpose(1, 2)

    heads = torch.nn.functional.scaled_dot_product_attention(
        part("query"), part("key"), part("value"), is_causal=True, enable_gqa=True
    )
    heads = heads.transpose(1, 2).reshape(2, 6, 8)
    out = torch.nn.functional.linear(heads, state["output.weight"], state["output.bias"])
    close(layer(eg.array(x)), out)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("xavier_uniform", "xavier_uniform_"), ("xavier_normal", "xavier_normal_"),
        ("he_uniform", "kaiming_uniform_"), ("he_normal", "kaiming_normal_"),
    ],
)  # fmt: skip
def test_initial_weights_spread_as_torch(ours: str, theirs: str) -> None:
    torch = pytest.importorskip("torch")
    shape = (96, 64, 3, 3)
    mine = getattr(nn.initial, ours)(0, shape, layout="conv").numpy()
    more = {"nonlinearity": "relu"} if "kaiming" in theirs else {}
    his = getattr(torch.nn.init, theirs)(torch.empty(shape), **more).numpy()
    assert abs(mine.std() / his.std() - 1) < 0.02
    if "uniform" in ours:
        assert abs(np.abs(mine).max() / np.abs(his).max() - 1) < 0.01
