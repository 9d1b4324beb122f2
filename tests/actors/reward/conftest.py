import time

import psutil
import pytest

from actors.reward.options import RewardOptions
from actors.reward.pool import ScoreItem, ScoringPool

MODULE = "tests.actors.reward.functions_under_test"


def options(*functions, **settings):
    """Options for functions given as a name in the module, a built-in name with a bang, or a dict."""
    entries = []
    for function in functions:
        entry = dict(function) if isinstance(function, dict) else {"function": function}
        name = entry["function"]
        entry["function"] = name[1:] if name.startswith("!") else f"{MODULE}.{name}"
        entries.append(entry)
    return RewardOptions(functions=tuple(entries), **settings)


@pytest.fixture
def make_pool():
    """Open pools that are closed, and seen to leave no process behind, at the end of the test."""
    pools = []

    def make(*functions, start_deadline_s=30.0, **settings):
        pool = ScoringPool(options(*functions, **settings), start_deadline_s=start_deadline_s)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pids = pool.pids
        pool.close()
        assert not any(is_running(pid) for pid in pids)


def score(pool, *completions, columns=None, within_s=20.0):
    """Score completions and return the results in the order of submission."""
    for index, completion in enumerate(completions):
        pool.submit(ScoreItem(ident=index, prompt="p", completion=completion, columns=columns or {}))
    return [result for _, result in sorted(drain(pool, within_s).items())]


def drain(pool, within_s=20.0):
    results = {}
    until = time.monotonic() + within_s
    while pool.pending:
        assert time.monotonic() < until, f"{pool.pending} results are missing"
        for result in pool.collect(0.2):
            assert result.ident not in results
            results[result.ident] = result
    return results


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pid, within_s=3.0):
    until = time.monotonic() + within_s
    while is_running(pid):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
