"""Several learners take the same steps as one: two and three processes over gloo, whole models and models in pieces."""

from pathlib import Path

import numpy as np
import pytest
import torch

from actors.learner.asynchrony_options import AsynchronyOptions
from actors.learner.learner import Learner
from actors.learner.options import AlgorithmOptions, LearnerOptions
from actors.learner.packing import deal_by_load
from actors.learner.ranks import Ranks
from actors.learner.sharding import gathered, whole
from storage.errors import UserError
from tests.actors.learner.batches import make_group, random_groups
from tests.actors.learner.rank_pool import RankPool

KNOWN = AlgorithmOptions.model_fields
# Each group of ranks divides the work in its own way, and times differ anyway.
OWN = ("seconds_", "microbatches", "padding_share")
GROUPS = [(2, "ddp"), (3, "ddp"), (2, "fsdp"), (3, "fsdp")]
QUICK = {(2, "ddp", "grpo", 2), (3, "ddp", "gspo", 1), (2, "fsdp", "gspo", 2), (3, "fsdp", "decoupled_ppo", 1)}
VARIANTS = [
    pytest.param(*variant, marks=() if variant in QUICK else pytest.mark.slow)
    for variant in (
        (count, parallel, algorithm, minibatches)
        for count, parallel in GROUPS
        for algorithm in ("grpo", "decoupled_ppo", "gspo")
        for minibatches in (1, 2)
    )
]


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    made = {count: RankPool(count, tmp_path_factory.mktemp(f"ranks{count}")) for count in (2, 3)}
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture(scope="module")
def batches(model_path):
    return [random_groups(model_path, groups=4, samples=4, seed=seed, longest=30) for seed in range(3)]


def build(ranks, path, algorithm, *, asynchrony=None, **fields):
    return Learner(
        path,
        LearnerOptions(device="cpu", **{k: v for k, v in fields.items() if k not in KNOWN}),
        AlgorithmOptions(name=algorithm, **{k: v for k, v in fields.items() if k in KNOWN}),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_tokens=32,
        seed=0,
        total_steps=10,
        asynchrony=None if asynchrony is None else AsynchronyOptions(**asynchrony),
        ranks=ranks,
    )


def flat(state):
    return torch.cat([tensor.reshape(-1) for tensor in state.values()]).numpy() if state else None


def train(ranks, path, algorithm, batches, fields, first=0, load=None, save=None):
    """Train and return what can be compared: gradients of each update, metrics, published weights, versions."""
    learner = build(ranks, path, algorithm, **fields)
    if load is not None:
        learner.load(load)
    gradients, original = [], learner._optimiser.step

    def step():
        parts = [None if p.grad is None else whole(p.grad).reshape(-1).clone() for p in learner.model.parameters()]
        gradients.append(torch.cat([part for part in parts if part is not None]).numpy())
        return original()

    learner._optimiser.step = step
    reports = [learner.train_step(groups, first + i) for i, groups in enumerate(batches)]
    if save is not None:
        learner.save_model(Path(save) / "model")
        learner.save(Path(save) / "learner")
    return {
        "gradients": gradients,
        "metrics": [{k: v for k, v in r.metrics.items() if not k.startswith(OWN)} for r in reports],
        "passes": [r.metrics["microbatches"] for r in reports],
        "weights": flat(gathered(learner.state(), keep=True)),
        "published": flat(learner.published()),
        "version": learner.version,
        "alarms": [r.alarms for r in reports],
        "bytes": sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in learner.model.parameters()),
    }


def distance(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def same(several, one):
    """Assert that what every rank says equals what a single learner says, to 1e-5."""
    leader = several[0]
    for result in several:
        assert len(result["gradients"]) == len(one["gradients"])
        for ours, theirs in zip(result["gradients"], one["gradients"], strict=True):
            assert distance(ours, theirs) < 1e-5
        np.testing.assert_array_equal(result["weights"], leader["weights"])
        assert result["version"] == one["version"]
    assert distance(leader["weights"], one["weights"]) < 1e-5
    assert distance(leader["published"], one["published"]) < 1e-5
    assert [r["published"] is None for r in several] == [False] + [True] * (len(several) - 1)
    for ours, theirs in zip(leader["metrics"], one["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name
    assert leader["alarms"] == one["alarms"]


@pytest.mark.parametrize(("count", "parallel", "algorithm", "minibatches"), VARIANTS)
def test_three_steps_are_those_of_one_learner(pools, model_path, batches, count, parallel, algorithm, minibatches):
    fields = {"minibatches": minibatches, "tokens_per_microbatch": 64, "parallel": parallel}
    one = train(None, model_path, algorithm, batches, fields)
    several = pools[count].run(train, model_path, algorithm, batches, fields)
    same(several, one)
    assert len(one["gradients"]) == 3 * minibatches
    if parallel == "fsdp":
        assert max(r["bytes"] for r in several) < one["bytes"] / count * 1.1


def test_averaged_gradients_would_be_noticed(pools, model_path, batches):
    """Negative control: what half the gradient does to the weights is far outside the tolerance."""
    fields = {"tokens_per_microbatch": 64}
    one = train(None, model_path, "grpo", batches[:1], fields)
    halved = pools[2].run(train_with_averages, model_path, batches[:1], fields)
    assert distance(halved[0]["gradients"][0], one["gradients"][0]) > 0.4


def train_with_averages(ranks, path, batches, fields):
    original = Ranks.sum_gradients

    def averaged(self, parameters):
        original(self, parameters)
        for parameter in parameters:
            parameter.grad /= self.count

    Ranks.sum_gradients = averaged
    try:
        return train(ranks, path, "grpo", batches, fields)
    finally:
        Ranks.sum_gradients = original


EVERYTHING = {
    "asynchrony": {"grad_tokens": "current_only", "half_life": 3.0, "max_staleness": 8},
    "sequence_mask": {"mode": "max", "low": 0.3, "high": 3.0},
    "drift_guard": {"action": "clip", "ess_floor": 0.95},
    "kl": {"coefficient": 0.1},
    "behaviour_cap_negative": 1.2,
    "minibatches": 2,
    "tokens_per_microbatch": 64,
    "max_grad_norm": 0.05,
    "weight_decay": 0.1,
    "gradient_checkpointing": True,
}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_guard_reference_masks_and_clipping_act_on_the_whole_batch(pools, model_path, batches, parallel):
    fields = {**EVERYTHING, "parallel": parallel}
    one = train(None, model_path, "decoupled_ppo", batches, fields)
    same(pools[2].run(train, model_path, "decoupled_ppo", batches, fields), one)
    assert one["metrics"][0]["guard_clipped"] == 1
    assert one["metrics"][0]["grad_norm"] > 0.05
    assert one["metrics"][1]["kl_reference"] > 0


@pytest.mark.parametrize(
    ("count", "parallel"),
    [pytest.param(*group, marks=pytest.mark.slow if group in GROUPS[1:3] else ()) for group in GROUPS],
)
def test_ranks_without_data_keep_up(pools, model_path, batches, count, parallel):
    """A batch of which one answer has a gradient, one of which none has, and an ordinary one after them."""
    lonely = [make_group(0, [[4, 5, 6], [7]], [1.0, 0.0], logprobs=[[-1.0, -1.0, -1.0], [float("nan")]])]
    idle = random_groups(model_path, groups=2, noise_rewards=False)
    steps = [lonely, idle, batches[0]]
    fields = {"parallel": parallel, "tokens_per_microbatch": 64}
    one = train(None, model_path, "grpo", steps, fields)
    several = pools[count].run(train, model_path, "grpo", steps, fields)
    same(several, one)
    assert one["metrics"][0]["answers_trained"] == 1
    assert several[0]["passes"][0] == 1
    assert (one["version"], len(one["gradients"])) == (2, 2)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_very_unequal_answers_and_single_answer_passes(pools, model_path, parallel):
    rng = np.random.default_rng(0)
    answers = [rng.integers(0, 13, n).tolist() for n in (60, 1, 1, 2, 1, 3)]
    group = make_group(0, answers, rng.normal(size=6).tolist())
    fields = {"parallel": parallel, "tokens_per_microbatch": 16}
    one = train(None, model_path, "dr_grpo", [[group]], fields)
    several = pools[3].run(train, model_path, "dr_grpo", [[group]], fields)
    same(several, one)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradient_that_is_not_finite_on_one_rank_skips_the_update_on_all(pools, model_path, batches, parallel):
    results = pools[2].run(train_with_a_broken_rank, model_path, batches[0], parallel)
    assert results == [(False, 0, True)] * 2


def train_with_a_broken_rank(ranks, path, groups, parallel):
    learner = build(ranks, path, "grpo", parallel=parallel, tokens_per_microbatch=64)
    before = flat(gathered(learner.state(), keep=True))
    if ranks.rank == 1:
        real = torch.autograd.backward
        torch.autograd.backward = lambda loss: real(loss * float("nan"))
    try:
        report = learner.train_step(groups, 0)
    finally:
        if ranks.rank == 1:
            torch.autograd.backward = real
    after = flat(gathered(learner.state(), keep=True))
    return report.stepped, learner.version, bool((before == after).all())


@pytest.mark.parametrize(
    ("parallel", "then"),
    [
        ("ddp", 1),
        ("ddp", 2),
        pytest.param("ddp", 3, marks=pytest.mark.slow),
        pytest.param("fsdp", 1, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, marks=pytest.mark.slow),
        ("fsdp", 3),
    ],
)
def test_checkpoint_continues_with_any_number_of_learners(pools, model_path, batches, tmp_path, parallel, then):
    """Saved by two, continued by one, two or three; with two again bit for bit."""
    fields = {
        "minibatches": 2,
        "tokens_per_microbatch": 64,
        "parallel": parallel,
        "kl": {"coefficient": 0.1},
        "asynchrony": {"publish_blend": 0.5},
    }
    straight = pools[2].run(train, model_path, "tis", batches, fields)[0]
    pools[2].run(train, model_path, "tis", batches[:2], fields, 0, None, tmp_path)
    assert {p.name for p in (tmp_path / "learner").iterdir()} == {
        "trainer.pt",
        "reference.safetensors",
        "published.safetensors",
    }
    arguments = (tmp_path / "model", "tis", batches[2:], fields, 2, tmp_path / "learner")
    resumed = (pools[then].run(train, *arguments) if then > 1 else [train(None, *arguments)])[0]
    assert resumed["version"] == straight["version"] == 3
    assert distance(resumed["weights"], straight["weights"]) < 1e-5
    assert distance(resumed["published"], straight["published"]) < 1e-5
    if then == 2:
        np.testing.assert_array_equal(resumed["weights"], straight["weights"])
        np.testing.assert_array_equal(resumed["published"], straight["published"])
        assert resumed["metrics"][-1] == straight["metrics"][-1]


def test_checkpoint_of_one_learner_continues_in_pieces(pools, model_path, batches, tmp_path):
    fields = {"tokens_per_microbatch": 64, "weight_decay": 0.01}
    straight = train(None, model_path, "grpo", batches, fields)
    train(None, model_path, "grpo", batches[:2], fields, save=tmp_path)
    again = pools[3].run(
        train, tmp_path / "model", "grpo", batches[2:], {**fields, "parallel": "fsdp"}, 2, tmp_path / "learner"
    )
    assert distance(again[0]["weights"], straight["weights"]) < 1e-5


def test_ranks_that_find_other_weights_are_named(pools, model_path, tmp_path):
    other = tmp_path / "other"
    train(None, model_path, "grpo", [random_groups(model_path)], {}, save=other)
    for message in pools[2].run(build_with, [str(model_path), str(other / "model")]):
        assert "holds other weights for learner 1 than for learner 0" in message


def build_with(ranks, paths):
    try:
        build(ranks, paths[ranks.rank], "grpo")
    except UserError as error:
        return str(error)
    return ""


def test_learners_that_drifted_apart_write_no_checkpoint(pools, model_path, tmp_path):
    for message in pools[2].run(drift_and_save, model_path, tmp_path):
        assert "do not hold the same weights" in message
    assert not (tmp_path / "learner").exists()


def drift_and_save(ranks, path, directory):
    learner = build(ranks, path, "grpo")
    with torch.no_grad():
        next(iter(learner.state().values()))[0] += ranks.rank
    try:
        learner.save(directory / "learner")
    except RuntimeError as error:
        return str(error)
    return ""


def test_gradients_that_no_rank_has_stay_absent(pools):
    for present, values in pools[2].run(sum_of_some_gradients):
        assert present == [True, False, True]
        assert values == [3.0, 3.0]


def sum_of_some_gradients(ranks):
    parameters = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    parameters[0].grad = torch.full((2,), ranks.rank + 1.0)
    if ranks.rank == 1:
        parameters[2].grad = torch.full((2,), 3.0)
    ranks.sum_gradients(parameters)
    return [p.grad is not None for p in parameters], [float(parameters[i].grad[0]) for i in (0, 2)]


def test_large_gradients_cross_in_several_messages(pools):
    for result in pools[2].run(sum_in_small_buckets):
        assert result == [3.0 * i for i in range(5)]


def sum_in_small_buckets(ranks):
    from actors.learner import ranks as module

    module._BUCKET_ELEMENTS, before = 8, module._BUCKET_ELEMENTS
    try:
        parameters = [torch.zeros(n, requires_grad=True) for n in (3, 20, 4, 1, 8)]
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, float(i * (ranks.rank + 1)))
        ranks.sum_gradients(parameters)
    finally:
        module._BUCKET_ELEMENTS = before
    assert all((p.grad == p.grad[0]).all() for p in parameters)
    return [float(p.grad[0]) for p in parameters]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_are_balanced_by_tokens_and_lose_nothing(ranks):
    rng = np.random.default_rng(ranks)
    for count in (0, 1, 5, 200):
        lengths = np.clip(rng.lognormal(4, 1, count), 1, 2000).astype(int).tolist()
        shares = deal_by_load(lengths, ranks)
        assert len(shares) == ranks
        assert sorted(i for share in shares for i in share) == list(range(count))
        assert all(share == sorted(share) for share in shares)
        loads = [sum(lengths[i] for i in share) for share in shares]
        assert max(loads) - min(loads) <= max(lengths, default=0)
    assert deal_by_load([5, 5, 5, 5], 2) == [[0, 2], [1, 3]]
