"""The driver lives as long as the run and only watches: it must not hold torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_SCRIPT = """
import json, sys
from pathlib import Path
from pipelines.config_loader import load
from pipelines.preflight import check_run
from pipelines.run_data import load_run_data
config = load(["data.prompts=8", "rollout.prompts_per_step=4", f"model={sys.argv[1]}"]).config
check_run(config)
data = load_run_data(config, Path(sys.argv[1]))
print(json.dumps([len(data.train), [name for name in ("torch", "ray") if name in sys.modules]]))
"""


def prepared(model):
    """Read a run's prompts in a fresh interpreter; returns their number and the heavy packages it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(model)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_is_prepared_without_torch(random_llama):
    assert prepared(random_llama) == [8, []]


def test_a_tokenizer_of_another_kind_is_left_to_transformers(random_llama, tmp_path):
    for file in random_llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "LlamaTokenizerFast"}))
    count, heavy = prepared(tmp_path)
    assert count == 8
    assert "torch" in heavy


@pytest.mark.parametrize("text", ["1 2 3=", "no such\ttext"])
def test_the_short_way_reads_the_same_tokenizer(random_llama, text):
    from transformers import AutoTokenizer

    from storage.models import load_tokenizer

    ours, theirs = load_tokenizer(random_llama), AutoTokenizer.from_pretrained(str(random_llama))
    assert type(ours) is type(theirs)
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert (ours.eos_token_id, ours.bos_token_id, ours.pad_token_id) == (
        theirs.eos_token_id,
        theirs.bos_token_id,
        theirs.pad_token_id,
    )
