"""Rows from every kind of source, and what is said about rows that cannot be used."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.reward.verifiers import reasoning_gym
from storage.datasets import build_prompts, check_source, load_rows, prompt_text, write_builtin
from storage.errors import UserError

SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"


class CharacterRenderer:
    """One token a character; refuses numbers."""

    def render(self, prompt):
        if isinstance(prompt, int):
            raise UserError("it is of type int: give a string or a list of messages")
        return prompt, np.array([ord(c) for c in prompt], np.int32)


class CountingTask:
    """Prompts 0, 1, 2, ... from the seed on."""

    def generate(self, *, count, seed, exclude=frozenset()):
        numbers = (n for n in range(seed, seed + count + len(exclude)) if f"{n}=" not in exclude)
        rows = [{"prompt": f"{n}=", "answer": str(n), "solution": f"={n}"} for n in numbers]
        return rows[:count]


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setitem(sys.modules, "storage.tasks", SimpleNamespace(TASKS={"counting": CountingTask()}))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(count):
    return [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(count)]


def load(source, count=100, seed=0, column="prompt", exclude=frozenset()):
    return load_rows(source, count=count, seed=seed, prompt_column=column, exclude=exclude)


def refusal(source, **arguments):
    with pytest.raises(UserError) as caught:
        load(str(source), **arguments)
    return str(caught.value)


def test_jsonl_and_parquet_give_the_same_rows(tmp_path):
    rows = [{**row, "messages": [{"role": "user", "content": row["prompt"]}]} for row in numbered(3)]
    lines = write_jsonl(tmp_path / "rows.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert list(load(lines)) == list(load(str(tmp_path / "rows.parquet"))) == rows
    assert [row.number for row in load(lines).rows] == [0, 1, 2]


def test_no_more_rows_are_read_than_asked_for(tmp_path):
    lines = write_jsonl(tmp_path / "rows.jsonl", numbered(4))
    with open(lines, "a") as file:
        file.write("{broken")
    assert list(load(lines, count=3)) == numbered(3)
    assert len(load(lines, count=4)) == 4
    assert "line 5: it is not JSON" in refusal(lines, count=5)


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n  \r\n{"prompt": "b"}\r\n')
    found = load(str(path))
    assert list(found) == [{"prompt": "a"}, {"prompt": "b"}]
    assert [(row.number, row.line) for row in found.rows] == [(0, 1), (1, 4)]


def test_training_prompts_are_left_out_and_the_others_keep_their_numbers(tmp_path):
    lines = write_jsonl(tmp_path / "rows.jsonl", numbered(6))
    trained = load(lines, count=2)
    held_out = load(lines, count=3, exclude=trained.prompt_texts("prompt"))
    assert [row.number for row in held_out.rows] == [2, 3, 4]
    everything = load(lines).prompt_texts("prompt")
    assert "all of its 6 rows are training prompts" in refusal(lines, exclude=everything)


def test_messages_are_the_same_prompt_whatever_the_order_of_their_fields():
    one, other = {"role": "user", "content": "1+1"}, {"content": "1+1", "role": "user"}
    assert prompt_text([one]) == prompt_text([other])
    assert prompt_text([one]) != prompt_text([{"role": "user", "content": "1+2"}])


def test_columns_of_a_source_are_those_of_its_first_rows(tmp_path):
    lines = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "x": 1}, {"prompt": "b", "y": 2}])
    assert check_source(lines, "prompt") == ["prompt", "x", "y"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("rows.jsonl", b"", "rows.jsonl is empty"),
        ("rows.jsonl", b'{"prompt": "a"}\nnot json\n', r"rows.jsonl, line 2: it is not JSON"),
        ("rows.jsonl", b'{"prompt": "a"}\n["b"]\n', r"rows.jsonl, line 2: it holds a list, not an object"),
        ("rows.jsonl", b'{"prompt": "\xff"}\n', r"rows.jsonl, line 1: it is not UTF-8"),
        ("rows.jsonl", b'{"promt": "a", "x": 1}\n', r"no column 'prompt'; did you mean 'promt'\? (columns: promt, x)"),
        ("rows.jsonl", b'{"prompt": "a"}\n\n{"x": "b"}\n', r"row 1 (line 3): there is no column 'prompt'"),
        ("rows.parquet", b"no parquet", "rows.parquet cannot be read as Parquet"),
        ("rows.csv", b"prompt\na\n", "rows.csv: files of type '.csv' cannot be read"),
    ],
)
def test_file_that_cannot_be_used_is_refused(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert expected.replace("\\", "") in refusal(tmp_path / name)


def test_sources_that_are_not_there_are_refused(tmp_path, counting):
    write_jsonl(tmp_path / "rows.jsonl", numbered(1))
    assert "missing.jsonl: there is no such file" in refusal(tmp_path / "missing.jsonl")
    assert f"is a directory: name a .jsonl or .parquet file, for instance {tmp_path / 'rows.jsonl'}" in refusal(
        tmp_path
    )
    assert "no kind of source 'gym'; give builtin:NAME" in refusal("gym:chain_sum")
    assert "no built-in task 'countin'; did you mean 'counting'?" in refusal("builtin:countin")
    assert "did you mean builtin:counting?" in refusal("counting")


def test_parquet_file_with_text_that_is_not_utf8_is_refused(tmp_path):
    offsets = pa.py_buffer(np.array([0, 1, 2], np.int32))
    broken = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff")])
    pq.write_table(pa.table({"prompt": broken}), tmp_path / "rows.parquet")
    assert "rows.parquet cannot be read as Parquet" in refusal(tmp_path / "rows.parquet")


def test_empty_parquet_file_is_refused(tmp_path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    assert "is empty" in refusal(tmp_path / "rows.parquet")


def test_builtin_task_written_as_parquet_reads_back_the_same(tmp_path, counting):
    made = load("builtin:counting", count=5, seed=3)
    written = write_builtin("counting", tmp_path / "rows.parquet", count=5, seed=3)
    assert list(load(str(written))) == list(made)
    assert made[0] == {"prompt": "3=", "answer": "3", "solution": "=3"}
    assert [p.name for p in tmp_path.iterdir()] == ["rows.parquet"], "no temporary file stays"


def test_builtin_task_leaves_training_prompts_out(counting):
    trained = load("builtin:counting", count=5, seed=0)
    held_out = load("builtin:counting", count=5, seed=3, exclude=trained.prompt_texts("prompt"))
    assert len(held_out) == 5
    assert not held_out.prompt_texts("prompt") & trained.prompt_texts("prompt")


def test_prompts_carry_tokens_and_the_other_columns(tmp_path):
    rows = load(write_jsonl(tmp_path / "rows.jsonl", numbered(2)))
    first, second = prompts_of(rows)
    assert (first.index, second.index) == (0, 1)
    assert second.text == "1+1="
    assert second.token_ids.tolist() == [ord(c) for c in "1+1="]
    assert second.columns == {"answer": "2"}


def prompts_of(rows, **limits):
    settings = {"max_prompt_tokens": 100, "context_length": 1000, "max_tokens": 10, **limits}
    return build_prompts(rows, CharacterRenderer(), prompt_column="prompt", **settings)


@pytest.mark.parametrize(
    ("prompt", "limits", "expected"),
    [
        (7, {}, "column 'prompt' is no prompt: it is of type int"),
        (" ", {}, "column 'prompt' is empty"),
        ("123456789", {"max_prompt_tokens": 8}, "its prompt has 9 tokens, more than data.max_prompt_tokens=8"),
        (
            "123456789",
            {"context_length": 18},
            "its prompt of 9 tokens and an answer of rollout.max_tokens=10 exceed the model's context",
        ),
    ],
)
def test_row_that_is_no_usable_prompt_is_named(tmp_path, prompt, limits, expected):
    rows = load(write_jsonl(tmp_path / "rows.jsonl", [*numbered(2), {"prompt": prompt}]))
    with pytest.raises(UserError) as caught:
        prompts_of(rows, **limits)
    assert f"rows.jsonl, row 2 (line 3): {expected}" in str(caught.value)


def test_prompt_that_just_fits_is_taken(tmp_path):
    rows = load(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "123456789"}]))
    assert len(prompts_of(rows, max_prompt_tokens=9, context_length=19)) == 1


def test_reasoning_gym_rows_are_what_its_reward_function_reads():
    rows = load(SUMS, count=8)
    assert check_source(SUMS, "prompt") == list(rows[0]) == ["prompt", "answer", "task", "entry"]
    columns = {"task": [row["task"] for row in rows], "entry": [row["entry"] for row in rows]}
    assert reasoning_gym([row["answer"] for row in rows], **columns) == [1.0] * 8
    assert max(reasoning_gym([f"{int(row['answer']) + 1}" for row in rows], **columns)) < 1


def test_reasoning_gym_options_are_obeyed():
    digits = [int(c) for row in load(SUMS, count=20) for c in row["prompt"].split(": ")[1].split() if c.isdigit()]
    assert len(digits) == 40
    assert max(digits) <= 9


def test_reasoning_gym_rows_are_a_function_of_the_seed_and_differ_from_each_other():
    questions = {seed: [row["prompt"] for row in load(SUMS, count=40, seed=seed)] for seed in (1, 2)}
    assert questions[1] == [row["prompt"] for row in load(SUMS, count=40, seed=1)]
    assert len(set(questions[1])) == 40
    assert not set(questions[1][1:]) <= set(questions[2]), "neighbouring seeds give other items"


def test_reasoning_gym_held_out_rows_are_disjoint_from_training():
    trained = load(SUMS, count=60, seed=1).prompt_texts("prompt")
    held_out = load(SUMS, count=60, seed=2)
    assert held_out.prompt_texts("prompt") & trained, "the space is small: without exclusion there is overlap"
    disjoint = load(SUMS, count=60, seed=2, exclude=trained)
    assert len(disjoint) == 60
    assert not disjoint.prompt_texts("prompt") & trained


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("reasoning_gym:chain_sums", "no data set 'chain_sums'; did you mean 'chain_sum'?"),
        ("reasoning_gym:chain_sum?max_term=2", "no option 'max_term'; did you mean 'max_terms'?"),
        ("reasoning_gym:chain_sum?max_terms", "option 'max_terms' has no value"),
        ("reasoning_gym:chain_sum?max_terms=[2", "the value of max_terms cannot be read"),
        ("reasoning_gym:chain_sum?seed=2", "seed is set by"),
        ("reasoning_gym:chain_sum?min_terms=9&max_terms=3", "max_terms must be >= min_terms"),
        ("reasoning_gym:chain_sum?max_terms=many", "refuses the options of chain_sum"),
        ("reasoning_gym:chain_sum?min_terms=1&max_terms=1&max_digits=1", "gave only 10 different questions"),
    ],
)
def test_reasoning_gym_sources_that_cannot_work_are_refused(source, expected):
    assert expected in refusal(source, count=20)


@pytest.mark.parametrize(
    ("source", "package", "expected"),
    [
        (SUMS, "reasoning_gym", "pip install 'slipstream[tasks]'"),
        ("hf:openai/gsm8k", "datasets", "pip install 'slipstream[hf]'"),
    ],
)
def test_missing_package_is_named(monkeypatch, source, package, expected):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    assert expected in refusal(source)


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("hf:owner/name", ("owner/name", None, "train")),
        ("hf:name:test", ("name", None, "test")),
        ("hf:owner/name/main:test[:10]", ("owner/name", "main", "test[:10]")),
    ],
)
def test_hub_source_names_data_set_configuration_and_split(monkeypatch, source, call):
    calls = []

    def load_dataset(name, config, *, split, streaming):
        assert streaming
        calls.append((name, config, split))
        return iter(numbered(5))

    use_hub(monkeypatch, load_dataset)
    assert list(load(source, count=3)) == numbered(3)
    assert calls == [call]


def test_hub_failure_is_explained(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no route\nto the hub")

    use_hub(monkeypatch, load_dataset)
    assert "hf:owner/name cannot be read (no route): check name, split" in refusal("hf:owner/name")


def use_hub(monkeypatch, load_dataset):
    import importlib.util

    class DatasetsError(Exception):
        pass

    module = SimpleNamespace(load_dataset=load_dataset, exceptions=SimpleNamespace(DatasetsError=DatasetsError))
    found = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: module if name == "datasets" else found(name))
