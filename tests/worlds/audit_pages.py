"""What an audit of an hour of six brokers may find, for looking at its page."""

from __future__ import annotations

from datetime import UTC, datetime
from math import sin
from typing import Any

from postroad.spark.audit import LOSSES
from postroad.spark.report import Findings
from postroad.spark.trace.topology import Place

START_US = int(datetime(2026, 11, 15, 23, 30, tzinfo=UTC).timestamp()) * 1_000_000
STEP_US = 60_000_000
BROKERS = {
    "0000002a": Place(name="berlin", links={"0000002b": 1, "0000002c": 1}),
    "0000002b": Place(name="paris", links={"0000002a": 1, "0000002d": 1}),
    "0000002c": Place(name="warsaw", links={"0000002a": 1, "0000002d": 1}),
    "0000002d": Place(name="new-york-harbour", links={"0000002b": 1, "0000002c": 1, "0000002e": 1}),
    "0000002e": Place(name="tokyo", links={"0000002d": 1}),
    "0000002f": Place(name="tokyo", links={}),  # another one of that name
}


def findings() -> Findings:
    moments = [START_US + at * STEP_US for at in range(60)]
    timeline: list[dict[str, Any]] = [
        {
            "at": at,
            "step_us": STEP_US,
            "deliveries": 6000 + round(2000 * sin(number / 9)),
            "latency_us": [3_000 + 60 * number, 9_000 + 200 * number, 9_000 + (number % 7) * 60_000],
        }
        for number, at in enumerate(moments)
    ]
    none = dict.fromkeys(LOSSES, 0)
    losses = [
        {"at": at, **none, "missing": number % 3, "redelivered": 2}
        for number, at in enumerate(moments[20:30])
    ]
    return Findings(
        summary=[
            _subscription("billing", 120_000, 12, [3_100, 9_876, 1_234_567]),
            _subscription("fraud-detection-of-cards", 98_000, 0, [2_000, 4_000, 8_000]),
            _subscription("warehouse", 33_333, 0, [2_500, 6_000, 91_000]),
        ],
        timeline=timeline,
        losses=losses,
        faults=[
            {
                "kind": "missing",
                "subscriber": "billing",
                "id": "0000002a-0000002a-0193c1d2e3f4-0001",
                "pubend": "0000002a-00000000",
                "tick": START_US + 5_123_456,
                "broker": "0000002b",
                "latency_us": 1_234_567,
            }
        ],
        unseen=[{"broker": "0000002c", "reports": 2, "spans": 0, "seconds": 0.0}],
        places=BROKERS,
        flows={
            ("0000002a", "0000002d"): 120_000,
            ("0000002a", "0000002e"): 33_333,
            ("0000002c", "0000002b"): 98_000,
        },
        storage=[
            ("events", 12, 251_333, 48_123_456),
            ("filters", 240, 9_000, 1_234_567),
            ("topology", 3, 12, 4_321),
        ],
        late_us=5_000_000,
        best_effort=[
            {
                "source": "0000002a",
                "target": "0000002b",
                "sent": 10_000,
                "received": 9_877,
                "lost": 123,
                "loss": 0.0123,
            }
        ],
        repairs=[
            {
                "subscriber": "prices",
                "broker": "0000002b",
                "received": 9_877,
                "detected": 123,
                "requests": 130,
                "recovered": 122,
                "given_up": 1,
                "duplicates": 4,
                "repaired": 122 / 123,
                "slowest_us": 812_345,
            }
        ],
    )


def _subscription(name: str, due: int, missing: int, latency_us: list[int]) -> dict[str, Any]:
    counts = dict.fromkeys(("pending", *LOSSES), 0) | {
        "due": due,
        "delivered": due - missing,
        "missing": missing,
    }
    about = {"subscriber": name, "topic": "orders/#", "where": "price > 100"}
    return {**about, **counts, "latency_us": latency_us, "latency_max_us": 2 * latency_us[-1]}
