"""The fields of the configuration as data: path, kind of value, unit, default and description.

Error messages, ``slipstream config`` and the commented YAML file all read from here, so that they never disagree with
the models.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipelines.config import Config

_UNIT = " Unit: "


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One field as people see it.

    Attributes:
        path: Dotted path, as in overrides.
        kind: Type and range in words, for instance ``integer from 1 to 4096``.
        unit: Unit of the value; empty for a pure number or a word.
        default: Value without preset, file or override.
        description: What it does, without the unit.
    """

    path: str
    kind: str
    unit: str
    default: Any
    description: str


def strip_optional(annotation: Any) -> tuple[Any, bool]:
    """Split ``X | None`` into ``(X, True)``; any other annotation is returned with False."""
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        if len(members) == 1 and len(get_args(annotation)) == 2:
            return members[0], True
    return annotation, False


def section_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model when a field is a section of its own, else None."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def item_annotation(annotation: Any) -> Any:
    """Return the annotation of the items of a list or the values of a mapping, ``Any`` for anything else."""
    annotation, _ = strip_optional(annotation)
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1]
    if get_origin(annotation) in (tuple, list):
        return arguments[0]
    return Any


@cache
def field_docs() -> dict[str, FieldDoc]:
    """Return every field of :class:`Config` by dotted path, in the order of declaration."""
    return {doc.path: doc for doc in _walk(Config, "")}


@cache
def section_docs() -> dict[str, str]:
    """Return every section, nested ones included, by dotted path with its description."""
    return dict(_sections(Config, ""))


def _walk(model: type[BaseModel], prefix: str) -> Iterator[FieldDoc]:
    for name, info in model.model_fields.items():
        inner = section_model(info.annotation)
        if inner is not None:
            yield from _walk(inner, f"{prefix}{name}.")
        else:
            description, unit = split_unit(info.description or "")
            default = info.get_default(call_default_factory=True)
            yield FieldDoc(f"{prefix}{name}", describe_kind(info), unit, default, description)


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, info in model.model_fields.items():
        inner = section_model(info.annotation)
        if inner is not None:
            yield f"{prefix}{name}", info.description or ""
            yield from _sections(inner, f"{prefix}{name}.")


def split_unit(description: str) -> tuple[str, str]:
    """Split ``What it is. Unit: tokens.`` into the text and the unit."""
    text, _, unit = description.partition(_UNIT)
    return text, unit.rstrip(".")


def describe_kind(info: FieldInfo) -> str:
    """Say in words which values a field takes, for instance ``number > 0 and <= 10, or null``."""
    return describe_annotation(info.annotation, info.metadata)


def describe_annotation(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Say in words which values an annotation with its constraints admits."""
    inner, optional = strip_optional(annotation)
    return _describe(inner, metadata) + (", or null" if optional else "")


def _describe(annotation: Any, metadata: Sequence[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return "one of: " + ", ".join(str(choice) for choice in get_args(annotation))
    if origin in (tuple, list):
        least = next((m.min_length for m in metadata if isinstance(m, annotated_types.MinLen)), 0)
        return ("non-empty list of " if least else "list of ") + _plural(get_args(annotation)[0])
    if origin is dict:
        return f"mapping from names to {_plural(get_args(annotation)[1])}"
    if annotation is bool:
        return "true or false"
    if annotation is int:
        return _integer_range(metadata)
    if annotation is float:
        return _number_range(metadata)
    if annotation is str:
        pattern = next((m.pattern for m in metadata if getattr(m, "pattern", None)), None)
        return f"text that matches {pattern}" if pattern else "text"
    inner = section_model(annotation)
    if inner is not None:
        return "{" + ", ".join(inner.model_fields) + "}"
    return "any value"


def _plural(annotation: Any) -> str:
    return "texts" if annotation is str else _describe(annotation, ())


def _bounds(metadata: Sequence[Any]) -> dict[str, float]:
    bounds: dict[str, float] = {}
    for constraint in metadata:
        for name in ("ge", "gt", "le", "lt"):
            value = getattr(constraint, name, None)
            if value is not None:
                bounds[name] = value
    return bounds


def _integer_range(metadata: Sequence[Any]) -> str:
    bounds = _bounds(metadata)
    low = bounds.get("ge", bounds["gt"] + 1 if "gt" in bounds else None)
    high = bounds.get("le", bounds["lt"] - 1 if "lt" in bounds else None)
    if low is not None and high is not None:
        return f"integer from {low} to {high}"
    if low is not None:
        return f"integer >= {low}"
    return "integer" if high is None else f"integer <= {high}"


def _number_range(metadata: Sequence[Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    parts = [f"{signs[name]} {value:g}" for name, value in _bounds(metadata).items()]
    return " ".join(["number", " and ".join(parts)]).strip()


def nearest_key(path: str) -> str | None:
    """Return the valid dotted path that a mistyped one most likely means, or None when nothing resembles it.

    Looks at the whole path and, because the section may be wrong or missing, at the last name alone.
    """
    best, best_score = None, 0.6
    for candidate in [*field_docs(), *section_docs()]:
        score = _likeness(path, candidate)
        if score > best_score:
            best, best_score = candidate, score
    parent = path.rpartition(".")[0]
    if best is None and parent and parent not in section_docs():
        return nearest_key(parent)  # evaluation.set.hard: the misspelling is one level up
    return best


def _likeness(path: str, candidate: str) -> float:
    head, _, name = path.rpartition(".")
    candidate_head, _, candidate_name = candidate.rpartition(".")
    section = difflib.SequenceMatcher(None, head, candidate_head).ratio() if head else 0.0
    if name == candidate_name:
        own = 1.0
    elif (len(name) > 2 and name in candidate_name) or name == "".join(word[:1] for word in candidate_name.split("_")):
        # A part of the name or its initials (samples, lr): people shorten names more often than they misspell them.
        own = 0.9
    else:
        own = difflib.SequenceMatcher(None, name, candidate_name).ratio()
    whole = difflib.SequenceMatcher(None, path, candidate).ratio()
    return max(0.75 * own + 0.25 * section, whole if head and own >= 0.5 else 0.0)
