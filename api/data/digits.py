"""scikit-learn's handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eggpu.data.errors import DataError


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits of 8 by 8 pixels: rows of 64 numbers from 0 to 1, and what they show."""

    train_x: np.ndarray
    train_y: np.ndarray
    valid_x: np.ndarray
    valid_y: np.ndarray


def digits(seed: int = 0) -> Digits:
    """scikit-learn's 1797 digits, shuffled: four fifths to train on, one fifth to validate."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("the digits come with scikit-learn: pip install 'eggpu[digits]'") from None
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
    split = len(x) * 4 // 5
    return Digits(x[:split], y[:split], x[split:], y[split:])
