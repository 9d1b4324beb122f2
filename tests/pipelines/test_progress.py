"""The live panel, the plain lines and the closing summary, as text."""

from __future__ import annotations

import io
import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from pipelines.plots import CURVES_FILE, draw_curves, smooth
from pipelines.progress import LiveView, PlainView, duration, panel, print_summary, timeline
from pipelines.status import Curve, RunStatus, StatusBoard
from storage.errors import UserError
from storage.journal import JsonLines


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Ended:
    state: str = "finished"
    message: str = ""
    evaluations: dict = field(default_factory=dict)
    checkpoint: str = ""
    seconds: float = 125.0


def step_metrics(step: int) -> dict[str, float]:
    accuracy = 1 / (1 + math.exp(-(step - 10) / 6))
    return {
        "reward/mean": accuracy,
        "accuracy/train": accuracy - 0.02,
        "rollout/tokens_per_s": 2310.0,
        "rollout/length_mean": 61.0,
        "rollout/length_p90": 120.0,
        "rollout/truncated_share": 0.03,
        "goodput/tokens_per_s": 1500.0,
        "staleness/mean": 0.0,
        "waste/share": 0.0,
        "time/step_s": 3.9,
    }


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock) -> StatusBoard:
    """A run of 40 steps, 23 of them done."""
    board = StatusBoard(
        "baseline-7", "runs/baseline-7", steps=40, evaluate_every=10, clock=clock, dashboard_url="http://127.0.0.1:8265"
    )
    board.finish_evaluation(0, {"eval/heldout/accuracy": 0.469}, 4.2)
    for step in range(1, 24):
        clock.now += 3.9
        board.finish_step(step, step_metrics(step), epoch=step / 6)
        if step % 10 == 0:
            board.finish_evaluation(step, {"eval/heldout/accuracy": step_metrics(step)["reward/mean"]}, 4.0)
    board.enter("generating", samples=128)
    board.progress(97, 128)
    return board


def drawn(status: RunStatus, width: int = 80, unicode: bool = True) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(panel(status, unicode=unicode))
    return console.file.getvalue()


def test_panel_at_80_columns_shows_everything_a_person_asks_for(board, clock):
    board.wait("generate", "rollout-0: 2 of 16 groups", 300)
    clock.now += 14
    board.alarm("step 22: 4.7% of the scores failed or timed out; the first: ZeroDivisionError: division by zero " * 2)
    text = drawn(board.snapshot())
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) <= 12
    for expected in (
        "baseline-7",
        "step 23/40",
        "ETA 1 m",
        "reward 0.897",
        "accuracy 0.877",
        "tokens/s 2,310",
        "heldout accuracy 0.469",
        "0.841",
        "generating answers  97/128 answers",
        "waiting for: generate (rollout-0: 2 of 16 groups) for 14 s, deadline 5 m",
        "! step 22",
        "http://127.0.0.1:8265",
    ):
        assert expected in text, expected
    assert "staleness" not in text  # 0 is what one expects of it
    assert "█" in text or "▇" in text


def test_panel_before_the_first_step_has_no_made_up_numbers():
    text = drawn(RunStatus(name="new", directory="runs/new", steps=40))
    assert "step 0/40" in text
    assert "ETA --" in text
    assert "reward" not in text
    assert "starting Ray" in text


def test_panel_survives_narrow_terminals_ascii_and_odd_names(board):
    assert all(len(line) <= 40 for line in drawn(board.snapshot(), width=40).splitlines())
    ascii_text = drawn(board.snapshot(), unicode=False)
    assert "#" in ascii_text
    assert not set(ascii_text) & set("▁▂▃▄▅▆▇█")
    assert "[/bold]x[red]" in drawn(RunStatus(name="[/bold]x[red]", directory="d"))


def test_timeline_rows_line_up_by_step():
    rising = Curve(tuple(range(1, 41)), tuple(i / 40 for i in range(1, 41)))
    row = timeline(rising, 41, steps=40, low=0, high=1)
    assert row[0] == " "
    assert row[1] == "▁"
    assert row[40] == "█"
    assert list(row[1:]) == sorted(row[1:])
    sparse = timeline(Curve((0, 20), (0.0, 1.0)), 41, steps=40, low=0, high=1)
    assert sparse == "▁" * 20 + "█"
    assert timeline(Curve(), 10, steps=40, low=0, high=1) == ""
    assert timeline(Curve((0,), (0.5,)), 10, steps=0, low=0.5, high=0.5) == "▁"


def plain(*statuses: RunStatus) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    shown = iter(statuses)
    with LiveView(lambda: next(shown), console) as view:
        for _ in statuses:
            view.update()
    return console.file.getvalue().splitlines()


def test_plain_lines_come_once_per_step_and_evaluation_in_order(clock):
    board = StatusBoard("demo", "runs/demo", steps=3, clock=clock)
    shown = [board.snapshot()]
    board.finish_evaluation(0, {"eval/heldout/accuracy": 0.469}, 1.0)
    board.finish_step(1, step_metrics(1))
    shown += [board.snapshot(), board.snapshot()]
    board.finish_step(2, step_metrics(2))
    board.finish_evaluation(2, {"eval/heldout/accuracy": 0.5}, 1.0)
    board.finish_step(3, step_metrics(3))
    board.alarm("careful")
    shown.append(board.snapshot())
    board.enter("finished")
    shown.append(board.snapshot())
    lines = plain(*shown)
    assert lines[0] == "starting Ray and the actors"
    assert [line.split(" |")[0] for line in lines[1:]] == [
        "evaluation at step 0: heldout accuracy 0.469",
        "step 1/3",
        "step 2/3",
        "evaluation at step 2: heldout accuracy 0.500",
        "step 3/3",
        "ALARM careful",
        "finished",
    ]
    assert lines[2].startswith(
        "step 1/3 | reward 0.182 | accuracy 0.162 | length 61 | truncated 3% | 2,310 tok/s | 3.9 s"
    )
    assert lines[2].endswith("ETA 9 s")  # two steps and the last evaluation


def test_plain_view_mentions_a_wait_after_ten_seconds_and_then_once_a_minute(clock):
    board = StatusBoard("demo", "runs/demo", steps=3, clock=clock)
    board.wait("learn", "learner: step 1", 1800)
    shown = []
    for _ in range(80):
        shown.append(board.snapshot())
        clock.now += 1
    board.arrived("learn")
    shown.append(board.snapshot())
    board.wait("learn", "learner: step 2", 1800)
    clock.now += 5
    shown.append(board.snapshot())
    assert plain(*shown)[1:] == [
        "waiting for learn (learner: step 1) for 10 s, deadline 30 m",
        "waiting for learn (learner: step 1) for 1 m 10 s, deadline 30 m",
    ]


def test_a_terminal_gets_the_panel_and_plain_is_respected(board):
    for is_plain, expected in ((False, "╭"), (True, "step 23/40 |")):
        console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
        with LiveView(board.snapshot, console, plain=is_plain) as view:
            assert view.update() is not None
        assert expected in console.file.getvalue()


def test_no_status_yet_shows_nothing():
    console = Console(file=io.StringIO(), width=80)
    with LiveView(lambda: None, console) as view:
        assert view.update() is None
    assert console.file.getvalue() == ""


def summary(ending: Ended, directory) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_summary(ending, directory, console)
    return console.file.getvalue()


def test_summary_states_accuracies_time_directory_and_what_to_do_next(board, tmp_path):
    board.enter("finished")
    board.snapshot().save(tmp_path / "status.json")
    (tmp_path / CURVES_FILE).touch()
    after = {"eval/heldout/accuracy": 0.938, "eval/heldout/accuracy_low": 0.88, "eval/heldout/accuracy_high": 0.97}
    text = summary(
        Ended(evaluations={"before": {"eval/heldout/accuracy": 0.469}, "after": after}, checkpoint="x"), tmp_path
    )
    assert text.splitlines() == [
        "finished after 23 of 40 steps",
        "held-out accuracy (heldout): 0.469 -> 0.938 (+0.469), 95 % interval 0.880 to 0.970",
        "reward in training: 0.182 -> 0.897",
        "time: 2 m 05 s",
        f"run directory: {tmp_path}",
        f"read answers:  slipstream show {tmp_path}",
        f"see curves:    {tmp_path / CURVES_FILE}",
        f"all metrics:   tensorboard --logdir {tmp_path}",
    ]


def test_summary_of_a_stopped_run_says_how_to_go_on(board, tmp_path):
    board.snapshot().save(tmp_path / "status.json")
    text = summary(Ended(state="stopped", checkpoint="x", evaluations={"before": {"eval/a/accuracy": 0.5}}), tmp_path)
    assert f"go on:         slipstream train --resume {tmp_path}" in text
    assert "held-out accuracy (a): 0.500\n" in text
    assert "--resume" not in summary(Ended(state="stopped"), tmp_path)


def test_summary_of_an_evaluation_lists_every_set_with_sampled_figures(tmp_path):
    after = {"eval/a/accuracy": 0.5, "eval/a/mean_at_k": 0.45, "eval/a/pass_at_k": 0.8, "eval/b/accuracy": 0.25}
    text = summary(Ended(evaluations={"after": after}), tmp_path)
    assert text.splitlines()[:3] == [
        "finished",
        "held-out accuracy (a): 0.500, mean@k 0.450, pass@k 0.800",
        "held-out accuracy (b): 0.250",
    ]
    assert "slipstream show" not in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 m"), (125, "2 m 05 s"), (300, "5 m"), (11520, "3 h 12 m")]
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


def test_curves_are_drawn_from_the_metrics_file(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.append({"step": 0, "eval/heldout/accuracy": 0.4})
    for step in range(1, 6):
        lines.append({"step": step, **step_metrics(step)})
    lines.append({"step": 5, "eval/heldout/accuracy": 0.6, "reward/std": float("nan")})
    lines.close()
    picture = draw_curves(tmp_path / "metrics.jsonl", tmp_path / CURVES_FILE)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_to_a_full_disk_is_left_out_and_ends_nothing():
    status = RunStatus(name="run", directory="runs/run", state="generating", alarms=("told",))
    with suppress(OSError), open("/dev/full", "w", buffering=1) as output:  # closing it fails, too
        view = LiveView(lambda: status, console=Console(file=output))
        assert [view.update() for _ in range(3)] == [status] * 3
        assert isinstance(view._view, PlainView)
        assert view._view._alarms == {"told"}, "it was printed, or the test tests nothing"


def test_nothing_to_draw_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="nothing to draw yet"):
        draw_curves(tmp_path / "metrics.jsonl", tmp_path / CURVES_FILE)


def test_smoothing_keeps_ends_and_averages_the_middle():
    assert smooth([1.0]) == [1.0]
    zigzag = [0.0, 1.0] * 20
    assert smooth(zigzag)[0] == 0.0
    assert smooth(zigzag, 0.2)[20] == pytest.approx(0.5, abs=0.1)
