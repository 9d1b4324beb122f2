"""Processes that are ranks of one gloo group and run functions by name, so that many tests share their start."""

import importlib
import traceback
from datetime import timedelta

import torch
import torch.multiprocessing as multiprocessing

_IMPORTED = [
    "actors.learner.learner",
    "tests.actors.learner.test_ranks",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
]
"""Imported once, in a process that does nothing else and starts no thread: all ranks are forks of it."""


class RankPool:
    """``count`` processes; :meth:`run` calls a function on all of them."""

    def __init__(self, count, folder):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        self.count = count
        self._pipes, self._processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, str(folder / "meeting"), theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function, *args, timeout_s=120):
        """Return what ``function(ranks, *args)`` returns on each rank; raises the first error."""
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"rank {rank} does not answer")
            results.append(pipe.recv())
        for rank, (error, _) in enumerate(results):
            if error:
                raise AssertionError(f"rank {rank}:\n{error}")
        return [value for _, value in results]

    def close(self):
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank, count, meeting, pipe):
    torch.set_num_threads(1)
    import torch.distributed as dist

    from actors.learner.ranks import Ranks

    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count, timeout=timedelta(seconds=100)
    )
    ranks = Ranks.join(100)
    while True:
        module, name, args = pipe.recv()
        try:
            pipe.send(("", getattr(importlib.import_module(module), name)(ranks, *args)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
