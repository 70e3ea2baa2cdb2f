"""What is known of the network, from answers of brokers: of these, of other versions, and of none."""

from __future__ import annotations

from typing import Any

import pytest

from postroad.page.core import picture, tables
from postroad.page.core.figures import MAX_POINTS
from postroad.page.core.model import FORGET_S, MAX_BROKERS, MAX_WATCHED, Model
from postroad.page.core.reading import MAX_TEXT, shown


def status(number: int, *links: int, events: int = 0, load: float = 0.1, effort: Any = ()) -> dict[str, Any]:
    return {
        "number": f"{number:08x}",
        "address": f"127.0.0.1:{7420 + number}",
        "links": [
            {
                "broker": f"b{link}",
                "number": f"{link:08x}",
                "bytes_in": 100 * events,
                "rtt_ms": 2.0,
                "up_s": 9,
            }
            for link in links
        ],
        "best_effort_links": [
            {"number": f"{link:08x}", "sent": sent, "received": received} for link, sent, received in effort
        ],
        "discovery": {"usage": {"process_cpu_share": load, "cpu_share": 0.9}},
        "metrics": {"events_in_total": events, "deliveries_total": 2 * events},
    }


def answered(**answers: Any) -> dict[str, Any]:
    return {"answers": answers, "silent": []}


def test_brokers_links_rates_and_colours() -> None:
    model = Model()
    model.take("status", answered(b1=status(1, 2), b2=status(2, 1, load=0.9)), "b1", 10.0)
    later = answered(b1=status(1, 2, events=200), b2=status(2, 1, events=100, load=0.9))
    model.take("status", later, "b1", 12.0)
    assert model.brokers["b1"].rate("published") == 100
    assert model.totals["published"].last == 150
    link = model.links["b1", "b2"]
    assert link.up
    assert link.traffic == 15_000
    nodes = picture.nodes(model, picture.Places().find(model.brokers, model.links))
    assert [(node["key"], node["tone"], node["inside"]) for node in nodes] == [
        ("b1", "calm", "10%"),
        ("b2", "hot", "90%"),
    ]
    assert "100/s in" in nodes[0]["says"]
    assert tables.links_of(model, "b1")[0]["cells"][1]["text"] == "14.6 KiB/s"


def test_loss_of_a_link_is_what_one_end_sent_and_the_other_did_not_get() -> None:
    model = Model()
    for at, (sent, received) in enumerate(((0, 0), (1_000, 950))):
        b1 = status(1, 2, effort=[(2, sent, 0)])
        b2 = status(2, 1, effort=[(1, 0, received)])
        model.take("status", answered(b1=b1, b2=b2), "b1", 2.0 * at)
    edge = picture.edges(model)[0]
    assert edge["tone"] == "hot"
    assert "5.0% lost" in edge["label"]


def test_who_falls_silent_stays_in_the_picture_for_a_while() -> None:
    model = Model()
    model.take("status", answered(b1=status(1, 2), b2=status(2, 1)), "b1", 0.0)
    model.take("status", answered(b1=status(1, 2)) | {"silent": ["b2"]}, "b1", 2.0)
    assert model.brokers["b2"].state == "silent"
    assert not model.links["b1", "b2"].up
    assert model.brokers["b2"].rate("published") is None
    assert tables.brokers(model)[1]["cells"][1]["text"] == "does not answer"
    model.take("status", answered(b1=status(1)), "b1", 3.0)  # nobody reaches it any more
    assert "b2" in model.brokers
    model.take("status", answered(b1=status(1)), "b1", FORGET_S + 3.0)
    assert [*model.brokers] == ["b1"]
    assert model.links == {}


def test_a_broker_that_refuses_says_why() -> None:
    model = Model()
    model.take("status", answered(b1=status(1)) | {"refused": {"b2": "it serves nobody"}}, "b1", 0.0)
    assert model.brokers["b2"].state == "refused"
    assert "it serves nobody" in picture.nodes(model, {})[1]["says"]


def test_without_any_broker_all_are_silent_and_lines_are_broken() -> None:
    model = Model()
    model.take("status", answered(b1=status(1)), "b1", 0.0)
    model.take("status", answered(b1=status(1, events=10)), "b1", 2.0)
    revision = model.revision
    model.fail("no broker answers", 4.0)
    assert model.revision > revision
    assert model.trouble == "no broker answers"
    assert model.brokers["b1"].state == "silent"
    assert model.brokers["b1"].lines["published"].last is None
    assert model.addresses() == ["127.0.0.1:7421"]
    model.take("status", answered(b1=status(1, events=20)), "b1", 6.0)
    assert model.trouble == ""
    assert model.brokers["b1"].state == "up"


def test_answers_of_another_kind_than_expected_are_not_said() -> None:
    strange: dict[str, Any] = {
        "links": [1, {"broker": 7, "number": None}],
        "metrics": ["no"],
        "discovery": 3,
        "streams": {"a": 1},
        "subscriptions": [{"name": 1}],
        "repair": "none",
        "ring": {"leaves": [1, "b2"]},
    }
    model = Model()
    answer = {"answers": {"b1": strange, "b2": "nothing"}, "silent": [3], "refused": []}
    model.take("status", answer, "b1", 0.0)
    model.take(
        "subs", {"answers": {"b1": {"subscriptions": [{"released": 3}], "constreams": [{}]}}}, "b1", 0.0
    )
    model.take("clients", {"answers": {"b1": {"clients": [{}]}}}, "b1", 0.0)
    model.take_queues({"queues": [{}]})
    broker = model.brokers["b1"]
    assert [*model.brokers] == ["b1"]
    assert broker.load is None
    assert picture.load_tone(broker.load, broker.state) == "unknown"
    assert dict(tables.facts(broker))["ring neighbours"] == "b2"
    assert tables.streams(strange, 0.0) == []
    for listed in (
        tables.brokers(model),
        tables.subscribers(strange),
        tables.subscriptions(model, acts=True),
        tables.clients(model, acts=True),
        tables.queues(model.queues, acts=True),
    ):
        assert len(listed) == 1
    assert tables.repair(model) == []


def test_what_is_kept_is_bounded() -> None:
    model = Model()
    crowd = {f"b{at}": status(at) for at in range(MAX_BROKERS + 50)}
    model.take("status", answered(**crowd), "b0", 0.0)
    assert len(model.brokers) <= MAX_BROKERS
    subscriptions = [
        {"name": f"s{at}", "released": {"00000001-00000000": at}} for at in range(MAX_WATCHED + 50)
    ]
    for turn in range(3):
        model.take("subs", answered(b1={"subscriptions": subscriptions}), "b1", float(turn))
    assert len(model.watched) == MAX_WATCHED
    assert all(len(line.points) <= MAX_POINTS for line in model.watched.values())


def test_places_are_kept_while_nothing_changes_and_are_inside() -> None:
    places = picture.Places()
    names = [f"b{at}" for at in range(9)]
    links = [(f"b{at}", f"b{at + 1}") for at in range(8)]
    first = dict(places.find(names, links))
    assert places.find(reversed(names), reversed(links)) == first
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in first.values())
    assert len({(round(x, 2), round(y, 2)) for x, y in first.values()}) == 9
    assert places.find(["b1"], []) == {"b1": (0.5, 0.5)}
    assert places.find([], []) == {}


def test_text_from_the_network_is_short_and_visible() -> None:
    assert shown("a\x00b\u202ec") == "a\ufffdb\ufffdc"
    assert len(shown("x" * 10_000)) == MAX_TEXT


@pytest.mark.parametrize("figure", [10**400, float("nan"), float("inf"), -(10**400), "9", True])
def test_figures_that_are_none_end_nothing(figure: Any) -> None:
    model = Model()
    said = status(1, 2, events=figure, load=figure)
    subs = {
        "subscriptions": [{"name": "s", "released": {"x": figure}, "lag_s": figure, "lag_events": figure}]
    }
    for now_s in (1.0, 3.0):
        model.take("status", answered(b1=said, b2=status(2, 1)), "b1", now_s)
        model.take("subs", answered(b1=subs), "b1", now_s)
    assert [row["key"] for row in tables.brokers(model)] == ["b1", "b2"]
    assert tables.facts(model.brokers["b1"])
    assert tables.subscriptions(model, acts=True)
    assert picture.edges(model)
