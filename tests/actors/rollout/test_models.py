"""The engine writes what the model itself would write, for every kind of attention that it claims to support."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, T5Config

from actors.rollout.lean_decoder import LeanDecoder
from actors.rollout.packed_model import PackedModel, check_runnable
from actors.weights import policy_state
from storage.errors import UserError

from .conftest import CONFIGS, VOCABULARY, finish, request, tokens_of

PROMPTS = [[5, 6, 7], [9, 1, 4, 3, 8, 2, 11, 30, 31, 40], [17], [20, 21, 22, 23, 24, 25]]


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_greedy_answers_equal_those_of_transformers_generate(kind, model_path, engine_of):
    path = model_path(kind)
    engine = engine_of(path, max_rows=3)
    done = finish(engine, [request(i, p, max_tokens=20, temperature=0.0) for i, p in enumerate(PROMPTS)])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for i, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None
        )
        assert tokens_of(done[i]) == expected[0, len(prompt) :].tolist()
        assert done[i].finish_reason == "length"
        assert np.all(np.concatenate([s.logprobs for s in done[i].segments]) == 0)


def test_models_that_need_more_than_slots_are_refused_by_name():
    with pytest.raises(UserError, match="MambaForCausalLM"):
        check_runnable(MambaConfig())
    with pytest.raises(UserError, match="encoder-decoder"):
        check_runnable(T5Config())


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_lean_passes_equal_those_through_the_models_own_modules(kind, model_path, reference_model):
    lean = PackedModel.load(model_path(kind), "float32", "cpu")
    assert lean.lean
    plain = PackedModel(lean.twin().model, lean=False)
    rows = [torch.arange(3, 14), torch.arange(20, 25)]
    np.testing.assert_allclose(lean._two_pass_logits(rows), plain._two_pass_logits(rows), atol=1e-4, rtol=1e-4)
    twin = lean.twin()
    other = reference_model(kind, 1)
    twin.load_state(policy_state(other))
    assert twin.lean
    expected = torch.stack([other(input_ids=r[None]).logits[0, -1] for r in rows]).detach()
    np.testing.assert_allclose(twin._two_pass_logits(rows), expected, atol=1e-3, rtol=1e-3)


def test_lean_passes_that_differ_from_the_models_own_are_given_up(model_path, monkeypatch):
    monkeypatch.setattr(LeanDecoder, "forward", lambda self, plan, cache, ids, at: torch.zeros(len(at), VOCABULARY))
    assert not PackedModel.load(model_path("llama"), "float32", "cpu").lean


def test_a_model_that_slots_cannot_follow_is_refused_when_it_is_loaded(model_path, monkeypatch):
    monkeypatch.setattr("actors.rollout.packed_model.layer_windows", lambda config: (2, 2))
    with pytest.raises(UserError, match="GPT2LMHeadModel cannot run"):
        PackedModel.load(model_path("gpt2"), "float32", "cpu")
