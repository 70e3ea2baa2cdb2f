"""Rows of the tables, and the path of a message over the topology."""

from __future__ import annotations

from typing import Any

from postroad.page.core import picture, tables
from postroad.page.core.model import Model

PUBEND = "00000001-00000000"


def texts(row: dict[str, Any]) -> list[str]:
    return [cell["text"] for cell in row["cells"]]


def subscribed(name: str, **said: Any) -> dict[str, Any]:
    row = {"name": name, "connected": True, "mode": "consolidated", "topic": "orders/#", "lag_events": 0}
    return {**row, "released": {PUBEND: 5_000_000}, **said}


def watching(*rows: dict[str, Any]) -> Model:
    model = Model()
    status = {"number": "00000001", "links": []}
    model.take("status", {"answers": {"b1": status}}, "b1", 0.0)
    streams = [{"pubend": PUBEND, "latest_delivered": 9_000_000}]
    for at in range(3):
        answer = {"subscriptions": list(rows), "constreams": streams}
        model.take("subs", {"answers": {"b1": answer}}, "b1", float(at))
    return model


def test_subscriptions_are_in_the_order_of_their_lag() -> None:
    model = watching(
        subscribed("quick"),
        subscribed("slow", lag_events=10, mode="catchup", lag_at_least=True),
        subscribed("away", lag_events=5, connected=False, mode=""),
        subscribed("moved", moved=True),
    )
    listed = tables.subscriptions(model, acts=False)
    assert [texts(row)[0] for row in listed] == ["slow", "away", "quick"]
    assert [texts(row)[3] for row in listed] == ["catchup", "away", "consolidated"]
    assert texts(listed[0])[4] == "at least 10"
    assert all(not row["acts"] for row in listed)
    assert all(row["acts"] for row in tables.subscriptions(model, acts=True))


def test_the_lines_of_a_subscription_are_those_of_the_papers_figures() -> None:
    model = watching(subscribed("audit"))
    key = tables.subscription_key("b1", "audit")
    lines = tables.progress(model, key)
    assert [*lines] == ["latestDelivered of b1", "released of b1"]
    assert [value for _, value in lines["released of b1"].points] == [5.0, 5.0, 5.0]
    assert lines["latestDelivered of b1"].last == 9.0
    assert tables.progress(model, "b1\nnobody") == {}


def test_what_released_nothing_yet_has_no_line() -> None:
    """Tick 0 is no time: drawn, it would be years before all others."""
    model = watching(subscribed("audit", released={PUBEND: 0}))
    assert [*tables.progress(model, tables.subscription_key("b1", "audit"))] == ["latestDelivered of b1"]


def test_rows_are_searched_by_words() -> None:
    rows = [tables.row("1", "b1-reader", tables.cell("x", below="Orders/EU")), tables.row("2", "b2", "y")]
    assert [row["key"] for row in tables.matching(rows, "orders b1")] == ["1"]
    assert len(tables.matching(rows, "  ")) == 2
    assert tables.matching(rows, "orders b2") == []


def test_clients_have_rates_of_what_they_send_and_get() -> None:
    model = Model()
    for at, sent in enumerate((0, 2_048)):
        subscriptions = [{"connection": 7, "delivered": sent}, {"connection": 7, "delivered": sent}]
        model.take("status", {"answers": {"b1": {"subscriptions": subscriptions}}}, "b1", 2.0 * at)
        row = {"connection": 7, "name": "reader", "bytes_in": sent}
        model.take("clients", {"answers": {"b1": {"clients": [row]}}}, "b1", 2.0 * at)
    (listed,) = tables.clients(model, acts=True)
    assert listed["key"] == "b1\n7"
    assert texts(listed)[4:6] == ["1.0 KiB/s", "2,048/s"]
    assert listed["acts"] == ["Disconnect"]


def test_dead_letters_are_text_whatever_they_are() -> None:
    letters = [
        {"source": "shop", "payload": "aGVsbG8=", "attempts": 3},
        {"payload": "abc"},
        {"payload": "/w=="},
    ]
    shown = [texts(row)[1] for row in tables.dead_letters({"dead": letters})]
    assert shown == ["hello", "(not readable)", "\ufffd"]
    assert [*tables.queues({"queues": [{"inbox": "a", "dead": 1}]}, acts=True)[0]["acts"]] == [
        "Send again",
        "Drop",
    ]
    assert tables.queues({"queues": [{"inbox": "a", "dead": 0}]}, acts=True)[0]["acts"] == []


TRAIL = {
    "origin": {"publisher": "00400001", "broker": "b1"},
    "route": [
        {"broker": "b1", "from": None, "doubt": 0.0},
        {"broker": "b2", "from": "b1", "doubt": 1e-9},
        {"broker": "b3", "from": "b2", "doubt": 0.2},
    ],
    "receivers": [{"subscriber": "reader", "broker": "b3", "doubt": 1e-4}],
    "missing": {"verdict": "complete", "text": "", "brokers": []},
}


def test_a_path_is_drawn_over_the_links_with_its_direction_and_doubts() -> None:
    edges = [
        {"key": picture.edge_key("b1", "b2"), "from": "b1", "to": "b2", "tone": "calm", "width": 2.0},
        {"key": picture.edge_key("b1", "b4"), "from": "b1", "to": "b4", "tone": "calm", "width": 2.0},
    ]
    drawn = picture.traced(edges, TRAIL)
    assert [(edge["from"], edge["to"], edge["path"]) for edge in drawn] == [
        ("b1", "b2", "sure"),
        ("b1", "b4", ""),
        ("b2", "b3", "doubtful"),  # a link that is gone
    ]
    assert drawn[2]["label"] == "doubt 20.0%"
    nodes = [{"key": name, "label": name} for name in ("b1", "b3", "b4")]
    marked = picture.visited(nodes, TRAIL)
    assert [(node["mark"], node["below"]) for node in marked] == [
        (True, "passed"),
        (True, "1 got it"),
        (False, ""),
    ]


def test_a_verdict_in_words() -> None:
    assert tables.verdict(TRAIL) == "Published by 00400001 at b1, routed by 3 brokers, received by 1."
    missing = {"missing": {"verdict": "partial", "text": "not all answered:", "brokers": ["b2", "b9"]}}
    assert tables.verdict(missing) == "not all answered: b2, b9"
    assert tables.verdict({}) == "The path is not known whole."
    assert [texts(row)[2] for row in tables.route(TRAIL)] == ["certain", "doubt 1.0e-09", "doubt 20.0%"]
    assert texts(tables.receivers(TRAIL)[0]) == ["reader", "b3", "doubt 1.0e-04"]


def test_what_brokers_left_out_is_said() -> None:
    """Else a search that finds nothing would say that there is nothing."""
    answers: dict[str, Any] = {"b1": {"more": False}, "b2": {"more": True}, "b3": {}}
    assert tables.left_out(answers, "postroad clients") == (
        "Not all are here: b2 has more. `postroad clients` lists them."
    )
    assert not tables.left_out({}, "postroad clients")
