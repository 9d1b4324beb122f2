"""Weights as one flat buffer with a manifest: packed by the learner, verified and unpacked by the engines.

One contiguous byte buffer crosses the object store without serialisation, and one hash over it tells a reader that it
holds exactly the snapshot that was announced. A reader trusts nothing: every offset, shape and dtype of the manifest
is checked before a byte is interpreted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from storage.records import TensorSpec, WeightsManifest

if TYPE_CHECKING:
    import torch
    from torch import nn

ALIGNMENT = 64
_DTYPE_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class WeightsError(Exception):
    """A snapshot of weights that does not match its manifest, or cannot be loaded into this model."""


def policy_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a snapshot of ``model`` holds: parameters and persistent floating-point buffers, tied ones once.

    The tensors are the model's own (not copies), keyed by the first name under which each occurs.
    """
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and tensor.is_floating_point():
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state


def pack(state: Mapping[str, torch.Tensor], version: int) -> tuple[WeightsManifest, npt.NDArray[np.uint8]]:
    """Lay tensors out in one buffer.

    Args:
        state: Tensors by name, on any device; two names of the same memory are stored once, under the first name.
        version: Version of the snapshot.

    Returns:
        The manifest and the uint8[nbytes] buffer. Each tensor starts at a multiple of 64 bytes; bytes are raw
        (bfloat16 included) and the gaps are zero, so equal weights give equal hashes.

    Raises:
        WeightsError: A tensor has a dtype that a snapshot cannot hold.
    """
    import torch

    specs: list[TensorSpec] = []
    sources: list[torch.Tensor] = []
    seen: set[tuple[object, ...]] = set()
    offset = 0
    for name, tensor in state.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPE_SIZES:
            raise WeightsError(f"tensor {name!r} has dtype {dtype}, which a snapshot cannot hold")
        nbytes = tensor.numel() * _DTYPE_SIZES[dtype]
        specs.append(TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype, offset=offset, nbytes=nbytes))
        sources.append(tensor)
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    buffer = np.zeros(offset, np.uint8)
    target = torch.from_numpy(buffer)
    for spec, source in zip(specs, sources, strict=True):
        flat = source.detach().cpu().contiguous().reshape(-1)
        target[spec.offset : spec.offset + spec.nbytes] = flat.view(torch.uint8)
    manifest = WeightsManifest(version=version, tensors=tuple(specs), nbytes=offset, hash=_digest(buffer))
    return manifest, buffer


class HandOver:
    """A buffer that is given away by being pickled once; it arrives as the plain array.

    Ray keeps what a streaming generator yielded until the generator yields again. For a snapshot that would mean a
    second copy of the model beside the one in the object store for the whole of the next step.
    """

    def __init__(self, buffer: npt.NDArray[np.uint8]) -> None:
        self._buffer: npt.NDArray[np.uint8] | None = buffer

    def __reduce__(self) -> tuple[Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]], tuple[Any, ...]]:
        """Pickle as the array, and let go of it."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            raise WeightsError("a snapshot can be handed over only once")
        return _itself, (buffer,)


def _itself(buffer: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return buffer


def verify(manifest: WeightsManifest, buffer: npt.NDArray[np.uint8]) -> None:
    """Check layout and hash of a snapshot; raises ``WeightsError`` that says what is wrong."""
    _check_layout(manifest, buffer)
    digest = _digest(buffer)
    if digest != manifest.hash:
        raise WeightsError(
            f"weights version {manifest.version}: the buffer's xxh3-128 is {digest}, announced was {manifest.hash}; "
            "fetch the snapshot again"
        )


def unpack(manifest: WeightsManifest, buffer: npt.NDArray[np.uint8]) -> dict[str, torch.Tensor]:
    """Return the tensors of a snapshot as views of ``buffer`` (CPU; never write to them).

    Raises:
        WeightsError: The manifest does not fit the buffer. The hash is the business of :func:`verify`.
    """
    import torch

    _check_layout(manifest, buffer)
    if not manifest.nbytes:
        flat = torch.empty(0, dtype=torch.uint8)
    else:
        with warnings.catch_warnings():
            # Buffers from the object store are read-only on purpose, and torch warns about each.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(buffer)
    return {
        spec.name: flat[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec in manifest.tensors
    }


def _digest(buffer: npt.NDArray[np.uint8]) -> str:
    return xxhash.xxh3_128_hexdigest(buffer.data)


def _check_layout(manifest: WeightsManifest, buffer: npt.NDArray[np.uint8]) -> None:
    where = f"weights version {manifest.version}"
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise WeightsError(
            f"{where}: the buffer must be a flat contiguous uint8 array, got {buffer.dtype}{buffer.shape}"
        )
    if buffer.nbytes != manifest.nbytes:
        raise WeightsError(f"{where}: the manifest announces {manifest.nbytes} bytes, the buffer has {buffer.nbytes}")
    end, names = 0, set()
    for spec in sorted(manifest.tensors, key=lambda s: (s.offset, s.nbytes)):
        tensor = f"{where}, tensor {spec.name!r}"
        size = _DTYPE_SIZES.get(spec.dtype)
        if size is None:
            raise WeightsError(f"{tensor}: unknown dtype {spec.dtype!r}")
        if spec.name in names:
            raise WeightsError(f"{tensor}: occurs twice")
        if any(n < 0 for n in spec.shape) or spec.nbytes != math.prod(spec.shape) * size:
            raise WeightsError(f"{tensor}: {spec.nbytes} bytes do not hold shape {spec.shape} of {spec.dtype}")
        if spec.offset < end or spec.offset % size or spec.offset + spec.nbytes > manifest.nbytes:
            raise WeightsError(
                f"{tensor}: bytes {spec.offset}..{spec.offset + spec.nbytes} overlap, or leave the buffer"
            )
        names.add(spec.name)
        end = spec.offset + spec.nbytes
