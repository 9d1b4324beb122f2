"""Layers of configuration values, put one over another; each value keeps the place where it was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from pipelines.config import Config
from pipelines.config_fields import field_docs, item_annotation, nearest_key, section_model, strip_optional
from pipelines.yaml_documents import KeyPath, parse_yaml
from storage.errors import UserError

_SHORTHANDS = {"model": "path", "algorithm": "name"}
"""Sections that take a bare word: ``model=smollm2`` sets ``model.path``."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of values.

    Attributes:
        data: The values, nested by section; for an override, the value itself.
        texts: Spelling of plain scalars by path.
        lines: Line of each path; empty for an override.
        name: What people call the source: a file, ``preset NAME``, or the override.
    """

    data: Any
    texts: Mapping[KeyPath, str]
    lines: Mapping[KeyPath, int]
    name: str

    def origin(self, path: KeyPath) -> str:
        """Place where the value at ``path`` is written, with its line where there is one."""
        line = next((self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines), None)
        return self.name if line is None else f"{self.name}:{line}"

    def moved(self, source: KeyPath, target: KeyPath) -> Layer:
        """Return the layer with the value at ``source`` also known at ``target``."""
        texts, lines = dict(self.texts), dict(self.lines)
        if source in texts:
            texts[target] = texts[source]
        if source in lines:
            lines[target] = lines[source]
        return Layer(self.data, texts, lines, self.name)


def split_override(override: str) -> tuple[str, str]:
    """Split ``section.field=value`` into key and value; raises ``UserError`` on anything else."""
    key, _, value = override.partition("=")
    if not all(key.split(".")):
        raise UserError(f"{override!r}: an override is written section.field=value")
    return key, value


@dataclass(slots=True)
class MergedValues:
    """Values of fields by path, as the layers put them one over another."""

    values: dict[KeyPath, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, layer: Layer) -> None:
        """Put a file on top."""
        self._add_section(Config, layer.data, (), layer)

    def override(self, text: str) -> None:
        """Put one ``path=value`` on top."""
        key, raw = split_override(text)
        path = tuple(key.split("."))
        place = f"command line: {text}"
        model: type[BaseModel] = Config
        for depth, part in enumerate(path):
            info = model.model_fields.get(part)
            if info is None:
                self.problems.append(_unknown(path, place))
                return
            inner = section_model(info.annotation)
            if inner is None:
                rest = path[depth + 1 :]
                annotation = info.annotation
                for _ in rest:
                    annotation = item_annotation(annotation)
                layer = self._override_layer(raw, path, place, strip_optional(annotation)[0] is str)
                if layer is not None:
                    self._set_item(
                        path[: depth + 1], rest, _as_written(annotation, layer.data, layer.texts, path), place
                    )
                return
            model = inner
        layer = self._override_layer(raw, path, place, False)
        if layer is not None:
            self._add_section(model, layer.data, path, layer)

    def origin(self, path: KeyPath) -> str:
        """Place where the value at ``path`` (or the field around it) was written."""
        return next((self.origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.origins), "default")

    def _override_layer(self, raw: str, path: KeyPath, place: str, wants_text: bool) -> Layer | None:
        """Parse the value; the layer's data is what belongs at ``path``."""
        data: Any = raw
        texts = {path: raw}
        if not wants_text or raw[:1] in ("'", '"'):
            try:
                document = parse_yaml(raw, place)
            except UserError as error:
                self.problems.append(str(error))
                return None
            data = document.data
            texts = {(*path, *below): text for below, text in document.texts.items()}
        return Layer(data, texts, {}, place)

    def _set_item(self, path: KeyPath, rest: KeyPath, value: Any, place: str) -> None:
        if not rest:
            self._set(path, value, place)
            return
        doc = field_docs()[".".join(path)]
        current = self.values.get(path, doc.default)
        if len(rest) > 1 or not isinstance(current, dict):
            dotted = ".".join((*path, *rest))
            self.problems.append(
                f"{dotted}: {doc.path} takes a whole value ({doc.kind}) ({place}); write {doc.path}=..."
            )
            return
        self.values[path] = {**current, rest[0]: value}
        self.origins[(*path, *rest)] = place
        self.origins.setdefault(path, place)

    def _set(self, path: KeyPath, value: Any, place: str) -> None:
        for stale in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[stale]
        self.values[path] = value
        self.origins[path] = place

    def _add_section(self, model: type[BaseModel], data: Any, path: KeyPath, layer: Layer) -> None:
        dotted = ".".join(path)
        if not isinstance(data, dict) and dotted in _SHORTHANDS and data is not None:
            layer = layer.moved(path, (*path, _SHORTHANDS[dotted]))
            data = {_SHORTHANDS[dotted]: data}
        if data is None and layer.lines:
            return  # a section header in a file with all its fields commented out
        if not isinstance(data, dict):
            self.problems.append(
                f"{dotted}: is a section, so it takes no single value ({layer.origin(path)}); "
                f"set one of its fields (`slipstream config {dotted}` lists them)"
            )
            return
        for key, value in data.items():
            here = (*path, key)
            info = model.model_fields.get(key)
            if info is None:
                self.problems.extend(_unknown(leaf, layer.origin(leaf)) for leaf in _leaves(value, here))
                continue
            inner = section_model(info.annotation)
            if inner is not None:
                self._add_section(inner, value, here, layer)
                continue
            self._set(here, _as_written(info.annotation, value, layer.texts, here), layer.origin(here))
            for below in layer.lines:
                if len(below) > len(here) and below[: len(here)] == here:
                    self.origins[below] = layer.origin(below)


def _leaves(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path


def _as_written(annotation: Any, value: Any, texts: Mapping[KeyPath, str], path: KeyPath) -> Any:
    """Return ``value``, except that a bare number or word keeps its spelling where the annotation wants text."""
    inner, _ = strip_optional(annotation)
    if inner is str:
        bare = texts.get(path)
        return bare if bare is not None and (value is not None or bare == "") else value
    if isinstance(value, dict):
        model = section_model(inner)
        fields = model.model_fields if model else {}
        written = {}
        for key, item in value.items():
            annotation = fields[key].annotation if key in fields else item_annotation(inner)
            written[key] = _as_written(annotation, item, texts, (*path, key))
        return written
    if isinstance(value, list):
        item_type = item_annotation(inner)
        return [_as_written(item_type, item, texts, (*path, str(index))) for index, item in enumerate(value)]
    return value


def _unknown(path: KeyPath, place: str) -> str:
    dotted = ".".join(path)
    near = nearest_key(dotted)
    hint = f"did you mean {near}?" if near else "`slipstream config` lists all keys"
    return f"{dotted}: unknown key ({place}); {hint}"
