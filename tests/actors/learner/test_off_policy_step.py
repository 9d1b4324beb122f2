"""Whole training steps on stale, mixed-version batches: weights, masks and the guard through the learner's own path."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.learner import learner as module
from actors.learner.asynchrony_options import AsynchronyOptions
from actors.learner.minibatches import Minibatch
from actors.learner.statistics import TokenStatistics
from storage.records import Segment
from tests.actors.learner.batches import (
    gradient_of,
    make_group,
    make_learner,
    random_groups,
    reference_logprobs,
    weights_of,
)

VERSION = 6


def cut(sample, versions):
    """The same answer, divided evenly among ``versions``."""
    ids, logprobs = sample.token_ids(), sample.logprobs()
    segments = [
        Segment(source="policy", version=version, token_ids=part, logprobs=values)
        for version, part, values in zip(
            versions, np.array_split(ids, len(versions)), np.array_split(logprobs, len(versions)), strict=True
        )
        if len(part)
    ]
    return replace(sample, segments=tuple(segments))


@pytest.fixture(scope="module")
def stale(model_path):
    """Eight groups of four answers, of versions 2 to 6, some of mixed versions, with behaviour logprobs that differ."""
    rng = np.random.default_rng(3)
    groups = []
    for group in random_groups(model_path, groups=8, samples=4, seed=1, drift=0.5):
        samples = [cut(s, sorted(rng.integers(2, VERSION + 1, rng.integers(1, 4)).tolist())) for s in group.samples]
        groups.append(replace(group, samples=tuple(samples)))
    return groups


def learner_of(path, algorithm="decoupled_ppo", *, asynchrony=None, **fields):
    learner = make_learner(path, algorithm, asynchrony=asynchrony, **fields)
    learner.version = VERSION
    return learner


SETTINGS = {
    "decay": ("decoupled_ppo", {"half_life": 2.0, "max_staleness": 8}, {}),
    "token decay": ("grpo", {"half_life": 1.5, "grad_tokens": "decay", "max_staleness": 8}, {}),
    "suffix only": ("decoupled_ppo", {"grad_tokens": "current_only", "max_staleness": 8}, {}),
    "suffix only, sequences": ("gspo", {"grad_tokens": "current_only", "max_staleness": 8}, {"clip_high": 0.5}),
    "sequence mask": ("tis", {}, {"sequence_mask": {"mode": "geometric", "low": 0.9, "high": 1.1}}),
    "worst token mask": ("cispo", {}, {"sequence_mask": {"mode": "max", "low": 0.4, "high": 2.5}}),
    "guard": ("grpo", {}, {"drift_guard": {"action": "clip", "ess_floor": 0.95}}),
    "decoupled gspo": ("gspo", {}, {"anchor": "proximal", "behaviour_cap_negative": 1.05}),
    "everything": (
        "decoupled_ppo",
        {"grad_tokens": "current_only", "half_life": 3.0, "max_staleness": 8},
        {
            "sequence_mask": {"mode": "max", "low": 0.3, "high": 3.0},
            "drift_guard": {"action": "clip", "ess_floor": 0.9},
            "kl": {"coefficient": 0.1},
            "behaviour_cap_negative": 1.2,
        },
    ),
}


def relative(a, b):
    return float((a - b).norm() / b.norm())


def build(path, setting, **more):
    algorithm, asynchrony, fields = SETTINGS[setting]
    return learner_of(path, algorithm, asynchrony=AsynchronyOptions(**asynchrony), **{**fields, **more})


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_gradient_does_not_depend_on_microbatches_padding_or_order(model_path, stale, setting):
    """I8 for every weight: one bin, bins of single answers (no padding), any order of arrival."""
    whole = gradient_of(build(model_path, setting), stale)
    assert whole.norm() > 1e-3
    for budget in (16, 100):
        other = build(model_path, setting, tokens_per_microbatch=budget)
        assert relative(gradient_of(other, stale[::-1]), whole) < 1e-5


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_ranks_that_share_the_denominator_add_up_to_the_whole(model_path, stale, setting, monkeypatch):
    """Answers are dealt to three ranks; each sums its own and divides by the counts of all."""
    whole = gradient_of(build(model_path, setting), stale)
    split = build(model_path, setting)
    original = type(split)._backward

    def sharded(self, minibatch, before, cap, statistics):
        for rank in range(3):
            share = Minibatch(minibatch.answers[rank::3], minibatch.tokens, minibatch.count)
            original(self, share, None, cap, TokenStatistics(self.algorithm))

    monkeypatch.setattr(type(split), "_backward", sharded)
    assert relative(gradient_of(split, stale), whole) < 1e-5


@pytest.mark.parametrize("setting", ["decay", "suffix only", "sequence mask", "guard", "decoupled gspo"])
def test_each_setting_changes_the_gradient(model_path, stale, setting):
    """Negative control of the two tests above: the weights are not idle."""
    algorithm = SETTINGS[setting][0]
    assert (
        relative(gradient_of(build(model_path, setting), stale), gradient_of(learner_of(model_path, algorithm), stale))
        > 0.02
    )


def suffix_reference(learner, groups, cap=5.0, prefix_cap=2.0):
    """Gradient of current_only with decoupled PPO: a loop over single answers in plain torch."""
    model = learner.model
    model.zero_grad()
    tokens = sum(s.length for g in groups for s in g.samples)
    for group in groups:
        rewards = np.array([s.reward for s in group.samples])
        for sample, advantage in zip(group.samples, (rewards - rewards.mean()) / (rewards.std() + 1e-4), strict=True):
            ids = torch.tensor([[*group.prompt.token_ids.tolist(), *sample.token_ids().tolist()]])
            n = len(group.prompt.token_ids)
            table = model(input_ids=ids).logits[0].log_softmax(-1)
            now = table[n - 1 : -1].gather(-1, ids[0, n:, None])[:, 0]
            ratio = (now.detach() - torch.tensor(sample.logprobs())).double().exp()
            newest = torch.tensor(sample.versions() == sample.versions().max())
            prefix = min(float(ratio[~newest].prod()), prefix_cap)
            weight = prefix * ratio.clamp(max=cap) * float(advantage)
            (-(weight * now)[newest].sum() / tokens).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_suffix_gradient_equals_a_loop_over_single_answers(model_path, stale):
    got = gradient_of(build(model_path, "suffix only"), stale)
    learner = learner_of(model_path)
    assert relative(got, suffix_reference(learner, stale)) < 1e-4
    # negative control: a prefix weight that is not truncated is another gradient, so prefixes were weighted
    assert relative(got, suffix_reference(learner, stale, prefix_cap=1e9)) > 1e-3


def test_prefix_is_read_and_reported_but_not_trained(model_path, stale):
    metrics = build(model_path, "suffix only").train_step(stale, 0).metrics
    newest = sum(int((s.versions() == s.versions().max()).sum()) for g in stale for s in g.samples)
    total = sum(s.length for g in stale for s in g.samples)
    assert metrics["tokens_trained"] == newest < total
    assert metrics["prefix_share"] == pytest.approx(1 - newest / total)
    assert 0 < metrics["prefix_weight_mean"] <= 2
    assert 0 < metrics["prefix_weight_capped"] < 1
    plain = learner_of(model_path).train_step(stale, 0).metrics
    assert plain["prefix_share"] == 0
    assert "prefix_weight_mean" not in plain


def test_decay_shifts_weight_to_fresh_groups_without_changing_the_scale(model_path, stale):
    metrics = build(model_path, "decay").train_step(stale, 0).metrics
    ages = np.array([VERSION - g.oldest_version for g in stale])
    weights = 2.0 ** (-ages / 2.0)
    weights /= weights.mean()
    assert metrics["decay_weight_min"] == pytest.approx(weights.min())
    assert metrics["decay_weight_max"] == pytest.approx(weights.max())
    assert metrics["staleness_group_mean"] == pytest.approx(ages.mean())


def test_equal_ages_make_decay_idle(model_path):
    groups = random_groups(model_path)
    options = AsynchronyOptions(half_life=1.0, max_staleness=8)
    decayed = gradient_of(learner_of(model_path, asynchrony=options), groups)
    assert torch.equal(decayed, gradient_of(learner_of(model_path), groups))


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_equal_rewards_move_nothing(model_path, stale, setting):
    """I10 under every weight, right after a real step."""
    fields = {**SETTINGS[setting][2]}
    fields.pop("kl", None)
    learner = learner_of(
        model_path, SETTINGS[setting][0], asynchrony=AsynchronyOptions(**SETTINGS[setting][1]), **fields
    )
    assert learner.train_step(stale, 0).stepped
    before = weights_of(learner)
    even = [replace(g, samples=tuple(replace(s, reward=1.0) for s in g.samples)) for g in stale]
    report = learner.train_step(even, 1)
    assert (report.stepped, report.published, learner.version) == (False, False, VERSION + 1)
    assert torch.equal(weights_of(learner), before)
    assert all(np.isfinite(v) for v in report.metrics.values())


def test_masked_answers_are_counted_and_keep_the_denominator(model_path):
    answers, rewards = [[4, 5], [6, 7], [8, 9]], [1.0, 0.0, 0.4]
    learner = learner_of(model_path, "tis", sequence_mask={"mode": "geometric", "low": 0.5, "high": 2.0})
    model = learner.model
    far = [reference_logprobs(model, [1, 2, 3], answer) + 0.3 for answer in answers]
    far[1] -= 9.0
    expected = torch.zeros_like(weights_of(learner)).double()
    values = learner_of(model_path, "tis").train_step([make_group(0, answers, rewards)], 0).advantages
    kept = 0
    for answer, recorded, a in zip(answers, far, next(iter(values.values())), strict=True):
        model.zero_grad()
        ids = torch.tensor([[1, 2, 3, *answer]])
        now = model(input_ids=ids).logits[0].log_softmax(-1)[2:-1].gather(-1, ids[0, 3:, None])[:, 0]
        logs = (now - torch.tensor(recorded)).detach()
        if 0.5 <= float(logs.mean().exp()) <= 2:
            kept += 1
            (-(logs.exp().clamp(max=2.0) * float(a) * now).sum() / 6).backward()
            expected += torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    model.zero_grad()
    got = gradient_of(learner, [make_group(0, answers, rewards, logprobs=far)])
    assert kept == 2
    assert relative(got.double(), expected) < 1e-4
    report = learner.train_step([make_group(0, answers, rewards, logprobs=far)], 0)
    assert report.metrics["sequence_masked"] == pytest.approx(1 - kept / 3)


def drifted(groups, shift):
    """Every fourth answer was sampled by a policy far away."""
    result = []
    for group in groups:
        samples = [
            replace(s, segments=tuple(replace(p, logprobs=p.logprobs - np.float32(shift)) for p in s.segments))
            if s.index % 4 == 0
            else s
            for s in group.samples
        ]
        result.append(replace(group, samples=tuple(samples)))
    return result


def test_guard_skips_a_batch_whose_weight_sits_on_few_tokens(model_path, stale):
    learner = learner_of(model_path, drift_guard={"action": "skip", "ess_floor": 0.5}, learning_rate=1e-5)
    assert learner.train_step(stale, 0).stepped
    before, version = weights_of(learner), learner.version
    report = learner.train_step(drifted(stale, 6.0), 1)
    assert not report.stepped
    assert not report.published
    assert learner.version == version
    assert torch.equal(weights_of(learner), before)
    assert report.metrics["guard_skipped"] == 1
    assert report.metrics["ess_tokens"] < 0.5
    assert report.alarms[0].startswith("step 1: the effective sample size")
    after = learner.train_step(stale, 2)
    assert after.stepped
    assert after.metrics["guard_skipped"] == 0
    assert after.alarms == ()


def test_guard_clips_weights_until_the_floor_holds(model_path, stale):
    far = drifted(stale, 6.0)
    learner = learner_of(model_path, drift_guard={"action": "clip", "ess_floor": 0.5}, behaviour_cap=1e6)
    report = learner.train_step(far, 0)
    assert report.stepped
    assert report.metrics["guard_clipped"] == 1
    assert 1 < report.metrics["guard_cap"] < 0.1 * np.exp(6)
    assert report.alarms
    # control: without the guard nothing is said, and the gradient is that of a few tokens
    wild = learner_of(model_path, behaviour_cap=1e6).train_step(far, 0)
    assert wild.alarms == ()
    assert wild.metrics["grad_norm"] > 10 * report.metrics["grad_norm"]


def test_guard_decides_once_for_all_minibatches(model_path, stale):
    verdicts = []
    for count in (1, 4):
        learner = learner_of(model_path, drift_guard={"action": "clip", "ess_floor": 0.9}, minibatches=count)
        verdicts.append(learner.train_step(stale, 0).metrics["guard_cap"])
    assert verdicts[0] == pytest.approx(verdicts[1], rel=1e-4)


def test_broken_logprobs_are_counted_and_alarmed(model_path, stale):
    group = stale[0]
    bad = replace(group.samples[1].segments[0], logprobs=group.samples[1].segments[0].logprobs * np.float32("nan"))
    broken = replace(group.samples[1], segments=(bad, *group.samples[1].segments[1:]))
    batch = [replace(group, samples=(group.samples[0], broken, *group.samples[2:])), *stale[1:]]
    learner = build(model_path, "everything")
    report = learner.train_step(batch, 0)
    assert report.stepped
    assert report.metrics["rejected_nonfinite"] == 1
    assert any("1 answers left the loss" in alarm for alarm in report.alarms)
    assert all(np.isfinite(v) for v in report.metrics.values())
    assert torch.isfinite(weights_of(learner)).all()


@pytest.mark.parametrize("algorithm", ["grpo", "decoupled_ppo", "gspo"])
def test_policy_before_the_batch_is_scored_once_for_all_minibatches(model_path, stale, algorithm, monkeypatch):
    """Prefix weights of the second minibatch come from weights that the first has already left."""
    seen = []
    original = module.token_weights

    def spy(batch, in_support, before, *rest):
        seen.append(before.clone())
        return original(batch, in_support, before, *rest)

    monkeypatch.setattr(module, "token_weights", spy)
    options = AsynchronyOptions(grad_tokens="current_only", max_staleness=8)
    for rate in (1e-2, 1e-12):
        learner_of(model_path, algorithm, asynchrony=options, minibatches=2, learning_rate=rate).train_step(stale, 0)
    moved, still = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(moved) >= 2
    for a, b in zip(moved, still, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_answers_of_different_minibatches_are_told_apart(model_path, stale):
    one, two = (learner_of(model_path, minibatches=n, learning_rate=1e-12).train_step(stale, 0).metrics for n in (1, 2))
    assert one["answers_trained"] == two["answers_trained"]
    assert one["ess"] == pytest.approx(two["ess"], rel=1e-3)
