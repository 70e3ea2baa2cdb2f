"""T3, T4: a bit that flips anywhere, or a file that ends early, never makes a trace say that all is known."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.ids import MessageId
from postroad.storage.tracking_store import TrackingStore
from postroad.tracking.attachment_log import change_extents
from postroad.tracking.query.messages import TraceItem, TraceQuestion
from postroad.tracking.record import PREFIX_BYTES, record_extent
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import DAY_US, SECOND_US

ME = 1
LIVES = (("died", 30), ("stopped", 30), ("died", 40), ("", 40))  # how a process ends, after how many seconds


@dataclass(frozen=True)
class Happened:
    id: bytes
    origin: int
    subscribers: frozenset[str]


class World:
    """Some processes of one broker, one after the other, in its folder; and what they had to do with."""

    def __init__(self, folder: Path, configs: list[TrackingConfig], last: str, seed: int = 5) -> None:
        self.folder = folder
        self.config = configs[-1]
        self.happened: list[Happened] = []
        self._chance = random.Random(seed)
        self._count = 0
        pause_s = 20
        # It ends now: files say when they were written.
        self.now_us = time.time_ns() // 1000 - sum(long_s + pause_s for _, long_s in LIVES) * SECOND_US
        for config, (end, long_s) in zip(configs, LIVES, strict=True):
            self._live(config, end or last, long_s)
            self.now_us += pause_s * SECOND_US

    def _live(self, config: TrackingConfig, end: str, long_s: int) -> None:
        store = TrackingStore(self.folder, sync=False)
        tracking = started(store, config, self.now_us)
        tracking.linked(2, self.now_us)
        there: set[str] = set()
        end_us = self.now_us + long_s * SECOND_US
        while self.now_us < end_us:
            self.now_us += SECOND_US // 4
            if not there or self._chance.random() < 0.05:
                who = f"s{self._chance.randrange(5)}"
                if who in there and len(there) > 1:
                    there.discard(who)
                    tracking.detached(who, self.now_us)
                elif who not in there:
                    there.add(who)
                    tracking.attached(who, self.now_us)
            if self._chance.random() < 0.3:
                # What nobody but a process that died had heard of, nobody can miss.
                self._message(tracking, frozenset(there), timely=end_us - self.now_us < 3 * SECOND_US)
            store.apply(tracking.tick(self.now_us))
        if end == "stopped":
            store.apply(tracking.close(self.now_us))

    def _message(self, tracking: Tracking, there: frozenset[str], *, timely: bool) -> None:
        """One in eight is an hour old, or made by a clock that is ahead."""
        self._count += 1
        origin = self._chance.choice((ME, ME, 2, 3))
        # Where retention has dropped what a clock was ahead of, only the log still says so.
        ahead_s = 5 * 3600 if self.config.keep_us > DAY_US else -1800
        away_s = 0 if timely else self._chance.choice([0] * 14 + [-3600, ahead_s])
        identity = bytes(MessageId(9, origin, self.now_us // 1000 + away_s * 1000, self._count))
        if origin == ME:
            tracking.published(identity, self.now_us)
        else:
            tracking.routed(origin, 2, identity, self.now_us)
        tracking.delivered(origin, sorted(there), identity, self.now_us)
        self.happened.append(Happened(identity, origin, there))

    def missing_silently(self, folder: Path) -> list[float]:
        """How many seconds ago messages were made of which a trace would claim to know all, and does not."""
        store = TrackingStore(folder, sync=False)
        tracking = started(store, self.config, self.now_us)
        tracking.check()
        items = tuple(TraceItem(id=one.id, origin=one.origin) for one in self.happened)
        question = TraceQuestion(items=items)
        records: dict[int, bytes] = {}
        while wanted := tracking.answer(question, records)[1]:
            records |= store.read(wanted)
        found: list[float] = []
        for one, finding in zip(self.happened, tracking.answer(question, records)[0].findings, strict=True):
            here = finding.published is not None if one.origin == ME else bool(finding.routed)
            named = {receiver.subscriber for receiver in finding.delivered}
            time_ms = MessageId.from_bytes(one.id).time_ms
            if finding.lost or finding.forgotten or finding.begins_ms > time_ms:
                continue
            if not here or not one.subscribers <= named:
                found.append(self.now_us / SECOND_US - time_ms / 1000)
        return found


def started(store: TrackingStore, config: TrackingConfig, now_us: int) -> Tracking:
    loaded = store.load()
    return make_tracking(config, me=ME, stored=loaded.filters, changes=loaded.changes, now_us=now_us)


def a_config(strategy: str, **more: int) -> TrackingConfig:
    return TrackingConfig(
        **{  # type: ignore[arg-type]
            "strategy": strategy,
            "persist_us": SECOND_US,
            "renew_us": 15 * SECOND_US,
            "least_capacity": 16,
            "log_bytes": 1000,
            **more,
        }
    )


@pytest.fixture(scope="module", params=["bloom", "exact", "kept 60 s"])
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[World]:
    """The last process stopped, or died."""
    strategy, _, kept = request.param.partition(" ")
    more = {"keep_us": 60 * SECOND_US} if kept else {}
    config = a_config("bloom" if kept else strategy, **more)
    return [World(tmp_path_factory.mktemp("w"), [config] * 4, last) for last in ("stopped", "died")]


def places(path: Path) -> list[int]:
    """Where records and changes begin."""
    data = path.read_bytes()
    if path.suffix == ".log":
        return [0, *change_extents(data)[:-1]]
    found, at = [], 0
    while at < len(data):
        found.append(at)
        at += PREFIX_BYTES + sum(record_extent(data[at:]))
    return found


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_damage_anywhere_is_seen(worlds: list[World], data: st.DataObject) -> None:
    world = data.draw(st.sampled_from(worlds))
    with TemporaryDirectory() as folder:
        shutil.copytree(world.folder, folder, dirs_exist_ok=True)
        held = (Path(folder) / "tracking").iterdir()
        paths = sorted(path for path in held if path.name != "spare")  # which has nothing in it
        path = data.draw(st.sampled_from([*paths, Path(folder) / "tracking" / "attachments.log"]))
        content = bytearray(path.read_bytes())
        begins = places(path)
        at = data.draw(st.sampled_from(begins)) + data.draw(st.integers(0, 60))
        at = min(at, len(content) - 1)
        if data.draw(st.booleans()):
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif at not in begins:  # whole records that are gone are not missed
            del content[at:]
        path.write_bytes(content)
        for again in range(2):
            assert world.missing_silently(Path(folder)) == [], (path.name, at, again)


@pytest.mark.parametrize("other", [a_config("bloom"), a_config("exact")], ids=["persist", "strategy"])
def test_the_settings_of_the_process_that_died_count(tmp_path: Path, other: TrackingConfig) -> None:
    """What it had not stored is lost, also to one that would have stored it sooner."""
    world = World(tmp_path, [a_config("bloom", persist_us=10 * SECOND_US)] * 4, "died")
    world.config = other
    assert world.missing_silently(tmp_path) == []
