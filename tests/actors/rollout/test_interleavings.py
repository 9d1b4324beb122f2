"""Whatever the order of calls, each request leaves exactly once with the right tokens and no slot is lost."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.rollout.torch_engine import TorchEngine
from actors.weights import pack, policy_state

from .conftest import VOCABULARY, ScriptedDrafts, finish, request, tokens_of

MODES = ("reprefill", "keep_kv", "drain")
ROWS = 3

operations = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("step"), st.integers(1, 5), st.booleans()),
        st.tuples(st.just("abort"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("swap"), st.integers(0, 2), st.booleans()),
    ),
    min_size=4,
    max_size=14,
)


def guesses():
    """Short drafts at random; some rows want one before their first token."""
    rng = np.random.default_rng(0)
    return ScriptedDrafts(
        lambda i, so_far, room: rng.integers(0, VOCABULARY, int(rng.integers(0, 4))).tolist(),
        first=lambda request: request.request_id % 3 > 0,
    )


def check_conservation(engine):
    pool = engine._pool
    held = [i for i, row in enumerate(pool.table.rows) if row is not None]
    assert sorted([*pool.active.tolist(), *pool.parked.values()]) == held
    assert len({int(pool.table.slot[i]) for i in held}) == len(held) <= ROWS
    assert engine.running + engine.parked <= ROWS
    assert not engine.draft_failure
    open_rows = engine._drafting._source.open_rows
    assert sorted(open_rows) == sorted(pool.active.tolist())
    assert all(pool.table[i].request is r for i, r in open_rows.items())


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(plan=operations, weights_change=st.booleans())
def test_every_request_leaves_exactly_once_and_slots_are_conserved(plan, weights_change, random_llama, reference_model):
    """Without changes of weights, answers put together from pieces also equal uninterrupted ones."""
    cached = test_every_request_leaves_exactly_once_and_slots_are_conserved.__dict__
    if "engine" not in cached:
        size = {"max_rows": ROWS, "max_length": 40, "dtype": "float32", "device": "cpu", "run_seed": 1}
        cached["engine"] = TorchEngine(random_llama, drafts=guesses(), prefill_tokens=9, **size)
        cached["plain"] = TorchEngine(random_llama, **size)
        cached["state"] = policy_state(reference_model("llama"))
    engine, plain, state = cached["engine"], cached["plain"], cached["state"]
    made, inside, done, asked = {}, set(), {}, 0

    def leave(completions):
        for c in completions:
            assert c.request_id in inside
            inside.discard(c.request_id)
            if c.finish_reason == "abort":
                made[c.request_id] = request(**made[c.request_id][1], prefix=c.segments), made[c.request_id][1]
            else:
                done[c.request_id] = c

    def submit(ids):
        engine.submit([made[i][0] for i in ids])
        inside.update(ids)

    for name, amount, flag in plan:
        if name == "submit":
            new = []
            for _ in range(amount):
                asked += 1
                group = asked // 3 if flag else None
                prompt = [(7 * (asked // 3) + j) % VOCABULARY for j in range(2 + asked // 3 % 12)]
                arguments = {
                    "request_id": asked,
                    "prompt": prompt,
                    "max_tokens": 3 + asked * 5 % 20,
                    "group": group,
                    "priority": float(asked % 2),
                }
                made[asked] = request(**arguments), arguments
                new.append(asked)
            resumable = [i for i in made if i not in inside and i not in done and i not in new]
            submit(new + resumable)
        elif name == "step":
            for _ in range(amount):
                leave(engine.step())
                check_conservation(engine)
        elif name == "abort":
            leave(engine.abort(None if amount == 0 else [i for i in inside if i % 4 == amount], keep_state=flag))
            check_conservation(engine)
        elif weights_change and not engine.draining:
            version = engine.version + 1
            engine.load_weights(*pack(state, version))
            engine.activate_weights(version, MODES[amount])
    submit([i for i in made if i not in inside and i not in done])
    for _ in range(400):
        if not engine.running and not engine.waiting:
            break
        leave(engine.step())
        check_conservation(engine)
    engine.abort()
    assert not inside
    assert sorted(done) == sorted(made)
    assert not engine._pool._groups
    # The published snapshots hold equal weights, so the answers must be equal too, swaps or none.
    expected = finish(plain, [request(**arguments) for _, arguments in made.values()])
    assert {i: tokens_of(c) for i, c in done.items()} == {i: tokens_of(c) for i, c in expected.items()}
