"""Graphs as text and back: one line a node, and the same interned nodes when it is read again."""

from __future__ import annotations

import inspect
import json
import math
import pkgutil
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib import import_module
from typing import Any, cast, get_args, get_origin, get_type_hints

import numpy as np

from . import ops
from .errors import EggpuError, IRError
from .ir import Graph, Kind, Node, Op, make, nested
from .ops import ELEMENTWISE, constant, input_node
from .ops.leaf import Constant
from .ops.reduce import COMBINES
from .types import DTYPES, TupleType, Type, parse_type

WIDTH = 100  # of a line of inputs or outputs
_TYPE_WIDTH = 32  # longer types push their line to the right


@dataclass(frozen=True, slots=True)
class Entry:
    """How an op is made from its printed name and attributes: `build(**fixed, **attributes)`."""

    build: Callable[..., Op]
    fixed: Mapping[str, Any]
    attributes: Mapping[str, Any]  # name to Python type


@cache
def registry() -> dict[str, Entry]:
    """Every op by its name: the elementwise table, and the op classes by their declarations.

    A class whose name is made of its `combine` has one entry for each combination.
    """
    found = {name: Entry(partial(_same, op), {}, {}) for name, op in ELEMENTWISE.items()}
    for kind in _classes():
        hints = get_type_hints(kind)
        types = {f.name: hints[f.name] for f in fields(kind) if f.compare}
        name = inspect.getattr_static(kind, "name", None)
        if isinstance(name, str):
            found[name] = Entry(kind, {}, types)
        elif "combine" in types:
            del types["combine"]
            for combine in COMBINES:
                op = object.__new__(kind)
                object.__setattr__(op, "combine", combine)
                found[op.name] = Entry(kind, {"combine": combine}, types)
    return found


def _same(op: Op) -> Op:
    return op


def _classes() -> Iterator[type[Op]]:
    """The op classes of every module in ops/, in a fixed order."""
    for module in pkgutil.iter_modules(ops.__path__, ops.__name__ + "."):
        import_module(module.name)
    queue: list[type[Op]] = [Op]
    while queue:
        for kind in sorted(queue.pop().__subclasses__(), key=lambda k: k.__qualname__):
            queue.append(kind)
            if kind.__module__.startswith(ops.__name__):
                yield kind


# printing


def print_graph(graph: Graph) -> str:
    """The graph as text that `parse_graph` reads.

    Inputs without names get those of their nodes. A node's line ends with the user's line, where
    one is known.
    """
    names = _input_names(graph)
    order = [n for n in graph.nodes() if n not in names]
    names |= {node: f"%{i}" for i, node in enumerate(order)}
    head = [_input(graph, i, names[n]) for i, n in enumerate(graph.inputs)]
    lines_of = graph.sources
    rows = [(names[n], repr(n.type), _call(n, names, lines_of), lines_of.get(n, "")) for n in order]
    left = max((len(name) for name, _, _, _ in rows), default=0)
    middle = min(_TYPE_WIDTH, max((len(type_) for _, type_, _, _ in rows), default=0))
    lines = [_joined(f"graph {_word(graph.name)}(", head, ") {")]
    for name, type_, call, source in rows:
        comment = f"  # {source}" if source else ""
        lines.append(f"  {name:<{left}}  {type_:<{middle}}  = {call}{comment}")
    lines += [_joined("  return ", list(_results(graph, names)), ""), "}"]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def constant_table(graph: Graph) -> dict[str, np.ndarray]:
    """The arrays that a graph carries, by digest: what `parse_graph` needs besides the text."""
    nodes = [n for part in nested(graph) for n in part.nodes()]
    carried = [n.op for n in nodes if n.kind is Kind.CONSTANT]
    return {op.attributes()["digest"]: op.evaluate() for op in carried}


def _input_names(graph: Graph) -> dict[Node, str]:
    names: dict[Node, str] = {}
    labels = graph.input_names or tuple(n.op.attributes()["label"] for n in graph.inputs)
    for node, label in zip(graph.inputs, labels, strict=True):
        while _value(label) in names.values():
            label += "'"
        names[node] = _value(label)
    return names


def _value(label: str) -> str:
    """An input's name. Numbers alone are nodes."""
    plain = re.fullmatch(r"\w[\w.]*", label, re.ASCII) and not label.isdigit()
    return "%" + (label if plain else json.dumps(label))


def _input(graph: Graph, position: int, name: str) -> str:
    node = graph.inputs[position]
    given = node.op.attributes()
    unusual: list[str] = []
    if given["position"] != position:
        unusual.append(f"position={given['position']}")
    if _value(given["label"]) != name:
        unusual.append(f"label={json.dumps(given['label'])}")
    more = f" ({', '.join(unusual)})" if unusual else ""
    return f"{name}: {node.type!r}{more}" + (" donated" if position in graph.donated else "")


def _call(node: Node, names: Mapping[Node, str], sources: Mapping[Node, str]) -> str:
    entry = registry().get(node.op.name)
    implied = entry.fixed if entry else ()
    given = [(k, v) for k, v in node.op.attributes().items() if k not in implied]
    operands = [names[o] for o in node.operands]
    parts = [*operands, *(f"{k}={_attribute(v, sources)}" for k, v in given)]
    return f"{node.op.name}({', '.join(parts)})"


def _attribute(value: Any, sources: Mapping[Node, str]) -> str:
    """The text of an attribute; a graph stands on lines of its own, with its lines in the user's
    program."""
    if not isinstance(value, Graph):
        return _shown(value)
    text = print_graph(value.replace(sources=sources))
    return text.rstrip().replace("\n", "\n    ")


def _shown(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return _float_text(value)
        case str():
            return _word(value)
        case tuple():
            return f"[{', '.join(map(_shown, cast('tuple[Any, ...]', value)))}]"
        case _:
            return str(int(value))


def _float_text(value: float) -> str:
    """repr, and for NaNs but the usual one their bits."""
    bits = struct.pack(">d", value)
    usual = bits == struct.pack(">d", math.nan)
    return f"nan:0x{bits.hex()}" if math.isnan(value) and not usual else repr(float(value))


def _word(text: str) -> str:
    return text if re.fullmatch(r"\w+", text, re.ASCII) else json.dumps(text)


def _results(graph: Graph, names: Mapping[Node, str]) -> Iterator[str]:
    for j, node in enumerate(graph.outputs):
        label = f" as {_value(graph.output_names[j])[1:]}" if graph.output_names else ""
        yield names[node] + label


def _joined(start: str, parts: Sequence[str], end: str) -> str:
    """The parts on one line, or each on its own when they are long."""
    line = start + ", ".join(parts) + end
    if len(line) <= WIDTH or not parts:
        return line
    return start.rstrip() + "\n    " + ",\n    ".join(parts) + ("\n" + end if end else "")


# parsing

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+) | (?P<line>\n) | (?P<comment>\#[^\n]*)
    | (?P<value>%(?:"(?:[^"\\\n]|\\.)*"|[\w.]+)) | (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<word>nan:0x\w+ | -?[\d.]+e[-+]?\d+(?![\w.]) | -?\w[\w.]*) | (?P<mark>[()\[\]{},:=])""",
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of text; `comment` is the one that follows it on its line."""

    kind: str
    text: str
    line: int
    comment: str = ""


def parse_graph(text: str, constants: Mapping[str, np.ndarray] | None = None) -> Graph:
    """The graph that a text describes. `constants` are the arrays that it carries, by digest.

    Raises IRError, with the line, when the text is not well formed or a type does not fit.
    """
    return _Parser(text, constants or {}).graph()


def _tokens(text: str) -> list[Token]:
    found: list[Token] = []
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise IRError(f"line {line}: {text[at : at + 20]!r} is no part of a graph")
        kind, at = str(match.lastgroup), match.end()
        if kind == "line":
            line += 1
        elif kind == "comment" and found and found[-1].line == line:
            found[-1] = Token(found[-1].kind, found[-1].text, line, match[0][1:].strip())
        elif kind not in ("space", "comment"):
            found.append(Token(kind, match[0], line))
    return [*found, Token("end", "the end of the text", line)]


class _Parser:
    """Reads tokens one after the other; `self.values` are the nodes by name."""

    def __init__(self, text: str, constants: Mapping[str, np.ndarray]) -> None:
        self.tokens = _tokens(text)
        self.at = 0
        self.constants = constants
        self.begin()

    def begin(self) -> None:
        self.values: dict[str, Node] = {}
        self.inputs: list[Node] = []
        self.names: list[str] = []
        self.donated: list[int] = []
        self.sources: dict[Node, str] = {}

    def graph(self) -> Graph:
        graph = self.body()
        if self.token.kind != "end":
            raise self.error("the end of the text")
        return graph

    def nested(self) -> Graph:
        """A graph inside a graph: it has names of its own; its lines are the program's."""
        inner = _Parser.__new__(_Parser)
        inner.tokens, inner.at, inner.constants = self.tokens, self.at, self.constants
        inner.begin()
        graph = inner.body()
        self.at = inner.at
        for node, line in inner.sources.items():
            self.sources.setdefault(node, line)
        labels = [n.op.attributes()["label"] for n in graph.inputs]
        names = graph.input_names if list(graph.input_names) != labels else ()
        return graph.replace(input_names=names, sources={})

    def body(self) -> Graph:
        self.expect("graph")
        name = self.string()
        self.expect("(")
        while not self.take(")"):
            self.input()
            if not self.peek(")"):
                self.expect(",")
        self.expect("{")
        while not self.take("return"):
            self.statement()
        outputs, labels = self.results()
        self.expect("}")
        return Graph(
            name,
            tuple(self.inputs),
            tuple(outputs),
            tuple(self.names),
            tuple(labels),
            tuple(self.donated),
            self.sources,
        )

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def next(self) -> Token:
        token = self.token
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def error(self, need: str) -> IRError:
        return IRError(f"line {self.token.line}: needs {need}, got {self.token.text}")

    def peek(self, text: str) -> bool:
        return self.token.text == text and self.token.kind in ("word", "mark")

    def take(self, text: str) -> bool:
        found = self.peek(text)
        if found:
            self.next()
        return found

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise self.error(repr(text))

    def string(self) -> str:
        if self.token.kind not in ("word", "string"):
            raise self.error("a name")
        token = self.next()
        return _unquoted(token.text)

    def name(self) -> str:
        if self.token.kind != "value":
            raise self.error("a value such as %x")
        return self.next().text

    def define(self, name: str, node: Node, line: int) -> None:
        if name in self.values:
            raise IRError(f"line {line}: {name} is defined twice")
        self.values[name] = node

    def operand(self) -> Node:
        line, name = self.token.line, self.name()
        if name not in self.values:
            raise IRError(f"line {line}: {name} is not defined before it is used")
        return self.values[name]

    def input(self) -> None:
        line, name = self.token.line, self.name()
        label = _unquoted(name[1:])
        self.names.append(label)
        self.expect(":")
        type_ = self.type()
        given: dict[str, Any] = {"position": len(self.inputs), "label": label}
        if self.take("("):
            _, more = self.arguments({"position": int, "label": str})
            given |= more
        if self.take("donated"):
            self.donated.append(len(self.inputs))
        if isinstance(type_, TupleType):
            raise IRError(f"line {line}: input {name} needs the type of one array, got {type_!r}")
        node = input_node(given["position"], given["label"], type_)
        self.define(name, node, line)
        self.inputs.append(node)

    def statement(self) -> None:
        line, name = self.token.line, self.name()
        type_ = self.type()
        self.expect("=")
        label = self.string()
        entry = registry().get(label)
        if entry is None:
            raise IRError(f"line {line}: there is no op {label}")
        self.expect("(")
        operands, given = self.arguments(entry.attributes)
        missing = [k for k in entry.attributes if k not in given]
        if missing:
            raise IRError(f"line {line}: {label} needs the attributes {', '.join(missing)}")
        node = self.make(entry, operands, given, line)
        if node.type != type_:
            raise IRError(f"line {line}: {label} gives {node.type!r}, the text says {type_!r}")
        self.define(name, node, line)
        comment = self.tokens[self.at - 1].comment
        if comment:
            self.sources[node] = comment

    def make(
        self, entry: Entry, operands: Sequence[Node], given: Mapping[str, Any], line: int
    ) -> Node:
        if entry.build is Constant:
            return self.constant(given, line)
        try:
            return make(entry.build(**entry.fixed, **given), *operands)
        except (EggpuError, TypeError, ValueError, LookupError) as error:
            raise IRError(f"line {line}: {error}") from error

    def constant(self, given: Mapping[str, Any], line: int) -> Node:
        """A carried array: the text has only its digest."""
        digest, dtype = given["digest"], DTYPES.get(given["dtype"])
        if digest not in self.constants or dtype is None:
            raise IRError(f"line {line}: the array of constant {digest} is not given")
        node = constant(self.constants[digest], dtype)
        if node.op.attributes() != given:
            raise IRError(f"line {line}: the array given for constant {digest} is another")
        return node

    def arguments(self, attributes: Mapping[str, Any]) -> tuple[list[Node], dict[str, Any]]:
        """Operands and attributes up to the closing parenthesis."""
        operands: list[Node] = []
        given: dict[str, Any] = {}
        while not self.take(")"):
            if self.token.kind == "value" and not given:
                operands.append(self.operand())
            else:
                name = self.token.text
                if name not in attributes or name in given:
                    raise self.error(" or ".join(["an operand", *attributes]))
                self.next()
                self.expect("=")
                given[name] = self.attribute(attributes[name])
            if not self.peek(")"):
                self.expect(",")
        return operands, given

    def attribute(self, kind: Any) -> Any:
        if get_origin(kind) is tuple:
            self.expect("[")
            items: list[Any] = []
            while not self.take("]"):
                items.append(self.attribute(get_args(kind)[0]))
                if not self.peek("]"):
                    self.expect(",")
            return tuple(items)
        if kind is str:
            return self.string()
        if kind is Graph:
            return self.nested()
        try:
            value = _READ[kind](self.token.text)
        except (KeyError, ValueError):
            raise self.error(f"a value of type {kind.__name__}") from None
        self.next()
        return value

    def type(self) -> Type | TupleType:
        if self.take("("):
            items: list[Type] = []
            while not self.take(")"):
                items.append(self.array_type())
                if not self.peek(")"):
                    self.expect(",")
            return TupleType(tuple(items))
        return self.array_type()

    def array_type(self) -> Type:
        if self.token.text not in DTYPES:
            raise self.error(f"a type with a dtype of {', '.join(DTYPES)}")
        text = self.next().text
        if self.take("["):
            sizes: list[str] = []
            while not self.take("]"):
                if not self.token.text.isdecimal():
                    raise self.error("a size")
                sizes.append(self.next().text)
                if not self.peek("]"):
                    self.expect(",")
            text += f"[{','.join(sizes)}]"
        return parse_type(text)

    def results(self) -> tuple[list[Node], list[str]]:
        nodes: list[Node] = []
        labels: list[str] = []
        while not self.peek("}"):
            nodes.append(self.operand())
            if self.take("as"):
                labels.append(self.string())
            if not self.peek("}"):
                self.expect(",")
        if labels and len(labels) != len(nodes):
            raise IRError(f"line {self.token.line}: some outputs have names and some have none")
        return nodes, labels


def _unquoted(text: str) -> str:
    return json.loads(text) if text.startswith('"') else text


def _read_float(text: str) -> float:
    if text.startswith("nan:0x"):
        return struct.unpack(">d", bytes.fromhex(text.removeprefix("nan:0x")))[0]
    return float(text)


_READ: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: _read_float,
    bool: {"true": True, "false": False}.__getitem__,
}
