"""Models and the Ray that tests of all folders share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings

from tests import warm_workers

# Speed is measured by benchmarks: an example that is slow on a busy machine is not wrong.
settings.register_profile("slipstream", deadline=None)
settings.load_profile("slipstream")

# Threads of small models that spin while they wait for each other take the cores from everybody else. Read by OpenMP
# when torch is loaded, here and in every process that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def leases_without_rivals() -> Iterator[None]:
    """Nobody else wants the runs of a test at the same moment; tests of leases say how long they look for somebody."""
    from storage.remote import lease

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "SETTLE_S", 0.05)
        yield


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The built-in model that can do a part of the built-in task; built on first use, then cached for good."""
    from storage.models import resolve_model
    from storage.options import ModelOptions

    return resolve_model(ModelOptions(path="tiny"))


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with random weights and a character tokenizer: for tests that need no skill."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("random_llama")
    characters = ["<pad>", "<bos>", "<eos>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(characters),
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=512,
                tie_word_embeddings=True,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
            )
        )
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray for all tests; its workers can import ``tests``, and start as forks (see tests.warm_workers).

    Runs end without a picture of their curves, which takes as long as a small run does.
    """
    import ray
    from ray._private.parameter import RayParams

    import pipelines.launch

    changed = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "AWS_ACCESS_KEY_ID": "testing",  # for the S3 server of tests; actors see what was set before Ray started
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RAY_ADDRESS": None,
        "PYTHONDONTWRITEBYTECODE": None,  # where it is set, each process would compile our modules anew
    }
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(prefix="slipstream-tests-") as folder:
        for name, value in changed.items():
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, value)
        template = warm_workers.Template(Path(folder))
        patch.setenv(warm_workers.SOCKET, template.address)
        complete = RayParams.update_if_absent

        def update_if_absent(params: RayParams, **defaults: Any) -> None:
            if "setup_worker_path" in defaults:
                defaults["setup_worker_path"] = warm_workers.__file__
            complete(params, **defaults)

        with patch.context() as starting:
            starting.setattr(RayParams, "update_if_absent", update_if_absent)
            _start_ray()
        patch.setattr(pipelines.launch, "draw_curves", lambda metrics, picture: picture)
        yield
        ray.shutdown()
        template.close()


def _start_ray() -> None:
    import ray

    for attempt in range(3):
        try:
            ray.init(
                address="local",
                num_cpus=8,
                include_dashboard=False,
                object_store_memory=200 * 2**20,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            break
        except Exception as error:  # Ray raises just that when a busy machine takes more than 30 s for a process
            if attempt == 2 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
