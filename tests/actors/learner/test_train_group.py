"""The worker group behind its front actor, with real Ray Train: same answers as one learner, and a clear end."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray.util.queue import Queue

from actors import turns
from actors.bundles import Bundle, GroupEnvelope, RateEnvelope, SaveEnvelope, StepEnvelope, StopEnvelope
from actors.learner import train_group
from actors.learner.options import AlgorithmOptions, LearnerOptions
from actors.learner.train_group import LearnerGroup, LearnerGroupError
from actors.turns import TurnOver
from actors.weights import unpack, verify
from storage.errors import UserError
from tests.actors.learner.batches import make_learner, random_groups
from tests.runs import small_run, steps_of, trained_keys

DEADLINE_S = 120.0


class Group:
    """A front actor and its queue, driven as the conductor drives a learner."""

    def __init__(self, path, resume=None, algorithm="grpo", **options):
        remote = ray.remote(concurrency_groups=train_group.CONCURRENCY_GROUPS)(LearnerGroup)
        self.actor = remote.options(num_cpus=0).remote(
            str(path),
            LearnerOptions(device="cpu", threads=1, tokens_per_microbatch=64, **options),
            AlgorithmOptions(name=algorithm),
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_tokens=24,
            seed=0,
            total_steps=10,
            resume_directory=None if resume is None else str(resume),
        )
        wait_until_it_answers(self.actor)
        ray.get(self.actor.__ray_call__.remote(lambda _: setattr(turns, "PAIRS_A_TURN", 2)))
        self.queue = Queue(actor_options={"num_cpus": 0})
        self._begin_turn()

    def _begin_turn(self):
        self.stream = self.actor.run.options(num_returns="streaming").remote(self.queue)

    def put(self, envelope):
        self.queue.put(envelope)

    def step(self, number, groups):
        samples = tuple(sample for group in groups for sample in group.samples)
        ref = ray.put(Bundle(samples=samples, prompts={group.key: group.prompt for group in groups}))
        envelopes, position = [], 0
        for group in groups:
            places = tuple((0, position + i) for i in range(len(group.samples)))
            envelopes.append(GroupEnvelope(key=group.key, places=places, refs=[ref]))
            position += len(group.samples)
        self.put(StepEnvelope(step=number, groups=tuple(envelopes)))

    def next(self):
        """The next header and the reference to its payload."""
        ready, _ = ray.wait([self.stream], timeout=DEADLINE_S)
        assert ready, "the group does not answer"
        header, payload = ray.get(next(self.stream)), next(self.stream)
        if not isinstance(header, TurnOver):
            return header, payload
        self._begin_turn()
        return self.next()

    def close(self):
        ray.kill(self.actor)
        self.queue.shutdown(force=True)


def wait_until_it_answers(actor):
    """A fresh actor may be out of reach for a moment; a call that streams would be lost with its connection."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            ray.get(actor.health.remote(), timeout=DEADLINE_S)
            return
        except ray.exceptions.ActorUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.fixture
def groups_of_ranks(ray_session):
    made = []

    def make(*args, **kwargs):
        made.append(Group(*args, **kwargs))
        return made[-1]

    yield make
    for group in made:
        group.close()


def relative(a, b):
    return float((a - b).norm() / b.norm())


def flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def ranks_of_this_ray():
    """Process ids of the living ranks."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it may end while it is looked at
            if "RayTrainWorker" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_group_answers_like_one_learner(groups_of_ranks, model_path, tmp_path, parallel):
    """Ready, three steps with a change of rate and an idle batch among them, a checkpoint, the end."""
    batches = [random_groups(model_path, groups=3, samples=3, seed=seed) for seed in range(2)]
    batches.insert(1, random_groups(model_path, groups=2, noise_rewards=False))
    one = make_learner(model_path, tokens_per_microbatch=64)
    group = groups_of_ranks(model_path, workers=2, parallel=parallel)
    header, ref = group.next()
    assert (header.kind, header.version) == ("ready", 0)
    verify(header.manifest, ray.get(ref))
    for number, batch in enumerate(batches):
        if number == 2:
            group.put(RateEnvelope(learning_rate=1e-2))
            one.set_learning_rate(1e-2)
        group.step(number, batch)
        header, ref = group.next()
        report = one.train_step(batch, number)
        assert (header.kind, header.step, header.version) == ("trained", number, one.version)
        for name in ("reward_mean", "tokens_trained", "answers_trained", "grad_norm", "learning_rate"):
            assert header.metrics[name] == pytest.approx(report.metrics[name], rel=1e-4), name
        assert {key: values.tolist() for key, values in header.advantages.items()} == {
            key: values.tolist() for key, values in report.advantages.items()
        }
        if report.published:
            buffer = ray.get(ref)
            verify(header.manifest, buffer)
            assert relative(flat(unpack(header.manifest, buffer)), flat(one.state())) < 1e-5
        else:
            assert header.manifest is None
            assert ray.get(ref) is None
    assert ray.get(group.actor.health.remote()) == {"version": 2.0, "learners": 2.0}
    group.put(SaveEnvelope(directory=str(tmp_path)))
    header, _ = group.next()
    assert (header.kind, header.directory) == ("saved", str(tmp_path))
    group.put(StopEnvelope())
    with pytest.raises(StopIteration):
        next(group.stream)
    assert ranks_of_this_ray() == []
    again = make_learner(tmp_path / "model")
    again.load(tmp_path / "learner")
    assert again.version == 2
    assert relative(flat(again.state()), flat(one.state())) < 1e-5


@pytest.mark.parametrize("moment", [pytest.param("idle", marks=pytest.mark.slow), "working"])
def test_killed_rank_ends_the_group_with_its_number_and_weights_outlive_it(groups_of_ranks, model_path, moment):
    """What the front yielded belongs to its caller: neither a rank's nor the front's death takes it away."""
    group = groups_of_ranks(model_path, workers=2)
    ready, ref = group.next()
    pids = ranks_of_this_ray()
    assert len(pids) == 2
    if moment == "working":  # the rank stands still, so that the other one waits for it in an exchange
        os.kill(pids[1], signal.SIGSTOP)
        group.step(0, random_groups(model_path))
        time.sleep(1)
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        group.next()
    assert isinstance(caught.value.cause, LearnerGroupError)
    assert "of 2 died; what was trained since the last checkpoint is lost" in str(caught.value.cause)
    assert time.monotonic() - began < 60
    assert ranks_of_this_ray() == []
    ray.kill(group.actor)
    verify(ready.manifest, ray.get(ref, timeout=30))


@pytest.mark.slow
def test_what_the_user_can_mend_arrives_as_it_was_raised(groups_of_ranks, model_path, tmp_path):
    group = groups_of_ranks(model_path, resume=tmp_path / "nothing", workers=2)
    with pytest.raises(UserError, match=r"cannot read .*nothing/trainer\.pt"):
        group.next()


def test_run_with_two_learners_is_the_run_with_one(ray_session, random_llama, tmp_path):
    """The whole program: the same prompts in the same order, the same first rewards, weights that agree."""
    shared = ("run.steps=2", "reward.functions=[{function: tests.reward_functions.varied}]", "evaluation.after=false")
    runs = [
        small_run(random_llama, tmp_path, name, *shared, f"learner.workers={workers}")
        for name, workers in (("one", 1), ("two", 2))
    ]
    assert trained_keys(runs[0]) == trained_keys(runs[1])
    first, second = (steps_of(run) for run in runs)
    assert len(first) == len(second) == 2
    for name in ("reward/mean", "learner/grad_norm", "learner/tokens_trained", "learner/entropy"):
        assert second[0][name] == pytest.approx(first[0][name], rel=1e-4), name
    weights = [newest_weights(run) for run in runs]
    assert relative(weights[1], weights[0]) < 1e-4


def newest_weights(run: Path):
    from safetensors.torch import load_file

    newest = max((run / "checkpoints").glob("step_*"), key=lambda path: path.name)
    return flat(dict(sorted(load_file(newest / "model" / "model.safetensors").items())))
