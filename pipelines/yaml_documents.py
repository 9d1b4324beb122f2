"""YAML that reads the way people write it, and that knows the line of every value.

Scalars follow YAML 1.2: ``off`` and ``no`` are words, ``1e-3`` is a number, dates are text. The same rules write, so
that what was written reads back equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from storage.errors import UserError

KeyPath = tuple[str, ...]

_RESOLVERS: tuple[tuple[str, re.Pattern[str], list[str]], ...] = (
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
            r"|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
    ("tag:yaml.org,2002:merge", re.compile(r"^(?:<<)$"), ["<"]),
)


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


def _write_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # These count as line breaks in YAML 1.1, and only double quotes escape them.
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)

for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in _RESOLVERS:
        _class.add_implicit_resolver(_tag, _pattern, _first)


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A parsed document.

    Attributes:
        data: Mappings with text keys, lists and scalars.
        lines: Line (from 1) of every value by its path; list items count from "0".
        texts: Plain scalars as they are spelled, for fields that want text where YAML sees a number.
    """

    data: Any
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    texts: Mapping[KeyPath, str] = field(default_factory=dict)


def parse_yaml(text: str, name: str) -> YamlDocument:
    """Parse one document; ``name`` stands for it in errors.

    Raises:
        UserError: Bad syntax, a key that occurs twice, a key that is not a word, or a tag of another kind; the
            message begins with ``name:line``.
    """
    loader: Any = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return YamlDocument(None)
        reader = _NodeReader(loader, name)
        data = reader.read(node, ())
        return YamlDocument(data, reader.lines, reader.texts)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        raise UserError(f"{place}: not valid YAML: {error.problem or error.context or error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    except ValueError as error:
        raise UserError(f"{name}: not valid YAML: {error}") from None
    finally:
        if loader is not None:
            loader.dispose()


def dump_yaml(data: Any) -> str:
    """Write plain data (mappings, lists, scalars) in block style, in the given order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def dump_scalar(data: Any) -> str:
    """Write a value on one line, in flow style: usable behind ``key:`` and behind ``key=`` in an override."""
    text = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"), default_flow_style=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


class _NodeReader:
    """Turns composed nodes into data and notes lines and spellings on the way."""

    def __init__(self, loader: Any, name: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.texts: dict[KeyPath, str] = {}
        self._loader = loader
        self._name = name
        self._open: set[int] = set()

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        if isinstance(node, yaml.ScalarNode):
            if node.style is None:
                self.texts[path] = node.value
            return self._loader.construct_object(node)
        if id(node) in self._open:
            raise UserError(f"{self._name}:{line}: an alias contains itself")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._read_mapping(node, path)
            return [self.read(item, (*path, str(index))) for index, item in enumerate(node.value)]
        finally:
            self._open.remove(id(node))

    def _read_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"{self._name}:{line}: a key must be a word")
            if key.value in first:
                dotted = ".".join((*path, key.value))
                raise UserError(
                    f"{self._name}:{line}: {dotted} occurs twice (first on line {first[key.value]}); keep one of them"
                )
            first[key.value] = line
        self._loader.flatten_mapping(node)
        data = {}
        for key, value in node.value:
            self.lines[(*path, key.value)] = key.start_mark.line + 1
            data[key.value] = self.read(value, (*path, key.value))
        return data
