"""``python -m pipelines`` is ``slipstream``: the entry point for ``ray job submit``."""

from __future__ import annotations

import sys

from pipelines.cli import main

if __name__ == "__main__":
    sys.exit(main())
