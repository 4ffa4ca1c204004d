"""Schedules, groups, clipping, accumulation and averages: 100 steps beside PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn, optim

pytestmark = [pytest.mark.models, pytest.mark.timeout(300)]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((100, 16, 5)).astype(np.float32)
Y = RNG.integers(0, 3, (100, 16)).astype(np.int32)


def both(torch: Any) -> tuple[Any, Any]:
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    model = nn.Sequential(nn.Linear(5, 8, key=0), nn.tanh, nn.Linear(8, 3, key=1))
    return net, eg.from_torch_state(model, net.state_dict())


def loss(model: Any, x: Any, y: Any) -> Any:
    return nn.cross_entropy(model(x), y)


def ours(model: Any, opt: Any, name: str) -> tuple[Any, Any]:
    @eg.compile(name=f"as_torch_{name}")
    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        grads = eg.grad(loss)(model, x, y)
        return opt.update(model, state, grads)

    state = opt.init(model)
    for x, y in zip(X, Y, strict=True):
        model, state = step(model, state, x, y)
    return model, state


def theirs(torch: Any, net: Any, opt: Any, after: Callable[[], Any], **how: Any) -> None:
    """100 batches; `every` of them an update, gradients limited to `norm` or `value`."""
    every = how.get("every", 1)
    for i, (x, y) in enumerate(zip(X, Y, strict=True)):
        value = torch.nn.functional.cross_entropy(net(torch.tensor(x)), torch.tensor(y).long())
        (value / every).backward()
        if (i + 1) % every:
            continue
        if "norm" in how:
            torch.nn.utils.clip_grad_norm_(net.parameters(), how["norm"])
        if "value" in how:
            torch.nn.utils.clip_grad_value_(net.parameters(), how["value"])
        opt.step()
        net.zero_grad()  # also of what the optimizer does not know
        after()


def close(model: Any, net: Any) -> None:
    found = eg.to_torch_state(model)
    for name, value in net.state_dict().items():
        np.testing.assert_allclose(found[name], value.numpy(), 2e-5, 5e-6, err_msg=name)


@pytest.mark.parametrize(
    ("ours_", "theirs_"),
    [
        (optim.step_decay(0.05, 0.5, 30), lambda s, o: s.StepLR(o, 30, 0.5)),
        (optim.linear(0.05, 0.01, 60), lambda s, o: s.LinearLR(o, 1.0, 0.2, 60)),
        (optim.cosine(0.05, steps=100), lambda s, o: s.CosineAnnealingLR(o, 100)),
        (
            optim.one_cycle(0.1, 100),
            lambda s, o: s.OneCycleLR(o, 0.1, 100, cycle_momentum=False),
        ),
    ],
    ids=["step", "linear", "cosine", "one-cycle"],
)
def test_schedules(ours_: Any, theirs_: Any) -> None:
    torch = pytest.importorskip("torch")
    net, model = both(torch)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    schedule = theirs_(torch.optim.lr_scheduler, opt)
    theirs(torch, net, opt, schedule.step)
    close(ours(model, optim.sgd(ours_, momentum=0.9), "schedule")[0], net)


def test_groups_and_clipping() -> None:
    torch = pytest.importorskip("torch")
    net, model = both(torch)
    groups = [
        {"params": [net[0].weight], "lr": 0.002},
        {"params": [net[0].bias], "weight_decay": 0.0},
        {"params": [net[2].weight]},
    ]
    opt = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)  # the last bias is frozen
    theirs(torch, net, opt, lambda: None, norm=0.3)
    mine = optim.groups(
        optim.adamw(0.01, weight_decay=0.1),
        {"layers.0.weight": {"lr": 0.002}, "layers.2.bias": optim.frozen(),
         "*.bias": {"weight_decay": 0.0}},
    )  # fmt: skip
    close(ours(model, optim.clipped(mine, norm=0.3), "groups")[0], net)


def test_accumulation_and_clipping_by_value() -> None:
    torch = pytest.importorskip("torch")
    net, model = both(torch)
    opt = torch.optim.RMSprop(net.parameters(), lr=0.005, alpha=0.9)
    theirs(torch, net, opt, lambda: None, every=4, value=0.02)
    mine = optim.accumulate(optim.clipped(optim.rmsprop(0.005, 0.9), value=0.02), 4)
    found, state = ours(model, mine, "accumulate")
    assert int(state.step) == 25
    close(found, net)


def test_averages() -> None:
    torch = pytest.importorskip("torch")
    net, model = both(torch)
    swa = torch.optim.swa_utils
    average = swa.AveragedModel(net, multi_avg_fn=swa.get_ema_multi_avg_fn(0.95))
    average.update_parameters(net)  # torch's first call copies; here the average starts as a copy
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    theirs(torch, net, opt, lambda: average.update_parameters(net))
    found, state = ours(model, optim.ema(optim.adam(0.01), 0.95), "ema")
    close(found, net)
    close(state.average, average.module)
