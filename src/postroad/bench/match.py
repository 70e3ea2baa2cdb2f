"""`postroad bench match`: one event against 10 thousand, 100 thousand and a million subscriptions.

The workload is a market: orders with seven attributes, and subscribers who watch an instrument in a band
of prices, an account, a desk by the prefix of its name, or a few instruments at one venue: two or three
constraints each, equality, range, prefix and IN mixed. The vocabulary is the same at every size, so a
hundred times the subscriptions match a hundred times as often; `matches_per_event` says how often.
Batches have 100 events. Parsing is not counted as adding: a selector is parsed once, where it enters.
Times are processor time of this process, since a shared machine's wall clock measures its neighbours. Bytes
are what the process grew by, Python objects included; after an earlier size in the same process, memory
freed by that one is used again and the figure is too low.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from postroad.events.batch import BatchBuilder, EventBatch
from postroad.selectors import MatchIndex, Selector
from postroad.wire.frames import DEFAULT_LIMITS

INSTRUMENTS: Final = 50_000
ACCOUNTS: Final = 100_000
DESKS: Final = 20_000
VENUES: Final = 20
BATCH_EVENTS: Final = 100
BATCHES: Final = 100
CHURN: Final = 10_000  # subscriptions removed and added again to time it


def _where(choice: random.Random) -> str:
    kind = choice.random()
    price = choice.randrange(900)
    if kind < 0.4:
        symbol = f"S{choice.randrange(INSTRUMENTS)}"
        return f"symbol = '{symbol}' AND price BETWEEN {price} AND {price + choice.randrange(1, 100)}"
    if kind < 0.6:
        account, quantity = choice.randrange(ACCOUNTS), choice.randrange(10_000)
        return f"account = {account} AND quantity > {quantity} AND buy = {choice.choice(['TRUE', 'FALSE'])}"
    if kind < 0.8:
        desk, venue = choice.randrange(DESKS), choice.randrange(VENUES)
        return f"desk LIKE 'desk-{desk:05d}%' AND venue = 'V{venue}' AND price > {price}"
    if kind < 0.9:
        symbols = ", ".join(f"'S{choice.randrange(INSTRUMENTS)}'" for _ in range(3))
        return f"symbol IN ({symbols}) AND venue = 'V{choice.randrange(VENUES)}'"
    account, symbol = choice.randrange(ACCOUNTS), f"S{choice.randrange(INSTRUMENTS)}"
    return f"(account = {account} OR symbol = '{symbol}') AND price >= {price}.25 AND price < {price + 10}.75"


def selectors(count: int, seed: int = 1) -> Iterator[Selector]:
    choice = random.Random(seed)
    for _ in range(count):
        yield Selector.parse("orders/#", _where(choice))


def batches(count: int = BATCHES, seed: int = 2) -> list[EventBatch]:
    choice = random.Random(seed)
    made = []
    for _ in range(count):
        builder = BatchBuilder()
        for _ in range(BATCH_EVENTS):
            attributes: dict[str, Any] = {
                "account": choice.randrange(ACCOUNTS),
                "buy": choice.random() < 0.5,
                "desk": f"desk-{choice.randrange(DESKS):05d}-{choice.randrange(100)}",
                "price": round(choice.random() * 1000, 2),
                "quantity": choice.randrange(10_000),
                "symbol": f"S{choice.randrange(INSTRUMENTS)}",
                "venue": f"V{choice.randrange(VENUES)}",
            }
            builder.add(bytes(16), f"orders/{choice.randrange(8)}", attributes, bytes(100), DEFAULT_LIMITS)
        made.append(EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS))
    return made


def run(sizes: Sequence[int] = (10_000, 100_000, 1_000_000), rounds: int = 3) -> list[dict[str, Any]]:
    """A row per size; times are medians of the rounds."""
    events = batches()
    return [_measure(size, rounds, events) for size in sizes]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _measure(size: int, rounds: int, events: list[EventBatch]) -> dict[str, Any]:
    gc.collect()
    before = _resident_bytes()
    index = MatchIndex()
    for key, selector in enumerate(selectors(size)):
        index.add(key, selector, key)
        selector.forget()  # as a broker does with the selectors of others
    gc.collect()
    grown = _resident_bytes() - before
    matches = [_match_us(index, events) for _ in range(rounds)]
    churn = [_churn_us(index, size, turn) for turn in range(rounds)]
    wanted = sum(len(group.rows) * len(group.targets) for batch in events for group in index.match(batch))
    return {
        "system": "postroad",
        "workload": f"{size} subscriptions",
        "us_per_event": round(statistics.median(matches), 3),
        "us_per_event_spread": round(max(matches) - min(matches), 3),
        "add_us": round(statistics.median(add for add, _ in churn), 2),
        "remove_us": round(statistics.median(remove for _, remove in churn), 2),
        "bytes_per_subscription": round(grown / size),
        "matches_per_event": round(wanted / (len(events) * BATCH_EVENTS), 3),
    }


def _match_us(index: MatchIndex, events: list[EventBatch]) -> float:
    start = time.process_time()
    for batch in events:
        index.match(batch)
    return (time.process_time() - start) * 1e6 / (len(events) * BATCH_EVENTS)


def _churn_us(index: MatchIndex, size: int, turn: int) -> tuple[float, float]:
    """Microseconds to add and to remove a selector that is parsed already and not in the index."""
    fresh = list(selectors(CHURN, seed=100 + turn))
    start = time.process_time()
    for key, selector in enumerate(fresh, size):
        index.add(key, selector, key)
        selector.forget()  # as a broker does with the selectors of others
    middle = time.process_time()
    for key in range(size, size + CHURN):
        index.remove(key)
    end = time.process_time()
    return (middle - start) * 1e6 / CHURN, (end - middle) * 1e6 / CHURN
