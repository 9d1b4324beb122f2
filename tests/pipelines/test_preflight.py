"""The checks before a run: each bad input gets one message that names the field, and nothing is started."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipelines import cli
from pipelines.config import Config
from pipelines.config_loader import load
from pipelines.preflight import check_run, inspect_run
from storage.errors import UserError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a character tokenizer and weights that nobody could run."""
    path = tmp_path_factory.mktemp("model")
    characters = ["<pad>", "<bos>", "<eos>", *map(chr, range(32, 127)), "\n"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "max_position_embeddings": 512}
    settings = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": len(characters), **shape}
    special_ids = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    (path / "config.json").write_text(json.dumps({**settings, **special_ids}))
    save_file({"w": np.zeros(1000, np.float32)}, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with prompts and held-out prompts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    write_rows(tmp_path / "train.jsonl", 20)
    write_rows(tmp_path / "held.jsonl", 5)
    return tmp_path


def write_rows(path: Path, count: int, **extra: Any) -> None:
    rows = [{"prompt": f"{path.stem} {n}: 1+{n}=", "answer": str(n + 1), **extra} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(directory: Path, /, **changes: Any) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(directory)},
        "data": {"train": "train.jsonl", "prompts": 20},
        "evaluation": {"sets": {"held": "held.jsonl"}, "prompts": 5},
        "rollout": {"max_tokens": 64, "prompts_per_step": 4, "samples_per_prompt": 4, "max_rows": 8},
        "run": {"steps": 10},
    }
    for name, value in changes.items():
        sections.setdefault(name, {}).update(value)
    return Config.model_validate(sections)


def refusal(wanted: Config) -> str:
    with pytest.raises(UserError) as caught:
        inspect_run(wanted)
    return str(caught.value)


def test_good_run_passes_and_its_sizes_follow(work: Path, model: Path) -> None:
    found = inspect_run(config(model))
    assert (found.prompts, found.steps) == (20, 10)
    assert found.longest_prompt == len("train 19: 1+19=") + 1, "one BOS"
    assert found.max_length == found.longest_prompt + 64
    assert found.shape is not None
    assert found.shape.parameters == 1000
    assert found.estimate is not None
    assert found.estimate.kv_cache == 8 * found.max_length * found.shape.kv_bytes_per_token(4)
    assert (found.warnings, found.notes) == ((), ())
    assert sorted(path.name for path in work.iterdir()) == ["held.jsonl", "train.jsonl"], "nothing is left behind"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": {"path": "./nowhere"}}, "nowhere"),
        ({"data": {"train": "missing.jsonl"}}, r"data\.train: .*missing\.jsonl"),
        ({"data": {"train": "builtin:nothing"}}, r"data\.train: .*nothing"),
        ({"data": {"prompt_column": "question"}}, "question"),
        ({"evaluation": {"sets": {"hard": "hard.jsonl"}}}, r"evaluation\.sets\.hard: .*hard\.jsonl"),
        ({"data": {"max_prompt_tokens": 5}}, "row"),
        ({"rollout": {"max_tokens": 510}}, "context"),
        ({"rollout": {"threads": 1000}}, r"rollout\.threads=1000"),
        ({"rollout": {"max_rows": 4096, "max_tokens": 400, "workers": 4000}}, "GB of memory"),
        ({"rollout": {"num_cpus": 1000}}, r"rollout\.num_cpus"),
        ({"learner": {"num_gpus": 100}}, r"learner\.num_gpus=100"),
        ({"reward": {"functions": [{"function": "exakt"}]}}, "exact"),
        ({"reward": {"functions": [{"function": "no_such_module.reward"}]}}, "no_such_module"),
    ],
)
def test_each_bad_input_is_named(work: Path, model: Path, changes: dict[str, Any], expected: str) -> None:
    text = refusal(config(model, **changes))
    assert re.search(expected, text), text
    assert "Traceback" not in text


def test_unparsable_row_is_named_by_its_line(work: Path, model: Path) -> None:
    with Path("train.jsonl").open("a") as file:
        file.write("{broken\n")
    assert re.search(r"train\.jsonl.*21", refusal(config(model, data={"prompts": 30})))


def test_source_with_fewer_prompts_than_a_step_is_refused(work: Path, model: Path) -> None:
    write_rows(work / "train.jsonl", 3)
    text = refusal(config(model))
    assert "data.train=train.jsonl has 3 prompts, fewer than rollout.prompts_per_step=4" in text


def test_source_with_fewer_prompts_than_asked_is_warned_about(work: Path, model: Path) -> None:
    write_rows(work / "train.jsonl", 6)
    found = inspect_run(config(model))
    assert found.prompts == 6
    assert "data.train=train.jsonl has only 6 of the data.prompts=20" in found.warnings[0]


def test_model_directory_without_tokenizer_or_weights_is_refused(work: Path, model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((model / "config.json").read_text())
    assert "bare" in refusal(config(bare))
    (bare / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    assert "tokenizer" in refusal(config(bare))


def test_reward_that_cannot_be_imported_or_lacks_a_column_is_refused(work: Path, model: Path) -> None:
    Path("broken.py").write_text("import nothing_like_that\ndef score(completions): return [0.0]\n")
    assert "nothing_like_that" in refusal(config(model, reward={"functions": [{"function": "broken.py:score"}]}))
    Path("needy.py").write_text("def score(completions, difficulty): return [0.0]\n")
    text = refusal(config(model, reward={"functions": [{"function": "needy.py:score"}]}))
    assert "reward.functions (with the columns of data.train): " in text
    assert "'difficulty'" in text


def test_reward_that_lacks_a_column_in_a_held_out_set_only_is_refused(work: Path, model: Path) -> None:
    write_rows(work / "train.jsonl", 20, difficulty=1)
    Path("needy.py").write_text("def score(completions, difficulty): return [0.0]\n")
    text = refusal(config(model, reward={"functions": [{"function": "needy.py:score"}]}))
    assert text.startswith("reward.functions (with the columns of evaluation.sets.held): ")


def test_run_directory_that_cannot_be_written_is_refused(work: Path, model: Path) -> None:
    Path("runs").write_text("a file in the way")
    assert "run.directory=runs: cannot write in runs: it is not a directory" in refusal(config(model))
    text = refusal(config(model, run={"directory": "/proc/runs"}))
    assert "run.directory=/proc/runs: cannot write in /proc" in text


def test_missing_extra_is_named(work: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tracking\.wandb: the package wandb is missing"):
        check_run(config(model, tracking={"wandb": True}))


def test_several_problems_are_reported_together(work: Path, model: Path) -> None:
    text = refusal(
        config(model, data={"train": "missing.jsonl"}, rollout={"threads": 1000}, run={"directory": "/proc/x"})
    )
    assert text.startswith("3 problems:")


def test_cluster_out_of_reach_is_a_note(work: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "head.invalid:6379")
    found = inspect_run(config(model, rollout={"threads": 1000}))
    assert (found.machine, found.placement) == (None, ())
    assert found.notes[0].startswith(
        "what the cluster has is not checked: RAY_ADDRESS=head.invalid:6379: nothing answers"
    )


def test_table_of_requested_and_available_is_part_of_the_preflight(work: Path, model: Path) -> None:
    found = inspect_run(config(model, learner={"num_cpus": 1}))
    assert any(re.fullmatch(r"learner +CPU +1 x 1 = 1 +\d+ +1", line) for line in found.placement)


def test_label_that_a_local_ray_cannot_have_is_refused(work: Path, model: Path) -> None:
    text = refusal(config(model, rollout={"labels": {"role": "rollout"}}))
    assert text == "rollout.labels: a label nobody has: role=rollout; no node has labels (ray start --labels)"


def test_malformed_label_and_part_of_several_gpus_are_refused_by_field(work: Path, model: Path) -> None:
    text = refusal(config(model, reward={"labels": {"role": "in(a"}}, learner={"num_gpus": 1.5}))
    assert "reward.labels.role='in(a' is no label value: write a, !a, in(a,b) or !in(a,b)" in text
    assert "learner.num_gpus=1.5: more than one GPU must be a whole number; use 1 or 2" in text


def ray_is_used() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def test_dry_run_prints_what_would_run_and_starts_nothing(
    work: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = config(model).model_dump(mode="json")
    Path("run.yaml").write_text(json.dumps(sections))
    before = sorted(os.listdir())
    joined = ray_is_used()
    assert cli.main(["train", "run.yaml", "rollout.top_p=0.9", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "warning: rollout.top_p=0.9" in printed.err
    for line in (
        "answers per step       16 (4 prompts x 4 samples)",
        "steps per epoch        5",
        "epochs                 2",
    ):
        assert f"# {line}" in printed.out
    assert "most tokens per step   1,024" in printed.out
    assert "runs/run-DATE-TIME" in printed.out
    assert "# command line: rollout.top_p=0.9" in printed.out
    assert sorted(os.listdir()) == before
    assert ray_is_used() == joined  # other tests of this process may have started one
    Path("again.yaml").write_text(printed.out)
    assert load(["again.yaml"]).config == load(["run.yaml", "rollout.top_p=0.9"]).config


def test_dry_run_of_a_model_that_is_not_here_yet_says_what_it_could_not_check(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(work / "cache"))
    Path("run.yaml").write_text("model: tiny\n")
    assert cli.main(["train", "run.yaml", "--dry-run"]) == 0
    assert "model.path=tiny is not on this machine yet" in capsys.readouterr().out
    assert not list((work / "cache").rglob("*.safetensors")), "a dry run builds nothing"


def test_dry_run_of_a_bad_run_exits_with_2(work: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(json.dumps(config(model, data={"train": "missing.jsonl"}).model_dump(mode="json")))
    assert cli.main(["train", "run.yaml", "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: data.train: ")
