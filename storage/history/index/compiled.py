"""How the kernels of the indexes are compiled, and the names of the arrays that they take."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.core.caching import FunctionCache

log = logging.getLogger(__name__)

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

Int = Any
"""An integer out of a kernel: int32 or int64, as numba infers, where Python's type checker sees numpy's scalars."""

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


class _Kept(FunctionCache):  # type: ignore[misc]
    """Machine code on disk. A disk that refuses it costs later processes the time to compile, and this one nothing."""

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            log.warning("machine code is not kept: %s", error)


def compiled(kernel: Kernel) -> Kernel:
    """Compile on the first call, keep the machine code on disk, and let go of the GIL while it runs.

    What is kept is valid until the kernel's own file changes: after a change to a kernel that others call, remove the
    ``.nbi`` and ``.nbc`` files beside it.
    """
    made: Any = njit(nogil=True)(kernel)
    try:
        made._cache = _Kept(kernel)  # what cache=True does, with a cache of our own
    except RuntimeError as error:  # neither the folder of the module nor the user's cache can be written to
        log.warning("machine code is not kept: %s", error)
    result: Kernel = made
    return result


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ``array``, which from now on cannot be written to.

    Kernels are compiled for read-only and for other arrays apart. Indexes hold read-only ones from the start, as they
    come out of Ray's object store, so one variant serves both.
    """
    array.flags.writeable = False
    return array
