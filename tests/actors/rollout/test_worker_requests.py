"""What a rollout worker asks of its engine for an assignment."""

import numpy as np
import pytest

from actors.drafts.options import SpeculationOptions
from actors.rollout.options import RolloutOptions
from actors.rollout.worker import RolloutWorker
from storage.records import Assignment, GroupKey, Prompt, SamplingParams

from .conftest import save_model
from .handovers import TOKENIZER


@pytest.fixture
def worker(tmp_path):
    TOKENIZER.save_pretrained(save_model("llama", tmp_path))
    worker = RolloutWorker(
        "rollout-0",
        str(tmp_path),
        RolloutOptions(max_rows=2),
        run_seed=0,
        max_length=32,
        threads=1,
        version=0,
        speculation=SpeculationOptions(),
    )
    yield worker
    worker._loop.close()


def test_answers_of_an_evaluation_may_not_lag(worker):
    prompt = Prompt(index=0, token_ids=np.array([1, 5], np.int32), text="a")
    assignments = [
        Assignment(
            key=GroupKey(split, 0, 0),
            prompt=prompt,
            samples=(0, 1),
            group_size=2,
            sampling=SamplingParams(max_tokens=3),
            run_seed=0,
        )
        for split in ("train", "heldout")
    ]
    requests, owners = worker._requests(assignments)
    assert {(owners[r.request_id][0].split, r.may_lag) for r in requests} == {("train", True), ("heldout", False)}
