"""The quickstart benchmark's figures from made-up runs, and its way to run and watch a real process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipelines.bench import quickstart, training
from pipelines.bench.memory import MemorySample, ProcessInfo, members, role_of, sample_tree
from pipelines.bench.training import TrainingRun, run_training
from storage.errors import UserError


def finished(name, seconds, accuracies, *, peak=2e9, generate=0.6):
    records = [{"step": 0, "time": 112.0, "time/evaluate_s": 2.0, "eval/heldout/accuracy": accuracies[0]}]
    for step in range(1, 4):
        records.append(
            {
                "step": step,
                "time": 112.0 + step,
                "time/step_s": 1.0,
                "time/generate_s": generate,
                "rollout/length_p50": 10.0,
                "rollout/length_p90": 30.0 + step,
            }
        )
    records.append({"step": 3, "time": 117.0, "time/evaluate_s": 1.0, "eval/heldout/accuracy": accuracies[1]})
    sample = None if peak is None else MemorySample({"learner": int(peak * 0.6), "rollout": int(peak * 0.4)})
    return TrainingRun(directory=Path(name), began=100.0, seconds=seconds, records=records, peak=sample)


def test_the_worst_run_decides_accuracy_and_memory():
    first = finished("first", 120.0, (0.5, 0.95), peak=3e9)
    later = [finished("a", 80.0, (0.6, 0.92)), finished("b", 100.0, (0.55, 0.97)), finished("c", 90.0, (0.5, 0.99))]
    figures = quickstart.report(first, later).figures
    assert figures["first_s"] == 120.0
    assert figures["later_s"] == 90.0
    assert figures["startup_s"] == pytest.approx(10.0)
    assert figures["accuracy_before"] == 0.5
    assert figures["accuracy_after"] == 0.92
    assert figures["accuracy_gain"] == pytest.approx(0.32)
    assert figures["peak_pss_gb"] == pytest.approx(3.0)
    assert figures["rollout_share"] == pytest.approx(0.6)
    assert figures["length_p90_over_p50"] == pytest.approx(3.2)


def test_without_a_memory_figure_the_others_stand():
    result = quickstart.report(finished("f", 1.0, (0, 1), peak=None), [finished("l", 1.0, (0, 1), peak=None)])
    assert "peak_pss_gb" not in result.figures
    assert any("memory was not measured" in note for note in result.notes)


def test_the_tree_holds_descendants_and_orphans_of_its_ray_session_and_nobody_else():
    session = "session_2030-01-02_03-04-05_678901_10"
    other = "session_2031-01-02_03-04-05_678901_99"
    running = [
        ProcessInfo(10, 1, "python -m pipelines train"),
        ProcessInfo(11, 10, f"raylet --session_dir=/tmp/ray/{session}"),
        ProcessInfo(12, 11, "ray::RolloutWorker"),
        ProcessInfo(13, 1, f"agent --session-dir=/tmp/ray/{session}/logs"),  # its parent has died
        ProcessInfo(14, 13, "child of the orphan"),
        ProcessInfo(20, 1, f"raylet --session_dir=/tmp/ray/{other}"),
        ProcessInfo(21, 20, "ray::RolloutWorker"),
    ]
    assert {p.pid for p in members(10, running)} == {10, 11, 12, 13, 14}
    assert list(members(999, running)) == []


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("ray::rollout-0:RolloutWorker.__init__", "rollout"),
        ("ray::generate[rollout-1.2]", "rollout"),
        ("ray::run[learner]", "learner"),
        ("ray::run[reward-0]", "reward"),
        ("/usr/bin/python -m actors.reward.child", "reward functions"),
        ("ray::run[history]", "history"),
        ("ray::_QueueActor.get", "queues"),
        ("ray::IDLE", "idle Ray workers"),
        ("/x/core/src/ray/raylet/raylet --raylet_socket_name=y", "Ray: raylet"),
        ("/x/core/src/ray/gcs/gcs_server --log_dir=y", "Ray: control store"),
        ("sleep 5", "other"),
    ],
)
def test_processes_are_named_by_what_they_do(command, role):
    assert role_of(command) == role


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Stand in for ``python -m pipelines train``: a script that is called with the same arguments."""

    def install(text):
        script = tmp_path / "interpreter"
        script.write_text(f"#!{sys.executable}\nimport json, os, pathlib, sys, time\n{text}")
        script.chmod(0o755)
        monkeypatch.setattr(training.sys, "executable", str(script))

    return install


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_run_is_timed_read_and_its_memory_sampled(program, tmp_path, monkeypatch):
    program(
        "settings = dict(a.split('=') for a in sys.argv[4:])\n"
        "run = pathlib.Path(settings['run.directory']) / settings['run.name']\n"
        "run.mkdir()\n"
        "ballast = bytearray(50_000_000)\n"
        "time.sleep(0.6)\n"
        "line = {'step': 1, 'time': time.time(), 'time/step_s': 0.1, 'seed': settings['run.seed'],\n"
        "        'cache': os.environ['SLIPSTREAM_CACHE']}\n"
        "(run / 'metrics.jsonl').write_text(json.dumps(line) + '\\n')\n"
    )
    monkeypatch.setattr(training, "_SAMPLE_S", 0.1)
    done = run_training(tmp_path, "r", ["run.seed=4"], environment={"SLIPSTREAM_CACHE": "here"}, sample_memory=True)
    assert done.seconds > 0.6
    assert (done.steps[0]["seed"], done.steps[0]["cache"]) == ("4", "here")
    assert 0 < done.startup_s < done.seconds
    assert done.peak is not None
    assert done.peak.total > 50_000_000
    with pytest.raises(UserError, match="exists already"):
        run_training(tmp_path, "r")


def test_a_failed_run_says_its_last_words(program, tmp_path):
    program("print('no such luck'); sys.exit(3)")
    with pytest.raises(UserError, match=r"(?s)status 3.*no such luck"):
        run_training(tmp_path, "r")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_process_that_has_gone_has_no_memory():
    assert sample_tree(2**22 + 1).total == 0


def test_the_first_run_needs_an_empty_cache(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "models").mkdir()
    with pytest.raises(UserError, match="empty cache"):
        quickstart.run({"seeds": 1, "keep": str(tmp_path)})
    with pytest.raises(UserError, match="seeds=0"):
        quickstart.run({"seeds": 0, "keep": ""})
