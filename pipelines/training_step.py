"""One training step: answers are written and scored, the learner learns, the weights go out, the books are closed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from actors.bundles import LearnerHeader, StepEnvelope
from pipelines.archiving import Archiving
from pipelines.drafting import DraftRequests
from pipelines.flow import SampleFlow
from pipelines.generation import weight_swap
from pipelines.interruption import Interrupted
from pipelines.learner_events import LearnerEvents
from pipelines.mirroring import Mirroring
from pipelines.restarts import Restarts
from pipelines.roles import Published, Roles
from pipelines.round_books import RoundResult
from pipelines.rounds import RoundRunner
from pipelines.step_metrics import StepClock
from pipelines.step_reporting import StepReporter
from pipelines.streaming import StreamRunner
from pipelines.waits import Waits
from storage.errors import UserError
from storage.ledger import Ledger
from storage.prompt_source import PromptSource
from storage.records import TRAIN_SPLIT


@dataclass(slots=True, kw_only=True)
class TrainingStep:
    """What the steps of one session do, in two halves: a run that is stopped in the first one loses nothing.

    The configuration is that of ``roles``, which changes between steps. Where engines and learner share hardware, the
    engines sleep from the end of the first half until they get their weights in the second.
    """

    roles: Roles
    flow: SampleFlow
    drafts: DraftRequests
    rounds: RoundRunner
    source: PromptSource
    ledger: Ledger
    learner: LearnerEvents
    archiving: Archiving
    mirroring: Mirroring | None
    restarts: Restarts
    reporter: StepReporter
    waits: Waits
    _turn: dict[str, float] = field(default_factory=dict, init=False)

    async def generate(self, step: int) -> RoundResult:
        """Have the answers of optimiser step ``step`` (from 0) written and scored.

        Raises:
            Interrupted: The run is asked to stop.
            UserError: The user has to mend something, for instance a reward function.
        """
        self.waits.enter("generating")
        self.waits.board.start_step()
        self.reporter.begin()
        self.waits.board.wait("generate", "rollout workers")  # the watchdog looks after each of them
        try:
            result = await self.rounds.train(step, self.roles.published_version)
        except (Interrupted, UserError):
            await self.flow.abort()
            raise
        finally:
            self.waits.board.arrived("generate")
        if self.roles.config.colocated:
            began = time.perf_counter()
            freed = await self.waits.wait("sleep", "rollout workers", self.flow.fleet.sleep(), 0.0, safe=False)
            self._turn = {"time/sleep_s": time.perf_counter() - began, "rollout/freed_mb": freed / 1e6}
        return result

    async def learn(self, step: int, result: RoundResult) -> None:
        """Train on what was generated, publish what came of it, and write it all down; not to be interrupted."""
        version, config = self.roles.published_version, self.roles.config
        upcoming = self.source.upcoming(config.rollout.prompts_per_step)
        self.drafts.prefetch(upcoming, {key.prompt for key in result.keys})
        header, ref = await self._train(step, result)
        published_at = time.perf_counter()
        pause = 0.0
        if header.manifest is not None or config.colocated:  # who sleeps needs weights, old ones or new
            self.waits.enter("publishing")
            if header.manifest is not None:
                self.roles.published = Published(header.manifest, ref)
            pause = await self._publish()
        published = time.perf_counter()
        self.ledger.train(result.keys, step, version)
        self.ledger.close_epochs(TRAIN_SPLIT, self.rounds.open_epoch - 1)
        self.ledger.sync()
        done = step + 1
        await self.archiving.add(TRAIN_SPLIT, done, result.keys, result.headers, header.advantages)
        self.drafts.recorded = done
        ended = time.perf_counter()
        loads = self.reporter.engine_loads()
        clock = StepClock(
            step=ended - self.reporter.began,
            generate=max((load.busy_s for load in loads.values()), default=0.0),
            learn=header.metrics.get("seconds_total", 0.0),
            publish=published - published_at,
            pause=pause,
        )
        self.reporter.began = ended
        extra = self.restarts.metrics() | (self.mirroring.metrics() if self.mirroring is not None else {})
        if config.colocated:
            extra |= self._turn | {"time/sleep_s": self._turn["time/sleep_s"] + published - published_at}
        await self.reporter.report(
            done,
            result,
            clock,
            loads,
            header,
            rounds=self.rounds,
            config=config,
            version=version,
            epoch=self.source.progress,
            extra=extra,
        )
        if config.run.debug:
            self.ledger.check()
        if self.mirroring is not None:
            self.mirroring.stepped(done)

    async def _train(self, step: int, result: RoundResult) -> tuple[LearnerHeader, Any]:
        """Give the learner its batch; returns its header and the reference to the new weights."""
        self.waits.enter("training")
        queue = self.roles.learner_queue
        groups = tuple(self.flow.group(key, [h.index for h in result.headers[key]]) for key in result.keys)
        envelope = StepEnvelope(step=step, groups=groups)
        deadline = self.roles.config.learner.deadline_s
        # From here to the next step nothing may be interrupted: learner, ledger and version move together.
        await self.waits.wait("learner queue", "learner", queue.put_async(envelope), deadline, safe=False)
        header, ref = await self.waits.wait(
            "learn", f"learner: step {step + 1}", self.learner.next(), deadline, safe=False
        )
        return header, ref

    async def _publish(self) -> float:
        """Give the weights to the rollout workers; returns the longest pause. A stream waits for nobody."""
        config, fleet = self.roles.config, self.flow.fleet
        if isinstance(self.rounds, StreamRunner):
            fleet.announce(weight_swap(config))
            await self.rounds.advance(self.roles.published_version)
            return fleet.last_pause_s
        # A step leaves nothing to be handed over; only a snapshot that lags has rows to write after this.
        swap = weight_swap(config) if config.asynchrony.partial == "split" else None
        acknowledged = await self.waits.wait("publish", "rollout workers", fleet.publish(swap), 0.0, safe=False)
        return max((a.get("pause_s", 0.0) for a in acknowledged), default=0.0)
