"""What a reward function may see of the environment: everything but secrets, and those that it was given by name.

Hygiene, not a sandbox: a reward function runs with the user's rights and could read the same secrets from files.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]

# RAY_JOB_CONFIG... holds the environment that a job was submitted with, tokens and all.
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|KEY|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|PRIVATE|CONNECTION_STRING|DSN"
    r"|^(AWS|AZURE|GOOGLE|GCP|RAY_JOB_CONFIG)_|(^|_)PAT$",
    re.IGNORECASE,
)
_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable looks like a secret, by its name or by a password inside of its value."""
    return bool(_SECRET_NAME.search(name) or _PASSWORD_IN_URL.search(value))


def child_environment(passed: Collection[str] = ()) -> dict[str, str]:
    """Return this process's environment for a scoring process: without secrets, with our import path and one thread.

    Args:
        passed: Names of variables that go through although they look like secrets.
    """
    environment = {name: value for name, value in os.environ.items() if name in passed or not is_secret(name, value)}
    paths = [path or os.getcwd() for path in sys.path]
    known = dict.fromkeys(path for path in (*paths, os.getcwd(), str(_ROOT)) if os.path.exists(path))
    environment["PYTHONPATH"] = os.pathsep.join(known)
    environment["OMP_NUM_THREADS"] = "1"
    return environment
