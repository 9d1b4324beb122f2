"""Measures what ``ray job submit --working-dir DIR`` would upload, before it is zipped and refused.

Ray packs the directory without compression and sends it in one request; its dashboard refuses bodies beyond a limit
with a message that names neither the directory nor a remedy. Ray's own rules decide here what belongs to the upload,
so that the measured size is the real one.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from storage.errors import UserError

_SHOWN = 5
_DOMINANT = 0.9
"""A folder is named by the one inside of it that holds at least this share of its bytes."""
_ZIP_HEADERS = 30 + 46
"""Bytes that an archive spends on each file beside content and twice its name."""


@dataclass(frozen=True, slots=True)
class Upload:
    """What would travel.

    Attributes:
        directory: The working directory.
        size: Size of the archive. Unit: bytes.
        files: Number of files.
        limit: What Ray accepts. Unit: bytes.
        largest: Largest folders and files of the top level, each narrowed to the part that holds nearly all of it, with
            their sizes in bytes; largest first.
    """

    directory: Path
    size: int
    files: int
    limit: int
    largest: tuple[tuple[str, int], ...]

    @property
    def too_large(self) -> bool:
        """True when Ray would refuse it."""
        return self.size >= self.limit


def measure_upload(directory: Path | str) -> Upload:
    """Measure the upload of ``directory``; reads names and sizes, no content.

    Raises:
        UserError: It is not a directory, or something in it cannot be read.
    """
    from ray._private import ray_constants
    from ray._private.runtime_env import packaging

    root = Path(directory).absolute()
    if not root.is_dir():
        raise UserError(f"{directory}: is not a directory; --working-dir needs one")
    sizes: dict[Path, int] = {}

    def add(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(root)] = path.stat().st_size

    by_default = packaging._get_excludes(root, ray_constants.get_runtime_env_default_excludes())
    respects_gitignore = os.environ.get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    quiet = logging.getLogger(__name__)  # Ray's logger would list every ignore file
    try:
        packaging._dir_travel(root, [by_default], add, include_gitignore=respects_gitignore, logger=quiet)
    except OSError as error:
        raise UserError(
            f"{error.filename or directory}: cannot be read ({error.strerror}), so Ray cannot upload it; list it in "
            f"{root / '.rayignore'}"
        ) from error
    headers = sum(_ZIP_HEADERS + 2 * len(path.as_posix()) for path in sizes)
    return Upload(
        directory=root,
        size=sum(sizes.values()) + headers,
        files=len(sizes),
        limit=int(ray_constants.DASHBOARD_CLIENT_MAX_SIZE),
        largest=tuple(_largest(sizes)),
    )


def check_upload(directory: Path | str) -> Upload:
    """Measure the upload and refuse what Ray would refuse.

    Raises:
        UserError: Too large; names the largest folders and where to list them. Or it cannot be read.
    """
    upload = measure_upload(directory)
    if upload.too_large:
        parts = "".join(f"\n  {readable(size):>9}  {name}" for name, size in upload.largest)
        raise UserError(
            f"{upload.directory}: the upload of --working-dir takes {readable(upload.size)} in {upload.files} files, "
            f"Ray takes less than {readable(upload.limit)}. The largest parts:{parts}\n"
            f"list what the job does not need in {upload.directory / '.rayignore'} (the patterns of a .gitignore)"
        )
    return upload


def readable(size: float) -> str:
    """Return a number of bytes as people write it."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _largest(sizes: Mapping[Path, int]) -> list[tuple[str, int]]:
    """Return the largest parts of the top level, each narrowed to the folder that holds nearly all of it."""
    totals: Counter[Path] = Counter()
    children: dict[Path, set[Path]] = {}
    for path, size in sizes.items():
        totals[path] = size
        below = path
        for parent in path.parents:
            totals[parent] += size
            children.setdefault(parent, set()).add(below)
            below = parent
    found = []
    for part in sorted(children.get(Path(), ()), key=lambda p: (-totals[p], p))[:_SHOWN]:
        size = totals[part]
        while part in children:
            heaviest = max(children[part], key=lambda p: (totals[p], p))
            if totals[heaviest] < _DOMINANT * size:
                break
            part = heaviest
        found.append((part.as_posix() + ("/" if part in children else ""), totals[part]))
    return found
