"""Processes of the tests' Ray that start in a moment: forks of one process that has imported everything already.

A whole run takes seven processes, and two of them import torch and transformers: most of a minute's CPU time on a small
machine, for a run of a second. Ray starts each of its workers by running a script; tests have it run this one, which
asks a template process for a fork of itself in its place. What is forked is a process like any other from there on: it
executes Ray's own worker script, has an identity and a fate of its own, and can be killed. The command line, `ray up`
and emulated nodes start their processes the ordinary way, in tests of their own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

SOCKET = "SLIPSTREAM_WARM_WORKERS"
"""Environment variable with the address of the template process."""

_ROOT = Path(__file__).parents[1]
_IMPORTED = (
    "actors.drafts.retriever",
    "actors.learner.learn",
    "actors.learner.learner",
    "actors.rollout.draft_warm_up",
    "actors.rollout.engine_loop",
    "actors.rollout.history_drafts",
    "actors.rollout.paced",
    "actors.rollout.questions",
    "actors.rollout.torch_engine",
    "jsonschema",
    "msgpack",
    "pipelines.config_loader",
    "pipelines.monitoring",
    "pipelines.progress",
    "referencing.jsonschema",
    "requests",
    "storage.checkpoints",
    "storage.history.archive",
    "storage.models",
    "storage.remote.held_run",
    "tensorboard.summary.writer.event_file_writer",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "uvloop",
)
"""All that is slow to import but Ray, and what Ray imports: Ray itself does not start where it was loaded before."""

_FORKABLE = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Libraries read these when they are loaded: none of them may start a thread then, which no fork would have."""

_ENV_OPTION = "--serialized-runtime-env-context="
_LANGUAGE_OPTION = "--language="
_LENGTH_BYTES = 8


class Template:
    """The template process, for as long as the tests need it."""

    def __init__(self, folder: Path) -> None:
        """Start it; whoever asks for a process before it has imported everything waits."""
        self.address = str(folder / "warm.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.address)
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_workers", str(listener.fileno())],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env=os.environ | _FORKABLE,
            )

    def close(self) -> None:
        """End it; processes that it has forked go on."""
        self._process.kill()
        self._process.communicate()


def ask(arguments: list[str]) -> None:
    """Be the process that Ray starts: have a fork run ``arguments`` and end when it does."""
    script = next(i for i, argument in enumerate(arguments) if argument.endswith(".py"))
    environment = next((a.removeprefix(_ENV_OPTION) for a in arguments if a.startswith(_ENV_OPTION)), "")
    passed = [a for a in arguments[script:] if not a.startswith((_ENV_OPTION, _LANGUAGE_OPTION))]
    variables = _variables(environment)
    if variables is None:
        return _start_as_usual(arguments)
    request = {"argv": passed, "environment": os.environ | variables, "folder": os.getcwd()}
    message = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(os.environ[SOCKET])
            length = len(message).to_bytes(_LENGTH_BYTES, "big")
            socket.send_fds(connection, [length], [0, 1, 2])
            connection.sendall(message)
            begun = connection.recv(1)
        except OSError:
            begun = b""
        if not begun:  # there is no template, or none any more
            return _start_as_usual(arguments)
        with suppress(OSError):
            connection.recv(1)  # returns when the fork has ended, and its end of the line with it
    return None


def _variables(environment: str) -> dict[str, str] | None:
    """What a worker's runtime environment adds to its variables; None where it takes more than that."""
    context = json.loads(environment) if environment else {}
    variables: dict[str, str] = context.get("env_vars") or {}
    own = context.get("py_executable") not in (None, sys.executable)
    if own or context.get("command_prefix") or any("$" in value for value in variables.values()):
        return None
    return variables


def _start_as_usual(arguments: list[str]) -> None:
    from ray._private.workers import setup_worker

    os.execv(sys.executable, [sys.executable, setup_worker.__file__, *arguments])


def serve(listener: socket.socket) -> list[str] | None:
    """Fork whenever a process is asked for; returns its command in the fork, and None here when the tests are over."""
    import gc
    import importlib

    for name in _IMPORTED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, every page that the forks share
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    if threads > 1:
        sys.stderr.write(f"the template process has {threads} threads: imports may not start any\n")
        return None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended leave nothing behind
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        try:
            head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 3)
            request = json.loads(_read(connection, int.from_bytes(head, "big")))
        except (OSError, ValueError):  # whoever asked has died meanwhile
            connection.close()
            continue
        if os.fork() == 0:
            return _become(request, descriptors, connection, listener)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.close()


def _become(
    request: dict[str, object], descriptors: list[int], connection: socket.socket, listener: socket.socket
) -> list[str]:
    listener.close()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    environment, folder, argv = request["environment"], request["folder"], request["argv"]
    assert isinstance(environment, dict)
    assert isinstance(argv, list)
    os.chdir(str(folder))
    os.environ.clear()
    os.environ.update(environment)
    connection.sendall(b"1")
    connection.detach()  # open until this process ends: then whoever asked for it ends, too
    return [str(argument) for argument in argv]


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise OSError("the line was closed")
        data += part
    return data


def main() -> None:
    """Be the template process when started as a module by :class:`Template`, and the process that asks otherwise."""
    if __package__ != "tests":
        ask(sys.argv[1:])
        return
    command = serve(socket.socket(fileno=int(sys.argv[1])))
    if command is not None:
        import runpy

        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
