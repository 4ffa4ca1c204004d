"""The template environment: missing values are errors, numbers read back, text is indented."""

from __future__ import annotations

import numpy as np
import pytest
from jinja2 import UndefinedError

from eggpu.templates import number, render


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="KU"):
        render("contract_cpu.wgsl.j2", header="", L=8)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.0"),
        (0.125, "0.125"),
        (-3.0, "-3.0"),
        (0.1, "0.1"),
        (1e30, "1e+30"),
        (1 / 3, "0.33333334"),
    ],
)
def test_numbers_read_back(value: float, text: str) -> None:
    assert number(value) == text
    assert np.float32(float(text)) == np.float32(value)


def test_numbers_are_finite() -> None:
    with pytest.raises(ValueError, match="finite"):
        number(float("inf"))


def test_text_is_indented_by_its_braces() -> None:
    text = render("lib/exp.wgsl.j2")
    assert "fn eg_exp(x: f32) -> f32 {\n  let y = clamp(" in text
    assert "\n\n" not in text
