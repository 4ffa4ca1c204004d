"""Reading JSON bodies: every field is checked, unknown ones are refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from eggpu.serve.errors import RequestError


def parse(body: bytes) -> dict[str, Any]:
    """The object of a body. Raises RequestError for anything else."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise RequestError(f"the body needs a JSON object, got {_kind(found)}")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


class Fields:
    """The fields of a JSON object, each asked for by name; null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values, self.where = values, where

    def name(self, key: str) -> str:
        return f"{self.where}{key}"

    def only(self, known: Iterable[str]) -> None:
        """Raise RequestError for fields that are not known."""
        extra = sorted(set(self.values) - set(known))
        if extra:
            names = ", ".join(f"{self.name(k):.80}" for k in extra[:4])
            raise RequestError(f"Unrecognized request arguments supplied: {names}", extra[0][:80])

    def refuse(self, key: str, *accepted: Any) -> None:
        """Raise RequestError unless a field is missing or has a value without effect."""
        value = self.values.get(key)
        if value is not None and not any(value == a and type(value) is type(a) for a in accepted):
            raise RequestError(f"'{self.name(key)}' is not supported by this server", key)

    def number(self, key: str, default: float, least: float, most: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, "a number", value)
        if not least <= value <= most:
            raise RequestError(
                f"'{self.name(key)}' needs a number from {least:g} to {most:g}, got {value}", key
            )
        return float(value)

    def integer(self, key: str, default: int, least: int, most: int) -> int:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "an integer", value)
        if not least <= value <= most:
            raise RequestError(
                f"'{self.name(key)}' needs an integer from {least} to {most}, got {value}", key
            )
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return bool(value)

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string", value)
        return unicode(value or default, self.name(key))

    def texts(self, key: str, most: int) -> tuple[str, ...]:
        """One string, or a list of up to `most`."""
        value = self.values.get(key)
        given = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(given, list) or not all(isinstance(v, str) for v in given):
            raise self.wrong(key, "a string or a list of strings", value)
        if len(given) > most:
            raise RequestError(f"'{self.name(key)}' takes at most {most} strings", key)
        return tuple(unicode(v, self.name(key)) for v in given if v)

    def object(self, key: str) -> Fields:
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object", value)
        return Fields(value or {}, f"{self.name(key)}.")

    def wrong(self, key: str, needed: str, value: Any) -> RequestError:
        return RequestError(f"'{self.name(key)}' needs {needed}, got {_kind(value)}", key)


def unicode(text: str, name: str) -> str:
    """A text that can be encoded: JSON may hold halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"'{name}' holds text that is not Unicode", name) from None
    return text


def _kind(value: Any) -> str:
    names = {
        bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list",
        dict: "an object", type(None): "null",
    }  # fmt: skip
    return names.get(type(value), type(value).__name__)
