"""The options of the data source `postroad`, checked (spec P1, P3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Final, Literal

from postroad.client.addresses import parse_addresses, tls
from postroad.client.blocking import Client, connect
from postroad.errors import UsageError
from postroad.events.token import CheckpointToken
from postroad.selectors import Selector
from postroad.units import SECOND_US

OLDEST: Final = 1  # the tick a stream begins after that begins with the oldest that is kept
_ACCESS: Final = ("token", "tlsCa", "tlsCert", "tlsKey", "timeout")
_COMMON: Final = ("brokers", "topic", *_ACCESS)
_READING: Final = (*_COMMON, "where", "startingToken", "startingTime", "onLoss", "partitions")
_BATCH: Final = (*_READING, "endingToken", "endingTime")
_STREAM: Final = (*_READING, "durable", "maxRowsPerTrigger")
_WRITING: Final = (*_COMMON, "checkpointLocation", "queryName", "path")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How brokers are reached, by the driver and by executors alike; TLS by files that each of them has."""

    token: str = field(default="", repr=False)
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    timeout_s: int = 60

    def connect(self, address: str, *, timeout_s: float | None = None, window: int | str = "4 MiB") -> Client:
        secure = bool(self.tls_ca or self.tls_cert)
        return connect(
            address,
            name="spark",
            token=self.token or None,
            tls=tls(ca=self.tls_ca or None, certificate=self.tls_cert or None, key=self.tls_key or None)
            if secure
            else None,
            timeout=self.timeout_s if timeout_s is None else timeout_s,
            window=window,
        )

    def options(self) -> dict[str, str]:
        """As the data source takes them."""
        values = (self.token, self.tls_ca, self.tls_cert, self.tls_key, f"{self.timeout_s}")
        return {name: value for name, value in zip(_ACCESS, values, strict=True) if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    brokers: tuple[str, ...]
    access: Access
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    brokers: tuple[str, ...]
    access: Access
    topic: str


def read_options(given: Mapping[str, str], *, stream: bool) -> ReadOptions:
    reading = "a stream" if stream else "a batch read"
    options = _known(given, _STREAM if stream else _BATCH, reading)
    topic = options.get("topic", "#")  # without what brokers publish about themselves
    Selector.parse(topic, options.get("where", ""))
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
        access=_access(options),
        topic=topic,
        where=options.get("where", ""),
        durable=options.get("durable", ""),
        token=_token(options.get("startingtoken")),
        since_us=_time_us("startingTime", options.get("startingtime")) or OLDEST,
        until=_token(options.get("endingtoken")),
        until_us=_time_us("endingTime", options.get("endingtime")),
        max_rows=None if rows is None else _positive("maxRowsPerTrigger", rows),
        on_loss="gap" if loss == "gap" else "fail",
        partitions=_positive("partitions", options.get("partitions", "1")),
    )


def write_options(given: Mapping[str, str]) -> WriteOptions:
    options = _known(given, _WRITING, "a write")
    return WriteOptions(
        brokers=_brokers(options),
        access=_access(options),
        topic=options.get("topic", ""),
    )


def _known(given: Mapping[str, str], names: Sequence[str], doing: str) -> dict[str, str]:
    """By their names in lower case: Spark does not tell upper from lower."""
    options = {name.lower(): value for name, value in given.items()}
    known = {name.lower() for name in names}
    for name in sorted(given):
        if name.lower() not in known:
            near = get_close_matches(name.lower(), known, 1)
            meant = f": {next(name for name in names if name.lower() == near[0])}?" if near else ""
            raise UsageError(f"{doing} with the format postroad has no option {name!r}{meant}")
    return options


def _brokers(options: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(parse_addresses(options.get("brokers", "localhost:7420")))


def _access(options: Mapping[str, str]) -> Access:
    if "tlskey" in options and "tlscert" not in options:
        raise UsageError("tlsKey needs its certificate: add tlsCert")
    return Access(
        token=options.get("token", ""),
        tls_ca=options.get("tlsca", ""),
        tls_cert=options.get("tlscert", ""),
        tls_key=options.get("tlskey", ""),
        timeout_s=_positive("timeout", options.get("timeout", "60")),
    )


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
