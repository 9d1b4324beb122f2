"""Conductors for tests: one that goes soon after its run, and one that takes long to come up as well.

Whatever the slow one asks of Ray in its constructor is dealt with before that ends.
"""

from __future__ import annotations

import time
from typing import Any

from pipelines import conductor
from pipelines.conductor import Conductor

_LONG_S = 2.0
_SOON_S = 3.0
"""Long enough for watchers that ask every 0.2 s to see the end."""

conductor._LINGER_S = _SOON_S


class BriefConductor(Conductor):
    """Wrap as a conductor."""


class SlowConductor(BriefConductor):
    """Wrap as a conductor."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        time.sleep(_LONG_S)
