"""The configuration: where values come from, and what bad ones are told."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from pipelines import config_loader
from pipelines.config import Config
from pipelines.config_docs import annotated_yaml, commented_yaml, default_text, find_fields, print_fields
from pipelines.config_fields import field_docs, nearest_key, section_docs
from pipelines.config_loader import (
    load,
    load_config_file,
    load_for_evaluation,
    load_for_resume,
    preset_names,
    profile_names,
    to_yaml,
    write_config,
)
from pipelines.yaml_documents import dump_yaml, parse_yaml
from storage.errors import UserError


@pytest.fixture
def presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of presets and profiles of our own, so that no test hangs on the content of those that ship."""
    root = tmp_path / "presets"
    (root / "models").mkdir(parents=True)
    (root / "baseline.yaml").write_text("rollout:\n  max_tokens: 100\n")
    (root / "models" / "tiny.yaml").write_text("rollout:\n  max_tokens: 70\n  max_rows: 7\n")
    (root / "models" / "smollm2.yaml").write_text("rollout:\n  max_rows: 9\nlearner: {learning_rate: 1e-5}\n")
    monkeypatch.setattr(config_loader, "PRESETS", root)
    monkeypatch.setattr(config_loader.preset_names, "__defaults__", (root,))
    monkeypatch.setattr(config_loader.profile_names, "__defaults__", (root,))
    monkeypatch.chdir(tmp_path)
    return root


def file(text: str, name: str = "run.yaml") -> str:
    Path(name).write_text(text)
    return name


def message(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        load(arguments)
    return str(caught.value)


# -- precedence -------------------------------------------------------------------------------------------------------


def test_without_arguments_the_baseline_preset_counts(presets: Path) -> None:
    assert load().config.rollout.max_tokens == 100
    assert load().name == "baseline"


def test_profile_is_over_the_schema_and_under_the_preset(presets: Path) -> None:
    resolved = load()
    assert resolved.config.rollout.max_rows == 7
    assert resolved.config.rollout.max_tokens == 100
    assert resolved.origins["rollout.max_rows"] == "profile of model tiny:3"
    assert resolved.origins["rollout.max_tokens"] == "preset baseline:2"


def test_overrides_are_over_the_file_which_is_over_the_profile(presets: Path) -> None:
    config = load([file("rollout: {max_rows: 3, workers: 2}\n"), "rollout.workers=5"]).config
    assert (config.rollout.max_rows, config.rollout.workers) == (3, 5)
    assert config.rollout.max_tokens == 70, "a file does not build on the baseline preset unless it says so"


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [(["model=smollm2"], 9), (["model.path=smollm2"], 9), (["model=./local"], 64), (["model.path=tiny"], 7)],
)
def test_the_final_model_picks_the_profile(presets: Path, arguments: list[str], rows: int) -> None:
    assert load(arguments).config.rollout.max_rows == rows


def test_profile_is_picked_by_the_model_that_the_file_names(presets: Path) -> None:
    config = load([file("model: smollm2\n")]).config
    assert (config.model.path, config.learner.learning_rate) == ("smollm2", 1e-5)


def test_file_builds_on_the_preset_that_it_names(presets: Path) -> None:
    resolved = load([file("preset: baseline\nrollout:\n  workers: 2\n")])
    assert (resolved.config.rollout.max_tokens, resolved.config.rollout.workers) == (100, 2)
    assert resolved.origins["rollout.workers"] == "run.yaml:3"


def test_later_overrides_win(presets: Path) -> None:
    assert load(["run.steps=3", "run.steps=4"]).config.run.steps == 4


def test_preset_may_stand_behind_overrides(presets: Path) -> None:
    assert load(["run.steps=3", "baseline"]).config.run.steps == 3


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("rollout.samples_per_prompt=12", "rollout.samples_per_prompt", 12),
        ('rollout.stop_strings=["\\n"]', "rollout.stop_strings", ("\n",)),
        ("rollout.stop_strings=[1.50, off]", "rollout.stop_strings", ("1.50", "off")),
        ("learner.learning_rate=1e-4", "learner.learning_rate", 1e-4),
        ("tracking.rollouts=off", "tracking.rollouts", "off"),
        ("tracking.tensorboard=false", "tracking.tensorboard", False),
        ("algorithm=dapo", "algorithm.name", "dapo"),
        ("algorithm={name: tis, dual_clip: 3}", "algorithm.dual_clip", 3.0),
        ("run.name=010", "run.name", "010"),
        ("run.name=2024-01-31", "run.name", "2024-01-31"),
        ("data.train=reasoning_gym:x", "data.train", "reasoning_gym:x"),
        ("data.system_prompt=Answer: yes # or no", "data.system_prompt", "Answer: yes # or no"),
        ('data.system_prompt="a\\nb"', "data.system_prompt", "a\nb"),
        ("data.system_prompt=", "data.system_prompt", ""),
        ("cluster.address=", "cluster.address", ""),
        ("algorithm.clip_low=null", "algorithm.clip_low", None),
        ("model=smollm2", "model.path", "smollm2"),
        ("data.train=a=b.jsonl", "data.train", "a=b.jsonl"),
    ],
)
def test_override_values_read_as_people_mean_them(presets: Path, override: str, path: str, value: object) -> None:
    found: object = load([override]).config
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_override_adds_one_name_to_a_mapping(presets: Path) -> None:
    config = load(["evaluation.sets.hard=hard.jsonl"]).config
    assert config.evaluation.sets == {"heldout": "builtin:running_sums", "hard": "hard.jsonl"}
    config = load([file("evaluation: {sets: {a: x.jsonl}}\n"), "evaluation.sets.b=7"]).config
    assert config.evaluation.sets == {"a": "x.jsonl", "b": "7"}


def test_override_replaces_a_list_of_sections(presets: Path) -> None:
    config = load(
        ["reward.functions=[{function: numeric, weight: 2}, {function: my.reward, arguments: {k: 3}}]"]
    ).config
    assert [f.function for f in config.reward.functions] == ["numeric", "my.reward"]
    assert config.reward.functions[1].arguments == {"k": 3}


def test_empty_section_of_a_file_changes_nothing(presets: Path) -> None:
    assert load([file("rollout:\n  # workers: 2\nlearner:\n")]).config.rollout.workers == 1
    assert load([file("")]).config.run == Config().run


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("rolout.samples", "rollout.samples_per_prompt"),
        ("rollout.sample_per_prompt", "rollout.samples_per_prompt"),
        ("samples_per_prompt", "rollout.samples_per_prompt"),
        ("rollout.learning_rate", "learner.learning_rate"),
        ("learner.lr", "learner.learning_rate"),
        ("max_new_tokens", "rollout.max_tokens"),
        ("algorithm.kl.coef", "algorithm.kl.coefficient"),
        ("kl.coefficient", "algorithm.kl.coefficient"),
        ("checkpoints.every", "checkpoint.every"),
        ("evaluation.set.hard", "evaluation.sets"),
    ],
)
def test_unknown_key_names_the_nearest_valid_one(presets: Path, wrong: str, right: str) -> None:
    text = message(f"{wrong}=3")
    assert text.startswith(f"{wrong}: unknown key (command line: {wrong}=3)")
    assert text.endswith(f"did you mean {right}?")


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert nearest_key("zzz.qqqq") is None


def test_unknown_key_of_a_file_has_its_line_even_in_an_unknown_section(presets: Path) -> None:
    text = message(file("run:\n  steps: 3\nrolout:\n  samples: 4\n"))
    assert "rolout.samples: unknown key (run.yaml:4); did you mean rollout.samples_per_prompt?" in text


def test_out_of_range_says_value_place_range_and_unit(presets: Path) -> None:
    text = message(file("rollout:\n  max_rows: 0\n"))
    assert text == "rollout.max_rows: got 0 (run.yaml:2); must be integer from 1 to 4096 (rows (slots))"
    text = message("learner.learning_rate=5")
    assert text == "learner.learning_rate: got 5 (command line: learner.learning_rate=5); must be number > 0 and <= 1"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.max_rows=many", 'got "many"'),
        ("rollout.max_rows=1.5", "got 1.5"),
        ("rollout.dtype=fp16", "must be one of: auto, float32, bfloat16"),
        ("run.name=a b", "must be text that matches"),
        ("evaluation.sets=[1]", "must be mapping from names to texts"),
        ("algorithm.clip_low=7", "must be number > 0 and < 1, or null"),
        ("learner.weight_decay=.nan", "must be number >= 0"),
        ("reward.functions=[]", "must be non-empty list of {function, weight, arguments}"),
        ("reward.functions=[{function: exact, wieght: 2}]", "functions.0.wieght: unknown key"),
        ("reward.functions=[{weight: 2}]", "functions.0.function: is missing"),
        ("rollout=3", "rollout: is a section"),
        ("rollout=", "rollout: is a section"),
        ("evaluation.sets.a.b=3", "evaluation.sets takes a whole value"),
        ("rollout.workers.x=3", "rollout.workers takes a whole value"),
        ("rollout.stop_strings=[", "not valid YAML"),
        ("=3", "section.field=value"),
        ("rollout..workers=3", "section.field=value"),
    ],
)
def test_wrong_values_are_explained(presets: Path, override: str, expected: str) -> None:
    text = message(override)
    assert expected in text
    assert "pydantic" not in text
    assert "\n" not in text


def test_wrong_item_of_a_list_in_a_file_has_its_own_line(presets: Path) -> None:
    text = message(file("reward:\n  functions:\n  - function: exact\n  - function: numeric\n    weight: heavy\n"))
    assert text == 'reward.functions.1.weight: got "heavy" (run.yaml:5); must be number'


def test_all_problems_are_reported_together(presets: Path) -> None:
    text = message(file("rollout:\n  max_rows: 0\n  worker: 3\n"), "learner.threads=-1", "run=3")
    assert text.startswith("4 problems in the configuration:")
    for part in ("rollout.max_rows: got 0 (run.yaml:2)", "rollout.worker: unknown key (run.yaml:3)"):
        assert part in text
    assert "learner.threads: got -1" in text
    assert "run: is a section" in text


def test_unknown_preset_lists_those_there_are(presets: Path) -> None:
    text = message("basline")
    assert "unknown preset 'basline' (did you mean baseline?); presets: baseline" in text
    assert "unknown preset 'nope'" in message(file("preset: nope\n"))


def test_missing_file_is_named(presets: Path) -> None:
    assert message("missing.yaml") == "missing.yaml: no such file"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("run:\n  steps: [1\n", "run.yaml:3: not valid YAML"),
        ("run:\n\tsteps: 1\n", "run.yaml:2: not valid YAML"),
        ("run:\n  steps: 1\n  seed: 2\n  steps: 3\n", "run.yaml:4: run.steps occurs twice (first on line 2)"),
        ("run: {}\nrun: {}\n", "run.yaml:2: run occurs twice (first on line 1)"),
        ("- a\n", "run.yaml: must hold sections"),
        ("run: !!python/object/apply:os.system [true]\n", "run.yaml:1"),
        ("run: &a [*a]\n", "an alias contains itself"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: not valid YAML"),
        ("? [a]\n: b\n", "run.yaml:1: a key must be a word"),
    ],
)
def test_bad_yaml_names_file_and_line(presets: Path, content: str, expected: str) -> None:
    assert expected in message(file(content))


def test_binary_file_is_refused(presets: Path) -> None:
    Path("run.yaml").write_bytes(b"\xff\xfe\x00")
    assert "run.yaml: cannot be read" in message("run.yaml")


def test_presets_in_a_circle_are_refused(presets: Path) -> None:
    (presets / "a.yaml").write_text("preset: b\n")
    (presets / "b.yaml").write_text("preset: a\n")
    assert "circle" in message("a")


def test_override_without_value_is_told_so(presets: Path) -> None:
    assert message("rollout.workers") == "rollout.workers: an override needs a value, as in section.field=value"
    assert "oops: an override needs a value" in message("baseline", "oops")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run.steps=0"], "run.steps and run.epochs are both 0"),
        (["data.prompts=4"], "rollout.prompts_per_step (16) exceeds data.prompts (4)"),
        (["learner.minibatches=17"], "learner.minibatches (17) exceeds rollout.prompts_per_step (16)"),
        (["algorithm.overlong={mode: soft, buffer_tokens: 100}"], "algorithm.overlong.buffer_tokens (100)"),
        (["evaluation.sets.train=x"], "the name train is taken"),
        (["evaluation.sets={a/b: x}"], "'a/b' may hold letters"),
        (["data.system_prompt=hi", "model.chat_template=false"], "data.system_prompt needs a chat template"),
        (["speculation.source=hybrid", "speculation.residual=true"], "speculation.residual decides what is drawn"),
        (
            ["schedule.pools.long.tensor_parallel=2"],
            "schedule.pools.long.tensor_parallel=2 has no effect with rollout.engine=torch",
        ),
        (
            ["asynchrony={partial: split, max_staleness: 1, k_min: 100}"],
            "asynchrony.k_min (100) must be smaller than rollout.max_tokens (100) with partial=split",
        ),
        (
            ["asynchrony={partial: split, max_staleness: 1, pipeline: stream}"],
            "asynchrony: partial=split with pipeline=stream needs max_staleness of 2 or more",
        ),
        (
            ["asynchrony={partial: split, max_staleness: 4}", "schedule={batching: tail, deferred: resume}"],
            "asynchrony.max_staleness is 4: allow 5, or choose restart or auto",
        ),
        (
            ["learner={workers: 2, device: cuda}"],
            "learner.workers=2 with learner.device=cuda: set learner.num_gpus=1",
        ),
        (["learner={workers: 2, num_gpus: 0.5}"], "learner.num_gpus=0.5: learners that share a GPU cannot exchange"),
        (["learner={workers: 2, device: cpu, num_gpus: 1}"], "set learner.num_gpus=0, or learner.device=auto"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(presets: Path, arguments: list[str], expected: str) -> None:
    assert expected in message(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["asynchrony={partial: split, max_staleness: 1, k_min: 99}"],
        ["asynchrony={k_min: 500}"],
        ["asynchrony={partial: split, max_staleness: 2, pipeline: stream}"],
        ["asynchrony={partial: split, max_staleness: 5}", "schedule={batching: tail, deferred: resume}"],
        ["asynchrony={partial: split, max_staleness: 4}", "schedule={batching: tail}"],
        ["learner={workers: 2}"],
        ["learner={workers: 2, device: cuda, num_gpus: 1}"],
        ["learner={device: cuda}"],
        ["learner={num_gpus: 0.5}"],
    ],
)
def test_neighbours_of_contradictions_are_allowed(presets: Path, arguments: list[str]) -> None:
    load(arguments)


def test_contradictions_are_reported_together(presets: Path) -> None:
    text = message("run.steps=0", "data.prompts=4")
    assert text.startswith("2 problems")


def test_microbatch_smaller_than_a_sequence_is_allowed(presets: Path) -> None:
    assert load(["learner.tokens_per_microbatch=16"]).config.learner.tokens_per_microbatch == 16


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rollout.top_p=0.9"], "truncate the distribution"),
        (["rollout.top_k=5"], "truncate the distribution"),
        (["run.epochs=100"], "ends the run before run.epochs=100 is complete"),
        (["learner.warmup_steps=40"], "the peak learning rate is never reached"),
        (["algorithm.kl={coefficient: 0.1, estimator: k1}"], "expected gradient of zero"),
        (["rollout.workers=500"], "some stay idle"),
        (
            ["learner={workers: 65, minibatches: 2}"],
            "learner.workers=65 exceeds the 64 answers of an update",
        ),
        (["learner.parallel=fsdp"], "learner.parallel=fsdp has no effect with learner.workers=1"),
        (["learner={device: cpu, num_gpus: 1}"], "learner.num_gpus=1 is reserved and stays idle"),
        (["rollout={device: cpu, num_gpus: 0.5}"], "rollout.num_gpus=0.5 is reserved and stays idle"),
        (["rollout.num_gpus=2"], "rollout.num_gpus=2: each rollout worker computes on one GPU"),
    ],
)
def test_doubtful_settings_are_warned_about(presets: Path, arguments: list[str], expected: str) -> None:
    warnings = load(arguments).config.warnings()
    assert len(warnings) == 1
    assert expected in warnings[0]
    assert load().config.warnings() == []


# -- files ------------------------------------------------------------------------------------------------------------


def test_written_config_reads_back_equal(presets: Path) -> None:
    arguments = [
        'rollout.stop_strings=["\\n", "off", "1e-3", "010", "null", " x "]',
        "run.name=1e3",
        "learner.adam_eps=1e-8",
        "algorithm.dual_clip=.inf",
        "reward.functions=[{function: exact, arguments: {a: [1, 2.5, null, true, '1'], b: {c: 'no'}}}]",
        'data.system_prompt="über: #1\\n- x"',
    ]
    config = load(arguments).config
    write_config(config, "config.yaml")
    assert load_config_file("config.yaml") == config
    assert load(["config.yaml"]).config == config, "a complete file leaves nothing to profiles"


@settings(max_examples=60, deadline=None)
@example(text="a\u2028b\x85", number=1e-8, data={"\x85": None})
@given(
    text=st.text(max_size=20),
    number=st.floats(min_value=1e-12, max_value=1.0),
    data=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
)
def test_any_value_survives_writing_and_reading(text: str, number: float, data: object) -> None:
    tree = {"text": text, "number": number, "data": data}
    assert parse_yaml(dump_yaml(tree), "x").data == tree


def test_commented_file_loads_to_the_same_config(presets: Path) -> None:
    text = commented_yaml()
    Path("all.yaml").write_text(text)
    assert load(["all.yaml"]).config == Config()
    for path in field_docs():
        assert f"{path.rpartition('.')[2]}:" in text
    config = load(["rollout.workers=3", 'rollout.stop_strings=["a", "b"]']).config
    assert load([file(commented_yaml(config))]).config == config


def test_annotated_file_loads_and_names_origins(presets: Path) -> None:
    resolved = load(["rollout.workers=3", 'rollout.stop_strings=["a", "b"]'])
    text = annotated_yaml(resolved.config, resolved.origins)
    assert load([file(text)]).config == resolved.config
    assert any(line.split("#")[-1].strip() == "command line: rollout.workers=3" for line in text.splitlines())


def test_numbers_are_numbers_for_other_readers_of_yaml_too() -> None:
    assert yaml.safe_load(to_yaml(Config()))["learner"]["adam_eps"] == 1e-8


# What a preset warns of by its nature, not by mistake.
_LABELS = {"specrl": "biases the samples"}
_SHORT_RUN = "visits its"  # smollm2's short default run sees each prompt once


def test_every_shipped_preset_is_valid_with_every_model() -> None:
    assert "baseline" in preset_names()
    for name in preset_names():
        for model in {"tiny", *profile_names()}:
            resolved = load([name, f"model={model}"])
            assert resolved.config.model.path == model
            left = [w for w in resolved.config.warnings() if _SHORT_RUN not in w or model == "tiny"]
            if name in _LABELS:
                assert any(_LABELS[name] in warning for warning in left)
                left = [warning for warning in left if _LABELS[name] not in warning]
            assert left == [], name


# -- resume and evaluation --------------------------------------------------------------------------------------------


@pytest.fixture
def run(presets: Path) -> Path:
    directory = presets.parent / "runs" / "one"
    directory.mkdir(parents=True)
    write_config(load(["rollout.max_tokens=33"]).config, directory / "config.yaml")
    return directory


def test_resume_takes_the_configuration_of_the_run(run: Path) -> None:
    config = load_for_resume(run, ["run.steps=80", "evaluation.every=5", "rollout.workers=2"]).config
    assert config.rollout.max_tokens == 33
    assert (config.run.steps, config.evaluation.every, config.rollout.workers) == (80, 5, 2)


@pytest.mark.parametrize(
    "override", ["rollout.temperature=0.5", "run.seed=3", "model=smollm2", "algorithm=dapo", "run={}"]
)
def test_resume_refuses_what_would_change_the_run(run: Path, override: str) -> None:
    with pytest.raises(UserError, match="cannot change when a run is resumed"):
        load_for_resume(run, ["run.steps=80", override])


def test_resume_still_explains_unknown_keys(run: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean run\.steps\?"):
        load_for_resume(run, ["run.step=80"])


def test_resume_takes_no_preset_and_needs_a_run(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="drop 'baseline'"):
        load_for_resume(run, ["baseline"])
    with pytest.raises(UserError, match="is not a run directory"):
        load_for_resume(tmp_path)


def test_evaluation_of_a_run_or_its_checkpoint_uses_its_configuration(run: Path) -> None:
    checkpoint = run / "checkpoints" / "step_000010"
    checkpoint.mkdir(parents=True)
    for target in (run, checkpoint):
        config = load_for_evaluation(str(target), ["evaluation.samples=4"]).config
        assert (config.rollout.max_tokens, config.evaluation.samples) == (33, 4)


def test_evaluation_of_a_model_uses_the_preset_and_its_profile(presets: Path) -> None:
    config = load_for_evaluation("smollm2", ["evaluation.samples=4"]).config
    assert (config.model.path, config.rollout.max_rows, config.evaluation.samples) == ("smollm2", 9, 4)


# -- listing ----------------------------------------------------------------------------------------------------------


def test_every_field_has_a_description_and_a_kind() -> None:
    for doc in field_docs().values():
        assert len(doc.description) > 5, doc.path
        assert doc.kind != "any value", doc.path
    assert all(section_docs().values())


def test_defaults_of_the_listing_can_be_typed_back(presets: Path) -> None:
    for doc in field_docs().values():
        assert load([f"{doc.path}={default_text(doc)}"]).config is not None


def test_filter_finds_fields_by_name_then_by_meaning() -> None:
    assert {doc.path for doc in find_fields("rollout.pacing")} == {"rollout.pacing.profile", "rollout.pacing.t0_ms"}
    assert "algorithm.clip_high" in {doc.path for doc in find_fields("Ratio clip")}
    with pytest.raises(UserError, match=r"did you mean rollout\.temperature\?"):
        find_fields("temprature")


def test_listing_is_one_line_per_field_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    print_fields(find_fields(), Console(force_terminal=False, width=40))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(field_docs())
    assert any(line.startswith("rollout.max_rows=64  # integer from 1 to 4096; rows (slots).") for line in lines)


def test_listing_is_a_table_per_section_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_fields(find_fields("algorithm.kl"), Console(force_terminal=True, width=100))
    text = capsys.readouterr().out
    assert "coefficient" in text
    assert "Penalty towards the initial policy." in text


def test_planned_steps_end_with_the_shorter_of_steps_and_epochs() -> None:
    config = Config.model_validate({"run": {"steps": 0, "epochs": 3}, "data": {"prompts": 50}})
    assert config.planned_steps() == math.ceil(3 * 50 / 16)
    assert Config.model_validate({"run": {"steps": 4, "epochs": 3}}).planned_steps() == 4
