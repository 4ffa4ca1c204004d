"""Jinja for text from model files: nothing of Python can be reached or changed from it, and what it
makes is bounded, whatever it asks for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_MADE = 64 << 20  # characters and items that a template makes in all

# what an item costs besides its characters, a round of a loop, and a call of a macro
_ITEM, _ROUND, _CALL = 128, 1024, 4096

# What makes any amount from a number, and is not needed by templates of conversations.
_NO_FILTERS = ("batch", "center", "pprint", "slice", "sum", "urlize", "wordwrap", "xmlattr")
_NO_METHODS = {
    "ljust", "rjust", "center", "zfill", "expandtabs", "translate", "encode", "to_bytes",
}  # fmt: skip
_WIDE = re.compile(r"%(\([^)]*\))?[^%a-zA-Z]*(\d{4}|\*)")  # a width of a % format
_WIDE_BRACES = re.compile(r"\d{4}|:[^}]*\{")  # or of a {} format


def render_untrusted(
    template: str, values: Mapping[str, Any], filters: Mapping[str, Callable[..., Any]]
) -> str:
    """The text of a chat template, with the functions and blocks that such templates use. Raises
    SecurityError for what reaches for more, or makes more than MOST_MADE characters."""
    environment = _Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters |= {n: environment.counted(f, _items) for n, f in filters.items()}
    return environment.from_string(template).render(**values)


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """a ~ b, by the environment, which counts."""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Bounded(ImmutableSandboxedEnvironment):
    """Counts what is made before it is made."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "*", "%", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.left = MOST_MADE
        for name in _NO_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        for name, apply in self.filters.items():
            self.filters[name] = self.counted(apply, _COSTS.get(name, _items))
        self.concat = self.joined  # of blocks, macros and the whole text
        self.finalize = self.shown

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The tree, in which rounds of loops and calls of macros count as well."""
        tree = super()._parse(source, name, filename)
        for part in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            cost = nodes.Const(_ROUND if isinstance(part, nodes.For) else _CALL)
            count = nodes.Call(nodes.EnvironmentAttribute("count"), [cost], [], None, None)
            part.body.insert(0, nodes.ExprStmt(count))  # type: ignore[attr-defined]
        return tree

    def count(self, size: float) -> None:
        """Something of this size is about to be made."""
        self.left -= size
        if self.left < 0:
            raise SecurityError(
                f"it makes more than {MOST_MADE} characters, {MOST_MADE // _ROUND} rounds of loops "
                f"or {MOST_MADE // _CALL} calls of macros"
            )

    def joined(self, parts: Iterable[Any]) -> str:
        """The texts of all parts."""
        out = []
        for part in parts:
            self.count_all(part)
            out.append(str(part))
        return "".join(out)

    def shown(self, value: Any) -> Any:
        """What stands between braces, before it becomes a text."""
        if not isinstance(value, str):
            self.count_all(value)
        return value

    def count_all(self, value: Any) -> None:
        """A value is about to be written out: lists may hold one list any number of times."""
        stack = [value]
        while stack:
            value = stack.pop()
            self.count(_size(value) + _ITEM)
            if isinstance(value, Mapping):
                stack += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple, set)):
                stack += value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            self.count_all(right)
        self.count(_work(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_BRACES.search(value.__self__):
            raise SecurityError(f"the format {value.__self__!r:.40} is too wide")
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            if name == "join" and args:
                args = (list(args[0]),)
                __self.count(_joined(args[0], [owner]))
            else:
                __self.count(_replaced(owner, args) if name == "replace" else len(owner))
        return super().call(__context, __obj, *args, **kwargs)

    def counted(self, apply: Callable[..., Any], cost: Callable[..., float]) -> Callable[..., Any]:
        """A filter whose work is counted. Jinja gives some a context before the value."""
        marked = hasattr(apply, "jinja_pass_arg")

        def measured(*given: Any, **options: Any) -> Any:
            value, *more = given[1:] if marked else given
            if not isinstance(value, (str, int, float, Mapping)):
                value = list(value) if isinstance(value, Iterable) else value
            self.count_all(value)
            self.count(cost(value, [*more, *options.values()]))
            return apply(*given[:marked], value, *more, **options)

        if marked:
            measured.jinja_pass_arg = apply.jinja_pass_arg  # type: ignore[attr-defined]
        return measured


def _work(operator: str, left: Any, right: Any) -> float:
    """The size of what an operator makes, at least about."""
    match operator:
        case "+":
            return _size(left) + _size(right)
        case "*":
            times = [max(v, 1) for v in (left, right) if isinstance(v, int)]
            return _size(left) * _size(right) * (times[0] if len(times) == 1 else 1)
        case "**":
            return _size(left) * (abs(right) if isinstance(right, int) else 1)
        case _ if isinstance(left, str):
            return _formatted(left, [right])
        case _:
            return 1


def _size(value: Any) -> int:
    """Characters, items, or bits."""
    if isinstance(value, int):
        return max(value.bit_length(), 1)
    return max(len(value), 1) if isinstance(value, (str, list, tuple, dict)) else 1


def _formatted(text: Any, values: Sequence[Any]) -> float:
    if _WIDE.search(str(text)):
        raise SecurityError(f"the format {str(text)!r:.40} is too wide")
    return len(str(text)) + sum(map(_size, values))


def _replaced(text: Any, args: Sequence[Any]) -> float:
    text, (old, new, *_) = str(text), [*map(str, args), "", ""]
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _joined(value: Any, args: Sequence[Any]) -> float:
    between = len(str(args[0])) if args else 0
    return sum(len(str(part)) + between for part in value)


def _indented(value: Any, args: Sequence[Any]) -> float:
    wide = args[0] if args else 4
    wide = len(wide) if isinstance(wide, str) else wide
    return (str(value).count("\n") + 1) * max(wide, 1) + len(str(value))


def _items(value: Any, _: Sequence[Any]) -> float:
    return _size(value)


_COSTS: dict[str, Callable[..., float]] = {
    "format": _formatted, "replace": _replaced, "join": _joined, "indent": _indented,
}  # fmt: skip
