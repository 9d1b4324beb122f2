"""Creates the actors of a run and replaces those that die.

The conductor owns them: when it goes, they go. Ray's own restarts are off, because a replacement needs the current
weights and its queue before it may work, and because names on the dashboard should say which incarnation it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from actors.drafts import node_worker
from actors.drafts import worker as drafts_worker
from actors.learner import train_group
from actors.learner import worker as learner_worker
from actors.reward import worker as reward_worker
from actors.rollout import worker as rollout_worker
from pipelines.config import Config
from pipelines.faults import brief, user_error
from pipelines.placement import Need, coordination_need, learner_need, long_need, reward_need, rollout_need
from pipelines.queues import BoundedQueue
from pipelines.run_data import RunData
from storage.records import WeightsManifest

_QUEUE_CONCURRENCY = 1000
_HISTORY_QUEUE = 16
_NODE_ID = "ray.io/node-id"
_RETIRE_S = 10.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Role:
    """One living actor: its handle and the name that logs and the dashboard show.

    ``incarnation`` counts its predecessors that died, ``term`` how often it was made anew in the same process.
    """

    name: str
    actor: Any
    incarnation: int = 0
    term: int = 0


@dataclass(frozen=True, slots=True)
class Spares:
    """What a session leaves to the one that follows it: retired rollout workers, by number, and the predictor."""

    rollout: Mapping[int, Role] = field(default_factory=dict)
    predictor: bool = False


@dataclass(slots=True)
class Published:
    """The snapshot that rollout workers should be on: manifest and the reference to its buffer."""

    manifest: WeightsManifest
    ref: Any


@dataclass(slots=True)
class Roles:
    """All actors and queues of one run.

    ``home`` is the id of the node that has the run directory, where other nodes do not see it; empty where all do.
    ``history_node`` is that of the history role, empty while it is not known; ``retrievers`` make the draft packs of
    other nodes, by node. ``spares`` are retired rollout workers of an earlier session, by number, to be used again.
    """

    config: Config
    data: RunData
    namespace: str
    spares: Mapping[int, Role] = field(default_factory=dict)
    rollout: list[Role] = field(default_factory=list)
    reward: list[Role] = field(default_factory=list)
    learner: Role | None = None
    history: Role | None = None
    reward_queue: Any = None
    learner_queue: Any = None
    history_queue: Any = None
    published: Published | None = None
    home: str = ""
    history_node: str = ""
    retrievers: dict[str, Role] = field(default_factory=dict)
    _history_places: tuple[str | None, str | None] = (None, None)
    _engine_nodes: str = ""
    _renewals: dict[int, Any] = field(default_factory=dict)

    @property
    def published_version(self) -> int:
        """Version of that snapshot; 0 before there is one."""
        return self.published.manifest.version if self.published else 0

    def start(
        self,
        *,
        version: int,
        learner_directory: str | None,
        with_learner: bool,
        archive: str | None,
        history: str | None,
    ) -> None:
        """Create queues and actors; returns at once, the actors load in parallel.

        Args:
            version: Version of the weights at ``data.model_path``.
            learner_directory: Component folder of a checkpoint, or None for a fresh optimiser.
            with_learner: False for a run that only evaluates. A colocated learner waits for :meth:`start_learner`.
            archive: Folder of the Parquet archive, or None to keep no rollouts.
            history: Folder of the history store that drafts come from, or None to keep none.
        """
        # Those that load a model begin first: Ray starts a few processes at a time.
        if with_learner and not self.config.colocated:
            self.start_learner(learner_directory)
        self.rollout = [
            self._renewed(i, version) or self._rollout(i, 0, version) for i in range(self.config.rollout.workers)
        ]
        size = self.config.cluster.queue_groups
        self.reward_queue = self._queue("reward-queue", size)
        self.reward = [self._reward(i, 0) for i in range(self.config.reward.workers)]
        if with_learner:
            self.learner_queue = self._queue("learner-queue", size)
        if archive is not None or history is not None:
            self._history_places = (archive, history)
            self.history_queue = self._queue("history-queue", _HISTORY_QUEUE)
            self.history = self._history(0, None)

    def start_learner(self, directory: str | None) -> None:
        """Create the learner; ``directory`` is the component folder of a checkpoint, or None for a fresh optimiser."""
        self.learner = self._learner(directory)

    async def renewed(self) -> None:
        """Wait until the spares have begun anew, and have others take the place of those that could not.

        Raises:
            UserError: What the user has to mend.
        """
        deadline = self.config.cluster.start_deadline_s / 2  # the rest is for those others

        async def one(index: int, renewal: Any) -> None:
            role = self.rollout[index]
            try:
                await asyncio.wait_for(renewal, deadline)
                log.info("%s begins anew in its process", role.name)
            except (ray.exceptions.RayError, TimeoutError) as error:
                fault = user_error(error)
                if fault is not None:
                    raise fault from None
                log.warning("%s cannot be used again: %s", role.name, brief(error))
                ray.kill(role.actor)
                self.replace_rollout(index)

        await asyncio.gather(*(one(index, renewal) for index, renewal in self._renewals.items()))
        self._renewals.clear()

    async def retire(self) -> dict[int, Role]:
        """End the term of the rollout workers; returns those that were able to, by number."""

        async def retired(role: Role) -> bool:
            try:
                await asyncio.wait_for(role.actor.retire.remote(), _RETIRE_S)
            except (ray.exceptions.RayError, TimeoutError):
                return False
            return True

        done = await asyncio.gather(*map(retired, self.rollout))
        return {index: role for index, role in enumerate(self.rollout) if done[index]}

    async def find_engines(self) -> None:
        """Wait until the rollout workers are up, and remember their nodes: a learner that starts then is beside them.

        Ray gives a GPU in parts to whom it fits best, so the learner gets the rest of one that an engine is on. Which
        node it takes is another matter: it prefers an empty one.

        Raises:
            UserError: What a constructor wants the user to mend.
        """

        async def node_of(role: Role) -> str | None:
            try:
                node: str = await role.actor.node.remote()
                return node
            except ray.exceptions.RayError as error:  # its successor goes where it fits
                fault = user_error(error)
                if fault is not None:
                    raise fault from None
                return None

        found = await asyncio.gather(*map(node_of, self.rollout))
        nodes = sorted({node for node in found if node is not None})
        self._engine_nodes = f"in({','.join(nodes)})" if nodes else ""

    def replace_rollout(self, index: int) -> Role:
        """Create a successor of a dead rollout worker; the caller gives it the published weights."""
        self.rollout[index] = self._rollout(index, self.rollout[index].incarnation + 1, self.published_version)
        return self.rollout[index]

    def replace_reward(self, index: int) -> Role:
        """Create a successor of a dead reward worker."""
        self.reward[index] = self._reward(index, self.reward[index].incarnation + 1)
        return self.reward[index]

    def replace_history(self, recorded: int) -> Role:
        """Create a successor of a dead history role, with a queue of its own: a ``get`` of the dead one may be pending.

        Args:
            recorded: Last training step that the dead one has acknowledged; what it wrote beyond is cut off.
        """
        assert self.history is not None
        incarnation = self.history.incarnation + 1
        self.history_queue.shutdown(force=True)
        self.history_queue = self._queue(_name("history-queue", incarnation), _HISTORY_QUEUE)
        self.history = self._history(incarnation, recorded)
        return self.history

    async def locate_history(self) -> None:
        """Learn where the history role runs; it stays unknown when the role dies over the question."""
        self.history_node = ""
        if self.history is not None:
            with suppress(ray.exceptions.RayError):
                self.history_node = await self.history.actor.node.remote()

    def retriever_on(self, node: str) -> Role:
        """Return the role that makes the draft packs of a node; one that died there, Ray starts again."""
        if node not in self.retrievers:
            name = f"drafts-{node[:8]}"
            place = {"num_cpus": 0, "label_selector": {_NODE_ID: node}, "max_restarts": -1}
            actor = self._spawn(
                node_worker, node_worker.NodeDraftWorker, name, place, node[:8], self.config.speculation
            )
            self.retrievers[node] = Role(name, actor)
        return self.retrievers[node]

    def forget_retrievers(self, nodes: Collection[str]) -> None:
        """End the retrievers of all nodes but ``nodes``; Ray would look for ever for a node that has gone."""
        for node in self.retrievers.keys() - nodes:
            ray.kill(self.retrievers.pop(node).actor)

    def everyone(self) -> list[Role]:
        """All living roles."""
        return [*self.rollout, *self.reward, *[r for r in (self.learner, self.history) if r is not None]]

    async def answer(self) -> None:
        """Wait until everyone is up; raises ``UserError`` for what a constructor wants the user to mend."""

        async def one(role: Role) -> None:
            try:
                await role.actor.health.remote()
            except ray.exceptions.RayError as error:  # any other death is for the flow to deal with
                fault = user_error(error)
                if fault is not None:
                    raise fault from None

        await asyncio.gather(*map(one, self.everyone()))

    def shutdown(self, spared: Collection[Role] = ()) -> None:
        """Kill what the conductor started, but for ``spared``; when nothing is in flight."""
        if not self.rollout:  # the start broke off: nobody took them over
            for spare in self.spares.values():
                ray.kill(spare.actor)
        for role in (*self.everyone(), *self.retrievers.values()):
            if role not in spared:
                ray.kill(role.actor)
        for queue in (self.reward_queue, self.learner_queue, self.history_queue):
            if queue is not None:
                queue.shutdown(force=True)

    def _queue(self, name: str, size: int) -> Any:
        place = coordination_need(self.config).options()
        options = {"max_concurrency": _QUEUE_CONCURRENCY, "name": name, "namespace": self.namespace, **place}
        # Ray would keep 3 kB of each of the many calls, of 100,000 calls at once, and show people nothing by them.
        options["enable_task_events"] = False
        return BoundedQueue(size, options)

    def _spawn(self, module: Any, cls: type, name: str, place: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Create an actor; ``place`` are Ray's options that say where: CPUs, GPUs, labels."""
        remote = ray.remote(concurrency_groups=module.CONCURRENCY_GROUPS)(cls)
        options = {"name": name, "namespace": self.namespace, "max_restarts": 0, "max_task_retries": 0, **place}
        return remote.options(**options).remote(*args, **kwargs)

    def _rollout(self, index: int, incarnation: int, version: int) -> Role:
        name, need = _name(f"rollout-{index}", incarnation), self._rollout_need(index)
        settings = self._rollout_settings(index, name, version)
        actor = self._spawn(rollout_worker, rollout_worker.RolloutWorker, name, need.options(), settings)
        return Role(name, actor, incarnation)

    def _renewed(self, index: int, version: int) -> Role | None:
        """Have a spare begin anew in the place of a worker; None where there is none."""
        spare = self.spares.get(index)
        if spare is None:
            return None
        settings = self._rollout_settings(index, spare.name, version)
        self._renewals[index] = spare.actor.renew.remote(spare.term + 1, settings)
        return replace(spare, term=spare.term + 1)

    def _is_long(self, index: int) -> bool:
        return index >= self.config.rollout.workers - self.config.schedule.pools.long.workers

    def _rollout_need(self, index: int) -> Need:
        return long_need(self.config) if self._is_long(index) else rollout_need(self.config)

    def _rollout_settings(self, index: int, name: str, version: int) -> rollout_worker.WorkerSettings:
        options = self.config.rollout
        # Cores are shared out as if all workers were on this host, which holds where nothing is reserved.
        share = max(1, len(os.sched_getaffinity(0)) // options.workers)
        threads = options.threads or int(self._rollout_need(index).cpus) or share
        if self._is_long(index):
            rows = self.config.schedule.pools.long.max_rows or options.max_rows
            options = options.model_copy(update={"max_rows": rows})
        return rollout_worker.WorkerSettings(
            name=name,
            model_path=self.data.model_path,
            version=version,
            options=options,
            speculation=self.config.speculation,
            run_seed=self.config.run.seed,
            max_length=self.data.max_length,
            threads=threads,
        )

    def _reward(self, index: int, incarnation: int) -> Role:
        name = _name(f"reward-{index}", incarnation)
        place = reward_need(self.config).options()
        actor = self._spawn(reward_worker, reward_worker.RewardWorker, name, place, name, self.config.reward)
        return Role(name, actor, incarnation)

    def _learner(self, resume_directory: str | None) -> Role:
        options = self.config.learner
        if self._engine_nodes:
            options = options.model_copy(update={"labels": {_NODE_ID: self._engine_nodes, **options.labels}})
        sampling = self.config.rollout
        place = learner_need(self.config.model_copy(update={"learner": options})).options()
        module: Any = learner_worker
        role: type = learner_worker.LearnerWorker
        if options.workers > 1:
            # the front computes nothing: what is reserved is for the learners that it starts, on nodes of its kind
            module, role = train_group, train_group.LearnerGroup
            place |= {"num_cpus": 0, "num_gpus": 0}
        actor = self._spawn(
            module,
            role,
            "learner",
            place,
            self.data.model_path,
            options,
            self.config.algorithm,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=self.config.run.seed,
            total_steps=self.data.total_steps,
            resume_directory=resume_directory,
            asynchrony=self.config.asynchrony,
            takes_turns=self.config.colocated,
        )
        return Role("learner", actor)

    def _history(self, incarnation: int, recorded: int | None) -> Role:
        name = _name("history", incarnation)
        place = coordination_need(self.config).options()
        if self.home:
            place["label_selector"] = {**place.get("label_selector", {}), _NODE_ID: self.home}
        actor = self._spawn(
            drafts_worker,
            drafts_worker.DraftRetrievalWorker,
            name,
            place,
            *self._history_places,
            self.data.tokenizer_fingerprint,
            self.data.sampling_by_split(self.config),
            self.config.speculation,
            recorded=recorded,
        )
        return Role(name, actor, incarnation)


def home_node() -> str:
    """Id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def _name(slot: str, incarnation: int) -> str:
    return slot + (f".{incarnation}" if incarnation else "")
