"""Searches for brokers from here: one at a time, its result shared by all who ask within REUSED_S."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from postroad.discovery.explaining import as_rows
from postroad.net.finding import Where, find

REUSED_S: Final = 5.0


class Searches:
    def __init__(self, where: Where) -> None:
        self._where = where
        self._searching = asyncio.Lock()
        self._result: dict[str, Any] = {}
        self._at_s = -REUSED_S

    async def search(self) -> dict[str, Any]:
        async with self._searching:
            if not self._result or time.monotonic() - self._at_s > REUSED_S:
                self._result = as_rows(await find(self._where))
                self._at_s = time.monotonic()
            return self._result
