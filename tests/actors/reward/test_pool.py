import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from actors.reward.pool import ScoreItem, ScoringPool
from actors.reward.process import ChildProcess
from storage.errors import UserError
from tests.actors.reward.conftest import MODULE, drain, gone, is_running, options, score

ROOT = Path(__file__).parents[3]


def test_weights_apply_to_the_functions_that_did_not_abstain(make_pool):
    pool = make_pool({"function": "length", "weight": 0.5}, "abstain_on_empty", {"function": "constant", "weight": 2.0})
    full, empty = score(pool, "four", "")
    assert full.reward == 0.5 * 4 + 10 + 2
    assert full.parts == {"length": 4.0, "abstain_on_empty": 10.0, "constant": 1.0}
    assert full.status == "ok"
    assert full.error == ""
    assert empty.reward == 2.0
    assert empty.parts["abstain_on_empty"] is None


def test_answer_on_which_all_functions_abstain_has_no_reward(make_pool):
    (result,) = score(make_pool("abstain", "abstain"), "x")
    assert (result.status, result.reward) == ("abstained", None)
    assert result.parts == {"abstain": None, f"{MODULE}.abstain": None}


def test_async_function_gets_prompt_completion_and_columns(make_pool):
    right, wrong = score(make_pool("asynchronous"), "42", "43", columns={"answer": "42", "unused": 1})
    assert (right.reward, wrong.reward) == (1.0, 0.0)


def test_function_without_keywords_gets_only_what_it_names(make_pool):
    assert score(make_pool("only_prompt"), "x", columns={"a": 1})[0].reward == 1.0


def test_configured_arguments_reach_the_function(make_pool):
    assert score(make_pool({"function": "constant", "arguments": {"value": 3}}), "x")[0].reward == 3.0


def test_boolean_is_a_number(make_pool):
    assert [r.reward for r in score(make_pool("boolean"), "yes", "no")] == [1.0, 0.0]


def test_exception_is_an_error_that_names_function_and_line(make_pool):
    (result,) = score(make_pool("raises"), "x")
    assert (result.status, result.reward, result.parts) == ("error", None, {"raises": None})
    assert f"{MODULE}.raises: ValueError: the unit tests did not compile (functions_under_test.py line " in result.error


def test_other_functions_keep_their_part_when_one_fails(make_pool):
    (result,) = score(make_pool("raises", "length"), "four")
    assert result.status == "error"
    assert result.reward is None
    assert result.parts == {"raises": None, "length": 4.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], "returned 2 values, list [1.0, 2.0]; expected a list with one number or None per completion"),
        ([], "returned 0 values"),
        (1.0, "returned float 1.0; expected a list"),
        (None, "returned NoneType None; expected a list"),
        ("set", "returned set {1.0}; expected a list"),
        (["1.0"], "returned list ['1.0']; expected a list with one number"),
        ([[1.0]], "returned list [[1.0]]"),
        ("nan", "returned nan; expected a finite number"),
        ("inf", "returned inf; expected a finite number"),
        ("big", "OverflowError"),
        ("object", "expected a list with one number"),
    ],
)
def test_unusable_return_value_is_an_error_that_shows_it(make_pool, value, message):
    (result,) = score(make_pool({"function": "returns", "arguments": {"value": value}}), "x")
    assert (result.status, result.reward) == ("error", None)
    assert message in result.error


def test_child_lives_on_after_exceptions_and_exit(make_pool):
    pool = make_pool("sometimes_raises")
    assert pool.wait_ready(20)
    pids = pool.pids
    assert [r.status for r in score(pool, "ok", "bad", "ok")] == ["ok", "error", "ok"]
    assert pool.pids == pids
    (left,) = score(make_pool("exits"), "x")
    assert "SystemExit: 3" in left.error
    (deep,) = score(make_pool("recursion"), "x")
    assert "RecursionError" in deep.error


def test_hanging_sample_times_out_in_time_and_says_where(make_pool):
    pool = make_pool("hangs", timeout_s=0.5)
    assert pool.wait_ready(20)
    started = time.monotonic()
    (result,) = score(pool, "hang")
    assert 0.5 <= time.monotonic() - started < 2.0
    assert (result.status, result.reward, result.parts) == ("timeout", None, {"hangs": None})
    assert 0.5 <= result.seconds < 1.5
    assert "no result within 0.5 s, it was in hangs (functions_under_test.py line " in result.error
    assert score(pool, "quick")[0].status == "ok"


def test_function_that_holds_the_interpreter_lock_is_killed_too(make_pool):
    pool = make_pool("hangs_without_releasing_the_lock", timeout_s=0.3)
    (result,) = score(pool, "x")
    assert result.status == "timeout"
    assert "hangs_without_releasing_the_lock" in result.error


def test_siblings_behind_a_hanging_sample_are_neither_lost_nor_charged(make_pool):
    pool = make_pool("hangs", timeout_s=0.5)
    assert all(r.status == "ok" for r in score(pool, *["quick"] * 20))  # the window opens
    results = score(pool, *(["quick"] * 3 + ["hang"] + ["quick"] * 12 + ["hang"] + ["quick"] * 3))
    assert [r.status for r in results].count("timeout") == 2
    assert results[3].status == results[16].status == "timeout"
    assert all(r.status == "ok" and r.seconds < 0.1 for i, r in enumerate(results) if i not in (3, 16))


def test_queue_time_does_not_count_towards_the_deadline(make_pool):
    pool = make_pool({"function": "sleeps", "arguments": {"seconds": 0.1}}, timeout_s=0.45)
    assert [r.status for r in score(pool, *["x"] * 8)] == ["ok"] * 8


def test_deadline_can_be_changed_while_a_sample_is_in_hand(make_pool):
    pool = make_pool("hangs", timeout_s=60)
    assert pool.wait_ready(20)
    pool.submit(ScoreItem(ident=0, prompt="", completion="hang"))
    assert pool.collect(0.3) == []
    pool.set_timeout(0.2)
    (result,) = pool.collect(2.0)
    assert result.status == "timeout"


def test_process_that_dies_costs_only_the_sample_in_hand(make_pool):
    pool = make_pool("dies")
    score(pool, *["x"] * 10)
    results = score(pool, "x", "die", "x", "x", "die", "x")
    assert [r.status for r in results] == ["ok", "error", "ok", "ok", "error", "ok"]
    assert "the process exited with status 7" in results[1].error
    assert all(r.reward is None for r in (results[1], results[4]))


def test_segmentation_fault_is_an_error_that_names_the_signal(make_pool):
    (result,) = score(make_pool("crashes"), "x")
    assert result.status == "error"
    assert "SIGSEGV" in result.error


def test_death_behind_a_pipe_that_a_fork_keeps_open_is_noticed(make_pool):
    started = time.monotonic()
    (result,) = score(make_pool("forks_and_dies", timeout_s=15), "x")
    assert result.status == "error"
    assert "exited with status 9" in result.error
    assert time.monotonic() - started < 5


def test_killing_a_sample_takes_along_the_processes_it_started(make_pool, tmp_path):
    (result,) = score(make_pool("starts_a_process", timeout_s=1.0), str(tmp_path / "pid"))
    assert result.status == "timeout"
    assert gone(int((tmp_path / "pid").read_text()))


def test_printing_and_reading_do_not_disturb_the_channel(make_pool, caplog):
    caplog.set_level("INFO")
    assert [r.reward for r in score(make_pool("prints"), *["x"] * 5)] == [1.0] * 5
    assert "x" * 100 in caplog.text
    (result,) = score(make_pool("reads_input"), "x")
    assert "EOFError" in result.error


def test_flood_of_output_is_bounded_in_log_and_message(make_pool, caplog):
    caplog.set_level("INFO")
    (result,) = score(make_pool("floods"), "x")
    assert result.status == "error"
    assert "RuntimeError: zzz" in result.error
    assert len(result.error) < 1000
    assert len(caplog.records) < 300


@pytest.mark.parametrize("function", ["writes_to_every_descriptor", "closes_every_descriptor"])
def test_function_that_breaks_the_channel_gets_an_error(make_pool, function):
    results = score(make_pool(function), "x", "x")
    assert [(r.status, r.reward) for r in results] == [("error", None)] * 2


def test_secrets_are_not_visible_to_reward_functions_unless_passed(make_pool, monkeypatch):
    hidden = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "GOOGLE_APPLICATION_CREDENTIALS")
    for name in (*hidden, "OPENAI_API_KEY", "MY_SETTING"):
        monkeypatch.setenv(name, "value")
    pool = make_pool("environment", pass_environment=("OPENAI_API_KEY", "NOT_SET"))
    results = score(pool, *hidden, "NOT_SET", "OPENAI_API_KEY", "MY_SETTING", "PATH", "PYTHONPATH")
    assert [r.reward for r in results] == [0.0] * 5 + [1.0] * 4


def test_columns_arrive_as_they_were(make_pool):
    columns = {
        "text": "naïve ∑ 🚲 \ud800",
        "array": np.arange(1, 4),
        "scalar": np.float32(2.5),
        "raw": b"\x00\xff",
        "nothing": None,
        "nested": {"a": (1, {"b": None})},
    }
    (result,) = score(make_pool("columns_kept"), "x", columns=columns)
    assert (result.error, result.reward) == ("", 1.0)


def test_column_that_cannot_be_sent_is_an_error_of_its_row(make_pool):
    pool = make_pool("length")
    (result,) = score(pool, "x", columns={"handle": object()})
    assert (result.status, result.reward) == ("error", None)
    assert "a value of type builtins.object cannot be sent" in result.error
    assert score(pool, "x")[0].status == "ok"


def test_row_without_a_needed_column_is_an_error(make_pool):
    (result,) = score(make_pool("!exact"), "x", columns={"reply": "x"})
    assert (result.status, result.error) == ("error", "exact: the row has no column 'answer', which the function needs")


def test_long_completions_pass_the_pipes(make_pool):
    text = "é" * 300_000
    assert [r.reward for r in score(make_pool("echo_length"), *[text] * 12)] == [300_000.0] * 12


def test_slow_samples_are_spread_over_all_processes(make_pool):
    pool = make_pool("pid", processes=3)
    assert pool.wait_ready(20)
    pids = set(pool.pids)
    assert {int(r.reward) for r in score(pool, *["x"] * 12)} == pids
    assert len(pids) == 3


def test_many_threads_may_submit_and_collect(make_pool):
    pool = make_pool("echo_length", processes=2)
    results = []

    def feed(offset):
        for index in range(100):
            pool.submit(ScoreItem(ident=offset + index, prompt="", completion="x" * index))

    def take():
        while len(results) < 300:
            results.extend(pool.collect(0.05))

    threads = [threading.Thread(target=feed, args=(1000 * n,)) for n in range(3)]
    threads += [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(r.ident for r in results) == sorted(1000 * n + i for n in range(3) for i in range(100))
    assert all(r.reward == r.ident % 1000 for r in results)
    assert pool.pending == 0


def test_process_that_is_killed_while_idle_is_replaced_and_nothing_charged(make_pool):
    pool = make_pool("length")
    score(pool, "x")
    (before,) = pool.pids
    os.kill(before, signal.SIGKILL)
    assert gone(before)
    assert score(pool, "xx")[0].reward == 2.0
    assert pool.pids != [before]


def test_process_whose_death_is_noticed_only_after_a_sample_was_sent_costs_no_sample(make_pool, monkeypatch):
    pool = make_pool("length")
    score(pool, "x")
    (before,) = pool.pids
    monkeypatch.setattr(ChildProcess, "alive", True)
    os.kill(before, signal.SIGKILL)
    assert gone(before)
    assert score(pool, "xx")[0].reward == 2.0
    assert pool.pids != [before]


def test_function_that_cannot_be_imported_fails_the_pool_once_instead_of_restarting(make_pool):
    pool = make_pool("!no_such_module_here.f")
    with pytest.raises(UserError, match="there is no module 'no_such_module_here'"):
        pool.collect(20)
    with pytest.raises(UserError, match="no_such_module_here"):
        pool.submit(ScoreItem(ident=0, prompt="", completion=""))
    assert pool.pids == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import time\ntime.sleep(60)\n", "importing the reward functions takes longer than 0.7 s, it was in <module>"),
        ("import os\nos._exit(5)\n", "cannot be loaded: the process exited with status 5"),
        ("import does_not_exist\n", "No module named 'does_not_exist'"),
        ("def f(completions:\n", "SyntaxError"),
        ("raise SystemExit(1)\n", "SystemExit"),
    ],
)
def test_module_that_does_not_start_fails_the_pool(make_pool, tmp_path, source, message):
    path = tmp_path / "reward.py"
    path.write_text(source)
    pool = make_pool(f"!{path}:f", start_deadline_s=0.7)
    with pytest.raises(UserError, match=message):
        pool.wait_ready(10)


def test_slow_import_is_not_charged_to_a_sample(make_pool, tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("import time\ntime.sleep(0.8)\ndef f(completions):\n    return [1.0]\n")
    (result,) = score(make_pool(f"!{path}:f", timeout_s=0.3), "x")
    assert (result.status, result.reward) == ("ok", 1.0)


def test_close_ends_children_and_thread_even_in_the_middle_of_a_sample():
    threads = set(threading.enumerate())
    pool = ScoringPool(options("hangs", processes=2))
    assert pool.wait_ready(20)
    pids = pool.pids
    for index in range(4):
        pool.submit(ScoreItem(ident=index, prompt="", completion="hang"))
    pool.collect(0.2)
    started = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - started < 2
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)
    assert set(threading.enumerate()) == threads
    assert pool.collect(5) == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(ScoreItem(ident=9, prompt="", completion=""))


def test_open_files_do_not_grow_with_restarts(make_pool):
    pool = make_pool("dies")
    score(pool, "die")
    assert pool.wait_ready(20)
    before = len(os.listdir("/proc/self/fd"))
    score(pool, *["die"] * 5)
    assert pool.wait_ready(20)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("function", ["hangs", "hangs_without_releasing_the_lock", "length"])
def test_children_end_with_a_parent_that_is_killed(function):
    script = (
        "import time\n"
        "from tests.actors.reward.conftest import options\n"
        "from actors.reward.pool import ScoreItem, ScoringPool\n"
        f"pool = ScoringPool(options({function!r}, processes=2))\n"
        "assert pool.wait_ready(20)\n"
        "for index in range(2):\n"
        "    pool.submit(ScoreItem(ident=index, prompt='', completion='hang'))\n"
        "pool.collect(0.2)\n"
        "print(*pool.pids, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(is_running(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(gone(pid) for pid in pids)


def test_child_imports_neither_torch_nor_ray_nor_numpy():
    script = (
        "import sys, actors.reward.child\n"
        "print(*sorted({'torch', 'ray', 'numpy', 'pydantic', 'transformers', 'asyncio'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_results_are_collected_only_once(make_pool):
    pool = make_pool("length")
    pool.submit(ScoreItem(ident="a", prompt="", completion="x"))
    assert pool.pending == 1
    assert set(drain(pool)) == {"a"}
    assert pool.pending == 0
    assert pool.collect(0.05) == []


def test_sample_with_a_deadline_of_its_own_is_held_to_it(make_pool):
    pool = make_pool({"function": "sleeps", "arguments": {"seconds": 1.0}}, timeout_s=30.0)
    assert pool.wait_ready(20)
    started = time.monotonic()
    pool.submit(ScoreItem(ident=0, prompt="p", completion="x", timeout_s=0.3))
    (late,) = drain(pool).values()
    assert time.monotonic() - started < 5.0
    assert (late.status, late.reward) == ("timeout", None)
    assert "no result within 0.3 s" in late.error
    assert "schedule.reward_deadlines" in late.error
    assert score(pool, "x")[0].status == "ok"


def test_deadline_may_be_longer_than_that_of_the_pool(make_pool):
    pool = make_pool({"function": "sleeps", "arguments": {"seconds": 0.8}}, timeout_s=0.3)
    pool.submit(ScoreItem(ident=0, prompt="p", completion="x", timeout_s=20.0))
    pool.submit(ScoreItem(ident=1, prompt="p", completion="x"))
    results = drain(pool)
    assert [results[0].status, results[1].status] == ["ok", "timeout"]


def test_deadline_of_a_sample_does_not_apply_to_those_in_front_of_it(make_pool):
    pool = make_pool("hangs", timeout_s=20.0)
    score(pool, *["quick"] * 20)  # quick samples: a process gets several at a time
    pool.submit(ScoreItem(ident="first", prompt="p", completion="hang", timeout_s=1.0))
    pool.submit(ScoreItem(ident="second", prompt="p", completion="quick", timeout_s=0.2))
    results = drain(pool)
    assert [results["first"].status, results["second"].status] == ["timeout", "ok"]
    assert results["first"].seconds >= 1.0
