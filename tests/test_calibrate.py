"""Measured profiles: how they are found, kept, and used."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, fields, replace

import numpy as np
import pytest

import eggpu as eg
from eggpu import profiles, session
from eggpu.calibrate import _solved, calibrate, profile_of
from eggpu.cli import main
from eggpu.compiler.schedule.target import (
    GENERIC_GPU,
    H200,
    LAVAPIPE,
    LLVMPIPE,
    Profile,
    built_in,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("EGGPU_CACHE_DIR", str(tmp_path))
    return tmp_path / "profiles"


def of(target):
    return target.name, target.driver, target.backend


FOUND = replace(LAVAPIPE, launch=21000.0, bandwidth=7.7, contract=39.0)


# Built in


def test_a_device_that_was_not_calibrated_has_rates_of_its_kind():
    assert built_in("llvmpipe (LLVM 15.0.6, 512 bits)", "cpu") == LAVAPIPE
    assert built_in("NVIDIA H200", "gpu") == H200
    assert built_in("NVIDIA GeForce RTX 4090", "gpu") == GENERIC_GPU


# Kept


def test_a_profile_is_kept_for_a_device_and_its_driver(folder):
    assert profiles.load(*of(LLVMPIPE)) is None
    where = profiles.store(LLVMPIPE, FOUND)
    assert where is not None
    assert where.parent == folder
    assert profiles.load(*of(LLVMPIPE)) == FOUND
    assert profiles.measured(LLVMPIPE) == replace(LLVMPIPE, profile=FOUND)
    assert profiles.load(*of(replace(LLVMPIPE, driver="Mesa 25"))) is None
    assert profiles.load(*of(replace(LLVMPIPE, name="another"))) is None
    assert profiles.load(*of(replace(LLVMPIPE, backend="D3D12"))) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: "rubbish",
        lambda kept: "[1, 2]",
        lambda kept: json.dumps({**kept, "eggpu": "0.0.0"}),
        lambda kept: json.dumps({**kept, "profile": {"launch": 1.0}}),
        lambda kept: json.dumps({**kept, "profile": {**kept["profile"], "launch": -1.0}}),
        lambda kept: json.dumps({**kept, "profile": {**kept["profile"], "launch": "fast"}}),
        lambda kept: json.dumps({**kept, "profile": {**kept["profile"], "speed": 3}}),
    ],
)
def test_a_file_that_is_no_profile_is_not_used(spoil):
    where = profiles.store(LLVMPIPE, FOUND)
    assert where is not None
    where.write_text(spoil(json.loads(where.read_text())))
    assert profiles.load(*of(LLVMPIPE)) is None
    assert profiles.measured(LLVMPIPE) is LLVMPIPE


def test_nothing_is_kept_when_the_cache_is_off(monkeypatch):
    monkeypatch.setenv("EGGPU_CACHE_DIR", "")
    assert profiles.store(LLVMPIPE, FOUND) is None
    assert profiles.load(*of(LLVMPIPE)) is None


# Rounded


def test_rates_are_rounded_and_noise_does_not_change_them():
    first = profiles.settled(replace(FOUND, launch=20777.3, bandwidth=7.6543, rows=16), None)
    assert (first.launch, first.bandwidth, first.rows) == (21000.0, 7.7, 16)
    again = profiles.settled(replace(first, launch=22900.0, bandwidth=7.0), first)
    assert again == first
    moved = profiles.settled(replace(first, launch=30123.0), first)
    assert moved == replace(first, launch=30000.0)


def test_a_rate_is_solved_from_a_prediction():
    for wanted in (3.0, 70.0, 900.0):
        value = _solved(lambda rate: 5.0 + 1000.0 / rate, 5.0 + wanted, guess=30.0)
        assert 1000.0 / value == pytest.approx(wanted, rel=0.01)
    rising = _solved(lambda factor: 10.0 * factor, 25.0, guess=1.5)
    assert rising == pytest.approx(2.5, rel=0.01)


# Used


def test_a_device_is_opened_with_its_measured_profile(monkeypatch):
    device = eg.device()
    before = device.target
    profiles.store(before, replace(before.profile, launch=12345.0))
    monkeypatch.setattr(session, "_current", [])
    try:
        assert eg.device().target.profile.launch == 12345.0
        plan = eg.compile(lambda x: x + 1.0, cache=False).compile(np.ones(4, np.float32)).plan
        assert plan.kernels[0].predicted_ns == pytest.approx(12345.0, rel=0.01)
    finally:
        device.target = before


def test_devices_tells_which_profile_is_used(capsys):
    assert main(["devices"]) == 0
    assert "measured" not in capsys.readouterr().out
    profiles.store(eg.device().target, FOUND)
    assert main(["devices"]) == 0
    assert "measured" in capsys.readouterr().out


# Measured


def test_calibration(capsys):
    start = time.perf_counter()
    assert main(["calibrate"]) == 0
    assert time.perf_counter() - start < 60
    found = profiles.load(*of(eg.device().target))
    assert found is not None
    text = capsys.readouterr().out
    assert all(f.name in text for f in fields(Profile))
    for name, value in asdict(found).items():
        assert value == float(f"{value:.1e}") or isinstance(value, int), name
    assert found.strided >= 1.0
    assert 1e2 < found.launch < 1e7
    assert main(["calibrate", "--forget"]) == 0
    assert profiles.load(*of(eg.device().target)) is None


def test_calibration_ends_in_time_with_what_it_has():
    device = eg.device()
    fits = [*calibrate(device, budget=0.0)]  # no time is left after the first
    assert [f.rate for f in fits] == ["launch"]
    assert profile_of(fits, GENERIC_GPU) == replace(GENERIC_GPU, launch=fits[0].value)


def test_a_rate_that_others_bound_is_where_they_begin_to():
    assert _solved(lambda v: max(100.0, 1000.0 / v), 50.0, 5.0) == pytest.approx(9.8, rel=0.01)
    assert _solved(lambda v: max(100.0, 1000.0 / v), 250.0, 5.0) == pytest.approx(4.0, rel=0.01)
    assert _solved(lambda v: max(100.0, 10.0 * v), 400.0, 5.0) == pytest.approx(40.0, rel=0.01)
