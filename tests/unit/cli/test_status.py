"""`postroad status` for people."""

from __future__ import annotations

from typing import Any

import pytest

from postroad.cli.status import _show


def shown(answer: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    _show(answer)
    return capsys.readouterr().out


def test_what_is_not_known_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    links = [{"broker": "b2", "dialled": None, "rtt_ms": None}, {"broker": "b3", "rtt_ms": 1.5}]
    text = shown({"name": "b1", "links": links}, capsys)
    assert "null" not in text
    assert "None" not in text
    assert text.count("-") == 3
    assert "1.500" in text


def test_the_most_useful_figures_come_first_and_zeros_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics = {
        "turns_total": 1234,
        "nacks_sent_total": 0,
        "uptime_started_seconds": 1.7e9,
        "dropped_deliveries_total": 0,
        "events_in_total": 5,
    }
    lines = [line.split() for line in shown({"metrics": metrics}, capsys).splitlines() if line.strip()]
    assert lines[1:] == [
        ["events", "in", "total", "5"],
        ["dropped", "deliveries", "total", "0"],
        ["turns", "total", "1,234"],
    ]


def test_a_horizon_is_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    streams = [{"pubend": "p", "horizon": 1_700_000_000_123_456}, {"pubend": "q", "horizon": 1 << 62}]
    text = shown({"streams": streams}, capsys)
    assert "2023-11-14 22:13:20.123" in text
    assert str(1 << 62) in text


def test_what_others_wrote_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    subscriptions = [{"topic": "[red]a[/]", "where": "x = '\x1b[2J'"}]
    text = shown({"subscriptions": subscriptions}, capsys)
    assert "[red]a[/]" in text
    assert "x = '?[2J'" in text


def test_nothing_is_broken_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    link = {
        "broker": "frankfurt-1",
        "number": "ad83c0b7",
        "cost": 1,
        "dialled": "broker.frankfurt.example.org:17420",
        "up_s": 123_456,
        "rtt_ms": 0.37,
        "credit": 8_388_608,
        "unconsumed": 0,
    }
    owners = [{"broker": "238e1fcb", "released": 1_700_000_000_123_456}]
    answer = {
        "links": [link, {**link, "broker": "london-1"}],
        "durable_owners": [{"pubend": "238e1fcb-00000000", "floor": 5, "note": "x" * 50, "owners": owners}],
        "brokers": [{"broker": "london-1", "distance": 0}],
        "subscriptions": [{"name": "n", "where": "a = 1 AND " * 12 + "b"}],
    }
    text = shown(answer, capsys)
    condition = str(answer["subscriptions"][0]["where"])
    assert [line for line in text.splitlines() if len(line) > 80 and condition not in line] == []
    for whole in ("broker.frankfurt.example.org:17420", "8,388,608", "2023-11-14 22:13:20.123", condition):
        assert whole in text
    assert "[{" not in text
    assert "\u2502london-1" in text  # what fits is a table
