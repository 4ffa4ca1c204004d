"""Low-rank adapters: what they compute, what of a model they train, and merging them back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn, optim

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 11, (2, 9)).astype(np.int32)


def gpt() -> nn.GPT:
    return nn.GPT(vocab=11, layers=2, width=8, heads=2, context=8, key=0)


def loss(model: Any, tokens: Any) -> Any:
    return nn.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def changed(layer: nn.LoRA) -> nn.LoRA:
    return layer.replace(
        lora_up=eg.array(RNG.standard_normal(layer.lora_up.shape).astype(np.float32))
    )


def test_a_lora_is_its_formula_and_starts_as_the_base() -> None:
    base = nn.Linear(5, 4, key=0)
    layer = nn.LoRA(base, 2, alpha=6, key=1)
    x = RNG.standard_normal((3, 5)).astype(np.float32)
    np.testing.assert_array_equal(layer(eg.array(x)).numpy(), base(eg.array(x)).numpy())
    layer = changed(layer)
    weight = base.weight.numpy() + 3 * layer.lora_down.numpy() @ layer.lora_up.numpy()
    expected = x @ weight + base.bias.numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(layer(eg.array(x)).numpy(), expected, 1e-5, 1e-6)
    np.testing.assert_allclose(layer.merged()(eg.array(x)).numpy(), expected, 1e-5, 1e-6)


def test_names_choose_the_layers_and_only_adapters_count() -> None:
    model = gpt()
    tuned = nn.add_lora(model, 2, ("*.query", "blocks.1.*.down"), key=3)
    parameters = nn.named_parameters(tuned)
    adapters = sorted(n for n in parameters if "lora_" in n)
    assert adapters == [
        f"{name}.lora_{which}"
        for name in (
            "blocks.0.attention.query", "blocks.1.attention.query", "blocks.1.feed_forward.down"
        )
        for which in ("down", "up")
    ]  # fmt: skip
    assert "blocks.0.attention.query.base.weight" in nn.state_dict(tuned)
    assert "blocks.0.attention.query.base.weight" not in parameters
    downs = [parameters[n].numpy() for n in adapters if n.endswith("query.lora_down")]
    assert (downs[0] != downs[1]).all()  # each has numbers of its own
    assert nn.state_dict(model).keys() == nn.state_dict(nn.merge_lora(tuned)).keys()


def test_fine_tuning_changes_adapters_alone_and_merges_back() -> None:
    model = gpt()
    tuned = nn.add_lora(model, 3, ("blocks.*",), key=1)
    opt = optim.groups(optim.frozen(), {nn.ADAPTERS: optim.adamw(0.02)})

    @eg.compile(donate=("model", "state"))
    def step(model: Any, state: Any, tokens: Any) -> Any:
        value, grads = eg.value_and_grad(loss)(model, tokens)
        model, state = opt.update(model, state, grads)
        return model, state, value

    before = {n: v.numpy() for n, v in nn.state_dict(tuned).items()}
    state, values = opt.init(tuned), []
    sizes = [v.size for n, v in nn.state_dict(state).items() if ".first." in n]
    adapters = [v.size for n, v in before.items() if "lora_" in n]
    assert sum(sizes) == sum(adapters)  # no others have moments
    for _ in range(40):
        tuned, state, value = step(tuned, state, TOKENS)
        values.append(float(value))
    assert values[-1] < values[0] - 0.07
    for name, value in nn.state_dict(tuned).items():
        assert (value.numpy() != before[name]).any() == ("lora_" in name), name
    merged = nn.merge_lora(tuned)
    assert type(merged) is nn.GPT
    inputs = eg.array(TOKENS[:, :-1])
    np.testing.assert_allclose(merged(inputs).numpy(), tuned(inputs).numpy(), 1e-4, 1e-5)


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(ValueError, match="LoRA of 5 to 4 needs a rank of 1 to 4, got 5"):
        nn.LoRA(nn.Linear(5, 4, key=0), 5, key=0)
    with pytest.raises(eg.TraceError, match=r"no Linear layer's name matches \*\.gate"):
        nn.add_lora(gpt(), 2, ("*.gate",), key=0)


def test_modules_are_mapped_by_name_from_the_leaves() -> None:
    seen: list[str] = []

    def noted(module: Any, name: str) -> Any:
        seen.append(name)
        return nn.LayerNorm(3) if isinstance(module, nn.RMSNorm) else module

    inner = nn.Sequential(nn.Linear(3, 3, key=0), nn.RMSNorm(3))
    out = nn.map_modules(noted, {"a": inner, "b": [nn.RMSNorm(3), nn.relu]})
    assert seen == ["a.layers.0", "a.layers.1", "a", "b.0"]
    assert type(out["a"].layers[1]) is type(out["b"][0]) is nn.LayerNorm
    assert type(inner.layers[1]) is nn.RMSNorm
    assert out["a"].layers[0] is inner.layers[0]


def test_a_bert_sees_both_sides_and_gives_the_places_asked_for() -> None:
    model = nn.BERT(vocab=11, layers=1, width=8, heads=2, context=8, key=0)
    tokens = TOKENS[:, :8]
    whole = model(eg.array(tokens)).numpy()
    assert whole.shape == (2, 8, 11)
    places = np.array([[0, 5, 7], [2, 2, 4]], np.int32)
    some = model(eg.array(tokens), eg.array(places)).numpy()
    np.testing.assert_allclose(some, whole[np.arange(2)[:, None], places], 1e-5, 1e-6)
    later = tokens.copy()
    later[:, 7] = (later[:, 7] + 1) % 11
    assert (model(eg.array(later)).numpy()[:, 0] != whole[:, 0]).any()
    with pytest.raises(ValueError, match="at most 8 tokens, its context, got 9"):
        model(eg.array(TOKENS))
    with pytest.raises(TypeError, match=r"integer tokens \(n, t\), got i32\[9\]"):
        model(eg.array(TOKENS[0]))
