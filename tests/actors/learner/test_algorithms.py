import pytest

from actors.learner.algorithms import check_algorithm, resolve_algorithm
from actors.learner.options import AlgorithmOptions, OverlongOptions
from storage.errors import UserError


@pytest.mark.parametrize(
    ("name", "anchor", "clip", "aggregation", "advantage", "cap"),
    [
        ("grpo", "behaviour", (0.2, 0.2), "sequence", "group_std", None),
        ("dr_grpo", "behaviour", (0.2, 0.2), "constant", "group_mean", None),
        ("dapo", "behaviour", (0.2, 0.28), "token", "group_std", None),
        ("decoupled_ppo", "proximal", (0.2, 0.2), "token", "group_std", 5.0),
        ("tis", "proximal", (0.2, 0.2), "token", "group_std", 2.0),
    ],
)
def test_null_fields_take_the_papers_values(name, anchor, clip, aggregation, advantage, cap):
    got = resolve_algorithm(AlgorithmOptions(name=name))
    assert (got.anchor, got.aggregation, got.advantage) == (anchor, aggregation, advantage)
    assert (got.clip_low, got.clip_high) == clip
    assert got.behaviour_cap == cap


def test_given_fields_win():
    got = resolve_algorithm(AlgorithmOptions(name="dapo", clip_high=0.5, aggregation="sequence", dual_clip=3.0))
    assert (got.clip_high, got.aggregation, got.dual_clip) == (0.5, "sequence", 3.0)


def test_behaviour_weight_on_top_of_a_behaviour_ratio_is_refused():
    with pytest.raises(UserError, match=r"algorithm\.behaviour_cap.*grpo.*decoupled_ppo or tis"):
        resolve_algorithm(AlgorithmOptions(name="grpo", behaviour_cap=2.0))


def test_soft_ramp_wider_than_the_answer_is_refused():
    options = AlgorithmOptions(overlong=OverlongOptions(mode="soft", buffer_tokens=32))
    check_algorithm(options, max_tokens=33)
    with pytest.raises(UserError, match=r"overlong\.buffer_tokens=32"):
        check_algorithm(options, max_tokens=32)


def test_dual_clip_inside_the_ordinary_clip_is_refused():
    with pytest.raises(UserError, match=r"dual_clip=1\.1"):
        check_algorithm(AlgorithmOptions(dual_clip=1.1), max_tokens=10)
