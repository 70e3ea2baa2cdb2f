"""The log: one line per happening on stderr, `time level broker text`.

Peers can cause lines (refused connections, broken frames), so lines per second are bounded; what was
left out is counted in the next line that is written.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Final

LOGGER: Final = logging.getLogger("postroad")
MAX_LINES_PER_SECOND: Final = 200
LEVELS: Final = ("debug", "info", "warning", "error")


class _Line(logging.Formatter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        text = record.getMessage().replace("\n", "\\n")
        line = f"{moment}.{int(record.msecs):03d}Z {record.levelname.lower()} {self._name} {text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _Bound(logging.Filter):
    """At most MAX_LINES_PER_SECOND lines; errors always pass."""

    def __init__(self) -> None:
        super().__init__()
        self._second = 0
        self._lines = 0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        if int(record.created) != self._second:
            self._second, self._lines = int(record.created), 0
            if self._left_out:
                record.msg, record.args = (
                    f"{record.getMessage()} ({self._left_out} lines left out before)",
                    None,
                )
                self._left_out = 0
        self._lines += 1
        if self._lines > MAX_LINES_PER_SECOND:
            self._left_out += 1
            return False
        return True


def setup(name: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line(name))
    handler.addFilter(_Bound())
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(level.upper())
    LOGGER.propagate = False


def note(level: str, text: str) -> None:
    """A core's Note: an unknown level is worth seeing, not an error."""
    LOGGER.log(logging.getLevelNamesMapping().get(level.upper(), logging.WARNING), "%s", text)
