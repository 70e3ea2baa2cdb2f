"""What tracking costs: the same load with the strategies none, exact and bloom, and what each stores.

CPU and latency at the paper's rate come from real brokers that run all the time and are loaded in turn, for
a short while each, in many rounds: a neighbour on the machine then disturbs all of them alike. What counts is
the difference from `none` within a round, and the median of these. How much of it is noise, `none` again
says, a second broker that is the same: whatever it seems to cost is nothing.

At that rate a broker uses most of its core, and p99 is how long its queue gets by chance: two brokers without
tracking differ by a third. What an event costs depends on how many are handled together, which is chance too.
So the p99 and the CPU that count are measured with all of them side by side, each at a rate that leaves it
time, an event for one, the next for another: what disturbs the machine disturbs all of them in the same
millisecond. p99 is that of all their events. Two processes of the same code differ by a percent or two for as
long as they run, so this is done in several sittings, with new ones in each. How sure the figures are, the
bootstrap says: sittings, and of each some seconds, are drawn again and again, the same for both, and 95% of
the differences so found lie within the interval given.

In rounds, filters are stored so often (PERSIST) that each pays for it; side by side all is by default.

What is stored depends on no machine, so it is counted by running the strategy alone on a virtual clock, for
longer than anybody wants to wait.
"""

from __future__ import annotations

import gzip
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from postroad.bench import workloads
from postroad.bench.processes import Running
from postroad.bench.rounds import Row, summary
from postroad.bench.systems import SYSTEMS, System, serving
from postroad.bench.workloads import Beside
from postroad.ids import IdSource
from postroad.seam.tracking import DropFilters, StoreFilter, TrackingEffect
from postroad.tracking.keys import ENTRY
from postroad.tracking.record import decode_meta
from postroad.tracking.settings import STRATEGIES, TrackingConfig
from postroad.tracking.strategies import make_tracking
from postroad.units import MILLISECOND_US, SECOND_US

HISTORIES: Final = 2  # of one broker: publishers, and subscribers
STORED_S: Final = 100  # virtual
BITS_ROOM: Final = 1.05  # over 1.44 log2(1/fpp), for what a filter does not use and for descriptions
LEAST_SAVING: Final = 10  # times less than the exact log
P99_ROOM_PERCENT: Final = 3.0
CPU_ROOM_PERCENT: Final = 5.0
PERSIST: Final = "1 s"  # a tenth of the default: stored ten times as often
MET, MISSED, NOT_SHOWN = "met", "missed", "not shown: the bound is within the interval"
AGAIN: Final = "none again"
BESIDE_RATE: Final = 400  # events a second for each broker, side by side
BESIDE_LEAST_S: Final = 20.0
BESIDE_TIMES: Final = 12  # as long as the rounds of one strategy: p99 takes that long to tell 3%
SITTINGS: Final = 6
SETTLE_S: Final = 15.0  # of a sitting's load that do not count: until filters have their size
DRAWS: Final = 1000
SECOND_NS: Final = 1_000_000_000
BESIDE_P99: Final = "beside_p99_over_none_percent"
BESIDE_CPU: Final = "beside_cpu_us_per_event_over_none_percent"
BESIDE: Final = (BESIDE_P99, BESIDE_CPU)
DIFFERENCES: Final = ("p50_us", "p99_us", "cpu_us_per_event")
Latencies = npt.NDArray[np.int64]
_STEP_US: Final = MILLISECOND_US
_BEGIN_US: Final = 1_700_000_000 * SECOND_US


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a strategy kept of `messages`, each delivered once."""

    messages: int
    bytes: int  # kept in the end
    gzip_bytes: int  # the same, each record by itself
    written_bytes: int  # with what was replaced since
    forces: int  # turns that wrote something
    full: float  # the share of buffers that were full when they were stored, but for the last of each

    bits_per_key: float  # of what is stored before the end, when every history has a filter still filling


def stored(config: TrackingConfig, *, seconds: float, publishers: int, subscribers: int, rate: int) -> Stored:
    """The strategy alone: everybody publishes in turn, each message goes to one subscriber."""
    now_us = _BEGIN_US
    tracking = make_tracking(config, me=1, stored=(), changes=(), now_us=now_us)
    sources = [IdSource(number + 1, 1) for number in range(publishers)]
    names = [f"subscriber{number}" for number in range(subscribers)]
    for name in names:
        tracking.attached(name, now_us)
    kept: dict[int, bytes] = {}
    messages = written = forces = 0
    full: list[bool] = []

    def keep(effects: Sequence[TrackingEffect]) -> None:
        nonlocal written, forces
        records = [effect for effect in effects if isinstance(effect, StoreFilter)]
        forces += bool(records)
        for effect in effects:
            if isinstance(effect, StoreFilter):
                written += len(effect.record)
                meta = decode_meta(effect.record)
                full.append(meta.count >= (meta.n or config.log_bytes // ENTRY.itemsize))
                kept[effect.sequence] = effect.record
                if effect.replaces is not None:
                    kept.pop(effect.replaces, None)
            elif isinstance(effect, DropFilters):
                for sequence in effect.sequences:
                    kept.pop(sequence, None)

    for step in range(int(seconds * SECOND_US) // _STEP_US):
        now_us += _STEP_US
        due = rate * (step + 1) * _STEP_US // SECOND_US
        ids = [sources[number % publishers].next(now_us // MILLISECOND_US) for number in range(messages, due)]
        if ids:
            tracking.published(b"".join(ids), now_us)
        for number, identity in enumerate(ids, messages):
            tracking.delivered(1, (names[number % subscribers],), identity, now_us)
        messages = due
        keep(tracking.tick(now_us))
    share = sum(full) / len(full) if full else 0.0
    settled = sum(map(len, kept.values()))
    settled_keys = sum(decode_meta(record).count for record in kept.values())
    keep(tracking.close(now_us))
    return Stored(
        messages=messages,
        bytes=sum(map(len, kept.values())),
        gzip_bytes=sum(len(gzip.compress(record, 6)) for record in kept.values()),
        written_bytes=written,
        forces=forces,
        full=share,
        bits_per_key=settled * 8 / settled_keys if settled_keys else 0.0,
    )


def system(options: Sequence[str], settings: str, config: str = "") -> System:
    """Our broker with further options of `postroad up`, and a configuration file."""

    def start(running: Running, folder: Path, brokers: int) -> None:
        (folder / "postroad.toml").write_text(config)
        for number in range(brokers):
            command = [sys.executable, "-m", "postroad", "up", "--name", f"b{number + 1}", "--metrics", "off"]
            command += ["--listen", "127.0.0.1:0", "--data", str(folder / f"data{number + 1}")]
            command += ["--config", str(folder / "postroad.toml"), *options]
            if running.addresses:
                host, port = running.addresses[-1]
                command += ["--link", f"{host}:{port}"]
            running.wait_ready(running.spawn(command, folder))

    return replace(SYSTEMS["postroad"], start=start, settings=settings)


def run(*, rounds: int, seconds: float, tell: Callable[[str], None]) -> list[Row]:
    """A row per strategy, and one more for `none`."""
    names = (STRATEGIES[0], AGAIN, *STRATEGIES[1:])
    often = f'[tracking]\npersist = "{PERSIST}"\n'
    figures: dict[str, list[workloads.Figures]] = {name: [] for name in names}
    with _served(names, often, tell) as served:
        for turn in range(rounds):
            # Who comes first differs from round to round, so that being first is nobody's advantage.
            at = turn % len(served)
            for name, tried, running in served[at:] + served[:at]:
                tell(f"round {turn + 1} of {rounds}: {name}")
                figures[name].append(workloads.latency_at(tried, running, seconds))
    together_s = max(BESIDE_LEAST_S, BESIDE_TIMES * rounds * seconds) / SITTINGS
    sittings: list[list[Beside]] = []
    lost = 0.0
    for sitting in range(SITTINGS):
        with _served(names, "", tell) as served:
            tell(f"side by side, sitting {sitting + 1} of {SITTINGS}, for {SETTLE_S + together_s:g} s")
            systems = {name: tried for name, tried, _ in served}
            taken, missing = workloads.beside(
                systems[names[0]], [running for _, _, running in served], SETTLE_S + together_s, BESIDE_RATE
            )
            sittings.append([_settled(measured) for measured in taken])
            lost += missing
    rows: list[Row] = []
    none, *_ = beside = list(zip(*sittings, strict=True))
    for name, own in zip(names, beside, strict=True):
        tried = systems[name]
        row: Row = {"system": tried.name, "workload": name, **compared(figures[name], figures[names[0]])}
        row |= {**side_by_side(own, none), "beside_lost": lost}
        row |= {"version": tried.version(), "settings": tried.settings, "syncs": tried.syncs}
        if name in STRATEGIES[1:]:
            tell(f"what {name} stores")
            volume = stored(
                TrackingConfig(strategy=name),
                seconds=STORED_S,
                publishers=200,
                subscribers=500,
                rate=workloads.RATE,
            )
            row["stored_bits_per_key"] = volume.bits_per_key
        rows.append(row)
    return rows


@contextmanager
def _served(
    names: Sequence[str], config: str, tell: Callable[[str], None]
) -> Iterator[list[tuple[str, System, Running]]]:
    """A broker for each name, all of them running."""
    settings = f"plain mode, tracking none, exact or bloom, in rounds stored every {PERSIST}"
    with ExitStack() as stack:
        served: list[tuple[str, System, Running]] = []
        for name in names:
            tell(f"starting {name}")
            tried = system(("--tracking", name.split()[0]), settings, config)
            served.append((name, tried, stack.enter_context(serving(tried))))
        yield served


def _settled(taken: Beside) -> Beside:
    late = taken.latencies[:, 0] >= SETTLE_S * SECOND_NS
    return Beside(taken.latencies[late], taken.cpu[int(SETTLE_S) :])


def side_by_side(own: Sequence[Beside], none: Sequence[Beside]) -> Row:
    """Figures of these sittings, and the differences of p99 and of CPU from `none`, with their intervals."""
    chance = np.random.default_rng(1)
    pairs = [(_seconds(ours), _seconds(base)) for ours, base in zip(own, none, strict=True)]
    drawn: list[tuple[float, float]] = []
    for _ in range(DRAWS):
        chosen: list[tuple[Latencies, Latencies]] = []
        ours_s = base_s = 0.0
        for sitting in chance.integers(0, len(own), len(own)).tolist():
            ours, base = pairs[sitting]
            last = min(len(ours), len(base))
            chosen += [(ours[at], base[at]) for at in chance.integers(0, last, last).tolist()]
            cpu = own[sitting].cpu, none[sitting].cpu
            spent = chance.integers(0, len(cpu[0]), len(cpu[0]))
            ours_s, base_s = ours_s + cpu[0][spent].sum(), base_s + cpu[1][spent].sum()
        p99 = [np.percentile(np.concatenate(of), 99) for of in zip(*chosen, strict=True)]
        drawn.append((_over(p99[0], p99[1]), _over(ours_s, base_s)))
    taken, without = (np.concatenate([measured.latencies[:, 1] for measured in of]) for of in (own, none))
    used_s, base_s = (float(sum(measured.cpu.sum() for measured in of)) for of in (own, none))
    row: Row = {
        "beside_p50_us": float(np.percentile(taken, 50)) / 1000,
        "beside_p99_us": float(np.percentile(taken, 99)) / 1000,
        "beside_cpu_us_per_event": used_s * 1e6 / len(taken),
    }
    base_us = float(np.percentile(without, 99)) / 1000
    differences = (_over(row["beside_p99_us"], base_us), _over(used_s, base_s))
    for name, difference, around in zip(BESIDE, differences, zip(*drawn, strict=True), strict=True):
        row[name] = difference
        row[f"{name}_interval"] = [float(bound) for bound in np.percentile(around, (2.5, 97.5))]
    return row


def _seconds(taken: Beside) -> list[Latencies]:
    """How long events took, by the second in which they left."""
    at = taken.latencies[:, 0] // SECOND_NS
    return [taken.latencies[at == second, 1] for second in range(int(at.min()), int(at.max()) + 1)]


def _over(ours: float, base: float) -> float:
    """Percent."""
    return float(ours / base - 1) * 100


def compared(figures: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]]) -> Row:
    """Medians of all rounds, and of the differences from `base` in the same round, with their spreads."""
    row = summary([dict(figure) for figure in figures])
    for name in DIFFERENCES:
        percent = [(figure[name] / none[name] - 1) * 100 for figure, none in zip(figures, base, strict=True)]
        column = f"{name}_over_none_percent"
        row[column] = statistics.median(percent)
        row["spread"][column] = [min(percent), max(percent)]
        quarters = statistics.quantiles(percent, n=4, method="inclusive") if len(percent) > 1 else percent * 3
        row[f"{column}_quartiles"] = [quarters[0], quarters[2]]
    return row


def noise(rows: Sequence[Row]) -> dict[str, str]:
    """What a second broker without tracking seems to cost."""
    row = next(row for row in rows if row["workload"] == AGAIN)
    said: dict[str, str] = {}
    for name in DIFFERENCES:
        low, high = row[f"{name}_over_none_percent_quartiles"]
        middle = row[f"{name}_over_none_percent"]
        said[f"noise of {name}, percent"] = (
            f"{middle:+.1f}, half of the rounds within {low:+.1f} to {high:+.1f}"
        )
    for name in BESIDE:
        low, high = row[f"{name}_interval"]
        said[f"noise of {name}"] = f"{row[name]:+.1f}, 95% within {low:+.1f} to {high:+.1f}"
    return said


def least_bits(config: TrackingConfig) -> float:
    """What a Bloom filter of that false positive rate needs for a key."""
    return math.log2(1 / config.shape.fpp) / math.log(2)


def aims(rows: Sequence[Row]) -> list[tuple[str, float, float, str]]:
    """(aim, measured, bound, whether it is met) for the default strategy."""
    by_name = {row["workload"]: row for row in rows}
    exact, bloom = by_name["exact"], by_name["bloom"]
    saving = exact["stored_bits_per_key"] / bloom["stored_bits_per_key"]
    bound = least_bits(TrackingConfig()) * BITS_ROOM
    kept = bloom["stored_bits_per_key"]
    return [
        ("p99 over none, percent, at most", *_within(bloom, BESIDE_P99, P99_ROOM_PERCENT)),
        ("CPU per event over none, percent, at most", *_within(bloom, BESIDE_CPU, CPU_ROOM_PERCENT)),
        ("stored bits per message and history, at most", kept, bound, _verdict(kept <= bound)),
        ("times less than the exact log, at least", saving, LEAST_SAVING, _verdict(saving >= LEAST_SAVING)),
    ]


def _within(row: Row, name: str, bound: float) -> tuple[float, float, str]:
    """What was measured, the bound, and whether the interval is on one side of it."""
    low, high = row[f"{name}_interval"]
    return row[name], bound, MET if high <= bound else MISSED if low > bound else NOT_SHOWN


def _verdict(holds: bool) -> str:
    return MET if holds else MISSED
