import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.learner import learner as module
from actors.learner.statistics import METRICS
from storage.errors import UserError
from storage.records import GroupKey
from tests.actors.learner.batches import (
    EOS,
    gradient_of,
    make_group,
    make_learner,
    random_groups,
    reference_logprobs,
    weights_of,
)

ALGORITHMS = ["grpo", "dr_grpo", "dapo", "decoupled_ppo", "tis", "gspo", "cispo"]


@pytest.fixture(scope="module")
def groups(model_path):
    return random_groups(model_path, groups=8, samples=4)


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradient_does_not_depend_on_microbatches_or_order(model_path, groups, algorithm):
    """One bin, a few bins, one answer per bin (no padding at all): the same gradient (I8)."""
    learner = make_learner(model_path, algorithm)
    whole = gradient_of(learner, groups)
    for budget in (16, 64, 200):
        other = make_learner(model_path, algorithm, tokens_per_microbatch=budget)
        assert relative(gradient_of(other, groups[::-1]), whole) < 1e-5
    assert whole.norm() > 1e-3


def test_gradient_of_a_minibatch_is_divided_by_its_own_counts(model_path, groups):
    two = gradient_of(make_learner(model_path, "dapo", minibatches=2), groups).view(2, -1)
    one = gradient_of(make_learner(model_path, "dapo"), groups)
    order = np.random.default_rng((0, 0)).permutation(8)
    tokens = [sum(s.length for i in part for s in groups[i].samples) for part in (order[:4], order[4:])]
    together = (two[0] * tokens[0] + two[1] * tokens[1]) / sum(tokens)
    assert relative(together, one) < 1e-5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradient_equals_a_loop_over_single_answers(model_path, groups, algorithm):
    """The whole path against ten lines: advantages by hand, one unpadded forward pass per answer, plain sums."""
    learner = make_learner(model_path, algorithm, max_tokens=24)
    got = gradient_of(learner, groups)
    model = learner.model
    model.zero_grad()
    answers = [(g, s, float(s.reward - np.mean([x.reward for x in g.samples]))) for g in groups for s in g.samples]
    spread = {g.key: np.std([s.reward for s in g.samples]) + 1e-4 for g in groups}
    tokens = sum(s.length for _, s, _ in answers)
    for group, sample, advantage in answers:
        if algorithm != "dr_grpo":
            advantage /= spread[group.key]
        ids = torch.tensor([[*group.prompt.token_ids.tolist(), *sample.token_ids().tolist()]])
        table = model(input_ids=ids).logits[0].log_softmax(-1)
        n = len(group.prompt.token_ids)
        logprobs = table[n - 1 : -1].gather(-1, ids[0, n:, None])[:, 0]
        ratio = (logprobs - torch.tensor(sample.logprobs())).exp()
        if algorithm in ("decoupled_ppo", "tis"):
            value = ratio.clamp(max=5.0 if algorithm == "decoupled_ppo" else 2.0).detach() * advantage * logprobs
        elif algorithm == "cispo":
            value = ratio.clamp(max=5.0).detach() * advantage * logprobs
        elif algorithm == "gspo":
            whole = ratio.log().mean().exp()
            value = torch.minimum(whole * advantage, whole.clamp(1 - 3e-4, 1 + 4e-4) * advantage)
        else:
            high = 1.28 if algorithm == "dapo" else 1.2
            value = torch.minimum(ratio * advantage, ratio.clamp(0.8, high) * advantage)
        if algorithm in ("grpo", "gspo"):
            loss = -value.mean() / len(answers)
        elif algorithm == "dr_grpo":
            loss = -value.sum() / (len(answers) * 24)
        else:
            loss = -value.sum() / tokens
        loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    assert relative(got, expected) < 1e-4


def test_zero_lag_decoupled_gradient_is_the_on_policy_gradient(model_path):
    fresh = random_groups(model_path, groups=4, drift=0.0)
    decoupled = gradient_of(make_learner(model_path, "decoupled_ppo"), fresh)
    on_policy = gradient_of(make_learner(model_path, "grpo", aggregation="token"), fresh)
    assert relative(decoupled, on_policy) < 1e-5


def test_padding_id_that_is_also_the_end_token_changes_nothing(model_path):
    """Answers end in id 0, the id that pads: relabelling ids so that they differ gives the same gradient norm."""
    group = make_group(0, [[4, 5, EOS], [6, EOS], [7, 8, 9, 3, 2, EOS]], [1.0, 0.0, 0.5])
    padded = gradient_of(make_learner(model_path), [group])
    alone = gradient_of(make_learner(model_path, tokens_per_microbatch=16), [group])  # three rows, no padding
    assert relative(padded, alone) < 1e-5
    # control: leaving the end token out of the record is a different gradient, so it was in the loss
    shorter = make_group(0, [[4, 5], [6], [7, 8, 9, 3, 2]], [1.0, 0.0, 0.5])
    assert relative(gradient_of(make_learner(model_path), [shorter]), padded) > 0.05


def test_environment_tokens_are_read_but_not_trained(model_path):
    answers, rewards = [[4, 5, 6, 7], [8, 9, 10, 11]], [1.0, 0.0]
    plain = make_group(0, answers, rewards)
    mixed = make_group(0, answers, rewards, environment=[(1, 2), ()])
    learner = make_learner(model_path, "dapo")
    whole, masked = gradient_of(learner, [plain]), gradient_of(learner, [mixed])
    assert relative(masked, whole) > 0.05
    assert learner.train_step([mixed], 0).metrics["tokens_trained"] == 6


def test_truncation_is_read_from_the_record(model_path):
    """Equal tokens, so nothing but finish_reason tells a cut answer from one that ended."""
    answers, rewards = [[4, 5, EOS]] * 3, [1.0, 0.0, 0.5]
    learner = make_learner(model_path, overlong={"mode": "mask"})
    cut = make_group(0, answers, rewards, finish=["length", "stop", "stop"])
    report = learner.train_step([cut], 0)
    assert report.metrics["truncated_fraction"] == pytest.approx(1 / 3)
    assert report.advantages[cut.key][0] == 0
    assert report.advantages[cut.key][1] < 0
    assert report.metrics["answers_trained"] == 1  # the third sits on the mean of all three
    whole = make_learner(model_path, overlong={"mode": "mask"}).train_step([make_group(0, answers, rewards)], 0)
    assert whole.advantages[cut.key][0] > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_rewards_move_nothing(model_path, algorithm):
    """I10, also right after a real step, when Adam has momentum to drift on."""
    learner = make_learner(model_path, algorithm)
    assert learner.train_step(random_groups(model_path), 0).stepped
    before, version = weights_of(learner), learner.version
    report = learner.train_step(random_groups(model_path, noise_rewards=False), 1)
    assert not report.stepped
    assert report.metrics["zero_variance_groups"] == 4
    assert report.metrics["updates"] == report.metrics["tokens_trained"] == 0
    assert learner.version == version == 1
    assert torch.equal(weights_of(learner), before)


def test_equal_rewards_still_feel_a_kl_term(model_path, groups):
    learner = make_learner(model_path, kl={"coefficient": 0.5})
    learner.train_step(groups, 0)  # away from the reference
    report = learner.train_step(random_groups(model_path, noise_rewards=False), 1)
    assert report.stepped
    assert report.metrics["kl_reference"] > 0


def test_kl_term_pulls_back_to_the_reference(model_path, groups):
    def divergence(coefficient):
        learner = make_learner(model_path, kl={"coefficient": coefficient}, learning_rate=3e-3)
        return [learner.train_step(groups, step).metrics["kl_reference"] for step in range(12)][-1]

    assert divergence(10.0) < 0.5 * divergence(1e-3)


def test_answers_without_reward_leave_loss_and_denominator(model_path):
    good = [[4, 5], [6, 7, 8]]
    learner = make_learner(model_path, "dapo")
    clean = gradient_of(learner, [make_group(0, good, [1.0, 0.0])])
    dirty = make_group(0, [*good, [9, 9, 9], [2]], [1.0, 0.0, 9.0, 9.0], status=["ok", "ok", "timeout", "abstained"])
    assert relative(gradient_of(learner, [dirty]), clean) < 1e-5
    metrics = learner.train_step([dirty], 0).metrics
    assert (metrics["reward_errors"], metrics["reward_abstained"], metrics["reward_mean"]) == (1, 1, 0.5)


def test_answer_with_broken_logprobs_is_rejected_and_still_counted_below_the_line(model_path):
    good, rewards = [[4, 5], [6, 7, 8], [9, 9]], [1.0, 0.0, 0.4]
    logprobs = [[-1.0] * len(a) for a in good]
    broken = [*logprobs[:2], [-1.0, float("nan")]]
    learner = make_learner(model_path, "dapo")
    report_group = make_group(0, good, rewards, logprobs=broken)
    got = gradient_of(learner, [report_group])
    # reference: same advantages and token count, the third answer without weight
    whole = make_group(0, good, rewards, logprobs=logprobs)
    values = make_learner(model_path, "dapo").train_step([whole], 0).advantages[whole.key]
    expected = torch.zeros_like(got)
    for answer, lp, value in zip(good[:2], logprobs[:2], values[:2], strict=True):
        model = learner.model
        model.zero_grad()
        ids = torch.tensor([[1, 2, 3, *answer]])
        now = model(input_ids=ids).logits[0].log_softmax(-1)[2:-1].gather(-1, ids[0, 3:, None])[:, 0]
        ratio = (now - torch.tensor(lp)).exp()
        (-torch.minimum(ratio * value, ratio.clamp(0.8, 1.28) * value).sum() / 7).backward()
        expected += torch.cat([p.grad.flatten() for p in model.parameters()])
    learner.model.zero_grad()
    assert relative(got, expected) < 1e-4
    metrics = learner.train_step([report_group], 0).metrics
    assert metrics["rejected_nonfinite"] == 1
    assert all(np.isfinite(v) for v in metrics.values())


def test_gradient_that_is_not_finite_skips_the_update(model_path, groups):
    learner = make_learner(model_path)
    with torch.no_grad():
        learner.model.model.norm.weight[0] = float("nan")
    before = {name: tensor.clone() for name, tensor in learner.state().items()}
    report = learner.train_step(groups, 0)
    assert not report.stepped
    assert learner.version == 0
    assert report.metrics["skipped_nonfinite"] == 1
    for name, tensor in learner.state().items():
        assert torch.equal(tensor, before[name]) or "norm" in name


def test_proximal_policy_is_the_one_before_the_first_update(model_path, groups, monkeypatch):
    """With two minibatches the second is anchored on weights that the first has already left."""
    seen = []
    original = module.token_losses

    def spy(logprobs, **kwargs):
        seen.append((logprobs.detach().clone(), kwargs["proximal"]))
        return original(logprobs, **kwargs)

    monkeypatch.setattr(module, "token_losses", spy)
    learner = make_learner(model_path, "decoupled_ppo", minibatches=2, learning_rate=1e-2)
    learner.train_step(groups, 0)
    (first, first_anchor), (second, second_anchor) = seen
    torch.testing.assert_close(first_anchor, first, atol=1e-5, rtol=0)
    assert (second - second_anchor).abs().max() > 1e-2
    seen.clear()
    make_learner(model_path, "decoupled_ppo", minibatches=2, learning_rate=1e-12).train_step(groups, 0)
    torch.testing.assert_close(seen[1][0], second_anchor, atol=1e-5, rtol=0)


def test_single_update_needs_no_proximal_pass(model_path, groups):
    metrics = make_learner(model_path, "decoupled_ppo").train_step(groups, 0).metrics
    assert metrics["seconds_proximal"] == 0
    assert make_learner(model_path, "tis", minibatches=2).train_step(groups, 0).metrics["seconds_proximal"] > 0


def test_version_rises_once_per_batch_however_many_updates(model_path, groups):
    learner = make_learner(model_path, minibatches=4)
    report = learner.train_step(groups, 0)
    assert report.metrics["updates"] == 4
    assert learner.version == 1


def test_more_minibatches_than_groups_is_harmless(model_path, groups):
    report = make_learner(model_path, minibatches=16).train_step(groups[:2], 0)
    assert report.metrics["updates"] == 2


def test_metrics_are_documented_and_right(model_path, groups):
    learner = make_learner(model_path, "decoupled_ppo", kl={"coefficient": 0.1}, dual_clip=3.0)
    metrics = learner.train_step(groups, 0).metrics
    conditional = {"prefix_weight_mean", "prefix_weight_capped", "guard_cap"}
    families = {name: re.sub(r"/.*", "/<versions>", name) for name in metrics}
    assert set(families.values()) == set(METRICS) - conditional
    model = make_learner(model_path).model
    current = [reference_logprobs(model, g.prompt.token_ids, s.token_ids()) for g in groups for s in g.samples]
    behaviour = [s.logprobs() for g in groups for s in g.samples]
    d = np.concatenate(current).astype(np.float64) - np.concatenate(behaviour)
    ratio = np.exp(d)
    assert metrics["ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-4)
    assert metrics["ratio_p99"] == pytest.approx(np.quantile(ratio, 0.99), rel=1e-3)
    assert metrics["ratio_outside"] == pytest.approx(((ratio < 0.9) | (ratio > 1.1)).mean(), abs=0.02)
    assert metrics["kl_behaviour"] == pytest.approx((ratio - d - 1).mean(), rel=1e-3)
    assert metrics["behaviour_weight_mean"] == pytest.approx(np.minimum(ratio, 5).mean(), rel=1e-4)
    weights = np.exp([x.astype(np.float64).sum() - b.sum() for x, b in zip(current, behaviour, strict=True)])
    assert metrics["ess"] == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / len(weights), rel=1e-3)
    assert metrics["entropy_sampled"] == pytest.approx(-np.concatenate(behaviour).mean(), rel=1e-5)
    assert metrics["tokens_trained"] == len(d)
    assert metrics["length_mean"] == pytest.approx(np.mean([len(b) for b in behaviour]))
    assert metrics["kl_reference"] == pytest.approx(0, abs=1e-6)
    assert metrics["grad_norm"] > 0


def test_staleness_is_counted_per_token(model_path):
    learner = make_learner(model_path)
    learner.version = 5
    group = make_group(0, [[4, 5, 6], [7]], [1.0, 0.0], version=[3, 5])
    metrics = learner.train_step([group], 0).metrics
    assert metrics["staleness_max"] == 2
    assert metrics["staleness_mean"] == pytest.approx((3 * 2 + 0) / 4)


def test_wrong_records_are_named(model_path):
    learner = make_learner(model_path)
    group = make_group(3, [[4], [5]], [1.0, 0.0])
    with pytest.raises(ValueError, match="train/e0/p3/d0 occurs twice"):
        learner.train_step([group, group], 0)
    with pytest.raises(ValueError, match="version 1; the learner is on version 0"):
        learner.train_step([make_group(3, [[4], [5]], [1.0, 0.0], version=[0, 1])], 0)
    stranger = replace(group.samples[0], key=GroupKey("train", 0, 9))
    with pytest.raises(ValueError, match="sample 0 of group train/e0/p3/d0 says that it belongs to group train/e0/p9"):
        learner.train_step([replace(group, samples=(stranger, group.samples[1]))], 0)
    with pytest.raises(ValueError, match="same sibling twice"):
        learner.train_step([replace(group, samples=(group.samples[0],) * 2)], 0)
    assert learner.version == 0


def test_empty_answer_and_empty_batch_are_harmless(model_path):
    learner = make_learner(model_path)
    report = learner.train_step([make_group(0, [[], [4]], [0.0, 1.0])], 0)
    assert report.metrics["answers_trained"] == 1
    assert not learner.train_step([], 1).stepped


def test_missing_gpu_is_a_user_error(model_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"learner\.device=cuda"):
        module.saving.resolve_device("cuda")


def test_recomputed_activations_give_the_same_gradient(model_path, groups):
    plain = gradient_of(make_learner(model_path, gradient_checkpointing=False), groups)
    assert relative(gradient_of(make_learner(model_path, gradient_checkpointing=True), groups), plain) < 1e-5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_policy_learns_a_bandit(model_path, algorithm):
    """Reward is the share of id 5 among three tokens; chance level is 1/13."""
    learner = make_learner(model_path, algorithm, learning_rate=1e-2, minibatches=2, max_tokens=3)
    generator = torch.Generator().manual_seed(0)
    history, shares = [], []
    for step in range(16):
        groups = []
        for number in range(4):
            prompt = [1, 2 + number]
            ids = torch.tensor([prompt] * 8)
            logprobs = torch.zeros(8, 0)
            for _ in range(3):
                with torch.no_grad():
                    table = learner.model(input_ids=ids).logits[:, -1].log_softmax(-1)
                token = torch.multinomial(table.exp(), 1, generator=generator)
                logprobs = torch.cat([logprobs, table.gather(-1, token)], 1)
                ids = torch.cat([ids, token], 1)
            answers = ids[:, 2:].tolist()
            rewards = [a.count(5) / 3 for a in answers]
            versions = [learner.version] * 8
            groups.append(
                make_group(number, answers, rewards, prompt=prompt, logprobs=logprobs.tolist(), version=versions)
            )
        report = learner.train_step(groups, step)
        history.append(report.metrics["reward_mean"])
        shares.append(report.metrics.get("ess", 1.0))  # absent once every group is solved
    assert np.mean(history[:2]) < 0.35
    assert np.mean(history[-2:]) > 0.8
    assert max(shares) <= 1 + 1e-9
    assert np.mean(shares) > 0.7
