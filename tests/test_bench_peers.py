"""bench/peers.py and kernels.py ask peers in child processes: protocol, options, missing ones."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))
import kernels  # noqa: E402
import peers  # noqa: E402
import peers_children  # noqa: E402
import peers_data  # noqa: E402
import peers_known  # noqa: E402
import peers_numpy  # noqa: E402
from peers_children import Child, PeerError, Peers  # noqa: E402

MISSING = peers_known.Peer("peers_nowhere", ("no_such_package",), "pip install no-such-package")


@pytest.fixture
def child():
    found = Child("numpy", sys.executable)
    yield found
    found.close()
    assert found.process.returncode == 0
    assert not Path(found.folder.name).exists()


def options(*given: str) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser()
    peers_children.add_arguments(parser)
    return parser, parser.parse_args(given)


def numbers() -> tuple[peers_data.Arrays, peers_data.Batches]:
    return peers_data.mlp_weights(), peers_data.mlp_batches()


def test_a_child_takes_the_same_steps(child: Child) -> None:
    weights, batches = numbers()
    child.train("mlp", weights, batches)
    losses, first = child.steps(4)
    want = peers_numpy.mlp_losses(weights, batches, 4, peers_data.MLPSize())
    assert losses == pytest.approx(want, rel=1e-12)
    assert 0 < first < 60
    assert 0 < child.block(2) < 60
    known, _ = child.steps(1)  # six steps were taken before
    want = peers_numpy.mlp_losses(weights, batches, 7, peers_data.MLPSize())
    assert known == pytest.approx(want[6:], rel=1e-12)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_child_is_stopped_while_others_are_timed(child: Child) -> None:
    def state() -> str:
        return Path(f"/proc/{child.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    child.kernel("softmax", [np.zeros((2, 3), np.float32)])
    end = time.monotonic() + 5
    while state() != "T" and time.monotonic() < end:
        time.sleep(0.01)
    assert state() == "T"


def test_a_child_says_what_failed_and_goes_on(child: Child) -> None:
    with pytest.raises(PeerError, match="numpy failed at kernel: KeyError: 'no such kind'"):
        child.kernel("no such kind", [np.ones(3, np.float32)])
    with pytest.raises(PeerError, match="numpy failed at dance: ValueError: needs a request"):
        child.ask(do="dance")
    results, _ = child.kernel("softmax", [np.zeros((2, 4), np.float32)])
    np.testing.assert_array_equal(results[0], np.full((2, 4), 0.25))
    assert child.best(0.001) > 0


def test_a_child_that_ends_is_told() -> None:
    child = Child("numpy", sys.executable)
    child.process.kill()
    child.process.wait()
    with pytest.raises(PeerError, match="numpy ended with -9"):
        child.steps(1)
    child.close()


def test_a_child_that_takes_too_long_is_ended() -> None:
    child = Child("numpy", sys.executable)
    child.limit = 0.2
    child.kernel("matmul", [np.ones((2, 2), np.float32)] * 2)
    with pytest.raises(PeerError, match=r"numpy ended with -9 or took 0\.2 s"):
        child.best(30.0)
    child.close()


def test_an_interpreter_that_cannot_run_the_worker(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no module named anything >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(PeerError, match=r"ended with 3 .*no module named anything"):
        Child("numpy", str(broken))


def test_what_libraries_print_is_no_answer(tmp_path: Path) -> None:
    """stdout of the worker is for answers alone."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\nimport numpy\n_load = numpy.load\n"
        "def load(*args):\n    print('loading')\n    return _load(*args)\nnumpy.load = load\n"
    )
    path = tmp_path / "numbers.npz"
    peers_known.save_numbers(path, *numbers())
    request = json.dumps({"do": "train", "task": "mlp", "numbers": str(path)})
    done = subprocess.run(
        [sys.executable, str(peers_children.WORKER), "numpy"],
        input=request + "\n",
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [json.loads(line) for line in done.stdout.splitlines()][1:] == [{}]
    assert "loading" in done.stderr


def test_numbers_and_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    weights, batches = peers_data.gpt_weights(), peers_data.gpt_batches()
    peers_known.save_numbers(tmp_path / "n.npz", weights, batches)
    found, pairs = peers_known.load_numbers(tmp_path / "n.npz")
    assert list(found) == list(weights)
    for name, value in weights.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == value.dtype
    for got, want in zip(pairs, batches, strict=True):
        np.testing.assert_array_equal(got, want)
    arrays = [np.full(i, i, np.float32) for i in range(12)]
    peers_known.save_arrays(tmp_path / "a.npz", arrays)
    for got, want in zip(peers_known.load_arrays(tmp_path / "a.npz"), arrays, strict=True):
        np.testing.assert_array_equal(got, want)


def test_steps_beside_a_child_and_losses_that_differ() -> None:
    weights, batches = numbers()
    with Peers({}) as others:
        others.add("numpy", sys.executable)
        others.each(lambda _, side: side.train("mlp", weights, batches))
        row = peers.measure(peers.Trainer("mlp", weights, batches), 1, others)
        assert row["numpy_ratio"] == pytest.approx(row["ms"] / row["numpy_ms"], rel=2e-2)
        assert row["numpy_loss_error"] < 1e-5
        assert row["numpy_first_s"] >= 0
        assert "ratio" not in row  # which is torch's
        wrong = {name: value * np.float32(1.5) for name, value in weights.items()}
        others.each(lambda _, side: side.train("mlp", wrong, batches))
        with pytest.raises(ValueError, match=r"losses need to agree within 0\.0001, numpy_losses"):
            peers.measure(peers.Trainer("mlp", weights, batches), 1, others)


def small(case: kernels.Case) -> list[np.ndarray]:
    """Operands of a kernel with no axis above 8."""
    rng = np.random.default_rng(1)
    shapes = [[min(n, 8) for n in shape] for shape in case.shapes]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("case", list(kernels.cases()), ids=lambda case: case.name)
def test_every_kernel_is_what_numpy_says(case: kernels.Case) -> None:
    """In small: what peers call a kernel is what ours computes."""
    arrays = small(case)
    ours = peers_children.Here(module=kernels.Ours({case.kind: case.ours}))
    got, _ = ours.kernel(case.kind, arrays)
    want, _ = peers_children.Here(module=peers_numpy).kernel(case.kind, arrays)
    kernels.compare(case.name, "numpy", got, want)


@pytest.mark.parametrize("name", peers_known.DEFAULT[1:])
def test_a_framework_in_its_environment(name: str) -> None:
    """Steps and all kernels in small; PEERS_PYTHON is an interpreter that has tinygrad and jax."""
    weights, batches = numbers()
    try:
        child = Child(name, os.environ.get("PEERS_PYTHON", sys.executable))
    except PeerError as error:
        pytest.skip(str(error))
    try:
        child.train("mlp", weights, batches)
        want = peers_numpy.mlp_losses(weights, batches, 4, peers_data.MLPSize())
        assert child.steps(4)[0] == pytest.approx(want, abs=1e-5)
        assert child.block(1) > 0
        for case in kernels.cases():
            arrays = small(case)
            want, _ = peers_children.Here(module=peers_numpy).kernel(case.kind, arrays)
            got, _ = child.kernel(case.kind, arrays)
            kernels.compare(case.name, name, got, want)
    finally:
        child.close()


def test_a_kernel_beside_a_child_and_values_that_differ() -> None:
    case = kernels.Case("rows", kernels._softmax, "softmax", ((16, 8),), 0.2)
    with Peers({}) as others:
        others.add("numpy", sys.executable)
        row = kernels.measure(case, 1, others)
        assert row["numpy_ratio"] == pytest.approx(row["numpy_ms"] / row["ours_ms"], rel=0.1)
        assert "numpy" in kernels.text(row)
        wrong = kernels.Case("rows", kernels._softmax, "layer norm", ((8, 8), (8,), (8,)), 0.2)
        with pytest.raises((ValueError, TypeError)):
            kernels.measure(wrong, 1, others)


def test_what_is_missing_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(peers_known.PEERS, "torch", MISSING)
    monkeypatch.setattr(peers_children, "DEFAULT", ("torch",))
    with peers_children.start(*options()) as others:
        assert others.sides == {}
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("without torch needs more in ")
    assert said.endswith("no_such_package missing: pip install no-such-package\n")


def test_what_is_asked_for_and_missing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(peers_known.PEERS, "torch", MISSING)
    with pytest.raises(SystemExit):
        peers_children.start(*options("--against", "numpy,torch"))
    assert "no_such_package missing: pip install no-such-package" in capsys.readouterr().err


def test_a_child_in_an_environment_without_the_peer() -> None:
    if not peers_known.missing(peers_known.PEERS["tinygrad-webgpu"]):
        pytest.skip("tinygrad is installed")
    with pytest.raises(PeerError, match="pip install tinygrad dawn-python; apt-get install mesa"):
        Child("tinygrad-webgpu", sys.executable)


@pytest.mark.parametrize("required", [True, False])
def test_a_peer_that_fails_later(required: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(name: str, side: object) -> None:
        raise PeerError(f"{name} failed")

    with Peers({}, required) as others:
        others.add("numpy", sys.executable)
        if required:
            with pytest.raises(PeerError, match="numpy failed"):
                others.each(fail)
        else:
            assert others.each(fail) == {}
            assert others.sides == {}
            assert capsys.readouterr().err == "without numpy failed\n"


def test_a_peer_that_fails_ends_the_program_with_a_line() -> None:
    others = Peers({})
    others.add("numpy", sys.executable)
    child = others.sides["numpy"]
    with pytest.raises(SystemExit, match=r"^error: numpy failed at dance"), others:
        others.each(lambda _, side: side.ask(do="dance"))
    assert child.process.returncode == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--against", "jaxx"), "--against needs names of torch, tinygrad-webgpu"),
        (("--against", ""), "got ''"),
        (("--against", "jax", "--without-torch"), "give one of the two"),
        (("--python", "tf=/bin/sh"), "--python needs PEER=PATH"),
        (("--python", "torch=/bin/sh"), "torch runs in this process"),
        (("--python", "jax=/no/such/python"), "needs an interpreter, got '/no/such/python'"),
        (("--python", "jax="), "needs an interpreter, got ''"),
        (("--python", "/tmp"), "needs an interpreter, got '/tmp'"),
    ],
)
def test_options_that_are_wrong(
    given: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        peers_children.start(*options(*given))
    assert message in capsys.readouterr().err


def test_options_that_are_right() -> None:
    parser, args = options("--python", "/bin/sh", "--python", f"jax={sys.executable}")
    found = peers_children.interpreters(parser, args.python)
    assert found == {"": "/bin/sh", "jax": sys.executable}
    assert peers_children.chosen(parser, None) == peers_known.DEFAULT
    assert peers_children.chosen(parser, "none") == []
    assert peers_children.chosen(parser, "jax,torch,jax") == ["jax", "torch"]


def test_dawn_is_found_where_pip_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "pydawn" / "lib" / f"libwebgpu_dawn_{os.uname().machine}.so"
    library.parent.mkdir(parents=True)
    (tmp_path / "pydawn" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("WEBGPU_PATH", raising=False)
    peer = peers_known.PEERS["tinygrad-webgpu"]
    with pytest.raises(FileNotFoundError, match="needs libwebgpu_dawn for"):
        peers_known.environment(peer)
    library.touch()
    found = peers_known.environment(peer)
    assert found == {"DEV": "WEBGPU", "TRAINING": "1", "WEBGPU_PATH": str(library)}
    monkeypatch.setenv("WEBGPU_PATH", "mine")
    assert "WEBGPU_PATH" not in peers_known.environment(peer)
