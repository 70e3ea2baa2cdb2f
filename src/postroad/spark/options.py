"""The options of the data source `postroad`, checked (spec P1, P3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from postroad.client.addresses import parse_addresses
from postroad.durable.token import CheckpointToken
from postroad.errors import UsageError
from postroad.selectors import Selector
from postroad.units import SECOND_US

OLDEST: Final = 1  # the tick a stream begins after that begins with the oldest that is kept
_COMMON: Final = ("brokers", "topic", "timeout", "token")
_READING: Final = frozenset(
    [
        *(*_COMMON, "where", "durable", "startingtoken", "startingtime", "endingtoken", "endingtime"),
        *("maxrowspertrigger", "onloss", "partitions"),
    ]
)
_WRITING: Final = frozenset([*_COMMON, "checkpointlocation", "queryname", "path"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    brokers: tuple[str, ...]
    topic: str
    where: str
    durable: str
    token: CheckpointToken | None  # where it begins, by token
    since_us: int  # or by time
    until: CheckpointToken | None  # where a batch read ends
    until_us: int | None
    max_rows: int | None
    on_loss: Literal["fail", "gap"]
    partitions: int
    timeout_s: float
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    brokers: tuple[str, ...]
    topic: str
    timeout_s: float
    secret: str


def read_options(given: Mapping[str, str]) -> ReadOptions:
    options = _known(given, _READING)
    Selector.parse(options.get("topic", ""), options.get("where", ""))
    loss = options.get("onloss", "fail")
    if loss not in ("fail", "gap"):
        raise UsageError(f"onLoss is fail or gap, not {loss!r}")
    if "startingtoken" in options and "startingtime" in options:
        raise UsageError("startingToken and startingTime exclude each other")
    if "endingtoken" in options and "endingtime" in options:
        raise UsageError("endingToken and endingTime exclude each other")
    rows = options.get("maxrowspertrigger")
    return ReadOptions(
        brokers=_brokers(options),
        topic=options.get("topic", ""),
        where=options.get("where", ""),
        durable=options.get("durable", ""),
        token=_token(options.get("startingtoken")),
        since_us=_time_us("startingTime", options.get("startingtime")) or OLDEST,
        until=_token(options.get("endingtoken")),
        until_us=_time_us("endingTime", options.get("endingtime")),
        max_rows=None if rows is None else _positive("maxRowsPerTrigger", rows),
        on_loss="gap" if loss == "gap" else "fail",
        partitions=_positive("partitions", options.get("partitions", "1")),
        timeout_s=float(_positive("timeout", options.get("timeout", "60"))),
        secret=options.get("token", ""),
    )


def write_options(given: Mapping[str, str]) -> WriteOptions:
    options = _known(given, _WRITING)
    return WriteOptions(
        brokers=_brokers(options),
        topic=options.get("topic", ""),
        timeout_s=float(_positive("timeout", options.get("timeout", "60"))),
        secret=options.get("token", ""),
    )


def _known(given: Mapping[str, str], names: frozenset[str]) -> dict[str, str]:
    options = {name.lower(): value for name, value in given.items()}
    unknown = sorted(set(options) - names)
    if unknown:
        raise UsageError(f"the data source postroad has no option {unknown[0]!r} here")
    return options


def _brokers(options: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(parse_addresses(options.get("brokers", "localhost:7420")))


def _token(text: str | None) -> CheckpointToken | None:
    return None if text is None else CheckpointToken.from_json(text)


def _time_us(name: str, text: str | None) -> int | None:
    if text is None or (name == "startingTime" and text == "oldest"):
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{name} is a time such as 2026-01-31T12:00:00Z, not {text!r}") from None
    return max(OLDEST, round(time.replace(tzinfo=time.tzinfo or UTC).timestamp() * SECOND_US))


def _positive(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name} is a whole number from 1 on, not {text!r}")
    return int(text)
