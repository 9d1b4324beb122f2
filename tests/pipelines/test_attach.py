"""Drivers that attach to a run: from the same process, from another one, two at once, and to runs without a driver."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import ray

import pipelines
from pipelines.active_runs import active_runs, find_conductor
from pipelines.launch import train
from pipelines.run_handle import RunHandle, watch
from storage.checkpoints import CheckpointStore
from storage.errors import UserError
from tests.conftest import ROOT
from tests.runs import small_config, steps_of, trained_keys

VARIED = "reward.functions=[{function: tests.reward_functions.varied}]"
LONG = (VARIED, "run.steps=2000", "evaluation.before=false", "evaluation.after=false", "rollout.max_tokens=30")
DEADLINE_S = 120


def when(condition, what):
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    pytest.fail(f"{what} did not come in {DEADLINE_S} s")


def hold(name):
    """Attach as soon as the run is there."""

    def attached():
        try:
            return pipelines.attach(name)
        except UserError:
            return None

    return when(attached, f"run {name}")


def until(run, state="", step=0):
    return when(lambda: (lambda s: s.step >= step and state in ("", s.state) and s)(run.status()), f"{state} {step}")


def steered(config, name, drive, **more):
    """Train in the main thread, as signals want it, and drive the run from another; returns what ``drive`` did."""
    found = {}

    def work():
        try:
            run = hold(name)
            try:
                found["result"] = drive(run)
            finally:
                run.stop()
        except BaseException as error:
            found["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert train(config, name=name, **more) == 0
    thread.join(30)
    if "error" in found:
        raise found["error"]
    return found["result"]


def test_a_driver_looks_pauses_turns_knobs_samples_and_saves(ray_session, random_llama, tmp_path):
    config = small_config(random_llama, tmp_path, "steered", *LONG)

    def drive(run):
        until(run, step=1)
        run.pause()
        rests = until(run, "paused")
        answers = run.sample("1+1=", n=3, max_tokens=5)
        assert (
            run.sample("1+1=", n=3, temperature=0.0, max_tokens=5)[0]
            == run.sample("1+1=", temperature=0, max_tokens=5)[0]
        )
        path = run.checkpoint()
        accuracy = run.evaluate()["eval/heldout/accuracy"]
        change = run.set("learner.learning_rate", 0.125)
        again = run.status()
        assert (again.state, again.step) == ("paused", rests.step)
        assert run.knobs()["learner.learning_rate"].configured == config.learner.learning_rate
        assert "paused" in repr(run)
        assert "<table>" in run._repr_html_()
        run.resume()
        until(run, step=rests.step + 2)
        seen = [status.step for status, _ in zip(run.follow(0.05), range(5), strict=False)]
        return rests.step, answers, path, accuracy, change, run.metrics(last=1000), seen

    step, answers, path, accuracy, change, records, seen = steered(config, "steered", drive)
    assert len(answers) == 3
    assert all(isinstance(text, str) and len(text) <= 5 for text in answers)
    assert path.endswith(f"step_{step:06d}")
    assert 0 <= accuracy <= 1
    assert (change.after, change.step) == (0.125, step + 1)
    rates = {r["step"]: r["learner/learning_rate"] for r in records if "learner/learning_rate" in r}
    assert all(rate in ((0.125, 0.0) if s > step else (config.learner.learning_rate, 0.0)) for s, rate in rates.items())
    assert 0.125 in rates.values()
    assert seen == sorted(seen)
    keys = trained_keys(tmp_path / "steered")
    assert len(keys) == len(set(keys)) == 4 * len(steps_of(tmp_path / "steered"))
    log = (tmp_path / "steered" / "events.log").read_text()
    assert f"a driver sets learner.learning_rate from {config.learner.learning_rate} to 0.125" in log

    saved = CheckpointStore(tmp_path / "steered" / "checkpoints").latest()
    assert saved.meta["knobs"]["learner.learning_rate"]["value"] == 0.125
    longer = small_config(random_llama, tmp_path, "steered", *LONG, f"run.steps={saved.step + 2}")
    assert train(longer, name="steered", resume=tmp_path / "steered") == 0
    last = [r["learner/learning_rate"] for r in steps_of(tmp_path / "steered")][-2:]
    assert set(last) <= {0.125, 0.0}
    with pytest.raises(UserError, match=r"steered has finished after .* steps: see `slipstream status .*steered`"):
        pipelines.attach(tmp_path / "steered")


@pytest.mark.slow
def test_answers_to_people_leave_the_training_as_it_is(ray_session, random_llama, tmp_path):
    steps = ("run.steps=4", "evaluation.before=false", "evaluation.after=false", "tracking.rollouts=off")

    def ask(run):
        texts = []
        while not run.status().terminal and run.status().step < 3:
            texts += run.sample("1+2=", n=2)
        return texts

    asked = small_config(random_llama, tmp_path, "asked", *steps)
    quiet = small_config(random_llama, tmp_path, "quiet", *steps)
    found = {}

    def work():
        try:
            found["texts"] = ask(hold("asked"))
        except UserError as error:  # the run was quicker
            found["texts"] = [str(error)]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert train(asked, name="asked") == 0
    thread.join(30)
    assert found["texts"]
    assert train(quiet, name="quiet") == 0
    same = ("rollout/tokens", "reward/mean", "rollout/length_mean", "ledger/trained")
    assert [[r[n] for n in same] for r in steps_of(tmp_path / "asked")] == [
        [r[n] for n in same] for r in steps_of(tmp_path / "quiet")
    ]


MEDDLE = """
import json, sys
import pipelines

def meddle(run, number):
    changes = []
    for turn in range(8):
        run.pause()
        changes.append(run.set("evaluation.every", 1000 + 10 * turn + number))
        run.set("learner.learning_rate", 0.01 * (number + 1))
        run.resume()
        if turn == 4:
            run.checkpoint()
    return changes

if __name__ == "__main__":
    run = pipelines.attach()
    changes = meddle(run, 1)
    answer = run.sample("1+1=", max_tokens=4)
    print(json.dumps([run.name, answer, [[c.before, c.after, c.step] for c in changes]]))
"""


def test_two_drivers_at_once_one_in_another_process_are_served_one_after_the_other(ray_session, random_llama, tmp_path):
    config = small_config(random_llama, tmp_path, "shared", *LONG)

    def drive(run):
        until(run, step=1)
        other = python(MEDDLE, wait=False)
        here = {}
        exec(MEDDLE, here)
        changes, turns = [], 0
        while other.poll() is None or not turns:  # until the other one, which takes seconds to start, is done as well
            changes += here["meddle"](run, 0)
            turns += 1
        output, errors = other.communicate()
        assert other.returncode == 0, errors
        name, answer, theirs = json.loads(output)
        assert name == "shared"
        assert len(answer) == 1
        changes = [(c.before, c.after, c.step) for c in changes] + [tuple(change) for change in theirs]
        step = run.status().step
        until(run, step=step + 2)
        return changes, theirs, run.knobs()["evaluation.every"]

    changes, theirs, knob = steered(config, "shared", drive)
    assert len(theirs) == 8
    assert knob.value == knob.coming
    # Every change starts from what another one left behind: none was lost or overwritten in between.
    told = [before for before, after, _ in changes if before != after]
    left = [config.evaluation.every, *(after for before, after, _ in changes if before != after)]
    assert sorted([*told, knob.value]) == sorted(left)
    keys = trained_keys(tmp_path / "shared")
    assert len(keys) == len(set(keys)) == 4 * len(steps_of(tmp_path / "shared"))


@pytest.mark.slow
def test_drafts_and_staleness_of_a_stream_are_turned_down_while_it_runs(ray_session, random_llama, tmp_path):
    config = small_config(
        random_llama,
        tmp_path,
        "stream-knobs",
        *LONG,
        "data.prompts=16",
        "asynchrony.pipeline=stream",
        "asynchrony.max_staleness=2",
        "algorithm.name=decoupled_ppo",
        "speculation.source=history",
        "speculation.gate=always",
        "speculation.draft_length=fixed",
        "speculation.match_length=1",
    )  # fmt: skip

    def drive(run):
        until(run, step=10)
        bound = run.set("asynchrony.max_staleness", 0)
        off = run.set("speculation.source", "off")
        until(run, step=off.step + 4)
        on = run.set("speculation.source", "history")
        until(run, step=on.step + 8)
        return bound.step, off.step, on.step, run.metrics(last=1000)

    bound, off, on, records = steered(config, "stream-knobs", drive)
    stale = {r["step"]: r["staleness/max"] for r in records if "staleness/max" in r}
    assert max(stale.values()) > 0
    assert all(value == 0 for step, value in stale.items() if step >= bound)
    drafted = dict.fromkeys(stale, 0.0)
    for record in records:
        drafted[record["step"]] += sum(v for name, v in record.items() if name.startswith("speculation/drafted/"))
    assert any(drafted[step] > 0 for step in stale if step < off)
    # rows that were under way when drafts were switched off end with the first step after it
    assert all(drafted[step] == 0 for step in stale if off < step < on)
    assert any(drafted[step] > 0 for step in stale if step > on)
    keys = trained_keys(tmp_path / "stream-knobs")
    assert len(keys) == len(set(keys))


def python(script, *arguments, wait=True, **environment):
    """Run a script as a driver of its own that finds the session's cluster by RAY_ADDRESS."""
    address = ray.get_runtime_context().gcs_address
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if not wait:
        return process
    output, errors = process.communicate(timeout=DEADLINE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


DETACHED = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "import pipelines.driving\n"
    "from pipelines.launch import train\n"
    "from tests.faults.conductors import BriefConductor\n"
    "from tests.runs import small_config\n"
    "model, parent, name, linger, *overrides = sys.argv[1:]\n"
    "config = small_config(Path(model), Path(parent), name, *overrides)\n"
    "pipelines.driving.Conductor = BriefConductor\n"
    "status = train(config, name=name, detach=True)\n"
    "print('begun', flush=True)\n"
    "time.sleep(float(linger))\n"
    "sys.exit(status)\n"
)


def test_a_detached_run_outlives_its_driver_and_clears_itself_away(ray_session, random_llama, tmp_path):
    overrides = ("run.steps=12", "evaluation.before=false", "evaluation.after=false", "rollout.max_tokens=40")
    driver = python(DETACHED, str(random_llama), str(tmp_path), "alone", "600", *overrides, wait=False)
    lines = []
    for line in driver.stdout:
        lines.append(line)
        if line.startswith("begun"):
            break
    assert any("slipstream attach alone --stop" in line for line in lines), driver.communicate()
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    run = pipelines.attach("alone")
    assert not run.status().terminal
    with pytest.raises(UserError, match="is in use by process"):
        train(small_config(random_llama, tmp_path, "alone", *overrides), name="alone", resume=tmp_path / "alone")
    with pytest.raises(UserError, match="a run of the name alone is going on in this cluster already"):
        train(small_config(random_llama, tmp_path / "other", "alone", *overrides), name="alone")
    last = list(run.follow(0.2))[-1]
    assert (last.state, last.step) == ("finished", 12)
    when(lambda: (tmp_path / "alone" / "curves.png").exists(), "the picture of the curves")
    when(lambda: "alone" not in active_runs(), "the end of the conductor")
    with pytest.raises(UserError, match="alone has finished"):
        run.metrics()
    keys = trained_keys(tmp_path / "alone")
    assert len(keys) == len(set(keys)) == 48
    names = [actor["namespace"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    assert "slipstream-alone" not in names
    assert train(
        small_config(random_llama, tmp_path, "alone", *overrides, "run.steps=13"),
        name="alone",
        resume=tmp_path / "alone",
    ) == 0  # fmt: skip


@pytest.mark.slow
def test_a_detached_run_is_watched_and_stopped_by_another_driver(ray_session, random_llama, tmp_path, capsys):
    done = python(DETACHED, str(random_llama), str(tmp_path), "watched", "0", *LONG)
    assert done.returncode == 0, done.stderr
    run = pipelines.attach(tmp_path / "watched")
    until(run, step=2)
    assert watch("watched", stop=True) == 0
    assert "stopped" in capsys.readouterr().out
    saved = CheckpointStore(tmp_path / "watched" / "checkpoints").latest()
    assert saved.step >= 2
    assert run.status().state == "stopped"
    ended = find_conductor("watched")
    if ended is not None:
        ray.kill(ended)


def test_a_local_ray_is_no_place_for_a_detached_run(ray_session, random_llama, tmp_path):
    with pytest.raises(UserError, match="needs a Ray cluster that outlives this program"):
        train(small_config(random_llama, tmp_path, "nowhere"), name="nowhere", detach=True)
    assert not (tmp_path / "nowhere").exists()


def test_without_a_run_or_with_several_it_says_what_there_is(ray_session, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no run of the name ghost is going on in this cluster"):
        pipelines.attach("ghost")
    monkeypatch.setattr("pipelines.run_handle.active_runs", list)
    with pytest.raises(UserError, match="no run is going on in this cluster: start one with"):
        pipelines.attach()
    monkeypatch.setattr("pipelines.run_handle.active_runs", lambda: ["first", "second"])
    with pytest.raises(UserError, match="2 runs are going on, name one of them: first, second"):
        pipelines.attach()
    with pytest.raises(UserError, match="did you mean second"):
        pipelines.attach("secnd")


@pytest.mark.parametrize(
    ("address", "told"),
    [("127.0.0.1:1", "address=127.0.0.1:1: nothing answers there"), ("nonsense", "address=nonsense cannot be joined")],
)
def test_a_wrong_address_is_one_line_with_a_way_out(ray_session, address, told):
    script = (
        "import sys, pipelines\n"
        "from storage.errors import UserError\n"
        "try:\n"
        "    pipelines.attach(address=sys.argv[1])\n"
        "except UserError as error:\n"
        "    print(error)\n"
    )
    done = python(script, address)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(told)
    assert "ray start --head" in done.stdout
    assert done.stdout.count("\n") == 1


def test_another_version_of_ray_is_one_line(monkeypatch):
    from pipelines import joining

    mismatch = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.56.0\n    Python: 3.11.9\n"
        "This process on 10.0.0.2 was started with:\n    Ray: 2.60.0\n    Python: 3.11.9\n"
    )

    def refuse(**_):
        raise RuntimeError(mismatch)

    monkeypatch.setattr(joining.ray, "init", refuse)
    with pytest.raises(UserError) as error:
        joining.join("auto", "RAY_ADDRESS=auto", "ask whoever runs it")
    assert "Ray: 2.56.0" in str(error.value)
    assert "Ray: 2.60.0" in str(error.value)
    assert "install the same versions" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_handle_never_raises_when_it_is_shown(ray_session):
    class Gone:
        def __getattr__(self, name):
            raise UserError("it is gone")

    run = RunHandle("lost", Gone())
    assert repr(run) == "<run lost: no answer>"
    assert "no answer" in run._repr_html_()


def test_attaching_costs_no_import_before_it_is_used():
    done = subprocess.run(
        [sys.executable, "-c", "import pipelines, sys; print('ray' in sys.modules, callable(pipelines.attach))"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "True"]
