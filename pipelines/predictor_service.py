"""Runs the length predictor as a service: Ray, Serve, HTTP, a state file, until a signal ends it."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from actors.length_predictor.client import PredictorClient
from actors.length_predictor.options import LengthPredictorOptions
from actors.length_predictor.predictor import LengthPredictor, dump_state, parse_state
from actors.length_predictor.records import Observation
from pipelines.config import ClusterOptions, Config, RunOptions
from pipelines.remote_views import find_readable
from storage.errors import UserError
from storage.files import StorageError, atomic_write, describe_failure
from storage.history.archive import RolloutArchive
from storage.run_directory import RunDirectory

_RESTORE_S = 60.0
_COLUMNS = ["split", "epoch", "prompt", "duplicate", "prompt_text", "length", "finish_reason", "finished_at"]
_UNFINISHED = ("abort", "error")


def serve_predictor(
    options: LengthPredictorOptions,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    state: Path | None = None,
    history: str | None = None,
    address: str = "",
    console: Console | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM; returns 0 after an orderly end.

    Args:
        options: Options of the predictor.
        host: Address to listen at. Anything but loopback is open to the network, without authentication.
        port: Port to listen at, 1 to 65535.
        state: File that the predictor's state is read from, if it exists, and saved to: at every
            ``state_interval_s`` and at the end.
        history: A run whose archived answers the predictor learns from first; not used when ``state`` exists.
        address: Ray cluster to join; empty: ``RAY_ADDRESS``, else a local Ray.
        console: Where to report; default: standard output.

    Raises:
        UserError: A port that is taken or none at all, a state file that is damaged or in no folder, a run that does
            not exist or kept no answers, an embedding that is not installed, or no Ray.
    """
    console = console or Console()
    if not 1 <= port <= 65_535:
        raise UserError(f"--port {port}: choose one from 1 to 65535")
    known = initial_state(options, state, history, console)
    # Imported late, so that bad input is refused before Serve loads.
    from actors.length_predictor import serve_app
    from pipelines.cluster import local_or_joined_ray

    config = Config(cluster=ClusterOptions(address=address, dashboard=False))
    with local_or_joined_ray(config, console):
        handle = serve_app.deploy(options, host=host, port=port)
        try:
            asyncio.run(_serve(PredictorService(handle, options, known, state), _url(host, port), host, console))
        finally:
            serve_app.remove()
    console.print("length predictor stopped", highlight=False)
    return 0


class PredictorService:
    """Keeps the predictor's state safe: on disk, and in this process for a replica that has to be replaced."""

    def __init__(self, handle: Any, options: LengthPredictorOptions, known: bytes, path: Path | None) -> None:
        """Keep the state of ``handle``, at first ``known``, in the file ``path`` if there is one."""
        self._client = PredictorClient(handle, options, known)
        self._path = path
        self._interval_s = options.state_interval_s
        self._saved = known

    async def run(self, stop: asyncio.Event, ready: Any) -> None:
        """Restore, call ``ready()``, save now and then and once more when ``stop`` is set."""
        await self._client.start()
        if not await self._client.flush(_RESTORE_S):
            raise UserError(f"the length predictor does not answer within {_RESTORE_S:g} s: see Ray's logs")
        ready()
        try:
            while not stop.is_set():
                try:
                    await asyncio.wait_for(stop.wait(), self._interval_s)
                except TimeoutError:
                    await self._save()
            await self._save()
        finally:
            await self._client.close()

    async def _save(self) -> None:
        state = await self._client.state()
        if self._path is not None and state and state != self._saved:
            atomic_write(self._path, state)
            self._saved = state


def observations_of(run: Path) -> Iterator[list[Observation]]:
    """Yield the finished answers of a run's training steps, a step at a time, in the order in which they finished.

    Raises:
        UserError: The run kept no answers, or a file of them is damaged.
    """
    archive = RolloutArchive(RunDirectory(run).rollouts)
    if not archive.steps():
        raise UserError(f"{run} holds no rollouts to learn from: it was run with tracking.rollouts=off, or not at all")
    for _, table in archive.iterate():
        rows = [row for row in table.select(_COLUMNS).to_pylist() if row["finish_reason"] not in _UNFINISHED]
        names = ["/".join(str(row[name]) for name in _COLUMNS[:4]) for row in rows]
        sizes = {name: names.count(name) for name in set(names)}
        ordered = sorted(zip(names, rows, strict=True), key=lambda pair: float(pair[1]["finished_at"]))
        yield [
            Observation(text=row["prompt_text"], length=row["length"], group=name, group_size=sizes[name])
            for name, row in ordered
        ]


def initial_state(options: LengthPredictorOptions, state: Path | None, history: str | None, console: Console) -> bytes:
    """Return what the predictor starts with: the state file if there is one, else what a run teaches, else nothing.

    Raises ``UserError`` as :func:`serve_predictor` does.
    """
    predictor = LengthPredictor(options)
    if state is not None and not state.absolute().parent.is_dir():
        raise UserError(f"--state {state}: the folder does not exist")
    if state is not None and state.exists():
        try:
            data = state.read_bytes()
        except OSError as error:
            raise StorageError(describe_failure("cannot read", state, error)) from error
        try:
            predictor.load_state(parse_state(data))
        except UserError as error:
            raise UserError(f"--state {state}: {error}, that is, name another file or remove this one") from error
        console.print(f"continues from {state}: {predictor.answers:,} answers seen", highlight=False)
        if history is not None:
            console.print(f"--history {history} is not read again: the state goes before it", highlight=False)
        return data
    if history is None:
        return b""
    run = find_readable(history, Path(RunOptions().directory), "rollouts/train/").path
    for batch in observations_of(run):
        predictor.observe(batch)
    console.print(f"learnt from {predictor.answers:,} answers of {run}", highlight=False)
    return dump_state(predictor.state())


async def _serve(service: PredictorService, url: str, host: str, console: Console) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def ready() -> None:
        console.print(f"length predictor at {url} (schema at {url}/openapi.json); Ctrl-C stops it", highlight=False)
        if not _is_loopback(host):
            console.print(f"warning: {host} is open to the network, and there is no authentication", highlight=False)

    try:
        await service.run(stop, ready)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
