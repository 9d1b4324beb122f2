"""The weight buffer: what is packed comes back bit for bit, and nothing damaged is believed."""

from __future__ import annotations

import gc
import pickle
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from actors.weights import ALIGNMENT, HandOver, WeightsError, pack, policy_state, unpack, verify


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("angles", torch.ones(4), persistent=False)


STATE = {
    "a": torch.randn(3, 5),
    "b.scalar": torch.tensor(2.5, dtype=torch.float64),
    "c.half": torch.randn(2, 2, 3).to(torch.bfloat16),
    "d.empty": torch.zeros(0, 4),
    "e.strided": torch.randn(6, 4).t(),
    "f.ints": torch.arange(3),
}


@pytest.mark.parametrize("read_only", [False, True])
def test_tensors_come_back_bit_for_bit(read_only):
    manifest, buffer = pack(STATE, 4)
    buffer.flags.writeable = not read_only
    verify(manifest, buffer)
    back = unpack(manifest, buffer)
    assert list(back) == list(STATE)
    for name, tensor in STATE.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name], tensor)
    assert all(spec.offset % ALIGNMENT == 0 for spec in manifest.tensors)
    assert manifest.version == 4
    assert pack(STATE, 5)[0].hash == manifest.hash


def test_tied_tensors_and_buffers_that_are_not_saved_stay_out():
    model = Tied()
    state = policy_state(model)
    assert sorted(state) == ["embed.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.weight"]
    assert state["embed.weight"].data_ptr() == model.head.weight.data_ptr()
    manifest, _ = pack(model.state_dict(), 0)
    assert "head.weight" not in [t.name for t in manifest.tensors]


def _spec(manifest, at, **changes):
    specs = list(manifest.tensors)
    specs[at] = replace(specs[at], **changes)
    return replace(manifest, tensors=tuple(specs))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: replace(m, nbytes=m.nbytes + 1), "announces"),
        (lambda m: _spec(m, 0, offset=-64), "leave the buffer"),
        (lambda m: _spec(m, 5, offset=10**9), "leave the buffer"),
        (lambda m: _spec(m, 1, offset=0), "overlap"),
        (lambda m: _spec(m, 0, shape=(3, 6)), "do not hold"),
        (lambda m: _spec(m, 0, shape=(-3, -5)), "do not hold"),
        (lambda m: _spec(m, 0, dtype="float31"), "unknown dtype"),
        (lambda m: _spec(m, 1, name="a"), "twice"),
        (lambda m: _spec(m, 1, offset=m.tensors[1].offset + 1), "overlap"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_before_use(change, words):
    manifest, buffer = pack(STATE, 4)
    for use in (verify, unpack):
        with pytest.raises(WeightsError, match=words):
            use(change(manifest), buffer)


def test_any_flipped_byte_is_noticed():
    manifest, buffer = pack(STATE, 4)
    for at in np.random.default_rng(0).integers(0, len(buffer), 20):
        broken = buffer.copy()
        broken[at] ^= 0x10
        with pytest.raises(WeightsError, match=r"version 4.*fetch the snapshot again"):
            verify(manifest, broken)


def test_buffers_of_another_kind_and_unknown_dtypes_are_refused():
    manifest, buffer = pack(STATE, 4)
    with pytest.raises(WeightsError, match="flat contiguous uint8"):
        verify(manifest, buffer.view(np.int8))
    with pytest.raises(WeightsError, match="flat contiguous uint8"):
        verify(manifest, np.stack([buffer, buffer], axis=1)[:, 0])
    with pytest.raises(WeightsError, match="complex64"):
        pack({"x": torch.zeros(2, dtype=torch.complex64)}, 0)


def test_handed_over_snapshot_arrives_as_an_array_and_is_kept_by_nobody():
    buffer = np.arange(1 << 16, dtype=np.uint8)
    alive = weakref.ref(buffer)
    gift = HandOver(buffer)
    parts = []
    data = pickle.dumps(gift, protocol=5, buffer_callback=parts.append)
    arrived = pickle.loads(data, buffers=[bytes(part.raw()) for part in parts])
    np.testing.assert_array_equal(arrived, buffer)
    del buffer, parts
    gc.collect()
    assert alive() is None
    with pytest.raises(WeightsError, match="once"):
        pickle.dumps(gift)
