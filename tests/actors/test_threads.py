"""Torch threads of actors sleep while they wait, unless the user wants otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import os, sys
from actors.threads import set_torch_threads
assert "torch" not in sys.modules
set_torch_threads(1)
print(os.environ["OMP_WAIT_POLICY"], sys.modules["torch"].get_num_threads())
"""


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(given, policy):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)} | ({} if given is None else {"OMP_WAIT_POLICY": given})
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [policy, "1"]
