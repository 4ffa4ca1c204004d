"""The models of the comparison with other frameworks train to the losses that NumPy says."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import pytest

from eggpu.compiler import pytree
from eggpu.compiler.reference import evaluate
from eggpu.compiler.tracing import trace_call

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "peers" / "common.py"
sys.path.insert(0, str(ROOT / "bench"))
import peers  # noqa: E402
import peers_data  # noqa: E402
import peers_numpy  # noqa: E402
from peers_children import Here, Peers  # noqa: E402

STEPS = 10
# The first losses that PyTorch and JAX give.
KNOWN = {"mlp": [2.5480766, 2.4683897, 2.4493367], "gpt": [4.209714, 3.935879, 3.909129]}


@functools.cache
def numbers(task: str) -> tuple[peers_data.Arrays, peers_data.Batches]:
    """First weights and batches."""
    return peers.numbers(task, Path("nowhere"))


@functools.cache
def expected(task: str) -> list[float]:
    """The losses of the first steps in float64 NumPy."""
    if task == "mlp":
        return peers_numpy.mlp_losses(*numbers(task), STEPS, peers_data.MLPSize())
    return peers_numpy.gpt_losses(*numbers(task), STEPS, peers_data.GPTSize())


@pytest.mark.parametrize("task", ["mlp", "gpt"])
def test_numpy_gives_the_losses_of_other_frameworks(task: str) -> None:
    np.testing.assert_allclose(expected(task)[:3], KNOWN[task], rtol=2e-6)


@pytest.mark.parametrize("task", ["mlp", "gpt"])
@pytest.mark.skipif(not SHARED.is_file(), reason="the file that frameworks share is not here")
def test_the_numbers_are_those_that_frameworks_share(task: str) -> None:
    weights, batches = peers.shared(task, SHARED)
    own, own_batches = numbers(task)
    assert set(weights) == set(own)
    for name, value in own.items():
        np.testing.assert_array_equal(value, weights[name], err_msg=name)
    for ours, theirs in zip(own_batches, batches, strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])


@pytest.mark.parametrize("task", ["mlp", "gpt"])
def test_traced_steps_interpreted_in_float64(task: str) -> None:
    """The formulas, without a device: model, gradients and optimizer."""
    weights, batches = numbers(task)
    trainer = peers.Trainer(task, weights, batches)
    traced = trace_call(trainer.step.function, (trainer.model, trainer.state, *batches[0]))
    model, state = trainer.model, trainer.state
    found = []
    for i in range(3):
        leaves = [np.asarray(v) for v in pytree.flatten((model, state, *batches[i]))[0]]
        values = evaluate(traced.graph, leaves, np.float64)
        model, state, loss = pytree.unflatten(traced.results, values)
        found.append(float(loss))
    np.testing.assert_allclose(found, expected(task)[:3], rtol=1e-6)


@pytest.mark.parametrize("task", ["mlp", "gpt"])
def test_compiled_steps(task: str) -> None:
    trainer = peers.Trainer(task, *numbers(task))
    found = [float(trainer.advance()) for _ in range(STEPS)]
    np.testing.assert_allclose(found, expected(task), rtol=0, atol=1e-5)
    assert not trainer.step.recompilations


@pytest.mark.parametrize("task", ["mlp", "gpt"])
def test_torch_takes_the_same_steps(task: str) -> None:
    """Losses are compared before anything is timed; the ratio is our time over torch's."""
    pytest.importorskip("torch")
    weights, batches = numbers(task)
    import peers_torch

    other = peers_torch.Trainer(task, weights, batches, 2)
    others = Peers({"torch": Here(other)})
    row = peers.measure(peers.Trainer(task, weights, batches), 1, others)
    assert row["ratio"] == pytest.approx(row["ms"] / row["torch_ms"], rel=1e-2)
    other.weights[next(iter(other.weights))].data.mul_(1.5)
    with pytest.raises(ValueError, match=r"losses need to agree within 0\.0001, torch_losses"):
        peers.measure(peers.Trainer(task, weights, batches), 1, others)
