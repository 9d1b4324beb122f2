"""What a failure in another process means to a person: whose it is to mend, in one message without a traceback.

Ray wraps what a remote method raised, and keeps only the text of what a constructor raised.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeGuard

import ray

from storage.errors import UserError
from storage.files import FULL, StorageError, describe_failure

_STORE_FULL = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)
_RAISED = re.compile(r"^((?:\w+\.)+\w+): ", re.MULTILINE)
_REFUSED = re.compile(r"^OSError: \[Errno (\d+)\] [^:\n]*(?:: '([^'\n]*)')?", re.MULTILINE)
_MOST_CHARS = 400


class RunLost(Exception):
    """Something died that has no successor while the run goes on; from its newest checkpoint it can go on."""


def survivable(error: BaseException) -> bool:
    """Return whether a run that broke by ``error`` may go on from its newest checkpoint.

    What died may live the next time, with everything else in its state of then. What our own code raised would be
    raised again.
    """
    if user_error(error) is not None:
        return False
    return isinstance(error, RunLost | ray.exceptions.RayError)


def user_error(error: BaseException) -> UserError | None:
    """Return the user error that ``error`` is or was caused by in another process; None when there is none."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return full_disk(cause, error.function_name) if _is_full(cause) else user_error(cause)
    if isinstance(error, UserError):
        return error
    if _is_full(error):
        return full_disk(error)
    if isinstance(error, _STORE_FULL):
        return UserError(_store_full(error))
    if isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed:
        raised = list(_RAISED.finditer(str(error)))
        if raised and raised[-1][1] in _user_error_names():
            return UserError(str(error)[raised[-1].end() :].strip())
        refused = _REFUSED.findall(str(error))
        if refused and int(refused[-1][0]) in FULL:
            return full_disk(OSError(int(refused[-1][0]), "", refused[-1][1]))
    return None


def full_disk(error: OSError, who: str = "") -> StorageError:
    """Say what a disk without room refused, where the code that wrote it left that to its callers.

    The system names the file only where it could not be opened.
    """
    name = error.filename or (f"a file of {who}" if who else "a file")
    return StorageError(describe_failure("cannot write", Path(str(name)), error))


def _is_full(error: object) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno in FULL


def _store_full(error: BaseException) -> str:
    """Say what to do when the object store of a node has no room, and the disk that it spills to has none either."""
    spilt = " and so is the disk that it spills to" if isinstance(error, ray.exceptions.OutOfDiskError) else ""
    return (
        f"the object store of a node is full{spilt}: raise cluster.object_store_mb (of a cluster that is joined, the "
        "--object-store-memory of its nodes), free space on that disk, or spill to another one (RAY_TMPDIR, or "
        "--object-spilling-directory of `ray start`); a step needs less with fewer rollout.prompts_per_step"
    )


def brief(error: BaseException) -> str:
    """Return what happened in one line; the traceback belongs into the log."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, BaseException):
        return brief(error.cause)
    if isinstance(error, RunLost):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ray.exceptions.RayActorError) and lines:
        # the first line says that it died, the last one why
        text = lines[-1] if error.actor_init_failed or len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    else:
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 4] + " ..."


def cause_of_death(error: BaseException) -> str:
    """Return what to write behind "X died": nothing for a killed process, of which Ray only tells at length."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return cause_of_death(cause) if isinstance(cause, ray.exceptions.RayActorError) else f" ({brief(error)})"
    if isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed:
        return " with its node" if "node has died" in str(error) or "node was terminated" in str(error) else ""
    return f" ({brief(error)})"


def _user_error_names() -> set[str]:
    names, left = set(), [UserError]
    while left:
        kind = left.pop()
        names.add(f"{kind.__module__}.{kind.__qualname__}")
        left.extend(kind.__subclasses__())
    return names
