"""How a client's part in repair is put together: what it subscribes to, in which scope, and what it tells."""

from __future__ import annotations

import random

import pytest

from postroad.client.repair.session import Session
from postroad.client.repair.settings import RepairSettings, settings_for
from postroad.errors import UsageError


class Client:
    """Its session, and what that subscribes to."""

    def __init__(self) -> None:
        self.topics: list[str] = []
        self.session = Session(
            draw=random.Random(1).randrange, subscribe=self._subscribe, unsubscribe=lambda _: None
        )

    def _subscribe(self, topic: str, _where: str) -> int:
        self.topics.append(topic)
        return 100 + len(self.topics)


@pytest.mark.parametrize(
    ("topic", "where", "told_apart"),
    [
        ("orders/eu", "kind = 'x'", 1.0),
        ("orders/#", "kind = 'x' AND area IS NOT NULL", 1.0),
        ("orders/#", "", 0.0),  # three bits: one message in 500
        ("orders/#", "kind = 'x' AND price > 5", 0.0),
        ("orders/#", "kind = 'x' OR price > 5", 0.0),
        ("#", "", 0.0),
    ],
)
def test_a_subscription_whose_bits_are_weak_is_told_so(topic: str, where: str, told_apart: float) -> None:
    """Spec, "What reaches 99.9%": more than 1 in 10,000 by mistake."""
    client = Client()
    client.session.repair(1, topic, where, RepairSettings(), 0)
    figures = client.session.figures(1)
    assert figures["told_apart"] == told_apart
    assert (figures["false_match"] <= 1e-4) == bool(told_apart)


def test_all_but_summaries_stay_in_their_scope() -> None:
    """Spec B10."""
    client = Client()
    client.session.choose(settings_for("records", "eu"))
    client.session.repair(1, "orders/#", "kind = 'x'", client.session.settings, 0)
    assert client.topics == [
        "$repair/summary/+",
        "$repair/@eu/for",
        "$repair/@eu/ask/+",
        "$repair/@eu/again",
    ]
    with pytest.raises(UsageError, match="before"):
        client.session.choose(settings_for("records", "us"))
