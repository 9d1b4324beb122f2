"""Ray really puts a learner on the GPU of an engine, and no two engines on one."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.conftest import ROOT


def test_a_learner_shares_the_gpu_of_an_engine() -> None:
    program = [sys.executable, "-m", "tests.pipelines.gpu_shares"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    engines = [tuple(place) for place in found["engines"]]
    assert len(engines) == len(set(engines)) == 3
    assert tuple(found["learner"]) in engines, "there was an empty GPU beside theirs"
