"""The command line: what it says, how it exits, and that it hands on what it was told."""

from __future__ import annotations

import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines import cli
from pipelines.config import Config
from pipelines.config_loader import load, write_config
from storage.errors import UserError

ROOT = Path(__file__).parents[2]
COMMANDS = ("train", "eval", "status", "show", "config", "bench", "version")


class Recorder:
    """Stands in for a module with heavy imports and notes its calls."""

    def __init__(self, result: Any = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.result = result

    def function(self, name: str) -> Any:
        def call(*positional: Any, **named: Any) -> Any:
            self.calls.append((name, positional, named))
            if isinstance(self.result, BaseException):
                raise self.result
            return self.result

        return call


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Put a recorder in the place of a module that a command imports."""

    def put(module: str, *functions: str, result: Any = None) -> Recorder:
        recorder = Recorder(result)
        stand_in = types.ModuleType(module)
        for name in functions:
            setattr(stand_in, name, recorder.function(name))
        parent, _, name = module.rpartition(".")
        monkeypatch.setitem(sys.modules, module, stand_in)
        monkeypatch.setattr(
            sys.modules[parent] if parent in sys.modules else __import__(parent), name, stand_in, raising=False
        )
        return recorder

    return put


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one run in it and a preset file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("rollout: {max_tokens: 50}\n")
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    write_config(load(["run.yaml"]).config, run / "config.yaml")
    return tmp_path


def shell(*arguments: str, cwd: Path = ROOT, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipelines", *arguments],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "100", "HOME": str(cwd)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


# -- help -------------------------------------------------------------------------------------------------------------


def test_help_names_every_command_and_is_quick() -> None:
    shell("--help")  # compiles what is not compiled yet
    began = time.perf_counter()
    done = shell("--help")
    seconds = time.perf_counter() - began
    assert done.returncode == 0
    assert all(f" {command} " in done.stdout for command in COMMANDS)
    assert seconds < 3, "about 0.3 s on an idle core; importing torch or Ray takes longer than this"


def test_without_arguments_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    without = capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    assert without == capsys.readouterr().out != ""


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "version"])
def test_help_of_each_command_teaches_by_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Examples" in text
    assert text.count(f"slipstream {command}") >= 2


def test_python_m_pipelines_is_the_same_program(work: Path) -> None:
    done = shell("train", "rolout.samples=3", "run.yaml", cwd=work)
    assert done.returncode == 2
    assert done.stdout == ""
    expected = (
        "error: rolout.samples: unknown key (command line: rolout.samples=3); did you mean rollout.samples_per_prompt?"
    )
    assert done.stderr.strip() == expected


# -- exit status ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "missing.yaml"], "missing.yaml: no such file"),
        (["train", "run.yaml", "rollout.max_rows=0"], "rollout.max_rows: got 0"),
        (["train", "--resume", "nothing"], "nothing does not exist"),
        (["config", "temprature"], "did you mean rollout.temperature?"),
        (["config", "rollout", "--yaml"], "drop the filter"),
        (["eval", "missing", "run.yaml", "zzz=1"], "zzz: unknown key"),
    ],
)
def test_user_errors_exit_with_2_and_one_message(
    work: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert expected in printed.err
    assert "Traceback" not in printed.err


def test_wrong_options_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "--limit", "0"]) == 2
    assert cli.main(["trian"]) == 2
    assert "trian" in capsys.readouterr().err


def test_interrupt_exits_with_130(work: Path, replace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    replace("pipelines.launch", "train", result=KeyboardInterrupt())
    assert cli.main(["train", "run.yaml"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_bugs_are_not_hidden(work: Path, replace: Any) -> None:
    replace("pipelines.launch", "train", result=RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["train", "run.yaml"])


@pytest.mark.parametrize("arguments", [["config"], ["config", "--yaml"], ["--help"]])
def test_closed_pipe_is_quiet(work: Path, arguments: list[str]) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "pipelines", *arguments],
        cwd=work,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    child.stdout.close()  # as head does, here before the first byte
    assert child.stderr is not None
    assert child.stderr.read() == ""
    child.stderr.close()
    child.wait(60)


# -- what is handed on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 1, 2])
def test_train_hands_on_config_and_name_and_returns_the_status(work: Path, replace: Any, status: int) -> None:
    launch = replace("pipelines.launch", "train", result=status)
    assert cli.main(["train", "run.yaml", "run.steps=3"]) == status
    [(_, (config,), named)] = launch.calls
    assert isinstance(config, Config)
    assert (config.rollout.max_tokens, config.run.steps) == (50, 3)
    assert named == {"name": "run", "resume": None, "detach": False}


def test_train_says_what_is_doubtful_and_goes_on(work: Path, replace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    launch = replace("pipelines.launch", "train", result=0)
    assert cli.main(["train", "run.yaml", "rollout.top_p=0.5"]) == 0
    assert len(launch.calls) == 1
    assert "warning: rollout.top_p=0.5" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["one", "runs/one"])
def test_resume_finds_the_run_by_name_or_directory(work: Path, replace: Any, name: str) -> None:
    launch = replace("pipelines.launch", "train", result=0)
    assert cli.main(["train", "--resume", name, "run.steps=80"]) == 0
    [(_, (config,), named)] = launch.calls
    assert (config.rollout.max_tokens, config.run.steps) == (50, 80)
    assert named["resume"] == Path("runs/one")


def test_resume_refuses_another_model(work: Path, replace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    launch = replace("pipelines.launch", "train", result=0)
    assert cli.main(["train", "--resume", "one", "model=smollm2"]) == 2
    assert launch.calls == []
    assert "cannot change when a run is resumed" in capsys.readouterr().err


def test_eval_hands_on_target_and_config(work: Path, replace: Any) -> None:
    launch = replace("pipelines.launch", "evaluate", result=0)
    assert cli.main(["eval", "runs/one", "evaluation.samples=4"]) == 0
    [(_, (target, config), _)] = launch.calls
    assert target == "runs/one"
    assert (config.rollout.max_tokens, config.evaluation.samples) == (50, 4)


def test_show_and_status_hand_on_the_latest_run_and_the_options(work: Path, replace: Any) -> None:
    shown = replace("pipelines.show", "show", "status", "plot")
    assert cli.main(["show", "--step", "3", "--prompt", "7", "--limit", "2", "--order", "worst"]) == 0
    assert cli.main(["status", "--plot"]) == 0
    run = Path("runs/one")
    options = {"step": 3, "prompt": 7, "limit": 2, "split": "train", "order": "worst"}
    assert shown.calls == [("show", (run,), options), ("status", (run,), {}), ("plot", (run,), {})]


def test_config_file_printed_by_the_command_loads(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--yaml"]) == 0
    Path("all.yaml").write_text(capsys.readouterr().out)
    assert load(["all.yaml"]).config == Config()


def test_version_names_what_results_depend_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    text = capsys.readouterr().out
    assert all(f"{package} " in text for package in ("slipstream", "ray", "torch", "transformers"))


def test_user_error_from_deep_inside_is_a_message(work: Path, replace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    replace("pipelines.launch", "train", result=UserError("data.train: no rows"))
    assert cli.main(["train", "run.yaml"]) == 2
    assert capsys.readouterr().err == "error: data.train: no rows\n"
