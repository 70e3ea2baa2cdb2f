"""What `pub`, `sub` and `demo` do before and after they talk to a broker."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta

import pytest

from postroad.cli.demo import plan
from postroad.cli.pub import guess, parse_attributes
from postroad.cli.sub import event_json, event_line, time_of
from postroad.errors import UsageError
from postroad.events import Event
from postroad.ids import MessageId


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("120", 120),
        ("-7", -7),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("true", True),
        ("false", False),
        ("True", "True"),
        ("", ""),
        ("01234", "01234"),
        ("-007", "-007"),
        ("00.5", "00.5"),
        ("0", 0),
        ("0.50", 0.5),
        ("nan", "nan"),
        ("-inf", "-inf"),
        ("1_000", "1_000"),
        (" 1", " 1"),
        ("1.2.3", "1.2.3"),
        ("12 Main St", "12 Main St"),
        ("٣", "٣"),
    ],
)
def test_attribute_values_have_the_type_they_look_like(text: str, value: object) -> None:
    found = guess(text)
    assert (found, type(found)) == (value, type(value))


def test_attributes_are_named_once_and_text_on_demand() -> None:
    assert parse_attributes(["a=1", "b=x=y"], ["c=1"]) == {"a": 1, "b": "x=y", "c": "1"}
    for wrong in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(UsageError):
            parse_attributes(wrong, [])


def test_a_time_is_iso_8601_or_how_long_ago_it_was() -> None:
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert time_of("2026-01-31T12:00Z") == time_of("2026-01-31 13:00:00+01:00") == noon
    assert time_of("2026-01-31T12:00") == datetime(2026, 1, 31, 12).astimezone()
    before = datetime.now(UTC)
    assert before - timedelta(minutes=10) <= time_of("10m") <= datetime.now(UTC) - timedelta(minutes=10)
    for wrong in ("yesterday", "10", "-5m", "999999999d", "0001-01-01T00:00+14:00"):
        with pytest.raises(UsageError, match="is not a time such as"):
            time_of(wrong)


def event(payload: bytes) -> Event:
    return Event(id=MessageId(1, 2, 1_700_000_000_123, 4), topic="a/b", attributes={"n": 1}, payload=payload)


def test_json_tells_everything_and_says_how_the_payload_is_written() -> None:
    assert event_json(event("grüße".encode())) == {
        "id": "00000001-00000002-018bcfe5687b-0004",
        "topic": "a/b",
        "attributes": {"n": 1},
        "payload": "grüße",
        "encoding": "utf-8",
        "published_at": "2023-11-14T22:13:20.123000+00:00",
        "pubend": None,
        "tick": None,
    }
    assert event_json(event(b"\xff\x00")) | {} == event_json(event(b"")) | {
        "payload": "/wA=",
        "encoding": "base64",
    }


def test_json_has_no_infinite_numbers() -> None:
    attributes = {"up": math.inf, "down": -math.inf, "half": 0.5}
    shown = event_json(Event(id=MessageId(1, 2, 3, 4), topic="a", attributes=attributes, payload=b""))
    assert shown["attributes"] == {"up": "Infinity", "down": "-Infinity", "half": 0.5}
    json.dumps(shown, allow_nan=False)


def test_a_line_for_people_stays_one_line() -> None:
    assert event_line(event(b"one\ntwo\x1b[2J")) == "a/b  one\\ntwo\\x1b[2J  n=1"


def test_the_demo_is_a_ring_with_a_chord() -> None:
    assert [(station.name, station.links) for station in plan(5)] == [
        ("b1", ()),
        ("b2", ("b1",)),
        ("b3", ("b2", "b1")),
        ("b4", ("b3",)),
        ("b5", ("b4", "b1")),
    ]
    assert [station.links for station in plan(1)] == [()]
    assert [station.links for station in plan(2)] == [(), ("b1",)]
