"""Processes of the tests' Ray are forks that know nothing of each other, and can be killed one by one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm_workers

SCRIPT = """
import os, sys
with open(sys.argv[1], "w") as file:
    print(os.getpid(), os.getcwd(), os.environ["WHO"], "torch" in sys.modules, sys.argv[2:], file=file)
print("printed")
sys.stdout.flush()
if sys.argv[2] == "wait":
    import time
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    started = warm_workers.Template(tmp_path_factory.mktemp("warm"))
    yield started
    started.close()


def start(template, script: Path, *arguments: str, who: str) -> subprocess.Popen[str]:
    """As Ray starts a worker; options that its own set-up script takes are left out."""
    command = [sys.executable, warm_workers.__file__, str(script), *arguments, "--language=PYTHON"]
    environment = {**os.environ, warm_workers.SOCKET: template.address, "WHO": "nobody"}
    context = json.dumps({"env_vars": {"WHO": who}})
    return subprocess.Popen(
        [*command, f"--serialized-runtime-env-context={context}"],
        env=environment,
        cwd=script.parent,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_process_gets_its_own_arguments_environment_folder_and_output(template, tmp_path):
    script = tmp_path / "work.py"
    script.write_text(SCRIPT)
    asked = [start(template, script, str(tmp_path / name), "go", who=name) for name in ("a", "b")]
    assert [process.communicate(timeout=60)[0] for process in asked] == ["printed\n", "printed\n"]
    told = [(tmp_path / name).read_text().split(maxsplit=4) for name in ("a", "b")]
    assert told[0][0] != told[1][0]
    for name, (_, folder, who, warm, arguments) in zip(("a", "b"), told, strict=True):
        assert (folder, who, warm, arguments) == (str(tmp_path), name, "True", "['go']\n")


def test_whoever_asked_ends_when_the_process_is_killed(template, tmp_path):
    script = tmp_path / "work.py"
    script.write_text(SCRIPT)
    asked = start(template, script, str(tmp_path / "a"), "wait", who="a")
    assert asked.stdout.readline() == "printed\n"
    os.kill(int((tmp_path / "a").read_text().split()[0]), signal.SIGKILL)
    assert asked.wait(20) == 0


def test_whoever_waits_for_a_template_that_cannot_start_starts_as_usual(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command))
    monkeypatch.setattr(warm_workers, "_FORKABLE", {"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"})
    broken = warm_workers.Template(tmp_path)
    monkeypatch.setenv(warm_workers.SOCKET, broken.address)
    warm_workers.ask(["/x/default_worker.py"])
    assert len(started) == 1
    broken.close()


def test_without_a_template_a_process_starts_as_usual(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command))
    monkeypatch.setenv(warm_workers.SOCKET, str(tmp_path / "gone.sock"))
    warm_workers.ask(["/x/default_worker.py", "--a"])
    assert started[0][1].endswith("setup_worker.py")
    assert started[0][2:] == ["/x/default_worker.py", "--a"]
    warm_workers.ask(["/x/default_worker.py", '--serialized-runtime-env-context={"command_prefix": ["nice"]}'])
    assert started[1][2:] == ["/x/default_worker.py", '--serialized-runtime-env-context={"command_prefix": ["nice"]}']
