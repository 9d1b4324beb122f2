"""Torch threads of actors that share their cores with others."""

from __future__ import annotations

import os


def set_torch_threads(count: int) -> None:
    """Import torch with ``count`` threads that sleep while they wait; call it before anything else imports torch.

    OpenMP threads spin for a while when they run out of work. That pays while a process has its cores to itself, but a
    learner and an engine on the same cores would each burn what the other needs. The policy is read once, when the
    OpenMP library is loaded, and a value that the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    torch.set_num_threads(count)
