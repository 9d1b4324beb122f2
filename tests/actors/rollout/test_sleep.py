"""An engine gives its memory back while it has nothing to do, and goes on as if it had not."""

import gc

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.rollout.engine import Handover
from actors.rollout.options import PacingOptions
from actors.rollout.paced import PacedEngine
from actors.rollout.torch_engine import TorchEngine
from actors.weights import WeightsError, pack, policy_state

from .conftest import CONFIGS, finish, logprobs_of, request, tokens_of
from .handovers import TOKENIZER


def wake(engine, snapshot, mode="reprefill", handover=None):
    engine.load_weights(*snapshot)
    engine.activate_weights(snapshot[0].version, mode, handover)


def own_snapshot(engine, version=0):
    return pack(policy_state(engine._model.model), version)


def some(start=0, count=3):
    return [request(start + i, (5, 6 + i, 7), max_tokens=12, temperature=0.9) for i in range(count)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_are_those_of_an_engine_that_never_slept(kind, model_path, engine_of):
    engine, other = engine_of(model_path(kind)), engine_of(model_path(kind))
    snapshot = own_snapshot(engine)
    assert engine._model.lean == (kind not in ("gemma2", "gpt2"))
    for start in (0, 10, 20):
        slept, awake = finish(engine, some(start)), finish(other, some(start))
        assert [tokens_of(c) for c in slept.values()] == [tokens_of(c) for c in awake.values()]
        assert [logprobs_of(c) for c in slept.values()] == [logprobs_of(c) for c in awake.values()]
        assert engine.sleep() > 0
        wake(engine, snapshot)


def test_new_weights_wake_an_engine_as_they_would_have_changed_it(engine_of, snapshots, model_path):
    engine = engine_of()
    finish(engine, some())
    engine.sleep()
    assert engine.asleep
    wake(engine, snapshots[2])
    assert (engine.asleep, engine.version, engine.opening_version) == (False, 2, 2)
    expected = finish(engine_of(model_path("llama", 2), version=2), some(10))
    done = finish(engine, some(10))
    assert [tokens_of(c) for c in done.values()] == [tokens_of(c) for c in expected.values()]
    assert {s.version for c in done.values() for s in c.segments} == {2}


@pytest.mark.parametrize("kind", CONFIGS)
def test_memory_is_given_back_and_the_same_objects_hold_the_same_bits_afterwards(kind, model_path, engine_of):
    engine = engine_of(model_path(kind))
    snapshot = own_snapshot(engine)
    finish(engine, some())
    model, cache = engine._model.model, engine._pool.cache
    parameters = dict(model.named_parameters(remove_duplicate=False))
    before = {name: p.detach().clone() for name, p in parameters.items()}
    places = {p.data_ptr(): p.numel() * p.element_size() for p in parameters.values()}
    held = cache.nbytes
    assert held > 0
    freed = engine.sleep()
    assert freed == held + sum(places.values())
    assert cache.nbytes == 0
    assert {p.untyped_storage().nbytes() for p in parameters.values()} == {0}
    assert engine.sleep() == 0, "twice is once"
    wake(engine, snapshot)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameters[name] for name in parameters)
    assert all(torch.equal(after[name], before[name]) for name in before)
    tied = {name for name in before if parameters[name] is model.get_input_embeddings().weight}
    assert len(tied) == (2 if model.config.tie_word_embeddings else 1)


def test_weights_that_lie_in_a_mapped_file_are_given_back_too(tmp_path, engine_of):
    engine = engine_of()
    snapshot = own_snapshot(engine)
    parameters = [p for layer in engine._model.model.model.layers for p in layer.mlp.down_proj.parameters()]
    parameters.append(engine._model.model.model.embed_tokens.weight)
    size = sum(p.numel() for p in parameters)
    mapped = torch.from_file(str(tmp_path / "weights"), shared=True, size=size, dtype=torch.float32)
    for parameter, part in zip(parameters, mapped.split([p.numel() for p in parameters]), strict=True):
        part.copy_(parameter.detach().reshape(-1))
        parameter.data = part.view(parameter.shape)
    assert not parameters[0].untyped_storage().resizable()
    done = finish(engine, some())
    engine.sleep()
    assert {p.untyped_storage().nbytes() for p in engine._model.model.parameters()} == {0}
    wake(engine, snapshot)
    assert [tokens_of(c) for c in finish(engine, some()).values()] == [tokens_of(c) for c in done.values()]


def test_the_process_shrinks_by_what_is_given_back(tmp_path):
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    engine = TorchEngine(tmp_path, max_rows=16, max_length=1024, dtype="float32", device="cpu")
    snapshot = own_snapshot(engine)
    engine._pool.cache.reserve(900)
    finish(engine, [request(1, range(100), max_tokens=3)])
    gc.collect()
    process, sizes = psutil.Process(), []
    sizes.append(process.memory_info().rss)
    freed = engine.sleep()
    sizes.append(process.memory_info().rss)
    wake(engine, snapshot)
    finish(engine, [request(2, range(100), max_tokens=3)])
    sizes.append(process.memory_info().rss)
    weights = snapshot[0].nbytes
    assert freed > weights > 100e6
    # pages of the cache that were never written take no memory
    assert sizes[0] - sizes[1] > 0.9 * weights
    assert sizes[2] - sizes[1] > 0.9 * weights


def test_an_engine_with_work_does_not_sleep(engine_of):
    engine = engine_of(max_rows=2)
    engine.submit(some(count=3))
    engine.step()
    with pytest.raises(ValueError, match=r"2 requests run and 1 wait: abort them"):
        engine.sleep()
    engine.abort()
    engine.sleep()
    assert engine.asleep


def test_requests_wait_while_an_engine_sleeps(engine_of):
    engine = engine_of()
    snapshot = own_snapshot(engine)
    engine.sleep()
    engine.submit(some())
    assert engine.step() == []
    assert (engine.running, engine.waiting) == (0, 3)
    assert [c.request_id for c in engine.abort([1])] == [1]
    wake(engine, snapshot)
    done, expected = finish(engine), finish(engine_of(), some())
    assert set(done) == {0, 2}
    assert all(tokens_of(done[i]) == tokens_of(expected[i]) for i in done)


def test_weights_that_do_not_fit_wake_nobody(engine_of, snapshots):
    engine = engine_of()
    whole = own_snapshot(engine)
    engine.sleep()
    manifest, buffer = snapshots[1]
    with pytest.raises(WeightsError, match="xxh3"):
        engine.load_weights(manifest, buffer[::-1].copy())
    state = policy_state(engine._model.model)
    lacking = {name: torch.zeros(t.shape) for name, t in state.items() if "down_proj" not in name}
    with pytest.raises(WeightsError, match=r"lacks 2 tensors, the first is .*down_proj"):
        engine.load_weights(*pack(lacking, 1))
    with pytest.raises(WeightsError, match="version 1 is not loaded"):
        engine.activate_weights(1)
    assert engine.asleep
    wake(engine, whole)
    assert finish(engine, some())


def test_state_of_parked_rows_and_older_weights_goes_with_the_sleep(engine_of, snapshots, model_path):
    engine = engine_of(tokenizer=TOKENIZER)
    engine.submit(some())
    for _ in range(4):
        engine.step()
    wake(engine, snapshots[1], "drain")
    assert engine.draining
    kept = engine.abort(keep_state=True)
    engine.sleep()
    assert (engine.parked, engine.draining) == (0, 0)
    assert engine._spare is engine._old is None
    wake(engine, snapshots[2], handover=Handover(kind="split", k_min=4))
    assert engine.opening_version == 2, "nothing is left of version 1 to begin answers with"
    again = [request(c.request_id, (5, 6 + c.request_id, 7), max_tokens=12, prefix=c.segments) for c in kept]
    done = finish(engine, again)
    expected = finish(engine_of(model_path("llama", 2), version=2), again)
    assert all(tokens_of(done[i]) == tokens_of(expected[i]) for i in expected)


def test_pacing_lets_an_engine_sleep(engine_of):
    engine = engine_of()
    snapshot = own_snapshot(engine)
    paced = PacedEngine(engine, PacingOptions(profile="middle", t0_ms=0.01))
    assert paced.sleep() > 0
    assert paced.asleep
    assert engine.asleep
    wake(paced, snapshot)
    assert not paced.asleep
