"""The conductor's own code, whole, over worlds in which everything goes wrong at random."""

import asyncio
import collections
import random

import pytest
import ray

from pipelines import flow as flow_module
from pipelines.interruption import Interrupted
from storage.errors import UserError
from storage.ledger import Ledger
from storage.records import GroupKey
from tests.pipelines.flows.world import Dice, Run

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]


@pytest.fixture(autouse=True)
def ray_of_the_world(monkeypatch):
    monkeypatch.setattr(ray, "kill", lambda actor: actor.kill())
    monkeypatch.setattr(flow_module, "GET_DEADLINE_S", -0.49)


STREAM = ("asynchrony.pipeline=stream", "algorithm.name=decoupled_ppo")
TAIL = ("schedule.batching=tail", "schedule.overlaunch_prompts=1.5")
RESUME = (*TAIL, "asynchrony.max_staleness=2", "schedule.deferred=resume", "algorithm.name=decoupled_ppo")
COLOCATED = ("cluster.placement=colocated",)
SCHEDULES = {
    "all": (),
    "all skew-aware": ("schedule.dispatch=skew_aware",),
    "tail restart": (*TAIL, "schedule.deferred=restart"),
    "tail restart skew-aware": (*TAIL, "schedule.deferred=restart", "schedule.dispatch=skew_aware"),
    "tail resume": RESUME,
    "tail resume skew-aware": (*RESUME, "schedule.dispatch=skew_aware"),
    "tail second batching": (*RESUME, "schedule.second_batching=true"),
    "tail overlaunched samples": (*RESUME, "schedule.overlaunch_samples=1.7", "schedule.dispatch=skew_aware"),
    "tail stays": (*RESUME, "schedule.dispatch=skew_aware", "schedule.timeouts.tokens=3"),
    "all stays": ("asynchrony.max_staleness=1", "algorithm.name=decoupled_ppo", "schedule.timeouts.tokens=4"),
    "all colocated": COLOCATED,
    "tail restart colocated": (*TAIL, "schedule.deferred=restart", *COLOCATED),
    "tail resume colocated": (*RESUME, *COLOCATED),
    "tail stays colocated": (*RESUME, "schedule.timeouts.tokens=3", "schedule.overlaunch_samples=1.7", *COLOCATED),
    "stream 0": ("asynchrony.pipeline=stream",),
    "stream 1": (*STREAM, "asynchrony.max_staleness=1"),
    "stream 3 interrupt": (*STREAM, "asynchrony.max_staleness=3", "asynchrony.partial=interrupt"),
    "stream cancel early": (*STREAM, "asynchrony.max_staleness=1", "asynchrony.on_stale=cancel_early"),
    "stream drop": (*STREAM, "asynchrony.max_staleness=1", "asynchrony.on_stale=drop"),
    "stream fifo skew-aware": (
        *STREAM,
        "asynchrony.max_staleness=2",
        "asynchrony.consumption=fifo",
        "schedule.dispatch=skew_aware",
    ),
    "stream stays": (
        *STREAM,
        "asynchrony.max_staleness=2",
        "asynchrony.partial=interrupt",
        "schedule.dispatch=skew_aware",
        "schedule.timeouts.tokens=3",
    ),
}
CALM = {}
DEADLY = {"rollout_death": 0.02, "reward_death": 0.02, "reward_twice": 0.3, "slow_weights": 0.7}
HARSH = {**DEADLY, "payload_loss": 0.5, "no_version": 0.3, "failed_score": 0.05}


def bound(run):
    return run.config.asynchrony.max_staleness


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("weather", [CALM, DEADLY, HARSH], ids=["calm", "deadly", "harsh"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_group_is_trained_once_or_ended_and_nothing_leaks(schedule, weather, seed):
    async def play():
        async with Run(Dice(seed=seed, **weather), *SCHEDULES[schedule]) as run:
            await run.run(evaluate_every=5)
            run.check_end()
            await run.settle()
            run.check()
            assert all(0 <= age <= bound(run) for age in run.staleness)
            counts = run.ledger.counts()
            assert counts.launched == 48
            assert set(counts.ended) <= {"worker_crashed"}

    asyncio.run(play())


@pytest.mark.parametrize(
    "schedule",
    ["stream 1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("stream 3 interrupt", "stream stays"))],
)
def test_no_token_is_trained_beyond_the_bound_in_200_steps_with_stragglers(schedule):
    async def play():
        stragglers = Dice(seed=7, slow_weights=0.9, rollout_death=0.002)
        async with Run(stragglers, *SCHEDULES[schedule], rows=400) as run:
            await run.run()
            run.check_end()
            await run.settle()
            assert len(run.results) >= 200
            histogram = collections.Counter(run.staleness)
            assert max(histogram) == bound(run), "the bound was never reached: the stragglers do not straggle"
            assert min(histogram) >= 0

    asyncio.run(play())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("schedule", ["all", "tail resume", "stream 0", "stream 1", "stream 3 interrupt"])
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_groups_that_teach_nothing_end_and_no_step_waits_for_ever(schedule, share, seed):
    async def play():
        dynamic = ("algorithm.name=dapo", "algorithm.max_refills=1")
        overrides = [o for o in SCHEDULES[schedule] if not o.startswith("algorithm.name")]
        async with Run(Dice(seed=seed, equal_rewards=share), *overrides, *dynamic) as run:
            await run.run(steps=40)
            run.check_end()
            await run.settle()
            counts = run.ledger.counts()
            assert counts.ended["zero_variance"] > 0
            assert (counts.trained == 0) == (share == 1.0)

    asyncio.run(play())


@pytest.mark.parametrize("schedule", ["all", "stream 0", "stream 1"])
def test_step_gives_up_when_no_prompt_teaches_anything_and_prompts_never_end(schedule):
    async def play():
        overrides = [o for o in SCHEDULES[schedule] if not o.startswith("algorithm.name")]
        dynamic = ("algorithm.name=dapo", "algorithm.max_refills=2", "run.epochs=0")
        async with Run(Dice(equal_rewards=1.0), *overrides, *dynamic, epochs=None) as run:
            await run.run(steps=3)
            assert [result.keys for result in run.results] == [(), (), ()]
            for result in run.results:
                assert 3 * 4 <= result.filtered["zero_variance"] <= 3 * 4 + 8

    asyncio.run(play())


@pytest.mark.parametrize("schedule", ["all", "stream 1"])
def test_run_whose_every_score_fails_ends_with_the_reason(schedule):
    async def play():
        async with Run(Dice(failed_score=1.0), *SCHEDULES[schedule]) as run:
            with pytest.raises(UserError, match="no verdict"):
                await run.run(steps=3)

    asyncio.run(play())


@pytest.mark.parametrize("schedule", ["all skew-aware", "stream 1", "stream fifo skew-aware"])
def test_reward_worker_that_dies_behind_a_full_queue_stops_nothing(schedule):
    async def play():
        tight = ("cluster.queue_groups=1", "reward.workers=1")
        async with Run(Dice(seed=1, reward_death=0.2, deaths_left=4), *SCHEDULES[schedule], *tight) as run:
            await run.run(steps=8)
            assert run.flow.fleet.crashes == 4
            run.check()

    asyncio.run(play())


@pytest.mark.parametrize("seed", SEEDS)
def test_evaluation_of_a_stream_waits_for_the_newest_weights_everywhere(seed):
    async def play():
        dice = Dice(seed=seed, slow_weights=0.9)
        async with Run(dice, *SCHEDULES["stream 1"]) as run:
            for _ in range(5):
                await run.one_step()
                found = await run.evaluate()
                oldest = [h.oldest_version for group in found["heldout"].values() for h in group]
                assert oldest == [run.version] * 4

    asyncio.run(play())


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 12))])
@pytest.mark.parametrize("schedule", ["all", "tail resume skew-aware", "stream 1", "stream stays"])
def test_run_that_is_stopped_anywhere_goes_on_from_its_last_safe_point(schedule, seed, tmp_path):
    async def until_stopped():
        rng = random.Random(seed)
        ledger = Ledger(tmp_path / "ledger.jsonl")
        async with Run(Dice(seed=seed, **DEADLY), *SCHEDULES[schedule], ledger=ledger) as run:
            asyncio.get_running_loop().call_later(rng.random() * 0.15, run.stop.set)
            safe = await run.state()
            try:
                while not run.runner.exhausted:
                    safe = await run.state()
                    await run.one_step()
                    safe = await run.state()
                    if run.step % 3 == 0:
                        await run.evaluate()
            except Interrupted:
                async with asyncio.timeout(10):
                    await run.flow.abort()
            ledger.sync()
            ledger.close()
            return safe

    async def go_on(safe):
        ledger = Ledger.replay(tmp_path / "ledger.jsonl", safe["ledger_offset"])
        async with Run(Dice(seed=seed + 100), *SCHEDULES[schedule], ledger=ledger, saved=safe) as run:
            await run.run()
            run.check_end()
            counts = run.ledger.counts()
            assert counts.launched == 48
            for epoch in range(2):
                for prompt in range(24):
                    assert run.ledger.state(GroupKey("train", epoch, prompt)) in ("trained", "ended")
            ledger.close()

    asyncio.run(go_on(asyncio.run(until_stopped())))
