"""Which variables a reward function sees."""

import os

import pytest

from actors.reward.environment import child_environment, is_secret


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "WANDB_API_KEY",
        "AWS_ACCESS_KEY_ID",
        "AWS_PROFILE",
        "AWS_SESSION_TOKEN",
        "AZURE_TENANT_ID",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
        "RAY_JOB_CONFIG_JSON_ENV_VAR",
        "SSH_AUTH_SOCK",
        "GITHUB_PAT",
        "client_secret",
        "PGPASSWORD",
        "GPG_PASSPHRASE",
        "SENTRY_DSN",
    ],
)
def test_what_is_called_like_a_secret_is_one(name):
    assert is_secret(name, "x")


@pytest.mark.parametrize("name", ["PATH", "HOME", "LANG", "PYTHONPATH", "TMPDIR", "CUDA_VISIBLE_DEVICES", "COMPATIBLE"])
def test_what_programs_need_is_none(name):
    assert not is_secret(name, "/usr/bin:/bin")


def test_a_password_inside_of_an_address_is_a_secret():
    assert is_secret("PIP_INDEX_URL", "https://me:hunter2@packages.example/simple")
    assert is_secret("DATABASE", "postgres://:hunter2@db/main")
    assert not is_secret("PIP_INDEX_URL", "https://packages.example:8080/simple")
    assert not is_secret("MAIL", "mailto:me@example.org")


def test_variables_go_through_by_name_only(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "for the reward")
    monkeypatch.setenv("OTHER_API_KEY", "not for the reward")
    monkeypatch.setenv("PLAIN", "seen")
    seen = child_environment(["JUDGE_API_KEY", "ABSENT"])
    assert (seen["JUDGE_API_KEY"], seen["PLAIN"], seen["OMP_NUM_THREADS"]) == ("for the reward", "seen", "1")
    assert not {"OTHER_API_KEY", "ABSENT"} & seen.keys()
    assert "JUDGE_API_KEY" not in child_environment()
    assert os.getcwd() in seen["PYTHONPATH"].split(os.pathsep)
