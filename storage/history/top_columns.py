"""The optional columns of the history store: the likeliest tokens at each place of an answer.

K values a token, flattened: K is the size of the list divided by the length of the answer, so answers of runs with
another K stand side by side. Null where nothing was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from storage.records import Sample

TOP_NAMES = ("top_ids", "top_logprobs")
"""Columns of the likeliest tokens."""
TOP_FIELDS = (pa.field("top_ids", pa.list_(pa.int32())), pa.field("top_logprobs", pa.list_(pa.float32())))

_LARGEST_LOGPROB = 1e-3  # rounding of a probability of 1; engines compute in fp32


def has_top(schema: Any) -> bool:
    """Return whether a ``pyarrow.Schema`` has these columns."""
    return TOP_NAMES[0] in schema.names


def top_columns(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return both columns by name, ``pyarrow.ListArray`` of one entry a sample.

    Raises:
        ValueError: A sample does not have them for each of its tokens; names it.
    """
    tops = []
    for sample in samples:
        try:
            tops.append(sample.top())
        except ValueError as error:
            raise ValueError(f"group {sample.key}: sample {sample.index} has {error}") from None
    absent = pa.array([top is None for top in tops], pa.bool_())
    sizes = [0 if top is None else top.ids.size for top in tops]
    offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
    flat = [(top.ids.reshape(-1), top.logprobs.reshape(-1)) for top in tops if top is not None]
    ids = np.concatenate([np.zeros(0, np.int32), *(part for part, _ in flat)], dtype=np.int32)
    logprobs = np.concatenate([np.zeros(0, np.float32), *(part for _, part in flat)], dtype=np.float32)
    return {
        TOP_NAMES[0]: pa.ListArray.from_arrays(offsets, pa.array(ids), mask=absent),
        TOP_NAMES[1]: pa.ListArray.from_arrays(offsets, pa.array(logprobs), mask=absent),
    }


def top_laws(batch: Any) -> dict[str, Any]:
    """Return what must hold of these columns, as bool arrays by the law in words."""
    length = batch.column("length").to_numpy()
    ids, logprobs = (batch.column(name) for name in TOP_NAMES)
    sizes = np.diff(ids.offsets.to_numpy())
    names, values = ids.values.to_numpy(), logprobs.values.to_numpy()
    return {
        "as many likeliest tokens at each place of an answer": sizes % np.maximum(length, 1) == 0,
        "a log-probability for each likeliest token": np.diff(logprobs.offsets.to_numpy()) == sizes,
        "ids of likeliest tokens of at least 0, or -1 for none": names >= -1,
        "log-probabilities of likeliest tokens not above 0": values <= _LARGEST_LOGPROB,  # NaN is not
    }
