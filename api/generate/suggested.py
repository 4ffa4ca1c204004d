"""How a model's authors would have its tokens chosen: generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eggpu.generate.sampling import Sampling, SamplingError
from eggpu.importers.tensors import ModelFileError
from eggpu.models.config import Config

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")


def suggested(values: Mapping[str, Any], where: str) -> Sampling:
    """The options in a generation_config.json; what it does not have is off.

    As in transformers, tokens are drawn only with `do_sample`: the temperature is 0 without it,
    and the cuts count once somebody gives another. Raises ModelFileError for what is no option.
    """
    config = Config(values, where)
    draws, plain = config.get("do_sample", False), Sampling()
    if not isinstance(draws, bool):
        raise ModelFileError(f"{where} needs true or false as 'do_sample', got {draws!r:.60}")
    found: dict[str, Any] = {name: config.number(name, getattr(plain, name)) for name in _NUMBERS}
    found["temperature"] = config.number("temperature", 1.0) if draws else 0.0
    top_k = config.get("top_k", 0)
    if type(top_k) is not int:
        raise ModelFileError(f"{where} needs an integer 'top_k', got {top_k!r:.60}")
    try:
        return Sampling(**found, top_k=top_k)
    except SamplingError as error:
        raise ModelFileError(f"{where}: {error}") from None


def described(sampling: Sampling) -> str:
    """The options that have an effect, as a short text."""
    if sampling.temperature == 0:
        names = ["repetition_penalty"]
    else:
        names = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"]
    plain = Sampling()
    told = [
        f"{name.replace('_', ' ')} {getattr(sampling, name):g}"
        for name in names
        if getattr(sampling, name) != getattr(plain, name) or name == "seed"
    ]
    return ", ".join(told if sampling.temperature else ["likeliest tokens", *told])
