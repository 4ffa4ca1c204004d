"""Plans as JSON text, with a version and a digest, and back."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import types
from functools import cache
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from ..errors import IRError
from .plan import Plan

FORMAT, VERSION = "eggpu-plan", 6


def plan_to_json(plan: Plan) -> str:
    """The plan as one JSON object; bytes are base64. Equal plans give equal texts."""
    content = _encode(plan)
    header = {"format": FORMAT, "version": VERSION, "digest": _digest(content)}
    return json.dumps({**header, "plan": content})


def plan_from_json(text: str) -> Plan:
    """The plan that `plan_to_json` wrote. Raises IRError when the text is anything else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IRError(f"a saved plan is JSON text, got {text[:40]!r}: {error}") from None
    saved = cast("dict[str, Any]", document if isinstance(document, dict) else {})
    if saved.get("format") != FORMAT:
        raise IRError(f"a saved plan has the format {FORMAT!r}, got {text[:40]!r}")
    if saved.get("version") != VERSION:
        raise IRError(f"a saved plan needs version {VERSION}, got {saved.get('version')!r}")
    content = saved.get("plan")
    plan = _decode(Plan, content, "plan")
    if saved.get("digest") != _digest(content):
        raise IRError("a saved plan was changed after it was written: its digest does not fit")
    return plan


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, tuple):
        return [_encode(v) for v in cast("tuple[Any, ...]", value)]
    if dataclasses.is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


@cache
def _fields(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode(kind: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type `kind`."""
    origin, args = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return _decode_fields(kind, value, where)
    if origin is tuple:
        return _decode_tuple(args, value, where)
    if origin in (Union, types.UnionType):
        return _decode_union(args, value, where)
    if origin is Literal:
        _need(value in args, where, f"one of {', '.join(args)}", value)
        return value
    if kind is bytes:
        return _decode_bytes(value, where)
    accepted = (int, float) if kind is float else (kind,)
    _need(type(value) in accepted, where, f"{kind.__name__}", value)
    return kind(value)


def _decode_fields(kind: type, value: Any, where: str) -> Any:
    fields = _fields(kind)
    _need(isinstance(value, dict), where, "an object", value)
    _need(value.keys() == fields.keys(), where, f"the fields {', '.join(fields)}", list(value))
    return kind(**{k: _decode(t, value[k], f"{where}.{k}") for k, t in fields.items()})


def _decode_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    _need(isinstance(value, list), where, "a list", value)
    kinds = (args[0],) * len(value) if args[-1] is Ellipsis else args
    _need(len(value) == len(kinds), where, f"{len(kinds)} values", value)
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(_decode(kind, v, f"{where}[{i}]") for i, (kind, v) in pairs)


def _decode_union(args: tuple[Any, ...], value: Any, where: str) -> Any:
    for kind in args:
        try:
            return _decode(kind, value, where)
        except IRError:
            continue
    raise IRError(f"{where} needs {' or '.join(map(str, args))}, got {_short(value)}")


def _decode_bytes(value: Any, where: str) -> bytes:
    _need(isinstance(value, str), where, "base64 text", value)
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise IRError(f"{where} needs base64 text, got {_short(value)}") from None


def _need(condition: bool, where: str, what: str, value: Any) -> None:
    if not condition:
        raise IRError(f"{where} needs {what}, got {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
