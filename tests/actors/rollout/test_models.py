"""The engine writes what the model itself would write, for every kind of attention that it claims to support."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, T5Config

from actors.rollout.packed_model import check_runnable
from storage.errors import UserError

from .conftest import CONFIGS, finish, request, tokens_of

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
