"""A cluster of two nodes that are both this machine, brought up by a real ``ray up`` from the shipped file.

``ssh``, ``rsync``, ``pip`` and ``ray stop`` have stand-ins; everything else is Ray's launcher, autoscaler and dashboard
as users get them. Needs no sshd, no rights and no network beyond the loopback.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.conftest import ROOT, SHIPPED

HEAD, WORKER = "127.0.0.1", "127.0.0.2"
TOKEN = "loopback-token-0123456789abcdef0123456789abcdef"
_BIN = Path(__file__).parent / "bin"
_NODE_OPTIONS = (
    "--node-manager-port=0 --object-manager-port=0 --min-worker-port=0 --max-worker-port=0 "
    "--object-store-memory=100000000 --disable-usage-stats"
)


class LoopbackCluster:
    """Directories, environment and commands of the cluster.

    Attributes:
        home: Home directory of the user's machine and of both nodes.
        file: The cluster file.
        log: What the stand-ins were asked to do, a line each.
        url: Address of the dashboard.
    """

    def __init__(self, directory: Path) -> None:
        self.home = directory / "home"
        self.log = directory / "log"
        self.file = directory / "cluster.yaml"
        ports = _free_ports(9)
        self.url = f"http://127.0.0.1:{ports[1]}"
        self._fill_home()
        self.environment = {
            "HOME": str(self.home),
            "USER": "loopback",
            "LANG": "C.UTF-8",
            "PATH": os.pathsep.join([str(directory / "bin"), str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
            "TMPDIR": str(directory),
            "RAY_TMPDIR": str(directory / "user"),
            "RAY_AUTH_MODE": "token",
            "LOOPBACK_TMPDIR": str(directory / "node"),
            "LOOPBACK_LOG": str(self.log),
        }
        for name in ("user", "node", "bin"):
            (directory / name).mkdir()
        for name in ("ssh", "rsync"):
            _install(name, directory / "bin")
        self.file.write_text(yaml.safe_dump(_changed(ports, directory.name)))

    def run(self, *command: str, timeout: float, check: bool = True) -> str:
        """Run a command as the user would, in the project's folder; returns what it printed."""
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            start_new_session=True,  # an interactive shell in there must not take the terminal
        )
        assert not check or done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def ask(self, path: str, token: str | None = TOKEN) -> Any:
        """Ask the dashboard; returns the answer of its state API, or the status of a refusal."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=20) as answer:
                return json.load(answer)["data"]["result"]["result"]
        except urllib.error.HTTPError as error:
            return error.code

    def wait_for_nodes(self, count: int, timeout: float) -> list[dict[str, Any]]:
        """Wait until so many nodes are alive; returns them."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                nodes = [node for node in self.ask("/api/v0/nodes?detail=true") if node["state"] == "ALIVE"]
            except OSError:
                nodes = []
            if len(nodes) >= count:
                return nodes
            assert time.monotonic() < deadline, f"{len(nodes)} of {count} nodes after {timeout:g} s\n{self.told()}"
            time.sleep(2.0)

    def told(self) -> str:
        """What the stand-ins were told, and the autoscaler's own log."""
        logs = [self.log, *(self.log.parent / "node").glob("ray/session_latest/logs/monitor*")]
        return "\n".join(f"== {log.name}\n{log.read_text()[-4000:]}" for log in logs if log.exists())

    def _fill_home(self) -> None:
        for name, text in {
            ".ray/auth_token": TOKEN,
            ".ssh/id_ed25519": "no key is needed",
            # A login shell sets PATH anew; the head's autoscaler must find the stand-ins.
            ".bashrc": f"export PATH={self.home.parent / 'bin'}:$PATH\n",
        }.items():
            path = self.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        venv = self.home / "slipstream-venv" / "bin"
        venv.mkdir(parents=True)
        _install("pip", venv)
        _install("ray", venv, interpreter=sys.executable)
        python = venv / "python"
        python.write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)


def _install(name: str, directory: Path, interpreter: str | None = None) -> None:
    target = directory / name
    shutil.copyfile(_BIN / name, target)
    if interpreter:
        target.write_text(f"#!{interpreter}\n{target.read_text()}")
    target.chmod(0o755)


def _changed(ports: Sequence[int], name: str) -> dict[str, Any]:
    """The shipped file with addresses of this machine, and ports that let two nodes and other clusters live on it."""
    data: dict[str, Any] = yaml.safe_load(SHIPPED["local"].read_text())
    gcs, dashboard, client, *others = ports
    per_node = [
        f"{_NODE_OPTIONS} --dashboard-agent-listen-port={listen} --dashboard-agent-grpc-port={grpc} "
        f"--metrics-export-port={metrics}"
        for listen, grpc, metrics in (others[:3], others[3:])
    ]
    head = f"--port={gcs} --dashboard-port={dashboard} --ray-client-server-port={client} {per_node[0]}"
    worker = f"=$RAY_HEAD_IP:{gcs} --node-ip-address={WORKER} --num-cpus=4 {per_node[1]}"
    data["cluster_name"] = name
    data["provider"] |= {"head_ip": HEAD, "worker_ips": [WORKER]}
    for field, old, new in (
        ("head_start_ray_commands", "--port=6379", head),
        ("worker_start_ray_commands", "=$RAY_HEAD_IP:6379", worker),
    ):
        assert any(old in command for command in data[field])
        data[field] = [command.replace(old, new) for command in data[field]]
    return data


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
