"""Benchmarks from the command line: options, table, figures; and the engine benchmark on a model of two layers."""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pipelines.bench import harness
from pipelines.bench.engine import Comparison, Round, compare
from storage.errors import UserError


@pytest.fixture
def toy(monkeypatch):
    """A benchmark that gives its options back."""
    module = types.ModuleType("toy_bench")
    module.OPTIONS = {"rounds": 3, "share": 0.5, "models": "a,b"}
    module.run = lambda options: harness.BenchResult(
        name="toy", columns=("x",), rows=(("cell",),), figures={"rounds": options["rounds"]}, notes=("a note",)
    )
    monkeypatch.setitem(sys.modules, "toy_bench", module)
    texts = {"rounds": "rounds", "share": "share", "models": "models"}
    monkeypatch.setitem(harness.BENCHES, "toy", harness.Bench("toy_bench", "A toy.", texts))
    return module


def test_a_run_prints_its_table_and_writes_exactly_its_figures(toy, tmp_path, capsys):
    harness.run_bench("toy", tmp_path / "out.json", ["rounds=7"])
    assert json.loads((tmp_path / "out.json").read_text()) == {"rounds": 7}
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("cell", "rounds = 7", "a note", "torch 2", "cores"))


def test_without_a_name_all_benchmarks_are_listed(toy, capsys):
    harness.run_bench(None, None, ())
    shown = capsys.readouterr().out
    assert "engine" in shown
    assert "A toy." in shown


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("nothing", (), "no benchmark 'nothing'; there are: accuracy, engine"),
        ("toy", ("pace=3",), "no option 'pace=3'; it has: rounds"),
        ("toy", ("rounds",), "no option 'rounds'"),
        ("toy", ("rounds=two",), "rounds must be a whole number, not 'two'"),
        ("toy", ("share=much",), "share must be a number"),
    ],
)
def test_what_does_not_fit_is_a_user_error(toy, name, options, words):
    with pytest.raises(UserError, match=words):
        harness.run_bench(name, None, options)


def test_a_missing_folder_is_found_before_anything_runs(toy, tmp_path):
    toy.run = lambda options: pytest.fail("it ran")
    with pytest.raises(UserError, match="folder does not exist"):
        harness.run_bench("toy", tmp_path / "no" / "out.json", ())


def test_ratios_are_medians_of_rounds_and_count_useful_tokens_only():
    engine = (Round((10, 20), 1.0), Round((30,), 1.0), Round((60,), 1.0))
    generate = (Round((30,), 1.0), Round((15,), 1.0), Round((20,), 1.0))
    assert Comparison(engine, generate).ratio == 2.0


def test_the_engine_benchmark_gives_both_sides_the_same_number_of_answers(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    prompts = [np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)]
    result = compare(tmp_path, prompts, (2, 3, 4), samples=8, rounds=2, max_tokens=20)
    for side in (result.engine, result.generate):
        assert [len(r.lengths) for r in side] == [8, 8]
        assert all(1 <= n <= 20 for r in side for n in r.lengths)
        assert any(n < 20 for r in side for n in r.lengths)
    assert result.ratio > 0
    with pytest.raises(UserError, match="multiple"):
        compare(tmp_path, prompts, (2,), samples=7, rounds=1, max_tokens=4)
