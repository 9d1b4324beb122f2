"""What the `slipstream history` commands do, on the files of a run alone: while it goes on, and afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from pipelines.config_loader import load_config_file
from pipelines.run_data import tokenizer_fingerprint
from storage.errors import UserError
from storage.files import atomic_file
from storage.history.manifest import HistoryError
from storage.history.rows import Answer, expand_prompts, prompt_digest
from storage.history.store import HistoryStore
from storage.history.summary import HistoryStats
from storage.history.top_columns import TOP_NAMES
from storage.models import load_tokenizer, present_model
from storage.records import Int32Array
from storage.run_directory import RunDirectory

Decode = Callable[[Int32Array], str]

_SUFFIXES = (".parquet", ".arrow", ".jsonl")
_MOST_CHARACTERS = 600
_MOST_ROWS = 3


def print_stats(run: Path, console: Console) -> None:
    """Print what is in the history of ``run``. Raises ``UserError``."""
    with _open(run) as store:
        found = store.stats()
        table = Table("part", "value", box=None, padding=(0, 2, 0, 0), header_style="dim", title_justify="left")
        for name, value in (*_rows_of(found), *_disk_rows(store)):
            table.add_row(name, value)
        console.print(Text(f"{run.name}: history, generation {store.generation}", style="bold"))
        console.print(table)
        _print_damage(store, console)


def print_answers(
    run: Path,
    console: Console,
    *,
    prompt: int | None = None,
    fragment: str | None = None,
    visits: int = 2,
    limit: int = 3,
) -> None:
    """Print the newest answers to some prompts, those that were answered last first.

    Args:
        run: Run directory.
        console: Where to print.
        prompt: Only the prompts that stand in this row of the data.
        fragment: Only prompts whose text has this in it.
        visits: Visits of each prompt.
        limit: Most prompts.

    Raises:
        UserError: Nothing fits, or a fragment was given and the run's tokenizer is not here.
    """
    with _open(run) as store:
        decode, why_not = find_decoder(run, store.tokenizer_fingerprint)
        if fragment is not None and decode is None:
            raise UserError(f"--text needs the tokenizer of the run: {why_not}; choose a row with --prompt")
        prompts = _prompts(store, prompt)
        if fragment is not None and decode is not None:
            prompts = [ids for ids in prompts if fragment in decode(ids)]
        if not prompts:
            raise UserError(_nothing(store, prompt, fragment))
        if decode is None:
            console.print(Text(f"token ids, not text: {why_not}", style="dim"), soft_wrap=True)
        for token_ids in prompts[:limit]:
            _print_prompt(console, store.visits(token_ids, visits), token_ids, decode)
        if len(prompts) > limit:
            console.print(Text(f"{len(prompts) - limit} more prompts (--limit)", style="dim"))
        _print_damage(store, console)


def compact(run: Path, window: int, console: Console) -> None:
    """Keep the last ``window`` visits of each prompt and say what that saved. Raises ``UserError``."""
    with _open(run) as reader:
        before, fingerprint, answers = _data_bytes(reader), reader.tokenizer_fingerprint, _answers(reader)
    with HistoryStore(RunDirectory(run).history, fingerprint) as store:
        store.compact(window)
        after = _data_bytes(store)
        console.print(
            Text(
                f"{answers - _answers(store)} of {answers} answers dropped, {_size(before)} before, "
                f"{_size(after)} now, generation {store.generation}"
            )
        )
        _print_damage(store, console)


def export(run: Path, to: Path, console: Console) -> None:
    """Write every readable answer into ``to``, with the tokens of its prompt; the suffix chooses the format.

    All but the likeliest tokens at each place of an answer, which only Parquet and Arrow files get.

    Raises:
        UserError: A suffix that we do not write, a folder that does not exist, or a disk that is full.
    """
    if to.suffix not in _SUFFIXES:
        raise UserError(f"--to {to}: the name must end in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}")
    if not to.absolute().parent.is_dir():
        raise UserError(f"--to {to}: the folder {to.absolute().parent} does not exist")
    if to.resolve().is_relative_to(run.resolve()):
        raise UserError(
            f"--to {to}: that lies in the run directory, whose files belong to the run; choose another folder"
        )
    with _open(run) as store:
        schema = store.schema
        with atomic_file(to) as temporary:
            count = _write(temporary, to.suffix, _batches(store), schema)
        console.print(Text(f"{count} answers written to {to}"), soft_wrap=True)
        _print_damage(store, console)


def verify(run: Path, console: Console) -> bool:
    """Print what is damaged in the history of ``run``, or that nothing is; returns whether all is well."""
    try:
        with _open(run) as store:
            problems = store.verify()
            answers, files = _answers(store), len(store.segments)
    except HistoryError as error:
        problems = (str(error),)
    for problem in problems:
        console.print(Text(problem, style="red"), soft_wrap=True)
    if problems:
        console.print(Text(f"{len(problems)} problem{'s' * (len(problems) != 1)} in {RunDirectory(run).history}"))
        return False
    console.print(
        Text(f"{answers} answers in the log and {files} sealed file{'s' * (files != 1)}: checksums and rows are sound")
    )
    return True


def find_decoder(run: Path, fingerprint: int) -> tuple[Decode | None, str]:
    """Return what turns tokens of a store into text, or ``None`` and why the run's tokenizer cannot be used."""
    try:
        model = present_model(load_config_file(RunDirectory(run).config).model)
        if model is None:
            return None, "the model of the run is not on this machine"
        if tokenizer_fingerprint(model) != fingerprint:
            return None, f"the tokenizer in {model} is not the one that wrote these tokens"
        tokenizer = load_tokenizer(model)
    except UserError as error:
        return None, str(error)
    return lambda ids: str(tokenizer.decode(ids.tolist())), ""


def _open(run: Path) -> HistoryStore:
    return HistoryStore(RunDirectory(run).history, None)


def _rows_of(found: HistoryStats) -> Iterator[tuple[str, str]]:
    yield "answers", f"{found.answers:,}"
    yield "tokens", f"{found.tokens:,}"
    yield "prompts", f"{found.prompts:,}"
    yield "visits", f"{found.visits:,} ({found.visits / max(1, found.prompts):.1f} a prompt)"
    yield "steps", f"{found.first_step} to {found.last_step}" if found.answers else "none"
    yield "weights", f"versions {found.oldest_version} to {found.newest_version}" if found.answers else "none"
    low, middle, high, longest = found.length_quantiles
    yield (
        "length",
        f"mean {found.length_mean:.1f}, P10 {low}, median {middle}, P90 {high}, longest {longest} tokens",
    )
    yield "cut off at the limit", f"{found.truncated_share:.1%}"
    yield "repeated word for word", f"{found.duplicate_share:.1%} of the answers"
    yield "entropy (estimate)", f"{found.entropy:.3f} nats a token"
    if found.drafted:
        yield "drafts", f"{found.accepted / found.drafted:.1%} of {found.drafted:,} tokens accepted"


def _disk_rows(store: HistoryStore) -> Iterator[tuple[str, str]]:
    sizes = [segment.entry.nbytes for segment in store.segments]
    yield "segments", f"{len(sizes)}, {_size(sum(sizes))}"
    yield "write-ahead log", _size(store.wal_bytes)
    yield "manifest", _size(store.manifest_bytes)
    aside = sum(path.stat().st_size for path in store.set_aside())
    if aside:
        yield "set aside as damaged", _size(aside)


def _prompts(store: HistoryStore, wanted: int | None) -> list[Int32Array]:
    """Prompts, the last answered first; only those that stand in row ``wanted`` of the data, if given."""
    newest: dict[bytes, tuple[int, Int32Array]] = {}
    for rows in (rows for rows in (block.load() for block in store.blocks()) if rows is not None):
        steps, places = rows.column("step"), rows.column("prompt")
        for run in range(len(rows.hashes)):
            part = slice(int(rows.bounds[run]), int(rows.bounds[run + 1]))
            if wanted is None or (places[part] == wanted).any():
                token_ids, step = rows.prompt(run), int(steps[part].max())
                digest = prompt_digest(token_ids)
                if digest not in newest or newest[digest][0] < step:
                    newest[digest] = (step, token_ids)
    return [token_ids for _, token_ids in sorted(newest.values(), key=lambda item: -item[0])]


def _nothing(store: HistoryStore, prompt: int | None, fragment: str | None) -> str:
    rows = {int(row) for block in store.blocks() if (b := block.load()) is not None for row in b.column("prompt")}
    if not rows:
        return f"{store.directory} holds no answers yet"
    if fragment is not None:
        where = "" if prompt is None else f" in row {prompt}"
        return f"no prompt of the history has {fragment!r} in its text{where}"
    near = sorted(rows, key=lambda row: (abs(row - (prompt or 0)), row))[:5]
    return f"the history has no answers to prompt {prompt}; the nearest rows are {', '.join(map(str, sorted(near)))}"


def _print_prompt(console: Console, visits: list[list[Answer]], token_ids: Int32Array, decode: Decode | None) -> None:
    places = sorted({answer.prompt for visit in visits for answer in visit})
    console.print(Rule(Text(f"prompt {', '.join(map(str, places))}, {len(token_ids)} tokens"), align="left"))
    console.print(Padding(_readable(token_ids, decode), (0, 0, 1, 2)))
    for visit in visits:
        first = visit[0]
        console.print(Text(f"  epoch {first.epoch}, step {first.step}, {len(visit)} answers", style="bold"))
        for answer in visit[:_MOST_ROWS]:
            console.print(_facts(answer))
            console.print(Padding(_readable(answer.tokens, decode), (0, 0, 0, 4)))
        if len(visit) > _MOST_ROWS:
            console.print(Text(f"    ... {len(visit) - _MOST_ROWS} more", style="dim"))


def _facts(answer: Answer) -> Text:
    reward = "no reward" if answer.reward is None else f"reward {answer.reward:.3g}"
    versions = [run.version for run in answer.segments if run.source == "policy"]
    span = f"v{min(versions)}-{max(versions)}" if len(set(versions)) > 1 else f"v{versions[0]}" if versions else "-"
    drafts = f"  {answer.n_accepted}/{answer.n_drafted} drafted" if answer.n_drafted else ""
    told = f"  #{answer.sample_idx}  {reward}  {answer.finish_reason}  {len(answer.tokens)} tokens  {span}{drafts}"
    return Text(told, style="cyan")


def _readable(token_ids: Int32Array, decode: Decode | None) -> Text:
    """Write tokens as text with harmless control characters, or as numbers; the middle of long ones is cut out."""
    if decode is None:
        text = " ".join(map(str, token_ids.tolist()))
    else:
        raw = decode(token_ids)
        text = "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in raw)
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"
    return Text(text) if text.strip() else Text("(empty)", style="dim")


def _batches(store: HistoryStore) -> Iterator[Any]:
    for block in store.blocks():
        rows = block.load()
        if rows is not None:
            yield expand_prompts(rows.batch)


def _write(path: Path, suffix: str, batches: Iterator[Any], schema: Any) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 0
    if suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for batch in batches:
                # The likeliest tokens beside each token would be most of the text, and JSON lacks their infinities.
                plain = batch.select([name for name in batch.schema.names if name not in TOP_NAMES])
                file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in plain.to_pylist())
                count += batch.num_rows
        return count
    make = pq.ParquetWriter(path, schema, compression="zstd") if suffix == ".parquet" else pa.ipc.new_file(path, schema)
    with make as writer:
        for batch in batches:
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def _answers(store: HistoryStore) -> int:
    return sum(rows.batch.num_rows for block in store.blocks() if (rows := block.load()) is not None)


def _data_bytes(store: HistoryStore) -> int:
    return store.wal_bytes + sum(segment.entry.nbytes for segment in store.segments)


def _size(nbytes: int) -> str:
    if nbytes < 1 << 20:
        return f"{nbytes / 1024:.1f} KiB"
    return f"{nbytes / (1 << 20):.1f} MiB" if nbytes < 1 << 30 else f"{nbytes / (1 << 30):.2f} GiB"


def _print_damage(store: HistoryStore, console: Console) -> None:
    for problem in store.damage:
        console.print(Text(f"damaged: {problem}", style="red"), soft_wrap=True)
