"""A conductor that takes long to come up: whatever it asks of Ray in its constructor is dealt with before that ends."""

from __future__ import annotations

import time
from typing import Any

from pipelines.conductor import Conductor

_LONG_S = 2.0


class SlowConductor(Conductor):
    """Wrap as a conductor."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        time.sleep(_LONG_S)
