from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from pipelines.bench import arctic, index
from storage.errors import UserError


def test_each_index_is_measured_and_the_automata_agree_with_repeated_answers():
    answer = np.arange(60, dtype=np.int32)
    measured = index.measure_index([[answer] * 3, [answer + 100] * 3], rounds=1)
    per_prompt, of_all, live, levels, fuzzy = measured[:5]
    for figures in (per_prompt, of_all, live):
        # Twelve drafts behind 5, 10, ... of 60 tokens; the last four meet the end of the answer.
        assert figures.drafted == figures.agreed == pytest.approx((8 * 16 + 15 + 10 + 5) / 12)
    assert 0 < levels.agreed == levels.drafted <= 10
    assert 0 < fuzzy.agreed <= fuzzy.drafted
    for figures in measured:
        assert min(figures.build_rate, figures.bytes_per_token, figures.step_us) > 0


class FakeSuffixDecodingCache:
    """Speaks the package's interface, and drafts what followed the last token anywhere before."""

    class _global_tree:
        @staticmethod
        def estimate_memory():
            return 4000

    def __init__(self, max_tree_depth):
        self.answers, self.active = [], {}

    def start_request(self, request, prompt_ids):
        self.active[request] = np.zeros(0, np.int32)

    def add_active_response(self, request, tokens):
        assert tokens.dtype == np.int32
        self.active[request] = np.concatenate([self.active[request], tokens])

    def stop_request(self, request):
        self.answers.append(self.active.pop(request))

    def evict_cached_response(self, request):
        assert request not in self.active
        self.answers.pop()

    def speculate(self, request, context, max_spec_tokens, max_spec_factor, min_token_prob):
        assert np.array_equal(self.active[request][-len(context) :], context)
        for answer in self.answers:
            for at in np.flatnonzero(answer == context[-1]):
                return types.SimpleNamespace(token_ids=answer[at + 1 : at + 1 + max_spec_tokens].tolist())
        return types.SimpleNamespace(token_ids=[])


def test_arctic_inference_is_measured_beside_ours_where_it_is_installed(monkeypatch):
    module = types.ModuleType("arctic_inference.suffix_decoding")
    module.SuffixDecodingCache = FakeSuffixDecodingCache
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(arctic, "installed", lambda: True)
    answer = np.arange(60, dtype=np.int32)
    figures = index.measure_index([[answer] * 3, [answer + 100] * 3], rounds=2)[-1]
    assert figures.name == "arctic-inference"
    assert figures.bytes_per_token == pytest.approx(4000 / 240)
    assert figures.drafted == figures.agreed == pytest.approx((8 * 16 + 15 + 10 + 5) / 12)
    found = index.run({"prompts": 2, "samples": 2, "length": 40, "rounds": 1, "seed": 1}).figures
    assert found["index_row_us_arctic"] > 0


def test_a_small_run_names_its_figures():
    result = index.run({"prompts": 2, "samples": 2, "length": 40, "rounds": 1, "seed": 1})
    assert len(result.rows) == 5 + arctic.installed()
    assert {f"index_row_us_{name}" for name in ("prompt", "global", "live", "levels", "fuzzy")} <= set(result.figures)
    assert result.figures["index_bytes_per_token_prompt"] <= 120


def test_synthetic_siblings_are_alike_and_repeat_with_the_seed():
    groups = index.synthetic_groups(2, 3, 100, seed=4)
    again = index.synthetic_groups(2, 3, 100, seed=4)
    assert all(np.array_equal(a, b) for x, y in zip(groups, again, strict=True) for a, b in zip(x, y, strict=True))
    first, second, other = set(groups[0][0].tolist()), set(groups[0][1].tolist()), set(groups[1][0].tolist())
    assert len(first & second) > len(first & other)


@pytest.mark.parametrize(("name", "value"), [("prompts", 0), ("samples", 1), ("length", 3), ("rounds", 0)])
def test_sizes_too_small_are_named(name, value):
    with pytest.raises(UserError, match=f"option {name}={value}"):
        index.run({**index.OPTIONS, name: value})
