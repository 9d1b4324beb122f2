from __future__ import annotations

import numpy as np
import pytest

from pipelines.bench import index
from storage.errors import UserError


def test_each_index_is_measured_and_the_automata_agree_with_repeated_answers():
    answer = np.arange(60, dtype=np.int32)
    per_prompt, of_all, live, levels, fuzzy = index.measure_index([[answer] * 3, [answer + 100] * 3], rounds=1)
    for figures in (per_prompt, of_all, live):
        # Twelve drafts behind 5, 10, ... of 60 tokens; the last four meet the end of the answer.
        assert figures.drafted == figures.agreed == pytest.approx((8 * 16 + 15 + 10 + 5) / 12)
    assert 0 < levels.agreed == levels.drafted <= 10
    assert 0 < fuzzy.agreed <= fuzzy.drafted
    for figures in (per_prompt, of_all, live, levels, fuzzy):
        assert min(figures.build_rate, figures.bytes_per_token, figures.step_us) > 0


def test_a_small_run_names_its_figures():
    result = index.run({"prompts": 2, "samples": 2, "length": 40, "rounds": 1, "seed": 1})
    assert len(result.rows) == 5
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
