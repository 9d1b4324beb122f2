"""Reads and makes data: rows from files, hubs and generators, and the prompts that are made of them.

Sources are named by one string::

    builtin:NAME                       a task of storage.tasks
    FILE.jsonl, FILE.parquet           one object a line, one row a prompt
    hf:OWNER/NAME[/CONFIG][:SPLIT]     a data set of the Hugging Face hub, split "train" unless named
    reasoning_gym:NAME[?OPTION=VALUE&...]   a generator of reasoning-gym, with options of its configuration

Errors name the source and the row (counted from 0, as in a prompt's key) and, for JSONL, the line (counted from 1).
"""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from storage.errors import UserError
from storage.files import atomic_file
from storage.records import Prompt
from storage.rendering import Renderer

BUILTIN, HUB, GYM = "builtin:", "hf:", "reasoning_gym:"
_FORMS = "builtin:NAME, a .jsonl or .parquet file, hf:NAME[:split] or reasoning_gym:NAME"
_ROWS_TO_LOOK_AT = 32
_TRIES_PER_ROW = 50


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source.

    Attributes:
        number: Its place in the source, from 0.
        line: Its line in a JSONL file, from 1; 0 elsewhere.
        columns: Its values by column.
    """

    number: int
    line: int
    columns: Mapping[str, Any]

    @property
    def place(self) -> str:
        """Name of the row for messages."""
        return f"row {self.number} (line {self.line})" if self.line else f"row {self.number}"


class Rows(Sequence[Mapping[str, Any]]):
    """The columns of some rows, with what messages about them need to say."""

    def __init__(self, source: str, rows: Sequence[Row]) -> None:
        self.source = source
        self.rows = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        if isinstance(index, slice):
            return [row.columns for row in self.rows[index]]
        return self.rows[index].columns

    def prompt_texts(self, prompt_column: str) -> frozenset[str]:
        """Raw prompts as text, for the ``exclude`` of :func:`load_rows`."""
        return frozenset(prompt_text(row.columns[prompt_column]) for row in self.rows)


def prompt_text(prompt: Any) -> str:
    """Return a raw prompt as text: two prompts are the same when their texts are."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False, default=str)


def load_rows(source: str, *, count: int, seed: int, prompt_column: str, exclude: frozenset[str] = frozenset()) -> Rows:
    """Read the first ``count`` rows of a source, or generate so many.

    Args:
        source: See the module's documentation.
        count: Most rows; a file that has fewer gives fewer, a generator fails.
        seed: Seed of generated rows; files are read in their order.
        prompt_column: Column that must be there.
        exclude: Texts of prompts to leave out (:meth:`Rows.prompt_texts` of the training data), so that held-out rows
            stay held out.

    Raises:
        UserError: The source is missing, empty, unreadable or lacks the column.
    """
    if source.startswith(BUILTIN):
        found = _builtin_rows(source, count, seed, exclude)
    elif source.startswith(GYM):
        found = _gym_rows(source, count, seed, exclude)
    else:
        found = _hub_rows(source) if source.startswith(HUB) else _file_rows(source)
    kept: list[Row] = []
    seen = 0
    for row in found:
        _check_column(row, source, prompt_column)
        seen += 1
        if prompt_text(row.columns[prompt_column]) not in exclude:
            kept.append(row)
        if len(kept) == count:
            break
    if not seen:
        raise UserError(f"{source} is empty: give at least one row")
    if not kept:
        raise UserError(
            f"{source}: all of its {seen} rows are training prompts too, so nothing is held out; give other rows, or "
            "fewer training prompts (data.prompts)"
        )
    return Rows(source, kept)


def check_source(source: str, prompt_column: str) -> list[str]:
    """Return the columns of a source, from its first rows; raises ``UserError`` as :func:`load_rows`."""
    generated = source.startswith((BUILTIN, GYM))
    rows = load_rows(source, count=1 if generated else _ROWS_TO_LOOK_AT, seed=0, prompt_column=prompt_column)
    return list(dict.fromkeys(column for row in rows for column in row))


def write_builtin(name: str, path: Path, *, count: int, seed: int, exclude: frozenset[str] = frozenset()) -> Path:
    """Write rows of a built-in task as a Parquet file, atomically; returns ``path``.

    Raises:
        UserError: There is no such task, or it has fewer different prompts.
        StorageError: The disk refused it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [dict(row.columns) for row in _builtin_rows(BUILTIN + name, count, seed, exclude)]
    with atomic_file(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows), temporary)
    return path


def build_prompts(
    rows: Rows, renderer: Renderer, *, prompt_column: str, max_prompt_tokens: int, context_length: int, max_tokens: int
) -> list[Prompt]:
    """Render rows; a prompt's index is its row's number in the source.

    Args:
        rows: What :func:`load_rows` returned.
        renderer: Turns a prompt into tokens.
        prompt_column: Column with text or messages; the other columns go with the prompt.
        max_prompt_tokens: Longest prompt allowed.
        context_length: Longest sequence that the model takes, prompt and answer together. Unit: tokens.
        max_tokens: Longest answer. Unit: tokens.

    Raises:
        UserError: A prompt is of the wrong type, empty, too long, or cannot be rendered; names the row.
    """
    prompts = []
    for row in rows.rows:
        place = f"{rows.source}, {row.place}"
        try:
            text, token_ids = renderer.render(row.columns[prompt_column])
        except UserError as error:
            raise UserError(f"{place}: column {prompt_column!r} is no prompt: {error}") from error
        length = len(token_ids)
        if not text.strip() or not length:
            raise UserError(f"{place}: column {prompt_column!r} is empty: give a prompt, or drop the row")
        if length > max_prompt_tokens:
            raise UserError(
                f"{place}: its prompt has {length:,} tokens, more than data.max_prompt_tokens={max_prompt_tokens}: "
                "raise that, or shorten or drop the row"
            )
        if length + max_tokens > context_length:
            raise UserError(
                f"{place}: its prompt of {length:,} tokens and an answer of rollout.max_tokens={max_tokens} exceed the "
                f"model's context of {context_length:,} tokens: lower rollout.max_tokens, or shorten or drop the row"
            )
        columns = {name: value for name, value in row.columns.items() if name != prompt_column}
        prompts.append(Prompt(index=row.number, token_ids=token_ids, text=text, columns=columns))
    return prompts


def _check_column(row: Row, source: str, prompt_column: str) -> None:
    if prompt_column in row.columns:
        return
    near = _nearest(prompt_column, row.columns)
    place = f"{source}, {row.place}" if row.number else source
    raise UserError(
        f"{place}: there is no column {prompt_column!r}{near} (columns: {', '.join(row.columns) or 'none'}); name the "
        "column with data.prompt_column"
    )


def _file_rows(source: str) -> Iterator[Row]:
    path = Path(source).expanduser()
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.is_dir():
        inside = next((p for p in sorted(path.iterdir()) if p.suffix in readers), None)
        hint = f", for instance {inside}" if inside else ""
        raise UserError(f"{source} is a directory: name a .jsonl or .parquet file{hint}")
    if path.suffix not in readers:
        kind, colon, _ = source.partition(":")
        if not path.exists() and colon:
            raise UserError(f"{source}: there is no kind of source {kind!r}; give {_FORMS}")
        if not path.exists() and not path.suffix:
            raise UserError(f"{source}: there is no such source; give {_FORMS}{_builtin_hint(source)}")
        raise UserError(f"{source}: files of type {path.suffix or 'no extension'!r} cannot be read; give {_FORMS}")
    if not path.exists():
        raise UserError(f"{source}: there is no such file (looked in {path.absolute().parent}); give {_FORMS}")
    try:
        yield from readers[path.suffix](path, source)
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror or error}") from error


def _jsonl_rows(path: Path, source: str) -> Iterator[Row]:
    number = 0
    with path.open("rb") as file:
        for line, content in enumerate(file, start=1):
            try:
                text = content.decode("utf-8-sig" if line == 1 else "utf-8").strip()
                if not text:
                    continue
                value = json.loads(text)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{source}, line {line}: it is not UTF-8 text ({error.reason}); save the file as UTF-8"
                ) from error
            except ValueError as error:
                raise UserError(f"{source}, line {line}: it is not JSON ({error}); give one object a line") from error
            if not isinstance(value, dict):
                raise UserError(
                    f"{source}, line {line}: it holds a {type(value).__name__}, not an object; give one object a line"
                )
            yield Row(number, line, value)
            number += 1


def _parquet_rows(path: Path, source: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                batch.validate(full=True)  # texts that are not UTF-8, for instance
                for row in batch.to_pylist():
                    yield Row(number, 0, row)
                    number += 1
    except pa.ArrowException as error:
        raise UserError(f"{source} cannot be read as Parquet: {str(error).splitlines()[0]}") from error


def _hub_rows(source: str) -> Iterator[Row]:
    name, _, split = source.removeprefix(HUB).partition(":")
    *identity, config = name.split("/") if name.count("/") == 2 else (name, None)
    if importlib.util.find_spec("datasets") is None:
        raise UserError(f"{source} needs the package datasets: pip install 'slipstream[hf]'")
    import datasets

    try:
        stream = datasets.load_dataset("/".join(filter(None, identity)), config, split=split or "train", streaming=True)
        for number, row in enumerate(stream):
            yield Row(number, 0, row)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{source} cannot be read ({reason}): check name, split (hf:NAME:SPLIT), configuration "
            "(hf:OWNER/NAME/CONFIG) and network"
        ) from error


def _builtin_rows(source: str, count: int, seed: int, exclude: frozenset[str]) -> Iterator[Row]:
    from storage.tasks import TASKS

    name = source.removeprefix(BUILTIN)
    if name not in TASKS:
        raise UserError(
            f"{source}: there is no built-in task {name!r}{_nearest(name, TASKS)} (tasks: {', '.join(sorted(TASKS))})"
        )
    for number, columns in enumerate(TASKS[name].generate(count=count, seed=seed, exclude=exclude)):
        yield Row(number, 0, columns)


def _gym_rows(source: str, count: int, seed: int, exclude: frozenset[str]) -> Iterator[Row]:
    """Yield ``count`` items whose questions differ from each other and from ``exclude``."""
    name, _, query = source.removeprefix(GYM).partition("?")
    generator = _gym_generator(source, name, query, count, seed)
    seen = set(exclude)
    number = 0
    for item in itertools.islice(generator, count * _TRIES_PER_ROW):
        if item["question"] in seen:
            continue
        seen.add(item["question"])
        entry = json.dumps(item, ensure_ascii=False)
        yield Row(number, 0, {"prompt": item["question"], "answer": item["answer"], "task": name, "entry": entry})
        number += 1
        if number == count:
            return
    raise UserError(
        f"{source}: it gave only {number} different questions beside the {len(exclude)} excluded ones, where {count} "
        "were asked for: ask for fewer prompts, or widen the options of the generator"
    )


def _gym_generator(source: str, name: str, query: str, count: int, seed: int) -> Iterable[dict[str, Any]]:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(f"{source} needs the package reasoning-gym: pip install 'slipstream[tasks]'")
    import dataclasses

    import numpy as np
    import yaml
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise UserError(f"{source}: reasoning-gym has no data set {name!r}{_nearest(name, DATASETS)}")
    options: dict[str, Any] = {}
    allowed = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for part in filter(None, query.split("&")):
        option, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"{source}: option {part!r} has no value; write {option}=VALUE")
        if option in ("seed", "size"):
            raise UserError(
                f"{source}: {option} is set by the seed and the number of prompts of the section; drop it here"
            )
        if option not in allowed:
            known = ", ".join(sorted(allowed))
            raise UserError(f"{source}: {name} has no option {option!r}{_nearest(option, allowed)} (options: {known})")
        try:
            options[option] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"{source}: the value of {option} cannot be read: {value!r}") from error
    # Item i draws from seed + i, so seeds that lie close together would give the same items.
    start = int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1
    try:
        generator: Iterable[dict[str, Any]] = create_dataset(name, seed=start, size=count * _TRIES_PER_ROW, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"{source}: reasoning-gym refuses the options of {name}: {error}") from error
    return generator


def _builtin_hint(name: str) -> str:
    from storage.tasks import TASKS

    return f"; did you mean {BUILTIN}{name}?" if name in TASKS else ""


def _nearest(name: str, names: Collection[str] | Mapping[str, Any]) -> str:
    found = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
