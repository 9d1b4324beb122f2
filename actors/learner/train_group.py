"""Several learners as one role: a Ray Train worker group, and a thin front actor that the conductor talks to.

The front has the methods of ``LearnerWorker``. It owns the queue, gives each envelope to every rank, waits until all of
them have answered, and yields what the leading rank answered. Weights reach it by value and leave it as an item of its
generator, so their owner is the conductor: a reference that a rank made would die with the rank.

Ranks ask the front for envelopes instead of waiting for each other: between two steps, while answers are written, no
collective is pending whose deadline could run out.

A rank that dies ends the role, as the death of a single learner does. Ray Train could start the ranks again, but only
from the last checkpoint, and what was trained since then is in the ledger, in the engines and in the history: all of it
has to go back together, which is what resuming the run does.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import ray

from actors.bundles import LearnerHeader, RateEnvelope, StopEnvelope
from actors.channels import GET_DEADLINE_S
from actors.learner.asynchrony_options import AsynchronyOptions
from actors.learner.options import AlgorithmOptions, LearnerOptions
from actors.learner.worker import QueueChannel
from actors.threads import set_torch_threads
from actors.turns import async_turn
from storage.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Everything but health shares one event loop, and with it the state of the role.
CONCURRENCY_GROUPS = {"control": 2}

_LEAST_CPUS = 0.001
"""A placement group has no room for a bundle of nothing. Unit: CPUs."""


class LearnerGroupError(RuntimeError):
    """The group of learners ended before it was told to."""


class LearnerGroup:
    """Leads ``options.workers`` learners; wrap with ``ray.remote(concurrency_groups=CONCURRENCY_GROUPS)``."""

    def __init__(
        self,
        model_path: str,
        options: LearnerOptions,
        algorithm: AlgorithmOptions,
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        max_tokens: int,
        seed: int,
        total_steps: int,
        resume_directory: str | None,
        asynchrony: AsynchronyOptions | None = None,
        takes_turns: bool = False,
    ) -> None:
        """Remember what the ranks need, which is what ``LearnerWorker`` needs; :meth:`run` starts them."""
        self._options = options
        self._settings = {
            "model_path": model_path,
            "options": options,
            "algorithm": algorithm,
            "resume_directory": resume_directory,
            "takes_turns": takes_turns,
            "learner": {
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "max_tokens": max_tokens,
                "seed": seed,
                "total_steps": total_steps,
                "asynchrony": asynchrony,
            },
        }
        self._version = 0
        self._inboxes: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in range(options.workers)]
        self._answers: asyncio.Queue[tuple[int, LearnerHeader, npt.NDArray[np.uint8] | None]] = asyncio.Queue()
        self._ended: asyncio.Future[BaseException | None] | None = None
        self._loop: AsyncIterator[Any] | None = None

    def __repr__(self) -> str:
        """Name shown on the Ray dashboard."""
        return "LearnerGroup"

    async def run(self, queue: Any) -> AsyncIterator[Any]:
        """Start the ranks, announce the published weights, then train until a :class:`StopEnvelope`.

        Yields headers and flat buffers in turns, as ``LearnerWorker.run`` does.

        Raises:
            UserError: What a rank raised and the user can mend.
            LearnerGroupError: A rank died or failed, or the group could not be started.
        """
        self._loop = self._loop or self._work(queue)
        async for item in async_turn(self._loop):
            yield item

    async def _work(self, queue: Any) -> AsyncIterator[Any]:
        from actors.weights import HandOver

        with tempfile.TemporaryDirectory(prefix="slipstream-learners-", ignore_cleanup_errors=True) as folder:
            self._start(folder)  # Ray Train wants a folder for checkpoints; ours have another owner
            header, buffer = await self._answer()
        while True:
            yield header
            payload = None if buffer is None else HandOver(buffer)
            buffer = None  # a snapshot is as large as the model: none may outlive its hand-over
            yield payload
            envelope = await self._next(queue)
            while isinstance(envelope, RateEnvelope):  # nothing is answered to it
                self._tell(envelope)
                envelope = await self._next(queue)
            self._tell(envelope)
            if isinstance(envelope, StopEnvelope):
                await self._end()
                return
            header, buffer = await self._answer()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    async def health(self) -> dict[str, float]:
        """Return the version that the learners are on."""
        return {"version": float(self._version), "learners": float(self._options.workers)}

    async def take(self, rank: int, timeout_s: float) -> Any | None:
        """Give a rank its next envelope; None when there is none within ``timeout_s``."""
        try:
            return await asyncio.wait_for(self._inboxes[rank].get(), timeout_s)
        except TimeoutError:
            return None

    async def answer(self, rank: int, header: LearnerHeader, buffer: npt.NDArray[np.uint8] | None) -> None:
        """Take a rank's answer to an envelope; the first one, ``ready``, is to none."""
        self._answers.put_nowait((rank, header, buffer))

    async def fault(self, error: UserError) -> None:
        """Take what a rank raised and the user can mend: everything else is found out by Ray Train."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)

    def _start(self, folder: str) -> None:
        """Run the worker group on a thread, as ``fit`` returns only at its end."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[BaseException | None] = loop.create_future()
        self._ended = ended
        front = ray.get_runtime_context().current_actor

        def end(outcome: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(outcome)

        def fit() -> None:
            try:
                _trainer(self._options, {**self._settings, "front": front}, folder).fit()
                outcome = None
            except BaseException as error:  # handed to the loop, which knows what was asked of the group
                outcome = error
            loop.call_soon_threadsafe(end, outcome)

        threading.Thread(target=fit, name="worker-group", daemon=True).start()

    def _tell(self, envelope: Any) -> None:
        for inbox in self._inboxes:
            inbox.put_nowait(envelope)

    async def _next(self, queue: Any) -> Any:
        """Return the next envelope of the queue; raises when the group ends before there is one."""
        from ray.util.queue import Empty

        assert self._ended is not None
        while not self._ended.done():
            try:
                return await queue.get_async(timeout=GET_DEADLINE_S)
            except Empty:
                continue
        await self._end()
        raise LearnerGroupError("the learners ended, though nobody asked them to")

    async def _answer(self) -> tuple[LearnerHeader, npt.NDArray[np.uint8] | None]:
        """Wait until every rank has answered; returns the leading rank's answer."""
        assert self._ended is not None
        headers: dict[int, LearnerHeader] = {}
        buffer = None
        while len(headers) < self._options.workers:
            getting = asyncio.ensure_future(self._answers.get())
            either: set[asyncio.Future[Any]] = {getting, self._ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                getting.cancel()
                await self._end()
                raise LearnerGroupError("the learners ended while they were at work")
            rank, headers[rank], weights = getting.result()
            buffer = weights if rank == 0 else buffer
            del getting, either, weights
        self._version = headers[0].version
        if any(header.version != self._version for header in headers.values()):
            versions = ", ".join(str(headers[rank].version) for rank in sorted(headers))
            raise LearnerGroupError(f"the learners are on different versions ({versions}): resume from a checkpoint")
        return headers[0], buffer

    async def _end(self) -> None:
        """Wait for the end of the group; raises what ended it, if that was not a request."""
        assert self._ended is not None
        error = await self._ended
        if isinstance(error, UserError):
            raise error
        if error is not None:
            raise LearnerGroupError(_explain(error, self._options.workers)) from error


def scaling(options: LearnerOptions) -> Any:
    """Return the ``ScalingConfig`` that places the ranks as ``options`` ask."""
    from ray.train import ScalingConfig

    return ScalingConfig(
        num_workers=options.workers,
        use_gpu=options.num_gpus > 0,
        resources_per_worker={"CPU": max(options.num_cpus, _LEAST_CPUS)}
        | ({"GPU": options.num_gpus} if options.num_gpus else {}),
        label_selector=dict(options.labels) or None,
    )


def _trainer(options: LearnerOptions, settings: dict[str, Any], folder: str) -> Any:
    # read where the trainer is made: ranks must find relative paths where everybody else does
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    from ray.train import FailureConfig, RunConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    return TorchTrainer(
        _learn_as_rank,
        train_loop_config=settings,
        torch_config=TorchConfig(
            backend="nccl" if options.num_gpus else "gloo", timeout_s=max(1, int(options.deadline_s))
        ),
        scaling_config=scaling(options),
        run_config=RunConfig(
            name="learners",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=0, max_preemption_failures=0),
            # Ray Train imports torch before it calls us, and OpenMP reads its policy when it is loaded
            worker_runtime_env={"env_vars": {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}},
        ),
    )


class _Inbox:
    """A rank's end of the front's queue, with the one method that ``QueueReader`` needs."""

    def __init__(self, front: Any, rank: int) -> None:
        self._front, self._rank = front, rank

    def get(self, timeout: float) -> Any:
        from ray.util.queue import Empty

        envelope = ray.get(self._front.take.remote(self._rank, timeout))
        if envelope is None:
            raise Empty
        return envelope


def _learn_as_rank(settings: dict[str, Any]) -> None:
    """Be one of the learners; runs in a process of the worker group."""
    front = settings["front"]
    try:
        _loop(settings, front)
    except UserError as error:
        ray.get(front.fault.remote(error))
        raise


def _loop(settings: dict[str, Any], front: Any) -> None:
    import torch
    from ray import train
    from ray.train.torch import get_device

    from actors.learner.learn import announce
    from actors.learner.learner import Learner
    from actors.learner.ranks import Ranks
    from storage.remote.parcels import local_folder

    options: LearnerOptions = settings["options"]
    place = train.get_context()
    cores = len(os.sched_getaffinity(0)) // place.get_local_world_size()
    set_torch_threads(options.threads or max(1, cores))
    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    learner = Learner(
        local_folder(settings["model_path"]),
        options.model_copy(update={"device": device.type}),
        settings["algorithm"],
        **settings["learner"],
        ranks=Ranks.join(options.deadline_s),
    )
    if settings["resume_directory"] is not None:
        learner.load(local_folder(settings["resume_directory"]))
    rank = place.get_world_rank()
    channel = QueueChannel(_Inbox(front, rank))
    for header, buffer in announce(learner, channel, takes_turns=settings["takes_turns"]):
        answered = front.answer.remote(rank, header, buffer)
        del buffer
        ray.get(answered)
        del answered


def _explain(error: BaseException, workers: int) -> str:
    """Say in one line which rank broke the group: when one dies, the others lose their connections and fail too."""
    from ray.train import WorkerGroupError

    if not isinstance(error, WorkerGroupError):
        return f"the {workers} learners could not be started or kept: {_first_line(error)}"
    failures = error.worker_failures
    dead = [rank for rank, failure in failures.items() if hasattr(failure, "health_check_failure")]
    rank = min(dead or failures)
    what = "died" if dead else f"failed: {_first_line(failures[rank])}"
    return f"learner {rank} of {workers} {what}; what was trained since the last checkpoint is lost with the group"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
