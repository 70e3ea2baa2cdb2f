"""The log: one line per happening on stderr, `time level broker text`.

Peers can cause lines (refused connections, broken frames), so lines per second are bounded; what was
left out is counted in the next line that is written. A complaint that goes on, such as an address that
nobody listens on, is written at once and then at growing intervals.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Final

LOGGER: Final = logging.getLogger("postroad")
MAX_LINES_PER_SECOND: Final = 200
FIRST_AGAIN_S: Final = 10.0  # a complaint is repeated after this long, then after twice as long, and so on
LAST_AGAIN_S: Final = 600.0
MAX_COMPLAINTS: Final = 256  # told apart; of more the oldest are forgotten
FORMS: Final = ("text", "json")
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


class _JsonLine(logging.Formatter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "broker": self._name,
            "text": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


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


class Complaints:
    """Which complaints to write. Those that differ only in the connection of one host are the same."""

    _CONNECTION: Final = re.compile(r"connection \d+(?:((?: was)? \S+):\d+)?")

    def __init__(self) -> None:
        # text -> when it was written last, after how long it is due again, and how often it was left out
        self._known: dict[str, tuple[float, float, int]] = {}

    def due(self, text: str, now_s: float) -> str | None:
        """The line to write, if it is time for it. One that was not heard of for long begins anew."""
        key = self._CONNECTION.sub(lambda match: f"connection{match[1] or ''}", text)
        written_s, again_s, left_out = self._known.pop(key, (now_s, 0.0, 0))
        if now_s < written_s + again_s:
            self._known[key] = written_s, again_s, left_out + 1
            return None
        if left_out:
            again_s = min(again_s * 2, LAST_AGAIN_S)
            text += f" ({left_out} times more in {now_s - written_s:.0f} s)"
        else:
            again_s = FIRST_AGAIN_S
        self._known[key] = now_s, again_s, 0
        if len(self._known) > MAX_COMPLAINTS:
            del self._known[next(iter(self._known))]
        return text


_COMPLAINTS: Final = Complaints()
_LOCK: Final = threading.Lock()  # for the complaints


def complain(level: str, text: str) -> None:
    """What a peer, the network or a disk causes, and may go on causing for ever. In any thread."""
    with _LOCK:
        line = _COMPLAINTS.due(text, time.monotonic())
    if line is not None:
        LOGGER.log(_number(level), "%s", line)


def _number(level: str) -> int:
    """A core's level that is unknown is worth seeing, not an error."""
    return logging.getLevelNamesMapping().get(level.upper(), logging.WARNING)


def setup(name: str, level: str, form: str = "text") -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLine(name) if form == "json" else _Line(name))
    handler.addFilter(_Bound())
    LOGGER.handlers[:] = [handler]
    set_level(level)
    LOGGER.propagate = False


def set_level(level: str) -> None:
    LOGGER.setLevel(level.upper())


def note(level: str, text: str) -> None:
    """A core's Note. Its warnings are complaints."""
    number = _number(level)
    if number == logging.WARNING:
        complain(level, text)
    else:
        LOGGER.log(number, "%s", text)
