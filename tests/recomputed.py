"""Recomputes what engines recorded: the logprob of each token under the weights of the version that it is stamped with.

A run must keep all of its checkpoints for that (:data:`EVERY_VERSION`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from storage.history.archive import RolloutArchive
from tests.runs import steps_of

EVERY_VERSION = ("checkpoint.every=1", "checkpoint.keep_last=100")


@dataclass(frozen=True)
class Recomputed:
    """An archived answer: versions and logprobs of its tokens as recorded, and the logprobs as recomputed."""

    versions: np.ndarray
    recorded: np.ndarray
    expected: np.ndarray

    @property
    def is_mixed(self) -> bool:
        return len(set(self.versions.tolist())) > 1

    @property
    def error(self) -> float:
        return float(np.abs(self.recorded - self.expected).max(initial=0.0))


def recompute(run: Path, base: Path, *, shift: int = 0) -> list[Recomputed]:
    """Return every trained answer of a run that began with the model ``base``.

    A negative control takes the weights ``shift`` versions later than stamped.
    """
    import torch
    from transformers import AutoModelForCausalLM

    models = {version: AutoModelForCausalLM.from_pretrained(p).eval() for version, p in _weights(run, base).items()}
    archive = RolloutArchive(run / "rollouts")
    found = []
    for step in archive.steps():
        columns = archive.read(step).select(["prompt_tokens", "tokens", "logprobs", "segments"]).to_pylist()
        for row in columns:
            prompt, tokens = row["prompt_tokens"], row["tokens"]
            versions = np.array([part["version"] for part in row["segments"] for _ in range(part["count"])])
            expected = np.zeros(len(tokens))
            ids = torch.tensor([[*prompt, *tokens]])
            for version in set(versions.tolist()):
                with torch.inference_mode():
                    model = models[min(version + shift, max(models))]
                    logprobs = model(input_ids=ids).logits[0].double().log_softmax(-1)
                own = logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
                expected = np.where(versions == version, own, expected)
            found.append(Recomputed(versions, np.array(row["logprobs"]), expected))
    return found


def _weights(run: Path, base: Path) -> dict[int, Path]:
    """Model directory of each version; a step that moved nothing keeps the version before."""
    found = {0: base}
    for record in steps_of(run):
        folder = run / "checkpoints" / f"step_{record['step']:06d}" / "model"
        assert folder.is_dir(), f"the checkpoint of step {record['step']} is gone"
        found.setdefault(int(record["progress/version"]), folder)
    return found
