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
