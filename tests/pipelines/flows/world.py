"""A cluster that is not there: rollout and reward actors whose every step a seeded dice decides.

They keep to the protocols of the real ones (streaming generators of header and payload, control calls, deaths), so the
conductor's own code runs against thousands of schedules in seconds. Whatever real actors would choke on, such as a
sample that is submitted twice, is an error here.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import ray

from actors.bundles import BundleHeader, StopEnvelope
from pipelines.config_loader import load
from pipelines.flow import SampleFlow
from pipelines.generation import make_runner
from pipelines.run_data import RunData
from storage.ledger import Ledger
from storage.prompt_source import PromptSource
from storage.records import Prompt, SampleHeader, Timings

LIMIT_S = 20.0
"""Nothing in these tests waits longer; whoever does is stuck."""


BARE = -1
"""Version of an actor without published weights."""


class Ref:
    """An object reference: awaiting it gives the value."""

    def __init__(self, value):
        self.value = value
        self.lost = False

    def __await__(self):
        async def resolve():
            return self.value

        return resolve().__await__()

    def binary(self):
        return ray.ObjectRef.nil().binary()


def died():
    return ray.exceptions.ActorDiedError()


@dataclass
class Dice:
    """How eventful the world is; all but ``ticks`` are probabilities."""

    seed: int = 0
    rollout_death: float = 0.0
    reward_death: float = 0.0
    reward_twice: float = 0.0
    payload_loss: float = 0.0
    equal_rewards: float = 0.0
    failed_score: float = 0.0
    slow_weights: float = 0.0
    no_version: float = 0.0
    ticks: int = 3
    deaths_left: int = 6


class Stream:
    """A streaming generator as its caller sees it."""

    def __init__(self):
        self._items = deque()
        self._news = asyncio.Event()
        self._end = None

    def put(self, *values):
        self._items.extend(Ref(value) for value in values)
        self._news.set()

    def finish(self, error=None):
        if self._end is None:
            self._end = error or StopAsyncIteration()
        self._news.set()

    def __aiter__(self):
        return self

    async def __anext__(self):
        while not self._items:
            if self._end is not None:
                raise self._end
            self._news.clear()
            await self._news.wait()
        return self._items.popleft()


class Method:
    def __init__(self, function):
        self._function = function

    def options(self, **_):
        return self

    def remote(self, *args):
        return self._function(*args)


@dataclass
class Row:
    """An answer being written: tokens so far as (version, count) runs, and how long it will get."""

    call: int
    segments: list
    length: int
    limit: int | None
    prompt: Prompt
    attempt: int
    last_stay: bool

    @property
    def tokens(self):
        return sum(count for _, count in self.segments)


@dataclass(frozen=True)
class FakeSample:
    key: tuple
    index: int
    segments: tuple
    reason: str

    @property
    def tokens(self):
        return sum(count for _, count in self.segments)


class RolloutActor:
    """Writes a few tokens of every row whenever the dice says so; at most ``slots`` rows at once."""

    def __init__(self, world, version, slots=6):
        self.world, self.version, self.slots = world, version, slots
        self.dead = self.asleep = False
        self.rows, self.streams, self.left, self.revoked, self.done = {}, {}, {}, {}, {}
        self.generate = Method(self._generate)
        self.stop = Method(lambda calls: self._control(self._stop, calls))
        self.abort = Method(lambda: self._control(self._stop_all))
        self.set_weights = Method(lambda manifest, refs, swap: self._control(self._swap, manifest.version, swap.mode))
        self.sleep = Method(lambda: self._control(self._sleep))
        self._task = asyncio.ensure_future(self._run())

    def kill(self):
        self.dead = True
        self._task.cancel()
        for stream in self.streams.values():
            stream.finish(died())

    def _control(self, function, *args):
        async def call():
            for _ in range(self.world.rng.randrange(4)):
                await asyncio.sleep(0)
            if self.dead:
                raise died()
            result = function(*args)
            if asyncio.iscoroutine(result):
                result = await result
            if self.dead:
                raise died()
            return result

        return asyncio.ensure_future(call())

    def _generate(self, call):
        stream = Stream()
        if self.dead:
            stream.finish(died())
            return stream
        self.streams[call.number], self.done[call.number] = stream, []
        prefixes = {(r.key, r.index): r for r in call.resumptions}
        ids = [(a, index) for a in call.assignments for index in a.samples]
        self.left[call.number] = len(ids)
        for assignment, index in ids:
            identity = (assignment.key, index)
            if identity in self.rows:
                self.world.errors.append(f"{identity} submitted twice")
                continue
            resumed, segments = prefixes.get(identity), []
            if resumed is not None and not resumed.refs[0].lost:
                segments = list(resumed.refs[0].value[resumed.position].segments)
            dice = random.Random(f"{self.world.dice.seed} {identity}")
            length = min(assignment.sampling.max_tokens, 1 + int(dice.paretovariate(1.2)))
            row = Row(call.number, segments, length, None, assignment.prompt, assignment.attempt, assignment.last_stay)
            if assignment.stay_tokens:
                row.limit = row.tokens + assignment.stay_tokens
            self.rows[identity] = row
            if identity in self.revoked.get(call.number, ()):
                self._end(identity, "abort")
        self.revoked.pop(call.number, None)
        return stream

    def _stop(self, calls):
        for number, ids in calls.items():
            if number not in self.streams:
                self.revoked.setdefault(number, set()).update(ids)
            for identity in ids:
                if identity in self.rows and self.rows[identity].call == number:
                    self._end(identity, "abort")

    def _stop_all(self):
        for identity in list(self.rows):
            self._end(identity, "abort")

    def _sleep(self):
        self._stop_all()
        self.asleep = True
        return 1

    async def _swap(self, version, mode):
        while self.world.rng.random() < self.world.dice.slow_weights:
            await asyncio.sleep(0.001)
        if version < self.version:
            self.world.errors.append(f"version {version} after {self.version}")
        self.version, self.asleep = version, False
        self.world.swap_mode = mode
        return {"version": version, "pause_s": 0.0, "opening_version": version, "node": "here"}

    def _end(self, identity, reason):
        row = self.rows.pop(identity)
        key, index = identity
        self.done[row.call].append((row, FakeSample(key, index, tuple(row.segments), reason)))
        if len(self.done[row.call]) == self.left[row.call] or self.world.rng.random() < 0.6:
            self._hand_over(row.call)

    def _hand_over(self, call):
        done, self.done[call] = self.done[call], []
        if not done:
            return
        self.left[call] -= len(done)
        self.world.written += sum(sample.tokens for _, sample in done)
        items = tuple(self.world.header(sample, row.attempt) for row, sample in done)
        header = BundleHeader(items=items, worker=f"rollout-{id(self)}", busy_s=1.0, version=self.version)
        self.streams[call].put(header, [sample for _, sample in done])
        self.world.payloads.append(self.streams[call]._items[-1])
        if not self.left[call]:
            self.streams.pop(call).finish()

    async def _run(self):
        rng, dice = self.world.rng, self.world.dice
        while True:
            for _ in range(1 + rng.randrange(dice.ticks)):
                await asyncio.sleep(0)
            if self.asleep:
                for call in list(self.done):
                    self._hand_over(call)
                await asyncio.sleep(0.0005)
                if self.world.may_die(dice.rollout_death):
                    self.kill()
                    return
                continue
            if self.rows and self.world.learning:
                self.world.errors.append("answers are written while the learner learns")
            if not self.rows:
                await asyncio.sleep(0.0005)
            if self.rows and self.world.may_die(dice.rollout_death):
                self.kill()
                return
            if self.rows and self.version == BARE:
                self.world.errors.append("answers are written before the weights are there")
            for identity in list(self.rows)[: self.slots]:
                row = self.rows[identity]
                if rng.random() < 0.4:
                    continue
                drains = self.world.swap_mode == "drain" and row.segments
                version = row.segments[-1][0] if drains else self.version
                if row.segments and row.segments[-1][0] == version:
                    row.segments[-1] = (version, row.segments[-1][1] + 1)
                else:
                    row.segments.append((version, 1))
                if row.tokens >= row.length:
                    self._end(identity, "stop")
                elif row.limit is not None and row.tokens >= row.limit:
                    self._end(identity, "length" if row.last_stay else "abort")
            for call in list(self.done):
                if self.done[call] and rng.random() < 0.5:
                    self._hand_over(call)


class RewardActor:
    """Scores envelopes in random order; may die with what it has in hand, and may tell a score twice."""

    def __init__(self, world):
        self.world = world
        self.dead = False
        self.stream = Stream()
        self.run = Method(self._start)

    def kill(self):
        self.dead = True
        self.task.cancel()
        self.stream.finish(died())

    def _start(self, queue):
        if not self.dead:
            self.task = asyncio.ensure_future(self._loop(queue))
        return self.stream

    async def _loop(self, queue):
        rng, dice = self.world.rng, self.world.dice
        waiting, told = [], []
        while True:
            for _ in range(1 + rng.randrange(dice.ticks)):
                await asyncio.sleep(0)
            if not waiting and queue.empty():
                await asyncio.sleep(0.0005)
            while not queue.empty() and rng.random() < 0.7:
                envelope = queue.get_nowait()
                if isinstance(envelope, StopEnvelope):
                    return
                if envelope.refs[0].lost:
                    self.stream.put(envelope.header, [])
                    continue
                samples = {(s.key, s.index): s for s in envelope.refs[0].value}
                waiting += [(item, samples[item.key, item.index]) for item in envelope.header.items]
            if waiting and self.world.may_die(dice.reward_death):
                self.kill()
                return
            rng.shuffle(waiting)
            batch = [waiting.pop() for _ in range(min(len(waiting), rng.randrange(1, 4)))]
            if told and rng.random() < dice.reward_twice:
                batch += rng.sample(told, 1)
            if batch:
                told += batch
                items = tuple(self.world.scored(item, sample) for item, sample in batch)
                self.stream.put(
                    BundleHeader(items=items, worker="reward", busy_s=0.0, version=-1), [s for _, s in batch]
                )


class Queue(asyncio.Queue):
    async def put_async(self, item):
        await self.put(item)


@dataclass
class World:
    """Everything outside the conductor."""

    dice: Dice
    config: object
    written: int = 0
    swap_mode: str = "drain"
    learning: bool = False
    errors: list = field(default_factory=list)
    payloads: list = field(default_factory=list)

    def __post_init__(self):
        self.rng = random.Random(self.dice.seed)
        self.deaths_left = self.dice.deaths_left

    def may_die(self, probability):
        if not self.deaths_left or self.rng.random() >= probability:
            return False
        self.deaths_left -= 1
        for payload in self.payloads[-4:]:
            payload.lost = self.rng.random() < self.dice.payload_loss
        return True

    def header(self, sample, attempt, **scores):
        versions = [version for version, _ in sample.segments]
        fields = {
            "key": sample.key,
            "index": sample.index,
            "attempt": attempt,
            "tokens": sample.tokens,
            "oldest_version": min(versions, default=-1),
            "newest_version": max(versions, default=-1),
            "finish_reason": sample.reason,
            "drafted": 0,
            "accepted": 0,
            "forward_passes": sample.tokens,
            "reward": None,
            "reward_parts": {},
            "reward_status": "pending",
            "timings": Timings(),
        }
        return SampleHeader(**{**fields, **scores})

    def scored(self, item, sample):
        dice = random.Random(f"{self.dice.seed} {item.key} reward")
        if random.Random(f"{self.dice.seed} {item.key} {item.index} fails").random() < self.dice.failed_score:
            scores = {"reward_status": "error", "error": "no verdict"}
        else:
            reward = 1.0 if dice.random() < self.dice.equal_rewards else float(item.index)
            scores = {"reward": reward, "reward_parts": {"exact": reward}, "reward_status": "ok"}
        return self.header(sample, item.attempt, call=item.call, **scores)


class Roles:
    def __init__(self, world):
        self.world, self.config = world, world.config
        self.published = None
        self.reward_queue = Queue(maxsize=world.config.cluster.queue_groups)
        self.rollout = [
            self._role(f"rollout-{i}", RolloutActor(world, BARE)) for i in range(self.config.rollout.workers)
        ]
        self.reward = [self._role(f"reward-{i}", RewardActor(world)) for i in range(self.config.reward.workers)]
        self.history = None

    def _role(self, name, actor):
        return SimpleNamespace(name=name, actor=actor, term=0)

    def replace_rollout(self, index):
        self.rollout[index] = self._role(f"rollout-{index}", RolloutActor(self.world, BARE))
        return self.rollout[index]

    def replace_reward(self, index):
        self.reward[index] = self._role(f"reward-{index}", RewardActor(self.world))
        return self.reward[index]


BASE = (
    "model=tiny",
    "data.train=builtin:running_sums",
    "rollout.workers=2",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=3",
    "rollout.max_tokens=40",
    "rollout.max_rows=6",
    "reward.workers=2",
    "evaluation.prompts=4",
    "cluster.queue_groups=4",
)


def prompts(count):
    return tuple(Prompt(index=i, token_ids=np.full(3, i, np.int32), text=f"p{i}") for i in range(count))


class Run:
    """A run over a world, driven as a session drives it."""

    def __init__(self, dice, *overrides, rows=24, epochs=2, ledger=None, saved=None):
        self.config = load([*BASE, *overrides]).config
        self.world = World(dice, self.config)
        self.roles = Roles(self.world)
        data = RunData(
            model_path="",
            train=prompts(rows),
            evaluation={"heldout": prompts(4)},
            stop_token_ids=(),
            max_length=64,
            total_steps=10_000,
            tokenizer_fingerprint=0,
        )
        self.source = PromptSource(data.train, shuffle=True, seed=0, epochs=epochs)
        self.ledger = ledger or Ledger(None)
        self.stop = asyncio.Event()
        drafts = SimpleNamespace(packs=lambda worker, assignments: [], on=True)
        self.flow = SampleFlow(self.roles, drafts)
        self.version = self.step = 0
        self.trained_tokens = 0
        self.staleness = []
        state = None
        if saved is not None:
            self.source.load_state(saved["source"])
            self.version, self.step, state = saved["version"], saved["step"], saved["rounds"]
        self.runner = make_runner(self.config, data, self.flow, self.source, self.ledger, None, self.stop, state)
        self.stream = self.config.asynchrony.pipeline == "stream"
        self.results = []

    async def __aenter__(self):
        self.roles.published = self._published()
        self.flow.start()
        await self.flow.fleet.publish(self._swap())
        if self.stream:
            self.runner.start(self.version)
            self.runner.open()
        return self

    async def __aexit__(self, *_):
        self.flow.close()
        await self.runner.close()
        for role in [*self.roles.rollout, *self.roles.reward]:
            role.actor.kill()
        await asyncio.sleep(0)

    def _published(self):
        return SimpleNamespace(manifest=SimpleNamespace(version=self.version), ref=None)

    def _swap(self):
        from pipelines.generation import weight_swap

        return weight_swap(self.config)

    async def state(self):
        async with self.runner.quiet():
            return {
                "source": self.source.state(),
                "version": self.version,
                "step": self.step,
                "rounds": self.runner.state(),
                "ledger_offset": self.ledger.offset(),
            }

    async def one_step(self):
        """Train a step, and publish as the dice say."""
        async with asyncio.timeout(LIMIT_S):
            result = await self.runner.train(self.step, self.version)
        self.results.append(result)
        self._learn(result)
        makes_version = bool(result.keys) and self.world.rng.random() >= self.world.dice.no_version
        if self.config.colocated:
            async with asyncio.timeout(LIMIT_S):
                await self.flow.fleet.sleep()
            self.world.learning = True
            await asyncio.sleep(0.002 * self.world.rng.randrange(3))
        for _ in range(self.world.rng.randrange(8)):
            await asyncio.sleep(0)
        self.world.learning = False
        trained_at = self.version
        if makes_version:
            self.version += 1
            self.roles.published = self._published()
        if self.stream and makes_version:
            self.flow.fleet.announce(self._swap())
            await self.runner.advance(self.version)
        elif makes_version or self.config.colocated:
            async with asyncio.timeout(LIMIT_S):
                await self.flow.fleet.publish(self._swap())
        self.ledger.train(result.keys, self.step, trained_at)
        self.step += 1
        self.trained_tokens += sum(h.tokens for headers in result.headers.values() for h in headers)
        self.flow.forget(result.keys)
        self.check()
        return result

    def _learn(self, result):
        """Fetch what the learner would, and see that it is what the headers say."""
        needed = self.config.rollout.samples_per_prompt
        for key in result.keys:
            headers = result.headers[key]
            assert len(headers) == needed
            group = self.flow.group(key, [h.index for h in headers])
            for (ref, position), header in zip(group.places, headers, strict=True):
                sample = group.refs[ref].value[position]
                assert (sample.key, sample.index, sample.tokens) == (key, header.index, header.tokens)
                assert header.finish_reason in ("stop", "length")
                self.staleness.append(self.version - header.oldest_version)

    async def run(self, *, steps=None, evaluate_every=0):
        """Steps until the data or ``steps`` end."""
        while not self.runner.exhausted and (steps is None or self.step < steps):
            await self.one_step()
            if evaluate_every and self.step % evaluate_every == 0:
                await self.evaluate()

    async def evaluate(self):
        async with asyncio.timeout(LIMIT_S):
            found = await self.runner.evaluate(self.step)
        for groups in found.values():
            self.trained_tokens += sum(h.tokens for headers in groups.values() for h in headers)
            self.flow.forget(groups)
        return found

    def check(self):
        """What must hold between two steps."""
        assert self.world.errors == []
        self.ledger.check()
        held = sum(lease.tokens for lease in self.flow._leases.values())
        assert self.flow.generated == self.trained_tokens + self.flow.dropped + held

    def check_end(self):
        """What must hold when the data is used up."""
        self.check()
        counts = self.ledger.counts()
        assert (counts.queued, counts.leased, counts.ready) == (0, 0, 0)
        assert counts.launched == counts.trained + sum(counts.ended.values())

    async def settle(self):
        """Let what nobody waits for come to its end: stopped answers, scores of groups that are gone."""
        async with asyncio.timeout(LIMIT_S):
            while self.flow._in_hand or any(lease.stage == "scoring" for lease in self.flow._leases.values()):
                await asyncio.sleep(0.001)
        assert self.flow._leases == {}
        assert self.flow._indices == {}
        assert not +self.flow._rows
