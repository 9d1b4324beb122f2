"""Shows the fields of the configuration: as tables, as greppable lines, or as a commented YAML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines.config import Config
from pipelines.config_fields import FieldDoc, field_docs, nearest_key, section_docs
from pipelines.config_loader import plain
from pipelines.yaml_documents import dump_scalar, dump_yaml
from storage.errors import UserError


def find_fields(text: str = "") -> list[FieldDoc]:
    """Return the fields whose path contains ``text``, or, when there are none, whose description does.

    Raises:
        UserError: Nothing matches.
    """
    docs = list(field_docs().values())
    wanted = text.lower()
    found = [doc for doc in docs if wanted in doc.path.lower()]
    found = found or [doc for doc in docs if wanted in doc.description.lower()]
    if not found:
        near = nearest_key(text)
        hint = f"did you mean {near}?" if near else f"sections: {', '.join(Config.model_fields)}"
        raise UserError(f"no field matches {text!r}; {hint}")
    return found


def print_fields(docs: Sequence[FieldDoc], console: Console) -> None:
    """Print one table per section on a terminal, one line per field anywhere else."""
    if not console.is_terminal:
        for doc in docs:
            console.print(plain_line(doc), soft_wrap=True, markup=False, highlight=False)
        return
    for section in dict.fromkeys(_section(doc) for doc in docs):
        title = f"[bold]{section}[/bold]  [dim]{escape(section_docs()[section])}[/dim]"
        table = Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 2, 0, 0), expand=True)
        table.add_column("field", style="cyan", no_wrap=True)
        table.add_column("default", style="green", overflow="fold", max_width=28)
        table.add_column("value", style="yellow", ratio=2)
        table.add_column("meaning", ratio=4)
        for doc in docs:
            if _section(doc) == section:
                meaning = escape(doc.description) + (f" [dim]({escape(doc.unit)})[/dim]" if doc.unit else "")
                table.add_row(
                    doc.path.removeprefix(f"{section}."), escape(default_text(doc)), escape(doc.kind), meaning
                )
        console.print(table)
        console.print()


def plain_line(doc: FieldDoc) -> str:
    """Return a field on one line, in the form of an override with a comment."""
    unit = f"; {doc.unit}" if doc.unit else ""
    return f"{doc.path}={default_text(doc)}  # {doc.kind}{unit}. {doc.description}"


def default_text(doc: FieldDoc) -> str:
    """Return the default as it would be typed."""
    default = doc.default
    if isinstance(default, tuple):
        default = [item.model_dump() if hasattr(item, "model_dump") else item for item in default]
    return dump_scalar(plain(default)) if default != "" else '""'


def commented_yaml(config: Config | None = None) -> str:
    """Return a complete YAML file with a comment above every section and field; it loads again as ``config``."""
    config = config or Config()
    return "\n".join(_commented_lines(config.model_dump(), "", 0)) + "\n"


def annotated_yaml(config: Config, origins: Mapping[str, str]) -> str:
    """Return the whole configuration as YAML, with the origin of every value that is not the schema's default."""
    return "\n".join(_annotated_lines(config.model_dump(), origins, "", 0)) + "\n"


def _annotated_lines(values: dict[str, Any], origins: Mapping[str, str], prefix: str, depth: int) -> Iterator[str]:
    for name, value in values.items():
        path = f"{prefix}{name}"
        if path not in field_docs():
            yield f"{'  ' * depth}{name}:"
            yield from _annotated_lines(value, origins, f"{path}.", depth + 1)
            continue
        first, *others = _entry(name, value, depth)
        yield f"{first:<40}  # {origins[path]}" if path in origins else first
        yield from others


def _entry(name: str, value: Any, depth: int) -> list[str]:
    return [f"{'  ' * depth}{line}" for line in dump_yaml({name: plain(value)}).rstrip("\n").split("\n")]


def _commented_lines(values: dict[str, Any], prefix: str, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, value in values.items():
        path = f"{prefix}{name}"
        doc = field_docs().get(path)
        if doc is None:
            if depth == 0:
                yield ""
            yield f"{indent}# {section_docs()[path]}"
            yield f"{indent}{name}:"
            yield from _commented_lines(value, f"{path}.", depth + 1)
            continue
        unit = f" Unit: {doc.unit}." if doc.unit else ""
        yield f"{indent}# {doc.description}{unit} ({doc.kind})"
        yield from _entry(name, value, depth)


def _section(doc: FieldDoc) -> str:
    return doc.path.rpartition(".")[0]
