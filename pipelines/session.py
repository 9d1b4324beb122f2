"""One process's part of a run: from the start, or from a checkpoint, to the end or to a request to stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeVar

from actors.bundles import RateEnvelope, StopEnvelope
from pipelines.active_runs import wait_for_orphans
from pipelines.archiving import Archiving
from pipelines.checkpointing import Checkpointing
from pipelines.cluster import shortage
from pipelines.config import Config
from pipelines.controls import Controls, RecentMetrics
from pipelines.drafting import DraftRequests
from pipelines.flow import SampleFlow
from pipelines.generation import change_rules, make_runner
from pipelines.held_out_evaluation import HeldOutEvaluation
from pipelines.interruption import Interrupted, quietly
from pipelines.knobs import LAUNCHING
from pipelines.learner_events import LearnerEvents
from pipelines.length_forecasts import start_predictor
from pipelines.mirroring import Mirroring
from pipelines.monitoring import MonitorGroup, open_monitors, read_records
from pipelines.progress import load_status
from pipelines.ray_metrics import RunMetrics
from pipelines.restarts import Restarts, cut_back
from pipelines.role_streams import run_pairs
from pipelines.roles import Published, Roles, Spares, home_node
from pipelines.rounds import RoundRunner
from pipelines.run_data import RunData
from pipelines.silent_nodes import answering_nodes
from pipelines.status import StatusBoard
from pipelines.step_reporting import StepReporter
from pipelines.streaming import StreamRunner
from pipelines.training_step import TrainingStep
from pipelines.waits import Waits
from pipelines.watchdog import Watchdog
from storage.checkpoints import Checkpoint, CheckpointError, CheckpointStore
from storage.errors import UserError
from storage.files import StorageError
from storage.ledger import Ledger
from storage.prompt_source import PromptSource
from storage.run_directory import RunDirectory

log = logging.getLogger(__name__)

T = TypeVar("T")

LEARNER_COMPONENT = "learner"
MODEL_COMPONENT = "model"
_EARLY_ALARM_S = 20.0
"""Age of a round at which failed scores are reported before it ends: functions that time out make it a long one."""


class Session:
    """One process's part of a run: from start or checkpoint to the end."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        data: RunData,
        resume: Checkpoint | None,
        *,
        namespace: str,
        dashboard_url: str,
        stop: asyncio.Event,
        train: bool,
        before: Controls | None = None,
        mirroring: Mirroring | None = None,
        spares: Spares | None = None,
    ) -> None:
        """Open files and positions; nothing runs before :meth:`start`.

        Args:
            config: The resolved configuration.
            directory: The run's directory.
            data: Model, prompts and limits.
            resume: Checkpoint to go on from; journal, metrics and archive are cut back to it.
            namespace: Ray namespace of the run's actors.
            dashboard_url: For people; may be empty.
            stop: Set when the run should save and end.
            train: False to evaluate only.
            before: Controls of the session that died in this process and that this one replaces: knobs stay as they
                are, and a run that rests goes on resting.
            mirroring: Sends the run directory on, where it has a remote side.
            spares: What the session before has left.
        """
        self._mirroring = mirroring
        saved_knobs = resume.meta.get("knobs") if resume else None
        self.controls = Controls(config, train=train, saved=before.saved() if before else saved_knobs)
        if before is not None:
            self.controls.follow(before)
        config = self._config = self.controls.wiring
        self._directory = directory
        self._data = data
        self._resume = resume
        self._train = train
        self._stop = stop
        self.evaluations: dict[str, Mapping[str, float]] = {}
        self.step = 0
        self._source = PromptSource(
            data.train, shuffle=config.data.shuffle, seed=config.run.seed, epochs=config.run.epochs or None
        )
        metrics_offset: int | None = None
        if resume is None:
            self._ledger = Ledger(self._directory.ledger if train else None)
        else:
            saved = resume.meta
            self.step = saved["step"]
            self._source.load_state(saved["source"])
            self._ledger = Ledger.replay(self._directory.ledger, saved["ledger_offset"])
            metrics_offset = saved["metrics_offset"]
            self.evaluations.update(saved["evaluations"])
            cut_back(directory, data.tokenizer_fingerprint, self.step)
        self._monitors: MonitorGroup = open_monitors(
            config.tracking,
            self._directory.path,
            self.step if resume else None,
            resume_offset=metrics_offset,
            name=self._directory.path.name,
            config=config.model_dump(mode="json"),
        )
        self.recent = RecentMetrics(read_records(self._directory.metrics))
        self._monitors.add("drivers", lambda: self.recent)
        self._restarts = Restarts.of(directory, config.run.restarts)
        previous = load_status(self._directory.path) if resume is not None else None
        self.board = StatusBoard(
            self._directory.path.name,
            self._directory.address,
            steps=data.total_steps if train else 0,
            step=self.step,
            evaluate_every=config.evaluation.every,
            evaluate_after=config.evaluation.after,
            dashboard_url=dashboard_url,
            restarts=(self._restarts.times, self._restarts.steps_lost),
            previous=previous,
        )
        self._metrics = RunMetrics(directory.path.name)
        self._waits = Waits(self.board, self._metrics, stop)
        home = home_node() if mirroring is not None else ""
        self._spares = spares or Spares()
        self._predictor = self._spares.predictor
        self._nodes: set[str] = set()
        self._roles = Roles(config, data, namespace, self._spares.rollout, home=home)
        self._drafts = DraftRequests(self._roles)
        self._drafts.on = self.controls.drafting
        self._flow = SampleFlow(self._roles, self._drafts)
        self._runner: RoundRunner | None = None
        self._watchdog = Watchdog(self._roles, self._flow, self.board, config)
        self._learner: LearnerEvents | None = None
        self._steps: TrainingStep | None = None
        self._archiving = Archiving(self._roles, self._flow, self.board)
        self._background: set[asyncio.Task[None]] = set()
        began_with = resume.step if resume is not None else None
        store = CheckpointStore(self._directory.checkpoints, config.checkpoint.keep_last, began_with)
        self._checkpoints = Checkpointing(directory, store, self._roles, self._archiving, self._ledger, self._monitors)
        self._reporter = StepReporter(self._flow, self._roles, self._ledger, self._monitors, self.board, self._metrics)
        self._evaluation = HeldOutEvaluation(
            roles=self._roles,
            flow=self._flow,
            archiving=self._archiving,
            monitors=self._monitors,
            reporter=self._reporter,
            waits=self._waits,
        )
        self._safe_point: dict[str, Any] | None = None

    async def start(self) -> None:
        """Start all roles and give the rollout workers the learner's weights: always, before anything else."""
        config = self._config
        self._nodes = await asyncio.to_thread(answering_nodes)
        archive = str(self._directory.rollouts) if config.tracking.rollouts == "parquet" else None
        history = str(self._directory.history) if self._train and config.speculation.source != "off" else None
        learner_directory = self._directory.reach(self._resume.component(LEARNER_COMPONENT)) if self._resume else None
        version = self._resume.meta["version"] if self._resume is not None else 0
        self._roles.start(
            version=version,
            learner_directory=learner_directory,
            with_learner=self._train,
            archive=archive,
            history=history,
        )
        await self._started("rollout workers", self._roles.renewed())
        self._flow.start()
        self._archiving.start(self.step)
        predictor = None
        if self._train and config.predicts_lengths:
            self._predictor = True
            predictor = await self._started(
                "length predictor",
                start_predictor(config, self._directory.path.name, self._resume, kept=self._spares.predictor),
            )
        resumed = self._resume.meta["rounds"] if self._resume is not None else None
        self._runner = make_runner(
            config, self._data, self._flow, self._source, self._ledger, predictor, self._stop, resumed
        )
        if self._train and config.colocated:
            await self._started("rollout workers", self._roles.find_engines())
            self._roles.start_learner(learner_directory)
        if self._roles.learner is not None:
            stream = run_pairs(self._roles.learner, self._roles.learner_queue)
            self._learner = LearnerEvents(stream, self._flow.fail)
            header, ref = await self._started("learner", self._learner.next())
            self._roles.published = Published(header.manifest, ref)
            await self._started("rollout workers", self._flow.fleet.publish())
            self._steps = TrainingStep(
                roles=self._roles,
                flow=self._flow,
                drafts=self._drafts,
                rounds=self._runner,
                source=self._source,
                ledger=self._ledger,
                learner=self._learner,
                archiving=self._archiving,
                mirroring=self._mirroring,
                restarts=self._restarts,
                reporter=self._reporter,
                waits=self._waits,
            )
        if isinstance(self._runner, StreamRunner):
            self._runner.start(self._roles.published_version)
        await self._started("all roles", self._roles.answer())
        self._spawn(self._watchdog.run())

    @property
    def _rounds(self) -> RoundRunner:
        assert self._runner is not None  # made at the start
        return self._runner

    async def _started(self, who: str, awaitable: Awaitable[T]) -> T:
        """Await the start of some roles; raises ``UserError`` at the deadline and says what the cluster lacks."""
        deadline = self._config.cluster.start_deadline_s
        try:
            return await self._waits.wait("start", f"{who}: loading", asyncio.wait_for(awaitable, deadline), deadline)
        except TimeoutError:
            reason = shortage(self._config) or "the model is large, the disk slow, or other jobs hold the cluster"
            raise UserError(
                f"not started within cluster.start_deadline_s={deadline:g} s: {who} ({reason}); lower what is "
                "reserved, add nodes, or raise the deadline"
            ) from None

    async def train(self) -> Literal["finished", "stopped"]:
        """Run steps until the last one, the end of the data, or a request to stop.

        Whatever ends it while answers are written and scored, the learner still stands where the step began, and that
        is saved: a failure in a reward function costs no trained step.
        """
        config, steps = self._config, self._steps
        assert steps is not None  # a run that trains has them from the start
        self._safe_point = await self._state()
        try:
            if config.evaluation.before and "before" not in self.evaluations:
                self.evaluations["before"] = await self._evaluate()
            if self._resume is not None and self._resume.meta.get("evaluation_due"):
                await self._evaluate()
            self._reporter.began = time.perf_counter()
            if isinstance(self._runner, StreamRunner):
                self._runner.open()
            while self.step < self._data.total_steps and not self._rounds.exhausted:
                self._reporter.began += await self.controls.serve(self)
                self._safe_point = await self._state()
                result = await steps.generate(self.step)
                self._safe_point = None
                await steps.learn(self.step, result)
                self.step += 1
                every, save_every = self._config.evaluation.every, self._config.checkpoint.every
                last = self.step >= self._data.total_steps or self._rounds.exhausted
                due = bool(every) and self.step % every == 0 and not (last and config.evaluation.after)
                # A stop during the evaluation saves the step, and a resumed run begins with what is missing.
                self._safe_point = {**await self._state(), "evaluation_due": due}
                if due:
                    await self._evaluate()
                if save_every and self.step % save_every == 0 and not last:
                    await self._save(await self._state())
            if config.evaluation.after:
                self.evaluations["after"] = await self._evaluate()
            await self._save(await self._state())
            return "finished"
        except Interrupted:
            assert self._safe_point is not None  # stops are heard only where it is safe
            await self._save(self._safe_point)
            return "stopped"
        except Exception as error:
            if self._safe_point is not None and not isinstance(error, CheckpointError):
                await quietly(self._save(self._safe_point))
            raise

    @property
    def roles(self) -> Roles:
        """The actors of the run."""
        return self._roles

    async def adopt(self, changed: frozenset[str]) -> None:
        """Go on under the configuration that the controls hold now."""
        config = self._config = self._roles.config = self.controls.wiring
        self._drafts.on = self.controls.drafting
        self.board.plan_evaluations(config.evaluation.every)
        if changed & LAUNCHING:
            await change_rules(self._rounds, config)
        if "learner.learning_rate" in changed:
            await self._roles.learner_queue.put_async(RateEnvelope(learning_rate=config.learner.learning_rate))

    async def save_now(self) -> str:
        """Write a checkpoint of the present step, if there is none, and return its folder."""
        await self._save(await self._state())
        if self._mirroring is not None:
            with suppress(StorageError):  # told by an alarm; it follows when the store answers again
                await self._mirroring.sent()
        return self._checkpoints.latest()

    async def evaluate_now(self) -> Mapping[str, float]:
        """Evaluate the policy of the present step."""
        return await self._evaluate()

    async def rest(self, news: asyncio.Event) -> None:
        """Wait until a driver wants something; raises ``Interrupted`` when the run is asked to stop."""
        self._waits.enter("paused")
        await self._waits.wait("resume", "a driver that lets the run go on", news.wait(), 0.0)

    async def evaluate_only(self) -> Literal["finished", "stopped"]:
        """Evaluate the model once."""
        try:
            self.evaluations["after"] = await self._evaluate()
        except Interrupted:
            return "stopped"
        return "finished"

    def observe(self) -> None:
        """Refresh progress, queue depths and gauges."""
        if self._runner is None:
            return
        progress = self._runner.progress
        self.board.progress(progress.done, progress.launched)
        lasted = time.time() - progress.started
        if lasted > _EARLY_ALARM_S and progress.failed > self._config.reward.error_alarm * progress.launched:
            self.board.alarm(f"answers fail to be scored; the first: {progress.first_error}")
        generating, scoring = self._flow.outstanding("generating"), self._flow.outstanding("scoring")
        self.board.observe(queues={"generating": generating, "scoring": scoring})
        self._metrics.queue("generating", generating)
        self._metrics.queue("scoring", scoring)
        self._metrics.waits(self.board.snapshot().waits)

    async def close(self, *, spare: bool = False) -> Spares:
        """Stop the roles and close the files; whatever fails here cannot hurt what is saved.

        Returns what is left: the predictor, and with ``spare``, where a session follows, the rollout workers. Not those
        of a cluster that has lost a node, known to Ray or not: what has to move may need their places.
        """
        self._flow.close()
        if self._learner is not None:
            self._learner.close()
        if self._runner is not None:
            await quietly(self._runner.close())
            await quietly(self._runner.forecasts.close())
        await self._archiving.drain()
        self._archiving.close()
        for task in self._background:
            task.cancel()
        for queue in (self._roles.learner_queue, self._roles.history_queue):
            if queue is not None:
                await quietly(queue.put_async(StopEnvelope(), timeout=5))
        for role in self._roles.reward:
            await quietly(asyncio.wait_for(role.actor.close.remote(), 10))
        workers = await self._roles.retire() if spare and await self._all_nodes_live() else {}
        self._roles.shutdown(workers.values())
        # A session that follows in this process gives its actors the same names.
        names = [role.name for role in workers.values()]
        await quietly(asyncio.to_thread(wait_for_orphans, self._directory.path.name, names))
        for file in (self._monitors, self._ledger):
            try:
                file.close()
            except UserError as error:  # a full disk; what counts was synced before the last checkpoint
                log.warning("while closing: %s", error)
        return Spares(workers, self._predictor)

    async def _all_nodes_live(self) -> bool:
        """Whether the nodes of the start are still there; False also where Ray cannot tell any more."""
        try:
            return self._nodes <= await asyncio.to_thread(answering_nodes)
        except Exception as error:  # whatever it is, it must not keep the rest from closing
            log.warning("the nodes are not known: %s", error)
            return False

    async def _evaluate(self) -> Mapping[str, float]:
        return await self._evaluation.run(self._rounds, self.step)

    async def _state(self) -> dict[str, Any]:
        """Where the run stands between two steps: what a checkpoint must say."""
        async with self._rounds.quiet():
            return {
                "step": self.step,
                "version": self._roles.published_version,
                "source": self._source.state(),
                "ledger_offset": self._ledger.offset(),
                "metrics_offset": self._monitors.offset(),
                "evaluations": dict(self.evaluations),
                "rounds": self._rounds.state(),
            }

    async def _save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint, unless there is one; raises :class:`CheckpointError` and leaves earlier ones alone."""
        state = {**state, "knobs": self.controls.saved()}
        if self._checkpoints.has(state):
            return
        self._waits.enter("checkpointing")
        began, deadline, learner = time.perf_counter(), self._config.learner.deadline_s, self._learner
        assert learner is not None  # a run that trains has one from the start
        await self._checkpoints.write(
            state,
            lambda: self._waits.wait("checkpoint", "learner", learner.next(), deadline, safe=False),
            self._rounds.forecasts,
        )
        if self._mirroring is not None:
            await self._mirroring.saved(state["step"])
        seconds = time.perf_counter() - began
        self._reporter.began += seconds
        self._metrics.seconds("checkpoint", seconds)
        log.info("checkpoint of step %d written in %.2f s", state["step"], seconds)

    def _spawn(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._background.add(task)
