"""A conductor without actors: it executes what a policy decides, against the real source and the real ledger."""

from __future__ import annotations

import copy
import math
from collections import Counter

import numpy as np

from actors.length_predictor.records import Prediction
from pipelines.scheduling.forecasts import ForecastBook
from pipelines.scheduling.policy import GroupProgress, RoundState, WaitingGroup
from storage.ledger import Ledger
from storage.prompt_source import PromptSource
from storage.records import GroupKey, Prompt


def prompts(count):
    return [Prompt(index=i, token_ids=np.zeros(1, np.int32), text="") for i in range(count)]


def prediction(longest):
    return Prediction(rank=0.5, p50=longest / 2, p90=longest, longest=longest, confidence=1.0)


class Conductor:
    """Holds what outlives a round; a test decides what finishes, fails or dies."""

    def __init__(
        self,
        policy,
        *,
        data,
        prompts_per_step,
        epochs=1,
        samples=2,
        journal=None,
        predict=None,
        seed=0,
    ):
        self.policy = policy
        self.prompts_per_step = prompts_per_step
        self.samples = samples
        self.predict = predict
        self.journal = journal
        self.ledger = Ledger(journal)
        self._new_source = lambda: PromptSource(prompts(data), shuffle=True, seed=seed, epochs=epochs)
        self.source = self._new_source()
        self.waiting: dict[GroupKey, WaitingGroup] = {}
        self.oldest: dict[GroupKey, int] = {}
        self.duplicates: Counter = Counter()
        self.trained: Counter = Counter()
        self.ended: Counter = Counter()
        self.batches: list[list[GroupKey]] = []
        self.classes: list[str] = []
        self.staleness: list[int] = []
        self.wasted: list[GroupKey] = []
        self.step = 0
        self.book = None
        self.state = None
        self.checkpoint()

    @property
    def over(self):
        return self.state is None and not self.source.remaining and not self.waiting

    def begin(self):
        """Open the round of the next step and launch its first wave."""
        self.state = RoundState(
            step=self.step,
            prompts_per_step=self.prompts_per_step,
            available=self.source.remaining,
            waiting=self.waiting,
            left_in_epoch=self.source.left_in_epoch,
            epoch=self.source.epoch,
            version=self.step,
            forecasts=self.book,
        )
        self.advance()

    def advance(self):
        """Ask the policy what to launch and whether to stop; executes both. Returns True when the round is over."""
        state = self.state
        for _ in range(1000):
            launch = self.policy.plan(state)
            if launch.empty:
                break
            self._launch(launch)
            if launch.starts:
                state.waves += 1
                break
        else:
            raise AssertionError("the policy draws for ever")
        if not self.policy.should_stop(state):
            assert state.running(), "the round waits for nothing"
            return False
        self._stop()
        return True

    def finish_sample(self, key, rewards=(0.0, 1.0)):
        """One sample of ``key`` is written and scored."""
        group = self.state.groups[key]
        group.finished += 1
        group.written = max(group.written, group.finished)
        self.oldest.setdefault(key, self.step)
        if group.finished < group.quota:
            return False
        return self._complete(key, rewards)

    def write_sample(self, key):
        """One sample of ``key`` is written but not scored."""
        group = self.state.groups[key]
        if group.written < group.size:
            group.written += 1
            self.oldest.setdefault(key, self.step)

    def crash(self, key, *, give_up):
        """The worker of ``key`` dies: the group is issued again, or given up."""
        group = self.state.groups[key]
        if give_up:
            group.verdict = "filter"
            self._end(key, "worker_crashed")
            return self.advance()
        self.ledger.release(key, "worker died")
        self.ledger.lease(key, "w", self.ledger.attempts(key))
        group.written = group.finished
        return False

    def checkpoint(self):
        """Keep what a checkpoint keeps, after a step."""
        self.ledger.sync()
        self._saved = copy.deepcopy(
            (
                self.ledger.offset(),
                self.source.state(),
                self.waiting,
                self.oldest,
                self.duplicates,
                self.trained,
                self.ended,
                self.batches,
                self.step,
                self.book,
            )
        )

    def kill_and_resume(self):
        """The process dies; another one goes on from the checkpoint."""
        self.ledger.close()
        offset, source, *rest = copy.deepcopy(self._saved)
        self.ledger = Ledger.replay(self.journal, offset)
        self.source = self._new_source()
        self.source.load_state(source)
        self.waiting, self.oldest, self.duplicates, self.trained, self.ended, self.batches, self.step, self.book = rest
        self.state = None

    def play(self, order=None, rewards=(0.0, 1.0), begun=False):
        """Run to the end of the data; groups finish in the order of ``order(key)``, by default of launch.

        With ``begun`` every launched group has written its first sample at once, so that deferred ones keep tokens.
        """
        for _ in range(10_000):
            if self.over:
                return self
            if self.state is None:
                self.begin()
                for key in self.state.running() if begun and self.state else ():
                    self.write_sample(key)
                continue
            running = self.state.running()
            self.finish_sample(min(running, key=order) if order else running[0], rewards)
        raise AssertionError("the run never ends")

    def _launch(self, launch):
        state = self.state
        drawn = [self._draw() for _ in range(launch.draw)]
        assert all(drawn), "more prompts asked for than there are"
        fresh = [self._draw() for _ in range(launch.fresh)]
        assert all(fresh), "more prompts asked for than there are"
        keys = [*launch.deferred, *fresh]
        for key in launch.repeats:
            self.duplicates[key[:3]] += 1
            keys.append(self._open(key._replace(duplicate=self.duplicates[key[:3]])))
        assert launch.restart <= set(launch.deferred)
        if keys:
            state.round_class = state.round_class or launch.round_class
        for key in keys:
            waited = self.waiting.pop(key)
            if key in launch.restart:
                self.oldest.pop(key, None)
                self.wasted.append(key)
                waited = WaitingGroup(deferrals=waited.deferrals, missing=self.samples)
            size = math.ceil(launch.sample_ratio * self.samples)
            done = self.samples - waited.missing
            state.groups[key] = GroupProgress(
                size=size, needed=self.samples, written=done, finished=done, deferrals=waited.deferrals
            )
            self.ledger.lease(key, "w", self.ledger.attempts(key))
        state.available, state.left_in_epoch = self.source.remaining, self.source.left_in_epoch
        state.epoch, state.forecasts = self.source.epoch, self.book
        for key in keys:
            if state.groups[key].finished >= state.groups[key].quota:
                self._judge(key, (0.0, 1.0))

    def _draw(self):
        found = self.source.next()
        return None if found is None else self._open(found[0])

    def _open(self, key):
        self.ledger.open(key)
        self.waiting[key] = WaitingGroup(missing=self.samples)
        if self.predict is not None:
            self.book = self.book or ForecastBook()
            self.book.add({key: prediction(self.predict(key))})
        return key

    def _complete(self, key, rewards):
        self._judge(key, rewards)
        return self.advance()

    def _judge(self, key, rewards):
        group = self.state.groups[key]
        group.verdict = self.policy.on_finish(self.state, key, rewards)
        if group.verdict == "filter":
            self._end(key, "zero_variance")
        else:
            self.ledger.ready(key)

    def _end(self, key, reason):
        self.ledger.end(key, reason)
        self.ended[key] += 1

    def _stop(self):
        state = self.state
        for key in state.running():
            action = self.policy.on_stop(state, key)
            group = state.groups[key]
            self.ledger.release(key, "deferred")
            keep = action in ("resume", "park")
            assert action != "park" or group.written >= group.quota
            if not keep:
                self.oldest.pop(key, None)
            self.waiting[key] = WaitingGroup(
                deferrals=group.deferrals + 1,
                oldest_version=self.oldest.get(key),
                missing=max(0, self.samples - group.written) if keep else self.samples,
            )
        batch = sorted(state.kept())
        self.ledger.train(batch, self.step, self.step)
        for key in batch:
            self.staleness.append(self.step - self.oldest.get(key, self.step))
            self.trained[key] += 1
        self.batches.append(batch)
        self.classes.append(state.round_class)
        self.state = None
        self.step += 1
        self.ledger.close_epochs("train", self.source.epoch - 1)
        self.checkpoint()
